"""What is placed as one: a piece, or several pairs with one prompt, which then stands in the row once.

a pair alone       [prompt+chosen][rejected]                              prefix lengths [0, P]
K pairs together   [prompt+chosen][rejected][chosen][rejected] ...        prefix lengths [0, P, P, P, ...]
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from snaketune.packing.best_fit import PackingPlan
from snaketune.packing.pieces import Pieces


@dataclass(frozen=True, kw_only=True)
class Units:
    """U runs of pieces that stay together.

    Attributes:
        pieces: all pieces, unit after unit.
        starts: int64[U + 1], where each unit's pieces begin.
        saved: prompt tokens that needn't be written again.
    """

    pieces: Pieces
    starts: np.ndarray
    saved: int = 0

    @property
    def tokens(self) -> np.ndarray:
        return _sums(self.pieces.tokens, self.starts)

    @property
    def supervised(self) -> np.ndarray:
        return _sums(self.pieces.supervised, self.starts)

    def expanded(self, plan: PackingPlan) -> PackingPlan:
        """A plan of units as a plan of their pieces."""
        sizes = np.diff(self.starts)
        if len(sizes) == len(self.pieces):
            return plan
        ordered = sizes[plan.order]
        ends = np.concatenate([[0], np.cumsum(ordered)])
        order = np.repeat(self.starts[plan.order] - ends[:-1], ordered) + np.arange(len(self.pieces))
        return replace(plan, order=order, starts=ends[plan.starts])


def singles(pieces: Pieces) -> Units:
    """Every piece by itself."""
    return Units(pieces=pieces, starts=np.arange(len(pieces) + 1))


def shared_prompts(pieces: Pieces, index: Iterable[pa.RecordBatch], row_length: int) -> Units:
    """Pairs of one prompt together, as many as fit into a row, in their order.

    Args:
        index: what `tokenize` wrote of the split, for the hashes of the prompts' ids.
    """
    hashes = np.concatenate([batch.column("prompt_hash").to_numpy() for batch in index] or [np.empty(0, np.uint64)])
    hashes = hashes[pieces.sequence]
    _, first, group, sizes = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    # Groups in the order of their first pairs, so that pairs with a prompt of their own stay where they are.
    order = np.lexsort((np.arange(len(pieces)), first[group]))
    pieces, sizes = pieces.take(order), sizes[group][order]
    tokens, prefix = pieces.tokens, pieces.prefix
    opens = np.ones(len(pieces), bool)
    hashes = hashes[order]
    used = 0
    # Only pairs whose prompt comes again cost a loop.
    for at in np.flatnonzero(sizes > 1).tolist():
        same = at > 0 and hashes[at] == hashes[at - 1] and prefix[at] == prefix[at - 1] > 0
        if same and used + tokens[at] - prefix[at] <= row_length:
            opens[at] = False
            used += int(tokens[at] - prefix[at])
        else:
            used = int(tokens[at])
    start = np.where(opens, pieces.start, prefix).astype(np.int32)
    return Units(
        pieces=replace(pieces, start=start),
        starts=np.append(np.flatnonzero(opens), len(pieces)),
        saved=int(prefix[~opens].sum(dtype=np.int64)),
    )


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int32[U]: the sums of runs of `values`, none of them empty."""
    if len(starts) == len(values) + 1:
        return values
    return np.add.reduceat(values, starts[:-1]).astype(np.int32)
