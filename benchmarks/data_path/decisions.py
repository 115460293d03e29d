"""Memory and time of `decide` by the number of rows, from synthetic records of parts.

    python -m benchmarks.data_path.decisions --rows 1e6,1e7,1e8

One row in ten is a duplicate, in any part; one source has a cap and one a weight. Memory is the largest of the process; the
rows themselves aren't read.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pyarrow as pa
from benchmarks.jobs import started

from snaketune.corpus.assembly import decide_rows
from snaketune.corpus.selecting.scanned_parts import FACTS, QUARANTINE, RECORD_FILE, RECORDS, ScannedParts
from snaketune.stages.specs import CorpusSpec
from snaketune.tables import write_table

ROWS_OF_PART = 1_000_000


def write_part(folder: Path, number: int, rows: int, total: int) -> None:
    rng = np.random.default_rng(number)
    # Duplicates are drawn from few hashes; all others differ with near certainty.
    content = rng.integers(0, 2**64, rows, np.uint64)
    again = rng.random(rows) < 0.1
    content[again] = np.random.default_rng(0).integers(0, 2**64, max(1, total // 100), np.uint64)[
        rng.integers(0, max(1, total // 100), int(again.sum()))
    ]
    columns = {
        "content": content,
        "prompt": rng.integers(0, 2**64, rows, np.uint64),
        "characters": np.clip(rng.lognormal(6.5, 1.0, rows), 1, 1e6).astype(np.uint32),
        "origin": np.zeros(rows, np.uint32),
    }
    folder.mkdir(parents=True)
    write_table(folder / RECORD_FILE, pa.table(columns, schema=RECORDS), rows)
    (folder / QUARANTINE).touch()
    counts = {"read": rows, "extra": 0, "joined": 0, "quarantined": 0, "rows": rows}
    counts |= {"dropped": {}, "ignored": {}, "marked": {}}
    facts = {"rows": rows, "weighted": False, "varied": False, "rated": False, "sources": [counts], "ranges": []}
    facts |= {"origins": [["messages", []]], "cleaned": {}, "evaluations": []}
    (folder / FACTS).write_text(json.dumps(facts))


def measure(folder: Path, rows: int) -> None:
    """Decide about the rows of the parts in a folder, in this process, and print seconds and bytes."""
    folders = sorted(folder.glob("part-*"))
    sources = [{"files": ["a.jsonl"], "max_rows": rows // 4}, {"files": ["b.jsonl"], "weight": 1.5}]
    spec = CorpusSpec(kind="conversations", sources=sources, held_out=0.05)
    # The first half is of the first source.
    numbers = [[2 * part // len(folders)] for part in range(len(folders))]
    before, began = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
    parts = ScannedParts(folders, len(sources), numbers)
    decided = decide_rows(spec, started(folder / "work"), parts)
    by_split = decided.decisions.by_split
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    facts = {"seconds": time.perf_counter() - began, "peak_mb": peak / 1e3, "imports_mb": before / 1e3}
    print(json.dumps(facts | {"written": int(sum(copies.sum() for copies in by_split.values()))}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1e6,1e7", help="numbers of rows, such as 1e6,1e7")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(float(size)) for size in options.rows.split(",")]
    if options.measure:
        measure(options.measure, sizes[0])
        return
    print("| rows | s | peak memory, GB | bytes per row |", "|---|---|---|---|", sep="\n")
    for rows in sizes:
        with tempfile.TemporaryDirectory(dir=".") as name:
            for number, first in enumerate(range(0, rows, ROWS_OF_PART)):
                write_part(Path(name) / f"part-{number:05d}", number, min(ROWS_OF_PART, rows - first), rows)
            command = [sys.executable, "-m", "benchmarks.data_path.decisions", "--rows", str(rows), "--measure", name]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            facts = json.loads(out.splitlines()[-1])
        per_row = 1e6 * (facts["peak_mb"] - facts["imports_mb"]) / rows
        print(f"| {rows:.0e} | {facts['seconds']:.0f} | {facts['peak_mb'] / 1e3:.2f} | {per_row:.0f} |", flush=True)


if __name__ == "__main__":
    main()
