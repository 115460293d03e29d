"""Digests: XXH3-128 for payload files (memory speed), SHA-256 for small structured values."""

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

from snaketune.errors import SnaketuneError


def digest_file(path: Path) -> str:
    """The XXH3-128 digest of a file's content, as `xxh3:<32 hex digits>`."""
    try:
        with path.open("rb") as file:
            return f"xxh3:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"
    except OSError as error:
        raise SnaketuneError(f"{path} can't be read: {error.strerror}") from None


def digest_bytes(content: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"


def digest_json(value: Any) -> str:
    """The SHA-256 digest of a value's canonical JSON, 64 hex digits; the order of keys doesn't matter."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
