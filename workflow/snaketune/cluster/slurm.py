"""The output of SLURM's commands, as text; None if they don't exist, fail, or don't answer in time."""

import getpass
import os
import shutil
import subprocess

# slurmctld may be busy or away; commands that take longer count as failed.
SECONDS = 20


def run_slurm(*command: str) -> str | None:
    """Run a SLURM command and return what it prints; None if it can't be run, fails or times out."""
    if not shutil.which(command[0]):
        return None
    try:
        # Whatever time format the user has configured.
        environment = os.environ | {"SLURM_TIME_FORMAT": "standard"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def valid_names() -> str:
    """The accounts and QOS of this user and the partitions, for an error message."""
    show = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", "format=Account,QOS")
    rows = [line.split("|") for line in (run_slurm(*show) or "").splitlines() if "|" in line]
    names = {
        "accounts": {account for account, _ in rows if account},
        "QOS": {name for _, qos in rows for name in qos.split(",") if name},
        "partitions": {*(run_slurm("sinfo", "--noheader", "--format=%R") or "").split()},
    }
    return "; ".join(f"{name}: {', '.join(sorted(values))}" for name, values in names.items() if values)


def fields(line: str) -> dict[str, str]:
    """Parse the pairs of a line of `scontrol --oneliner`.

    >>> fields("JobId=17 JobState=TIMEOUT TRES=cpu=1,mem=2000M TimeLimit=01:00:00")["TRES"]
    'cpu=1,mem=2000M'
    """
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def megabytes(size: str) -> int:
    """Convert a size in SLURM's notation to MB; 0 if it is none.

    >>> megabytes("4000M"), megabytes("1.5G"), megabytes("2Tn"), megabytes("0")
    (4000, 1536, 2097152, 0)
    """
    size = size.strip().rstrip("nc")
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    try:
        return round(float(size[:-1]) * units[size[-1]]) if size[-1:] in units else round(float(size or 0))
    except ValueError:
        return 0
