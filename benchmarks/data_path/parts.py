"""Raw conversations to packed rows by one process and by two at a time, beside `datasets` with one and with two.

The conversations are generated, some in twenty of them twice. Peer: `datasets` alone as far as it goes (reading, a hash of each
row, a filter of duplicates, a split, chat template and tokens in `map`), and TRL's packing; what is done in `map` and `filter`
has as many processes as ours, the filter of duplicates has one, since its rows have to be known to each other.

`python -m benchmarks.data_path.parts --megabytes 5000` runs our side once, with the memory of each job.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROW_LENGTH, Project, conversations
from benchmarks.results import ROOT, in_turn, made_on, medians, timed

from snaketune.packing.reader import open_rows
from snaketune.stages.job import Job
from snaketune.stages.table import STAGES

PROCESSES = (1, 2)
# The time of each stage, for `benchmarks.wide`.
RATES = ROOT / "results/bench/parts.json"
HELD_OUT = 0.01
WORDS = 20_000


def generated(path: Path, megabytes: float) -> Path:
    """Write conversations of one to three exchanges, of 150 to 3,000 characters."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randint(2, 9))) for _ in range(WORDS)]
    # Sentences are drawn from a pool: drawing each word would take most of the time.
    pool = [f"{' '.join(rng.choices(words, k=rng.randint(6, 24)))}." for _ in range(20_000)]
    written, last = 0, ""
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            if rng.random() > 0.05 or not last:
                turns = [
                    {"role": role, "content": f"{rng.getrandbits(32):x} {' '.join(rng.choices(pool, k=count))}"}
                    for _ in range(rng.randint(1, 3))
                    for role, count in (("user", rng.randint(1, 3)), ("assistant", rng.randint(1, 8)))
                ]
                last = json.dumps({"messages": turns}) + "\n"
            written += file.write(last)
    return path


def parts(rounds: int, folder: Path, _: Path, megabytes: float = 200, count: int = 8) -> dict[str, Any]:
    """Time both sides with each number of processes, in turn."""
    file = generated(folder / "chat.jsonl", megabytes)
    texts = generated(folder / "texts.jsonl", 2)
    project = conversations(folder / "project", [file], [texts], held_out=HELD_OUT, parts=count)
    made: dict[str, Any] = {}

    def ours(name: str, processes: int) -> None:
        copy = project.copy_to(folder / "copy")
        run_jobs(copy, copy.missing(copy.pack()), processes)
        made[name] = open_rows(copy.result(copy.pack()), "train").tokens
        shutil.rmtree(copy.folder)

    def theirs(name: str, processes: int) -> None:
        made[name] = with_datasets(file, project.tokenizer, folder / "datasets", processes)
        shutil.rmtree(folder / "datasets")

    sides: dict[str, Callable[[], Any]] = {}
    for processes in PROCESSES:
        for name, side in ((f"snaketune, {processes}", ours), (f"datasets, {processes}", theirs)):
            sides[name] = partial(side, name, processes)
    rounds_of = in_turn(rounds, {name: timed(side) for name, side in sides.items()})
    seconds, size = medians(rounds_of), file.stat().st_size / 1e6
    one, two = (seconds[f"snaketune, {processes}"] for processes in PROCESSES)
    return {
        "parts_speedup_of_two": one / two,
        "parts_speedup_vs_datasets": seconds["datasets, 2"] / two,
        "megabytes": size,
        "megabytes_per_s": {name: size / side for name, side in seconds.items()},
        "tokens": made,
        "seconds": seconds,
        "rounds": rounds_of,
    }


def run_jobs(project: Project, jobs: list[Job], processes: int) -> dict[str, float]:
    """Run jobs by their commands, so many at a time, each after those that it reads. Return the peak memory of each in GB, or
    that of this process if it is larger, which Linux counts for those that it starts."""
    left, done, peaks = {job.key: job for job in jobs}, set[str](), {}
    waiting = {
        job.key: {needed.key for some in job.artifacts.values() for needed in some} & left.keys() for job in jobs
    }
    # With the processes themselves: `subprocess` waits for those that are forgotten.
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow")}
    while left or running:
        ready = [key for key in left if waiting[key] <= done]
        for key in ready[: processes - len(running)]:
            log = project.folder / f"{key.replace('/', '-')}.log"
            with log.open("w") as out:
                command = project.command(left.pop(key))
                process = subprocess.Popen(command, cwd=project.folder, env=environment, stdout=out, stderr=out)
            running[process.pid] = key, process
        pid, status, usage = os.wait4(-1, 0)
        if pid not in running:
            # What `datasets` started.
            continue
        key, _ = running.pop(pid)
        if status:
            raise SystemExit(f"{key} failed with {status}: {project.folder / key.replace('/', '-')}.log")
        done.add(key)
        peaks[key] = usage.ru_maxrss / 1e6
    return peaks


def seconds_by_stage(project: Project) -> dict[str, float]:
    """The time that the jobs of each stage took, without the start of Python."""
    found: dict[str, float] = {}
    for stage in STAGES:
        for path in (project.folder / "results" / stage).glob("**/run.json"):
            found[stage] = found.get(stage, 0.0) + json.loads(path.read_text(encoding="utf-8"))["seconds"]
    return found


def with_datasets(file: Path, tokenizer: Path, folder: Path, processes: int) -> int:
    """Prepare the rows with `datasets` and TRL's packing. Return the tokens of the train split."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl.data_utils import pack_dataset

    chat = AutoTokenizer.from_pretrained(tokenizer)
    # With one process, it has the main one.
    parallel = {"num_proc": processes} if processes > 1 else {}
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder), **parallel)
    hashed = rows.map(_hashed, batched=True, **parallel)
    seen: set[str] = set()
    unique = hashed.filter(partial(_new, seen), input_columns="hash")
    split = unique.train_test_split(HELD_OUT, seed=0)
    columns = unique.column_names
    tokens = {
        name: part.map(partial(_tokens, chat), batched=True, remove_columns=columns, **parallel)
        for name, part in split.items()
    }
    packed = {name: pack_dataset(part, ROW_LENGTH, strategy="bfd") for name, part in tokens.items()}
    for name, part in packed.items():
        part.save_to_disk(str(folder / name), **parallel)
    return sum(map(len, packed["train"].with_format("arrow")["input_ids"].to_pylist()))


def _hashed(batch: dict[str, list[Any]]) -> dict[str, list[str]]:
    return {"hash": [hashlib.md5(json.dumps(turns).encode()).hexdigest() for turns in batch["messages"]]}


def _new(seen: set[str], key: str) -> bool:
    known = key in seen
    seen.add(key)
    return not known


def _tokens(chat: Any, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    encoded = chat.apply_chat_template(
        batch["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    masks = encoded["assistant_masks"]
    labels = [
        [token if mask else -100 for token, mask in zip(ids, of_row)]
        for ids, of_row in zip(encoded["input_ids"], masks)
    ]
    # As TRL's own preparation does, longer rows are cut.
    return {
        "input_ids": [ids[:ROW_LENGTH] for ids in encoded["input_ids"]],
        "labels": [row[:ROW_LENGTH] for row in labels],
    }


if __name__ == "__main__":
    import argparse
    import tempfile

    parser = argparse.ArgumentParser(description="Time the jobs from raw conversations to packed rows once.")
    parser.add_argument("--megabytes", type=float, default=5000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parts", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        base = Path(name).resolve()
        raw = generated(base / "chat.jsonl", options.megabytes)
        large = conversations(
            base / "project",
            [raw],
            [generated(base / "texts.jsonl", 2)],
            held_out=HELD_OUT,
            parts=options.parts,
        )
        began = time.perf_counter()
        memory = run_jobs(large, large.missing(large.pack()), options.processes)
        elapsed, gigabytes = time.perf_counter() - began, raw.stat().st_size / 1e9
        by_stage: dict[str, list[float]] = {}
        for job, peak in memory.items():
            by_stage.setdefault(job.partition("/")[0], []).append(peak)
        print(f"{gigabytes:.2f} GB in {elapsed:.0f} s: {1000 * gigabytes / elapsed:.1f} MB/s")
        per_gb = {stage: seconds / gigabytes for stage, seconds in seconds_by_stage(large).items()}
        for stage, peaks_of in by_stage.items():
            figures = f"{per_gb[stage]:.1f} s per GB of text, at most {max(peaks_of):.2f} GB of memory"
            print(f"  {stage}: {len(peaks_of)} jobs, {figures}")
        facts = made_on("benchmarks.data_path.parts") | {"gigabytes": gigabytes, "seconds_per_gb": per_gb}
        RATES.parent.mkdir(parents=True, exist_ok=True)
        RATES.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
