"""GPU slots: each job claims GPUs of its own. Snakemake counts a `gpu` resource, but doesn't say which GPUs a job gets.

A slot is a lock per GPU, host and SLURM job (which may number its GPUs from 0, run several jobs of a workflow, and have more
GPUs than it requested). Without CUDA_VISIBLE_DEVICES, GPUs are known by their UUIDs, since CUDA and nvidia-smi may number them
differently. Each MIG slice of a card counts as a GPU.
"""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from snaketune.config.operation import Operation
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.errors import SnaketuneError
from snaketune.stages.findings import Finding
from snaketune.stages.host.locks import take

SLOT_FOLDER = Path("results/.work/.gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS_BETWEEN_TRIES = 1.0
SECONDS_FOR_DRIVER = 30.0
# Lines of `nvidia-smi -L`; the slices of a card follow it, indented.
CARD = re.compile(r"GPU \d+: (?P<name>.+?) \(UUID: (?P<uuid>GPU-[^)]+)\)")
SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
ALLOW = "operation.allow_cpu: true"


def driver_gpus() -> dict[str, str]:
    """The names of the GPUs that nvidia-smi lists, by UUID, of sliced cards the slices; empty without nvidia-smi, or if it
    hangs."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", "-L"]
    try:
        # With a broken card it exits with an error, but lists the others.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS_FOR_DRIVER)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"nvidia-smi doesn't list this machine's GPUs: {error}", flush=True)
        return {}
    names: dict[str, str] = {}
    card = None
    for line in done.stdout.splitlines():
        if seen := CARD.match(line):
            card = seen
            names[card["uuid"]] = card["name"]
        elif card and (seen := SLICE.match(line)):
            names.pop(card["uuid"], None)
            names[seen["uuid"]] = f"{card['name']} MIG {seen['profile']}"
    return names


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that this process may use, without importing torch (which would initialize them)."""
    if VISIBLE not in os.environ:
        return list(driver_gpus())
    named = (gpu.strip() for gpu in os.environ[VISIBLE].split(","))
    # Like CUDA, which ignores everything from the first unknown entry on: `-1` or `NoDevFiles` hides all.
    known = takewhile(lambda gpu: gpu.isdecimal() or gpu.startswith(("GPU-", "MIG-")), named)
    return list(dict.fromkeys(known))


def gpu_model() -> str:
    """The name for the first GPU that this process may use, as the driver lists it; empty if that isn't certain."""
    if not (visible := visible_gpus()):
        return ""
    names = driver_gpus()
    possible = {names[visible[0]]} if visible[0] in names else set(names.values())
    return possible.pop() if len(possible) == 1 else ""


@contextmanager
def claimed_gpus(count: int, folder: Path = SLOT_FOLDER) -> Iterator[list[str]]:
    """Claim `count` GPUs and make them the only visible ones; wait while too few are free.

    Without GPUs nothing is claimed; SnaketuneError if there are fewer than `count`, or several slices of cards are requested.
    """
    visible = visible_gpus()
    if count and not visible:
        yield []
        return
    if count > len(visible):
        raise SnaketuneError(
            f"operation.gpus: the job requests {count} GPUs, but {len(visible)} can be used here; lower operation.gpus"
        )
    if count > 1 and any(gpu.startswith("MIG-") for gpu in visible):
        raise SnaketuneError(
            f"operation.gpus: {count} GPUs are requested, but this machine's GPUs are slices of cards (MIG), of which CUDA "
            "shows a job only one; set operation.gpus: 1, or run it on whole cards"
        )
    before = os.environ.get(VISIBLE)
    with ExitStack() as held:
        waiting = False
        while len(claimed := _claim(visible, count, folder, held)) < count:
            if not waiting:
                print(f"waiting for {count} of {len(visible)} GPUs to be free", flush=True)
                waiting = True
            time.sleep(SECONDS_BETWEEN_TRIES)
        # A job that requests no GPU sees none.
        os.environ[VISIBLE] = ",".join(claimed)
        try:
            yield claimed
        finally:
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def _claim(gpus: list[str], count: int, folder: Path, held: ExitStack) -> list[str]:
    """Lock `count` free slots until `held` is closed, or none, so that two jobs can't wait for each other's slots."""
    machine = "-".join([socket.gethostname(), *filter(None, [os.environ.get("SLURM_JOB_ID")])])
    claimed: list[str] = []
    with ExitStack() as attempt:
        for gpu in gpus:
            name = f"{machine}-{re.sub(r'[^0-9A-Za-z]', '-', gpu)}.lock"
            if len(claimed) < count and (slot := take(folder / name)):
                attempt.callback(slot.release)
                claimed.append(gpu)
        if len(claimed) < count:
            return []
        held.enter_context(attempt.pop_all())
    return claimed


def gpu_findings(spec: Any, operation: Operation) -> list[Finding]:
    """What needs a GPU, for a job that has none; empty if the config allows the CPU. Args: spec: of any GPU stage.

    >>> print(*gpu_findings(None, Operation(gpus=2)))  # doctest: +NORMALIZE_WHITESPACE
    operation.gpus: 2 GPUs are configured, and this job has none; run it on a machine with GPUs, set gpus: 1, or train in 2
        processes on the CPU by operation.allow_cpu: true
    """
    if operation.allow_cpu:
        return []
    # A calibration has the spec of the run that it measures in its own.
    run = getattr(spec, "run", spec)
    training = getattr(run, "training", None)
    needs = []
    if getattr(run, "quantization", None):
        do = f"remove quantization, or compute them on the CPU, slowly, by {ALLOW}"
        needs.append(("quantization", "4-bit weights are used to fit a GPU", do))
    if training and OPTIMIZERS[training.optimizer].for_gpus:
        do = f"set adamw_torch_fused, or keep it on the CPU by {ALLOW}"
        needs.append(("training.optimizer", f"{training.optimizer} is used to fit a GPU", do))
    for key, count, what in (("gpus", operation.gpus, "GPUs"), ("nodes", operation.nodes, "nodes with GPUs")):
        if count > 1:
            do = f"set {key}: 1, or train in {operation.processes} processes on the CPU by {ALLOW}"
            needs.append((f"operation.{key}", f"{count} {what} are configured", do))
    return [
        Finding(key=key, problem=f"{need}, and this job has none", do=f"run it on a machine with GPUs, {do}")
        for key, need, do in needs
    ]
