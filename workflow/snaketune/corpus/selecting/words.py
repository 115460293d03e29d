"""Words of texts, and n-grams of words as 64-bit hashes, for near duplicates and contamination: about 0.4 µs per word.

Words are lower-cased runs of letters, digits and underscores; symbols count as words only where requested. In languages written
without spaces a word is a whole clause, and only longer passages match.
"""

import re
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
from rensa import RMinHash

from snaketune.corpus.rows import Message

WORD = re.compile(r"\w+")
WORD_OR_SYMBOLS = re.compile(r"\w+|[^\w\s]+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)


class TextHashes(NamedTuple):
    """Hashes of texts: those of text `i` are `hashes[offsets[i]:offsets[i + 1]]`."""

    hashes: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def compared_texts(turns: list[Message]) -> list[str]:
    """Return the texts that rows are compared by, without the system text, which is the same in many rows."""
    return [turn["content"] for turn in turns if turn["role"] != "system"]


def split_words(text: str) -> list[str]:
    """Split a text into words.

    >>> split_words("It's 4 o'clock.")
    ['it', 's', '4', 'o', 'clock']
    """
    return WORD.findall(_folded(text))


def _folded(text: str) -> str:
    """A text in lower case, with an accent and its letter as one character, as most texts have them."""
    return (text if text.isascii() else normalize("NFC", text)).lower()


def words_of(texts: list[str], *, symbols: bool = False) -> TextHashes:
    """Return the hash of every word of every text; with `symbols`, runs of symbols are words too."""
    find = (WORD_OR_SYMBOLS if symbols else WORD).findall
    words: list[str] = []
    offsets = [0]
    for text in texts:
        words += find(_folded(text))
        offsets.append(len(words))
    hashes = RMinHash.hash_token_sets([words])[0] if words else []
    return TextHashes(np.array(hashes, np.uint64), np.array(offsets, np.int64))


def windows(words: TextHashes, n: int) -> TextHashes:
    """Return the hash of every `n` consecutive words; of a shorter text, one hash of all its words; of an empty one, none.

    >>> windows(words_of(["a b c d", "a b", "?"]), 3).lengths.tolist()
    [2, 1, 0]
    """
    lengths = words.lengths
    counts = np.where(lengths >= n, lengths - n + 1, lengths > 0)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    # The first word of each window, and the number of its words.
    starts = np.arange(offsets[-1]) + np.repeat(words.offsets[:-1] - offsets[:-1], counts)
    sizes = np.repeat(np.minimum(lengths, n), counts)
    hashes = np.zeros(len(starts), np.uint64)
    for size in np.unique(sizes):
        of_size = np.flatnonzero(sizes == size)
        run = np.full(len(of_size), size, np.uint64)
        for offset in range(size):
            run = run * FACTOR + words.hashes[starts[of_size] + offset]
        hashes[of_size] = mix(run)
    return TextHashes(hashes, offsets)


def mix(numbers: np.ndarray) -> np.ndarray:
    """Scramble each 64-bit number so that every output bit depends on every input bit (SplitMix64; Steele et al., 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
