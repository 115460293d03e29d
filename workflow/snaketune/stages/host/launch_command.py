"""The command line that starts a training on each node, for `snakemake -n` to log and for `training.launch.processes` to run.

A single process is started directly, several by one `accelerate launch` per node. On one machine they connect at a port that
torchrun itself opens, so no two trainings can choose the same; on several, on the node that runs the job, by SLURM's variables.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from snaketune.config.operation import Operation
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WORK_ROOT, WorkFolder
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.job import Job
from snaketune.stages.job_files import job_file_of
from snaketune.stages.table import STAGES

ACCELERATE_FILE, DEEPSPEED_FILE = "accelerate.yaml", "deepspeed.json"
# The operation of an attempt, with its batch plan.
OPERATION_FILE = "operation.json"
# On several nodes: the file that holds the SLURM step in which they train.
STEP_FILE, STEP = "step", '"$SLURM_JOB_ID.$SLURM_STEP_ID"'
MODULE = "snaketune.training.launch.worker"
# torchrun also reads its options from environment variables: its own store, on a free port that the kernel chooses. The address
# is given because the host's name may not resolve.
ALONE = ("env", "PET_STANDALONE=1", "PET_LOCAL_ADDR=127.0.0.1")
# Of several nodes: the first one, which runs the job and calls srun, and a port below the range of ephemeral ports that differs
# between jobs of a cluster.
RENDEZVOUS = "--main_process_ip $SLURM_LAUNCH_NODE_IPADDR --main_process_port $((10000 + SLURM_JOB_ID % 20000))"


def command(operation: Operation, job_file: Path, state: Path, python: str = "python") -> list[str]:
    """The command that starts all processes of a training and waits for them."""
    if operation.nodes > 1:
        # A signal to the step is meant for the trainings, which stop with a checkpoint. The launcher needs the step's number.
        preamble = f'trap "" TERM; test "$SLURM_NODEID" != 0 || echo {STEP} > {shlex.quote(str(state / STEP_FILE))}'
        return [
            *_steps(operation),
            "bash",
            "-c",
            f"{preamble}; exec {_on_node('$SLURM_NODEID', job_file, state, python)}",
        ]
    if operation.launch == "single":
        # Nothing to set up, and accelerate would import torch first.
        return [python, "-m", MODULE, str(job_file), str(state)]
    return [*ALONE, *_accelerate(state, python), *_module(job_file, state)]


def node_lines(operation: Operation, job_file: Path, state: Path) -> list[str]:
    """The command of each node as a shell line.

    >>> print(*node_lines(Operation(gpus=0, nodes=2), Path("J"), Path("S")), sep="\\n")  # doctest: +ELLIPSIS
    python -m accelerate.commands.launch --quiet --config_file S/accelerate.yaml --machine_rank 0 ... J S
    python -m accelerate.commands.launch --quiet --config_file S/accelerate.yaml --machine_rank 1 ... J S
    """
    if operation.nodes == 1:
        return [shlex.join(command(operation, job_file, state))]
    return [_on_node(str(rank), job_file, state, "python") for rank in range(operation.nodes)]


def describe_launch(job: Job) -> Iterator[str]:
    """Yield lines that show what each node will run, if a job trains in several processes."""
    operation = job.operation
    if "launch" not in STAGES[job.stage].operation or operation.processes == 1:
        return
    # The fingerprint is known when the inputs exist.
    state = WorkFolder(WORK_ROOT / job.stage / "FINGERPRINT").state
    devices = f"one for each of {operation.processes_per_node} GPUs" if operation.gpus else "one on the CPU"
    where = f" on each of {operation.nodes} nodes, by {shlex.join(_steps(operation))}" if operation.nodes > 1 else ""
    stage = f", ZeRO stage {operation.zero_stage}" if operation.zero_stage else ""
    yield f"{job.key}: {operation.processes} processes ({operation.launch}{stage}), {devices}{where}"
    for number, line in enumerate(node_lines(operation, job_file_of(job.stage, job.name), state), 1):
        yield f"  node {number}: {line}"


def check_nodes(operation: Operation) -> None:
    """Raise SnaketuneError, with what to do, if several nodes are configured but nothing can start processes on them."""
    if operation.nodes > 1 and ("SLURMD_NODENAME" not in os.environ or not shutil.which("srun")):
        raise SnaketuneError(
            f"operation.nodes: {operation.nodes} nodes need a SLURM batch job, which starts the processes on each; run "
            "snakemake --profile profiles/slurm, or set nodes: 1"
        )


def check_limit(operation: Operation, most: int | None) -> None:
    """Raise SnaketuneError, with what to do, if a job requests more GPUs than `--resources gpu=N` (None: any number) allows."""
    if most is not None and operation.gpus > max(1, most) and visible_gpus():
        raise SnaketuneError(
            f"operation.gpus: {operation.gpus} GPUs, but this run may use {most} (--resources gpu={most}, or all that this "
            "machine has); lower operation.gpus, or raise the limit"
        )


def check_installed(operation: Operation) -> None:
    """Raise SnaketuneError, with what to do, if the package that `launch` needs isn't installed."""
    if operation.launch == "deepspeed" and not find_spec("deepspeed"):
        raise SnaketuneError(
            "operation.launch: deepspeed isn't installed here; pip install 'snaketune[deepspeed]', or set launch: fsdp"
        )


def _steps(operation: Operation) -> list[str]:
    """The srun command for one step per node; all end if one fails, and each may use all of the job's cores there."""
    nodes = operation.nodes
    words = (
        f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --input=none"
    )
    return words.split()


def _on_node(rank: str, job_file: Path, state: Path, python: str) -> str:
    module = shlex.join(_module(job_file, state))
    return f"{shlex.join(_accelerate(state, python))} --machine_rank {rank} {RENDEZVOUS} {module}"


def _accelerate(state: Path, python: str) -> list[str]:
    return [python, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(state / ACCELERATE_FILE)]


def _module(job_file: Path, state: Path) -> list[str]:
    return ["--module", MODULE, str(job_file), str(state)]
