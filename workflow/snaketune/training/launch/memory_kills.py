"""Whether the kernel killed a training for memory: by signal 9, which no process can report itself, while `oom_kill` of its
cgroup rose. Without that count nothing is concluded, since `kill -9` and `scancel` end a process in the same way.

    state/launched.json     the counts when the processes were started; it remains only if the launcher was killed too
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snaketune.cluster.job_endings import ending_of
from snaketune.engine.model.cgroups import oom_kills
from snaketune.files import write_json
from snaketune.training.autotune.batch_plan import record_killed

LAUNCHED = "launched.json"
ELSE = "`kill -9`, `scancel`, or a limit that the scheduler enforces"


@contextmanager
def record_launch(state: Path) -> Iterator[dict[str, int]]:
    """Record an attempt while its processes run. Yields the counts at its start."""
    counts, launched = oom_kills(), state / LAUNCHED
    write_json(launched, {"oom_kills": counts, "slurm_job": os.environ.get("SLURM_JOB_ID")})
    try:
        yield counts
    finally:
        launched.unlink(missing_ok=True)


def explain_kill(state: Path, before: dict[str, int], nodes: int = 1) -> str:
    """Return who may have killed a process since `before`; memory is recorded for `batch_plan.out_of_memory_error`."""
    if where := _risen(before):
        record_killed(state, where)
        return f"the kernel killed it for memory ({where})"
    if before and nodes == 1:
        return f"not by the kernel for memory ({_name(min(before))} counts none): by {ELSE}. Run again to resume"
    return (
        f"probably it ran out of memory (oom_kill can't be read here); otherwise it was {ELSE}. Run again to resume, with "
        "more memory or a lower training.micro_batch_rows"
    )


def why_job_was_killed(state: Path) -> str | None:
    """Return what shows that the last attempt was killed for memory together with its launcher; empty if it was killed and
    nothing shows why; None if its launcher wasn't killed."""
    try:
        record = json.loads((state / LAUNCHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    job = record["slurm_job"]
    if job and (ending := ending_of(job)) and ending.state == "OUT_OF_MEMORY":
        return f"SLURM job {job} is OUT_OF_MEMORY"
    return _risen(record["oom_kills"])


def _risen(before: dict[str, int]) -> str:
    """Return which count has risen, by its file and how; empty if none."""
    now = oom_kills()
    risen = (group for group in before if now.get(group, 0) > before[group])
    return next((f"oom_kill of {_name(group)} rose from {before[group]} to {now[group]}" for group in risen), "")


def _name(group: str) -> str:
    return group.partition(" (")[0]
