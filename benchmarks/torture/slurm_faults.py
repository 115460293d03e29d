"""Cluster faults on the local SLURM: cancelled and requeued jobs, lost nodes, time limits and more.

The chain runs through `profiles/slurm`. A fault waits until SLURM runs the SFT job and acts on it by scontrol or scancel; then
the trial continues as on one machine. Faults that need an administrator run a command from the environment, and are skipped
without it: TORTURE_CRASH_NODE (called with the node), TORTURE_LOSE_NODE (the same, but its job keeps running),
TORTURE_CONTROLLER_AWAY (called with the number of seconds).
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable

from benchmarks.torture.faults import Fault
from benchmarks.torture.processes import wait_for
from benchmarks.torture.trials import SECONDS, Failed, Trial

from snaketune.cluster.pending_jobs import JOBS_LOST
from snaketune.cluster.slurm import fields, megabytes

CRASH, LOSE, AWAY = (
    shlex.split(os.environ.get(f"TORTURE_{name}", "")) for name in ("CRASH_NODE", "LOSE_NODE", "CONTROLLER_AWAY")
)
# Further options of Snakemake, such as --slurm-status-command squeue on a cluster without accounting.
ARGUMENTS = shlex.split(os.environ.get("TORTURE_SLURM_ARGUMENTS", ""))
# Written by each checkpoint.
CHECKPOINT = r"/checkpoints/checkpoint-\d+/trainer_state\.json$"
# More than the SFT job of the chain requests, and less than twice that.
FILLED_MB = 5000
# A requeued job waits two minutes, a training with time limits may take four jobs, and a lost job is reported after five
# minutes.
REQUEUED_SECONDS = 3 * SECONDS


def slurm(*command: str) -> str:
    """Return the output of a SLURM command, or of an administrator's."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def about(job: str, what: str) -> str:
    return slurm("squeue", "--noheader", "--jobs", job, f"--format={what}")


def jobs_of(trial: Trial) -> list[str]:
    """Return the numbers of the chain's SFT jobs that run."""
    lines = slurm("squeue", "--noheader", "--states=RUNNING", "--format=%i|%k|%Z").splitlines()
    own = [line.split("|") for line in lines if line.endswith(str(trial.chain.folder))]
    return [number for number, comment, *_ in own if "sft" in comment]


def on_cluster(
    strike: Callable[[str], object], *more: str, slow: int = 0, ends: bool = True
) -> Callable[[Trial], None]:
    """Return a trial in which `strike` gets the number of the SFT job.

    Args:
        more: for the command line of Snakemake.
        slow: seconds that a checkpoint takes.
        ends: whether a job that is struck can't go on to its end.
    """

    def do(trial: Trial) -> None:
        if not shutil.which("scontrol"):
            raise Failed("there is no SLURM here")
        chain = trial.before("sft")
        if slow:
            chain.order(slow=["open", CHECKPOINT, slow])
        running = chain.start("--profile", "profiles/slurm", *ARGUMENTS, *more, *trial.targets)
        if not wait_for(lambda: jobs_of(trial), SECONDS):
            raise Failed("SLURM never ran the SFT job")
        job = jobs_of(trial)[0]
        time.sleep(trial.drawn.uniform(0, 15))
        ran = about(job, "%T") == "RUNNING"
        strike(job)
        said = chain.wait(running, REQUEUED_SECONDS)
        if said.status is None and JOBS_LOST in said.text:
            # Ended, as that says.
            trial.instructions.append(JOBS_LOST)
        else:
            trial.check_message(said, fails=None)
        trial.hit(was_struck(job) if ends else ran)
        # From here on, as on one machine.
        trial.recover(unlock=True)

    return do


def wrong_account(trial: Trial) -> None:
    """Name an account that doesn't exist: refused before anything is submitted."""
    chain = trial.before("sft")
    site = chain.folder / "profiles/slurm/cluster.yaml"
    valid = site.read_text(encoding="utf-8")
    site.write_text(re.sub(r"(?m)^account:.*\n", "", valid) + "account: missing\n", encoding="utf-8")
    said = chain.wait(chain.start("--profile", "profiles/slurm", *ARGUMENTS, *trial.targets), SECONDS)
    if not said.status or "correct `account` in profiles/slurm/cluster.yaml" not in said.text:
        raise Failed(f"ended with {said.status}: {said.text[-1000:]}")
    site.write_text(valid, encoding="utf-8")
    trial.hit(True)
    trial.recover(unlock=True)


def away_at_submission(trial: Trial) -> None:
    """Stop the controller before anything is submitted: the submission waits for it."""
    chain = trial.before("sft")
    with subprocess.Popen([*AWAY, "40"]):
        if not wait_for(lambda: subprocess.run(["scontrol", "ping"], capture_output=True).returncode, SECONDS):
            raise Failed("the controller never went away")
        said = chain.wait(chain.start("--profile", "profiles/slurm", *ARGUMENTS, *trial.targets), REQUEUED_SECONDS)
    if said.status or "Unable to contact slurm controller" not in said.text or "Trying to restart" in said.text:
        raise Failed(f"ended with {said.status}: {said.text[-1000:]}")
    trial.hit(True)
    trial.recover(unlock=False)


def memory_in_a_part(trial: Trial) -> None:
    """Let the SFT run, sent without the rest of its group, need more memory than it requests: the next attempt requests twice
    as much, and is enough."""
    chain = trial.before("sft")
    chain.order(fill=["open", CHECKPOINT, FILLED_MB])
    said = chain.wait(chain.start("--profile", "profiles/slurm", *ARGUMENTS, *trial.targets), REQUEUED_SECONDS)
    jobs = re.findall(r"submitted with SLURM jobid (\d+)", said.text)
    memory = [megabytes(fields(slurm("scontrol", "--oneliner", "show", "job", job))["MinMemoryNode"]) for job in jobs]
    if said.status or len(memory) != 2 or memory[1] != 2 * memory[0] or not memory[0] < FILLED_MB < memory[1]:
        raise Failed(f"ended with {said.status}; jobs requested {memory} MB: {said.text[-1000:]}")
    trial.hit(True)
    trial.recover(unlock=False)


def was_struck(job: str) -> bool:
    """Return whether a finished job was interrupted at least once."""
    known = slurm("scontrol", "--oneliner", "show", "job", job)
    return "JobState=COMPLETED " not in known or " Restarts=0 " not in known


WAYS = {
    "scancel": on_cluster(lambda job: slurm("scancel", job)),
    "preempted": on_cluster(lambda job: slurm("scancel", "--signal=TERM", "--full", job)),
    "out of memory": on_cluster(lambda job: slurm("scancel", "--signal=KILL", "--full", job)),
    "requeue": on_cluster(lambda job: slurm("scontrol", "requeue", job)),
    # SLURM's shortest limit, for a training that takes longer than that.
    "time limit": on_cluster(lambda job: None, "--set-resources", "sft:runtime=1", slow=12),
    "wrong account": wrong_account,
    "memory raised in a partial group": memory_in_a_part,
    **({"controller away at submission": away_at_submission} if AWAY else {}),
    **({"node crash": on_cluster(lambda job: slurm(*CRASH, about(job, "%N")))} if CRASH else {}),
    **({"node away": on_cluster(lambda job: slurm(*LOSE, about(job, "%N")), ends=False)} if LOSE else {}),
    **({"controller away": on_cluster(lambda job: slurm(*AWAY, "40"), ends=False)} if AWAY else {}),
}
FAULTS = {f"slurm-{name.replace(' ', '-')}": Fault(do, 3, ["sft"], f"on SLURM: {name}") for name, do in WAYS.items()}
