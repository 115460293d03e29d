"""The launched process of a training: read the job, make sure of the code, let its worker train, report."""

import json
import logging
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from snaketune.artifacts.manifest import write_json
from snaketune.errors import SnaketuneError
from snaketune.stages.attempt import read_attempt
from snaketune.stages.disk import disk_trouble
from snaketune.stages.locks import locked
from snaketune.stages.work import WorkFolder
from snaketune.training.launch import is_first_process


def work_on(job: dict[str, Any]) -> None:
    """Let the job's worker train, and write down what it reports."""
    work = WorkFolder(Path(job["work"]))
    worker = import_module(job["worker"])
    lock = locked(work.folder / "training.lock", "an earlier attempt's process to end")
    # An orphan may still be writing there. The first process locks for all: the others would wait for it, and it for them.
    with lock if is_first_process() else nullcontext():
        outcome = worker.train(job, work)
        if is_first_process():
            write_json(work.state / "outcome.json", asdict(outcome))


def main(job_file: Path) -> None:
    """Exits with a message where the fault isn't ours."""
    disable_progress_bar()
    if torch.cuda.is_available():
        # Before anything is loaded: each process on its own GPU.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # peft imports it wherever it is installed, and then it misses kernels that nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    job = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        if attempt := read_attempt(job_file.parent):
            attempt.import_code(job["stage"])
        work_on(job)
    except Exception as error:
        told = str(error) if isinstance(error, SnaketuneError) else disk_trouble(error)
        if not told:
            raise
        sys.exit(f"error: {told}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
