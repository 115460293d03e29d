"""A launched process: read the job, make sure of the code and of what it reads, build the stage, report."""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.config.secrets import without_secrets
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.attempt import read_attempt
from snaketune.stages.cache.libraries import importing, quiet_libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.disk_errors import disk_trouble
from snaketune.stages.host.locks import locked
from snaketune.stages.job import result_at
from snaketune.stages.table import STAGES
from snaketune.training.autotune.batch_plan import RAN_OUT, tell_ran_out
from snaketune.training.launch.processes import PARENT_VARIABLE
from snaketune.training.launch.requeue import Preempted
from snaketune.training.launch.worker_failures import record_failure

# prctl(2)
PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 1.0


def build_stage(job: dict[str, Any]) -> None:
    """Build the job's stage, and write down what it reports."""
    # It brings libraries that were to be quieted first.
    from snaketune.tracking.curves import TrackedRun

    stage, work = STAGES[job["stage"]], WorkFolder(Path(job["work"]))
    spec, operation = stage.spec.model_validate(job["spec"]), Execution.model_validate(job["operation"])
    tracked = TrackedRun.of(job["stage"], job["spec"], Tracking.model_validate(job["tracking"]), work, Path(job["out"]))
    artifacts = {
        role: [_unchanged(Path(path), content) for path, content in some] for role, some in job["artifacts"].items()
    }
    files = {role: [Path(path) for path in some] for role, some in job["files"].items()}
    lock = locked(work.folder / "training.lock", "an earlier attempt's process to end")
    # An orphan may still be writing there. The first process locks for all: the others would wait for it, and it for them.
    with lock if is_main_process() else nullcontext() as lease:
        work = replace(work, lease=lease)
        build = import_module(stage.module).build
        outcome = build(spec, work, operation=operation, tracked=tracked, **stage.arguments(artifacts, files))
        if is_main_process():
            work.check_held()
            write_json(work.state / "outcome.json", asdict(outcome))


def _unchanged(manifest: Path, content: str) -> Artifact:
    """An artifact as it was when the job's fingerprint was computed.

    Raises:
        SnaketuneError: somebody has replaced it since; the result would be kept as that of the old one.
    """
    artifact = result_at(manifest)
    if artifact.content != content:
        raise SnaketuneError(f"{manifest} changed since this job began; run again")
    return artifact


def is_main_process() -> bool:
    """Whether this is the process that writes, of those that train together."""
    return int(os.environ.get("RANK", 0)) == 0


def parent_is_gone() -> bool:
    """Whether the process that launched this one has died, so that nobody waits for it any more."""
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


def end_with_parent() -> None:
    """In a thread of its own: a successor may already be at work in the folder, however long a step or an import takes here."""

    def watch() -> None:
        while not parent_is_gone():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        # At once: nobody reads what this process has to say, and it would stand among a successor's files.
        os._exit(1)

    if PARENT_VARIABLE in os.environ:
        threading.Thread(target=watch, daemon=True, name="parent").start()


def die_with_launcher() -> None:
    """On Linux: if its launcher dies, nobody watches over the processes of a training any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_gpu() -> None:
    """Before anything is loaded: each process on its own GPU.

    Raises:
        SnaketuneError: this node has fewer than there are processes on it.
    """
    import torch

    if not torch.cuda.is_available():
        return
    index, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= there:
        raise SnaketuneError(
            f"operation.gpus: process {index + 1} of this node has no GPU, the node shows {there}; lower gpus, or have the "
            "scheduler give as many on each node"
        )
    torch.cuda.set_device(index)


def main(job_file: Path) -> None:
    """Exits with a message where the fault isn't ours."""
    quiet_libraries()
    if not is_main_process():
        # All would say the same, into the same log; errors go elsewhere.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    job = json.loads(job_file.read_text(encoding="utf-8"))
    # The launcher ignores it, and so would whoever it starts; before the first step there is nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with importing():
            take_gpu()
            from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()
        if attempt := read_attempt(job_file.parent):
            attempt.import_code(STAGES[job["stage"]].module)
        build_stage(job)
    except Preempted as left:
        # No failure, of which launchers would make tracebacks.
        print(left, flush=True)
    except Exception as error:
        from snaketune.models.device_memory import ran_out

        told = str(error) if isinstance(error, SnaketuneError) else disk_trouble(error)
        if not told and ran_out(error):
            told = f"out of memory: {str(error).strip()}"
            if not (job_file.parent / RAN_OUT).is_file():
                tell_ran_out(job_file.parent, None, error)
        told = told and without_secrets(told)
        if not parent_is_gone():
            # What an orphan dies of isn't what its successor does.
            record_failure(job_file.parent, error, told)
        if not told:
            raise
        sys.exit(f"error: {told}")


if __name__ == "__main__":
    die_with_launcher()
    end_with_parent()
    main(Path(sys.argv[1]))
