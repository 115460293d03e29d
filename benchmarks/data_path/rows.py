"""Input of the benchmarks: raw files, and tokenized sequences."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from benchmarks.jobs import started

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.token_rows import conversation_rows
from snaketune.tokenization.token_store import ROWS_PER_BATCH, TokenWriter, to_store

GSM8K = "gsm8k/train.jsonl"
FILES = (GSM8K, "dolly_hhrlhf_small/dolly_hhrlhf_train_small.jsonl")
CAPACITY = 2048


def lognormal(sequences: int) -> np.ndarray:
    """Draw lengths, int32, with a median of 120 tokens and at most CAPACITY."""
    drawn = np.random.default_rng(0).lognormal(np.log(120), 1.0, sequences)
    return np.clip(drawn, 2, CAPACITY).astype(np.int32)


def made_tokens(folder: Path, lengths: np.ndarray) -> Artifact:
    """Generate a tokenized corpus of random ids; the second half of each sequence is supervised."""
    generator = np.random.default_rng(1)
    work = started(folder)
    for split, some in (("train", lengths), ("held_out", lengths[:0])):
        with TokenWriter(work.payload, split) as writer:
            for first in range(0, len(some), ROWS_PER_BATCH):
                own = some[first : first + ROWS_PER_BATCH].astype(np.int64)
                offsets = np.concatenate([[0], np.cumsum(own)])
                position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], own)
                supervised = position >= np.repeat(np.maximum(own // 2, 1), own)
                ids = generator.integers(0, 32000, int(offsets[-1]), dtype=np.int32)
                names = pa.array([f"{first + i:016x}" for i in range(len(own))])
                sequences = EncodedBatch(ids, offsets, supervised, np.zeros(len(ids), bool))
                writer.write(to_store(conversation_rows(names, sequences, np.zeros(len(own), bool))))
    counts = {
        "train": {"rows": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))},
        "held_out": {"rows": 0, "tokens": 0},
    }
    manifest = {"counts": counts, "pad_id": 0, "payload": describe_files(work.payload), "records": {}}
    return Artifact(folder / "manifest.json", manifest, work.payload)


def numbered(raw: Path, path: Path, copies: int, rest: int = 0) -> Path:
    """Repeat the rows of a file, each copy with another number in front, so that no row is a duplicate.

    Args:
        rest: rows of one more copy.
    """
    rows = [json.loads(line) for line in raw.open(encoding="utf-8")]
    key = "question" if "question" in rows[0] else "prompt"
    with path.open("w", encoding="utf-8") as file:
        for number in range(copies + bool(rest)):
            for row in rows if number < copies else rows[:rest]:
                file.write(json.dumps({**row, key: f"{number}. {row[key]}"}, ensure_ascii=False) + "\n")
    return path


def repeated(data: Path, folder: Path, megabytes: float) -> list[Path]:
    copies = max(1, round(megabytes * 1e6 / sum((data / name).stat().st_size for name in FILES)))
    return [numbered(data / name, folder / Path(name).name, copies) for name in FILES]


def as_messages(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a row of gsm8k or dolly as a conversation for TRL."""
    said = (row.get("question") or row["prompt"], row.get("answer") or row["response"])
    return {"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]}
