"""Input of the benchmarks: raw files, a tokenizer, tokenized sequences, and our stages as a chain."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from benchmarks.jobs import job_of

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.run import run
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.token_rows import conversation_rows
from snaketune.tokenization.token_store import ROWS_PER_BATCH, TokenWriter

ROOT = Path(__file__).resolve().parents[2]
FILES = ("gsm8k/train.jsonl", "dolly_hhrlhf_small/dolly_hhrlhf_train_small.jsonl")
CAPACITY = 2048
ROW_LENGTH = 1024


def lognormal(sequences: int) -> np.ndarray:
    """Draw lengths, int32, with a median of 120 tokens and at most CAPACITY."""
    drawn = np.random.default_rng(0).lognormal(np.log(120), 1.0, sequences)
    return np.clip(drawn, 2, CAPACITY).astype(np.int32)


def made_tokens(folder: Path, lengths: np.ndarray) -> Artifact:
    """Generate a tokenized corpus of random ids; the second half of each sequence is supervised."""
    generator = np.random.default_rng(1)
    work = WorkFolder(folder)
    work.start()
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
                writer.write(conversation_rows(names, sequences, np.zeros(len(own), bool)))
    nothing = {"rows": 0, "tokens": 0}
    counts = {"train": {"rows": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}, "held_out": nothing}
    manifest = {"counts": counts, "pad_id": 0, "payload": describe_files(work.payload), "records": {}}
    return Artifact(folder / "manifest.json", manifest, work.payload)


def repeated(data: Path, folder: Path, megabytes: float) -> list[Path]:
    """Repeat gsm8k and dolly, each copy with another number in front, so that no row is a duplicate."""
    rows = [[json.loads(line) for line in (data / name).open(encoding="utf-8")] for name in FILES]
    once = sum((data / name).stat().st_size for name in FILES)
    paths = []
    for name, some in zip(FILES, rows, strict=True):
        paths.append(folder / Path(name).name)
        with paths[-1].open("w", encoding="utf-8") as file:
            for number in range(max(1, round(megabytes * 1e6 / once))):
                for row in some:
                    key = "question" if "question" in row else "prompt"
                    file.write(json.dumps({**row, key: f"{number}. {row[key]}"}, ensure_ascii=False) + "\n")
    return paths


def made_tokenizer(folder: Path, files: list[Path], vocab_size: int = 8192) -> Path:
    """Train a tokenizer on the files and return its manifest."""
    corpus_spec = {"kind": "conversations", "sources": [{"files": [str(f) for f in files]}], "held_out": 0}
    with chdir(folder):
        stage("corpus", corpus_spec, {"files": files}, "small")
        spec = TokenizerSpec(model="bpe", vocab_size=vocab_size, character_coverage=0.9995, split_digits=True)
        inputs = {
            "corpora": [folder / "small/manifest.json"],
            "chat_template": [ROOT / "resources/chat_templates/chatml.jinja"],
        }
        stage("tokenizer", spec.model_dump(mode="json"), inputs, "tokenizer")
    return folder / "tokenizer/manifest.json"


def stage(name: str, spec: dict[str, Any], inputs: dict[str, list[Path]], out: str) -> None:
    """Run one stage in this process, below the working directory."""
    run(job_of(name, spec, inputs, str(Path(out).resolve())))


def chain(folder: Path, files: list[Path], tokenizer: Path, length: int = ROW_LENGTH, held_out: float = 0) -> Path:
    """Run the five stages from raw files to shards, with manifests and digests."""
    folder.mkdir()
    with chdir(folder):
        source = [{"files": [str(file) for file in files]}]
        spec = {"kind": "conversations", "sources": source, "held_out": held_out}
        stage("corpus", spec, {"files": files}, "corpus")
        made = {name: [Path(name, "manifest.json").resolve()] for name in ("corpus", "tokens", "plan", "shards")}
        inputs = {"corpus": made["corpus"], "tokenizer": [tokenizer]}
        stage("tokenize", {"kind": "sft", "train_on": "assistant", "part": 1, "parts": 1}, inputs, "tokens")
        rows = {"kind": "sft", "lengths": [length], "strategy": "best-fit-decreasing", "overflow": "truncate"}
        stage("plan", rows, {"tokens": made["tokens"]}, "plan")
        inputs = {"plan": made["plan"], "tokens": made["tokens"], "corpus": []}
        stage("write", {"part": 1, "parts": 1}, inputs, "shards")
        settings = {"kind": "sft", "length": length, "overflow": "truncate"}
        stage("pack", settings, {"plan": made["plan"], "shards": made["shards"]}, "pack")
    return folder / "pack/manifest.json"
