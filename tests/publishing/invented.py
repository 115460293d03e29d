"""Invented results for a card: an SFT run, a DPO run from it, their data, and an evaluation."""

import json
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import describe_files, write_manifest
from snaketune.files import digest_file, write_json
from snaketune.publishing.cards import card
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import CardSpec, CorpusDescription, ReportedJob
from snaketune.stages.table import STAGES

LEARNING = {"epochs": 2.0, "learning_rate": 5e-05, "seed": 0, "schedule_options": {}}
SCRATCH = {"architecture": "llama", "hidden_size": 32}
HUB = {"path": "Qwen/Qwen2.5-0.5B", "revision": "main", "trust_remote_code": False}
CLEANING = {"languages": []}


def source(*files: str, hub: dict | None = None) -> dict[str, Any]:
    return {"files": list(files), "hub": hub}


# By job, the entries of its manifest besides those of every manifest.
CHAIN: dict[str, dict[str, Any]] = {
    "dpo/demo": {
        "spec": {
            "loss": "sigmoid", "beta": 0.2, "label_smoothing": 0.0, "training": LEARNING, "lora": None, "quantization": None,
            "base": None, "continued": False, "reference": None, "trust_remote_code": False,
        },
        "counts": {"steps": 76, "rows": 152, "tokens": 152652, "tokens_per_epoch": 76326},
        "parameters": 646016,
        "versions": {"torch": "2.13.0"},
    },
    "sft/demo": {
        "spec": {"base": SCRATCH, "training": LEARNING, "lora": None, "quantization": None, "trust_remote_code": False},
        "counts": {"steps": 2082, "rows": 666},
        "inputs": {"base": []},
        "versions": {"torch": "2.13.0"},
    },
    "pack/votes": {
        "counts": {
            "train": {"dropped": {"too_long": 3}, "truncated": {"rows": 2}, "tokens": 76326, "supervised_tokens": 9000}
        },
        "row_length": 512,
    },
    "pack/chat": {
        "counts": {"train": {"dropped": {}, "truncated": {"rows": 0}, "tokens": 337500, "supervised_tokens": 98452}},
        "row_length": 512,
    },
    "eval/e/dpo-demo": {},
    "corpus/chat": {
        "spec": {"kind": "conversations", "cleaning": CLEANING, "sources": [source("/home/me/secret.jsonl", "b.jsonl")]},
        "counts": {
            "read": 9000, "quarantined": {"total": 7, "not_json": 7}, "dropped": {"duplicate": 12, "near_duplicate": 0},
            "kept": {"train": 8061, "held_out": 920},
        },
    },
    "corpus/votes": {
        "spec": {
            "kind": "preferences", "cleaning": CLEANING,
            "sources": [source(hub={"path": "open/votes", "name": None, "split": "train", "revision": "f00"})],
        },
        "counts": {
            "read": 2000, "quarantined": {"total": 0}, "dropped": {"duplicate": 0}, "kept": {"train": 1800, "held_out": 200},
        },
    },
}  # fmt: skip
MADE_FROM = {
    "dpo/demo": {"model": ("sft/demo",), "pack": ("pack/votes",)},
    "sft/demo": {"pack": ("pack/chat",)},
    "pack/votes": {"corpus": ("corpus/votes",)},
    "pack/chat": {"corpus": ("corpus/chat",)},
}
SCORES = {
    "conversations": {
        "chat": {
            "held_out_loss": 0.23279,
            "supervised_tokens": 11529,
            "exact_match": {"share": 0.95, "share_interval": [0.92, 0.97], "prompts": 320},
        }
    },
    "preferences": {"votes": {"pairs": 200, "logp_accuracy_per_token": 0.9079}},
    "tasks": {"choice": {"acc": 0.75, "exact_match,strict.v1": 0.5, "acc_norm": "not a number"}},
    "task_intervals": {"choice": {"acc": [0.5, 0.9]}},
}


def write_chain(folder: Path, **changes: dict[str, Any]) -> list[Path]:
    """Write manifests and payloads of all jobs below `folder`, in the order of `CHAIN`.

    Args:
        changes: By job (`sft_demo` is `sft/demo`), entries that replace those of its manifest.
    """
    replaced = {name.replace("_", "/"): change for name, change in changes.items()}
    manifests = []
    for job, about in CHAIN.items():
        stage = job.split("/")[0]
        payload = folder / job / STAGES[stage].payload
        payload.mkdir(parents=True)
        for name, content in files_of(stage).items():
            (payload / name).parent.mkdir(exist_ok=True)
            (payload / name).write_text(content, encoding="utf-8")
        manifest = {
            "stage": stage,
            "spec": {},
            "counts": {},
            "inputs": {},
            "records": {},
            "versions": {},
            "code": "c0de",
        }
        manifest |= {"payload": describe_files(payload), "fingerprint": f"{len(manifests)}f" * 16}
        write_manifest(folder / job / "manifest.json", manifest | about | replaced.get(job, {}))
        manifests.append(folder / job / "manifest.json")
        run = {"started": "2026-11-28T04:19:41Z", "attempts": [5.0, 30.8], "host": "a-host", "revision": "c0ffee"}
        write_json(folder / job / "run.json", run)
    return manifests


def files_of(stage: str) -> dict[str, str]:
    match stage:
        case "eval":
            return {"scores.json": json.dumps(SCORES)}
        case "sft" | "dpo":
            return {"config.json": "{}", "model.safetensors": f"weights of {stage}", "tokenizer.json": "[]"}
    return {"rows.txt": stage}


def spec_of(**changes: Any) -> CardSpec:
    jobs = []
    for key in CHAIN:
        stage, _, name = key.partition("/")
        jobs.append(ReportedJob(stage=stage, name=name, made_from=MADE_FROM.get(key, {})))
    words = {
        "chat": CorpusDescription(license=None, description=None),
        "votes": CorpusDescription(license="cc0-1.0", description=None),
    }
    return CardSpec(**({"model": "dpo:demo", "license": "mit", "corpora": words, "jobs": tuple(jobs)} | changes))


def card_of(folder: Path, spec: CardSpec | None = None, **changes: dict[str, Any]) -> str:
    """Build the card of an invented chain, and return its text."""
    work = WorkFolder(folder / "work")
    work.payload.mkdir(parents=True)
    card.build(spec or spec_of(), work, manifests=write_chain(folder / "results", **changes))
    return (work.payload / card.CARD).read_text(encoding="utf-8")


def write_handed_on(folder: Path) -> None:
    """Write a chain below `folder/results`, with the card of its DPO run as the stage publishes it."""
    manifests = write_chain(folder / "results")
    work = WorkFolder(folder / "results/card/dpo-demo")
    work.payload.mkdir(parents=True)
    card.build(spec_of(), work, manifests=manifests)
    work.payload.rename(work.folder / "card")
    manifest = {"stage": "card", "records": {}, "payload": describe_files(work.folder / "card")}
    manifest |= {"spec": spec_of().model_dump(mode="json"), "inputs": {"manifests": [*map(digest_file, manifests)]}}
    write_manifest(work.folder / "manifest.json", manifest)
