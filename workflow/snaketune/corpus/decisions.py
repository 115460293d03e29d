"""The outcome of each valid row: dropped and why, held out, or written how many times.

Steps run in this order: duplicates, near duplicates, split, contamination, caps, weights. A row that one drops is ignored by
the next; except that of equal rows in several sources, the first one that no cap leaves out is taken. Held-out rows are never
contaminated: two corpora may share a test. Takes 6 bytes of memory per row, 60 for each of the rows that are compared at once,
and 2 µs; with near duplicates 40 bytes per row more.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snaketune.corpus.selecting.contamination import contaminated_rows
from snaketune.corpus.selecting.duplicates import first_occurrence, not_first
from snaketune.corpus.selecting.near_duplicates import near_duplicates, split_groups
from snaketune.corpus.selecting.scanned_parts import ScannedParts
from snaketune.corpus.selecting.splits import copies_by_weight, is_held_out, over_cap
from snaketune.stages.specs import CorpusSpec

REASONS = ("", "duplicate", "near_duplicate", "contaminated", "over_cap", "under_weight")


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Arrays with one element per valid row.

    Attributes:
        dropped: uint8, why the row is dropped, as an index into `REASONS`; 0 if it isn't dropped.
        held_out: bool, True if the row is on the held-out side of the split.
        copies: uint8, how many times the row is written; 0 if it is dropped.
        group: the first row of its group of near duplicates; None unless near duplicates are configured.
        contamination_hits: by evaluation, the number of train rows that share an n-gram with it.
    """

    dropped: np.ndarray
    held_out: np.ndarray
    copies: np.ndarray
    group: np.ndarray | None
    contamination_hits: dict[str, int]

    @property
    def by_split(self) -> dict[str, np.ndarray]:
        """By split, how many times each row is written to it, uint8[rows]."""
        return {"train": self.copies * ~self.held_out, "held_out": self.copies * self.held_out}


def decide(parts: ScannedParts, spec: CorpusSpec, *, contamination_record: Path) -> Decisions:
    dropped, held_out = np.zeros(parts.rows, np.uint8), np.zeros(parts.rows, bool)
    for rows, hashes in parts.by_hash("content"):
        dropped[rows[not_first(first_occurrence(hashes))]] = REASONS.index("duplicate")
    group = None
    if near := spec.near_duplicates:
        folders, prompts = [part.folder for part in parts], parts.column("prompt")
        group = near_duplicates(folders, near.threshold, dropped == 0)
        prompts = prompts[split_groups(folders, near.threshold, prompts, group, dropped == 0)]
        if near.drop:
            dropped[not_first(group) & (dropped == 0)] = REASONS.index("near_duplicate")
        held_out = is_held_out(prompts, spec.held_out)
    else:
        for part in parts:
            held_out[part.rows] = is_held_out(part.column("prompt"), spec.held_out)
    contamination_hits: dict[str, int] = {}
    if spec.decontamination:
        contaminated, contamination_hits = contaminated_rows(
            parts,
            parts.format(spec.kind),
            spec.decontamination.ngram,
            own_held_out=0 < spec.held_out < 1,
            remaining=dropped == 0,
            held_out=held_out,
            record=contamination_record,
        )
        dropped[contaminated] = REASONS.index("contaminated")
    copies = _with_caps_and_weights(parts, spec, dropped, held_out)
    dropped[(dropped == 0) & (copies == 0)] = REASONS.index("under_weight")
    return Decisions(
        dropped=dropped, held_out=held_out, copies=copies, group=group, contamination_hits=contamination_hits
    )


def _with_caps_and_weights(
    parts: ScannedParts, spec: CorpusSpec, dropped: np.ndarray, held_out: np.ndarray
) -> np.ndarray:
    """How many times each row is written. Caps change `dropped` and `held_out` in place."""
    caps, weights = [source.max_rows for source in spec.sources], [source.weight for source in spec.sources]
    if not any(caps) and all(weight == 1 for weight in weights):
        return (dropped == 0).astype(np.uint8)
    copies = np.zeros(parts.rows, np.uint8)
    for rows, hashes in parts.by_hash("content"):
        sources = parts.source_numbers(rows)
        dropped[rows], held_out[rows] = _Caps(sources, caps).apply(hashes, dropped[rows], held_out[rows])
        copies[rows] = _copies(sources, weights, hashes, dropped[rows], held_out[rows])
    return copies


@dataclass(frozen=True)
class _Caps:
    """The caps of all sources, for some of the rows: those with higher hashes than the rows before.

    Attributes:
        sources: the slice of the rows that each source has.
        room: how many rows each source may still have, None for any number; changed in place.
    """

    sources: list[slice]
    room: list[int | None]

    def apply(self, hashes: np.ndarray, dropped: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The arrays `dropped` and `held_out` with caps."""
        if not any(room is not None for room in self.room):
            return dropped, held_out
        first = first_occurrence(hashes)
        taken_later = np.zeros(len(hashes), bool)
        for number, rows in enumerate(self.sources):
            again = _copies_of_capped(dropped, first, taken_later, rows)
            dropped[again], held_out[again] = 0, held_out[first[again]]
            room = self.room[number]
            if room is not None:
                remaining = np.flatnonzero(dropped[rows] == 0) + rows.start
                dropped[remaining[over_cap(hashes[remaining], room)]] = REASONS.index("over_cap")
                self.room[number] = max(0, room - len(remaining))
            taken_later[first[again[dropped[again] == 0]]] = True
        return dropped, held_out


def _copies(
    sources: list[slice], weights: list[float], hashes: np.ndarray, dropped: np.ndarray, held_out: np.ndarray
) -> np.ndarray:
    copies = (dropped == 0).astype(np.uint8)
    for rows, weight in zip(sources, weights):
        if weight != 1:
            train = np.flatnonzero((dropped[rows] == 0) & ~held_out[rows]) + rows.start
            copies[train] = copies_by_weight(hashes[train], weight)
    return copies


def _copies_of_capped(dropped: np.ndarray, first: np.ndarray, taken_later: np.ndarray, rows: slice) -> np.ndarray:
    """The rows of a source whose first copy, in an earlier source, was left out by its cap; of equal ones, the first.

    Args:
        first: for each row, its first copy.
        taken_later: by first copy, whether another one was taken instead of it.
    """
    duplicates = np.flatnonzero(dropped[rows] == REASONS.index("duplicate")) + rows.start
    firsts = first[duplicates]
    is_capped = (firsts < rows.start) & (dropped[firsts] == REASONS.index("over_cap")) & ~taken_later[firsts]
    capped = duplicates[is_capped]
    return capped[np.unique(first[capped], return_index=True)[1]]
