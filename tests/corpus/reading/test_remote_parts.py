"""Ranges of remote files: the same rows as of the whole file, fetched once, and not where a server sends whole files only."""

import pytest

from snaketune.corpus.reading.formats import DEFAULT_KEYS
from snaketune.corpus.reading.ranges import Range, read_range
from snaketune.corpus.reading.sources import read_file
from snaketune.locations import located

from .remote_rows import lines, parquet
from .stores import forget_stores

ROWS = [{"question": f"what is {number}? {'x' * 500}", "answer": str(number)} for number in range(12_000)]
PIECES = 4


@pytest.fixture(autouse=True)
def nothing_is_known():
    forget_stores()


def _numbered(url: str) -> list[tuple[int, str]]:
    """Each row's number in the file, and what it holds, of all ranges in order."""
    read, lines = [], 0
    for piece in range(1, PIECES + 1):
        part = Range(piece, piece, PIECES)
        rows = read_range(located(url), url, part, rows_compared=200, plain=False, keys=DEFAULT_KEYS)
        assert [raw.value for raw in rows.head] == ROWS[:200]
        read += [(lines + raw.number, raw.value["answer"]) for raw in rows.rows]
        lines += rows.span.count if rows.span else 0
    return read


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_ranges_of_an_object_are_its_rows(store, name):
    content = lines(ROWS) if name.endswith("jsonl") else parquet(ROWS, row_group_size=500)
    store.write(name, content)
    url = f"{store.url}{name}"
    assert _numbered(url) == [(raw.number, raw.value["answer"]) for raw in read_file(located(url), url)]


def test_a_server_that_sends_whole_files_has_no_ranges(web):
    web.files["/rows.jsonl"] = lines(ROWS)
    url = f"{web.url}/rows.jsonl"
    assert len(_numbered(url)) == len(ROWS)
    forget_stores()
    web.sends_parts = False
    assert read_range(located(url), url, Range(1, 1, 2), rows_compared=9, plain=False, keys=DEFAULT_KEYS) is None
