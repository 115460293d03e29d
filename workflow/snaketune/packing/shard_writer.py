"""Writing of the shards of one part of a plan, for the `write` stage.

The tokens of a row are spread over the parts of the tokenized corpus. They are copied out of the mapped files, and the mapped
pages are released after every SLICES_BEFORE_RELEASE slices, so that memory stays below a gigabyte whatever the size of the
corpus. One batch of rows is in memory at a time. Shards that a killed attempt had finished are reused.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.engine.packing.planned_segments import COLUMNS, PlannedSegments
from snaketune.engine.packing.ragged import offsets_of
from snaketune.engine.packing.row_builder import RowBuilder
from snaketune.engine.packing.shards import (
    RAW_FORMAT_VERSION,
    SPLITS,
    TOKENS_PER_BATCH,
    TOKENS_PER_SHARD,
    WEIGHTED_VERSION,
    list_columns,
    schema,
)
from snaketune.errors import SnaketuneError
from snaketune.files import sync
from snaketune.progress import progress
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import WriteSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import TokenParts

RAW_ROWS_PER_BATCH = 1024


class Shard(NamedTuple):
    """Rows `first` to `last` (excluded) of a split, all of `length` tokens."""

    name: str
    split: str
    length: int
    first: int
    last: int


def build(
    spec: WriteSpec, work: WorkFolder, *, plan: Artifact, tokens: list[Artifact], corpus: list[Artifact]
) -> Outcome:
    """Write this part's shards to `work.payload`; `tokens` are in order, `corpus` is only given for raw rows."""
    plan, *inputs = (artifact.for_part(spec.part) for artifact in (plan, *tokens, *corpus))
    tokens, corpus = inputs[: len(tokens)], inputs[len(tokens) :]
    shards = list(_shards(plan))
    part_shards = shards[len(shards) * (spec.part - 1) // spec.parts : len(shards) * spec.part // spec.parts]
    packed = plan.manifest["format_version"] != RAW_FORMAT_VERSION
    parts = TokenParts(tokens)
    # One split at a time is in memory.
    rows_of = lru_cache(1)(lambda split: PlannedRows(plan, split))
    builder_of = lru_cache(1)(lambda split: RowBuilder(rows_of(split), parts, split))
    finished = work.state / "shards"
    finished.mkdir(parents=True, exist_ok=True)
    for shard in progress(part_shards, "writing", "shards", len(part_shards)):
        path = finished / shard.name
        if not path.exists():
            partial = path.with_suffix(".partial")
            if packed:
                _write_packed(builder_of(shard.split), plan.manifest, shard, partial)
            else:
                _write_raw(rows_of(shard.split), corpus[0], shard, partial)
            # Only a complete shard gets its name, even if the machine loses power.
            sync(partial)
            partial.rename(path)
    for shard in part_shards:
        (finished / shard.name).rename(work.payload / shard.name)
    return Outcome(counts={"shards": len(part_shards), "rows": sum(s.last - s.first for s in part_shards)})


def _shards(plan: Artifact) -> Iterator[Shard]:
    """Yield all shards of a plan: rows of one length, some 300 MB each."""
    for split in SPLITS:
        lengths = read_table(plan.file(f"{split}-rows.arrow"))["length"].to_numpy()
        number = 0
        columns = np.unique(lengths, return_index=True, return_counts=True)
        for length, first, rows in zip(*(column.tolist() for column in columns)):
            step = max(1, TOKENS_PER_SHARD // length)
            for start in range(first, first + rows, step):
                yield Shard(f"{split}-{number:05d}.arrow", split, length, start, min(start + step, first + rows))
                number += 1


def _write_packed(builder: RowBuilder, manifest: dict[str, Any], shard: Shard, path: Path) -> None:
    """Write a shard of packed rows; `manifest`: of the plan."""
    step = max(1, TOKENS_PER_BATCH // shard.length)
    lists = list_columns(manifest["kind"], manifest["format_version"])
    weighted = manifest["format_version"] == WEIGHTED_VERSION
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema(shard.length, lists, weighted)) as writer:
        for first in range(shard.first, shard.last, step):
            last, trees = min(first + step, shard.last), "prefix_segments" in lists
            writer.write_batch(builder.batch(first, last, shard.length, manifest["padding_id"], trees))


def _write_raw(rows: "PlannedRows", corpus: Artifact, shard: Shard, path: Path) -> None:
    """Write a shard of unchanged corpus rows (format v2.0), which TRL's trainer tokenizes."""
    table = read_split(corpus, shard.split)
    for chunk in table.column("messages").chunks:
        name = next(
            (field for field in ("supervised", "weight") if chunk.type.value_type.get_field_index(field) >= 0), None
        )
        if name and not pc.all(pc.equal(chunk.flatten().field(name).cast(pa.float32()), 1)).as_py():
            raise SnaketuneError(
                "packing.strategy: none: some turns have another weight than 1, and TRL's trainer would learn them as all "
                "others; set packing.strategy to best-fit-decreasing, or remove the weights from the source"
            )
    segments, _ = rows.segments(shard.first, shard.last)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        for start in range(0, len(segments), RAW_ROWS_PER_BATCH):
            writer.write_table(table.take(segments.sequence[start : start + RAW_ROWS_PER_BATCH]))


class PlannedRows:
    """The plan of a split, as the `plan` stage wrote it."""

    def __init__(self, plan: Artifact, split: str):
        rows = read_table(plan.file(f"{split}-rows.arrow"))
        names = ("pieces",) if plan.manifest["kind"] == "sft" else ("pieces", "pairs")
        self._tables = {name: read_table(plan.file(f"{split}-{name}.arrow")) for name in names}
        self._offsets = {name: offsets_of(rows[name].to_numpy()) for name in names}

    def _slice(self, name: str, first: int, last: int) -> tuple[pa.Table, np.ndarray]:
        offsets = self._offsets[name][first : last + 1]
        return self._tables[name].slice(int(offsets[0]), int(offsets[-1] - offsets[0])), offsets - offsets[0]

    def segments(self, first: int, last: int) -> tuple[PlannedSegments, np.ndarray]:
        """The segments of rows `first` to `last` (excluded), and the offsets of these rows in them."""
        table, offsets = self._slice("pieces", first, last)
        return PlannedSegments(**{name: table[name].to_numpy() for name in COLUMNS}), offsets

    def completions(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The segments that the rows' completions end with, and the offsets of the rows; None for conversations."""
        if "pairs" not in self._tables:
            return None
        table, offsets = self._slice("pairs", first, last)
        return np.stack([table[name].to_numpy() for name in ("chosen", "rejected")], 1).reshape(-1), 2 * offsets
