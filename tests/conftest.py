"""Before anything imports torch: two test processes share the cores."""

import gc
import os
import sys
import tempfile

import pytest

from tests.durations import Recorder, ordered

# Tests set the number of threads if it matters; elsewhere idle threads that spin would slow down other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No products in bfloat16 where a processor has units for them: results are compared in float32, and are the same everywhere.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# torch would build a program for each set of vector instructions, to see whether the C++ compiler knows it, and start processes
# that import torch, to compile one kernel at a time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Imports and collection create what stays, and searching it for garbage takes as long as creating it.
gc.disable()
# Hundreds of jobs import the package; the first one compiles it for all. So it is with tests, whose assertions pytest rewrites.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser):
    parser.addoption(
        "--record-durations", action="store_true", help="write tests/durations.json, which orders the tests"
    )


def pytest_configure(config):
    if "HF_DATASETS_CACHE" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="datasets-")
        config.add_cleanup(cache.cleanup)
        os.environ["HF_DATASETS_CACHE"] = cache.name
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def pytest_collection_finish():
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def what_is_in_memory_stays():
    """Leave imported modules, and what earlier tests made and didn't free, out of searches for garbage.

    Each of hundreds of trainings here searches all of it twice, which soon takes longer than its steps.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    items[:] = ordered(items, getattr(config, "workerinput", {}).get("workercount", 1))
