"""Valid rows on disk, between the first and the last pass: an Arrow file with the columns of the result but id and source.

Turns have weights in the file, and are read as the result has them, which the rows of all parts decide. Read by plain reads
instead of a memory map, so that the pages read don't stay in the process.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.corpus.rows import MARGIN, MESSAGES, SCHEMAS, VARIABLES, WEIGHTED_MESSAGES, Message, Row, with_weights

ROWS_PER_BATCH = 1024
TURN = WEIGHTED_MESSAGES.value_type
WRITTEN_LATER = ("id", "source")
FILE = "rows.arrow"


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The columns of the result, which its rows decide.

    Attributes:
        weighted: whether any turn has another weight than 0 and 1.
        varied: whether any row has template variables.
        rated: whether any pair has ratings.
    """

    kind: str
    weighted: bool = False
    varied: bool = False
    rated: bool = False

    @cached_property
    def stored(self) -> pa.Schema:
        written = [field for field in SCHEMAS[self.kind] if field.name not in WRITTEN_LATER]
        further = [VARIABLES, *([MARGIN] if self.kind == "preferences" else [])]
        return with_weights(pa.schema([*written, *further]))

    @cached_property
    def columns(self) -> list[str]:
        """The names of columns that hold turns."""
        return [field.name for field in self.stored if field.type == WEIGHTED_MESSAGES]

    @cached_property
    def result(self) -> pa.Schema:
        schema = with_weights(SCHEMAS[self.kind]) if self.weighted else SCHEMAS[self.kind]
        schema = schema.append(VARIABLES) if self.varied else schema
        return schema.append(MARGIN) if self.rated else schema

    def as_result(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.varied:
            batch = batch.drop_columns([VARIABLES.name])
        if not self.rated and MARGIN in self.stored:
            batch = batch.drop_columns([MARGIN.name])
        if self.weighted:
            return batch
        for number, field in enumerate(batch.schema):
            if field.name in self.columns:
                turns = batch.column(number)
                role, content, weight = turns.values.flatten()
                plain = pa.StructArray.from_arrays(
                    [role, content, pc.not_equal(weight, 0)], fields=list(MESSAGES.value_type)
                )
                column = pa.ListArray.from_arrays(turns.offsets, plain, type=MESSAGES)
                batch = batch.set_column(number, field.with_type(MESSAGES), column)
        return batch


class RowWriter(ExitStack):
    """Appends batches inside `with`."""

    def __init__(self, folder: Path, kind: str):
        super().__init__()
        self.format, self.rows = RowFormat(kind=kind), 0
        self.weighted = self.varied = self.rated = False
        self.writer = self.enter_context(pa.ipc.new_file(str(folder / FILE), self.format.stored))

    @property
    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "weighted": self.weighted, "varied": self.varied, "rated": self.rated}

    def append(self, rows: list[Row]) -> np.ndarray:
        """Write a batch, of `ROWS_PER_BATCH` rows unless it is the last, and return int64[rows], the characters of each row."""
        arrays: list[pa.Array] = []
        characters = np.zeros(len(rows), np.int64)
        for field in self.format.stored:
            values = [getattr(row, field.name) for row in rows]
            if field.name in self.format.columns:
                array, lengths, weighted = _turns_array(values)
                characters += lengths
                self.weighted |= weighted
            else:
                array = pa.array(values, field.type)
                self.varied |= field == VARIABLES and array.null_count < len(array)
                self.rated |= field == MARGIN and array.null_count < len(array)
            arrays.append(array)
        self.writer.write_batch(pa.record_batch(arrays, schema=self.format.stored))
        self.rows += len(rows)
        return characters


def batches(path: Path, format_: RowFormat, first: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the batches of a file of rows as the result has them, from that of row `first` on, each with its first row."""
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(first // ROWS_PER_BATCH, reader.num_record_batches):
            yield number * ROWS_PER_BATCH, format_.as_result(reader.get_batch(number))


def _turns_array(rows: list[list[Message]]) -> tuple[pa.Array, np.ndarray, bool]:
    """Return a column of turns, the characters of each row in it, and whether any weight is neither 0 nor 1.

    Every row must have turns.
    """
    turns = list(chain.from_iterable(rows))
    roles = list(map(itemgetter("role"), turns))
    contents = list(map(itemgetter("content"), turns))
    offsets = np.fromiter(accumulate(map(len, rows), initial=0), np.int32, len(rows) + 1)
    lengths = np.fromiter(map(len, contents), np.int64, len(contents))
    weights = np.array([turn.get("weight", 1.0) for turn in turns], np.float32)
    structs = pa.StructArray.from_arrays(
        [pa.array(roles, pa.string()), pa.array(contents, pa.string()), pa.array(weights)],
        fields=list(TURN),
    )
    column = pa.ListArray.from_arrays(offsets, structs, type=WEIGHTED_MESSAGES)
    return column, np.add.reduceat(lengths, offsets[:-1]), bool((weights * (weights - 1)).any())
