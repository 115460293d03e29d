"""The server of the tests: it has also imported Snakemake and what tests draw and clean with."""

import importlib
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
    importlib.import_module("snakemake.cli").get_argument_parser()
    fork_server["serve"](int(sys.argv[1]), (*fork_server["LIBRARIES"], *MORE))
