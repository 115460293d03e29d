"""Digests of values: XXH3-128 of a file's content, SHA-256 of small structured values."""

import hashlib
import json
from typing import Any

import xxhash


def digest_bytes(content: bytes) -> str:
    """Return the digest of a file with this content, as `digest_file` does."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"


def digest_json(value: Any) -> str:
    """Return the SHA-256 digest of a value's canonical JSON, 64 hex digits; the order of keys doesn't matter."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
