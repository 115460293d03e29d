"""Planning, packing and reading of token sequences, beside TRL and `datasets`; and the memory of each data job."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from benchmarks.data_path.rows import CAPACITY, FILES, lognormal, made_tokens, repeated
from benchmarks.jobs import ROW_LENGTH, conversations, started
from benchmarks.results import ROOT, in_turn, medians, timed

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.packing import plan as planning
from snaketune.packing import write as writing
from snaketune.packing.best_fit import lower_bound_rows, plan_best_fit_decreasing
from snaketune.packing.conversation_overflow import fit_conversations
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.packing.shard_writer import RowBuilder
from snaketune.packing.truncation import DropCounts
from snaketune.stages.specs import PlanSpec, WriteSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import TokenParts

PLAN = PlanSpec(kind="sft", lengths=(CAPACITY,), strategy="best-fit-decreasing", overflow="drop")


def compared(key: str, rounds: int, **sides: Callable[[], Any]) -> dict[str, Any]:
    """Time all sides in turn; return medians and the speedup of ours, the first, over each other; `key`: over the second."""
    seconds = in_turn(rounds, {name: timed(side) for name, side in sides.items()})
    ours, *others = seconds
    median = medians(seconds)
    speedup = {name: median[name] / median[ours] for name in others}
    rounded = {name: round(some, 4) for name, some in median.items()}
    return {key: speedup[others[0]], "seconds": rounded, "speedup": speedup, "rounds": seconds}


def plan(rounds: int, *_: Path, sequences: int = 10_000_000) -> dict[str, Any]:
    """Time planning alone."""
    lengths = lognormal(sequences)
    made: list[Any] = []

    def ours() -> None:
        made[:] = [plan_best_fit_decreasing(lengths, [CAPACITY], lengths // 2)]

    seconds = medians(in_turn(rounds, {"snaketune": timed(ours)}))["snaketune"]
    bound, rows = lower_bound_rows(lengths, CAPACITY), made[0].rows
    return {
        "plan_sequences_per_s": sequences / seconds,
        "plan_efficiency_of_bound": bound / rows,
        "seconds": seconds,
        "rows": rows,
        "lower_bound_rows": bound,
        "efficiency": float(lengths.sum(dtype=np.int64)) / (rows * CAPACITY),
    }


def pack(rounds: int, folder: Path, *_: Path, sequences: int = 1_000_000) -> dict[str, Any]:
    """Time planning and writing rows, in memory on both sides, and our two stages including files.

    The stages also write labels, masks, segments and documents, to disk, and verify and make digests.
    """
    from datasets import Dataset, disable_caching
    from trl import pack_dataset

    disable_caching()
    lengths = lognormal(sequences)
    tokens = made_tokens(folder / "tokens", lengths)
    parts = TokenParts([tokens])
    views = parts.views("train")
    lists = [pa.LargeListArray.from_arrays(pa.array(o), pa.array(v)) for v, o in zip(views.values, views.offsets)]
    dataset = Dataset(pa.table({"input_ids": pa.chunked_array(lists)}))
    rows: dict[str, int] = {}

    def ours() -> None:
        found = fit_conversations(PLAN, CAPACITY, parts.index("train"), DropCounts())
        plan = plan_best_fit_decreasing(found.tokens, [CAPACITY], found.supervised)
        ordered = found.take(plan.order)

        def segments_of(first: int, last: int):
            """See `PlannedRows.segments`; this plan is in memory."""
            start, stop = int(plan.offsets[first]), int(plan.offsets[last])
            return ordered.take(slice(start, stop)), plan.offsets[first : last + 1] - start

        source, made = RowBuilder(SimpleNamespace(segments=segments_of), parts, "train"), []
        for first in range(0, plan.rows, 256):
            segments, offsets = segments_of(first, min(first + 256, plan.rows))
            row_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            fill = np.add.reduceat(segments.tokens, offsets[:-1]).astype(np.int64)
            block = source.ids(segments, row_of, fill, CAPACITY, pad_id=0)
            made.append(pa.FixedSizeListArray.from_arrays(block.reshape(-1), CAPACITY))
        rows["snaketune"] = len(pa.chunked_array(made))

    def stages() -> None:
        work = started(folder / "plan")
        outcome = planning.build(PLAN, work, tokens=[tokens], corpus=[])
        manifest = {**outcome.about, "payload": describe_files(work.payload), "records": {}}
        planned = Artifact(folder / "plan/manifest.json", manifest, work.payload)
        written = writing.build(
            WriteSpec(part=1, parts=1), started(folder / "write"), plan=planned, tokens=[tokens], corpus=[]
        )
        rows["stages"] = written.counts["rows"]

    def as_shipped() -> None:
        rows["trl"] = len(pack_dataset(dataset, CAPACITY, "bfd"))

    def whole_table() -> None:
        rows["trl, whole table"] = len(pack_dataset(dataset, CAPACITY, "bfd", map_kwargs={"batch_size": None}))

    others = {"trl, whole table": whole_table, "our stages, to disk": stages}
    found = compared("pack_speedup_vs_trl", rounds, snaketune=ours, trl=as_shipped, **others)
    return found | {"rows": rows, "lower_bound_rows": lower_bound_rows(lengths, CAPACITY)}


def read_rows(rounds: int, folder: Path, data: Path, batches: int = 2000) -> dict[str, Any]:
    """Time shuffled batches of 8 rows as tensors, and the batches of a training with their segments."""
    import torch
    from datasets import Dataset, load_from_disk
    from torch.utils.data import DataLoader

    from snaketune.models.batches import collate
    from snaketune.training.loop.sample_order import EpochPermutation

    project = conversations(folder / "rows", repeated(data, folder, 60), [data / name for name in FILES])
    artifact = project.make(project.pack())
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

    found = compared(
        "read_rows_speedup_vs_datasets",
        rounds,
        snaketune=lambda: read(own(tokens)),
        datasets=lambda: read(loader),
        with_segments=lambda: read(own(lambda some: collate(some, "varlen"))),
    )
    done = min(batches * 8, len(rows))
    rates = {name: done / statistics.median(some) for name, some in found["rounds"].items()}
    return found | {"rows_per_s": rates, "rows": done}


def memory(_: int, folder: Path, data: Path, sequences: int = 10_000_000, parts: int = 4) -> dict[str, Any]:
    """Return the peak resident set of the data jobs, each in its own process, at ten million short conversations."""
    file = folder / "many.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number in range(sequences):
            question, answer = f"What is {number} plus {number % 97}?", f"{number + number % 97}."
            lines.write(f'{{"prompt": "{question}", "response": "{answer}"}}\n')
    project = conversations(
        folder / "jobs",
        [file],
        [data / name for name in FILES],
        packing={"overflow": "drop"},
        held_out=0.01,
        parts=parts,
    )
    peaks: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for job in project.missing(project.pack()):
        began = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow")}
        process = subprocess.Popen(project.command(job), cwd=project.folder, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{job.stage} failed with {status}")
        peaks[job.key], seconds[job.key] = usage.ru_maxrss / 1e6, time.perf_counter() - began
        print(f"  {job.key}: {peaks[job.key]:.2f} GB, {seconds[job.key]:.0f} s", file=sys.stderr, flush=True)
    largest = max(peaks.values())
    return {"peak_rss_gb_1e7": largest, "peak_rss_gb": peaks, "seconds": seconds, "bytes": file.stat().st_size}
