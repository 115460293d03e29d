"""Writing of the shards of one part of a plan, for the `write` stage.

One batch of rows is in memory at a time. Shards that a killed attempt had finished are reused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.packing.sequences import PlannedRows, RowBuilder
from snaketune.packing.shards import (
    RAW_FORMAT_VERSION,
    SPLITS,
    TOKENS_PER_BATCH,
    TOKENS_PER_SHARD,
    schema,
    shard_name,
)
from snaketune.stages.cache.work_folders import WorkFolder, sync
from snaketune.stages.outcome import Outcome
from snaketune.stages.progress import progress
from snaketune.stages.specs import WriteSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import TokenParts

RAW_ROWS_PER_BATCH = 1024


class Shard(NamedTuple):
    """Rows `first` to `last` (excluded) of a split, all of `length` tokens."""

    split: str
    number: int
    length: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


def write_shards(
    spec: WriteSpec, work: WorkFolder, *, plan: Artifact, tokens: list[Artifact], corpus: list[Artifact]
) -> Outcome:
    """Write this part's shards to `work.payload`.

    Args:
        tokens: the parts of the tokenized corpus, in order.
        corpus: the corpus itself for raw rows; else empty.
    Raises:
        SnaketuneError: a damaged input.
    """
    plan, *inputs = (artifact.for_part(spec.part) for artifact in (plan, *tokens, *corpus))
    tokens, corpus = inputs[: len(tokens)], inputs[len(tokens) :]
    shards = list(_shards(plan))
    own = shards[len(shards) * (spec.part - 1) // spec.parts : len(shards) * spec.part // spec.parts]
    packed = plan.manifest["format_version"] != RAW_FORMAT_VERSION
    writer = _PackedShards(plan, TokenParts(tokens)) if packed else _RawShards(plan, corpus[0])
    finished = work.state / "shards"
    finished.mkdir(parents=True, exist_ok=True)
    for shard in progress(own, "writing", "shards", len(own)):
        path = finished / shard.name
        if not path.exists():
            partial = path.with_suffix(".partial")
            writer.write(shard, partial)
            # Only a complete shard gets its name, even if the machine loses power.
            sync(partial)
            partial.rename(path)
    for shard in own:
        (finished / shard.name).rename(work.payload / shard.name)
    return Outcome(counts={"shards": len(own), "rows": sum(s.last - s.first for s in own)})


def _shards(plan: Artifact) -> Iterator[Shard]:
    """Yield all shards of a plan: rows of one length, some 300 MB each."""
    for split in SPLITS:
        lengths = read_table(plan.file(f"{split}-rows.arrow"))["length"].to_numpy()
        number = 0
        for length, first, rows in zip(*np.unique(lengths, return_index=True, return_counts=True), strict=True):
            length, first, last = int(length), int(first), int(first + rows)
            step = max(1, TOKENS_PER_SHARD // length)
            for start in range(first, last, step):
                yield Shard(split, number, length, start, min(start + step, last))
                number += 1


class _PackedShards:
    """Writes shards of packed rows."""

    def __init__(self, plan: Artifact, parts: TokenParts):
        self.plan, self.parts = plan, parts
        self.pad_id = plan.manifest["padding_id"]
        self.completions = plan.manifest["kind"] != "sft"
        self.builders: dict[str, RowBuilder] = {}

    def write(self, shard: Shard, path: Path) -> None:
        if shard.split not in self.builders:
            self.builders = {shard.split: RowBuilder(PlannedRows(self.plan, shard.split), self.parts, shard.split)}
        builder = self.builders[shard.split]
        step = max(1, TOKENS_PER_BATCH // shard.length)
        columns = schema(shard.length, self.completions)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, columns) as writer:
            for first in range(shard.first, shard.last, step):
                last = min(first + step, shard.last)
                writer.write_batch(builder.batch(first, last, shard.length, self.pad_id))


class _RawShards:
    """Writes shards of unchanged corpus rows (format v2.0), which TRL's trainer tokenizes."""

    def __init__(self, plan: Artifact, corpus: Artifact):
        self.plan, self.corpus = plan, corpus

    def write(self, shard: Shard, path: Path) -> None:
        table = read_table(self.corpus.file(f"{shard.split}.arrow"))
        _check_weights(table)
        segments, _ = PlannedRows(self.plan, shard.split).segments(shard.first, shard.last)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            for start in range(0, len(segments), RAW_ROWS_PER_BATCH):
                writer.write_table(table.take(segments.sequence[start : start + RAW_ROWS_PER_BATCH]))


def _check_weights(table: pa.Table) -> None:
    for chunk in table.column("messages").chunks:
        if (
            chunk.type.value_type.get_field_index("supervised") >= 0
            and not pc.all(chunk.flatten().field("supervised")).as_py()
        ):
            raise SnaketuneError(
                "packing.strategy: none: some turns have weight 0, and TRL's trainer would learn them nevertheless; "
                "set packing.strategy to best-fit-decreasing, or remove the weights from the source"
            )
