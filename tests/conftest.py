"""Before anything imports torch: two test processes share the cores."""

import os

# Where the number of threads matters, a test sets it; elsewhere idle threads that spin would cost the other process its core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items):
    """The longest first: what is left to do at the end is then short, and no process waits for another one."""
    items.sort(key=lambda item: ("test_demo" not in item.nodeid, "tests/workflow" not in item.nodeid))
