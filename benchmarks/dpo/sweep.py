"""Eight variants, four betas by two losses, an epoch each: from an SFT model and a file of pairs to the metrics of all eight.

Ours by the workflow, `snakemake --cores 1`, from raw pairs to eight models with their run.json: preparation, one reference
pass for all, and a process or three for each training. TRL's in one process, which spares it seven starts: a trainer for each
variant, which prepares the data and computes the reference as it does by itself, or takes it from the cache of a trainer before
it. Variants of one loss differ in a factor alone, so TRL trains the first variant, and then one of each loss, which is counted
for the others.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from benchmarks.data_path.rows import ROOT
from benchmarks.dpo.material import Material, make_reference
from benchmarks.dpo.speed import AT_ONCE, MODULE, write_arguments
from benchmarks.processes import SAID, checked, environment, measured, one_core

BETAS = (0.05, 0.1, 0.2, 0.5)
LOSSES = ("sigmoid", "ipo")
# The data set that the swept pairs are of.
SWEPT = "pandalm"
CORES = ("--cores", "1")


def sweep(material: Material, name: str) -> dict[str, Any]:
    """Time both sides once; minutes need no median."""
    make_reference(material, name)
    with one_core():
        ours = run_ours(material, name, material.folder / "sweep")
        batch_size, reference_batch_size = AT_ONCE[SWEPT]
        trained = [{"loss": LOSSES[0], "beta": BETAS[0]}, *({"loss": loss, "beta": BETAS[1]} for loss in LOSSES)]
        arguments = {
            "run": name,
            "variants": trained,
            "batch_size": batch_size,
            "reference_batch_size": reference_batch_size,
        }
        started = time.perf_counter()
        theirs = measured(MODULE, "trl, sweep", material.folder, write_arguments(material, arguments))
        seconds = time.perf_counter() - started
    later = [run["seconds"] for run in theirs["runs"][1:]]
    # Its start and the first variant once; the others are as long as a later one of their loss.
    whole = seconds - sum(later) + len(BETAS) * sum(later) - later[0]
    return {
        "sweep8_speedup_vs_trl": whole / ours["seconds"],
        "data": SWEPT,
        "seconds": {"snaketune": ours["seconds"], "trl": whole, "trl, measured": seconds},
        "snaketune": ours,
        "trl": theirs,
    }


def run_ours(material: Material, name: str, project: Path) -> dict[str, Any]:
    """Time the workflow in a project that has only the SFT model and its tokenizer."""
    project.mkdir()
    config = yaml.safe_load((material.folder / "config.yaml").read_text(encoding="utf-8"))
    run = config["dpo"][name]
    shutil.copy(material.folder / f"{name}.jsonl", project)
    shutil.copy(material.folder / "chats.jsonl", project)
    config = {
        "corpora": {run["corpus"]: config["corpora"][run["corpus"]], "chats": config["corpora"]["chats"]},
        "tokenizers": config["tokenizers"],
        "sft": config["sft"],
        "dpo": {"run": run | {"grid": {"beta": list(BETAS), "loss": list(LOSSES)}}},
    }
    (project / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    snakemake(project, "--", "results/sft/start/manifest.json", "results/tokenizer/shared/manifest.json")
    started = time.perf_counter()
    snakemake(project, "--until", "dpo")
    seconds = time.perf_counter() - started
    runs = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in project.glob("results/dpo/*/run.json")
    }
    if len(runs) != len(BETAS) * len(LOSSES):
        raise SystemExit(f"{len(runs)} variants were trained, expected {len(BETAS) * len(LOSSES)}")
    return {"seconds": seconds, "last": {variant: run["history"][-1] for variant, run in runs.items()}}


def snakemake(project: Path, *arguments: str) -> None:
    """Run Snakemake on one core in the project's folder."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *CORES]
    command += ["--configfile", "config.yaml", *arguments]
    checked(subprocess.run(command, cwd=project, env=environment(project / "cache"), **SAID))
