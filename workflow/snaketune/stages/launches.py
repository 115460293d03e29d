"""How a training is started: the command line of each node, as a plan tells it and as `training.launch` runs it.

`accelerate launch` starts the processes of one node and watches them. On one machine they meet at a port that torchrun itself
opens, so no two trainings can choose the same. On several, SLURM starts one `accelerate launch` on each node, and they meet on
the node that the job runs on, by SLURM's own variables.
"""

import shlex
from pathlib import Path

from snaketune.config.runs import Operation

ACCELERATE_FILE, DEEPSPEED_FILE, JOB_FILE = "accelerate.yaml", "deepspeed.json", "job.json"
# torchrun reads its options from such variables too: an own store on a port that the kernel chooses as it is opened. The
# address is given, since the host's name may be one that nobody can look up.
ALONE = ("env", "PET_STANDALONE=1", "PET_LOCAL_ADDR=127.0.0.1")
# Below the ports that kernels give to connections; each job of a cluster another one.
PORT = "$((10000 + SLURM_JOB_ID % 20000))"
# The first node: where the job runs, and srun is called.
FIRST_NODE = "$SLURM_LAUNCH_NODE_IPADDR"


def command(operation: Operation, state: Path, python: str = "python") -> list[str]:
    """The command that starts all processes of a training and waits for them."""
    if operation.nodes > 1:
        return [*_steps(operation), "bash", "-c", f"exec {_on_node('$SLURM_NODEID', state, python)}"]
    alone = ALONE if operation.launch != "single" else ()
    return [*alone, *_accelerate(state, python), *_module(state)]


def node_lines(operation: Operation, state: Path) -> list[str]:
    """What each node runs, as shell lines: one for each node.

    >>> print(*node_lines(Operation(gpus=0, nodes=2), Path("S")), sep="\\n")
    ... # doctest: +NORMALIZE_WHITESPACE
    python -m accelerate.commands.launch --config_file S/accelerate.yaml --machine_rank 0
        --main_process_ip $SLURM_LAUNCH_NODE_IPADDR --main_process_port $((10000 + SLURM_JOB_ID % 20000))
        --module snaketune.training.launched S/job.json
    python -m accelerate.commands.launch --config_file S/accelerate.yaml --machine_rank 1
        --main_process_ip $SLURM_LAUNCH_NODE_IPADDR --main_process_port $((10000 + SLURM_JOB_ID % 20000))
        --module snaketune.training.launched S/job.json
    """
    if operation.nodes == 1:
        return [shlex.join(command(operation, state))]
    return [_on_node(str(rank), state, "python") for rank in range(operation.nodes)]


def _steps(operation: Operation) -> list[str]:
    """One step of the job on each of its nodes; all end where one fails, and each may use all cores that the job has there."""
    nodes = operation.nodes
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--kill-on-bad-exit=1", "--cpu-bind=none", "--input=none"),
    ]


def _on_node(rank: str, state: Path, python: str) -> str:
    meeting = f"--machine_rank {rank} --main_process_ip {FIRST_NODE} --main_process_port {PORT}"
    return f"{shlex.join(_accelerate(state, python))} {meeting} {shlex.join(_module(state))}"


def _accelerate(state: Path, python: str) -> list[str]:
    return [python, "-m", "accelerate.commands.launch", "--config_file", str(state / ACCELERATE_FILE)]


def _module(state: Path) -> list[str]:
    return ["--module", "snaketune.training.launched", str(state / JOB_FILE)]
