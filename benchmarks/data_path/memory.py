"""Peak memory of each data job at ten million sequences."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import FILES, ROOT, ROW_LENGTH, made_tokenizer
from benchmarks.jobs import job_command, job_of


def memory(folder: Path, data: Path, sequences: int = 10_000_000, parts: int = 4) -> dict[str, Any]:
    """Return the peak resident set of the data jobs, each in its own process, at ten million short conversations."""
    tokenizer = made_tokenizer(folder, [data / name for name in FILES])
    file = folder / "many.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number in range(sequences):
            lines.write(
                f'{{"prompt": "What is {number} plus {number % 97}?", "response": "{number + number % 97}."}}\n'
            )
    peaks: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def job(name: str, spec: dict[str, Any], out: str, **inputs: list[Any]) -> Path:
        command = job_command(job_of(name, spec, inputs, out), folder)
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT / "workflow")})
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{name} failed with {status}")
        peaks[out] = usage.ru_maxrss / 1e6
        seconds[out] = time.perf_counter() - started
        print(f"  {out}: {peaks[out]:.2f} GB, {seconds[out]:.0f} s", file=sys.stderr, flush=True)
        return folder / out / "manifest.json"

    source = [{"files": [str(file)]}]
    corpus = job("corpus", {"kind": "conversations", "sources": source, "held_out": 0.01}, "corpus", files=[file])
    tokens = [
        job(
            "tokenize", {"kind": "sft", "train_on": "assistant", "part": k, "parts": parts}, f"tokens-{k}",
            corpus=[corpus], tokenizer=[tokenizer],
        )
        for k in range(1, parts + 1)
    ]  # fmt: skip
    rows = {"kind": "sft", "lengths": [ROW_LENGTH], "strategy": "best-fit-decreasing", "overflow": "drop"}
    planned = job("plan", rows, "plan", tokens=tokens)
    shards = [
        job("write", {"part": k, "parts": parts}, f"shards-{k}", plan=[planned], tokens=tokens)
        for k in range(1, parts + 1)
    ]
    job("pack", {"kind": "sft", "length": ROW_LENGTH}, "pack", plan=[planned], shards=shards)
    return {"peak_rss_gb": peaks, "seconds": seconds, "bytes": file.stat().st_size}
