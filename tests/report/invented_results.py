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
        (payload / "only.txt").write_text(f"{stage} {name}")
        files = describe_files(payload)
        records = {file: files.pop(file) for file in sorted(files) if file.endswith(".jsonl") and stage == "corpus"}
        manifest = {
            **about,
            "stage": stage,
            "fingerprint": f"{stage}-{name}",
            "spec": spec or {},
            "code": "0",
            "inputs": inputs or {},
            "counts": counts or {},
            "payload": files,
            "records": records,
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
        self,
        name: str,
        *,
        train: int = 60,
        held_out: int = 20,
        kind: str = "conversations",
        records: dict[str, list[Any]] | None = None,
        contamination: dict[str, Any] | None = None,
        dropped: dict[str, int] | None = None,
        **counts: Any,
    ) -> str:
        """Args: records: by file name, their lines; counts: what else the manifest counts, or in place of what it would."""
        quarantined, dropped = counts.pop("quarantined", {}), {"duplicate": 0} | (dropped or {})
        bad = sum(quarantined.values())
        flows = {key: counts.pop(key, 0) for key in ("extra", "joined", "repeated")}
        gone = bad + sum(dropped.values()) + flows["joined"] - flows["extra"] - flows["repeated"]
        rows = {"read": counts.pop("read", train + held_out + gone), **flows, "dropped": dropped}
        source = rows | {"quarantined": bad, "kept": train + held_out, "layouts": {"messages": train + held_out}}
        counts = rows | {
            "quarantined": {"total": bad, **quarantined},
            "kept": {"train": train, "held_out": held_out},
            "notes": {},
            "sources": [source | {"files": [f"{name}.jsonl"]}],
            "cleaned": {},
            "characters": {"bounds": [1, 2, 4, 8], "rows": [0, 0, held_out, train]},
        } | counts
        for file, lines in (records or {}).items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            self.payload("corpus", name, file).write_text(text, encoding="utf-8")
        about = {"contamination": contamination} if contamination else {}
        return self.add("corpus", name, spec={"kind": kind}, counts=counts, run={}, **about)

    def tokenizer(self, name: str = "demo", *, adopt: str | None = None, samples: list[Any] | None = None) -> str:
        special = [{"content": token, "special": True} for token in ("<s>", "</s>")]
        write_json(self.payload("tokenizer", name, "tokenizer.json"), {"added_tokens": special})
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

    def tokenize(
        self,
        name: str,
        corpus: str,
        tokenizer: str,
        *,
        kind: str = "sft",
        train: int = 60,
        held_out: int = 20,
        tokens: dict[str, int] | None = None,
        parts: int = 1,
        ways: tuple[tuple[str, str], ...] = (("fast", ""),),
        samples: list[Any] | None = None,
    ) -> list[str]:
        """Args: tokens: by split; ways: path and reason of the parts, in turn."""
        contents = []
        for part in range(1, parts + 1):
            counts = {}
            for split, rows in (("train", train), ("held_out", held_out)):
                # Parts of what can't be divided: the first has the rest.
                shares = [_part(number, part, parts) for number in (rows, (tokens or {}).get(split, 30 * rows))]
                own = {"rows": shares[0], "tokens": shares[1], "supervised_tokens": shares[1] // 3}
                counts[split] = own | {"control_text": 0, "nothing_learned": 0}
            way = ways[(part - 1) % len(ways)]
            about = {"kind": kind, "train_on": "assistant", "pad_id": 0, "path": way[0], "why": way[1]}
            shown = samples or [[["<s>Hi", False], ["Yes</s>", True]]]
            content = self.add(
                "tokenize",
                f"{name}/{part}-of-{parts}",
                spec={"kind": kind, "train_on": "assistant", "part": part, "parts": parts},
                counts=counts,
                inputs={"corpus": [corpus], "tokenizer": [tokenizer]},
                run={},
                parity_rows=rows if way[0] == "fast" else 0,
                rows_by_reference=0,
                samples=shown if part == 1 else [],
                **about,
            )
            contents.append(content)
        return contents

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
        cut: int = 0,
        shared: int = 0,
        lengths: tuple[int, ...] = (LENGTH,),
        raw: bool = False,
        tokenized: dict[str, Any] | None = None,
        **counted: Any,
    ) -> str:
        """Tokenized, planned, written and packed rows.

        Args:
            long, cut: train rows that are dropped and truncated, 200 and 10 tokens each.
            shared: prompt tokens that train pairs share.
            tokenized: more about the tokenized parts.
            counted: what packing counted of the train split, in place of what it would.
        """
        tables, counts, about, tokens = [], {}, {}, {}
        written = 0
        for split, documents, dropped in (("train", train - long, long), ("held_out", held_out, 0)):
            own = np.clip(self.random.lognormal(3.3, 0.5, documents), 5, lengths[-1]).astype(np.int32)
            row, rows_by_length = _rows(own, lengths)
            columns = {"split": [split] * documents, "row": row, "tokens": own, "supervised": own // 3}
            tables.append(pa.table(columns))
            is_train = split == "train"
            counts[split] = {
                "read": documents + dropped,
                "read_tokens": int(own.sum()) + 200 * dropped + is_train * (10 * cut + shared),
                "kept": documents,
                "pieces": documents,
                "tokens": int(own.sum()),
                "supervised_tokens": int((own // 3).sum()),
                "dropped": {"longer_than_row": dropped} if dropped else {},
                "dropped_tokens": {"longer_than_row": dropped * 200} if dropped else {},
                "truncated": {"rows": cut * is_train, "tokens": 10 * cut * is_train},
                "split": {"rows": 0, "pieces": 0},
                "shared_prompt_tokens": shared * is_train,
            }
            tokens[split] = counts[split]["read_tokens"]
            rows = sum(rows_by_length.values())
            written += documents if raw else rows
            key = "packing_metadata" if is_train else "packing_metadata_held_out"
            about[key] = _metadata(own, rows_by_length, lengths) if not raw else {"enabled": False, "strategy": "none"}
        counts["train"] |= counted
        corpus_name = name.partition("-")[0]
        more = {"tokens": tokens, "train": train, "held_out": held_out} | (tokenized or {})
        parts = self.tokenize(f"{corpus_name}-tokens-{name[-2:]}", corpus, tokenizer, kind=kind, **more)
        strategy = "none" if raw else "best-fit-decreasing"
        facts = {"format_version": "2.0" if raw else "3.0", "kind": kind, "row_length": lengths[-1]} | about
        length = lengths if len(lengths) > 1 else lengths[0]
        spec = {"kind": kind, "length": length, "strategy": strategy, "overflow": "drop"}
        plan = self.add("plan", name, spec=spec, counts=counts, inputs={"tokens": parts}, run={}, **facts)
        made_of = {"plan": [plan], "tokens": parts, "corpus": [corpus] if raw else []}
        shards = [
            self.add(
                "write",
                f"{name}/{part}-of-{len(parts)}",
                spec={"kind": kind, "part": part, "parts": len(parts)},
                counts={"shards": 1, "rows": _part(written, part, len(parts))},
                inputs=made_of,
                run={},
            )
            for part in range(1, len(parts) + 1)
        ]
        if not raw:
            write_table(self.payload("pack", name, "documents.arrow"), pa.concat_tables(tables))
        return self.add(
            "pack",
            name,
            spec=spec | {"train_on": "assistant"},
            counts=counts,
            inputs={"plan": [plan], "shards": shards},
            run={},
            **facts,
        )

    def raw_pack(self, name: str, corpus: str, tokenizer: str) -> str:
        return self.pack(name, corpus, tokenizer, raw=True)

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
            "chat",
            quarantined={"not_json": 2, "empty_turn": 1},
            dropped={"duplicate": 4, "near_duplicate": 5, "contaminated": 2},
            extra=3,
            joined=6,
            repeated=7,
            notes={"same_prompt": 3, "repaired_drop_trailing_user": 2},
            cleaned={"normalization": 9, "mask_personal_data": 4, "email": 5},
            near_duplicates={"groups": 2, "largest": 4},
            contamination={"ngram": 13, "hits": {"pairs": 2, "tasks/choice.jsonl": 0}},
            records={
                "quarantine.jsonl": [bad("not_json", 3), bad("not_json", 9), bad("empty_turn", 12)],
                "duplicates.jsonl": [{"rows": n, "ids": ["a1", "b2"], "excerpt": f"group {n}"} for n in (3, 4)],
                "contamination.jsonl": [hit(5, "pairs", "6a"), hit(8, "pairs", "6a")],
            },
        )
        other, pairs = self.corpus("other"), self.corpus("pairs", kind="preferences")
        tokenizer = self.tokenizer()
        self.tokenizer("adopted", adopt="org/model")
        slow = {"parts": 3, "ways": (("fast", ""), ("reference", "the template trims"))}
        packed = self.pack("chat-demo-128-aa", chat, tokenizer, long=3, cut=2, tokenized=slow)
        raw = self.raw_pack("other-demo-128-bb", other, tokenizer)
        preference = self.pack(
            "pairs-demo-128-cc", pairs, tokenizer, kind="preference", shared=50, lengths=(64, LENGTH)
        )
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


def bad(reason: str, line: int) -> dict[str, Any]:
    """A line of `quarantine.jsonl`."""
    return {"file": "chat.jsonl", "line": line, "reason": reason, "detail": f"{reason} here", "excerpt": "{oops"}


def hit(line: int, evaluated: str, row: str) -> dict[str, Any]:
    """A line of `contamination.jsonl`."""
    words = "seven words that nobody should have learned"
    place = {"id": f"id{line}", "file": "chat.jsonl", "line": line}
    return place | {"evaluated": evaluated, "evaluated_row": row, "ngram": words}


def _part(number: int, part: int, parts: int) -> int:
    return number * part // parts - number * (part - 1) // parts


def _rows(tokens: np.ndarray, lengths: tuple[int, ...]) -> tuple[np.ndarray, dict[int, int]]:
    """The row of each document, and how many rows there are of each length, the shorter ones first."""
    of = np.searchsorted(lengths, tokens)
    row, first, rows_by_length = np.zeros(len(tokens), np.int32), 0, {}
    for number, length in enumerate(lengths):
        used: list[int] = []
        for place in np.flatnonzero(of == number).tolist():
            if not used or used[-1] + tokens[place] > length:
                used.append(0)
            used[-1] += int(tokens[place])
            row[place] = first + len(used) - 1
        rows_by_length[length] = len(used)
        first += len(used)
    return row, rows_by_length


def _metadata(tokens: np.ndarray, rows_by_length: dict[int, int], lengths: tuple[int, ...]) -> dict[str, Any]:
    room = sum(length * n for length, n in rows_by_length.items())
    several = {"rows_by_length": {str(length): n for length, n in rows_by_length.items() if n}}
    return {
        "enabled": True,
        "strategy": "best-fit-decreasing",
        "rows": sum(rows_by_length.values()),
        "row_tokens": room,
        "lower_bound_rows": math.ceil(int(tokens.sum()) / lengths[-1]),
        "packing_efficiency": round(100 * int(tokens.sum()) / room, 3) if room else 100.0,
        "supervised_per_row": {"min": 1, "median": 20, "max": 40},
    } | (several if len(lengths) > 1 else {})


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
