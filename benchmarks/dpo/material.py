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
from benchmarks.jobs import ROW_LENGTH, job_of
from benchmarks.sft.material import LEARNING_RATE, made_model

from snaketune.config.load import load
from snaketune.packing.reader import documents
from snaketune.stages.cache.status import inputs_by_role
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job, result_at
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
    """The folder with the config and the results of its jobs, as `snakemake` would run in."""

    folder: Path

    @property
    def graph(self) -> JobGraph:
        """Return the job graph of the config; call it in the folder that its paths are relative to."""
        return _graph(yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8")))

    @property
    def precision(self) -> str:
        config = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        return config["sft"]["start"]["training"]["precision"]

    @property
    def model(self) -> Path:
        return self.folder / "results/sft/start/model"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "results/tokenizer/shared/tokenizer"


def made(
    folder: Path, data: Path, runs: dict[str, tuple[str, int]], vocab_size: int = 8192, precision: str = "float32"
) -> Material:
    """Run the stages that make the input.

    Args:
        data: folder with the files of SOURCES.
        runs: by name, a data set and about how many of its pairs to train on.
        precision: of all trainings.
    """
    names = list(dict.fromkeys(source for source, _ in runs.values()))
    # With this, corpora and a tokenizer; then a model for it, and the packs of all pairs; then those of some.
    config: dict[str, Any] = {"corpora": {}}
    for name in names:
        files = [str((data / file).resolve()) for file in SOURCES[name]["files"]]
        config["corpora"][name] = _corpus({**SOURCES[name], "files": files})
    config["tokenizers"] = {"trained": {"train": {"corpora": names, "vocab_size": vocab_size}}}
    with chdir(folder):
        trained = _graph(config).job("tokenizer", "trained")
        _make(trained)
        # Adopted, like the tokenizer of an existing model.
        config["tokenizers"] = {"shared": {"adopt": str(Path(trained.payload).resolve())}}
        # A few conversations, each a prompt and its chosen completion, for the SFT job whose model all trainings start from.
        few = [pair for name in names for pair in corpus_rows(name)[:24]]
        _write_lines(Path("chats.jsonl"), [{"messages": pair["prompt"] + pair["chosen"]} for pair in few])
        config["corpora"]["chats"] = {"kind": "conversations", "sources": [{"files": ["chats.jsonl"]}], "held_out": 0}
        base = made_model(folder / "base", Path(trained.manifest), max(LENGTHS.values()))
        start = {"base": {"path": str(base)}, "corpus": "chats", "tokenizer": "shared"}
        config["sft"] = {"start": start | {"packing": {"length": ROW_LENGTH}, "training": _training(1, precision)}}
        config["dpo"] = {f"{name}-whole": _dpo(name, name, 1, precision) for name in names}
        for name in names:
            _make(pack_of(_graph(config), f"{name}-whole"))
        for name, (source, count) in runs.items():
            _write_some(source, pack_of(_graph(config), f"{source}-whole"), count, Path(f"{name}.jsonl"))
            config["corpora"][f"{name}-some"] = _corpus({"files": [f"{name}.jsonl"]})
            config["dpo"][name] = _dpo(f"{name}-some", source, 1, precision)
            some = pack_of(_graph(config), name)
            _make(some)
            rows = [document["row"] for document in documents(result_at(Path(some.manifest)), "train")]
            rows_per_step = max(1, round(PAIRS_PER_STEP * (max(rows) + 1) / len(rows)))
            config["dpo"][name] = _dpo(f"{name}-some", source, rows_per_step, precision)
        Path("config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return Material(folder=folder)


def make_reference(material: Material, run_name: str) -> None:
    """Make the initial model of a run and its reference log-probabilities, unless they exist."""
    with chdir(material.folder):
        _make(material.graph.job("dpo", run_name).artifacts["ref_logps"][0])


def pack_of(graph: JobGraph, run_name: str) -> Job:
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

    spec, operation = (of.model_dump(mode="json") for of in (job.spec, job.operation))
    out = str(Path(job.folder).resolve())
    with patch.object(import_module(stage.launcher), "launch", launch) if stage.launcher else nullcontext():
        run(job_of(job.stage, spec, inputs_by_role(job), out, **operation))


def _corpus(source: dict[str, Any]) -> dict[str, Any]:
    # 58 of PandaLM's 999 rows lack one response.
    return {"kind": "preferences", "sources": [source], "held_out": 0, "max_quarantined_fraction": 0.1}


def _dpo(corpus: str, source: str, batch_rows: int, precision: str) -> dict[str, Any]:
    return {
        "from": "start", "corpus": corpus, "packing": {"length": LENGTHS[source]}, "beta": BETA,
        "training": _training(batch_rows, precision), "operation": {"checkpoint_steps": 10**6},
    }  # fmt: skip


def _training(batch_rows: int, precision: str) -> dict[str, Any]:
    return {
        "epochs": 1, "batch_rows": batch_rows, "micro_batch_rows": 1, "learning_rate": LEARNING_RATE,
        "precision": precision, "schedule": "constant", "warmup_fraction": 0, "gradient_checkpointing": False,
    }  # fmt: skip


def _write_some(corpus: str, whole: Job, count: int, path: Path) -> None:
    """Write the pairs of random prompts that fit a row, until there are `count`."""
    fit = {document["id"] for document in documents(result_at(Path(whole.manifest)), "train")}
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for pair in corpus_rows(corpus):
        if pair.pop("id") in fit:
            by_prompt.setdefault(json.dumps(pair["prompt"]), []).append(pair)
    drawn: list[dict[str, Any]] = []
    groups = list(by_prompt.values())
    for number in np.random.default_rng(0).permutation(len(groups)):
        if len(drawn) < count:
            drawn += groups[number]
    _write_lines(path, [{side: pair[side] for side in ("prompt", "chosen", "rejected")} for pair in drawn])


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair: its texts as the template renders them, and its tokens by transformers' tokenizer."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def sequences(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sequences prompt + chosen and prompt + rejected, which identify our pairs."""
        return self.prompt_ids + self.chosen_ids, self.prompt_ids + self.rejected_ids

    @property
    def texts(self) -> dict[str, str]:
        """Return the pair as a row for TRL, which appends the end of turn to the completions."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


def pairs_of(material: Material, run_name: str) -> list[Pair]:
    """Return the packed pairs of a run; call it in the folder of the input."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material.tokenizer)
    job = pack_of(material.graph, run_name)
    packed = {document["id"] for document in documents(result_at(Path(job.manifest)), "train")}
    corpus = material.graph.config.dpo[run_name].corpus
    return [_pair(tokenizer, row) for row in corpus_rows(corpus) if row["id"] in packed]


def _pair(tokenizer: Any, row: dict[str, Any]) -> Pair:
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    prompt_ids = tuple(tokenizer(prompt)["input_ids"])
    texts, ids = {"prompt": prompt}, {"prompt_ids": prompt_ids}
    for side in ("chosen", "rejected"):
        ((turn),) = row[side]
        texts[side] = turn["content"]
        whole = tuple(tokenizer(prompt + texts[side] + tokenizer.eos_token)["input_ids"])
        if whole[: len(prompt_ids)] != prompt_ids:
            raise ValueError(f"pair {row['id']}: the prompt's last token depends on what comes after it")
        ids[f"{side}_ids"] = whole[len(prompt_ids) :]
    return Pair(**texts, **ids)
