"""The demo's stages on this machine, by the package's own launch path: trained, killed and resumed; evaluated; calibrated.

Rows, tokenizer and packing come from our stages, run here. With `training.deterministic` a resumed training ends with the same
bytes as an uninterrupted one. Without it, a GPU adds gradients up in any order: both see the same rows in the same steps from
the same states, and their losses agree to rounding. Calibration may use a hundredth of the GPU's memory, so that it runs out.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import chdir
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks.data_path.rows import ROOT, chain, made_tokenizer, stage
from benchmarks.jobs import job_command, job_of

# The values of config/config.yaml.
BASE = {
    "architecture": "llama", "hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 4, "rope_theta": 1000.0,
    "init_std": 0.08,
}  # fmt: skip
TRAINING = {
    "batch_rows": 2, "learning_rate": 3e-3, "warmup_fraction": 0.05, "weight_decay": 0.1,
    "betas": [0.9, 0.95],
}  # fmt: skip
# Relative difference of the losses of a step, after gradients were summed in another order.
ROUNDING = 0.05
# Rows of a step that is calibrated, and the share of the GPU's memory that it may use: 64 rows of 512 tokens don't fit 0.8 GB.
CALIBRATED_ROWS, SHARE_OF_MEMORY = 64, 0.01


def demo(folder: Path, conversations: int, checkpoint_steps: int) -> Iterator[dict[str, Any]]:
    """Yield one entry for each test."""
    rows = folder / "chat.jsonl"
    with (ROOT / "resources/demo/chat.jsonl").open(encoding="utf-8") as file:
        rows.write_text("".join(islice(file, conversations)), encoding="utf-8")
    tokenizer = made_tokenizer(folder, [rows], vocab_size=512)
    pack = chain(folder / "chain", [rows], tokenizer, length=512, held_out=0.05)
    for deterministic in (True, False):
        yield {"what": "killed and resumed"} | _resumed(
            folder / str(deterministic), pack, tokenizer, checkpoint_steps, deterministic
        )
    yield {"what": "evaluated"} | _evaluated(folder / "True/undisturbed", pack, tokenizer)
    yield {"what": "calibrated"} | _calibrated(folder / "calibration", pack, tokenizer)


def _resumed(folder: Path, pack: Path, tokenizer: Path, checkpoint_steps: int, deterministic: bool) -> dict[str, Any]:
    """Compare both trainings, bit by bit where they are deterministic; return their figures."""
    folder.mkdir()
    training = TRAINING | {"epochs": 1, "deterministic": deterministic}
    spec = {"base": BASE, "training": training, "lora": None, "quantization": None}
    operation = {"checkpoint_steps": checkpoint_steps, "log_steps": 1, "micro_batch_rows": 2}
    command = job_command(job_of("sft", spec, {"pack": pack, "tokenizer": tokenizer}, "sft", **operation), folder)
    folders = {name: folder / name for name in ("undisturbed", "killed")}
    for own in folders.values():
        own.mkdir()
    seconds = _run(command, folders["undisturbed"])
    killed_after = _killed(command, folders["killed"], checkpoint_steps)
    _run(command, folders["killed"])
    found, losses = {}, {}
    for name, own in folders.items():
        manifest = json.loads((own / "sft/manifest.json").read_text(encoding="utf-8"))
        found[name] = {"model": manifest["payload"]["model.safetensors"], "counts": manifest["counts"]}
        run = json.loads((own / "sft/run.json").read_text(encoding="utf-8"))
        losses[name] = {entry["step"]: entry["loss"] for entry in run["history"]}
    straight, killed = losses["undisturbed"], losses["killed"]
    difference = max(abs(killed[step] / straight[step] - 1) for step in straight.keys() & killed.keys())
    run = json.loads((folders["undisturbed"] / "sft/run.json").read_text(encoding="utf-8"))
    same = found["killed"] == found["undisturbed"]
    alike = found["killed"]["counts"] == found["undisturbed"]["counts"] and difference <= ROUNDING
    return {
        "status": "right" if same or (alike and not deterministic) else "wrong",
        "deterministic": deterministic,
        "same_digest": found["killed"]["model"] == found["undisturbed"]["model"],
        "largest_loss_difference": difference,
        "digests": found,
        "killed_after_step": killed_after,
        "device": run["device"],
        "seconds": seconds,
        "tokens_per_s": run["tokens_per_second_median"],
        "loss_first_last": [straight[min(straight)], straight[max(straight)]],
    }


def _evaluated(folder: Path, pack: Path, tokenizer: Path) -> dict[str, Any]:
    """Measure held-out loss and generated answers of the trained demo."""
    spec = {
        "base": None, "trust_remote_code": False, "conversations": ["demo"], "preferences": [], "generation": {},
        "exact_match": {}, "tasks": None, "samples": 3,
    }  # fmt: skip
    inputs = {
        "model": [folder / "sft/manifest.json"],
        "tokenizer": [tokenizer],
        "corpora": [pack.parents[1] / "corpus/manifest.json"],
        "packs": [pack],
    }
    started = time.perf_counter()
    with chdir(folder):
        stage("eval", spec, inputs, "eval")
    scores = json.loads((folder / "eval/scores/scores.json").read_text(encoding="utf-8"))["conversations"]["demo"]
    run = json.loads((folder / "eval/run.json").read_text(encoding="utf-8"))
    answered = run["responses_generated"]
    return {
        "status": "right" if scores["held_out_loss"] and answered else "wrong",
        "device": run["device"],
        "seconds": time.perf_counter() - started,
        "held_out_loss": scores["held_out_loss"],
        "responses": answered,
    }


def _calibrated(folder: Path, pack: Path, tokenizer: Path) -> dict[str, Any]:
    """Run the search for a micro-batch; on a GPU it must meet the limit of memory."""
    folder.mkdir()
    run = {"base": None, "training": TRAINING | {"batch_rows": CALIBRATED_ROWS}, "lora": None, "quantization": None}
    spec = {"base": BASE, "run": run, "gradient_checkpointing": "auto", "processes": 1, "launch": "single"}
    inputs = {"pack": pack, "tokenizer": tokenizer}
    command = job_command(job_of("calibrate", spec | {"zero_stage": None}, inputs, "calibrate"), folder)
    limit = {"PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{SHARE_OF_MEMORY}"}
    seconds = _run(command, folder, limit)
    curve = json.loads((folder / "calibrate/curve/curve.json").read_text(encoding="utf-8"))
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


def _run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> float:
    """Run a stage and return the seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | (variables or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{command[3]} failed with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.perf_counter() - started


def _killed(command: list[str], folder: Path, checkpoint_steps: int) -> int:
    """Kill all processes of a training shortly after its first checkpoint; return the last logged step."""
    with subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        for line in process.stdout:
            step = int(line.split()[1].split("/")[0]) if line.startswith("step ") else 0
            if step > checkpoint_steps + 2:
                os.killpg(process.pid, signal.SIGKILL)
                return step
    raise RuntimeError("the training ended before it could be killed")
