"""Invented results on disk, as the stages leave them: enough kinds of them to draw every part of the report."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import content_digest, describe_files, write_json
from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.tables import write_table
from snaketune.artifacts.work import WorkFolder
from snaketune.config.plan import PAYLOADS
from snaketune.config.specs import ReportSpec
from snaketune.report.stage import build

LENGTH = 128


class Results:
    """Writes results below a folder; every method returns the content digest by which others name it as an input."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.random = np.random.default_rng(0)
        self.built = 0

    def add(
        self,
        stage: str,
        name: str,
        *,
        spec: dict[str, Any] | None = None,
        counts: dict[str, Any] | None = None,
        inputs: dict[str, list[str]] | None = None,
        run: dict[str, Any] | None = None,
        **about: Any,
    ) -> str:
        folder = self.folder / "results" / stage / name
        payload = folder / PAYLOADS[stage]
        payload.mkdir(parents=True, exist_ok=True)
        if not list(payload.iterdir()):
            (payload / "only.txt").write_text(f"{stage} {name}")
        manifest = {
            **about,
            "stage": stage,
            "fingerprint": f"{stage}-{name}",
            "spec": spec or {},
            "code": "0",
            "inputs": inputs or {},
            "counts": counts or {},
            "payload": describe_files(payload),
            "records": {},
            "versions": {"pyarrow": "26.0.1", "flash-attn": None},
        }
        write_json(folder / "manifest.json", manifest)
        if run is not None:
            write_json(folder / "run.json", {"seconds": 1.0, "python": "3.11.7", "host": "somewhere"} | run)
        return content_digest(manifest)

    def payload(self, stage: str, name: str, file: str) -> Path:
        path = self.folder / "results" / stage / name / PAYLOADS[stage] / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def corpus(
        self, name: str, *, train: int = 60, held_out: int = 20, kind: str = "conversations", **counts: Any
    ) -> str:
        quarantined = counts.pop("quarantined", {})
        bad, duplicate = sum(quarantined.values()), counts.pop("duplicate", 0)
        counts = {
            "read": train + held_out + bad + duplicate,
            "quarantined": {"total": bad, **quarantined},
            "dropped": {"duplicate": duplicate},
            "kept": {"train": train, "held_out": held_out},
            "notes": {},
            "sources": [],
        } | counts
        return self.add("corpus", name, spec={"kind": kind}, counts=counts, run={})

    def tokenizer(self, name: str = "demo", *, adopt: str | None = None, samples: list[Any] | None = None) -> str:
        if adopt:
            spec = {"adopt": adopt, "revision": None, "model": None}
            return self.add("tokenizer", name, spec=spec, vocab_size=50000, samples=samples or [], run={})
        return self.add(
            "tokenizer",
            name,
            spec={"adopt": None, "revision": None, "model": "bpe"},
            counts={"texts": 10, "bytes": 2000, "reserved_characters_left_out": 0},
            vocab_size=1024,
            parity={"texts": 10},
            samples=samples or [{"tokens": 9, "supervised": 3, "learned": ["Answer: 5<|im_end|>"]}],
            run={},
        )

    def pack(
        self,
        name: str,
        corpus: str,
        tokenizer: str,
        *,
        kind: str = "sft",
        train: int = 60,
        held_out: int = 20,
        long: int = 0,
    ) -> str:
        tables, counts, about = [], {}, {}
        for split, documents, dropped in (("train", train - long, long), ("held_out", held_out, 0)):
            tokens = np.clip(self.random.lognormal(3.3, 0.5, documents), 5, LENGTH).astype(np.int32)
            row, used = [], [0]
            for length in tokens:
                if used[-1] + length > LENGTH:
                    used.append(0)
                used[-1] += length
                row.append(len(used) - 1)
            rows = len(used) if documents else 0
            columns = {"split": [split] * documents, "row": np.array(row, np.int32), "tokens": tokens}
            tables.append(pa.table(columns))
            counts[split] = {
                "read": documents + dropped,
                "kept": documents,
                "dropped": {"longer_than_row": dropped} if dropped else {},
                "dropped_tokens": {"longer_than_row": dropped * 200} if dropped else {},
                "tokens": int(tokens.sum()),
                "supervised_tokens": int(tokens.sum()) // 3,
            }
            about["packing_metadata" if split == "train" else "packing_metadata_held_out"] = {
                "enabled": True,
                "strategy": "best-fit-decreasing",
                "rows": rows,
                "lower_bound_rows": math.ceil(int(tokens.sum()) / LENGTH),
                "packing_efficiency": round(100 * int(tokens.sum()) / (rows * LENGTH), 3) if rows else 100.0,
            }
        write_table(self.payload("pack", name, "documents.arrow"), pa.concat_tables(tables))
        return self.add(
            "pack",
            name,
            spec={"kind": kind, "length": LENGTH, "strategy": "best-fit-decreasing"},
            counts=counts,
            inputs={"corpus": [corpus], "tokenizer": [tokenizer]},
            format_version="3.0",
            kind=kind,
            run={},
            **about,
        )

    def raw_pack(self, name: str, corpus: str, tokenizer: str) -> str:
        counts = {
            split: {"read": rows, "kept": rows, "dropped": {}} for split, rows in (("train", 60), ("held_out", 20))
        }
        return self.add(
            "pack",
            name,
            spec={"kind": "sft", "length": LENGTH, "strategy": "none"},
            counts=counts,
            inputs={"corpus": [corpus], "tokenizer": [tokenizer]},
            format_version="2.0",
            kind="sft",
            packing_metadata={"enabled": False, "strategy": "none"},
            run={},
        )

    def sft(self, name: str, pack: str, tokenizer: str, *, steps: int = 30, trl: bool = False) -> str:
        history = [
            {"step": n, "loss": 6 * math.exp(-n / steps) + 0.2 * self.random.random(), "epoch": n / steps}
            | ({} if trl else {"tokens_per_second": 20000 + 5000 * self.random.random()})
            for n in range(1, steps + 1)
        ]
        return self.add(
            "sft",
            name,
            spec={"training": {"epochs": 2.0}},
            counts={"rows": 12, "steps": steps} | ({} if trl else {"tokens_per_epoch": 1500}),
            inputs={"pack": [pack], "tokenizer": [tokenizer], "base": []},
            run={"history": history, "device": "cpu"} | ({} if trl else {"tokens_per_second_median": 22000.0}),
            **({"trainer": "trl", "parameters": 33440} if trl else {"parameters": 33440, "kernel": "sdpa"}),
        )

    def dpo(self, name: str, model: str, pack: str, *, steps: int = 20) -> str:
        history = [
            {
                "step": n,
                "loss": 0.69 - 0.3 * n / steps,
                "accuracy": min(1.0, 0.5 + n / steps),
                "margin": n / steps,
                "chosen_reward": 0.2 * n / steps,
                "rejected_reward": -0.8 * n / steps,
                "tokens_per_second": 9000.0,
            }
            for n in range(1, steps + 1)
        ]
        return self.add(
            "dpo",
            name,
            spec={"training": {"epochs": 1.0}, "loss": "sigmoid", "beta": 0.1},
            counts={"rows": 5, "pairs": 9, "steps": steps},
            inputs={"model": [model], "pack": [pack], "ref_logps": []},
            parameters=33440,
            trainable_parameters=1200,
            run={"history": history, "device": "NVIDIA H200", "tokens_per_second_median": 9000.0, "processes": 2},
        )

    def evaluate(
        self,
        name: str,
        *,
        right: float = 0.5,
        corpora: tuple[str, ...] = ("chat",),
        preferences: tuple[str, ...] = ("pairs",),
        reference: bool = False,
        tasks: dict[str, Any] | None = None,
        text: str = "Sure!\nAnswer: {answer}",
        task_names: tuple[str, ...] = ("counting", "weekday"),
        samples: int = 3,
    ) -> str:
        rows, conversations = [], {}
        for corpus in corpora:
            by_task = {}
            for task in task_names:
                correct = round(6 * right)
                by_task[task] = {"prompts": 6, "correct": correct, "share": round(correct / 6, 4)}
                rows += [_response(corpus, task, n, n < correct, text) for n in range(6)]
            share = sum(entry["correct"] for entry in by_task.values()) / (6 * len(by_task)) if by_task else None
            conversations[corpus] = {
                "held_out_loss": round(2 - right, 5) if by_task else None,
                "perplexity": round(math.exp(2 - right), 4) if by_task else None,
                "supervised_tokens": 600 if by_task else 0,
                "exact_match": {
                    "prompts": 6 * len(by_task),
                    "correct": sum(entry["correct"] for entry in by_task.values()),
                    "share": share,
                    "mean_response_tokens": 12.5 if by_task else None,
                    "by_task": by_task,
                },
            }
        known = {"reward_accuracy": 0.9, "reward_margin_nats": 1.5, "pairs_with_reference": 20}
        unknown = {"reward_accuracy": None, "reward_margin_nats": None, "pairs_with_reference": 0}
        scores = {
            "parameters": 33440,
            "conversations": conversations,
            "preferences": {
                corpus: {"pairs": 20, "logp_accuracy": right, "logp_accuracy_per_token": right, "logp_margin_nats": 3.0}
                | (known if reference else unknown)
                for corpus in preferences
            },
        } | ({"tasks": tasks} if tasks else {})
        write_json(self.payload("eval", name, "scores.json"), scores)
        lines = [json.dumps(row) + "\n" for row in rows]
        self.payload("eval", name, "responses.jsonl").write_text("".join(lines), encoding="utf-8")
        return self.add("eval", name, spec={"samples": samples}, counts={"prompts": len(rows)}, run={"device": "cpu"})

    def everything(self) -> None:
        """A sweep: two corpora of conversations and one of pairs, packed and raw, three SFT and two DPO runs, two evals."""
        chat = self.corpus(
            "chat", quarantined={"not_json": 2, "empty_message": 1}, duplicate=4, notes={"same_prompt": 3}
        )
        other, pairs = self.corpus("other"), self.corpus("pairs", kind="preferences")
        tokenizer = self.tokenizer()
        self.tokenizer("adopted", adopt="org/model")
        packed = self.pack("chat-demo-128-aa", chat, tokenizer, long=3)
        raw = self.raw_pack("other-demo-128-bb", other, tokenizer)
        preference = self.pack("pairs-demo-128-cc", pairs, tokenizer, kind="preference")
        small = self.sft("small", packed, tokenizer)
        self.sft("long", packed, tokenizer, steps=5000)
        self.sft("raw", raw, tokenizer, trl=True)
        counts = {"pairs": {"train": 60, "held_out": 20}, "tokens": 700}
        self.add("ref_logps", "small-pairs", counts=counts, run={"tokens_per_second": 800.0})
        self.dpo("soft", small, preference)
        self.dpo("hard", small, preference, steps=1)
        for model, right in (("base-small", 0.0), ("sft-small", 0.5), ("dpo-soft", 0.8), ("dpo-hard", 0.7)):
            tasks = {"demo_choice": {"acc": right, "perplexity": 3.2}}
            self.evaluate(f"main/{model}", right=right, reference=model.startswith("dpo"), tasks=tasks)
        self.evaluate("second/sft-raw", corpora=("chat", "other"), preferences=())

    def report(self, *, backwards: bool = False, **spec: Any) -> tuple[Outcome, Path]:
        """Build the report of everything there is, named in this order or the other; where its pages are."""
        self.built += 1
        work = WorkFolder(self.folder / f"work-{self.built}")
        work.start()
        outcome = build(
            ReportSpec(**spec),
            work,
            manifests=sorted(self.folder.glob("results/**/manifest.json"), reverse=backwards),
            runs=sorted(self.folder.glob("results/**/run.json"), reverse=backwards),
        )
        return outcome, work.payload


def _response(corpus: str, task: str, number: int, correct: bool, text: str) -> dict[str, Any]:
    return {
        "id": f"{corpus}-{task}-{number}",
        "corpus": corpus,
        "task": task,
        "prompt": f"[user] Question {number}?",
        "response": text.format(answer="7" if correct else "8"),
        "tokens": 5,
        "answer": "7",
        "found": "7" if correct else "8",
        "correct": correct,
    }
