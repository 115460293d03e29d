"""Valid rows on disk, between the first and the last pass: an Arrow file with the columns of the result but id and source.

Turns have weights in the file, and are read as the result has them.

Read by plain reads instead of a memory map, so that the pages read don't stay in the process.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate, chain
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.corpus.rows import MARGIN, MESSAGES, SCHEMAS, VARIABLES, WEIGHTED_MESSAGES, Message, Row, with_weights

ROWS_PER_BATCH = 1024
TURN = WEIGHTED_MESSAGES.value_type
WRITTEN_LATER = ("id", "source")


class Spool(ExitStack):
    """Append batches inside `with`; read them afterwards.

    Attributes:
        weighted: whether any turn has another weight than 0 and 1.
        varied: whether any row has template variables.
        rated: whether any pair has ratings.
    """

    def __init__(self, path: Path, kind: str):
        super().__init__()
        self.path, self.kind, self.weighted, self.varied, self.rated = path, kind, False, False, False
        written = [field for field in SCHEMAS[kind] if field.name not in WRITTEN_LATER]
        further = [VARIABLES, *([MARGIN] if kind == "preferences" else [])]
        self.schema = with_weights(pa.schema([*written, *further]))
        self.columns = [field.name for field in self.schema if field.type == WEIGHTED_MESSAGES]
        self.writer = self.enter_context(pa.ipc.new_file(str(path), self.schema))

    def append(self, rows: list[Row]) -> np.ndarray:
        """Write a batch, of `ROWS_PER_BATCH` rows unless it is the last, and return int64[rows], the characters of each row."""
        arrays: list[pa.Array] = []
        characters = np.zeros(len(rows), np.int64)
        for field in self.schema:
            values = [getattr(row, field.name) for row in rows]
            if field.name in self.columns:
                array, lengths, weighted = _turns_array(values)
                characters += lengths
                self.weighted |= weighted
            else:
                array = pa.array(values, field.type)
                self.varied |= field == VARIABLES and array.null_count < len(array)
                self.rated |= field == MARGIN and array.null_count < len(array)
            arrays.append(array)
        self.writer.write_batch(pa.record_batch(arrays, schema=self.schema))
        return characters

    @property
    def result_schema(self) -> pa.Schema:
        schema = with_weights(SCHEMAS[self.kind]) if self.weighted else SCHEMAS[self.kind]
        schema = schema.append(VARIABLES) if self.varied else schema
        return schema.append(MARGIN) if self.rated else schema

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield each batch, and the number of its first row."""
        with pa.OSFile(str(self.path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield number * ROWS_PER_BATCH, self._as_result(reader.get_batch(number))

    def rows(self, numbers: list[int]) -> Iterator[dict]:
        with pa.OSFile(str(self.path)) as file:
            reader = pa.ipc.open_file(file)
            for number in numbers:
                batch, row = divmod(number, ROWS_PER_BATCH)
                yield self._as_result(reader.get_batch(batch)).slice(row, 1).to_pylist()[0]

    def _as_result(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.varied:
            batch = batch.drop_columns([VARIABLES.name])
        if not self.rated and MARGIN in self.schema:
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
