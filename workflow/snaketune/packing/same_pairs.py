"""A digest of the pairs that lie in rows, whatever rows they lie in: by which a log-probability that was computed on other rows
of the same pairs is known to be the same.

It is over every pair's split, id, and the tokens and supervision of both completions with their prompt, as a model sees them
(what was truncated is another pair). Order, row lengths and what pairs share in a row don't count. A copy that the weight of a
source made has an id of its own, so it is a pair of its own.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from snaketune.packing.reader import views_of
from snaketune.packing.segments import layout_of
from snaketune.packing.shards import IGNORED, SPLITS
from snaketune.tables import read_table

COLUMNS = ("segment_lengths", "prefix_lengths", "prefix_segments", "completions")
ROWS_AT_ONCE = 256


def digest_pairs(shards: Iterable[Path], documents: Path) -> str:
    """32 hex digits; some 25 microseconds per completion of 400 tokens, and 100 bytes of memory per pair.

    Args:
        shards: of all splits, in order of name.
        documents: which pair is where.
    """
    shards, table = list(shards), read_table(documents).select(["split", "id"])
    found: set[bytes] = set()
    for split in SPLITS:
        ids = iter(table.filter(np.array(table["split"]) == split)["id"].to_pylist())
        of_split = (path for path in shards if path.name.startswith(f"{split}-"))
        for completions in _completions(of_split):
            for chosen, rejected in zip(completions[::2], completions[1::2]):
                pair = xxhash.xxh3_128(f"{split}\0{next(ids)}\0".encode())
                pair.update(chosen)
                pair.update(rejected)
                found.add(pair.digest())
    return xxhash.xxh3_128(b"".join(sorted(found))).hexdigest()


def _completions(shards: Iterable[Path]) -> Iterator[list[bytes]]:
    """Of some rows at a time, what each of their completions is to a model."""
    for path in shards:
        for batch in read_table(path).to_batches(ROWS_AT_ONCE):
            seen = views_of(batch, COLUMNS)
            yield list(_in_rows([_row(seen, number) for number in range(len(batch))]))


def _row(seen: dict[str, Any], number: int) -> dict[str, np.ndarray]:
    lists = {name: seen[name][1][slice(*seen[name][0][number : number + 2])] for name in COLUMNS}
    return {"input_ids": seen["input_ids"][number], "labels": seen["labels"][number]} | lists


def _in_rows(rows: list[dict[str, np.ndarray]]) -> Iterator[bytes]:
    placed = layout_of(rows)
    ids_T, labels_T = (np.concatenate([row[name] for row in rows]) for name in ("input_ids", "labels"))
    for segment in placed.completions:
        tokens = placed.sequence_tokens(segment, np.arange(placed.sequence_lengths[segment]))
        content = xxhash.xxh3_128(ids_T[tokens].tobytes())
        content.update((labels_T[tokens] != IGNORED).tobytes())
        yield content.digest()
