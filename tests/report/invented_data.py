"""Invented results of the data stages, from corpora to packed rows, in the form that stages write."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import content_digest, describe_files, write_manifest
from snaketune.engine.packing.shards import FORMAT_VERSIONS
from snaketune.files import write_json
from snaketune.stages.specs import ReportedJob
from snaketune.stages.table import STAGES
from snaketune.tables import write_table

LENGTH = 128


class DataResults:
    """Writes results below a folder. Every method returns the key of its result, `stage/name`, for use as an input."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.random = np.random.default_rng(0)
        self.built = 0
        self.jobs: dict[str, ReportedJob] = {}
        self.contents: dict[str, str] = {}

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
        payload = folder / STAGES[stage].payload
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
            "inputs": {role: [self.contents[key] for key in keys] for role, keys in (inputs or {}).items()},
            "counts": counts or {},
            "payload": files,
            "records": records,
            "versions": {"pyarrow": "26.0.1", "flash-attn": None},
        }
        write_manifest(folder / "manifest.json", manifest)
        if run is not None:
            write_json(folder / "run.json", {"seconds": 1.0, "python": "3.11.7", "host": "somewhere"} | run)
        key = f"{stage}/{name}"
        self.jobs[key] = ReportedJob(stage=stage, name=name, made_from={k: tuple(v) for k, v in (inputs or {}).items()})
        self.contents[key] = content_digest(manifest)
        return key

    def payload(self, stage: str, name: str, file: str) -> Path:
        path = self.folder / "results" / stage / name / STAGES[stage].payload / file
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
        """Write a corpus. `records` has lines by file name; `counts` extends or replaces counts of the manifest."""
        quarantined, dropped = counts.pop("quarantined", {}), {"duplicate": 0} | (dropped or {})
        bad = sum(quarantined.values())
        flows = {key: counts.pop(key, 0) for key in ("extra", "joined", "repeated")}
        dropped_rows = bad + sum(dropped.values()) + flows["joined"] - flows["extra"] - flows["repeated"]
        rows = {"read": counts.pop("read", train + held_out + dropped_rows), **flows, "dropped": dropped}
        source = rows | {
            "quarantined": bad,
            "kept": train + held_out,
            "layouts": {"messages": train + held_out},
            "ignored": {},
        }
        counts = (
            rows
            | {
                "quarantined": {"total": bad, **quarantined},
                "kept": {"train": train, "held_out": held_out},
                "notes": {},
                "sources": [source | {"files": [f"{name}.jsonl"]}],
                "cleaned": {},
                "characters": {"bounds": [1, 2, 4, 8], "rows": [0, 0, held_out, train]},
            }
            | counts
        )
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
            samples=samples or [{"tokens": 9, "supervised": 3, "supervised_text": ["Answer: 5<|im_end|>"]}],
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
        """Write the parts of a tokenized corpus. `tokens` is by split; `ways` has the code path and reason of the parts."""
        keys = []
        for part in range(1, parts + 1):
            counts = {}
            for split, rows in (("train", train), ("held_out", held_out)):
                # The first part has the remainder of the division.
                shares = [_part(number, part, parts) for number in (rows, (tokens or {}).get(split, 30 * rows))]
                own = {"rows": shares[0], "tokens": shares[1], "supervised_tokens": shares[1] // 3}
                counts[split] = own | {"control_text": 0, "nothing_supervised": 0}
            way = ways[(part - 1) % len(ways)]
            about = {"kind": kind, "train_on": "assistant", "pad_id": 0, "path": way[0], "why": way[1]}
            shown = samples or [[["<s>Hi", False], ["Yes</s>", True]]]
            key = self.add(
                "tokenize",
                f"{name}/{part}-of-{parts}",
                spec={"kind": kind, "train_on": "assistant", "part": part, "parts": parts},
                counts=counts,
                inputs={"corpus": [corpus], "tokenizer": [tokenizer]},
                run={"parity_rows": rows if way[0] == "fast" else 0, "rows_by_reference": 0},
                samples=shown if part == 1 else [],
                **about,
            )
            keys.append(key)
        return keys

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
        """Write tokenized, planned, written and packed rows.

        Args:
            long, cut: train rows that are dropped and truncated, 200 and 10 tokens each.
            shared: prompt tokens that train pairs share; of their answers, if any, it is three.
            tokenized: more about the tokenized parts.
            counted: replaces counts of the train split.
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
                "read_tokens": int(own.sum()) + 200 * dropped + is_train * (10 * cut + shared + 3 * bool(shared)),
                "kept": documents,
                "pieces": documents,
                "tokens": int(own.sum()),
                "supervised_tokens": int((own // 3).sum()),
                "dropped": {"longer_than_row": dropped} if dropped else {},
                "dropped_tokens": {"longer_than_row": dropped * 200} if dropped else {},
                "truncated": {"rows": cut * is_train, "tokens": 10 * cut * is_train},
                "split": {"rows": 0, "pieces": 0},
                "mismatched_tokens": 0,
                "shared_prompt_tokens": shared * is_train,
                "shared_answer_tokens": 3 * is_train if shared else 0,
            }
            tokens[split] = counts[split]["read_tokens"]
            rows = sum(rows_by_length.values())
            written += documents if raw else rows
            key = "packing_metadata" if is_train else "packing_metadata_held_out"
            about[key] = _metadata(own, rows_by_length, lengths) if not raw else {"enabled": False, "strategy": "none"}
            dropped_rows = {
                "rows": dropped + cut * is_train,
                "tokens": 200 * dropped + 10 * cut * is_train,
                "enough": 448,
            }
            about[key] |= {"lost_to_length": dropped_rows}
        counts["train"] |= counted
        corpus_name = name.partition("-")[0]
        more = {"tokens": tokens, "train": train, "held_out": held_out} | (tokenized or {})
        parts = self.tokenize(f"{corpus_name}-tokens-{name[-2:]}", corpus, tokenizer, kind=kind, **more)
        strategy = "none" if raw else "best-fit-decreasing"
        facts = {
            "format_version": "2.0" if raw else FORMAT_VERSIONS[kind],
            "kind": kind,
            "row_length": lengths[-1],
        } | about
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


def bad(reason: str, line: int) -> dict[str, Any]:
    """A line of `quarantine.jsonl`."""
    return {"file": "chat.jsonl", "line": line, "reason": reason, "detail": f"{reason} here", "excerpt": "{oops"}


def hit(line: int, evaluated: str, row: str) -> dict[str, Any]:
    """A line of `contamination.jsonl`."""
    words = "seven words that no model should learn"
    location = {"id": f"id{line}", "file": "chat.jsonl", "line": line}
    return location | {"evaluated": evaluated, "evaluated_row": row, "ngram": words}


def _part(number: int, part: int, parts: int) -> int:
    return number * part // parts - number * (part - 1) // parts


def _rows(tokens: np.ndarray, lengths: tuple[int, ...]) -> tuple[np.ndarray, dict[int, int]]:
    """The row of each document, and the number of rows of each length, shorter ones first."""
    of = np.searchsorted(lengths, tokens)
    row, first, rows_by_length = np.zeros(len(tokens), np.int32), 0, {}
    for number, length in enumerate(lengths):
        used: list[int] = []
        for index in np.flatnonzero(of == number).tolist():
            if not used or used[-1] + tokens[index] > length:
                used.append(0)
            used[-1] += int(tokens[index])
            row[index] = first + len(used) - 1
        rows_by_length[length] = len(used)
        first += len(used)
    return row, rows_by_length


def _metadata(tokens: np.ndarray, rows_by_length: dict[int, int], lengths: tuple[int, ...]) -> dict[str, Any]:
    capacity = sum(length * n for length, n in rows_by_length.items())
    several = {"rows_by_length": {str(length): n for length, n in rows_by_length.items() if n}}
    return {
        "enabled": True,
        "strategy": "best-fit-decreasing",
        "rows": sum(rows_by_length.values()),
        "row_tokens": capacity,
        "lower_bound_rows": math.ceil(int(tokens.sum()) / lengths[-1]),
        "packing_efficiency": round(100 * int(tokens.sum()) / capacity, 3) if capacity else 100.0,
        "supervised_per_row": {"min": 1, "median": 20, "max": 40},
    } | (several if len(lengths) > 1 else {})
