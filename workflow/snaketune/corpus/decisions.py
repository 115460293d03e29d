"""What becomes of each sound row, decided by numbers about all of them: dropped and why, held out, or used how often.

In this order: duplicates, near duplicates, split, contamination, caps, weights. A row that one step drops is out of sight
of the next. A held-out row is never contaminated: corpora with prompts in common hold out the same ones, and there is no
harm in a test that two corpora share. Costs some 80 bytes of memory per row at its peak, and 2 µs.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snaketune.corpus.first_pass import Scan, SourceCounts
from snaketune.corpus.selecting.duplicates import first_occurrence, not_first
from snaketune.corpus.selecting.mixing import copies_by_weight, over_cap
from snaketune.corpus.selecting.splits import is_held_out
from snaketune.stages.specs import CorpusSpec

REASONS = ("", "duplicate", "near_duplicate", "contaminated", "over_cap", "under_weight")


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """For each sound row:

    Attributes:
        dropped: why it is dropped, as a place in `REASONS`; 0 if it is kept.
        held_out: whether it is on the side of the split that is held out.
        times: how often it is written; 0 if it is dropped.
        group: the first row of its group of near duplicates, where they are looked for.
        evaluations: train rows that each evaluation hits, where contamination is looked for.
    """

    dropped: np.ndarray
    held_out: np.ndarray
    copies: np.ndarray
    group: np.ndarray | None
    evaluations: dict[str, int]


def decide(spec: CorpusSpec, scan: Scan, sources: list[SourceCounts], *, contamination_record: Path) -> Decisions:
    """All decisions about the rows of a scan.

    Args:
        contamination_record: the file for the hits of what is dropped as contaminated.
    """
    hashes, prompt_hashes = np.frombuffer(scan.hashes, np.uint64), np.frombuffer(scan.prompt_hashes, np.uint64)
    dropped = np.zeros(len(hashes), np.uint8)
    dropped[not_first(first_occurrence(hashes))] = REASONS.index("duplicate")
    group = None
    if scan.near_duplicates:
        group = scan.near_duplicates.groups(dropped == 0)
        prompt_hashes = prompt_hashes[scan.near_duplicates.split_groups(prompt_hashes, group, dropped == 0)]
        if spec.near_duplicates.drop:
            dropped[not_first(group) & (dropped == 0)] = REASONS.index("near_duplicate")
    held_out = is_held_out(prompt_hashes, spec.held_out)
    evaluations: dict[str, int] = {}
    if scan.contamination:
        contaminated, evaluations = scan.contamination.confirm(
            dropped == 0,
            held_out,
            spool=scan.spool,
            hashes=hashes,
            prompt_hashes=prompt_hashes,
            record=contamination_record,
        )
        dropped[contaminated] = REASONS.index("contaminated")
    for source, counts in zip(spec.sources, sources):
        if source.max_rows:
            remaining = np.flatnonzero(dropped[counts.rows] == 0) + counts.rows.start
            dropped[remaining[over_cap(hashes[remaining], source.max_rows)]] = REASONS.index("over_cap")
    copies = (dropped == 0).astype(np.uint8)
    for source, counts in zip(spec.sources, sources):
        if source.weight != 1:
            train = np.flatnonzero((dropped[counts.rows] == 0) & ~held_out[counts.rows]) + counts.rows.start
            copies[train] = copies_by_weight(hashes[train], source.weight)
    dropped[(dropped == 0) & (copies == 0)] = REASONS.index("under_weight")
    return Decisions(dropped=dropped, held_out=held_out, copies=copies, group=group, evaluations=evaluations)
