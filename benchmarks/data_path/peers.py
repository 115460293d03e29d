"""Each measurement beside its peer."""

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from benchmarks.data_path.plain_texts import PlainTexts
from benchmarks.data_path.rows import (
    CAPACITY,
    FILES,
    ROW_LENGTH,
    chain,
    lognormal,
    made_tokenizer,
    made_tokens,
    repeated,
)
from benchmarks.data_path.timing import compared, in_turn

from snaketune.artifacts.manifest import Artifact, describe_files, read_artifact
from snaketune.packing import plan as planning
from snaketune.packing import write as writing
from snaketune.packing.best_fit import lower_bound_rows, plan_best_fit_decreasing
from snaketune.packing.conversation_overflow import fit_conversations
from snaketune.packing.planned_segments import PlannedSegments
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.packing.shard_writer import RowBuilder
from snaketune.packing.truncation import DropCounts
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import PlanSpec, WriteSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import TokenParts

# Texts that our encoder gets at once.
TEXTS = 32768


def plan(rounds: int, sequences: int = 10_000_000) -> dict[str, Any]:
    """Time planning alone."""
    lengths = lognormal(sequences)
    supervised = lengths // 2
    made: list[Any] = []

    def ours() -> None:
        made[:] = [plan_best_fit_decreasing(lengths, [CAPACITY], supervised)]

    seconds = statistics.median(in_turn(rounds, snaketune=ours)["snaketune"])
    bound = lower_bound_rows(lengths, CAPACITY)
    return {
        "plan_sequences_per_s": sequences / seconds,
        "plan_efficiency_of_bound": bound / made[0].rows,
        "seconds": seconds,
        "rows": made[0].rows,
        "lower_bound_rows": bound,
        "efficiency": float(lengths.sum(dtype=np.int64)) / (made[0].rows * CAPACITY),
    }


def pack(rounds: int, folder: Path, sequences: int = 1_000_000) -> dict[str, Any]:
    """Time planning and writing rows, in memory on both sides, and our two stages including files.

    The stages also write labels, masks, segments and documents, to disk, and verify and make digests.
    """
    from datasets import Dataset, disable_caching
    from trl import pack_dataset

    disable_caching()
    lengths = lognormal(sequences)
    tokens = made_tokens(folder / "tokens", lengths)
    parts = TokenParts([tokens])
    ids = pa.chunked_array([pa.LargeListArray.from_arrays(o, v) for v, o in _chunks(parts)])
    dataset = Dataset(pa.table({"input_ids": ids}))
    rows: dict[str, int] = {}

    def ours() -> None:
        spec = PlanSpec(kind="sft", lengths=(CAPACITY,), strategy="best-fit-decreasing", overflow="drop")
        found = fit_conversations(spec, CAPACITY, parts.index("train"), DropCounts())
        plan = plan_best_fit_decreasing(found.tokens, [CAPACITY], found.supervised)
        planned = InMemory(found.take(plan.order), plan.offsets)
        source, made = RowBuilder(planned, parts, "train"), []
        for first in range(0, plan.rows, 256):
            segments, offsets = planned.segments(first, min(first + 256, plan.rows))
            row_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            fill = np.add.reduceat(segments.tokens, offsets[:-1]).astype(np.int64)
            block = source.ids(segments, row_of, fill, CAPACITY, pad_id=0)
            made.append(pa.FixedSizeListArray.from_arrays(block.reshape(-1), CAPACITY))
        rows["snaketune"] = len(pa.chunked_array(made))

    def stages() -> None:
        work = WorkFolder(folder / "plan")
        work.start()
        spec = PlanSpec(kind="sft", lengths=(CAPACITY,), strategy="best-fit-decreasing", overflow="drop")
        outcome = planning.build(spec, work, tokens=[tokens])
        manifest = {**outcome.about, "payload": describe_files(work.payload), "records": {}}
        planned = Artifact(folder / "plan/manifest.json", manifest, work.payload)
        work = WorkFolder(folder / "write")
        work.start()
        spec = WriteSpec(part=1, parts=1)
        rows["stages"] = writing.build(spec, work, plan=planned, tokens=[tokens], corpus=[]).counts["rows"]

    def as_shipped() -> None:
        rows["trl"] = len(pack_dataset(dataset, CAPACITY, "bfd"))

    def whole_table() -> None:
        rows["trl, whole table"] = len(pack_dataset(dataset, CAPACITY, "bfd", map_kwargs={"batch_size": None}))

    others = {"trl, whole table": whole_table, "our stages, to disk": stages}
    seconds = in_turn(rounds, snaketune=ours, trl=as_shipped, **others)
    return compared(seconds, rows=rows, lower_bound_rows=lower_bound_rows(lengths, CAPACITY))


class InMemory(NamedTuple):
    """A plan in memory."""

    ordered: PlannedSegments
    offsets: np.ndarray

    def segments(self, first: int, last: int) -> tuple[PlannedSegments, np.ndarray]:
        """See `PlannedRows`."""
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        return self.ordered.take(slice(start, stop)), self.offsets[first : last + 1] - start


def _chunks(parts: TokenParts) -> Iterator[tuple[pa.Array, pa.Array]]:
    views = parts.views("train")
    for values, offsets in zip(views.values, views.offsets, strict=True):
        yield pa.array(values), pa.array(offsets)


def prepare(rounds: int, folder: Path, data: Path, megabytes: float = 100) -> dict[str, Any]:
    """Time raw JSON lines to rows that are ready for training."""
    from datasets import Dataset, concatenate_datasets, disable_caching, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from trl import SFTConfig, SFTTrainer

    disable_caching()
    files = repeated(data, folder, megabytes)
    manifest = made_tokenizer(folder, [data / name for name in FILES])
    tokenizer = AutoTokenizer.from_pretrained(manifest.parent / "tokenizer")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    settings = SFTConfig(
        output_dir=str(folder / "trl"), max_length=ROW_LENGTH, packing=True, assistant_only_loss=True, use_cpu=True,
        report_to="none",
    )  # fmt: skip
    some = Dataset.from_list([{"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")]}] * 2)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_config(config), settings, train_dataset=some, processing_class=tokenizer
    )
    made: dict[str, Any] = {}
    number = 0

    def as_messages(row: dict[str, str]) -> dict[str, Any]:
        said = (row.get("question") or row["prompt"], row.get("answer") or row["response"])
        return {"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]}

    def ours() -> None:
        nonlocal number
        number += 1
        made["snaketune"] = PackedRows(
            read_artifact(chain(folder / f"ours{number}", files, manifest), "shards"), "train"
        )

    def theirs() -> None:
        nonlocal number
        number += 1
        cache = str(folder / f"cache{number}")
        loaded = [load_dataset("json", data_files=str(file), split="train", cache_dir=cache) for file in files]
        chats = [part.map(as_messages, remove_columns=part.column_names) for part in loaded]
        made["trl"] = trainer._prepare_dataset(
            concatenate_datasets(chats), tokenizer, settings, packing=True, formatting_func=None, dataset_name="train"
        )
        shutil.rmtree(cache)

    seconds = in_turn(rounds, snaketune=ours, trl=theirs)
    tokens = {
        "snaketune": made["snaketune"].tokens,
        "trl": int(sum(map(len, made["trl"].with_format("arrow")["input_ids"].to_pylist()))),
    }
    rows = {name: len(side) for name, side in made.items()}
    return compared(seconds, megabytes=sum(f.stat().st_size for f in files) / 1e6, rows=rows, tokens=tokens)


def tokenize(rounds: int, folder: Path, data: Path, megabytes: float = 50) -> dict[str, Any]:
    """Time encoding with one vocabulary, by us and by sentencepiece, on the rows of `prepare`.

    Text that comes again is what our encoder is good at, so beside it: every text of every .jsonl file below `data`, once.
    Our cache is empty when a round begins.
    """
    import sentencepiece

    tokenizer = made_tokenizer(folder, [data / name for name in FILES]).parent / "tokenizer"
    processor = sentencepiece.SentencePieceProcessor(model_proto=(tokenizer / "sentencepiece.model").read_bytes())
    description = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))

    def measured(files: list[Path]) -> dict[str, Any]:
        texts = [text for file in files for line in file.open(encoding="utf-8") for text in strings(json.loads(line))]
        encoders, column = [PlainTexts(description) for _ in range(rounds)], pa.array(texts)
        made: dict[str, Any] = {}

        def ours() -> None:
            encoder = encoders.pop()
            made["snaketune"] = [encoder.encode(column[at : at + TEXTS]) for at in range(0, len(column), TEXTS)]

        def theirs() -> None:
            made["sentencepiece"] = processor.encode(texts, num_threads=1)

        seconds = in_turn(rounds, snaketune=ours, sentencepiece=theirs)
        found = [ids[a:b].tolist() for ids, offsets in made["snaketune"] for a, b in pairwise(offsets)]
        differ = sum(a != b for a, b in zip(found, made["sentencepiece"], strict=True))
        size = sum(len(text.encode()) for text in texts) / 1e6
        rate = {name: size / statistics.median(some) for name, some in seconds.items()}
        return compared(seconds, megabytes=size, texts=len(texts), texts_that_differ=differ, megabytes_per_s=rate)

    return measured(repeated(data, folder, megabytes)) | {"every text once": measured(sorted(data.rglob("*.jsonl")))}


def strings(value: Any) -> Iterator[str]:
    """Return all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def read_rows(rounds: int, folder: Path, data: Path, batches: int = 2000) -> dict[str, Any]:
    """Time shuffled batches of 8 rows as tensors, and the batches of a training with their segments."""
    import torch
    from datasets import Dataset, load_from_disk
    from torch.utils.data import DataLoader

    from snaketune.models.batches import collate
    from snaketune.training.loop.sample_order import EpochPermutation

    manifest = chain(folder / "rows", repeated(data, folder, 60), made_tokenizer(folder, [data / n for n in FILES]))
    artifact = read_artifact(manifest, "shards")
    rows = PackedRows(artifact, "train")
    columns = ["input_ids", "labels"]
    # The same rows in the file format of `datasets`, mapped as it maps its own.
    table = pa.concat_tables([read_table(path).select(columns) for path in artifact.files("train-")])
    Dataset(table).save_to_disk(folder / "dataset")
    dataset = load_from_disk(folder / "dataset")
    loader = DataLoader(dataset.with_format("torch"), batch_size=8, shuffle=True)

    items = EqualTokens(rows)

    def own(make: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> DataLoader:
        return DataLoader(
            items,
            batch_size=8,
            sampler=EpochPermutation(len(items), seed=0),
            collate_fn=lambda some: make([row for item in some for row in item]),
        )

    def tokens(some: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: torch.from_numpy(np.concatenate([row[name] for row in some])) for name in columns}

    def read(source: Any) -> None:
        for number, batch in enumerate(source, start=1):
            assert batch["input_ids"].numel() % ROW_LENGTH == 0
            if number == batches:
                return

    seconds = in_turn(
        rounds,
        snaketune=lambda: read(own(tokens)),
        datasets=lambda: read(loader),
        with_segments=lambda: read(own(lambda some: collate(some, "varlen"))),
    )
    done = min(batches * 8, len(rows))
    return compared(seconds, rows_per_s={n: done / statistics.median(s) for n, s in seconds.items()}, rows=done)
