"""The time that planning a large config takes: python -m benchmarks.scale (make bench-scale)

`snakemake -n` plans configs with many corpora in many parts and a large grid, of about 1,000 and 10,000 jobs, from nothing and
where every result is current. Beside that stands Snakemake's own floor: `snakemake --version`, and a plain Snakefile of as many
jobs that one job gathers, as our report gathers all results. Its jobs have the same three outputs and no inputs, so Snakemake
needs less for them than for jobs that read each other's results. Medians of three, in turn, in seconds of one processor, which
other work of the machine hardly moves.

The results are made up: one small file each, with the manifest that its stage would write of it, so that the look at what is on
disk is the real one. Figures go to results/bench/scale.json and, with a table, to docs/scale.md.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.processes import SNAKEFILE, checked, snakemake
from benchmarks.results import ROOT, Goals, in_turn, keep_table, made_on, markdown, medians, table, write
from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import SEAL
from snaketune.config.load import load
from snaketune.files import digest_file
from snaketune.report.pages import pages_of
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.status import Results
from snaketune.stages.graph import JobGraph
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

FOUND = ROOT / "results/bench/scale.json"
DOCUMENT = ROOT / "docs/scale.md"
TIMES = 3
# Corpora, parts of each, values of a grid in two directions.
SIZES = {1_000: (20, 10, 12, 20), 10_000: (60, 64, 25, 40)}
GOALS: Goals = {
    "nothing_1000_ratio": ("at most", 2),
    "nothing_10000_ratio": ("at most", 2),
    "plan_1000_s": ("at most", 1.5),
    "plan_10000_s": ("at most", 15),
}
DRY_RUN = ("--dry-run", "--cores", "1")
PLAIN = """
rule all:
    input: expand("results/{{n}}/manifest.json", n=range({count}))
rule one:
    output: manifest="results/{{n}}/manifest.json", payload=directory("results/{{n}}/rows"), run="results/{{n}}/run.json"
    shell: "true"
"""


def config_of(corpora: int, parts: int, betas: int, rates: int) -> dict[str, Any]:
    """Return a config with a run per corpus, a sweep from the first run, and an evaluation of each variant."""
    sources = [{"files": ["rows.jsonl"]}]
    training = {"learning_rate": 1e-4, "micro_batch_rows": 2, "gradient_checkpointing": False}
    base = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2}
    grid = {
        "beta": [(n + 1) / 100 for n in range(betas)],
        "training.learning_rate": [n * 1e-7 for n in range(1, rates + 1)],
    }
    chats = {
        f"chat{n}": {"kind": "conversations", "sources": sources, "split_seed": n, "parts": parts}
        for n in range(corpora)
    }
    return {
        "corpora": chats | {"pairs": {"kind": "preferences", "sources": sources, "held_out": 0.1}},
        "tokenizers": {"small": {"train": {"corpora": ["pairs"], "vocab_size": 400}}},
        "sft": {
            "run0": {"base": base, "corpus": "chat0", "tokenizer": "small", "training": training},
            **{f"run{n}": {"extends": "run0", "corpus": f"chat{n}"} for n in range(1, corpora)},
        },
        "dpo": {
            "run": {"from": "run0", "corpus": "pairs", "training": training},
            "sweep": {"extends": "run", "grid": grid},
        },
        "eval": {"all": {"models": ["sft:run0", "dpo:sweep"], "preferences": ["pairs"]}},
    }


def write_config(size: int, folder: Path) -> dict[str, Any]:
    config = config_of(*SIZES[size])
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return config


def make_results(graph: JobGraph) -> None:
    """Write a stand-in result for every job, each made from those before it."""
    results = Results(code_of=lambda stage: code_digest(STAGES[stage].module))
    for job in graph.jobs.values():
        payload = Path(job.payload)
        payload.mkdir(parents=True)
        files = [payload / name for name in (pages_of(graph) if job.stage == "report" else ["rows"])]
        for file in files:
            file.write_text(job.key, encoding="utf-8")
        manifest = {
            "stage": job.stage,
            "spec": json.loads(canonical(job.spec)),
            "code": results.code_of(job.stage),
            "inputs": {role: [entry for _, entry in read] for role, read in results.inputs_read(job).items()},
            "payload": {file.name: {"digest": digest_file(file), "bytes": file.stat().st_size} for file in files},
            "records": {},
            "versions": {},
            "pairs": job.key,
        }
        Path(job.run).write_text("{}\n", encoding="utf-8")
        # As a stage writes it, without waiting for the disk.
        sealed = manifest | {SEAL: digest_json(manifest)}
        Path(job.manifest).write_text(json.dumps(sealed, indent=2, sort_keys=True), encoding="utf-8")


def make_plain_results(count: int) -> None:
    for n in range(count):
        folder = Path(f"results/{n}")
        (folder / "rows").mkdir(parents=True)
        for name in ("manifest.json", "run.json"):
            (folder / name).write_text("{}\n", encoding="utf-8")


def seconds(folder: Path, *arguments: str) -> tuple[float, str]:
    """Return the processor time and the output of a Snakemake call."""
    began = os.times()
    said = checked(snakemake(folder, *arguments))
    ended = os.times()
    return ended.children_user + ended.children_system - began.children_user - began.children_system, said


def measure(size: int) -> dict[str, float]:
    with TemporaryDirectory(prefix=f"scale-{size}-") as name:
        folders = {side: Path(name, side) for side in ("ours", "plain")}
        for folder in folders.values():
            folder.mkdir()
        with chdir(folders["ours"]):
            graph = JobGraph(*load(write_config(size, folders["ours"])))
        # Without the jobs that only inspect trainings.
        count = sum(job.stage not in ("calibrate", "timing", "bottleneck") for job in graph.jobs.values())
        (folders["plain"] / "Snakefile").write_text(PLAIN.format(count=count - 1), encoding="utf-8")

        def call(side: str, what: str) -> float:
            took, said = seconds(folders[side], *(SNAKEFILE if side == "ours" else ()), *DRY_RUN)
            check(said, what, count)
            return took

        found = {f"jobs_{size}": float(count)}
        for what in ("plan", "nothing"):
            if what == "nothing":
                with chdir(folders["ours"]):
                    make_results(graph)
                with chdir(folders["plain"]):
                    make_plain_results(count - 1)
            times = medians(in_turn(TIMES, {side: lambda side=side, what=what: call(side, what) for side in folders}))
            found |= {f"{what}_{size}_s": times["ours"], f"snakemake_{what}_{size}_s": times["plain"]}
            found[f"{what}_{size}_ratio"] = times["ours"] / times["plain"]
        return found


def check(said: str, what: str, count: int) -> None:
    """Check that all jobs were planned, or that none was run."""
    planned = re.search(r"^total +(\d+)$", said, re.MULTILINE)
    right = "Nothing to be done" in said if what == "nothing" else planned and int(planned[1]) in (count, count + 1)
    if not right:
        raise SystemExit(f"{what}, {count} jobs: {said[-3000:]}")


def profile(size: int) -> None:
    with TemporaryDirectory(prefix=f"scale-{size}-") as folder:
        write_config(size, Path(folder))
        command = [
            sys.executable,
            "-m",
            "cProfile",
            "-o",
            "profile",
            "-m",
            "snakemake",
            *DRY_RUN,
            *SNAKEFILE,
        ]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        code = "import pstats; pstats.Stats('profile').sort_stats('cumulative').print_stats(70)"
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--profile", action="store_true", help="show where planning spends its time instead")
    options = parser.parse_args()
    if options.profile:
        for size in options.sizes:
            profile(size)
        return
    floor = statistics.median(seconds(Path(), "--version")[0] for _ in range(TIMES))
    details: dict[str, Any] = {"made": made_on("benchmarks.scale"), "floor": {"snakemake_version_s": floor}}
    for size in options.sizes:
        details[str(size)] = measure(size)
        print(size, details[str(size)], flush=True)
    write(FOUND, details, GOALS)
    shown = {key: value for part in (*map(str, options.sizes), "floor") for key, value in details[part].items()}
    beside = markdown(
        ("baseline", ""), [(f"`{key}`", f"{value:.3g}") for key, value in shown.items() if key not in GOALS]
    )
    keep_table(DOCUMENT, "scale", f"{table(details, GOALS)}\n\n{beside}")


if __name__ == "__main__":
    main()
