"""The launcher: start a stage's worker processes, one per GPU on each node, and wait for them.

Both read the job's file. Files in the work folder connect them: `state/attempt.json` and `state/operation.json` say what the
attempt is, `state/outcome.json` is the result; errors are in `training.launch.worker_endings`. `training.launch.worker` runs in
the workers. Importing these modules doesn't import torch.
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
from typing import Any

import psutil

from snaketune.cluster.slurm import run_slurm
from snaketune.config.operation import Operation
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.host.launch_command import OPERATION_FILE, STEP_FILE, check_installed, check_nodes, command
from snaketune.stages.host.threads import VARIABLE, available_threads
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import IN_STEPS
from snaketune.training.launch.accelerate_config import write_launch_files
from snaketune.training.launch.memory_kills import explain_kill, record_launch
from snaketune.training.launch.worker_endings import clear_endings, first_failure, raise_if_preempted

PARENT_VARIABLE = "SNAKETUNE_PARENT"
SECONDS_BETWEEN_SIGNALS = 1.0
# Longer, to keep load off slurmctld.
SECONDS_BETWEEN_SCANCELS = 10.0

# Environment variables for torch's GPU allocator; the second is the name before torch 2.10.
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
# Where torch multiplies by oneDNN, both keep about 1 MB for each shape of a product, 1024 shapes by default, and packed batches
# differ in their numbers of tokens.
ONEDNN_CACHES, ONEDNN_SHAPES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 64


def launch(job: LoadedJob, work: WorkFolder) -> Outcome:
    """Run the stage's `build` in worker processes and return its outcome.

    SnaketuneError: the processes can't be started here, or failed, with the message of the first one that failed. Preempted:
    the training ended early, with a checkpoint.
    """
    operation, gpus = job.operation, visible_gpus()
    if gpus and operation.gpus > len(gpus):
        raise SnaketuneError(
            f"operation.gpus: the job asks for {operation.gpus} GPUs on each node, this node shows it {len(gpus)}; lower "
            "gpus, or give the job more"
        )
    check_nodes(operation)
    check_installed(operation)
    outcome_file, step = work.state / "outcome.json", work.state / STEP_FILE
    outcome_file.unlink(missing_ok=True)
    step.unlink(missing_ok=True)
    (work.state / IN_STEPS).unlink(missing_ok=True)
    clear_endings(work.state)
    write_json(work.state / OPERATION_FILE, operation.model_dump(mode="json"))
    if operation.launch != "single":
        write_launch_files(operation, work.state, cpu=not gpus)
    started = command(operation, job.path, work.state, sys.executable)
    with record_launch(work.state) as oom_kills:
        status = run_processes(started, environment(operation), step if operation.nodes > 1 else None)
    raise_if_preempted(work.state)
    if status == 0 and outcome_file.is_file():
        return Outcome(**json.loads(outcome_file.read_text(encoding="utf-8")))
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    failure = first_failure(work.state)
    if not failure and (status == -signal.SIGKILL or (status and operation.processes > 1)):
        failure = explain_kill(work.state, oom_kills, operation.nodes)
        if status != -signal.SIGKILL:
            failure = f"see `exitcode` above: if it is -9, {failure}"
    failure = failure or "see its output above. Run again to resume"
    raise SnaketuneError(f"the training process ended early ({how}); {failure}")


def run_processes(command: list[str], variables: dict[str, str], step: Path | None = None) -> int:
    """Run the launch command and return its exit status; on SIGTERM, Ctrl-C and a closed terminal, send the workers SIGTERM and
    let them save a checkpoint. A second Ctrl-C ends them at once. `step` is the file that workers on several nodes write their
    SLURM step id to."""
    # Child processes inherit that SIGTERM is ignored; only workers restore its default.
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_IGN)}
    terminated = threading.Event()

    def terminate(number: int, _: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            print("Ctrl-C: the training ends after this step, with a checkpoint. Again: it ends at once", flush=True)
        terminated.set()

    try:
        # In its own process group, so that signals of a terminal reach only this process.
        process = subprocess.Popen(command, env=variables, process_group=0)
        threading.Thread(target=_forward_sigterm, args=(process, terminated, step), daemon=True).start()
        # `nohup` has SIGHUP ignored.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, terminate)
        before[signal.SIGINT] = signal.signal(signal.SIGINT, terminate)
        signal.signal(signal.SIGTERM, terminate)
        try:
            return process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward_sigterm(launched: subprocess.Popen, terminated: threading.Event, step: Path | None) -> None:
    """Send SIGTERM to all workers repeatedly until they have ended: a worker that still imports its libraries ignores it."""
    while launched.poll() is None:
        if not terminated.wait(SECONDS_BETWEEN_SIGNALS):
            continue
        if step is None:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.terminate()
        elif step.is_file():
            # SIGTERM to srun itself would kill the workers immediately.
            run_slurm("scancel", "--signal=TERM", step.read_text(encoding="utf-8").strip())
        time.sleep(SECONDS_BETWEEN_SIGNALS if step is None else SECONDS_BETWEEN_SCANCELS)


def environment(operation: Operation) -> dict[str, str]:
    """Return the workers' environment: their share of the job's threads, the GPU allocator, the launcher's process id."""
    threads = max(1, available_threads() // operation.processes_per_node)
    variables = os.environ | {VARIABLE: str(threads)}
    # On SIGTERM torchrun would kill its processes after 30 s; a checkpoint may take longer.
    variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    for name in ONEDNN_CACHES:
        variables.setdefault(name, str(ONEDNN_SHAPES))
    if not ALLOCATOR & variables.keys():
        # Batches differ in segments and supervised tokens, so blocks of fixed sizes would fragment a GPU's memory.
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if operation.nodes == 1:
        # On other nodes the id belongs to another process; there SLURM ends the workers with the job.
        variables[PARENT_VARIABLE] = str(os.getpid())
    return variables
