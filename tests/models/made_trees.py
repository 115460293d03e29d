"""Rows whose segments form trees, and their completions written out as sequences of their own."""

from typing import Any

import numpy as np

from snaketune.packing.shards import IGNORED

# Segment lengths, prefix lengths, prefix segments, completions, prompt lengths by segment (0: no new prompt), free tokens.
TREES = (
    # Two pairs of one prompt of 6: a common beginning of 4, a third level, and a completion that stands in two pairs.
    ([15, 5, 7], [0, 10, 8], [0, 0, 1], [0, 1, 2, 0], [6, 0, 0], 5),
    # A pair of equal completions; a completion that another goes on after; one that begins anew right after the prompt.
    ([9, 11, 6, 4], [0, 0, 11, 5], [0, 1, 1, 1], [0, 0, 2, 1, 1, 3], [4, 5, 0, 0], 2),
    # Four levels, and a sibling at each of them.
    ([12, 4, 4, 3, 5, 2], [0, 8, 10, 13, 10, 15], [0, 0, 1, 2, 1, 3], [3, 4, 5, 0, 2, 1], [7, 0, 0, 0, 0, 0], 0),
)


def tree_rows(vocabulary: int, seed: int = 0, first_id: int = 8) -> list[dict[str, Any]]:
    """As `PackedRows` gives them, of preferences."""
    generator = np.random.default_rng(seed)
    rows = []
    for lengths, prefixes, prefix_segments, completions, prompts, free in TREES:
        ids = generator.integers(first_id, vocabulary, sum(lengths) + free).astype(np.int32)
        labels = np.where(generator.random(len(ids)) < 0.8, ids, IGNORED).astype(np.int32)
        labels[sum(lengths) :] = IGNORED
        for start, prompt, length, prefix in zip(np.cumsum([0, *lengths]), prompts, lengths, prefixes):
            labels[start : start + prompt] = IGNORED
            if prefix:
                # Where a path goes on, so that places which predict several tokens occur.
                labels[start] = ids[start]
                labels[start + length - 1] = ids[start + length - 1]
        names = ("segment_lengths", "prefix_lengths", "prefix_segments", "completions")
        columns = (lengths, prefixes, prefix_segments, completions)
        rows.append(
            {"input_ids": ids, "labels": labels}
            | {name: np.array(column, np.int32) for name, column in zip(names, columns)}
        )
    return rows


def completions_alone(rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Of each completion of each row, its ids and labels from the prompt on, followed up the tree by hand."""
    return [
        (row["input_ids"][places].tolist(), row["labels"][places].tolist())
        for row in rows
        for places in (_path(row, segment) for segment in row["completions"].tolist())
    ]


def _path(row: dict[str, Any], segment: int) -> list[int]:
    start, length = int(row["segment_lengths"][:segment].sum()), int(row["segment_lengths"][segment])
    prefix = int(row["prefix_lengths"][segment])
    above = _path(row, int(row["prefix_segments"][segment])) if prefix else []
    return [*above[:prefix], *range(start, start + length)]
