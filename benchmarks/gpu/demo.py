"""The demo's stages on this machine, by the package's own launch path: trained, killed and resumed; evaluated; calibrated.

Rows, tokenizer and packing come from our stages, run here. With `training.deterministic` a resumed training ends with the same
bytes as an uninterrupted one. Without it, a GPU adds gradients up in any order: both see the same rows in the same steps from
the same states, and their losses agree to rounding. Calibration may use a hundredth of the GPU's memory, so that it runs out.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks.jobs import Project, conversations
from benchmarks.processes import SAID
from benchmarks.results import ROOT, timed

# The values of config/config.yaml.
BASE = {
    "architecture": "llama", "hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 4, "rope_theta": 1000.0,
    "init_std": 0.08,
}  # fmt: skip
TRAINING = {"batch_rows": 2, "learning_rate": 3e-3, "warmup_fraction": 0.05, "weight_decay": 0.1, "betas": [0.9, 0.95]}
# Runs, and whether they are deterministic.
RUNS = {"exact": True, "default": False}
# Relative difference of the losses of a step, after gradients were summed in another order.
ROUNDING = 0.05
# Rows of a step that is calibrated, and the share of the GPU's memory that it may use: 64 rows of 512 tokens don't fit 0.8 GB.
CALIBRATED_ROWS, SHARE_OF_MEMORY = 64, 0.01
# A training's progress in its log: "sft/exact: step 8/28  loss 3.92 ...".
STEP_LINE = re.compile(r"^\S+: step (?P<step>\d+)/")


def demo(folder: Path, count: int, checkpoint_steps: int) -> Iterator[dict[str, Any]]:
    rows = folder / "chat.jsonl"
    with (ROOT / "resources/demo/chat.jsonl").open(encoding="utf-8") as file:
        rows.write_text("".join(islice(file, count)), encoding="utf-8")
    packing = {"length": 512}
    project = conversations(folder / "project", [rows], vocab_size=512, packing=packing, held_out=0.05)
    run = project.config["sft"].pop("start") | {"base": BASE}
    for name, deterministic in RUNS.items():
        training = {"epochs": 1, "deterministic": deterministic, "micro_batch_rows": 2}
        operation = {"checkpoint_steps": checkpoint_steps, "log_steps": 1}
        project.config["sft"][name] = run | {"training": TRAINING | training, "operation": operation}
    project.config["sft"]["calibrated"] = run | {"training": TRAINING | {"batch_rows": CALIBRATED_ROWS}}
    project.config["eval"] = {
        "all": {"models": ["sft:exact"], "conversations": ["chat"], "packing": packing, "samples": 3}
    }
    project.make(project.pack("sft", "exact"))
    for name, deterministic in RUNS.items():
        yield {"what": "killed and resumed"} | _resumed(project, name, checkpoint_steps, deterministic)
    yield {"what": "evaluated"} | _evaluated(replace(project, folder=folder / "exact/undisturbed"))
    yield {"what": "calibrated"} | _calibrated(project)


def _resumed(project: Project, name: str, checkpoint_steps: int, deterministic: bool) -> dict[str, Any]:
    """Compare both trainings, bit by bit where they are deterministic; return their figures."""
    copies = [project.copy_to(project.folder.with_name(name) / how) for how in ("undisturbed", "killed")]
    undisturbed, interrupted = (copy.folder for copy in copies)
    command, _ = (copy.command(copy.job("sft", name)) for copy in copies)
    seconds = timed(lambda: _run(command, undisturbed))()
    killed_after = _killed(command, interrupted, checkpoint_steps)
    _run(command, interrupted)
    found, losses = {}, {}
    for own in (undisturbed, interrupted):
        manifest, about = (_read(own / "results/sft" / name / file) for file in ("manifest.json", "run.json"))
        found[own.name] = {"model": manifest["payload"]["model.safetensors"], "counts": manifest["counts"]}
        losses[own.name] = {entry["step"]: entry["loss"] for entry in about["history"]}
    straight, killed = losses.values()
    difference = max(abs(killed[step] / straight[step] - 1) for step in straight.keys() & killed.keys())
    same = found["killed"] == found["undisturbed"]
    alike = found["killed"]["counts"] == found["undisturbed"]["counts"] and difference <= ROUNDING
    about = _read(undisturbed / "results/sft" / name / "run.json")
    return {
        "status": "right" if same or (alike and not deterministic) else "wrong",
        "deterministic": deterministic,
        "same_digest": found["killed"]["model"] == found["undisturbed"]["model"],
        "largest_loss_difference": difference,
        "digests": found,
        "killed_after_step": killed_after,
        "device": about["device"],
        "seconds": seconds,
        "tokens_per_s": about["tokens_per_second_median"],
        "loss_first_last": [straight[min(straight)], straight[max(straight)]],
    }


def _evaluated(project: Project) -> dict[str, Any]:
    """Measure held-out loss and generated answers of the trained demo."""
    job = project.job("eval", "all/sft-exact")
    seconds = timed(lambda: project.make(job))()
    scores = _read(project.folder / job.payload / "scores.json")["conversations"]["chat"]
    about = _read(project.folder / job.run)
    return {
        "status": "right" if scores["held_out_loss"] and about["responses_generated"] else "wrong",
        "device": about["device"],
        "seconds": seconds,
        "held_out_loss": scores["held_out_loss"],
        "responses": about["responses_generated"],
    }


def _calibrated(project: Project) -> dict[str, Any]:
    """Run the search for a micro-batch; on a GPU it must meet the limit of memory."""
    job = next(one for one in project.job("sft", "calibrated").after if one.stage == "calibrate")
    # Without epochs, the search has no limit of time.
    job = replace(job, operation=job.operation.model_copy(update={"calibrated_epochs": 0.0}))
    limit = {"PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{SHARE_OF_MEMORY}"}
    seconds = timed(lambda: _run(project.command(job), project.folder, limit))()
    curve = _read(project.folder / job.payload / "curve.json")
    ran_out = [one["micro_batch_rows"] for one in curve["trials"] if "out of memory" in one["why"]]
    return {
        "status": "right" if ran_out or not torch.cuda.is_available() else "wrong",
        "device": curve["device"],
        "seconds": seconds,
        "out_of_memory_at_rows": ran_out,
        "rows": curve["best"]["micro_batch_rows"],
        "tokens_per_s": curve["best"]["tokens_per_second"],
        "trials": curve["trials"],
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=os.environ | (variables or {}), **SAID)
    if done.returncode:
        raise RuntimeError(f"{command[3]} failed with {done.returncode}:\n{done.stdout[-3000:]}")


def _killed(command: list[str], folder: Path, checkpoint_steps: int) -> int:
    """Kill all processes of a training shortly after its first checkpoint; return the last logged step."""
    with subprocess.Popen(command, cwd=folder, start_new_session=True, **SAID) as process:
        for line in process.stdout:
            step = STEP_LINE.search(line)
            if step and int(step["step"]) > checkpoint_steps + 2:
                os.killpg(process.pid, signal.SIGKILL)
                return int(step["step"])
    raise RuntimeError("the training ended before it could be killed")
