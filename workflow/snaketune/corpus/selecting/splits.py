"""The split by prompt: a hash of the prompt decides what is held out, so that corpora agree without reading each other.

The prompt of a row is its system text and first user turn; of a document, all of its text. So rows that begin alike are on
one side: the same question with another answer, a preference pair about it, a longer version of the conversation. Takes one
SHA-256 per row.
"""

import hashlib
import math

import numpy as np

from snaketune.corpus.rows import TEXT, Message


def split_key(opening: list[Message]) -> str:
    """Return the text that the split is decided by.

    >>> split_key([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    'Hi'
    """
    first = opening[0]
    if first["role"] in ("user", TEXT):
        return first["content"]
    first_user = next(turn["content"] for turn in opening if turn["role"] == "user")
    return f"{first['content']}\0{first_user}" if first["role"] == "system" else first_user


def prompt_hash(key: str, seed: int) -> int:
    """Return the 64-bit hash of a prompt `key`, which decides the split and also identifies the prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:8], "big")


def is_held_out(prompt_hashes: np.ndarray, share: float) -> np.ndarray:
    """Return True for the prompts that belong to the held-out `share` of all prompts.

    >>> int(is_held_out(np.array([prompt_hash(str(i), seed=0) for i in range(1000)], np.uint64), share=0.25).sum())
    242
    """
    # Integers are compared with a scaled share: a quotient could round up to 1.0, which no share exceeds.
    limit = math.ceil(share * 2**64)
    return np.full(len(prompt_hashes), True) if limit >= 2**64 else prompt_hashes < np.uint64(limit)
