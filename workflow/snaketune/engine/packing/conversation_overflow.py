"""Conversations fitted to the row length: whole, or, if longer than a row, as the overflow policy says; or wrapped.

Each becomes one segment of a row, or several where it is split or a tree (`tokenization.encode_rows`), of which the first has
no prefix. Only trees and those longer than a row cost a loop in Python.
"""

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter

import numpy as np
import pyarrow as pa

from snaketune.engine.packing.best_fit import small_int
from snaketune.engine.packing.packed_units import ConversationUnits
from snaketune.engine.packing.planned_segments import COLUMNS, PlannedSegments, SupervisedRuns
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.truncation import DropCounts
from snaketune.errors import SnaketuneError

# A row of `PlannedSegments`.
Segment = tuple[int, ...]


def columns_of(settings: PackingSettings) -> list[str]:
    """The columns of the token index that `fit_conversations` reads."""
    # TRL would encode such text as control tokens.
    more = ["control_text"] if settings.strategy == "none" else []
    return ["id", "length", "supervised", "supervised_runs", "turn_ends", "branches", *more]


def fit_conversations(
    settings: PackingSettings, row_length: int, tables: Iterable[pa.Table], drops: DropCounts
) -> ConversationUnits:
    """The units of all conversations of a split, and count in `drops` what isn't packed whole.

    Args:
        tables: its token index, `columns_of` it.
    Raises:
        SnaketuneError: a conversation longer than a row, and `overflow` is `raise`.
    """
    whole, cut = [np.zeros((2, 0), small_int(row_length))], array("i")
    for tokens, supervised, others in fit_tables(settings, row_length, tables, drops):
        whole.append(np.stack([tokens, supervised]).astype(small_int(row_length)))
        cut.extend(chain.from_iterable(others))
    whole = np.concatenate(whole, axis=1)
    columns = np.frombuffer(cut, np.int32).reshape(-1, len(COLUMNS)).T
    segments = PlannedSegments(**{name: column.copy() for name, column in zip(COLUMNS, columns, strict=True)})
    return ConversationUnits.of(*whole, segments)


def fit_tables(
    settings: PackingSettings, row_length: int, tables: Iterable[pa.Table], drops: DropCounts
) -> Iterator[tuple[np.ndarray, np.ndarray, list[Segment]]]:
    """Yield, by table, the tokens and supervised tokens of all conversations, 0 if they aren't one whole segment, and the
    segments of the others, by conversation."""
    first = 0
    for table in tables:
        is_whole, others = _fit(settings, row_length, table, first, drops)
        tokens, supervised = (table[name].to_numpy() * is_whole for name in ("length", "supervised"))
        yield tokens, supervised, sorted(others, key=itemgetter(0))
        first += len(table)


def _fit(
    settings: PackingSettings, row_length: int, index: pa.Table, first: int, drops: DropCounts
) -> tuple[np.ndarray, list[Segment]]:
    """Which conversations of a part of the index are packed whole as one segment, and the segments of the others; `first` is
    the number of its first conversation."""
    length, supervised = index["length"].to_numpy(), index["supervised"].to_numpy()
    remaining = np.ones(len(index), bool)

    def drop(which: np.ndarray, reason: str) -> None:
        which = which & remaining
        drops.drop(reason, int(which.sum()), int(length[which].sum()))
        remaining[which] = False

    if settings.strategy == "none":
        drop(index["control_text"].to_numpy(), "control_token_in_text")
    drop(length == 0, "refused_by_template")
    drop(supervised == 0, "nothing_supervised")
    too_long = remaining & (length > row_length)
    is_tree = np.concatenate([too_long[:0], *(np.diff(some.offsets) > 0 for some in index["branches"].chunks)])
    if settings.strategy == "none":
        # TRL renders the rows itself.
        is_tree[:] = False
    if settings.strategy == "wrapped" and is_tree.any():
        raise SnaketuneError(
            f"conversation {index['id'][int(is_tree.argmax())]} is a tree, since its chat template rewrites earlier turns, "
            "or an answer begins with blanks that the tokenizer joins to the prompt's end; rows of packing.strategy: wrapped "
            "can't hold trees; set corpora.NAME.reasoning to last or all, or use best-fit-decreasing"
        )
    cut: list[Segment] = []
    if settings.strategy != "wrapped" and too_long.any():
        if settings.overflow == "raise":
            at = int(too_long.argmax())
            raise SnaketuneError(
                f"conversation {index['id'][at]} has {length[at]} tokens, packing.length is {row_length}; raise the length, "
                "or set packing.overflow to drop, truncate or split"
            )
        if settings.overflow == "drop":
            drop(too_long, "longer_than_row")
        else:
            remaining &= ~too_long
            for row in _rows(index, np.flatnonzero(too_long), first):
                # The turns of a tree after a cut would need all tokens before it again, so trees aren't split.
                fit = _split if settings.overflow == "split" and not row.branches else _truncated
                cut += fit(row, row_length, drops)
    for row in _rows(index, np.flatnonzero(remaining & is_tree), first):
        cut += row.tree(row.length)
    return remaining & ~is_tree, cut


class _Long:
    """A conversation that is longer than a row, or a tree."""

    def __init__(self, number: int, length: int, turn_ends: list[int], runs: list[int], branches: list[int]):
        self.number, self.length, self.turn_ends, self.runs = number, length, turn_ends, runs
        self.branches = list(zip(branches[::3], branches[1::3], branches[2::3]))

    def turn_end(self, start: int, stop: int) -> int:
        """The last end of a turn in (start, stop], of a supervised turn if there is one; 0 if no turn ends there.

        A supervised turn is preferred so that questions stay with their answers.
        """
        ends = [end for end in self.turn_ends if start < end <= stop]
        answers = set(self.runs[1::2])
        return ([end for end in ends if end in answers] or ends or [0])[-1]

    def supervised(self, start: int, stop: int, prefix: int = 0) -> int:
        """The supervised tokens in [start, stop) as a segment: without a prefix, its first token has no token to be
        predicted from."""
        start += prefix == 0
        return sum(max(0, min(b, stop) - max(a, start)) for a, b in zip(self.runs[::2], self.runs[1::2]))

    def tree(self, trunk: int) -> list[Segment]:
        """The segments of a tree whose trunk is cut to its first `trunk` tokens, without branches of what is cut off.

        Segments are numbered from 0 in each part of the tree that shares no token with the others.
        """
        ends = [start for start, _, _ in self.branches] + [self.length]
        # For each segment that is kept: its start, end, prefix, and parent; and its number in its part.
        nodes = {0: (0, min(trunk, ends[0]), 0, 0)}
        for number, (start, prefix, parent) in enumerate(self.branches, 1):
            if not prefix:
                nodes[number] = start, ends[number], 0, number
            elif parent in nodes and prefix <= nodes[parent][2] + nodes[parent][1] - nodes[parent][0]:
                nodes[number] = start, ends[number], prefix, parent
        root_of: dict[int, int] = {}
        for number, (_, _, prefix, parent) in nodes.items():
            root_of[number] = root_of[parent] if prefix else number
        segments: list[Segment] = []
        for root in sorted(set(root_of.values())):
            own = [number for number in nodes if root_of[number] == root]
            for number in own:
                start, stop, prefix, parent = nodes[number]
                supervised = self.supervised(start, stop, prefix)
                segments.append((self.number, start, stop, prefix, own.index(parent), supervised))
        return segments


def _rows(index: pa.Table, which: np.ndarray, first: int) -> Iterator[_Long]:
    """Yield these rows of a part of the index; `first` is the number of its first conversation."""
    some = index.select(["length", "turn_ends", "supervised_runs", "branches"]).take(pa.array(which))
    columns = (column.to_pylist() for column in some.columns)
    return (_Long(*row) for row in zip((which + first).tolist(), *columns, strict=True))


def _truncated(row: _Long, row_length: int, drops: DropCounts) -> list[Segment]:
    """Cut after the last turn that ends within a row; if nothing before is supervised, at the row's end. The trunk of a tree is
    cut before the first turn with which the tree has more tokens than a row."""
    if row.branches:
        # The trunk goes up to where a turn branches off.
        trees = (row.tree(trunk) for trunk in sorted({prefix for _, prefix, _ in row.branches}, reverse=True))
        kept = next((tree for tree in trees if _tokens(tree) <= row_length), [])
    else:
        stop = row.turn_end(0, row_length)
        kept = row.tree(stop if row.supervised(0, stop) else row_length)
    if not sum(segment[-1] for segment in kept):
        drops.drop("nothing_supervised_in_a_row", 1, row.length)
        return []
    drops.truncated_rows += 1
    drops.truncated_tokens += row.length - _tokens(kept)
    return kept


def _tokens(segments: list[Segment]) -> int:
    return sum(stop - start for _, start, stop, *_ in segments)


def _split(row: _Long, row_length: int, drops: DropCounts) -> list[Segment]:
    """Split into parts of at most a row, dropping the parts in which nothing is supervised."""
    start, parts = 0, []
    while start < row.length:
        stop = row.length
        if stop - start > row_length:
            stop = row.turn_end(start, start + row_length) or start + row_length
        if supervised := row.supervised(start, stop):
            parts.append((row.number, start, stop, 0, 0, supervised))
        else:
            drops.drop("nothing_supervised_in_a_piece", 0, stop - start)
        start = stop
    drops.split_rows += bool(parts)
    drops.split_pieces += len(parts)
    if not parts:
        drops.dropped_rows["nothing_supervised_in_a_piece"] += 1
    return parts


def wrap(
    whole: PlannedSegments, runs: SupervisedRuns, row_length: int, drops: DropCounts
) -> tuple[PlannedSegments, np.ndarray]:
    """Fill rows as in pre-training: all sequences concatenated, and cut at every row's end, so that all but the last are full;
    return the segments, and the offsets of the rows in them.

    The rest of a cut sequence is a segment of its own, which doesn't attend to the tokens before the cut.
    """
    ends = np.cumsum(whole.tokens, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    begins = ends - whole.tokens
    cuts = np.union1d(begins, np.arange(0, total, row_length))
    of = np.searchsorted(begins, cuts, side="right") - 1
    sequence, start = whole.sequence[of], cuts - begins[of]
    stop = np.append(cuts[1:], total)[: len(cuts)] - begins[of]
    # The first token after a cut has no token to be predicted from.
    segments = PlannedSegments.without_prefix(sequence, start, stop, runs.count(sequence, start + 1, stop))
    parts = np.bincount(of, minlength=1)
    drops.split_rows += int((parts > 1).sum())
    drops.split_pieces += int(parts[parts > 1].sum())
    rows = -(-total // row_length)
    offsets = np.searchsorted(cuts // row_length, np.arange(rows + 1))
    return segments, offsets
