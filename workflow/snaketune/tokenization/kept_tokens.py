"""Tokens of rows that earlier results hold: after an edit of some rows of a corpus, only these are encoded.

Each result of the `tokenize` stage has, as a record, the digests of its rows:

    <split>-rows.arrow
        prefix uint64, sorted    the first 8 bytes of the row's digest
        check uint64             the other 8
        row uint32               its number in the split

A row's digest is that of everything the stage reads of it. Results count that were made with the same spec, tokenizer, code and
library versions; which rows were in which part doesn't matter. Files are mapped, and of the digests only the pages that a
search needs are read. A row costs 20 bytes.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from snaketune.artifacts.manifest import Artifact, read_artifact
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.attempt import read_attempt
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizeSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.token_rows import names_of
from snaketune.tokenization.token_store import SPLITS, TokenBatch, TokenParts

# Some rows of a table, int64[m], and their tokens.
Located = tuple[np.ndarray, TokenBatch]
# Columns of a corpus that tokens depend on.
READ = ("messages", "prompt", "chosen", "rejected", "completion", "label", "tools")
SCHEMA = pa.schema({"prefix": pa.uint64(), "check": pa.uint64(), "row": pa.uint32()})


def digests_file(split: str) -> str:
    return f"{split}-rows.arrow"


def row_digests(table: pa.Table) -> np.ndarray:
    """Return uint64[n, 2], the digests of a corpus table's rows."""
    rows = table.select([name for name in READ if name in table.column_names]).to_pylist()
    digests = b"".join(xxhash.xxh3_128_digest(orjson.dumps(row)) for row in rows)
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def write_digests(path: Path, digests: np.ndarray) -> None:
    """Write the digests of a split's rows, uint64[n, 2]."""
    order = np.argsort(digests[:, 0], kind="stable").astype(np.uint32)
    columns = (*digests[order].T, order)
    # One batch, so that columns are contiguous.
    write_table(path, pa.table([pa.array(one) for one in columns], schema=SCHEMA), max(1, len(order)))


class KeptTokens:
    """The tokens of rows in earlier results, in whichever split they were."""

    def __init__(self, results: list[Artifact]):
        self._results = [{split: _File(result, split) for split in SPLITS} for result in results]

    def find(self, digests: np.ndarray, split: str) -> list[Located]:
        """Return the tokens of those of the rows with these digests, uint64[n, 2], that are kept; `split` is searched first."""
        found: list[Located] = []
        missing = np.arange(len(digests))
        for files in list(self._results):
            for name in sorted(SPLITS, key=split.__ne__):
                if not len(missing):
                    return found
                try:
                    own = list(files[name].find(digests[missing]))
                except (SnaketuneError, pa.ArrowException, ValueError, LookupError) as error:
                    print(f"an earlier result isn't reused: {str(error).split(';')[0]}", flush=True)
                    self._results.remove(files)
                    break
                found += [(missing[at], tokens) for at, tokens in own]
                missing = np.delete(missing, [row for at, _ in own for row in at])
        return found


def in_order(table: pa.Table, parts: list[Located]) -> TokenBatch:
    """Return the tokens of all rows of a corpus table, given in parts, in the order of the table and with its ids."""
    tokens, at = TokenBatch.concatenated([own for _, own in parts]), np.concatenate([at for at, _ in parts])
    if len(parts) > 1 or (np.diff(at) < 0).any():
        tokens = tokens.take(np.argsort(at))
    index = tokens.index
    for name, column in (("id", names_of(table)), ("source", table["source"].combine_chunks())):
        number = index.schema.get_field_index(name)
        index = index.set_column(number, index.schema.field(number), column)
    return replace(tokens, index=index)


@dataclass(frozen=True)
class _File:
    """The tokens of one split in one result."""

    result: Artifact
    split: str

    @cached_property
    def _digests(self) -> list[np.ndarray]:
        table = read_table(self.result.file(digests_file(self.split)))
        if table.schema != SCHEMA:
            raise ValueError("the digests of its rows have other columns")
        return [column.combine_chunks().to_numpy() for column in table.columns]

    @cached_property
    def _batches(self) -> list[TokenBatch]:
        return TokenParts([self.result]).batches(self.split)

    @cached_property
    def _first(self) -> np.ndarray:
        return np.cumsum([0, *(len(batch) for batch in self._batches)])

    def find(self, digests: np.ndarray) -> Iterator[Located]:
        """Yield the tokens of those of the rows with these digests that are in this file, by record batch.

        Rows without tokens aren't: the template refused them.
        """
        prefixes, checks, rows = self._digests
        at = np.minimum(np.searchsorted(prefixes, digests[:, 0]), max(len(prefixes) - 1, 0))
        here = np.flatnonzero((prefixes[at] == digests[:, 0]) & (checks[at] == digests[:, 1])) if len(rows) else at[:0]
        found = rows[at[here]].astype(np.int64)
        batch_of = np.searchsorted(self._first, found, side="right") - 1 if len(found) else found
        for number in np.unique(batch_of).tolist():
            batch, own = self._batches[number], batch_of == number
            in_batch = found[own] - self._first[number]
            filled = batch.index["length"].to_numpy()[in_batch] > 0
            yield here[own][filled], batch.take(in_batch[filled])


def earlier_results(spec: TokenizeSpec, work: WorkFolder, tokenizer: Artifact) -> list[Artifact]:
    """Return the results whose tokens this part may reuse, those of the same share of a corpus first."""
    attempt = read_attempt(work.state)
    if attempt is None:
        return []
    found: list[tuple[float, Artifact]] = []
    for path in sorted(work.root.glob("tokenize/*/manifest.json")):
        # Damaged manifests count as none.
        with suppress(SnaketuneError, LookupError, TypeError, AttributeError):
            result = read_artifact(path, "payload")
            manifest = result.manifest
            same = (
                (manifest["code"], manifest["versions"]) == (attempt.code, attempt.versions)
                and manifest["inputs"]["tokenizer"] == [tokenizer.content]
                and _of_rows(manifest["spec"]) == _of_rows(spec.model_dump(mode="json"))
            )
            if same and digests_file("train") in manifest["records"]:
                distance = abs(manifest["spec"]["part"] / manifest["spec"]["parts"] - spec.part / spec.parts)
                found.append((distance, result))
    return [result for _, result in sorted(found, key=itemgetter(0))]


def _of_rows(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what affects the tokens of a row."""
    return {key: value for key, value in spec.items() if key not in ("part", "parts", "most_refused")}
