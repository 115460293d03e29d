"""Input of both sides: a tokenizer, a model with weights, and pairs of three data sets, made by the jobs of a config.

The whole data sets are packed, which tells the pairs that fit a row; trainings and reference passes are timed on some of their
prompts, drawn at random with all pairs of each.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.jobs import ROW_LENGTH, Project, with_tokenizer
from benchmarks.sft.material import LEARNING_RATE, made_model

from snaketune.packing.reader import documents
from snaketune.tables import read_table

# Below the folder of data; layouts are recognised, but for one whose rows are pairs and instructions at once.
SOURCES: dict[str, dict[str, Any]] = {
    "raschka": {"files": ["raschka_instruct/instruction-data-with-preference.json"], "layout": "pairs"},
    "pandalm": {"files": ["pandalm_test/testset-v1.json"]},
    "oasst": {"files": ["oasst1_en_val/en-validation.jsonl"], "ignore": ["emojis", "labels"]},
}
# Tokens of a row: of oasst1, the replies to one message would often be parted among rows of 1,024, each with the message.
LENGTHS = {"raschka": 1024, "pandalm": 1024, "oasst": 2048}
# Pairs of an optimizer step, on both sides: about so many where rows hold what they hold.
PAIRS_PER_STEP = 16
BETA = 0.1


def made(
    folder: Path, data: Path, runs: dict[str, tuple[str, int]], vocab_size: int = 8192, precision: str = "float32"
) -> Project:
    """Make the project that both sides read.

    Args:
        data: folder with the files of SOURCES.
        runs: by name, a data set and about how many of its pairs to train on.
        precision: of all trainings.
    """
    names = list(dict.fromkeys(source for source, _ in runs.values()))
    corpora = {
        name: _corpus({**SOURCES[name], "files": [str((data / file).resolve()) for file in SOURCES[name]["files"]]})
        for name in names
    }
    project = with_tokenizer(Project(folder=folder, config={"corpora": corpora}), names, vocab_size)
    # A few conversations, each a prompt and its chosen completion, for the SFT job whose model all trainings start from.
    few = [pair for name in names for pair in corpus_rows(project, name)[:24]]
    _write_lines(folder / "chats.jsonl", [{"messages": pair["prompt"] + pair["chosen"]} for pair in few])
    corpora["chats"] = {"kind": "conversations", "sources": [{"files": ["chats.jsonl"]}], "held_out": 0}
    base = made_model(folder / "base", project.tokenizer, max(LENGTHS.values()))
    start = {"base": {"path": str(base)}, "corpus": "chats", "tokenizer": "shared"}
    config = project.config
    config["sft"] = {"start": start | {"packing": {"length": ROW_LENGTH}, "training": _training(1, precision)}}
    config["dpo"] = {f"{name}-whole": _dpo(name, name, 1, precision) for name in names}
    for name in names:
        project.make(project.pack("dpo", f"{name}-whole"))
    for name, (source, count) in runs.items():
        _write_some(project, source, count, folder / f"{name}.jsonl")
        corpora[f"{name}-some"] = _corpus({"files": [f"{name}.jsonl"]})
        config["dpo"][name] = _dpo(f"{name}-some", source, 1, precision)
        rows = [document["row"] for document in documents(project.make(project.pack("dpo", name)), "train")]
        rows_per_step = max(1, round(PAIRS_PER_STEP * (max(rows) + 1) / len(rows)))
        config["dpo"][name] = _dpo(f"{name}-some", source, rows_per_step, precision)
    return project


def make_reference(project: Project, run_name: str) -> None:
    """Make the initial model of a run and its reference log-probabilities, unless they exist."""
    project.make(project.job("dpo", run_name).artifacts["ref_logps"][0])


def packed_ids(project: Project, run_name: str) -> set[str]:
    """Return the ids of the pairs in the rows of a run."""
    pack = project.result(project.pack("dpo", run_name))
    return {document["id"] for document in documents(pack, "train")}


def corpus_rows(project: Project, corpus: str) -> list[dict[str, Any]]:
    """Read the canonical rows of a corpus: id, prompt, chosen, rejected."""
    return read_table(project.folder / "results/corpus" / corpus / "rows/train-00000.arrow").to_pylist()


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


def _write_some(project: Project, corpus: str, count: int, path: Path) -> None:
    """Write the pairs of random prompts that fit a row, until there are `count`."""
    fit = packed_ids(project, f"{corpus}-whole")
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for pair in corpus_rows(project, corpus):
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


def pairs_of(project: Project, run_name: str) -> list[Pair]:
    """Return the packed pairs of a run."""
    from transformers import AutoTokenizer

    tokenizer, packed = AutoTokenizer.from_pretrained(project.tokenizer), packed_ids(project, run_name)
    corpus = project.config["dpo"][run_name]["corpus"]
    return [_pair(tokenizer, row) for row in corpus_rows(project, corpus) if row["id"] in packed]


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
