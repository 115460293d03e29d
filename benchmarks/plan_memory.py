"""The memory and time of planning rows: python -m benchmarks.plan_memory --sizes 1e6,1e7

Plans synthetic conversations, lognormal with a median of 250 tokens and a mean of 400, into rows of 2048. Only the index of
the tokens is made, since `plan` reads nothing else of conversations. Each size is planned in a process of its own. Its peak
counts, mapped pages included, less what the imports need; seconds are of one processor. `--overflow`, `--order` and
`--strategy` are those of `packing`. Disk: some 250 bytes per conversation, in `--folder`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import pyarrow as pa

from benchmarks.results import markdown
from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.packing.row_plan import build
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import PlanSpec
from snaketune.tokenization.token_store import INDEX, ROWS_PER_BATCH

ROW_LENGTH = 2048
HEX = np.array([list(f"{byte:02x}".encode()) for byte in range(256)], np.uint8)


def made_tokens(folder: Path, sequences: int, seed: int = 0) -> Artifact:
    """A tokenized corpus of which only the index exists; a fiftieth of it is held out."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for split, rows in (("train", sequences), ("held_out", sequences // 50)):
        with pa.OSFile(str(folder / f"{split}-index.arrow"), "wb") as file, pa.ipc.new_file(file, INDEX) as writer:
            for first in range(0, rows, ROWS_PER_BATCH):
                writer.write_batch(_index(random, min(ROWS_PER_BATCH, rows - first)))
    manifest = {"payload": describe_files(folder), "records": {}, "pad_id": 0}
    return Artifact(folder.parent / "tokens.json", manifest, folder)


def _index(random: np.random.Generator, rows: int) -> pa.RecordBatch:
    length = np.clip(random.lognormal(np.log(250), 0.97, rows), 2, 2**16).astype(np.int32)
    start = np.maximum((length * random.random(rows)).astype(np.int32), 1)
    ids = pa.py_buffer(HEX[random.integers(0, 256, (rows, 8), np.uint8)].tobytes())
    offsets = pa.py_buffer(np.arange(0, 16 * rows + 1, 16, dtype=np.int32))
    twos = pa.array(np.arange(0, 2 * rows + 1, 2, dtype=np.int32))
    runs, turns = (pa.array(np.stack(both, 1).reshape(-1)) for both in ((start, length), (start // 2, length)))
    zeros = np.zeros(rows, np.int32)
    columns = {
        "id": pa.StringArray.from_buffers(rows, offsets, ids),
        "length": length,
        "supervised": length - start,
        "supervised_runs": pa.ListArray.from_arrays(twos, runs),
        "turn_ends": pa.ListArray.from_arrays(twos, turns),
        "branches": pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), pa.array(zeros[:0])),
        **dict.fromkeys(("prompt", "chosen", "common"), zeros),
        "prompt_hash": np.zeros(rows, np.uint64),
        "label": pa.nulls(rows, pa.bool_()),
        "source": np.zeros(rows, np.int16),
        "control_text": np.zeros(rows, bool),
    }
    return pa.record_batch(columns, schema=INDEX)


def _peak() -> int:
    """Bytes. `ru_maxrss` would include the memory of the process that started this one."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def measure(folder: Path, spec: PlanSpec) -> dict[str, float]:
    """Plan the tokens in `folder`, in this process."""
    artifact = Artifact(folder / "tokens.json", json.loads((folder / "tokens.json").read_text()), folder / "tokens")
    work = WorkFolder(folder / "work")
    work.start()
    before, start = _peak(), process_time()
    build(spec, work, tokens=[artifact])
    return {"seconds": process_time() - start, "bytes": _peak() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description="The memory and time of planning rows.")
    parser.add_argument("--sizes", default="1e6,1e7", help="numbers of conversations")
    parser.add_argument("--overflow", default="drop")
    parser.add_argument("--order", default="shuffled")
    parser.add_argument("--strategy", default="best-fit-decreasing")
    parser.add_argument("--folder", type=Path, help="where the index is made (default: a temporary folder)")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of:
        spec = PlanSpec(
            kind="sft",
            lengths=(ROW_LENGTH,),
            strategy=args.strategy,
            overflow=args.overflow,
            order=args.order,
        )
        print(json.dumps(measure(args.of, spec)))
        return
    rows = []
    for size in (int(float(size)) for size in args.sizes.split(",")):
        with TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            manifest = made_tokens(folder / "tokens", size).manifest
            (folder / "tokens.json").write_text(json.dumps(manifest))
            command = [sys.executable, "-m", "benchmarks.plan_memory", "--of", name]
            command += ["--overflow", args.overflow, "--order", args.order, "--strategy", args.strategy]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
        each = found["bytes"] / (size + size // 50)
        rows.append([f"{size:.0e}", f"{found['seconds']:.1f}", f"{found['bytes'] / 1e6:.0f}", f"{each:.1f}"])
        print(" ".join(rows[-1]), flush=True)
    print(markdown(("sequences", "seconds", "peak MB", "bytes per sequence"), rows))


if __name__ == "__main__":
    main()
