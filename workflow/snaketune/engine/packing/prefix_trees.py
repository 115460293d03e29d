"""Prefix trees of completions: the tokens that completions of one prompt begin with are stored once.

The completions of a prompt are sorted; each becomes a segment of the tokens that it doesn't share with the one before it.
Prompt ab, with CD over CEF and CD over CE:

    sorted     abCD   abCE   abCEF         segments     [abCD] [E] [F]
    shared        -      3       4         prefixes     0  3 (abC, of segment 0)  4 (abCE, of segment 1)

    ends       chosen 0, rejected 2;  chosen 0, rejected 1

A completion that another one continues is sorted before it, so every completion ends with a segment. Tokens are shared if they
are equal in id and supervision. Pairs whose prompt has no other pair need no sorting and are handled all at a time; prompts
with several pairs cost a loop in Python.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np

from snaketune.engine.packing.packed_units import Units
from snaketune.engine.packing.pair_overflow import CompletionTokens, PlannedPairs, common_tokens
from snaketune.engine.packing.planned_segments import PlannedSegments
from snaketune.engine.packing.ragged import offsets_of

# The tokens of a completion: its sequence, its start there, and how many tokens it has.
TokenRange = tuple[int, int, int]


def build_trees(pairs: PlannedPairs, tokens: CompletionTokens, row_length: int) -> tuple[Units, tuple[int, int, int]]:
    """The trees of all pairs of a split, in the order of their first pairs; none is longer than a row.

    Also returns how many tokens aren't stored again, of prompts and at the beginnings of completions, and the tokens of
    mismatched completions, which are stored in addition to the corpus.
    """
    _, first, group, sizes = np.unique(pairs.prompt_hash, return_index=True, return_inverse=True, return_counts=True)
    # Pairs without a prompt have nothing in common that would make them one tree.
    several = (sizes[group] > 1) & (pairs.prompt > 0)
    together = np.flatnonzero(several)
    together = together[np.argsort(first[group[together]], kind="stable")]
    builder = _TreeBuilder(pairs, tokens, row_length)
    for members in np.split(together, np.flatnonzero(np.diff(group[together])) + 1):
        builder.add(members)
    segments, ends, counts, members = (
        np.concatenate(both) for both in zip(_single_pair_trees(pairs, ~several), builder.columns(), strict=True)
    )
    sequence, start, stop, prefix, prefix_segment = segments.T
    units = Units(
        segments=PlannedSegments(
            sequence=sequence,
            start=start,
            stop=stop,
            prefix=prefix,
            prefix_segment=prefix_segment,
            # The first token of a tree has no token before it to be predicted from.
            supervised=tokens.runs.count(sequence, start + (prefix == 0), stop),
        ),
        offsets=offsets_of(counts[:, 0]),
        pairs=np.column_stack([pairs.sequence[members], ends]),
        pair_offsets=offsets_of(counts[:, 1]),
    )
    first_pairs = members[units.pair_offsets[:-1]]
    prompts = int(pairs.prompt.sum(dtype=np.int64) - pairs.prompt[first_pairs].sum(dtype=np.int64))
    mismatched = int(pairs.second.sum(dtype=np.int64)) if pairs.mismatched else 0
    saved = int(pairs.corpus_tokens.sum(dtype=np.int64) - units.segments.tokens.sum(dtype=np.int64)) + mismatched
    return units.take(np.argsort(first_pairs, kind="stable")), (prompts, saved - prompts, mismatched)


# The columns of Units: int32[K, 5] segments (all columns but `supervised`), int32[P, 2] ends, int64[U, 2] segments and pairs of
# each tree, int64[P] the number of each pair.
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _single_pair_trees(pairs: PlannedPairs, which: np.ndarray) -> Columns:
    """A tree of one or two segments for each of the pairs `which`, bool."""
    one = pairs.take(which)
    shared = one.prompt + one.common
    ends = np.tile(np.array([0, 1], np.int32), (len(one), 1))
    # A second completion that the first one continues comes first.
    swapped = (one.second == one.common) & ~one.equal
    ends[swapped] = [1, 0]
    ends[one.equal] = 0
    zeros = np.zeros(len(one), np.int32)
    first = [one.sequence, zeros, one.prompt + np.where(swapped, one.common, one.first), zeros, zeros]
    second = [
        np.where(swapped, one.sequence, one.second_sequence),
        np.where(swapped, shared, one.second_start + one.common),
        np.where(swapped, one.prompt + one.first, one.second_start + one.second),
        shared,
        shared == 0,
    ]
    both = np.stack([np.stack(first, 1), np.stack(second, 1)], 1).astype(np.int32)
    present = np.stack([np.ones(len(one), bool), ~one.equal], 1)
    counts = np.stack([present.sum(1), np.ones(len(one), np.int64)], 1)
    return both[present], ends, counts, np.flatnonzero(which)


class _TreeBuilder:
    def __init__(self, pairs: PlannedPairs, tokens: CompletionTokens, row_length: int):
        self._pairs, self._tokens, self._row_length = pairs, tokens, row_length
        self._segments: list[tuple[int, ...]] = []
        self._ends: list[tuple[int, int]] = []
        self._counts: list[tuple[int, int]] = []
        self._members: list[int] = []

    def columns(self) -> Columns:
        return (
            np.array(self._segments, np.int32).reshape(-1, 5),
            np.array(self._ends, np.int32).reshape(-1, 2),
            np.array(self._counts, np.int64).reshape(-1, 2),
            np.array(self._members, np.int64),
        )

    def add(self, members: np.ndarray) -> None:
        """Add the pairs `members`, whose prompts have one hash: a tree per prompt, or several if a row can't hold it."""
        names = ("sequence", "prompt", "first", "second_sequence", "second_start", "second")
        columns = (getattr(self._pairs, name)[members].tolist() for name in names)
        by_prompt: dict[bytes, list[tuple[int, TokenRange, TokenRange]]] = {}
        for member, *both in zip(members.tolist(), *columns):
            prompt = self._tokens.ids(both[0], 0, both[1]).tobytes()
            by_prompt.setdefault(prompt, []).append((member, tuple(both[:3]), tuple(both[3:])))
        for own in by_prompt.values():
            keys = [(self._tokens.key(*first), self._tokens.key(*second)) for _, first, second in own]
            sources = {key: range for both, (_, *ranges) in zip(keys, own) for key, range in zip(both, ranges)}
            if not self._add_tree(own, keys, sources):
                _, (_, prompt, _), _ = own[0]
                for tree in _split_tree(keys, self._row_length - prompt):
                    self._add_tree([own[pair] for pair in tree], [keys[pair] for pair in tree], sources)

    def _add_tree(
        self,
        own: list[tuple[int, TokenRange, TokenRange]],
        keys: list[tuple[bytes, bytes]],
        sources: dict[bytes, TokenRange],
    ) -> bool:
        """Add one tree; return False, and add nothing, if a row can't hold it.

        Args:
            own, keys: the number of each pair and the tokens of its completions, and the completions as keys.
            sources: the tokens to copy each completion from.
        """
        _, (sequence, prompt, _), _ = own[0]
        order = _sorted(set(chain(*keys)), main=keys[0][0])
        # The first segment is the first pair's first completion or its beginning, so the prompt directly precedes it.
        segments = [(sequence, 0, prompt + len(order[0]) // 4, 0, 0)]
        for before, key in pairwise(order):
            source, start, tokens = sources[key]
            shared = common_tokens(before, key)
            parent = len(segments) - 1
            # Climb to the segment that holds the last shared token.
            while prompt + shared <= segments[parent][3]:
                parent = segments[parent][4]
            segments.append((source, start + shared, start + tokens, prompt + shared, parent))
        if sum(stop - start for _, start, stop, _, _ in segments) > self._row_length:
            return False
        number = {key: at for at, key in enumerate(order)}
        self._segments += segments
        self._ends += [(number[first], number[second]) for first, second in keys]
        self._counts.append((len(segments), len(keys)))
        self._members += [member for member, _, _ in own]
        return True


def _sorted(keys: set[bytes], main: bytes) -> list[bytes]:
    """Sort completions by tokens, where at every position the token of `main` sorts before all others."""
    main_ids = np.frombuffer(main, np.int32)

    def relative(key: bytes) -> bytes:
        # XOR turns `main` into zeros, and changes nothing about which tokens two completions share.
        own = np.frombuffer(key, np.int32).copy()
        own[: len(main_ids)] ^= main_ids[: len(own)]
        return own.tobytes()

    return sorted(keys, key=relative)


def _split_tree(pairs: list[tuple[bytes, bytes]], space: int) -> Iterator[list[int]]:
    """Split pairs into trees whose completions have at most `space` tokens; pairs that begin alike are neighbours."""
    keys = sorted(set(chain(*pairs)))
    rank = {key: at for at, key in enumerate(keys)}
    ends = [(rank[first], rank[second]) for first, second in pairs]
    present: list[int] = []
    tree: list[int] = []
    used = 0
    for pair in sorted(range(len(ends)), key=ends.__getitem__):
        added = sum(_insert(end, present, keys) for end in ends[pair])
        if tree and used + added > space:
            yield sorted(tree)
            present, tree, used = [], [], 0
            added = sum(_insert(end, present, keys) for end in ends[pair])
        tree.append(pair)
        used += added
    yield sorted(tree)


def _insert(end: int, present: list[int], keys: list[bytes]) -> int:
    """Insert the completion `keys[end]` of sorted keys into a tree (`present`, ascending); return how many tokens it adds."""
    at = bisect_left(present, end)
    if end in present[at : at + 1]:
        return 0
    neighbours = present[max(at - 1, 0) : at + 1]
    present.insert(at, end)
    return len(keys[end]) // 4 - max((common_tokens(keys[near], keys[end]) for near in neighbours), default=0)
