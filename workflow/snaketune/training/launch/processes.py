"""Start a stage in processes of its own, one per GPU on each of its nodes, and wait for them.

What the processes are told travels as `state/job.json` in the work folder, their result comes back as `state/outcome.json`, and
what the first of them died of as `state/failed/`. `training.launch.worker` runs in the processes; nothing here imports torch.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.cluster.slurm import asked
from snaketune.config.base import Model
from snaketune.config.operation import Operation
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.attempt import cores
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.host.launch_command import JOB_FILE, STEP_FILE, check_installed, check_nodes, command
from snaketune.stages.outcome import Outcome
from snaketune.training.launch.accelerate_config import write_launch_files
from snaketune.training.launch.requeue import clear_preemption, raise_if_preempted
from snaketune.training.launch.worker_failures import clear_failures, first_failure

PARENT_VARIABLE = "SNAKETUNE_PARENT"
SECONDS_BETWEEN_SIGNALS = 1.0
# slurmctld has others to answer.
SECONDS_BETWEEN_STEPS = 10.0

# Where settings of torch's allocator for GPUs are read from, and were before torch 2.10.
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def launch(
    stage: str,
    *,
    spec: Model,
    operation: Operation,
    tracking: Tracking,
    work: WorkFolder,
    out: Path,
    artifacts: dict[str, list[Artifact]],
    files: dict[str, list[Path]],
) -> Outcome:
    """Run the stage's `build` under accelerate and return what it reports.

    Args:
        out: where the result will be published; its curves are drawn there meanwhile.
        artifacts, files: by role; the job tells what artifacts held when its fingerprint was computed.
    Raises:
        SnaketuneError: it can't be started here, or it failed; with what the first process to fail said. Or it had to leave.
    """
    gpus = visible_gpus()
    check_launch(operation, gpus)
    outcome_file = work.state / "outcome.json"
    outcome_file.unlink(missing_ok=True)
    clear_failures(work.state)
    job = {
        "stage": stage,
        "spec": spec.model_dump(mode="json"),
        "operation": operation.model_dump(mode="json"),
        "tracking": tracking.model_dump(mode="json"),
        "work": str(work.folder),
        "out": str(out),
        # Lists: JSON objects are written with sorted keys, and the order of adapters below a model counts.
        "artifacts": {
            role: [[str(one.manifest_path), one.content] for one in some] for role, some in artifacts.items()
        },
        "files": {role: [str(path) for path in some] for role, some in files.items()},
    }
    write_json(work.state / JOB_FILE, job)
    if operation.launch != "single":
        write_launch_files(operation, work.state, cpu=not gpus)
    clear_preemption(work.state)
    step = work.state / STEP_FILE if operation.nodes > 1 else None
    if step:
        step.unlink(missing_ok=True)
    status = run_processes(command(operation, work.state, sys.executable), environment(operation), step)
    raise_if_preempted(work.state)
    if status == 0 and outcome_file.is_file():
        return Outcome(**json.loads(outcome_file.read_text(encoding="utf-8")))
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    said = first_failure(work.state) or "what it said stands above. Run again to resume"
    raise SnaketuneError(f"the training process ended early ({how}); {said}")


def run_processes(command: list[str], variables: dict[str, str], step: Path | None = None) -> int:
    """Wait for a command, and hand SIGTERM on to the processes that train: they leave with a checkpoint, and whoever launched
    them waits for that.

    Args:
        step: where they write which step of SLURM they are, if they are on other nodes too.
    Returns:
        Its exit status.
    """
    # What is started meanwhile ignores it, but for those that train.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        # In a group of their own: Ctrl-C in a terminal reaches this process, which ends them.
        process = subprocess.Popen(command, env=variables, process_group=0)
        told = threading.Event()
        threading.Thread(target=_forward_sigterm, args=(process, told, step), daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: told.set())
        try:
            return process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _forward_sigterm(launched: subprocess.Popen, told: threading.Event, step: Path | None) -> None:
    """Once told, until they have left: one that is still importing its libraries ignores it."""
    while launched.poll() is None:
        if not told.wait(SECONDS_BETWEEN_SIGNALS):
            continue
        if step is None:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.terminate()
        elif step.is_file():
            # srun itself would end them all at once.
            asked("scancel", "--signal=TERM", step.read_text(encoding="utf-8").strip())
        time.sleep(SECONDS_BETWEEN_SIGNALS if step is None else SECONDS_BETWEEN_STEPS)


def check_launch(operation: Operation, gpus: list[str]) -> None:
    """Raise SnaketuneError, with what to do, if the processes can't be started here.

    Args:
        gpus: those that this job sees on this node.
    """
    if gpus and operation.gpus > len(gpus):
        raise SnaketuneError(
            f"operation.gpus: the job asks for {operation.gpus} GPUs on each node, here it sees {len(gpus)}; lower it, or give "
            "the job more"
        )
    check_nodes(operation)
    check_installed(operation)


def environment(operation: Operation) -> dict[str, str]:
    """Of all processes: each computes with its share of the job's threads, and knows whose end is its own."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or cores())
    told = os.environ | {"OMP_NUM_THREADS": str(max(1, threads // operation.processes_per_node))}
    # torchrun would end its processes after half a minute; they leave by themselves.
    told["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    if not ALLOCATOR & told.keys():
        # Batches differ in segments and supervised tokens, so blocks of fixed sizes would fragment a GPU's memory.
        told["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if operation.nodes == 1:
        # On other nodes it would be another process; there SLURM ends them with the job.
        told[PARENT_VARIABLE] = str(os.getpid())
    return told
