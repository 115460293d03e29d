"""Snakemake's command line, forked from a process that has imported it: a dry run costs half of what a start costs."""

import multiprocessing
import os
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

FORKED = multiprocessing.get_context("forkserver")
# Never snaketune: whose code makes the plan is what some tests are about.
FORKED.set_forkserver_preload(["snakemake.cli", "snakemake.report", "smart_open", "pydantic", __name__])


def snakemake(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run `snakemake` with these arguments in `folder`; return its exit status and all that it printed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with NamedTemporaryFile() as said:
        process = FORKED.Process(target=_run, args=(arguments, folder, environment, said.name))
        process.start()
        process.join()
        return process.exitcode, said.read().decode()


def _run(arguments: list[str], folder: Path, environment: dict[str, str], said: str) -> None:
    with Path(said).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    # The environment is that of the test that started the server.
    os.environ.clear()
    os.environ.update(environment)
    from snakemake import cli

    sys.argv = [cli.__file__, *arguments]
    cli.main()
