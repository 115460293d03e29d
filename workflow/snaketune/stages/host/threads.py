"""The number of threads that a process may compute with. This module imports only the standard library."""

import os

VARIABLE = "OMP_NUM_THREADS"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """The value of OMP_NUM_THREADS, of a list such as `4,2` the first one, which is for the outermost level of nested
    parallel regions; as OpenMP does, all cores without a positive number."""
    outermost = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    return (int(outermost) if outermost.isdecimal() else 0) or cores()
