"""Random access to packed rows, as views into Arrow record batches, which may be memory-mapped files.

rows[17]                               one row, views without copies             0.4 microseconds per row and column
EqualTokens(rows)[3]                   rows of one length with as many tokens as one of the longest rows
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from snaketune.engine.packing.ragged import offsets_of
from snaketune.engine.packing.shards import IGNORED

TOKENS = ("input_ids", "labels", "loss_weights")


class RowColumns(Protocol):
    """Further columns of packed rows."""

    def of_row(self, row: int) -> dict[str, np.ndarray]: ...

    def blank(self) -> dict[str, np.ndarray]:
        """The columns of a row without documents."""
        ...


@dataclass(frozen=True)
class DocumentColumns:
    """Columns with a value per conversation or pair, in the order of the rows.

    Attributes:
        offsets: int64[rows + 1], of the rows in the values.
        values: `source`, int64, the number of its source in the corpus; for pairs also `reference`, float32[:, 2], the
            reference log-probabilities of chosen and rejected; for single completions `desirable`, bool.
    """

    offsets: np.ndarray
    values: Mapping[str, np.ndarray]

    def of_row(self, row: int) -> dict[str, np.ndarray]:
        return {name: values[self.offsets[row] : self.offsets[row + 1]] for name, values in self.values.items()}

    def blank(self) -> dict[str, np.ndarray]:
        return {name: values[:0] for name, values in self.values.items()}


class PackedRows:
    """Packed rows of one split.

    Indexing returns a dict of numpy views: input_ids, labels and, if there are any, loss_weights [L], segment_lengths and
    prefix_lengths [s]; with trees also prefix_segments [s], for preferences completions [c]; and the columns of the row's
    documents and of a teacher. `row_length` is L of the longest rows, `order` is `packing.order`, `weighted` whether labels
    have weights.
    """

    # Only rows of a training with a teacher have its columns.
    teacher: RowColumns | None = None

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        lists: tuple[str, ...],
        row_length: int,
        *,
        order: str = "shuffled",
        weighted: bool = False,
        documents: DocumentColumns | None = None,
    ):
        """Args: batches: in the format of `engine.packing.shards`, none empty; lists: their columns of lists."""
        self.lists, self.row_length, self.order, self.weighted = lists, row_length, order, weighted
        self.documents = documents
        self.batches = [views_of(batch, lists) for batch in batches]
        self.offsets = offsets_of(np.array([len(batch) for batch in batches], np.int64))

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __str__(self) -> str:
        in_order = "" if self.order == "shuffled" else f", in the order of {self.order}"
        return f"{len(self)} rows of {self.row_length} tokens{in_order}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self.offsets, row, side="right")) - 1
        columns = row_of(self.batches[number], row - int(self.offsets[number]))
        for more in filter(None, (self.documents, self.teacher)):
            columns |= more.of_row(row)
        return columns

    def blank(self, tokens: int | None = None) -> dict[str, Any]:
        """A row of padding, of `tokens` tokens or of the longest length."""
        empty, length = np.empty(0, np.int32), tokens or self.row_length
        columns = {"input_ids": np.zeros(length, np.int32), "labels": np.full(length, IGNORED, np.int32)}
        if self.weighted:
            columns["loss_weights"] = np.zeros(length, np.float32)
        columns |= dict.fromkeys(self.lists, empty)
        for more in filter(None, (self.documents, self.teacher)):
            columns |= more.blank()
        return columns

    @cached_property
    def pairs(self) -> int:
        """The number of pairs, or of single completions; 0 for conversations."""
        return sum(len(values) for values in self._by_batch("completions")) // 2 if "completions" in self.lists else 0

    @cached_property
    def sources(self) -> int:
        """1 + the highest number of a source that a document comes from."""
        numbers = self.documents.values["source"] if self.documents else np.zeros(0, np.int64)
        return 1 + int(numbers.max(initial=0))

    @property
    def unpaired(self) -> bool:
        """Whether the rows are of single completions with labels."""
        return self.documents is not None and "desirable" in self.documents.values

    @cached_property
    def distinct_labels(self) -> set[bool]:
        """The labels that occur among single completions; empty for pairs."""
        return set(self.documents.values["desirable"].tolist()) if self.unpaired else set()

    def values(self, name: str) -> np.ndarray:
        """The values of a column of lists, of all rows."""
        return np.concatenate([np.empty(0, np.int32), *self._by_batch(name)])

    def _by_batch(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a column by batch, without copying them: every process of a training reads them."""
        for at, values in (views[name] for views in self.batches):
            yield values[at[0] : at[-1]]

    def counts(self, name: str) -> np.ndarray:
        """The lengths of the lists of a column, by row."""
        return np.concatenate([np.empty(0, np.int32), *(np.diff(views[name][0]) for views in self.batches)])

    @cached_property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(int(lengths.sum(dtype=np.int64)) for lengths in self._by_batch("segment_lengths"))

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """int64[rows]: the tokens of each row without padding."""
        before = offsets_of(self.values("segment_lengths"))
        return np.diff(before[offsets_of(self.counts("segment_lengths"))])

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The tokens of the longest segment with its prefix, and its row; (0, -1) for an empty split."""
        if not len(self):
            return 0, -1
        full = self.values("segment_lengths") + self.values("prefix_lengths")
        ends = np.cumsum(self.counts("segment_lengths"))
        return int(full.max()), int(np.searchsorted(ends, full.argmax(), side="right"))

    @cached_property
    def fullest(self) -> int:
        """The row with the most segments; -1 for an empty split."""
        return int(self.counts("segment_lengths").argmax()) if len(self) else -1

    @cached_property
    def has_prefixes(self) -> bool:
        """Whether any segment has a prefix, as those of pairs do."""
        return any(bool(lengths.any()) for lengths in self._by_batch("prefix_lengths"))


class EqualTokens:
    """Packed rows in items of equally many tokens, so that every batch of items is the same amount of work.

    With rows of 512 and 1024 tokens, an item is two of the former or one of the latter. The last item of each length may
    hold fewer rows.
    """

    def __init__(self, rows: PackedRows):
        self.rows = rows
        self.groups: list[range] = []
        lengths = [views["input_ids"].shape[1] for views in rows.batches]
        for length, own in groupby(range(len(lengths)), key=lengths.__getitem__):
            batches, per_item = list(own), rows.row_length // length
            start, stop = int(rows.offsets[batches[0]]), int(rows.offsets[batches[-1] + 1])
            self.groups += [range(at, min(at + per_item, stop)) for at in range(start, stop, per_item)]

    @cached_property
    def pairs(self) -> np.ndarray | None:
        """int64[items]: the pairs of each item; None for conversations."""
        if "completions" not in self.rows.lists:
            return None
        before = offsets_of(self.rows.counts("completions") // 2)
        return np.array([before[group.stop] - before[group.start] for group in self.groups], np.int64)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, item: int) -> list[dict[str, Any]]:
        """The rows of an item; `len(self)` is a blank item, one row of padding in which nothing is supervised."""
        if item == len(self):
            return [self.rows.blank()]
        return [self.rows[row] for row in self.groups[item]]


def views_of(batch: pa.RecordBatch, lists: tuple[str, ...]) -> dict[str, Any]:
    """The columns of a record batch of rows: tokens as [R, L], `lists` as (offsets of the rows, values)."""
    views: dict[str, Any] = {
        name: batch.column(name).flatten().to_numpy(zero_copy_only=True).reshape(len(batch), -1)
        for name in TOKENS
        if name in batch.schema.names
    }
    return views | {
        name: (batch.column(name).offsets.to_numpy(), batch.column(name).values.to_numpy()) for name in lists
    }


def row_of(views: dict[str, Any], row: int) -> dict[str, np.ndarray]:
    """One row of a record batch, given the result of `views_of`."""
    return {
        name: view[row] if name in TOKENS else view[1][view[0][row] : view[0][row + 1]] for name, view in views.items()
    }
