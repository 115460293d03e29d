"""A config from which jobs of every stage are planned: all kinds of corpora, bases, adapters, losses and references."""

import re
from pathlib import Path
from typing import Any

from snaketune.stages.job import Job

AUTO = {"learning_rate": 1e-4, "batch_rows": 8}
FIXED = AUTO | {"micro_batch_rows": 2, "gradient_checkpointing": False}
# Settings that are slow on most machines.
SLOW = {"learning_rate": 2e-4, "batch_rows": 8, "precision": "float32", "optimizer": "adamw_torch", "compile": False}
SLOW |= {"micro_batch_rows": 2, "gradient_checkpointing": True}
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2}
CONFIG: dict[str, Any] = {
    "corpora": {
        "own": {"kind": "preferences", "sources": [{"scores": "both", "pairs": "best-worst"}]},
        "chat": {
            "kind": "conversations",
            "sources": [{"files": ["rows.jsonl"]}, {"hub": {"path": "a/b", "revision": "f00"}}],
            "decontamination": {"ngram": 13},
            "held_out": 0.1,
            "parts": 3,
        },
        "maths": {
            "kind": "conversations",
            "sources": [{"files": ["maths.jsonl"]}],
            "answer_pattern": "#### (.+)",
            "held_out": 1.0,
        },
        "books": {
            "kind": "text",
            "sources": [{"files": ["books.txt"]}],
            "decontamination": {"ngram": 13},
            "held_out": 0.1,
        },
        "pairs": {
            "kind": "preferences",
            "sources": [{"files": ["pairs.jsonl"]}],
            "held_out": 0.1,
            "parts": 2,
            "license": "mit",
        },
        "votes": {"kind": "unpaired", "sources": [{"files": ["votes.jsonl"]}]},
    },
    "tokenizers": {
        "own": {"train": {"corpora": ["pairs", "books"], "vocab_size": 400}},
        "adopted": {"adopt": "base", "chat_template": "template.jinja"},
    },
    "sft": {
        "scratch": {"base": SHAPE, "corpus": "books", "tokenizer": "own", "training": AUTO},
        "chatty": {
            "use_base": "sft:scratch",
            "corpus": "chat",
            "tokenizer": "own",
            "packing": {"length": [256, 512], "overflow": "split"},
            "training": FIXED,
            "license": "apache-2.0",
        },
        "taught": {
            "use_base": "sft:scratch",
            "corpus": "chat",
            "tokenizer": "own",
            "training": FIXED,
            "distill": {"teacher": "chatty"},
        },
        "raw": {
            "base": {"path": "base"},
            "corpus": "chat",
            "tokenizer": "adopted",
            "packing": {"strategy": "none"},
            "training": SLOW,
        },
        "merged": {
            "base": {"path": "base", "trust_remote_code": True},
            "corpus": "chat",
            "tokenizer": "adopted",
            "training": AUTO,
            "lora": {"rank": 4, "dropout": 0.1},
            "operation": {"gpus": 2, "launch": "fsdp"},
        },
        "apart": {
            "base": {"path": "some/model", "revision": "f00"},
            "corpus": "chat",
            "tokenizer": "adopted",
            "training": AUTO,
            "lora": {"rank": 4, "dropout": 0.1, "merge": False},
            "quantization": {"type": "nf4"},
        },
        "again": {"extends": "apart", "base": None, "use_base": "sft:apart", "packing": {"train_on": "last"}},
        "unmerged": {"extends": "merged", "lora": {"rank": 4, "dropout": 0.1, "merge": False}},
        "rates": {
            "extends": "merged",
            "grid": {"training.learning_rate": [1e-5, 2e-5]},
            "race": {"metric": "held_out_loss", "rungs": [0.2, 0.5]},
        },
    },
    "dpo": {
        "plain": {"from": "chatty", "corpus": "pairs", "training": SLOW, "stop_if": {"margin_below": 0.0}},
        "losses": {
            "extends": "plain",
            "stop_if": None,
            "grid": {"loss": ["sigmoid", "ipo", "orpo", {"sigmoid": 0.8, "sft": 1.0}], "beta": [0.1, 0.5]},
        },
        "limited": {"extends": "plain", "stop_if": None, "ld_alpha": 0.5, "reference_pass": {"parts": 3}},
        "parted": {"extends": "plain", "beta": 0.3, "reference_pass": {"parts": 2}},
        "other": {"extends": "plain", "reference": {"path": "base"}, "reference_pass": {"token_logps": True}},
        "free": {"from": "chatty", "corpus": "pairs", "loss": "simpo", "training": AUTO},
        "single": {"from": "merged", "corpus": "votes", "loss": "kto", "training": AUTO, "lora": {"rank": 2}},
        "continued": {"from": "apart", "corpus": "pairs", "training": AUTO, "lora": "continued"},
        "further": {"from": "merged", "corpus": "pairs", "training": AUTO, "lora": "continued"},
        "stacked": {"from": "again", "corpus": "pairs", "training": FIXED, "lora": {"rank": 2, "merge": False}},
    },
    "reward": {
        "liked": {"from": "chatty", "corpus": "pairs", "training": AUTO, "margin": True},
        "sweep": {
            "from": "apart",
            "corpus": "pairs",
            "training": FIXED,
            "lora": {"rank": 2},
            "grid": {"center_rewards_coefficient": [0.01, 0.1]},
        },
    },
    "eval": {
        "all": {
            "judge": {
                "against": "base:scratch",
                "engine": {"url": "http://localhost:1", "model": "m"},
                "rubric": "books.txt",
            },
            "models": [
                "base:scratch",
                "base:again",
                "sft:chatty",
                "sft:rates",
                "dpo:losses",
                "dpo:other",
                "merge:soup",
                "reward:sweep",
            ],
            "conversations": ["chat", "maths"],
            "preferences": ["pairs"],
            "exact_match": {"answer_pattern": "#### (.+)"},
            "tasks": {"folder": "tasks", "names": ["choice"]},
        },
        "texts": {
            "models": ["sft:raw", "sft:merged", "dpo:single", "dpo:continued", "dpo:stacked"],
            "conversations": ["books"],
            "preferences": ["pairs"],
        },
    },
    "doctor": {
        "changes": {"wide": {"packing.length": 512}, "few": {"training.batch_rows": 4}},
        "repeats": 2,
    },
    "teacher": {"chatty": {"model": "sft:chatty", "operation": {"parts": 2}}},
    "verify": {"rows": 2, "report": True},
    "report": {"title": "everything"},
    "push": {"best": {"model": "dpo:plain", "repository": "someone/model"}},
    "sample": {
        "tries": {
            "model": "dpo:plain",
            "prompts": {"corpora": ["chat"], "limit": 20},
            "responses": 2,
            "generation": {"temperature": 1.0},
            "operation": {"parts": 2},
        }
    },
    "score": {
        "checked": {"samples": "tries", "by": {"answer": {"pattern": "(.*)"}}},
        "both": {"samples": "tries", "by": {"sum": {"checked": 2.0, "judged": 0.1}}},
        "rated": {"samples": "tries", "by": {"reward": {"path": "base"}}},
        "liked": {"samples": "tries", "by": {"reward": {"model": "reward:sweep-center_rewards_coefficient0.1"}}},
        "judged": {"samples": "tries", "by": {"judge": {"model": "sft:chatty", "rubric": "books.txt"}}},
    },
    "merge": {"soup": {"models": {"sft:chatty": 1, "dpo:plain": 2}}},
    "gguf": {"chatty": {"model": "sft:chatty"}, "best": {"model": "dpo:plain", "type": "q8_0"}},
}


def write_files(folder: Path) -> None:
    """The local files that the config names, as small as they may be."""
    for name in ("rows.jsonl", "maths.jsonl", "books.txt", "pairs.jsonl", "votes.jsonl", "template.jinja"):
        (folder / name).write_text("{}\n", encoding="utf-8")
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}\n", encoding="utf-8")
    (folder / "base/model.safetensors").write_bytes(b"")
    (folder / "tasks").mkdir()
    (folder / "tasks/choice.yaml").write_text(
        "task: choice\ndataset_path: json\ndataset_kwargs:\n  data_files: {test: tasks/choice.jsonl}\n",
        encoding="utf-8",
    )
    (folder / "tasks/choice.jsonl").write_text("{}\n", encoding="utf-8")


def without_digest(key: str) -> str:
    """
    >>> without_digest("pack/chat-own-512-0123abcd"), without_digest("write/chat-own-512-0123abcd/1-of-3")
    ('pack/chat-own-512', 'write/chat-own-512/1-of-3')
    """
    return re.sub(r"-[0-9a-f]{8}(?=[-/]|$)", "", key)


def keys(jobs: tuple[Job, ...]) -> list[str]:
    return [without_digest(job.key) for job in jobs]


def made_from(job: Job) -> dict[str, list[str]]:
    return {role: keys(jobs) for role, jobs in job.artifacts.items() if jobs}


def of_stage(planned: tuple[Job, ...], stage: str) -> list[Job]:
    return [job for job in planned if job.stage == stage]
