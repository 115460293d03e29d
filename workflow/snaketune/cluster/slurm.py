"""What SLURM's own programs say, as text; nothing where they aren't there, refuse, or don't answer in time."""

import os
import shutil
import subprocess

# slurmctld may be busy, or away for a while; nobody here waits for it longer.
SECONDS = 20


def run_slurm(*command: str) -> str | None:
    """What a program prints; None where it says nothing that could be used."""
    if not shutil.which(command[0]):
        return None
    try:
        # However its user likes to read times.
        plainly = os.environ | {"SLURM_TIME_FORMAT": "standard"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=plainly)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def fields(line: str) -> dict[str, str]:
    """The pairs of a line of `scontrol --oneliner`.

    >>> fields("JobId=17 JobState=TIMEOUT TRES=cpu=1,mem=2000M TimeLimit=01:00:00")["TRES"]
    'cpu=1,mem=2000M'
    """
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def megabytes(told: str) -> int:
    """As SLURM writes sizes; 0 for what isn't one.

    >>> megabytes("4000M"), megabytes("1.5G"), megabytes("2Tn"), megabytes("0")
    (4000, 1536, 2097152, 0)
    """
    told = told.strip().rstrip("nc")
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    try:
        return round(float(told[:-1]) * units[told[-1]]) if told[-1:] in units else round(float(told or 0))
    except ValueError:
        return 0
