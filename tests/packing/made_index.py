"""Synthetic indexes of tokenized splits."""

import numpy as np
import pyarrow as pa

from snaketune.engine.packing.planned_segments import SupervisedRuns


def index(sequences: list[dict]) -> pa.RecordBatch:
    """Return the index of sequences, given by length, supervised runs, ends of turns, and for pairs their parts."""
    columns = {
        "id": pa.array([row.get("id", f"{number:016x}") for number, row in enumerate(sequences)], pa.string()),
        "length": pa.array([row["length"] for row in sequences], pa.int32()),
        "supervised": pa.array([supervised_tokens(row) for row in sequences], pa.int32()),
        "supervised_runs": pa.array([row["supervised_runs"] for row in sequences], pa.list_(pa.int32())),
        "branches": pa.array([row.get("branches", []) for row in sequences], pa.list_(pa.int32())),
        "turn_ends": pa.array([row.get("turn_ends", []) for row in sequences], pa.list_(pa.int32())),
        "prompt": pa.array([row.get("prompt", 0) for row in sequences], pa.int32()),
        "chosen": pa.array([row.get("chosen", 0) for row in sequences], pa.int32()),
        "common": pa.array([row.get("common", 0) for row in sequences], pa.int32()),
        "prompt_hash": pa.array([row.get("prompt_hash", 0) for row in sequences], pa.uint64()),
        "control_text": pa.array([row.get("control_text", False) for row in sequences], pa.bool_()),
    }
    return pa.record_batch(columns)


def supervised_tokens(row: dict) -> int:
    return sum(np.subtract(row["supervised_runs"][1::2], row["supervised_runs"][::2]).tolist())


def runs_of(table: pa.Table) -> SupervisedRuns:
    """The supervised runs of an index."""
    runs = table["supervised_runs"].combine_chunks()
    return SupervisedRuns(runs.values.to_numpy(), runs.offsets.to_numpy())
