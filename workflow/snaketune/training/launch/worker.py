"""A worker process: read the job, verify code and inputs, build the stage, write its outcome."""

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import psutil

from snaketune.config.operation import Execution
from snaketune.config.secrets import without_secrets
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.attempt import read_attempt
from snaketune.stages.cache.code_digest import import_checked
from snaketune.stages.cache.libraries import importing, quiet_libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.disk_errors import disk_error_message
from snaketune.stages.host.launch_command import OPERATION_FILE
from snaketune.stages.host.locks import locked
from snaketune.stages.loaded_job import LoadedJob, read_job
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY, record_out_of_memory
from snaketune.training.launch.processes import PARENT_VARIABLE
from snaketune.training.launch.worker_endings import Preempted, record_failure

POLL_SECONDS = 1.0


def build_stage(job: LoadedJob, work: WorkFolder) -> None:
    """Build the job's stage and write its outcome."""
    # Imported here, since it imports libraries whose output must be silenced first.
    from snaketune.tracking.curves import TrackedRun

    tracked = TrackedRun.of(job.stage.name, job.plain_spec, job.tracking, work, job.out)
    lock = locked(work.folder / "training.lock", "an earlier attempt's process to end")
    # An orphaned worker may still write there. Only the main process locks: if all did, they would wait for each other.
    with lock if is_main_process() else nullcontext() as lease:
        work = replace(work, lease=lease)
        build = import_module(job.stage.code).build
        outcome = build(job.spec, work, operation=job.operation, tracked=tracked, **job.arguments)
        if is_main_process():
            work.check_held()
            write_json(work.state / "outcome.json", asdict(outcome))


def is_main_process() -> bool:
    """Whether this is rank 0 of the training, the process that writes files and the log."""
    return int(os.environ.get("RANK", 0)) == 0


def parent_is_gone() -> bool:
    """Whether the launcher of this process has died. In a container whose first process reaps no children, it stays as a
    zombie."""
    parent = os.environ.get(PARENT_VARIABLE)
    try:
        return parent is not None and psutil.Process(int(parent)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_with_parent() -> None:
    """Start a thread that ends this process when its launcher dies, even during a long step or import: a retried or
    requeued job may already be using the work folder."""

    def watch() -> None:
        while not parent_is_gone():
            time.sleep(POLL_SECONDS)
        # Without cleanup, which might write among the files of a newer attempt.
        os._exit(1)

    if PARENT_VARIABLE in os.environ:
        threading.Thread(target=watch, daemon=True, name="parent").start()


def take_gpu() -> None:
    """Select the GPU of this process by its local rank, before anything is loaded; SnaketuneError if this node has too few."""
    import torch

    if not torch.cuda.is_available():
        return
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        raise SnaketuneError(
            f"operation.gpus: process {index + 1} of this node has no GPU, the node shows {count}; lower gpus, or have the "
            "scheduler allocate as many on each node"
        )
    torch.cuda.set_device(index)


def main(job_file: Path, state: Path) -> None:
    """Run the job in the work folder of this state; exit with a message, without a traceback, on errors that the user can act
    on."""
    quiet_libraries()
    if not is_main_process():
        # Every process prints the same lines, and one log takes those of the main one; errors go to stderr.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    # The launcher ignores SIGTERM, and this process inherits that. Before the first step there is nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with importing():
            take_gpu()
            from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()
        operation = Execution.model_validate_json((state / OPERATION_FILE).read_bytes())
        job = replace(read_job(job_file), operation=operation)
        if attempt := read_attempt(state):
            attempt.check_job(job)
            import_checked(job.stage.module, attempt.code, attempt.stage)
        build_stage(job, WorkFolder(state.parent))
    except Preempted as preempted:
        # Not a failure, so exit with status 0: launchers print a traceback for any other.
        print(preempted, flush=True)
    except Exception as error:
        from snaketune.engine.model.machine import is_out_of_memory

        message = str(error) if isinstance(error, SnaketuneError) else disk_error_message(error)
        if not message and is_out_of_memory(error):
            message = f"out of memory: {str(error).strip()}"
            if not (state / OUT_OF_MEMORY).is_file():
                record_out_of_memory(state, None, error)
        message = message and without_secrets(message)
        if not parent_is_gone():
            # An orphan's error must not be taken for one of a newer attempt.
            record_failure(state, error, message)
        if not message:
            raise
        sys.exit(f"error: {message}")


if __name__ == "__main__":
    end_with_parent()
    main(*map(Path, sys.argv[1:]))
