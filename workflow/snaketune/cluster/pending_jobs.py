"""Why jobs wait: what `squeue` gives as the reason, in words, and what to edit where waiting won't help."""

import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from snaketune.cluster.slurm import run_slurm

SECONDS_BETWEEN_LOOKS = 60
# By the beginning of SLURM's reason, first fit: what it means, and what to do.
REASONS = {
    "PartitionTimeLimit": "it asks for more time than its partition allows, and would wait for ever; lower its runtime, or "
    "correct max_runtime in the cluster's file",
    "PartitionNodeLimit": "it asks for more nodes or CPUs than its partition allows, and would wait for ever; lower "
    "operation.nodes or operation.gpus",
    "PartitionConfig": "its partition doesn't allow it; name another one in the cluster's file",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs at present",
    "ReqNodeNotAvail": "the nodes that could run it are down, drained or reserved",
    "BadConstraints": "no node has what it asks for; correct constraint or gpu_model in the cluster's file",
    "AccountingPolicy": "a limit of the account holds it back",
    "InvalidAccount": "the account isn't valid; correct account in the cluster's file",
    "InvalidQOS": "the quality of service isn't valid; correct qos in the cluster's file",
    "Assoc": "a limit of the account holds it back; it starts when other jobs of the account end",
    "QOS": "a limit of the quality of service holds it back; it starts when other jobs under it end",
    "MaxGRESPerAccount": "the account has as many GPUs as it may",
    "JobArrayTaskLimit": "as many tasks of its array run as may",
    "JobHeld": "it is held; scontrol release lets it go",
    "launch failed": "its node couldn't start it, so it is held; scontrol release lets it go",
    "BeginTime": "it was sent back to the queue and may start again at its begin time",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "Resources": "it is the next one, when nodes are free",
    "Priority": "others are before it",
    "Dependency": "it waits for another job",
    "None": "SLURM hasn't looked at it yet",
}


def explain(reason: str) -> str:
    """
    >>> explain("Priority")
    'others are before it (Priority)'
    """
    words = next((words for begins, words in REASONS.items() if reason.startswith(begins)), "")
    return f"{words} ({reason})" if words else f"SLURM's reason is {reason}"


def waiting_jobs(listed: str, folder: str, now: datetime) -> Iterator[tuple[str, str, str]]:
    """Of the lines of `squeue`, those of jobs sent from `folder` that have waited for a minute.

    Returns:
        Number, reason, and what to tell.
    """
    for line in listed.splitlines():
        number, reason, since, comment, place = [*line.split("|", 4), "", "", "", ""][:5]
        if place != folder:
            continue
        try:
            waited = (now - datetime.fromisoformat(since)).total_seconds() / 60
        except ValueError:
            continue
        if waited >= 1:
            name = comment.removeprefix("rule_").replace("_wildcards_", " ")
            yield number, reason, f"job {number} ({name}) has waited for {waited:.0f} min: {explain(reason)}"


# Looks after which a run whose jobs are gone from the queue is told so; the executor itself looks every three minutes at least.
LOOKS_WITHOUT_JOBS = 5
JOBS_LOST = (
    "no job sent from here has been in SLURM's queue for five minutes. If nothing runs here either, the executor has lost "
    "sight of its jobs, as it may after slurmctld was away: end this, and run again; what the jobs have made is taken"
)


# States of a job that isn't over.
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "RESIZING", "SIGNALING"}


class LostJobs:
    """Whether jobs were there, and aren't any more."""

    def __init__(self):
        self.seen, self.looks = False, 0

    def check(self, listed: str | None, folder: str) -> bool:
        """Called at each look with this user's jobs, ended ones too, as `%T|%Z`; None where SLURM doesn't answer. True once."""
        if listed is None:
            return False
        states = [line.partition("|")[0] for line in listed.splitlines() if line.partition("|")[2] == folder]
        self.seen |= bool(states)
        if ALIVE.intersection(states):
            self.looks = 0
            return False
        self.looks += self.seen
        return self.looks == LOOKS_WITHOUT_JOBS


def watch(tell: Callable[[str], None]) -> None:
    """From now on and until this process ends, tell of each job why it waits, and again when the reason is another one."""
    threading.Thread(target=_watch, args=(tell, str(Path.cwd())), name="pending jobs", daemon=True).start()


def _watch(tell: Callable[[str], None], folder: str) -> None:
    told: set[tuple[str, str]] = set()
    gone = LostJobs()
    pause = threading.Event()
    while not pause.wait(SECONDS_BETWEEN_LOOKS):
        listed = run_slurm("squeue", "--me", "--noheader", "--states=PENDING", "--format=%i|%r|%V|%k|%Z")
        for number, reason, line in waiting_jobs(listed or "", folder, datetime.now()):
            if (number, reason) not in told:
                told.add((number, reason))
                tell(line)
        if gone.check(run_slurm("squeue", "--me", "--noheader", "--states=all", "--format=%T|%Z"), folder):
            tell(JOBS_LOST)
