"""The demo trained on this machine twice, by the package's own launch path: undisturbed, and killed and resumed.

With `training.deterministic` both end with the same bytes. Without it, a GPU adds gradients up in any order: both see the same
rows in the same steps from the same states, and their losses agree to rounding.

Its rows, its tokenizer and its packing come from our stages, run here; then `python -m snaketune sft` in processes of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import ROOT, chain, made_tokenizer

# As config/config.yaml has the demo's.
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


def resumed(
    folder: Path, conversations: int, epochs: float, checkpoint_steps: int, *, deterministic: bool
) -> dict[str, Any]:
    """Whether both trainings agree, to the bit where they are deterministic; and what they say of themselves."""
    folder.mkdir()
    rows = folder / "chat.jsonl"
    with (ROOT / "resources/demo/chat.jsonl").open(encoding="utf-8") as file:
        rows.write_text("".join(islice(file, conversations)), encoding="utf-8")
    tokenizer = made_tokenizer(folder, [rows], vocab_size=512)
    pack = chain(folder / "chain", [rows], tokenizer, length=512)
    training = TRAINING | {"epochs": epochs, "deterministic": deterministic}
    spec = {"base": BASE, "training": training, "lora": None, "quantization": None}
    command = [
        *(sys.executable, "-m", "snaketune", "sft", "--spec", json.dumps(spec), "--out", "sft"),
        *("--pack", str(pack), "--tokenizer", str(tokenizer)),
        *("--checkpoint-steps", str(checkpoint_steps), "--log-steps", "1", "--micro-batch-rows", "2"),
    ]
    rooms = {name: folder / name for name in ("undisturbed", "killed")}
    for room in rooms.values():
        room.mkdir()
    seconds = _run(command, rooms["undisturbed"])
    killed_after = _killed(command, rooms["killed"], checkpoint_steps)
    _run(command, rooms["killed"])
    found, losses = {}, {}
    for name, room in rooms.items():
        manifest = json.loads((room / "sft/manifest.json").read_text(encoding="utf-8"))
        found[name] = {"model": manifest["payload"]["model.safetensors"], "counts": manifest["counts"]}
        run = json.loads((room / "sft/run.json").read_text(encoding="utf-8"))
        losses[name] = {entry["step"]: entry["loss"] for entry in run["history"]}
    straight, killed = losses["undisturbed"], losses["killed"]
    difference = max(abs(killed[step] / straight[step] - 1) for step in straight.keys() & killed.keys())
    run = json.loads((rooms["undisturbed"] / "sft/run.json").read_text(encoding="utf-8"))
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
        "seconds_undisturbed": seconds,
        "tokens_per_s": run["tokens_per_second_median"],
        "loss_first_last": [straight[min(straight)], straight[max(straight)]],
    }


def _run(command: list[str], room: Path) -> float:
    """Seconds."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=room, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"the training failed with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.perf_counter() - started


def _killed(command: list[str], room: Path, checkpoint_steps: int) -> int:
    """Kill all processes of a training a little after its first checkpoint; the step that was last heard of."""
    with subprocess.Popen(
        command, cwd=room, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        for line in process.stdout:
            step = int(line.split()[1].split("/")[0]) if line.startswith("step ") else 0
            if step > checkpoint_steps + 2:
                os.killpg(process.pid, signal.SIGKILL)
                return step
    raise RuntimeError("the training ended before it could be killed")
