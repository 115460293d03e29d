"""Each job its own GPUs: Snakemake counts a `gpu` resource but never says which one a job got.

A slot is a lock file per GPU and host; the job that holds it sees that GPU alone, through CUDA_VISIBLE_DEVICES. SLURM assigns
GPUs to its own jobs, and may number each job's from 0; several of ours may be one of these, and a job may be given more than it
asked for, so slots are taken there too, of that job. On machines without GPUs nothing is claimed.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from snaketune.errors import SnaketuneError
from snaketune.stages.locks import NoLocks, try_lock

SLOT_FOLDER = Path("results/.work/.gpus")
SECONDS_BETWEEN_TRIES = 1.0


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that this process may use, without importing torch (which would touch them)."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = (gpu.strip() for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        # As CUDA does, which hides all from the first on that it doesn't know: `-1` or `NoDevFiles` for none at all.
        return list(takewhile(lambda gpu: gpu.isdecimal() or gpu.startswith(("GPU-", "MIG-")), named))
    if not shutil.which("nvidia-smi"):
        return []
    found = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    return found.stdout.split() if found.returncode == 0 else []


def gpu_model() -> str:
    """What the first GPU that this process may use is called, as the driver has it; empty where it doesn't say."""
    if not (gpus := visible_gpus()) or not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id", gpus[0]]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


@contextmanager
def claimed_gpus(count: int, folder: Path = SLOT_FOLDER) -> Iterator[list[str]]:
    """Hold `count` GPUs and make them the only visible ones; waits while all are taken.

    Raises:
        SnaketuneError: the machine has GPUs, but fewer than `count`.
    """
    gpus = visible_gpus()
    if count and not gpus:
        yield []
        return
    if count > len(gpus):
        raise SnaketuneError(f"the job asks for {count} GPUs, this machine shows {len(gpus)}; lower operation.gpus")
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    with ExitStack() as held:
        claimed: list[str] = []
        told = False
        while len(claimed) < count:
            claimed = _try_all(gpus, count, folder, held)
            if len(claimed) < count:
                if not told:
                    print(f"waiting for {count} of {len(gpus)} GPUs to be free", flush=True)
                    told = True
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


def _try_slot(folder: Path, name: str) -> TextIO | None:
    """Lock a slot if it is free; where the results' file system has no locks, in this host's own folder for such things."""
    try:
        return try_lock(folder / name)
    except NoLocks:
        own = Path(tempfile.gettempdir()) / f"snaketune-gpus-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        return try_lock(own / name)


def _try_all(gpus: list[str], count: int, folder: Path, held: ExitStack) -> list[str]:
    """Lock `count` free slots, or none at all, so that two jobs can't each wait for the other's half."""
    place = "-".join([socket.gethostname(), *filter(None, [os.environ.get("SLURM_JOB_ID")])])
    with ExitStack() as attempt:
        claimed = []
        for gpu in gpus:
            name = "".join(letter if letter.isalnum() else "-" for letter in gpu)
            if not (slot := _try_slot(folder, f"{place}-{name}.lock")):
                continue
            attempt.enter_context(slot)
            claimed.append(gpu)
            if len(claimed) == count:
                held.enter_context(attempt.pop_all())
                return claimed
    return []
