"""From a corpus artifact to a pack artifact: tokenize in parts, plan, write in parts, pack."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.packing.pack import build as build_pack
from snaketune.packing.row_plan import build as build_plan
from snaketune.packing.shard_writer import build as build_write
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PackSpec, PlanSpec, TokenizeSpec, WriteSpec, spec_from
from snaketune.tables import write_table
from snaketune.tokenization import corpus_part

ROOT = Path(__file__).parents[2]


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    """The first rows of a demo file."""
    with (ROOT / f"resources/demo/{name}.jsonl").open(encoding="utf-8") as file:
        return [{"id": str(i), **json.loads(next(file))} for i in range(count)]


def corpus(folder: Path, kind: str, rows: list[dict[str, Any]], held_out: int = 5, batch_rows: int = 8) -> Artifact:
    """Write a corpus artifact whose last `held_out` rows are held out."""
    columns = {
        "sft": ["messages"],
        "preference": ["prompt", "chosen", "rejected"],
        "unpaired": ["prompt", "completion", "label"],
    }
    table = pa.Table.from_pylist([{name: row[name] for name in ("id", *columns[kind])} for row in rows])
    table = table.append_column("source", pa.array([row.get("source", 0) for row in rows], pa.int16()))
    (folder / "rows").mkdir(parents=True)
    cut = len(rows) - held_out
    write_table(folder / "rows/train-00000.arrow", table.slice(0, cut), batch_rows)
    write_table(folder / "rows/held_out-00000.arrow", table.slice(cut), batch_rows)
    payload = describe_files(folder / "rows")
    return Artifact(folder / "manifest.json", {"payload": payload, "records": {}}, folder / "rows")


def made(folder: Path, outcome: Outcome, spec: Any) -> Artifact:
    """Return the artifact of a stage's work in `folder`, as the next stage reads it."""
    manifest = {**outcome.about, "counts": outcome.counts, "spec": spec.model_dump(mode="json"), "records": {}}
    manifest["payload"] = describe_files(folder / "payload.partial")
    return Artifact(folder / "manifest.json", json.loads(json.dumps(manifest)), folder / "payload.partial")


def pack(folder: Path, rows: Artifact, tokenizer: Artifact, kind: str, parts: int = 1, **settings: Any) -> Artifact:
    """Return the packed artifact, as a reader sees it."""

    spec = PackSpec(kind=kind, **({"length": 256, "overflow": "drop"} | settings))
    tokens = []
    for part in range(1, parts + 1):
        tokenize_spec = TokenizeSpec(kind=kind, train_on=spec.train_on, part=part, parts=parts)
        own = started(folder / f"tokens-{part}")
        outcome = corpus_part.build(tokenize_spec, own, corpus=rows, tokenizer=tokenizer)
        tokens.append(made(own.folder, outcome, tokenize_spec))
    return pack_tokens(folder, tokens, spec, parts, corpus=[rows])


def pack_tokens(
    folder: Path, tokens: list[Artifact], spec: PackSpec, parts: int = 1, corpus: Sequence[Artifact] = ()
) -> Artifact:
    """Plan, write and pack tokenized parts."""
    plan_spec = spec_from(PlanSpec, spec)
    own = started(folder / "plan")
    plan = made(own.folder, build_plan(plan_spec, own, tokens=tokens, corpus=list(corpus)), plan_spec)
    shards = []
    for part in range(1, parts + 1):
        write_spec = WriteSpec(part=part, parts=parts)
        own = started(folder / f"shards-{part}")
        outcome = build_write(write_spec, own, plan=plan, tokens=tokens, corpus=list(corpus))
        shards.append(made(own.folder, outcome, write_spec))
    own = started(folder / "pack")
    return made(own.folder, build_pack(spec, own, plan=plan, shards=shards), spec)


def started(folder: Path) -> WorkFolder:
    work = WorkFolder(folder)
    work.start()
    return work
