"""The units of packed rows, each as a row of its own: a conversation, or what pairs of one prompt share, and nothing of the
rest of their row.

A row of CD over EF after the prompt ab, and of GH over I, has two units; the second one is two segments, since there is no
prompt that would join its completions:

    a b C D E F G H I .      segments [4, 2, 2, 1]   completions [0, 1, 2, 3]
    a b C D E F              segments [4, 2]         completions [0, 1]
                G H I        segments [2, 1]         completions [0, 1]

So what is computed on a unit depends on its tokens alone, however they were packed. The unit of conversations is a tree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import IGNORED

TOKENS = ("input_ids", "labels")
# Columns of numbers of segments, which count from the first segment of the unit.
NUMBERS = ("prefix_segments", "completions")
SEGMENTS = ("segment_lengths", "prefix_lengths")


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a packed row: the numbers of the row and of the unit in it, its tokens, those of them that are supervised, its
    digest, the ids of its pairs."""

    row: int
    number: int
    tokens: int
    supervised: int
    digest: bytes
    pairs: tuple[str, ...]


def find_units(rows: PackedRows, numbers: Iterable[int], documents: Iterable[dict[str, Any]] = ()) -> list[Unit]:
    """The units of some rows, in order. Args: documents: of pairs, as `packing.reader.documents` yields them."""
    ids: list[list[str]] = [[] for _ in range(len(rows))]
    for document in documents:
        ids[document["row"]].append(document["id"])
    found = []
    for row in numbers:
        pairs = iter(ids[row])
        for number, unit in enumerate(units_of(rows[row])):
            ids_of_unit = tuple(next(pairs) for _ in range(len(unit.get("completions", ())) // 2))
            supervised = unit["labels"] != IGNORED
            # The first token of a unit has none before it that would predict it.
            targets = int(supervised[1:].sum())
            found.append(Unit(row, number, len(supervised), targets, digest_unit(unit), ids_of_unit))
    return found


class UnitRows:
    """Rows of some units, which take as many as fit, in order; they have no padding, and are made when they are read.

    Attributes:
        groups: the units of each row.
    """

    def __init__(self, rows: PackedRows, units: Iterable[Unit]):
        self._rows, self.row_length = rows, rows.row_length
        self.groups: list[list[Unit]] = []
        used = self.row_length
        for unit in units:
            used += unit.tokens
            if used > self.row_length:
                self.groups.append([])
                used = unit.tokens
            self.groups[-1].append(unit)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        units = [units_of(self._rows[unit.row])[unit.number] for unit in self.groups[number]]
        counts = np.cumsum([0, *(len(unit["segment_lengths"]) for unit in units)])
        row = {name: np.concatenate([unit[name] for unit in units]) for name in (*TOKENS, *SEGMENTS)}
        numbers = [name for name in NUMBERS if name in units[0]]
        return row | {name: np.concatenate([unit[name] + n for unit, n in zip(units, counts)]) for name in numbers}


def units_of(row: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """The units of a row, in order, as rows without padding and weights; costs some 30 microseconds.

    >>> names = ("segment_lengths", "prefix_lengths", "prefix_segments", "completions")
    >>> columns = ([4, 2, 2, 1], [0, 2, 0, 0], [0, 0, 2, 3], [0, 1, 2, 3])
    >>> row = {name: np.array(column) for name, column in zip(names, columns)}
    >>> for unit in units_of(row | {"input_ids": np.arange(10), "labels": np.arange(10)}):
    ...     print(*(unit[name].tolist() for name in ("input_ids", "prefix_segments", "completions")))
    [0, 1, 2, 3, 4, 5] [0, 0] [0, 1]
    [6, 7, 8] [0, 1] [0, 1]
    """
    is_root_S, completions_C = row["prefix_lengths"] == 0, row.get("completions", np.empty(0, np.int32))
    roots, tree_S = np.flatnonzero(is_root_S), np.cumsum(is_root_S) - 1
    # The first and last tree of each pair, and of it and those before it (after it).
    trees_P2 = np.sort(tree_S[completions_C].reshape(-1, 2), axis=1)
    last_P = np.maximum.accumulate(trees_P2[:, 1])
    first_P = np.minimum.accumulate(trees_P2[::-1, 0])[::-1]
    # A unit begins with a tree if all pairs are either before it or not: without pairs, with every tree.
    before = np.searchsorted(last_P, np.arange(len(roots)))
    begins = np.append(first_P, len(roots))[before] >= np.arange(len(roots))
    segments = np.append(roots[begins], len(tree_S))
    tokens = np.concatenate([[0], np.cumsum(row["segment_lengths"])])[segments]
    pairs = np.append(before[begins], len(trees_P2))
    units = []
    for n in range(len(segments) - 1):
        segments_of_unit = slice(segments[n], segments[n + 1])
        unit = {name: row[name][tokens[n] : tokens[n + 1]] for name in TOKENS}
        unit |= {name: row[name][segments_of_unit] for name in SEGMENTS}
        if "prefix_segments" in row:
            unit["prefix_segments"] = row["prefix_segments"][segments_of_unit] - segments[n]
        if "completions" in row:
            unit["completions"] = completions_C[2 * pairs[n] : 2 * pairs[n + 1]] - segments[n]
        units.append(unit)
    return units


def digest_unit(unit: dict[str, np.ndarray]) -> bytes:
    """The digest of a unit's tokens, supervision and segments, 16 bytes."""
    content = xxhash.xxh3_128(unit["input_ids"].tobytes())
    content.update((unit["labels"] != IGNORED).tobytes())
    for name in (*SEGMENTS, *(name for name in NUMBERS if name in unit)):
        content.update(unit[name].astype("<i4").tobytes() + b"\0")
    return content.digest()
