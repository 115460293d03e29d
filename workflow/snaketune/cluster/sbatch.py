"""An `sbatch` for the executor that waits where SLURM takes no job at present, instead of failing the job.

The executor counts every refusal as an attempt of the job, and none of its options changes that. It calls `sbatch`
by name, so it finds this one first.
"""

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from snaketune.cluster.slurm import run_slurm

# What SLURM says when it takes no job at present, and would take it later; any other refusal counts as permanent. Not here:
# `Socket timed out` and `Zero Bytes were transmitted`, after which the job may be in the queue.
# Limits on the number of jobs in the queue: of this user, where without a job in it the limit itself is too low; or of all
# users of an account or QOS, whose jobs may be hidden.
OF_USER = ("AssocMaxSubmitJobLimit", "QOSMaxSubmitJobPerUserLimit")
OF_ALL = ("AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit", "MaxSubmitJobsPerAccount")
# MaxJobCount of the cluster among them: sbatch says so while it tries again for some minutes.
UNABLE = ("Unable to contact slurm controller", "Slurm temporarily unable to accept job", "controller in standby mode")

SECONDS_BETWEEN_TRIES = 30
LOG = "log"


def why_to_wait(words: str) -> str:
    """Why SLURM takes no job at present, and whose jobs fill the queue; empty if waiting may not help.

    Args:
        words: what sbatch said.
    """
    code = next((code for code in OF_USER + OF_ALL if code in words), None)
    if not code:
        return next((said for said in UNABLE if said in words), "")
    whose = ("--me",) if code in OF_USER else ()
    listed = run_slurm("squeue", "--noheader", "--array", *whose, "--format=%u|%a|%q")
    if listed is not None and not listed.strip() and whose:
        return ""
    counts = Counter(tuple(line.split("|")) for line in (listed or "").split())
    jobs = (
        f"{count} of {user} (account {account}, QOS {qos})" for (user, account, qos), count in counts.most_common(4)
    )
    return f"{code}; jobs in the queue: {', '.join(jobs) or 'none that this user may see'}"


def install(log: Callable[[str], None], seconds: float = SECONDS_BETWEEN_TRIES) -> None:
    """Put this `sbatch` first on the PATH until this process ends. Args: log: gets why it waits."""
    folder = Path(tempfile.mkdtemp(prefix="snaketune-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(package)!r}); from {__name__} import main; sys.exit(main(*sys.argv[1:]))"
    )
    command = shlex.join([sys.executable, "-c", code, str(folder), str(seconds)])
    program = folder / "sbatch"
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    os.mkfifo(folder / LOG)
    # Also for writing, so that it stays open between two writers.
    lines = os.fdopen(os.open(folder / LOG, os.O_RDWR), encoding="utf-8")
    threading.Thread(target=lambda: [log(line.rstrip("\n")) for line in lines], name="sbatch", daemon=True).start()
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main(folder: str, seconds: str, *arguments: str) -> int:
    """Run SLURM's sbatch until it takes the job or refuses it for good; return its exit status."""
    # Jobs inherit the environment.
    path = os.pathsep.join(entry for entry in os.environ["PATH"].split(os.pathsep) if entry != folder)
    script, logged = sys.stdin.read(), ""
    while True:
        done = subprocess.run(
            ["sbatch", *arguments],
            input=script,
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path},
            check=False,
        )
        why = why_to_wait(done.stderr) if done.returncode else ""
        try:
            # Fails when the executor has ended: nothing would watch the job.
            with os.fdopen(os.open(Path(folder) / LOG, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as log:
                if why and why != logged:
                    log.write(f"SLURM takes no more jobs at present ({why}); tries again every {float(seconds):g} s\n")
        except OSError:
            why = ""
        if not why:
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
        logged = why
        time.sleep(float(seconds))
