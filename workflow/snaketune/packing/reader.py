"""Random access to the packed rows of verified shards: memory-mapped, without copying the tokens.

    rows[17]                               one row, views into the mapped file       0.4 microseconds per row and column
    EqualTokens(rows)[3]                   rows of one length with as many tokens as one of the longest rows

`load_in_memory` reads the files once instead of mapping them, for file systems on which every page fault is a request to
another machine.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.packing.shards import FORMAT_VERSIONS, IGNORED, WEIGHTED_VERSION, list_columns
from snaketune.tables import read_table
from snaketune.tokenization.encoded_rows import offsets_of

TOKENS = ("input_ids", "labels", "loss_weights")
# Network file systems, and Windows disks as WSL mounts them.
SLOW_TO_MAP = {"9p", "drvfs", "v9fs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"}


class PackedRows:
    """The rows of one split of a pack artifact.

    Indexing returns a dict of numpy views into the mapped files: input_ids, labels and, if there are any, loss_weights [L],
    segment_lengths and
    prefix_lengths [s]; with trees also prefix_segments [s], for preferences completions [c]. `row_length` is L of the longest
    rows, `order` is `packing.order`, `weighted`
    whether labels have weights.
    """

    order: str = "shuffled"
    weighted: bool = False

    def __init__(self, pack: Artifact, split: str, load_in_memory: Literal["auto"] | bool = "auto"):
        """Open a split; SnaketuneError if the artifact has another format version than its kind's, or a shard is damaged."""
        version, kind = pack.manifest.get("format_version"), pack.manifest.get("kind", "sft")
        if version not in FORMAT_VERSIONS[kind]:
            raise SnaketuneError(
                f"{pack.manifest_path}: format_version {version!r}, expected {' or '.join(map(repr, FORMAT_VERSIONS[kind]))}; "
                f"rebuild it with: {rebuild_command(pack.manifest_path)}"
            )
        self.lists = list_columns(kind, version)
        self.row_length: int = pack.manifest["row_length"]
        self.weighted = version == WEIGHTED_VERSION
        self.order = pack.manifest.get("order", self.order)
        files = pack.files(f"{split}-")
        if load_in_memory == "auto":
            load_in_memory = bool(files) and is_slow_to_map(files[0])
        batches = [batch for path in files for batch in _batches(path, load_in_memory) if len(batch)]
        self.batches = [views_of(batch, self.lists) for batch in batches]
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
        return row_of(self.batches[number], row - int(self.offsets[number]))

    def blank(self, tokens: int | None = None) -> dict[str, Any]:
        """A row of padding, of `tokens` tokens or of the longest length."""
        empty, length = np.empty(0, np.int32), tokens or self.row_length
        tokens = {"input_ids": np.zeros(length, np.int32), "labels": np.full(length, IGNORED, np.int32)}
        if self.weighted:
            tokens["loss_weights"] = np.zeros(length, np.float32)
        return tokens | dict.fromkeys(self.lists, empty)

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


class SourcedRows(PackedRows):
    """Packed conversations with a column per conversation: `source`, int64[c], the number of its source in the corpus.

    Attributes:
        sources: 1 + the highest number of a source.
    """

    def __init__(self, pack: Artifact, split: str, load_in_memory: Literal["auto"] | bool = "auto"):
        """Raises: as `PackedRows`."""
        super().__init__(pack, split, load_in_memory)
        self.of_rows: list[list[int]] = [[] for _ in range(len(self))]
        for document in documents(pack, split):
            self.of_rows[document["row"]].append(document["source"])
        self.sources = 1 + max((source for row in self.of_rows for source in row), default=0)

    def blank(self, tokens: int | None = None) -> dict[str, Any]:
        return super().blank(tokens) | {"source": np.array([], np.int64)}

    def __getitem__(self, row: int) -> dict[str, Any]:
        return super().__getitem__(row) | {"source": np.array(self.of_rows[row], np.int64)}


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


def documents(pack: Artifact, split: str) -> Iterator[dict[str, Any]]:
    """Yield id, row, tokens and supervised tokens of each conversation or pair of a split, in the order of the rows."""
    for batch in read_table(pack.file("documents.arrow")).to_batches():
        yield from (row for row in batch.to_pylist() if row["split"] == split)


def is_slow_to_map(path: Path) -> bool:
    """Whether `path` is on a file system on which memory-mapping is slow; if so, log it."""
    kind, mount = _file_system(path)
    if kind in SLOW_TO_MAP:
        print(f"{mount} is a {kind} file system, slow to map: rows are read into memory", flush=True)
    return kind in SLOW_TO_MAP


def _file_system(path: Path, table: Path = Path("/proc/mounts")) -> tuple[str, str]:
    """The type and mount point of the file system of `path`; ("", "") if they are unknown."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return "", ""
    # Spaces in a mount point are written as \040.
    mounts = [(fields[2], fields[1].replace(r"\040", " ")) for fields in map(str.split, lines) if len(fields) > 2]
    real = path.resolve()
    holding = [(kind, mount) for kind, mount in mounts if real.is_relative_to(mount)]
    # The innermost mount; of several on one mount point the last, which hides the others.
    return max(reversed(holding), key=lambda mounted: len(mounted[1]), default=("", ""))


def _batches(path: Path, in_memory: bool) -> list[pa.RecordBatch]:
    if not in_memory:
        return read_table(path).to_batches()
    return pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all().to_batches()


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
