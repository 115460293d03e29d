"""Time from process start to the end of the first step, including each side's data preparation."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import ROW_LENGTH, chain
from benchmarks.jobs import job_command, job_of
from benchmarks.processes import one_core, until_first_step
from benchmarks.sft.material import Material, numbered
from benchmarks.sft.sides import sft_spec


def startup(rounds: int, folder: Path, material: Material, conversations: int = 100_000) -> dict[str, Any]:
    """Time both sides, ours twice: with the data stages (a first start) and with finished shards (later starts)."""
    folder.mkdir()
    many = replace(material, raw=numbered(material.raw, folder / "many.jsonl", conversations))
    later = replace(many, pack=chain(folder / "chain", [many.raw], many.tokenizer))
    sides: dict[str, Callable[[Path], list[list[str]]]] = {
        "snaketune": lambda folder: first_start(many, folder),
        "snaketune, shards there": lambda folder: [training(later, folder)],
        "trl": lambda folder: trl(many, folder),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with one_core():
        for number in range(rounds):
            for name, commands in sides.items():
                work = folder / f"{name} {number}"
                work.mkdir()
                seconds[name].append(until_first_step(commands(work), work))
                print(f"  round {number + 1}: {name} {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    return {
        "startup_s_ratio_vs_trl": medians["snaketune"] / medians["trl"],
        "startup_s_ratio_vs_trl_shards_there": medians["snaketune, shards there"] / medians["trl"],
        "conversations": conversations,
        "seconds": medians,
        "rounds": seconds,
    }


def first_start(material: Material, folder: Path) -> list[list[str]]:
    """Return the commands of all stages as the rules run them: raw file to shards, then the training."""
    made = {name: Path(name, "manifest.json") for name in ("corpus", "tokens", "plan", "shards", "pack")}
    corpus = {"kind": "conversations", "sources": [{"files": [str(material.raw)]}], "held_out": 0}
    tokens = {"kind": "sft", "train_on": "assistant", "part": 1, "parts": 1}
    plan = {"kind": "sft", "lengths": [ROW_LENGTH], "strategy": "best-fit-decreasing", "overflow": "truncate"}
    write = {"part": 1, "parts": 1}
    pack = {"kind": "sft", "length": ROW_LENGTH, "overflow": "truncate"}
    jobs = [
        job_of("corpus", corpus, {"files": material.raw}, "corpus"),
        job_of("tokenize", tokens, {"corpus": made["corpus"], "tokenizer": material.tokenizer}, "tokens"),
        job_of("plan", plan, {"tokens": made["tokens"]}, "plan"),
        job_of("write", write, {"plan": made["plan"], "tokens": made["tokens"]}, "shards"),
        job_of("pack", pack, {"plan": made["plan"], "shards": made["shards"]}, "pack"),
    ]
    return [*(job_command(job, folder) for job in jobs), training(replace(material, pack=made["pack"]), folder)]


def training(material: Material, folder: Path) -> list[str]:
    """Return the command of the `sft` stage as its rule runs it."""
    inputs = {"pack": material.pack, "tokenizer": material.tokenizer}
    return job_command(job_of("sft", sft_spec(material), inputs, "sft"), folder)


def trl(material: Material, folder: Path) -> list[list[str]]:
    """Return the command of a TRL training that prepares its own rows from JSON lines, with an empty cache."""
    command = [sys.executable, "-m", "benchmarks.sft.sides", "trl packed"]
    return [[*command, str(material.save(folder / "material.json")), "0", "1", str(folder / "result.json")]]
