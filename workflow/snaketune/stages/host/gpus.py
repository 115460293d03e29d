"""GPU slots: each job claims GPUs of its own. Snakemake counts a `gpu` resource, but doesn't say which GPUs a job gets.

A slot is a lock file per GPU, host and SLURM job (which may number its GPUs from 0, run several jobs of a workflow, and have
more GPUs than it requested). It is named after the GPU's UUID if nvidia-smi lists it, so that a GPU has one slot whether it is
given by number or by UUID. A number means the same GPU to CUDA and to nvidia-smi only if all GPUs are of one model: CUDA counts
the fastest first, nvidia-smi by bus. Each MIG slice of a card counts as a GPU.
"""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from snaketune.config.operation import Operation
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.errors import SnaketuneError
from snaketune.stages.findings import Finding
from snaketune.stages.host.locks import NoLocks, try_lock

SLOT_FOLDER = Path("results/.work/.gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS_BETWEEN_TRIES = 1.0
SECONDS_FOR_DRIVER = 30.0
# Lines of `nvidia-smi -L`; the slices of a card follow it, indented.
CARD = re.compile(r"GPU (?P<index>\d+): (?P<name>.+?) \(UUID: (?P<uuid>GPU-[^)]+)\)")
SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
ALLOW = "operation.allow_cpu: true"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU or a slice of one: `name` is torch's, `index` the card's. If the driver doesn't list it, both are empty."""

    index: str
    uuid: str
    name: str


def driver_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists, of sliced cards the slices; empty without nvidia-smi, or if it hangs."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "-L"]
    try:
        # With a broken card it exits with an error, but lists the others.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS_FOR_DRIVER)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"nvidia-smi doesn't list this machine's GPUs: {error}", flush=True)
        return []
    gpus: list[Gpu] = []
    card = None
    for line in done.stdout.splitlines():
        if seen := CARD.match(line):
            card = Gpu(**seen.groupdict())
            gpus.append(card)
        elif card and (seen := SLICE.match(line)):
            gpus = [gpu for gpu in gpus if gpu is not card]
            gpus.append(Gpu(index=card.index, uuid=seen["uuid"], name=f"{card.name} MIG {seen['profile']}"))
    return gpus


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that this process may use, without importing torch (which would initialize them)."""
    if VISIBLE in os.environ:
        named = (gpu.strip() for gpu in os.environ[VISIBLE].split(","))
        # Like CUDA, which ignores everything from the first unknown entry on: `-1` or `NoDevFiles` hides all.
        return list(takewhile(lambda gpu: gpu.isdecimal() or gpu.startswith(("GPU-", "MIG-")), named))
    listed = driver_gpus()
    return [gpu.index if _numbers_agree(listed) else gpu.uuid for gpu in listed]


def gpu_model() -> str:
    """The name for the first GPU that this process may use, as the driver lists it; empty if unknown."""
    return _of(gpus[0], driver_gpus()).name if (gpus := visible_gpus()) else ""


def _numbers_agree(listed: list[Gpu]) -> bool:
    """Whether a number is the same GPU for CUDA as for nvidia-smi, which skips the number of a lost card."""
    counted = [gpu.index for gpu in listed] == [str(number) for number in range(len(listed))]
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return counted and not _sliced(listed) and (by_bus or len({gpu.name for gpu in listed}) <= 1)


def _sliced(listed: list[Gpu]) -> bool:
    return any(gpu.uuid.startswith("MIG-") for gpu in listed)


def _of(identifier: str, listed: list[Gpu]) -> Gpu:
    """The GPU with this index, UUID or UUID prefix; one without a name if that isn't certain."""
    if identifier.isdecimal():
        matches = [gpu for gpu in listed if gpu.index == identifier] if _numbers_agree(listed) else []
    else:
        matches = [gpu for gpu in listed if gpu.uuid.startswith(identifier)]
    return matches[0] if len(matches) == 1 else Gpu(index="", uuid=identifier, name="")


@contextmanager
def claimed_gpus(count: int, folder: Path = SLOT_FOLDER) -> Iterator[list[str]]:
    """Claim `count` GPUs and make them the only visible ones; wait while too few are free. They are of one model if possible.

    Without GPUs nothing is claimed; SnaketuneError if there are fewer than `count`, or several slices of cards are requested.
    """
    visible = visible_gpus()
    if count and not visible:
        yield []
        return
    listed = driver_gpus() if count else []
    gpus: dict[str, Gpu] = {}
    for identifier in visible:
        # A GPU that is given twice has one slot.
        if (gpu := _of(identifier, listed)) not in gpus.values():
            gpus[identifier] = gpu
    for known, where in ((visible, "this machine has"), (gpus, f"{VISIBLE} lists")):
        if count > len(known):
            raise SnaketuneError(
                f"operation.gpus: the job requests {count} GPUs, {where} {len(known)}; lower operation.gpus"
            )
    groups = _candidate_groups(gpus, count, sliced=_sliced(listed))
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(VISIBLE)
    with ExitStack() as held:
        claimed: list[str] = []
        waiting = False
        while len(claimed) < count:
            claimed = next(filter(None, (_try_all(group, count, folder, held) for group in groups)), [])
            if not claimed:
                if not waiting:
                    print(f"waiting for {count} of {len(gpus)} GPUs to be free", flush=True)
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


def _candidate_groups(gpus: dict[str, Gpu], count: int, *, sliced: bool) -> list[dict[str, Gpu]]:
    """The groups to claim `count` GPUs from: those of one model that are large enough, otherwise all GPUs.

    Args:
        gpus: by identifier.
        sliced: whether the machine has sliced cards (MIG).
    """
    if count <= 1:
        return [gpus]
    models: dict[str, dict[str, Gpu]] = {}
    for identifier, gpu in gpus.items():
        # With slices, a number may be that of one.
        if not sliced or identifier.startswith("GPU-"):
            models.setdefault(gpu.name, {})[identifier] = gpu
    if enough := [models[name] for name in sorted(models) if len(models[name]) >= count]:
        return enough
    if sliced:
        raise SnaketuneError(
            f"operation.gpus: {count} GPUs are requested, but this machine's GPUs are slices of cards (MIG), of which CUDA "
            "shows a job only one; set operation.gpus: 1, or run it on whole cards"
        )
    if len(models) > 1:
        counts = ", ".join(f"{len(models[name])} {name or 'unknown'}" for name in sorted(models))
        print(f"note: {count} GPUs of different models ({counts}): each step waits for the slowest", flush=True)
    return [gpus]


def _try_all(gpus: dict[str, Gpu], count: int, folder: Path, held: ExitStack) -> list[str]:
    """Lock `count` free slots, or none, so that two jobs can't wait for each other's slots."""
    machine = "-".join([socket.gethostname(), *filter(None, [os.environ.get("SLURM_JOB_ID")])])
    with ExitStack() as attempt:
        claimed = []
        for identifier, gpu in gpus.items():
            if slot := _try_slot(folder, f"{machine}-{re.sub(r'[^0-9A-Za-z]', '-', gpu.uuid)}.lock"):
                attempt.enter_context(slot)
                claimed.append(identifier)
            if len(claimed) == count:
                held.enter_context(attempt.pop_all())
                return claimed
    return []


def _try_slot(folder: Path, name: str) -> TextIO | None:
    """Lock a slot if it is free. If the results' file system has no locks, the lock is in a temporary folder of this host."""
    try:
        return try_lock(folder / name)
    except NoLocks:
        host_folder = Path(tempfile.gettempdir()) / f"snaketune-gpus-{os.getuid()}"
        host_folder.mkdir(mode=0o700, exist_ok=True)
        return try_lock(host_folder / name)


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
