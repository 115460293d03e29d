"""Trees of completions: what those of one prompt begin with stands once.

The completions of a prompt, sorted, are walked from one to the next; each becomes a piece that holds what it doesn't share
with the one before it. Prompt ab, with CD over CEF and CD over CE:

    sorted     abCD   abCE   abCEF         pieces       [abCD] [E] [F]
    shared        -      3       4         prefixes     0  3 (abC, of piece 0)  4 (abCE, of piece 1)

    ends       chosen 0, rejected 2;  chosen 0, rejected 1

A completion that another one goes on from comes before it, so every completion ends where a piece does. What agrees in tokens
and supervision is shared. A pair whose prompt is its alone needs no sorting, and is done with all others like it at once;
prompts with several pairs cost a loop.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from snaketune.packing.completion_tokens import Spelling, common_tokens
from snaketune.packing.conversation_overflow import Pieces
from snaketune.packing.packing_units import Completions, Units
from snaketune.packing.pair_overflow import Pairs
from snaketune.tokenization.ragged import offsets_of

# A completion: the sequence that it is of, where it begins there, and its tokens.
Place = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Tokens that needn't be written again, of prompts, and of what completions begin with; and those that are written besides
    what the corpus has: completions under the prompts of others."""

    prompts: int = 0
    answers: int = 0
    mismatched: int = 0


def trees_of(pairs: Pairs, spelling: Spelling, row_length: int) -> tuple[Units, Shared]:
    """The trees of all pairs of a split, in the order of their first pairs; none is longer than a row."""
    _, first, group, sizes = np.unique(pairs.prompt_hash, return_index=True, return_inverse=True, return_counts=True)
    # Where there is no prompt, nothing says that completions belong together.
    several = (sizes[group] > 1) & (pairs.prompt > 0)
    alone, together = np.flatnonzero(~several), np.flatnonzero(several)
    together = together[np.argsort(first[group[together]], kind="stable")]
    ends = np.flatnonzero(np.append(np.diff(group[together]) != 0, True)[: len(together)]) + 1
    forest = _Forest(pairs, spelling, row_length)
    for members in np.split(together, ends[:-1]) if len(together) else ():
        forest.grow(members)
    pieces, completions, counts, members = (
        np.concatenate(both) for both in zip(_of_lone_pairs(pairs, alone), forest.columns(), strict=True)
    )
    sequence, start, stop = pieces[:, :3].T
    # Nothing comes before the first token of all, so nothing predicts it.
    supervised = spelling.runs.count(sequence, start + (pieces[:, 3] == 0), stop)
    units = Units(
        pieces=Pieces(
            **dict(zip(("sequence", "start", "stop", "prefix", "prefix_segment"), pieces.T)), supervised=supervised
        ),
        starts=offsets_of(counts[:, 0]),
        completions=Completions(sequence=pairs.sequence[members], ends=completions),
        pair_starts=offsets_of(counts[:, 1]),
    )
    opens = members[units.pair_starts[:-1]]
    prompts = int(pairs.prompt.sum(dtype=np.int64) - pairs.prompt[opens].sum(dtype=np.int64))
    mismatched = int(pairs.second.sum(dtype=np.int64)) if pairs.mismatched else 0
    saved = int(pairs.read.sum(dtype=np.int64) - units.pieces.tokens.sum(dtype=np.int64)) + mismatched
    shared = Shared(prompts=prompts, answers=saved - prompts, mismatched=mismatched)
    return units.take(np.argsort(opens, kind="stable")), shared


# What makes Units: int32[K, 5] pieces (all their columns but `supervised`), int32[P, 2] ends, int64[U, 2] pieces and pairs of
# each tree, int64[P] which pairs.
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _of_lone_pairs(pairs: Pairs, which: np.ndarray) -> Columns:
    """A tree for each of these pairs: one piece, or two."""
    one = pairs.take(which)
    shared = one.prompt + one.common
    ends = np.tile(np.array([0, 1], np.int32), (len(which), 1))
    # Where the second completion is the beginning of the first, it comes first.
    turned = (one.second == one.common) & ~one.equal
    ends[turned] = [1, 0]
    ends[one.equal] = 0
    none, last = np.zeros(len(which), np.int32), (shared == 0).astype(np.int32)
    first = [one.sequence, none, one.prompt + np.where(turned, one.common, one.first), none, none]
    second = [
        np.where(turned, one.sequence, one.second_sequence),
        np.where(turned, shared, one.second_start + one.common),
        np.where(turned, one.prompt + one.first, one.second_start + one.second),
        shared,
        last,
    ]
    both = np.stack([np.stack(first, 1), np.stack(second, 1)], 1).astype(np.int32)
    there = np.stack([np.ones(len(which), bool), ~one.equal], 1)
    counts = np.stack([there.sum(1), np.ones(len(which), np.int64)], 1)
    return both[there], ends, counts, which


class _Forest:
    """Trees of prompts that have several pairs."""

    def __init__(self, pairs: Pairs, spelling: Spelling, row_length: int):
        self._pairs, self._spelling, self._row_length = pairs, spelling, row_length
        self._pieces: list[tuple[int, ...]] = []
        self._ends: list[tuple[int, int]] = []
        self._counts: list[tuple[int, int]] = []
        self._members: list[int] = []

    def columns(self) -> Columns:
        return (
            np.array(self._pieces, np.int32).reshape(-1, 5),
            np.array(self._ends, np.int32).reshape(-1, 2),
            np.array(self._counts, np.int64).reshape(-1, 2),
            np.array(self._members, np.int64),
        )

    def grow(self, members: np.ndarray) -> None:
        """One tree of these pairs, whose prompts have the same hash; or several, where a row doesn't hold it."""
        by_prompt: dict[bytes, list[int]] = {}
        for member, sequence, prompt in zip(members.tolist(), *self._lists(members, "sequence", "prompt")):
            by_prompt.setdefault(self._spelling.ids(sequence, 0, prompt).tobytes(), []).append(member)
        for own in by_prompt.values():
            self._grow(np.array(own))

    def _grow(self, members: np.ndarray) -> None:
        firsts = list(zip(*self._lists(members, "sequence", "prompt", "first")))
        seconds = list(zip(*self._lists(members, "second_sequence", "second_start", "second")))
        spelled = [
            (self._spelling.completion(*first), self._spelling.completion(*second))
            for first, second in zip(firsts, seconds)
        ]
        where = {key: place for keys, places in zip(spelled, zip(firsts, seconds)) for key, place in zip(keys, places)}
        if not self._add(members, spelled, firsts, where):
            for tree in _parted(spelled, self._row_length - firsts[0][1]):
                self._add(members[tree], [spelled[pair] for pair in tree], [firsts[pair] for pair in tree], where)

    def _add(
        self,
        members: np.ndarray,
        spelled: list[tuple[bytes, bytes]],
        firsts: list[Place],
        where: dict[bytes, Place],
    ) -> bool:
        """One tree; False, and nothing is added, if a row doesn't hold it.

        Args:
            spelled, firsts: of each pair, its completions, and where the first of them is.
            where: where to copy each completion from.
        """
        sequence, prompt, _ = firsts[0]
        keys = _sorted({key for pair in spelled for key in pair}, main=spelled[0][0])
        # What comes first is all of the first pair's first completion, or its beginning, so the prompt is right before it.
        pieces = [(sequence, 0, prompt + len(keys[0]) // 4, 0, 0)]
        for before, key in pairwise(keys):
            own, start, tokens = where[key]
            shared = common_tokens(before, key)
            parent = len(pieces) - 1
            # Up to the piece that holds the last shared token.
            while prompt + shared <= pieces[parent][3]:
                parent = pieces[parent][4]
            pieces.append((own, start + shared, start + tokens, prompt + shared, parent))
        if sum(stop - start for _, start, stop, _, _ in pieces) > self._row_length:
            return False
        number = {key: at for at, key in enumerate(keys)}
        self._pieces += pieces
        self._ends += [(number[first], number[second]) for first, second in spelled]
        self._counts.append((len(pieces), len(spelled)))
        self._members += members.tolist()
        return True

    def _lists(self, members: np.ndarray, *names: str) -> list[list[int]]:
        return [getattr(self._pairs, name)[members].tolist() for name in names]


def _sorted(keys: Iterable[bytes], main: bytes) -> list[bytes]:
    """Sorted by tokens, where those of `main` come before all others in their place."""
    along = np.frombuffer(main, np.int32)

    def turned(key: bytes) -> bytes:
        # Two differ in as many places as before, and `main` is all zeros.
        own = np.frombuffer(key, np.int32).copy()
        own[: len(along)] ^= along[: len(own)]
        return own.tobytes()

    return sorted(keys, key=turned)


def _parted(spelled: list[tuple[bytes, bytes]], room: int) -> Iterator[list[int]]:
    """Pairs in trees whose completions have at most `room` tokens; those that begin alike come one after the other."""
    keys = sorted({key for pair in spelled for key in pair})
    rank = {key: at for at, key in enumerate(keys)}
    ends = [(rank[first], rank[second]) for first, second in spelled]
    present: list[int] = []
    tree: list[int] = []
    used = 0
    for pair in sorted(range(len(ends)), key=lambda pair: ends[pair]):
        added = sum(_insert(end, present, keys) for end in ends[pair])
        if tree and used + added > room:
            yield sorted(tree)
            present, tree, used = [], [], 0
            added = sum(_insert(end, present, keys) for end in ends[pair])
        tree.append(pair)
        used += added
    yield sorted(tree)


def _insert(end: int, present: list[int], keys: list[bytes]) -> int:
    """Put a completion among those that a tree has; how many tokens that adds to it.

    Args:
        end: its number among `keys`, which are sorted.
        present: the numbers of those that the tree has, rising.
    """
    at = bisect_left(present, end)
    if at < len(present) and present[at] == end:
        return 0
    beside = [present[near] for near in (at - 1, at) if 0 <= near < len(present)]
    present.insert(at, end)
    return len(keys[end]) // 4 - max((common_tokens(keys[near], keys[end]) for near in beside), default=0)
