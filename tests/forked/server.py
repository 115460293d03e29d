"""The server of the tests: it has also imported Snakemake and what tests draw and clean with."""

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

if __name__ == "__main__":
    fork_server = runpy.run_path(str(Path(__file__).parents[2] / "workflow/snaketune/stages/host/fork_server.py"))
    # Set by pytest, by what its process imports, and by tests that keep caches apart; read anew where forks need it.
    serving = fork_server["serve"].__globals__
    may_differ = serving["MAY_DIFFER"].pattern + "|PYTEST_.*|HF_XET_.*|KMP_.*|XDG_CACHE_HOME"
    serving["MAY_DIFFER"] = re.compile(may_differ)
    importlib.import_module("snakemake.cli").get_argument_parser()
    fork_server["serve"](int(sys.argv[1]), (*fork_server["LIBRARIES"], *MORE))
