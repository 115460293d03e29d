"""Which prompts are held out: a hash of the prompt decides, so that corpora agree without knowing of each other.

A row is held out by its system text and first user turn, a document by all of its text. Whatever begins alike stays
together: the same question with another answer, the preference pair about it, a longer version of the conversation. One
SHA-256 per row.
"""

import hashlib
import math

import numpy as np

from snaketune.corpus.rows import TEXT, Message


def split_key(opening: list[Message]) -> str:
    """What the split goes by.

    >>> split_key([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
    'Hi'
    """
    first = opening[0]
    if first["role"] in ("user", TEXT):
        return first["content"]
    first_user = next(turn["content"] for turn in opening if turn["role"] == "user")
    return f"{first['content']}\0{first_user}" if first["role"] == "system" else first_user


def prompt_hash(key: str, seed: int) -> int:
    """The 64-bit number drawn for the prompt `key`; it also stands for the prompt wherever prompts are compared."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:8], "big")


def is_held_out(prompt_hashes: np.ndarray, share: float) -> np.ndarray:
    """Which of the prompts belong to the `share` of all prompts that is held out.

    >>> int(is_held_out(np.array([prompt_hash(str(i), seed=0) for i in range(1000)], np.uint64), share=0.25).sum())
    242
    """
    # Integers against a scaled share: a quotient could round up to 1.0, which no share exceeds.
    limit = math.ceil(share * 2**64)
    return np.full(len(prompt_hashes), True) if limit >= 2**64 else prompt_hashes < np.uint64(limit)
