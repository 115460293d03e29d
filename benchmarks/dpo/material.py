"""Input of both sides: a tokenizer, a model with weights, and pairs of three data sets, made by the jobs of a config.

The whole data sets are packed, to count what is computed; trainings and reference passes are timed on some of their prompts,
drawn at random with all pairs of each.
"""

import json
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml
from benchmarks.data_path.rows import ROW_LENGTH
from benchmarks.sft.material import LEARNING_RATE, made_model

from snaketune.config.load import load
from snaketune.packing.reader import documents
from snaketune.stages.cache.status import inputs_by_role
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job, result_at
from snaketune.stages.job_files import JobFile
from snaketune.stages.run import run
from snaketune.stages.table import STAGES
from snaketune.tables import read_table

# Below the folder of data; layouts are recognised but for one, whose rows are pairs and instructions at once.
SOURCES: dict[str, dict[str, Any]] = {
    "raschka": {"files": ["raschka_instruct/instruction-data-with-preference.json"], "layout": "pairs"},
    "pandalm": {"files": ["pandalm_test/testset-v1.json"]},
    "oasst": {"files": ["oasst1_en_val/en-validation.jsonl"]},
}
# Tokens of a row: of oasst1, the replies to one message would often be parted among rows of 1,024, each with the message.
LENGTHS = {"raschka": 1024, "pandalm": 1024, "oasst": 2048}
# Pairs of an optimizer step, on both sides: about so many where rows hold what they hold.
PAIRS_PER_STEP = 16
BETA = 0.1


@dataclass(frozen=True, kw_only=True)
class Material:
    """The folder with the config and the results of its jobs.

    Attributes:
        folder: as `snakemake` would run in.
    """

    folder: Path

    @property
    def graph(self) -> JobGraph:
        """Return the job graph of the config; call it in the folder that its paths are relative to."""
        return _graph(yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8")))

    @property
    def model(self) -> Path:
        return self.folder / "results/sft/start/model"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "results/tokenizer/shared/tokenizer"


def made(folder: Path, data: Path, runs: dict[str, tuple[str, int]], vocab_size: int = 8192) -> Material:
    """Run the stages that make the input.

    Args:
        data: folder with the files of SOURCES.
        runs: by name, a data set and about how many of its pairs to train on.
    """
    names = dict.fromkeys(source for source, _ in runs.values())
    sources = {name: {**SOURCES[name], "files": [str((data / file).resolve()) for file in SOURCES[name]["files"]]}
               for name in names}  # fmt: skip
    # With this, corpora and a tokenizer; then a model for it, and the packs of all pairs; then those of some.
    config: dict[str, Any] = {"corpora": {name: _corpus(source) for name, source in sources.items()}}
    config["tokenizers"] = {"trained": {"train": {"corpora": list(names), "vocab_size": vocab_size}}}
    with chdir(folder):
        trained = _graph(config).job("tokenizer", "trained")
        _make(trained)
        # Adopted, like the tokenizer of an existing model.
        config["tokenizers"] = {"shared": {"adopt": str(Path(trained.payload).resolve())}}
        _write_chats(list(names))
        config["corpora"]["chats"] = {"kind": "conversations", "sources": [{"files": ["chats.jsonl"]}], "held_out": 0}
        config["sft"] = {"start": _sft(made_model(folder / "base", Path(trained.manifest), max(LENGTHS.values())))}
        config["dpo"] = {f"{name}-whole": _dpo(name, name, 1) for name in names}
        for name in names:
            _make(pack_of(_graph(config), f"{name}-whole"))
        for name, (source, count) in runs.items():
            _write_some(source, pack_of(_graph(config), f"{source}-whole"), count, Path(f"{name}.jsonl"))
            config["corpora"][f"{name}-some"] = _corpus({"files": [f"{name}.jsonl"]})
            config["dpo"][name] = _dpo(f"{name}-some", source, 1)
            some = pack_of(_graph(config), name)
            _make(some)
            config["dpo"][name] = _dpo(f"{name}-some", source, _rows_per_step(some))
        Path("config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return Material(folder=folder)


def make_reference(material: Material, run_name: str) -> None:
    """Make the initial model of a run and its reference log-probabilities, unless they exist."""
    with chdir(material.folder):
        _make(material.graph.job("dpo", run_name).artifacts["ref_logps"][0])


def pack_of(graph: JobGraph, run_name: str) -> Job:
    """Return the job that packs the pairs of a run."""
    return graph.job("dpo", run_name).artifacts["pack"][0]


def corpus_rows(corpus: str) -> list[dict[str, Any]]:
    """Read the canonical rows of a corpus: id, prompt, chosen, rejected."""
    return read_table(Path("results/corpus", corpus, "rows/train.arrow")).to_pylist()


def _graph(config: dict[str, Any]) -> JobGraph:
    return JobGraph(*load(config))


def _make(job: Job) -> None:
    """Make a job's result and its inputs in this process, unless they exist."""
    if Path(job.manifest).is_file():
        return
    for some in job.artifacts.values():
        for one in some:
            _make(one)
    stage = STAGES[job.stage]

    def launch(name: str, *, spec, operation, work, artifacts, files, **_):
        return import_module(stage.module).build(spec, work, operation=operation, **stage.arguments(artifacts, files))

    with patch.object(import_module(stage.launcher), "launch", launch) if stage.launcher else nullcontext():
        run(
            JobFile(
                stage=job.stage,
                spec=job.spec.model_dump(mode="json"),
                inputs=inputs_by_role(job),
                out=str(Path(job.folder).resolve()),
                operation=job.operation.model_dump(mode="json"),
            )
        )


def _corpus(source: dict[str, Any]) -> dict[str, Any]:
    # 58 of PandaLM's 999 rows lack one response.
    return {"kind": "preferences", "sources": [source], "held_out": 0, "max_quarantined_fraction": 0.1}


def _sft(base: Path) -> dict[str, Any]:
    """Return the SFT job whose model all trainings start from; a few steps suffice for what is measured."""
    training = _training(batch_rows=1) | {"micro_batch_rows": 1}
    return {"base": {"path": str(base)}, "corpus": "chats", "tokenizer": "shared",
            "packing": {"length": ROW_LENGTH}, "training": training}  # fmt: skip


def _dpo(corpus: str, source: str, batch_rows: int) -> dict[str, Any]:
    training = _training(batch_rows) | {"micro_batch_rows": 1}
    return {"from": "start", "corpus": corpus, "packing": {"length": LENGTHS[source]}, "beta": BETA, "training": training,
            "operation": {"checkpoint_steps": 10**6}}  # fmt: skip


def _training(batch_rows: int) -> dict[str, Any]:
    return {
        "epochs": 1, "batch_rows": batch_rows, "learning_rate": LEARNING_RATE, "precision": "float32",
        "schedule": "constant", "warmup_fraction": 0, "gradient_checkpointing": False,
    }  # fmt: skip


def _rows_per_step(pack: Job) -> int:
    """Return the rows per step that hold about PAIRS_PER_STEP pairs."""
    rows = [document["row"] for document in documents(result_at(Path(pack.manifest)), "train")]
    return max(1, round(PAIRS_PER_STEP * (max(rows) + 1) / len(rows)))


def _write_chats(corpora: list[str], rows: int = 24) -> None:
    """Write a few conversations, each a prompt and its chosen completion."""
    pairs = [pair for corpus in corpora for pair in corpus_rows(corpus)[:rows]]
    _write_lines(Path("chats.jsonl"), [{"messages": pair["prompt"] + pair["chosen"]} for pair in pairs])


def _write_some(corpus: str, whole: Job, count: int, path: Path) -> None:
    """Write the pairs of random prompts that fit a row, until there are `count`."""
    fit = {document["id"] for document in documents(result_at(Path(whole.manifest)), "train")}
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for pair in corpus_rows(corpus):
        if pair["id"] in fit:
            by_prompt.setdefault(json.dumps(pair["prompt"]), []).append(pair)
    drawn: list[dict[str, Any]] = []
    groups = list(by_prompt.values())
    for number in np.random.default_rng(0).permutation(len(groups)):
        if len(drawn) < count:
            drawn += groups[number]
    columns = ("prompt", "chosen", "rejected")
    _write_lines(path, [{name: pair[name] for name in columns} for pair in drawn])


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
