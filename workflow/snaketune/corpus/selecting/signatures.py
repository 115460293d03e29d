"""MinHash signatures of texts, and similar pairs of them by locality-sensitive hashing.

The share of equal slots of two signatures estimates the Jaccard similarity of the shingles of two texts (Broder, 1997,
"On the resemblance and containment of documents"), with 128 slots to within 0.04. Texts whose slots agree in a whole band
are candidates (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3), and candidates whose signatures are
similar enough are pairs. Of the pairs just above the threshold, at most one in twenty is missed.

Signatures (512 bytes per text) and band hashes (8 bytes each) are on disk; one band at a time is in memory.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
from rensa import RMinHash

from snaketune.corpus.selecting.duplicates import Groups
from snaketune.corpus.selecting.words import FACTOR, TextHashes, mix, windows
from snaketune.stages.progress import progress

SLOTS = 128
SIGNATURE_BYTES = 4 * SLOTS
SEED = 1
RECALL_AT_THRESHOLD = 0.95
PAIRS_PER_CHECK = 4096
# The band hash of texts without words, which match nothing.
NO_WORDS = np.uint64(0)


def slots_per_band(threshold: float) -> int:
    """Return the most slots per band with which pairs at the threshold are candidates often enough.

    Two texts of similarity s agree in a band of r slots with probability s^r, so in one of b bands with 1 - (1 - s^r)^b.

    >>> slots_per_band(0.8), slots_per_band(0.5), slots_per_band(1.0)
    (7, 3, 128)
    """
    return max(
        slots for slots in range(1, SLOTS + 1) if 1 - (1 - threshold**slots) ** (SLOTS // slots) >= RECALL_AT_THRESHOLD
    )


class Signatures:
    """Append texts inside `with`; find similar pairs afterwards."""

    def __init__(self, folder: Path, *, threshold: float, shingle: int):
        self.folder, self.threshold, self.shingle = folder, threshold, shingle
        self.slots = slots_per_band(threshold)
        self.bands = SLOTS // self.slots

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.open_files = ExitStack()
        self.file = self.open_files.enter_context(self._signatures.open("wb"))
        self.band_files = [self.open_files.enter_context(self._band(i).open("wb")) for i in range(self.bands)]
        return self

    def __exit__(self, *_: object) -> None:
        self.open_files.close()

    def append(self, words: TextHashes) -> None:
        """Write the signatures of the texts of one batch."""
        shingles = windows(words, self.shingle)
        digests = RMinHash.digest_matrix_from_flat_token_hashes(
            shingles.hashes, shingles.offsets.astype(np.uint64), SLOTS, SEED
        )
        signatures = np.array(digests.to_rows(), np.uint32).reshape(-1, SLOTS)
        self.file.write(signatures.tobytes())
        empty = shingles.lengths == 0
        for number, file in enumerate(self.band_files):
            band = np.zeros(len(signatures), np.uint64)
            for slot in range(number * self.slots, (number + 1) * self.slots):
                band = band * FACTOR + signatures[:, slot]
            # The lowest bit is set, so that no band hash equals NO_WORDS.
            band = mix(band) | np.uint64(1)
            band[empty] = NO_WORDS
            file.write(band.tobytes())

    def join_similar(self, groups: Groups, compared: np.ndarray, what: str) -> None:
        """Join the groups of similar texts.

        Within a band, each text is compared to the previous one and to the first of those with the same hash, so that a
        thousand equal texts take two thousand comparisons instead of half a million.

        Args:
            groups: groups of texts, changed in place.
            compared: whether each text is compared.
            what: name of the texts for the progress log.
        """
        for number in progress(range(self.bands), f"comparing {what}", "bands", self.bands):
            for candidates in self._candidates(number, compared):
                for start in range(0, len(candidates), PAIRS_PER_CHECK):
                    pairs = groups.not_joined(candidates[start : start + PAIRS_PER_CHECK])
                    for a, b in pairs[self._similar(pairs)].tolist():
                        groups.join(a, b)

    def _candidates(self, number: int, compared: np.ndarray) -> Iterator[np.ndarray]:
        band = np.fromfile(self._band(number), np.uint64)
        rows = np.flatnonzero(compared & (band != NO_WORDS)).astype(np.uint32)
        band = band[rows]
        order = np.argsort(band, kind="stable").astype(np.uint32)
        band, rows = band[order], rows[order]
        again = np.flatnonzero(band[1:] == band[:-1]) + 1
        if not len(again):
            return
        starts = np.ones(len(band), bool)
        starts[again] = False
        run = np.maximum.accumulate(np.where(starts, np.arange(len(band)), 0))[again]
        yield np.column_stack((rows[run], rows[again]))
        yield np.column_stack((rows[again - 1], rows[again]))[run != again - 1]

    def _similar(self, pairs: np.ndarray) -> np.ndarray:
        rows, inverse = np.unique(pairs, return_inverse=True)
        signatures = np.empty((len(rows), SLOTS), np.uint32)
        # Read one by one: pages of a memory map stay in memory once they are read.
        with self._signatures.open("rb") as file:
            for position, row in enumerate(rows.tolist()):
                data = os.pread(file.fileno(), SIGNATURE_BYTES, row * SIGNATURE_BYTES)
                signatures[position] = np.frombuffer(data, np.uint32)
        left, right = signatures[inverse.reshape(-1, 2)].swapaxes(0, 1)
        return (left == right).mean(axis=1) >= self.threshold

    @property
    def _signatures(self) -> Path:
        return self.folder / "signatures"

    def _band(self, number: int) -> Path:
        return self.folder / f"band-{number}"
