"""A corpus on many nodes, simulated from measured job times: python -m benchmarks.wide

Jobs take what `python -m benchmarks.data_path.parts` measured per byte of text on one core.
A stage of parts is a job array; its parts are equal but for a spread of a tenth, and run on as many cores as there are, one
each. The stages `decide` and `plan` are one job. What SLURM and Snakemake add is counted as it was measured on a real SLURM
A stage of parts is a job array; its parts are equal but for a spread of a tenth, and run on as many cores as there are, one
file system nor the network limits anything here: compare the bytes per second that the table has with what yours gives.
"""

import argparse
import heapq
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from benchmarks.data_path.parts import RATES

# In order; those of parts, and those of one job. Links (`corpus`, `pack`) run where Snakemake runs, by bytes of digests.
STAGES = {
    "read": True,
    "decide": False,
    "filter": True,
    "corpus": False,
    "tokenize": True,
    "plan": False,
    "write": True,
}
STAGES |= {"pack": False}
SUBMITTED_S = 0.05  # a job of an array, by sbatch
STARTED_S = 2 * 2.5 + 1.0  # Snakemake twice, and Python with the stage's imports, in each job
SPREAD = 0.1
CORES_PER_NODE = 8
SIZES = {"100 GB": 100, "1 TB": 1000, "4 TB, 10^12 tokens": 4000}
NODES = (1, 8, 64)


def looks() -> Iterator[float]:
    """The times at which the executor looks for jobs that have ended, after it submitted them or one has ended."""
    number = 1
    while True:
        yield 5.0 * number**2
        number += 1


def stage_seconds(work: float, jobs: int, cores: int, rng: Random) -> float:
    """The time of one stage. Args: work: seconds of one core for all its jobs."""
    free = [0.0] * min(cores, jobs)
    ends = []
    for number in range(jobs):
        start = max(heapq.heappop(free), number * SUBMITTED_S)
        end = start + STARTED_S + work / jobs * rng.uniform(1 - SPREAD, 1 + SPREAD)
        heapq.heappush(free, end)
        ends.append(end)
    last = max(ends)
    # The queue is looked at anew after the end that was seen last.
    before = max((end for end in ends if end < last), default=0.0)
    return next(before + look for look in looks() if before + look >= last)


def hours(gigabytes: float, cores: int, parts: int, per_gb: dict[str, float]) -> tuple[float, dict[str, float]]:
    """The hours of all stages, and the seconds of each."""
    rng = Random(0)
    seconds = {
        stage: stage_seconds(per_gb[stage] * gigabytes, parts if of_parts else 1, cores, rng)
        for stage, of_parts in STAGES.items()
    }
    return sum(seconds.values()) / 3600, seconds


def table(per_gb: dict[str, float], parts: int) -> str:
    lines = [
        f"| text | nodes of {CORES_PER_NODE} cores | hours | longest stages | read and written, GB/s |",
        "|---|---|---|---|---|",
    ]
    for size, gigabytes in SIZES.items():
        for nodes in NODES:
            total, seconds = hours(gigabytes, nodes * CORES_PER_NODE, parts, per_gb)
            longest = sorted(seconds, key=seconds.__getitem__)[:-4:-1]
            shares = ", ".join(f"{stage} {seconds[stage] / 36 / total:.0f}%" for stage in longest)
            # Of the stage that moves most: it reads its text once and writes about as much.
            busiest = 2 * gigabytes / min(seconds[stage] for stage in ("read", "filter"))
            lines.append(f"| {size} | {nodes} | {total:.2g} | {shares} | {busiest:.2g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=int, default=512)
    options = parser.parse_args()
    measured: dict[str, Any] = json.loads(RATES.read_text(encoding="utf-8"))
    per_gb = measured["seconds_per_gb"]
    print("core seconds per GB of text:", ", ".join(f"{stage} {per_gb[stage]:.1f}" for stage in STAGES))
    print(table(per_gb, options.parts))


if __name__ == "__main__":
    main()
