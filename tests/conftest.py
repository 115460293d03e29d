"""Before anything imports torch: two test processes share the cores."""

import gc
import os

from tests.forked import share_server

# Tests set the number of threads if it matters; elsewhere idle threads that spin would slow down other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure():
    share_server()


def pytest_collection_finish():
    """All modules are imported, and stay: each of hundreds of trainings here searches all that is in memory for garbage."""
    gc.collect()
    gc.freeze()


# Tests that take from half a minute to minutes, the longest first.
LONG = (
    "test_variants.py",
    "test_survival.py::test_a_killed_training",
    "test_columns.py",
    "test_survival.py",
)


def pytest_collection_modifyitems(config, items):
    """The longest first, so that at the end no process waits for another one.

    pytest-xdist gives each process as many tests, one after the other in this order, and a process that is done takes from
    the end of another one's. So the runs of the workflow are dealt, and each process begins with the longest of its own; the
    first one with the demo, which all its tests would wait for elsewhere.
    """

    def rank(item) -> int:
        return next((rank for rank, long in enumerate(LONG) if long in item.nodeid), len(LONG))

    demo = [item for item in items if "tests/workflow/test_demo" in item.nodeid]
    runs = sorted((item for item in items if "tests/workflow" in item.nodeid and item not in demo), key=rank)
    rest = [item for item in items if "tests/workflow" not in item.nodeid]
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    share = len(items) // processes
    items.clear()
    for process in range(processes):
        hand = (demo if process == 0 else []) + runs[(process - 1) % processes :: processes]
        count = max(0, share - len(hand))
        items += hand + rest[:count]
        rest = rest[count:]
    items += rest
