"""Which rows are held out, by a hash of the prompt; and how many of the others are used, and how many times, by their hash.

Corpora with the same prompts hold out the same ones, without reading each other. Rows that begin alike are on one side: their
prompt is system text and first user turn; of a document, all of its text. A higher cap keeps the rows of a lower one, and a
larger weight those of a smaller one.
"""

import hashlib
import math

import numpy as np

from snaketune.corpus.rows import TEXT, Message
from snaketune.corpus.selecting.words import mix

# Independent of the hash that caps use; else a weight would select among rows that a cap has selected already.
WEIGHT_SALT = np.uint64(0x5851F42D4C957F2D)


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


def over_cap(hashes: np.ndarray, max_rows: int) -> np.ndarray:
    """Return the indices of the rows over the cap: all but those with the smallest hashes.

    >>> over_cap(np.array([5, 3, 9], np.uint64), 2).tolist()
    [2]
    """
    return np.sort(np.argsort(hashes, kind="stable")[max_rows:])


def copies_by_weight(hashes: np.ndarray, weight: float) -> np.ndarray:
    """Return the copies of each row: the integer part of the weight, and one more for the share of rows in its fraction.

    >>> copies_by_weight(np.arange(1000, dtype=np.uint64), 2.5).mean().round(1)
    np.float64(2.5)
    """
    integer = math.floor(weight)
    limit = np.uint64((weight - integer) * 2**64)
    return (integer + (mix(hashes ^ WEIGHT_SALT) < limit)).astype(np.uint8)
