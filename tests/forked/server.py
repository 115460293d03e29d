"""The server of the tests: it has also imported Snakemake and what tests draw and clean with, and forks within milliseconds."""

import ctypes
import gc
import importlib
import re
import runpy
import sys
from pathlib import Path

MORE = (
    "torch.distributed.run",
    "ftfy",
    "py3langid",
    "rensa",
    "matplotlib.pyplot",
    "smart_open",
    "snakemake.report",
)
# Of Linux 6.1 and later; elsewhere it does nothing.
MADV_COLLAPSE, HUGE_PAGE = 25, 2 << 20


def use_huge_pages() -> None:
    """Move this process's memory into huge pages.

    A fork copies an entry for each page, and 500 MB of small ones take 30 ms. This takes a second, so only a server that many
    runs of the workflow share does it.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        first, last = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if access == "rw-p" and name in ([], ["[heap]"]) and first < last:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


if __name__ == "__main__":
    fork_server = runpy.run_path(str(Path(__file__).parents[2] / "workflow/snaketune/stages/host/fork_server.py"))
    # Set by pytest, by what its process imports, and by tests that keep caches apart; read anew where forks need it.
    serving = fork_server["serve"].__globals__
    may_differ = serving["MAY_DIFFER"].pattern + "|PYTEST_.*|HF_XET_.*|KMP_.*|XDG_CACHE_HOME"
    serving["MAY_DIFFER"] = re.compile(may_differ)
    importlib.import_module("snakemake.cli").get_argument_parser()
    # Forks live for seconds, of which searches for garbage would take up to 8%.
    gc.set_threshold(200_000, 20, 20)
    serve = serving["Server"].serve
    serving["Server"].serve = lambda server, listener: (use_huge_pages(), serve(server, listener))
    fork_server["serve"](int(sys.argv[1]), (*fork_server["LIBRARIES"], *MORE))
