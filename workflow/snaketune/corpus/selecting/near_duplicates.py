"""Groups of near duplicates among rows: similar pairs of texts, by MinHash signatures and locality-sensitive hashing.

The share of equal slots of two signatures estimates the Jaccard similarity of the shingles of two texts (Broder, 1997,
"On the resemblance and containment of documents"), with 128 slots to within 0.04. Texts whose slots agree in a whole band
are candidates (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3). Of the pairs just above the threshold, at
most one in twenty is missed. Signatures (512 bytes per text) and band hashes are on disk; one band at a time is in memory.

The texts of a row are compared as one, including the tools that it offers; rows with other template variables never are
similar. Brackets, operators and digits count, because some rows differ in nothing else: exercises in logic, code, arithmetic.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash
from rensa import RMinHash

from snaketune.corpus.rows import TEXT, Row
from snaketune.corpus.selecting.duplicates import Groups, first_occurrence, not_first
from snaketune.corpus.selecting.words import FACTOR, TextHashes, compared_texts, mix, windows, words_of
from snaketune.progress import progress

SLOTS = 128
SIGNATURE_BYTES = 4 * SLOTS
SEED = 1
RECALL_AT_THRESHOLD = 0.95
PAIRS_PER_CHECK = 4096
# The band hash of texts without words, which match nothing.
NO_WORDS = np.uint64(0)
COMPARED = TEXTS, PROMPTS = "texts", "prompts"
SIGNATURES = "signatures"


def slots_per_band(threshold: float) -> int:
    """Return the most slots per band with which pairs at the threshold are candidates often enough.

    Two texts of similarity s agree in a band of r slots with probability s^r, so in one of b bands with 1 - (1 - s^r)^b.

    >>> slots_per_band(0.8), slots_per_band(0.5), slots_per_band(1.0)
    (7, 3, 128)
    """
    return max(
        slots for slots in range(1, SLOTS + 1) if 1 - (1 - threshold**slots) ** (SLOTS // slots) >= RECALL_AT_THRESHOLD
    )


class TextWriter(ExitStack):
    """Appends the signatures of texts to files, inside `with`."""

    def __init__(self, folder: Path, *, threshold: float, shingle: int):
        super().__init__()
        self.shingle, self.slots = shingle, slots_per_band(threshold)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / SIGNATURES, *(folder / f"band-{number}" for number in range(SLOTS // self.slots))]
        self.files = [self.enter_context(path.open("wb")) for path in paths]

    def append(self, words: TextHashes) -> None:
        shingles = windows(words, self.shingle)
        digests = RMinHash.digest_matrix_from_flat_token_hashes(
            shingles.hashes, shingles.offsets.astype(np.uint64), SLOTS, SEED
        )
        signatures = np.array(digests.to_rows(), np.uint32).reshape(-1, SLOTS)
        file, *band_files = self.files
        file.write(signatures.tobytes())
        for number, file in enumerate(band_files):
            band = np.zeros(len(signatures), np.uint64)
            for slot in range(number * self.slots, (number + 1) * self.slots):
                band = band * FACTOR + signatures[:, slot]
            # The lowest bit is set, so that no band hash equals NO_WORDS.
            band = mix(band) | np.uint64(1)
            band[shingles.lengths == 0] = NO_WORDS
            file.write(band.tobytes())


class SignatureWriter(ExitStack):
    """Appends the signatures of rows and of their prompts, inside `with`."""

    def __init__(self, folder: Path, threshold: float, shingle: int):
        super().__init__()
        self.texts, self.prompts = (
            self.enter_context(TextWriter(folder / name, threshold=threshold, shingle=shingle)) for name in COMPARED
        )

    def append(self, rows: list[Row]) -> None:
        texts = [[*compared_texts(row.turns), *([row.tools] if row.tools else ())] for row in rows]
        first = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
        words = words_of([text for row in texts for text in row], symbols=True)
        # Rows with other template variables share no word.
        salts = [
            xxhash.xxh3_64_intdigest(row.template_variables.encode()) if row.template_variables else 0 for row in rows
        ]
        salted = words.hashes ^ np.repeat(np.array(salts, np.uint64), np.diff(words.offsets[first]))
        self.texts.append(TextHashes(salted, words.offsets[first]))
        prompts = (next(turn for turn in row.opening if turn["role"] in ("user", TEXT)) for row in rows)
        self.prompts.append(words_of([turn["content"] for turn in prompts], symbols=True))


class Signatures:
    """The signatures of the texts of all parts."""

    def __init__(self, folders: list[Path], threshold: float):
        self.threshold, self.folders = threshold, folders
        self.bands = [f"band-{number}" for number in range(SLOTS // slots_per_band(threshold))]
        sizes = [(folder / SIGNATURES).stat().st_size // SIGNATURE_BYTES for folder in folders]
        self.first = np.array([0, *accumulate(sizes)])

    def join_similar(self, groups: Groups, compared: np.ndarray, what: str) -> None:
        """Join the groups of similar texts.

        Within a band, each text is compared to the previous one and to the first of those with the same hash, so that a
        thousand equal texts take two thousand comparisons instead of half a million.

        Args:
            groups: groups of texts, changed in place.
            compared: whether each text is compared.
            what: name of the texts for the progress log.
        """
        for name in progress(self.bands, f"comparing {what}", "bands", len(self.bands)):
            band = np.concatenate([np.fromfile(folder / name, np.uint64) for folder in self.folders])
            for candidates in _candidates(band, compared):
                for start in range(0, len(candidates), PAIRS_PER_CHECK):
                    pairs = groups.not_joined(candidates[start : start + PAIRS_PER_CHECK])
                    for a, b in pairs[self._similar(pairs)].tolist():
                        groups.join(a, b)

    def _similar(self, pairs: np.ndarray) -> np.ndarray:
        rows, inverse = np.unique(pairs, return_inverse=True)
        signatures = np.empty((len(rows), SLOTS), np.uint32)
        ends = np.searchsorted(rows, self.first)
        # Read one by one: pages of a memory map stay in memory once they are read.
        for folder, first, start, end in zip(self.folders, self.first.tolist(), ends, ends[1:]):
            with (folder / SIGNATURES).open("rb") as file:
                for position, row in enumerate(rows[start:end].tolist(), start):
                    data = os.pread(file.fileno(), SIGNATURE_BYTES, (row - first) * SIGNATURE_BYTES)
                    signatures[position] = np.frombuffer(data, np.uint32)
        left, right = signatures[inverse.reshape(-1, 2)].swapaxes(0, 1)
        return (left == right).mean(axis=1) >= self.threshold


def _candidates(band: np.ndarray, compared: np.ndarray) -> Iterator[np.ndarray]:
    rows = np.flatnonzero(compared & (band != NO_WORDS)).astype(np.uint32)
    band = band[rows]
    order = np.argsort(band, kind="stable").astype(np.uint32)
    band, rows = band[order], rows[order]
    again = np.flatnonzero(band[1:] == band[:-1]) + 1
    # The first of the texts with the same hash.
    run = np.searchsorted(band, band[again])
    yield np.column_stack((rows[run], rows[again]))
    yield np.column_stack((rows[again - 1], rows[again]))[run != again - 1]


def near_duplicates(folders: list[Path], threshold: float, compared: np.ndarray) -> np.ndarray:
    """For each row, the first row of its group: compared rows that are similar, or linked by similar rows."""
    groups = Groups(np.arange(len(compared)))
    Signatures([folder / TEXTS for folder in folders], threshold).join_similar(groups, compared, "rows")
    return groups.first()


def split_groups(
    folders: list[Path], threshold: float, prompt_hashes: np.ndarray, group: np.ndarray, compared: np.ndarray
) -> np.ndarray:
    """For each row, the first of all rows that must be on the same side of the split.

    These are rows with the same or a similar prompt, near duplicates, and rows linked by them.
    """
    same_prompt = first_occurrence(prompt_hashes)
    groups = Groups(same_prompt)
    for row in progress(np.flatnonzero(not_first(group)).tolist(), "joining near duplicates", "rows"):
        groups.join(row, int(group[row]))
    prompts = Signatures([folder / PROMPTS for folder in folders], threshold)
    prompts.join_similar(groups, compared & ~not_first(same_prompt), "prompts")
    return groups.first()
