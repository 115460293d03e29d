"""What the `write` stage writes: some of the shards, from the plan.

A batch of rows is in memory at a time. Shards that a killed attempt had finished are kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.packing.sequences import PlannedRows, Sequences
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
    """Rows `first` to `last` (not included) of a split, all of `length` tokens."""

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
    """Fill `work.payload` with this part's shards.

    Args:
        tokens: the parts of the tokenized corpus, in order.
        corpus: the corpus itself, for raw rows; else nothing.
    Raises:
        SnaketuneError: a damaged input.
    """
    plan, *inputs = (artifact.for_part(spec.part) for artifact in (plan, *tokens, *corpus))
    tokens, corpus = inputs[: len(tokens)], inputs[len(tokens) :]
    shards = list(_shards(plan))
    own = shards[len(shards) * (spec.part - 1) // spec.parts : len(shards) * spec.part // spec.parts]
    packed = plan.manifest["format_version"] != RAW_FORMAT_VERSION
    source = _PackedRows(plan, TokenParts(tokens)) if packed else _RawRows(plan, corpus[0])
    finished = work.state / "shards"
    finished.mkdir(parents=True, exist_ok=True)
    for shard in progress(own, "writing", "shards", len(own)):
        path = finished / shard.name
        if not path.exists():
            partial = path.with_suffix(".partial")
            source.write(shard, partial)
            # What has its name is whole, after a power cut too.
            sync(partial)
            partial.rename(path)
    for shard in own:
        (finished / shard.name).rename(work.payload / shard.name)
    return Outcome(counts={"shards": len(own), "rows": sum(s.last - s.first for s in own)})


def _shards(plan: Artifact) -> Iterator[Shard]:
    """All shards of a plan: rows of one length, as many as make some 300 MB."""
    for split in SPLITS:
        lengths = read_table(plan.file(f"{split}-rows.arrow"))["length"].to_numpy()
        number = 0
        for length, first, rows in zip(*np.unique(lengths, return_index=True, return_counts=True), strict=True):
            length, first, last = int(length), int(first), int(first + rows)
            step = max(1, TOKENS_PER_SHARD // length)
            for start in range(first, last, step):
                yield Shard(split, number, length, start, min(start + step, last))
                number += 1


class _PackedRows:
    def __init__(self, plan: Artifact, parts: TokenParts):
        self.plan, self.parts = plan, parts
        self.pad_id = plan.manifest["padding_id"]
        self.completions = plan.manifest["kind"] != "sft"
        self.splits: dict[str, Sequences] = {}

    def write(self, shard: Shard, path: Path) -> None:
        if shard.split not in self.splits:
            self.splits = {shard.split: Sequences(PlannedRows(self.plan, shard.split), self.parts, shard.split)}
        sequences = self.splits[shard.split]
        step = max(1, TOKENS_PER_BATCH // shard.length)
        columns = schema(shard.length, self.completions)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, columns) as writer:
            for first in range(shard.first, shard.last, step):
                last = min(first + step, shard.last)
                writer.write_batch(sequences.batch(first, last, shard.length, self.pad_id))


class _RawRows:
    """Rows of the corpus as they are (format v2.0), for TRL's trainer to tokenize."""

    def __init__(self, plan: Artifact, corpus: Artifact):
        self.plan, self.corpus = plan, corpus

    def write(self, shard: Shard, path: Path) -> None:
        table = read_table(self.corpus.file(f"{shard.split}.arrow"))
        _check_weights(table)
        pieces, _ = PlannedRows(self.plan, shard.split).pieces(shard.first, shard.last)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            for start in range(0, len(pieces), RAW_ROWS_PER_BATCH):
                writer.write_table(table.take(pieces.sequence[start : start + RAW_ROWS_PER_BATCH]))


def _check_weights(table: pa.Table) -> None:
    for chunk in table.column("messages").chunks:
        if (
            chunk.type.value_type.get_field_index("supervised") >= 0
            and not pc.all(chunk.flatten().field("supervised")).as_py()
        ):
            raise SnaketuneError(
                "packing.strategy none: some turns have weight 0, and TRL's trainer would learn them all the same; "
                "choose best-fit-decreasing, or take the weights out of the source"
            )
