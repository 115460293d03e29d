"""Why jobs are pending: `squeue`'s reason, and what to edit if waiting won't help."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from snaketune.cluster.slurm import run_slurm

SECONDS_BETWEEN_CHECKS = 60
# After this many checks without a job in the queue a warning is logged; the executor itself checks every three minutes or less.
CHECKS_WITHOUT_JOBS = 5
JOBS_LOST = (
    "no job sent from here has been in SLURM's queue for five minutes. If nothing runs here either, the executor has lost "
    "track of its jobs, as it may after an outage of slurmctld: end this, and run again; finished results are reused"
)
# States of a job that hasn't ended.
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "RESIZING", "SIGNALING"}
# By the beginning of SLURM's reason, if waiting doesn't help: what it means, and what to do.
REASONS = {
    "PartitionTimeLimit": "it requests more time than partition {partition} allows, and would wait forever; lower its "
    "runtime, or correct max_runtime in the cluster's file",
    "PartitionNodeLimit": "it requests more nodes or CPUs than partition {partition} allows, and would wait forever; lower "
    "operation.nodes or operation.gpus",
    "PartitionConfig": "partition {partition} doesn't allow it; name another one in the cluster's file",
    "BadConstraints": "no node has what it requests; correct constraint or gpu_model in the cluster's file",
    "InvalidAccount": "the account isn't valid; correct account in the cluster's file",
    "InvalidQOS": "the quality of service isn't valid; correct qos in the cluster's file",
    "JobHeld": "it is held; scontrol release lets it start",
    "launch failed": "its node couldn't start it, so it is held; scontrol release lets it start",
}


def waiting_jobs(listed: str, folder: str, now: datetime) -> Iterator[tuple[str, str, str]]:
    """Yield number, reason and a line to log for the jobs in `squeue`'s lines that were sent from `folder` and have waited for
    a minute or more."""
    for line in listed.splitlines():
        number, partition, reason, since, comment, sent_from = [*line.split("|", 5), "", "", "", "", ""][:6]
        if sent_from != folder:
            continue
        try:
            waited = (now - datetime.fromisoformat(since)).total_seconds() / 60
        except ValueError:
            continue
        if waited >= 1:
            name = comment.removeprefix("rule_").replace("_wildcards_", " ")
            words = next((words for begins, words in REASONS.items() if reason.startswith(begins)), "")
            words = words.format(partition=partition)
            why = f"{words} ({reason})" if words else f"SLURM's reason is {reason}"
            yield number, reason, f"job {number} ({name}) has waited for {waited:.0f} min: {why}"


class LostJobs:
    """Detects that jobs were in the queue and aren't any more."""

    def __init__(self):
        self.seen, self.checks = False, 0

    def check(self, listed: str | None, folder: str) -> bool:
        """True once if they are lost; called at each check with this user's jobs, also ended ones, as `%T|%Z` (None if
        SLURM doesn't answer)."""
        if listed is None:
            return False
        jobs = (line.partition("|") for line in listed.splitlines())
        states = {state for state, _, sent_from in jobs if sent_from == folder}
        self.seen |= bool(states)
        self.checks = 0 if ALIVE & states else self.checks + self.seen
        return self.checks == CHECKS_WITHOUT_JOBS


def watch(log: Callable[[str], None]) -> None:
    """Log why each job is pending, and again when the reason changes, in a thread until this process ends."""
    threading.Thread(target=_watch, args=(log, str(Path.cwd())), name="pending jobs", daemon=True).start()


def _watch(log: Callable[[str], None], folder: str) -> None:
    logged: set[tuple[str, str]] = set()
    lost_jobs = LostJobs()
    while True:
        time.sleep(SECONDS_BETWEEN_CHECKS)
        listed = run_slurm("squeue", "--me", "--noheader", "--states=PENDING", "--format=%i|%P|%r|%V|%k|%Z")
        for number, reason, line in waiting_jobs(listed or "", folder, datetime.now()):
            if (number, reason) not in logged:
                logged.add((number, reason))
                log(line)
        if lost_jobs.check(run_slurm("squeue", "--me", "--noheader", "--states=all", "--format=%T|%Z"), folder):
            log(JOBS_LOST)
