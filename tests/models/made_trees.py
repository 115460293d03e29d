"""Rows whose segments form trees, and their completions as separate sequences."""

from typing import Any

import numpy as np

from snaketune.engine.packing.shards import IGNORED

# Segment lengths, prefix lengths, prefix segments, completions, prompt lengths by segment (0: no new prompt), padding.
TREES = (
    # Two pairs of one prompt of 6: a common prefix of 4, a third level, and a completion that is in two pairs.
    ([15, 5, 7], [0, 10, 8], [0, 0, 1], [0, 1, 2, 0], [6, 0, 0], 5),
    # A pair of equal completions; a completion that another one extends; one that branches right after the prompt.
    ([9, 11, 6, 4], [0, 0, 11, 5], [0, 1, 1, 1], [0, 0, 2, 1, 1, 3], [4, 5, 0, 0], 2),
    # Four levels, and a sibling at each of them.
    ([12, 4, 4, 3, 5, 2], [0, 8, 10, 13, 10, 15], [0, 0, 1, 2, 1, 3], [3, 4, 5, 0, 2, 1], [7, 0, 0, 0, 0, 0], 0),
)


def tree_rows(vocabulary: int, seed: int = 0, first_id: int = 8) -> list[dict[str, Any]]:
    """Return rows of preferences in the format of `PackedRows`."""
    generator = np.random.default_rng(seed)
    rows = []
    for lengths, prefixes, prefix_segments, completions, prompts, padding in TREES:
        ids = generator.integers(first_id, vocabulary, sum(lengths) + padding).astype(np.int32)
        labels = np.where(generator.random(len(ids)) < 0.8, ids, IGNORED).astype(np.int32)
        labels[sum(lengths) :] = IGNORED
        for start, prompt, length, prefix in zip(np.cumsum([0, *lengths]), prompts, lengths, prefixes):
            labels[start : start + prompt] = IGNORED
            if prefix:
                # Supervised where segments branch, so that some positions predict several tokens.
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
    """Return ids and labels of each completion of each row, prompt included, from an independent walk up the tree."""
    return [
        (row["input_ids"][positions].tolist(), row["labels"][positions].tolist())
        for row in rows
        for positions in (_path(row, segment) for segment in row["completions"].tolist())
    ]


def _path(row: dict[str, Any], segment: int) -> list[int]:
    start, length = int(row["segment_lengths"][:segment].sum()), int(row["segment_lengths"][segment])
    prefix = int(row["prefix_lengths"][segment])
    parent = _path(row, int(row["prefix_segments"][segment])) if prefix else []
    return [*parent[:prefix], *range(start, start + length)]
