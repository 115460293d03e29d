"""The rows of verified shards, memory-mapped.

`load_in_memory` reads the files once instead of mapping them, for file systems on which every page fault is a request to
another machine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.engine.packing.rows import DocumentColumns, PackedRows
from snaketune.engine.packing.shards import FORMAT_VERSIONS, WEIGHTED_VERSION, list_columns
from snaketune.errors import SnaketuneError
from snaketune.tables import read_table

# Network file systems, and Windows disks as WSL mounts them.
SLOW_TO_MAP = {"9p", "drvfs", "v9fs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"}
# Columns of a split's documents, given these in the order of the rows.
Columns = Callable[[list[dict[str, Any]]], dict[str, np.ndarray]]


def open_rows(
    pack: Artifact, split: str, load_in_memory: Literal["auto"] | bool = "auto", columns: Columns | None = None
) -> PackedRows:
    """The rows of a split of a pack, with columns of their documents if given; SnaketuneError if the artifact has another
    format version than its kind's, or a shard is damaged."""
    version, kind = pack.manifest.get("format_version"), pack.manifest.get("kind", "sft")
    if version not in FORMAT_VERSIONS[kind]:
        raise SnaketuneError(
            f"{pack.manifest_path}: format_version {version!r}, expected {' or '.join(map(repr, FORMAT_VERSIONS[kind]))}; "
            f"rebuild it with: {rebuild_command(pack.manifest_path)}"
        )
    files = pack.files(f"{split}-")
    if load_in_memory == "auto":
        load_in_memory = bool(files) and is_slow_to_map(files[0])
    batches = [batch for path in files for batch in _batches(path, load_in_memory) if len(batch)]
    of_documents = None
    if columns:
        found = list(documents(pack, split))
        rows = np.array([document["row"] for document in found], np.int64)
        offsets = np.searchsorted(rows, np.arange(sum(map(len, batches)) + 1))
        of_documents = DocumentColumns(offsets, columns(found))
    return PackedRows(
        batches,
        list_columns(kind, version),
        pack.manifest["row_length"],
        order=pack.manifest.get("order", "shuffled"),
        weighted=version == WEIGHTED_VERSION,
        documents=of_documents,
    )


def sources_of(found: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The column `source` of documents."""
    return {"source": np.array([document["source"] for document in found], np.int64)}


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
