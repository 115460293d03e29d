"""Fault injection: a small chain of all stages is broken in every known way and compared with an undisturbed run.

    python -m benchmarks.torture                          all; writes results/bench/torture.json and docs/reliability.md
    python -m benchmarks.torture --fault kill --trials 3  some of some
    python -m benchmarks.torture --slurm                  those of a cluster, where there is one

Finished trials are stored in the json; the same command resumes.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT
from benchmarks.torture.faults import FAULTS, Fault
from benchmarks.torture.slurm_faults import FAULTS as SLURM_FAULTS
from benchmarks.torture.trials import Failed, Reference, Trial, code_of
from benchmarks.torture.written import ON_SLURM, RESULTS, read, write


@dataclass(frozen=True)
class Planned:
    name: str
    fault: Fault
    point: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.name}/{self.point}/{self.number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--point", default="", help="only points that contain this")
    parser.add_argument("--trials", type=int, help="at each point (default: as many as the fault's row says)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials that fail")
    parser.add_argument("--again", action="store_true", help="forget what is finished of these faults")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "snaketune-torture")
    parser.add_argument("--slurm", action="store_true", help="the faults of a cluster instead")
    parser.add_argument(
        "--out", type=Path, help="(default: results/bench/torture.json, torture-slurm.json of a cluster's)"
    )
    chosen = parser.parse_args()
    chosen.out = chosen.out or (ON_SLURM if chosen.slurm else RESULTS)
    planned = plan(chosen)
    found = read(chosen.out, seed=chosen.seed)
    if chosen.again:
        found = {key: entry for key, entry in found.items() if key not in {one.key for one in planned}}
    left = [one for one in planned if not found.get(one.key, {}).get("passed")]
    if others := sum(entry.get("code") != code_of(ROOT) for entry in found.values()):
        print(f"{others} of the known trials are of other code; --again makes them again")
    reference = Reference.make(chosen.folder.resolve() / "undisturbed")
    print(f"{len(left)} trials, {len(planned) - len(left)} known; undisturbed in {reference.seconds:.0f} s", flush=True)
    begun = time.monotonic()
    with ThreadPoolExecutor(chosen.jobs) as several:
        running = {several.submit(attempt, one, reference, chosen): one for one in left}
        for done, future in enumerate(as_completed(running), 1):
            one, entry = running[future], future.result()
            found[one.key] = entry
            write(chosen.out, found, reference, seed=chosen.seed)
            rest = (time.monotonic() - begun) / done * (len(left) - done)
            how = f"{entry['ended']} ({entry['seconds']:.0f} s; {rest / 60:.0f} min left)"
            print(f"{done}/{len(left)} {one.key}: {how}", flush=True)
    failed = [one.key for one in planned if not found[one.key]["passed"]]
    sys.exit(f"{len(failed)} of {len(planned)} trials failed: {', '.join(failed)}" if failed else 0)


def plan(chosen: argparse.Namespace) -> list[Planned]:
    """Return the requested trials, one of each point first, so that a partial run covers all points."""
    table = SLURM_FAULTS if chosen.slurm else FAULTS
    if unknown := set(chosen.fault) - set(table):
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(table)}")
    found = [
        Planned(name, table[name], point, number)
        for name in table
        if name in (chosen.fault or table)
        for point in table[name].points
        if chosen.point in point
        for number in range(chosen.trials or table[name].trials)
    ]
    return sorted(found, key=lambda one: one.number)


def attempt(one: Planned, reference: Reference, chosen: argparse.Namespace) -> dict[str, Any]:
    folder = reference.chain.folder.parent / re.sub(r"\W+", "-", one.key)
    shutil.rmtree(folder, ignore_errors=True)
    trial = Trial(reference=reference, folder=folder, point=one.point, drawn=random.Random(f"{chosen.seed} {one.key}"))
    begun, passed = time.monotonic(), False
    try:
        one.fault.do(trial)
        passed = True
        ended = "identical results after following the error message" if trial.instructions else "identical results"
    except (Failed, OSError, subprocess.SubprocessError) as error:
        # Any error counts as a failed trial, and doesn't end the others.
        ended = f"FAILED: {error}"
    if passed or not chosen.keep:
        trial.chain.remove()
    return {
        "fault": one.name,
        "point": one.point,
        "passed": passed,
        "ended": ended,
        "instructions": trial.instructions,
        "counts": trial.counts,
        "strikes": one.fault.strikes if trial.hits is None else trial.hits,
        "code": reference.code,
        "seconds": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    main()
