"""Start a training through `accelerate launch`, one process per GPU, and wait for it.

The job's arguments travel as `state/job.json` in the work folder, its result comes back as `state/outcome.json`.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_artifact, write_json
from snaketune.errors import SnaketuneError
from snaketune.stages.attempt import read_attempt
from snaketune.stages.disk import disk_trouble
from snaketune.stages.gpus import visible_gpus
from snaketune.stages.locks import locked
from snaketune.stages.outcome import Outcome
from snaketune.stages.work import WorkFolder

PARENT_VARIABLE = "SNAKETUNE_PARENT"


def launch(module: str, work: WorkFolder, job: dict[str, Any]) -> Outcome:
    """Run `python -m module job.json` under accelerate and return what it reports.

    Raises:
        SnaketuneError: it failed; its own message stands above in the log.
    """
    outcome_file = work.state / "outcome.json"
    outcome_file.unlink(missing_ok=True)
    job_file = work.state / "job.json"
    write_json(job_file, job | {"module": module})
    processes = max(1, min(job["operation"]["gpus"], len(visible_gpus())))
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--num_processes", str(processes), "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *(["--cpu"] if not visible_gpus() else []),
        *(["--multi_gpu"] if processes > 1 else ["--quiet"]),
        *("--module", module, str(job_file)),
    ]
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    status = subprocess.run(command, env=environment).returncode
    if status == 0 and outcome_file.is_file():
        return Outcome(**json.loads(outcome_file.read_text(encoding="utf-8")))
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    raise SnaketuneError(f"the training process ended early ({how}); what it said stands above. Run again to resume")


def passed(**artifacts: Artifact) -> dict[str, Any]:
    """What of a job names these artifacts, and tells what they held when its fingerprint was computed."""
    paths = {role: str(artifact.manifest_path) for role, artifact in artifacts.items()}
    return paths | {"contents": {role: artifact.content for role, artifact in artifacts.items()}}


def read_passed(job: dict[str, Any], role: str, payload: str) -> Artifact:
    """An artifact that a job names. One written by hand has no `contents`, and takes what there is.

    Raises:
        SnaketuneError: somebody has replaced it since; the result would be kept as that of the old one.
    """
    artifact = read_artifact(Path(job[role]), payload)
    if artifact.content != job.get("contents", {}).get(role, artifact.content):
        raise SnaketuneError(f"{artifact.manifest_path} changed since this job began; run again")
    return artifact


def parent_is_gone() -> bool:
    """Whether the process that launched this training has died, so that nobody waits for it any more."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return False
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def is_first_process() -> bool:
    """Whether this is the process that writes, of those that train together."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def writing(work: WorkFolder) -> Iterator[None]:
    """Hold the folder for this training; an orphan of an earlier attempt may still be writing there.

    Only the first process takes the lock: the others would wait for it, and it for them.
    """
    with (
        locked(work.folder / "training.lock", "an earlier attempt's process to end")
        if is_first_process()
        else nullcontext()
    ):
        yield


def run_worker(train: Any) -> None:
    """The entry of a launched process: read the job, train, report."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if torch.cuda.is_available():
        # Before anything is loaded: each process on its own GPU.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # peft imports it wherever it is installed, and then it misses kernels that nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    job_file = Path(sys.argv[1])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        if attempt := read_attempt(job_file.parent):
            attempt.import_code(job["module"])
        train(job)
    except Exception as error:
        told = str(error) if isinstance(error, SnaketuneError) else disk_trouble(error)
        if not told:
            raise
        sys.exit(f"error: {told}")
