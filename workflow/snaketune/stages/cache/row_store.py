"""Values of single rows (pairs of a reference pass, prompts with their generated responses), kept by the digest of all that
affects them: a change of some rows computes these only.

    results/.work/.rows/<key>/<digest of the file>.arrow
        digest binary[16]    of the row
        value binary

Files are named by the digest of their content, which is verified, and never changed, so any number of jobs can add files
concurrently without locks. A kept row costs 16 bytes and its value.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.digests import digest_json
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, sync
from snaketune.stages.cache.clean import ROWS
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tables import read_table, write_table

# A server writes a file of rows per second.
FILES_PER_MERGE = 512
SCHEMA = pa.schema({"digest": pa.binary(16), "value": pa.large_binary()})


class RowStore:
    """The kept rows of one key, the digest of everything that affects their values except the rows themselves."""

    def __init__(self, work_root: Path, key_parts: dict[str, Any]):
        self.key = digest_json(key_parts)[:32]
        self.folder = work_root / ROWS / self.key
        # Symbolic links may lead to files of others, which must not be read or written.
        self.usable = not any(path.is_symlink() for path in (self.folder, self.folder.parent))
        # Whether a row that can't be kept ends the work, as one that was paid for.
        self.must_keep = False
        self._added: list[Path] = []

    def find(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """The values of those of the rows that are kept, by digest (16 bytes). Damaged files are removed."""
        wanted = pa.array(set(digests), SCHEMA.field("digest").type)
        found: dict[bytes, bytes] = {}
        for path in self._files():
            try:
                if _content_digest(path) != path.stem:
                    raise SnaketuneError("its content isn't that of its name")
                digests_of_file, values = read_table(path).combine_chunks().columns
            except SnaketuneError as error:
                # Another job may have merged it.
                if path.is_file():
                    print(f"{path} is damaged and is removed; its rows are computed again ({error})", flush=True)
                    path.unlink(missing_ok=True)
                continue
            at = pc.index_in(wanted, value_set=digests_of_file)
            kept = values.take(at.drop_null()).to_pylist()
            found |= zip(wanted.filter(at.is_valid()).to_pylist(), kept)
        return found

    def add(self, rows: dict[bytes, bytes]) -> None:
        if not rows:
            return
        if not self.usable:
            if self.must_keep:
                raise SnaketuneError(f"{self.folder} is a symbolic link, so it can't keep what a server answered")
            return
        try:
            self._write(pa.table([[*rows], [*rows.values()]], schema=SCHEMA))
        except OSError as error:
            # If the folder can't be written to, the rows are computed again next time.
            if self.must_keep:
                raise SnaketuneError(f"{self.folder} can't keep what a server answered: {error}") from None

    def merge(self) -> None:
        """Merge the files that this object added into one, so that a long pass leaves few files."""
        parts = self._added
        with suppress(OSError, SnaketuneError):
            if len(parts) > 1:
                self._added = []
                self._write(pa.concat_tables(map(read_table, parts)))
                for path in set(parts) - set(self._added):
                    path.unlink(missing_ok=True)

    def completed(
        self, wanted: Iterable[bytes], compute: Callable[[list[bytes]], Iterable[dict[bytes, Any]]], what: str
    ) -> tuple[dict[bytes, Any], list[bytes]]:
        """The values of rows, kept as JSON; and the digests of those that weren't kept before. What was computed until an error
        is kept, too.

        Args:
            compute: yields values of rows in batches, each of which is kept at once. It may leave out rows.
            what: names the rows in messages.
        """
        digests = dict.fromkeys(wanted)
        found = {digest: json.loads(value) for digest, value in self.find(digests).items()}
        if found:
            print(f"{len(found)} of {len(digests)} {what} are cached", flush=True)
        missing = [digest for digest in digests if digest not in found]
        try:
            for files, values in enumerate(compute(missing) if missing else (), start=1):
                found |= values
                self.add({digest: json.dumps(value).encode() for digest, value in values.items()})
                if files % FILES_PER_MERGE == 0:
                    self.merge()
        finally:
            self.merge()
        return found, missing

    def mark(self, work: WorkFolder) -> None:
        """Name the rows of unfinished work, which must not be cleaned away."""
        mark = work.state / "rows" / self.key
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[!.]*.arrow")) if self.usable else []

    def _write(self, table: pa.Table) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{uuid4().hex}.partial"
        write_table(partial, table)
        # Synced before the rename, so that a file with its final name is complete even after a power failure.
        sync(partial)
        path = self.folder / f"{_content_digest(partial)}.arrow"
        partial.replace(path)
        self._added.append(path)


def _content_digest(path: Path) -> str:
    return digest_file(path).partition(":")[2]
