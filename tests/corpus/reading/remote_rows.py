"""Rows in every format, and what reading them from a URL gives."""

import gzip
import io
import json
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snaketune.corpus.reading.archives import ZSTD_MAGIC
from snaketune.corpus.reading.sources import read_file
from snaketune.errors import SnaketuneError
from snaketune.locations import located

ROWS = [{"prompt": f"question {number}", "response": f"answer {number} " * 5} for number in range(3)]


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict], **options) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


def zipped(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", lines(rows))
    return buffer.getvalue()


def tarred(rows: list[dict], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        entry = tarfile.TarInfo("a.jsonl")
        entry.size = len(content := lines(rows))
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def arrow(rows: list[dict]) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def zstd(rows: list[dict]) -> bytes:
    content = pa.compress(lines(rows), "zstd", asbytes=True)
    assert content.startswith(ZSTD_MAGIC)
    return content


FORMATS = {
    "a.jsonl": lines,
    "a.json": lambda rows: json.dumps(rows).encode(),
    "a.csv": lambda rows: ("prompt,response\n" + "".join(f"{r['prompt']},{r['response']}\n" for r in rows)).encode(),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "a.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "a.jsonl.zst": zstd,
    "a.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
    "a.zip": zipped,
    "a.tar": tarred,
    "a.tar.gz": lambda rows: tarred(rows, "w:gz"),
}


def rows_at(url: str) -> list:
    return [raw.value for raw in read_file(located(url), url)]


def error_of(url: str) -> str:
    with pytest.raises(SnaketuneError) as caught:
        rows_at(url)
    return str(caught.value)
