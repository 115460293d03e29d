"""GPU slots: each job holds its own GPUs. Snakemake counts a `gpu` resource but never says which GPU a job got.

A slot is a lock file per GPU and host; the job that holds it sees that GPU alone, through CUDA_VISIBLE_DEVICES. SLURM assigns
GPUs to its own jobs, and may number each job's from 0; several of ours may be one of these, and a job may be given more than it
asked for, so slots are taken there too, of that job. On machines without GPUs nothing is claimed.

A slot is named after the GPU's UUID where nvidia-smi lists it, so that a GPU has one slot whether it was named by number or by
UUID. A number means the same GPU to CUDA and to nvidia-smi only where all GPUs are alike: CUDA counts the fastest first,
nvidia-smi by bus. Of a card that is sliced (MIG), each slice is a GPU.
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
from itertools import groupby, takewhile
from pathlib import Path
from typing import TextIO

from snaketune.errors import SnaketuneError
from snaketune.stages.host.locks import NoLocks, try_lock

SLOT_FOLDER = Path("results/.work/.gpus")
SECONDS_BETWEEN_TRIES = 1.0
SECONDS_FOR_DRIVER = 30.0
# Lines of `nvidia-smi -L`; a card's slices follow it, indented.
CARD = re.compile(r"GPU (?P<index>\d+): (?P<name>.+?) \(UUID: (?P<uuid>GPU-[^)]+)\)")
SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as the driver lists it, or a slice of one; `name` is torch's name for it, `index` nvidia-smi's for the card."""

    index: str
    uuid: str
    name: str


def driver_gpus() -> list[Gpu]:
    """What nvidia-smi lists; a card that is sliced is its slices. Empty without nvidia-smi, or where it hangs."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        # With a broken card it ends with an error, and lists the others all the same.
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=SECONDS_FOR_DRIVER
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"nvidia-smi doesn't list this machine's GPUs: {error}", flush=True)
        return []
    found: list[Gpu] = []
    card = None
    for line in listed.splitlines():
        if seen := CARD.match(line):
            card = Gpu(**seen.groupdict())
            found.append(card)
        elif card and (seen := SLICE.match(line)):
            found = [gpu for gpu in found if gpu is not card]
            found.append(Gpu(index=card.index, uuid=seen["uuid"], name=f"{card.name} MIG {seen['profile']}"))
    return found


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that this process may use, without importing torch (which would touch them)."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = (gpu.strip() for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        # As CUDA does, which hides all from the first on that it doesn't know: `-1` or `NoDevFiles` for none at all.
        return list(takewhile(lambda gpu: gpu.isdecimal() or gpu.startswith(("GPU-", "MIG-")), named))
    listed = driver_gpus()
    return [gpu.index if _numbers_agree(listed) else gpu.uuid for gpu in listed]


def _numbers_agree(listed: list[Gpu]) -> bool:
    """Whether a number is the same GPU for CUDA as for nvidia-smi, which leaves the number of a lost card out."""
    counted = [gpu.index for gpu in listed] == [str(number) for number in range(len(listed))]
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return counted and not _sliced(listed) and (by_bus or len({gpu.name for gpu in listed}) <= 1)


def _sliced(listed: list[Gpu]) -> bool:
    return any(gpu.uuid.startswith("MIG-") for gpu in listed)


def _of(identifier: str, listed: list[Gpu]) -> Gpu | None:
    """The GPU of an index, a UUID or the beginning of one; None where that isn't known for certain."""
    if identifier.isdecimal():
        found = [gpu for gpu in listed if gpu.index == identifier] if _numbers_agree(listed) else []
    else:
        found = [gpu for gpu in listed if gpu.uuid.startswith(identifier)]
    return found[0] if len(found) == 1 else None


def gpu_model() -> str:
    """torch's name for the first GPU that this process may use, as the driver lists it; empty where it isn't known."""
    if not (gpus := visible_gpus()):
        return ""
    found = _of(gpus[0], driver_gpus())
    return found.name if found else ""


@contextmanager
def claimed_gpus(count: int, folder: Path = SLOT_FOLDER) -> Iterator[list[str]]:
    """Hold `count` GPUs and make them the only visible ones; waits while all are taken. Several are of one model if possible.

    Raises:
        SnaketuneError: the machine has GPUs, but fewer than `count`; or several slices of cards are wanted for one job.
    """
    gpus = visible_gpus()
    if count and not gpus:
        yield []
        return
    if count > len(gpus):
        raise SnaketuneError(f"the job asks for {count} GPUs, this machine shows {len(gpus)}; lower operation.gpus")
    listed = driver_gpus() if count else []
    known = {gpu: _of(gpu, listed) for gpu in gpus}
    # A GPU that is named twice has one slot.
    gpus = list({(known[gpu] or gpu): gpu for gpu in reversed(gpus)}.values())[::-1]
    if count > len(gpus):
        raise SnaketuneError(
            f"the job asks for {count} GPUs, CUDA_VISIBLE_DEVICES names {len(gpus)}; lower operation.gpus"
        )
    groups = _alike(gpus, known, count, sliced=_sliced(listed))
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    with ExitStack() as held:
        claimed: list[str] = []
        waiting = False
        while len(claimed) < count:
            claimed = next(filter(None, (_try_all(group, known, count, folder, held) for group in groups)), [])
            if len(claimed) < count:
                if not waiting:
                    print(f"waiting for {count} of {len(gpus)} GPUs to be free", flush=True)
                    waiting = True
                time.sleep(SECONDS_BETWEEN_TRIES)
        # A job that asked for none sees none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claimed)
        try:
            yield claimed
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before


def _alike(gpus: list[str], known: dict[str, Gpu | None], count: int, *, sliced: bool) -> list[list[str]]:
    """The GPUs to choose `count` from: groups of one model that are large enough, else all of them.

    Args:
        sliced: whether the machine has slices of cards.
    Raises:
        SnaketuneError: CUDA shows a process one slice of a card at most.
    """

    def name(gpu: str) -> str:
        found = known[gpu]
        return found.name if found else ""

    if count <= 1:
        return [gpus]
    groups = [list(group) for _, group in groupby(sorted(gpus, key=name), name)]
    if sliced:
        # Of a number it isn't known whether it is a slice.
        groups = [group for group in groups if all(gpu.startswith("GPU-") for gpu in group)]
    if enough := [group for group in groups if len(group) >= count]:
        return enough
    if sliced:
        raise SnaketuneError(
            f"operation.gpus: {count}, and this machine's GPUs are slices of cards (MIG), of which CUDA shows a job only one; "
            "set operation.gpus: 1, or run it on whole cards"
        )
    models = ", ".join(f"{len(group)} {name(group[0]) or 'unknown'}" for group in groups)
    if len(groups) > 1:
        print(f"note: {count} GPUs of different models ({models}): each step waits for the slowest", flush=True)
    return [gpus]


def _try_slot(folder: Path, name: str) -> TextIO | None:
    """Lock a slot if it is free; where the results' file system has no locks, in this host's own folder for such things."""
    try:
        return try_lock(folder / name)
    except NoLocks:
        own = Path(tempfile.gettempdir()) / f"snaketune-gpus-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        return try_lock(own / name)


def _try_all(gpus: list[str], known: dict[str, Gpu | None], count: int, folder: Path, held: ExitStack) -> list[str]:
    """Lock `count` free slots, or none at all, so that two jobs can't each wait for the other's half."""
    place = "-".join([socket.gethostname(), *filter(None, [os.environ.get("SLURM_JOB_ID")])])
    with ExitStack() as attempt:
        claimed = []
        for gpu in gpus:
            found = known[gpu]
            name = re.sub(r"[^0-9A-Za-z]", "-", found.uuid if found else gpu)
            if not (slot := _try_slot(folder, f"{place}-{name}.lock")):
                continue
            attempt.enter_context(slot)
            claimed.append(gpu)
            if len(claimed) == count:
                held.enter_context(attempt.pop_all())
                return claimed
    return []
