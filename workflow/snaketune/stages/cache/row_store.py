"""Values of single rows (pairs of a reference pass, prompts with their generated responses), kept by the digest of all that
affects them: a change of some rows computes these only.

    results/.work/.rows/<key>/<digest of the file>.arrow
        prefix uint64, sorted    the first 8 bytes of the row's digest
        check uint64             a digest of the row's digest and value: only intact values are found
        value binary

Files are mapped, and of each only the pages that a search in the sorted prefixes needs are read. They are named by the digest
of their content and never changed, so any number of jobs can add files concurrently without locks. A kept row costs 24 bytes
and its value.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import xxhash

from snaketune.artifacts.digests import digest_json
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, sync
from snaketune.stages.cache.clean import ROWS
from snaketune.tables import read_table, write_table

SCHEMA = pa.schema({"prefix": pa.uint64(), "check": pa.uint64(), "value": pa.large_binary()})


class RowStore:
    """The kept rows of one key, the digest of everything that affects their values except the rows themselves."""

    def __init__(self, work_root: Path, key_parts: dict[str, Any]):
        self.key = digest_json(key_parts)[:32]
        self.folder = work_root / ROWS / self.key
        # Symbolic links may lead to files of others, which must not be read or written.
        self.usable = not any(path.is_symlink() for path in (self.folder, self.folder.parent))
        self._own: list[Path] = []

    def find(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the values of those of the rows that are kept, by digest (16 bytes). Unreadable files are removed, and a
        damaged value isn't found."""
        wanted = sorted(set(digests), key=_prefix)
        found: dict[bytes, bytes] = {}
        for path in self._files():
            try:
                found |= _search(path, wanted)
            except (SnaketuneError, pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
                # Another job may have merged it.
                if path.is_file():
                    print(f"{path} is damaged and is removed; its rows are computed again ({error})", flush=True)
                    path.unlink(missing_ok=True)
            wanted = [digest for digest in wanted if digest not in found]
        return found

    def add(self, rows: dict[bytes, bytes]) -> None:
        """Keep the values of these rows."""
        if not self.usable or not rows:
            return
        digests = sorted(rows, key=_prefix)
        columns = [
            [_prefix(one) for one in digests],
            [_check(one, rows[one]) for one in digests],
            [*map(rows.get, digests)],
        ]
        # If the folder can't be written to, the rows are computed again next time.
        with suppress(OSError):
            self._write(pa.table([pa.array(*both) for both in zip(columns, SCHEMA.types)], schema=SCHEMA))

    def merge(self) -> None:
        """Merge the files that this object added into one, so that a long pass leaves few files."""
        parts = self._own
        with suppress(OSError, SnaketuneError):
            if len(parts) > 1:
                self._own = []
                self._write(pa.concat_tables(map(read_table, parts)).combine_chunks().sort_by("prefix"))
                for path in set(parts) - set(self._own):
                    path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all rows of the key."""
        for path in self._files():
            path.unlink(missing_ok=True)
        self._own = []

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[!.]*.arrow")) if self.usable else []

    def _write(self, table: pa.Table) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{uuid4().hex}.partial"
        # One batch, so that columns are contiguous.
        write_table(partial, table, max(1, len(table)))
        # Synced before the rename, so that a file with its final name is complete even after a power failure.
        sync(partial)
        path = self.folder / f"{digest_file(partial).partition(':')[2]}.arrow"
        partial.replace(path)
        self._own.append(path)


def _search(path: Path, wanted: list[bytes]) -> dict[bytes, bytes]:
    """Return the intact values of a file's rows among `wanted`, sorted by prefix. Raises various errors if it is damaged."""
    table = read_table(path)
    if table.schema != SCHEMA:
        raise ValueError("it has other columns")
    table.validate()
    kept, checks, values = (table[name].chunk(0) for name in SCHEMA.names)
    _, offset_bytes, content = values.buffers()
    prefixes, offsets = kept.to_numpy(), np.frombuffer(offset_bytes, "<i8")
    own = np.array([_prefix(digest) for digest in wanted], np.uint64)
    at = np.searchsorted(prefixes, own)
    found = {}
    for hit in np.flatnonzero((at < len(prefixes)) & (prefixes[np.minimum(at, len(prefixes) - 1)] == own)).tolist():
        start, stop = offsets[at[hit] : at[hit] + 2].tolist()
        value = bytes(memoryview(content)[max(start, 0) : max(stop, 0)])
        if checks[int(at[hit])].as_py() == _check(wanted[hit], value):
            found[wanted[hit]] = value
        else:
            print(f"{path}: a damaged value is computed again", flush=True)
    return found


def _prefix(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def _check(digest: bytes, value: bytes) -> int:
    return xxhash.xxh3_64_intdigest(digest + value)
