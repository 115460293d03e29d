"""Conversations whose earlier turns a chat template rewrites: every assistant turn as it is generated.

Qwen3 and its like write the reasoning of the last turn only. So the model sees another text when it generates turn 1 than when
it generates turn 2:

    view 1     Q1 <think>t1</think> A1                     turn 1 as it is generated
    view 2     Q1 A1 Q2 <think>t2</think> A2               turn 2

A view is the conversation up to a turn, as the template writes it, in which only that turn is supervised. Views are merged into
a tree, in which tokens that they begin with are stored and computed once:

    trunk      Q1 A1 Q2 <think>t2</think> A2
    branch       ` <think>t1</think> A1                    after the tokens of Q1

Losses and gradients are those of the views as samples of their own, at a cost that grows with the conversation rather than with
its square. Or the supervised turns are spliced into one sequence, in which turn 2 follows a turn 1 with reasoning: what peers
train, and what the model doesn't see when it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A branch: its first token in the sequence, how many tokens of its parent's sequence it continues, and the parent's number.
# Segment 0 is the trunk, segment i the i-th branch.
BRANCH_FIELDS = 3


@dataclass(frozen=True)
class View:
    """A conversation up to an assistant turn: its ids, int32[n], and bool[n], the tokens of that turn, or their weights."""

    ids: np.ndarray
    supervised: np.ndarray

    @property
    def end(self) -> int:
        """The end of the turn, in tokens; 0 if the template writes nothing of it.

        >>> View(np.array([1, 7, 2]), np.array([False, True, False])).end
        2
        """
        return int(np.append(0, np.flatnonzero(self.supervised) + 1)[-1])


def merge_views(views: Sequence[View]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tree of a conversation's views, given in the order of their turns; the last one is the trunk.

    Returns:
        The tokens of the trunk and of the branches, int32[n]; bool or float32[n]; the branches, int32[b, 3] of BRANCH_FIELDS.

    >>> views = [([1, 7, 2], [0, 1, 1]), ([1, 2, 3, 8, 2], [0, 0, 0, 1, 1])]
    >>> ids, supervised, branches = merge_views([View(np.array(own), np.array(mask, bool)) for own, mask in views])
    >>> ids.tolist(), branches.tolist()
    ([1, 2, 3, 8, 2, 7, 2], [[5, 1, 0]])
    >>> supervised.astype(int).tolist()
    [0, 0, 0, 1, 1, 1, 1]
    """
    parts: list[np.ndarray] = []
    # For each segment, the indices in the sequence of all tokens from the root to the segment's end.
    paths: list[np.ndarray] = []
    branches: list[tuple[int, int, int]] = []
    supervised: list[tuple[np.ndarray, np.ndarray]] = []
    total = 0
    for number, view in enumerate(reversed(views)):
        # What follows a turn in its view is written by the next turn, too, or never.
        ids = view.ids if number == 0 else view.ids[: view.end]
        shared, parent = max(
            ((_common(ids, np.concatenate(parts)[path]), -at) for at, path in enumerate(paths)), default=(0, 0)
        )
        path = np.append(paths[-parent][:shared] if paths else [], np.arange(total, total + len(ids) - shared))
        path = path.astype(np.int64)
        if shared < len(ids):
            if paths:
                branches.append((total, shared, -parent))
            parts.append(ids[shared:])
            paths.append(path)
            total += len(ids) - shared
        tokens = np.flatnonzero(view.supervised[: len(ids)])
        supervised.append((path[tokens], view.supervised[tokens]))
    mask = np.zeros(total, np.result_type(*(view.supervised for view in views)))
    for tokens, weights in supervised:
        mask[tokens] = weights
    return np.concatenate(parts), mask, np.array(branches, np.int32).reshape(-1, BRANCH_FIELDS)


def splice_views(views: Sequence[View], continues: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return one sequence with every supervised turn as it is generated: ids, bool[n], and the ends of these turns.

    Args:
        continues: for each view, the first token after the turn of the view before, 0 for the first view.
    """
    ids, supervised, ends = [], [], []
    total = 0
    for number, (view, start) in enumerate(zip(views, continues, strict=True), 1):
        end = len(view.ids) if number == len(views) else view.end
        ids.append(view.ids[start:end])
        supervised.append(view.supervised[start:end])
        ends.append(total + view.end - start)
        total += end - start
    return np.concatenate(ids), np.concatenate(supervised), np.array(ends, np.int64)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading tokens that two sequences share."""
    length = min(len(one), len(other))
    return int(np.append(one[:length] != other[:length], True).argmax())
