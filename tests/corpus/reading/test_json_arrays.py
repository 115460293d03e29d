"""Arrays in JSON files, read block by block: the same rows as from parsing the whole file, in little memory."""

import io
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.reading import json_documents, json_files, json_text
from snaketune.corpus.reading.json_files import read_json
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

TEXTS = st.text(max_size=5) | st.sampled_from(['"', "\\", '\\"', "[", "]}", "},{", ",", '\\\\"', "ä{"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3) | VALUES, min_size=1, max_size=8)
MARK = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(json_text, "BLOCK", 16)
    monkeypatch.setattr(json_files, "MAX_HEAD", 16)


def read(content: bytes, name: str = "a.json"):
    return list(read_json(lambda: io.BytesIO(content), name))


def read_rows(content: bytes, name: str = "a.json"):
    return [getattr(raw.value, "reason", raw.value) for raw in read(content, name)]


@given(ROWS, st.none() | st.integers(0, 2), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_the_elements_are_those_of_the_whole_file(rows, indent, ascii_only, mark):
    try:
        content = MARK * mark + json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert read_rows(content) == [row if isinstance(row, dict) else "not_an_object" for row in rows]
    assert [(raw.unit, raw.number) for raw in read(content)] == [("row", n) for n in range(1, len(rows) + 1)]


@given(st.lists(st.fixed_dictionaries({"a": VALUES}), min_size=1, max_size=5), st.none() | st.integers(0, 2))
@settings(deadline=None, max_examples=100)
def test_the_elements_of_a_wrapped_array(rows, indent):
    around = {"canary": "[{", "n": {"m": [1]}}
    document = around | {"examples": rows, "end": None}
    try:
        assert read_rows(json.dumps(document, indent=indent).encode()) == [around | row for row in rows]
    except UnicodeEncodeError:
        return


@pytest.mark.parametrize("tail", [b"", b"\n", b" " * 50, b"\n" * 50])
def test_space_around(tail):
    rows = [{"a": "x" * 30}, {"a": 2}]
    assert read_rows(b" \n" + json.dumps(rows).encode() + tail) == rows


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_long_lines_of_objects_are_rows(name):
    rows = [{"examples": [{"a": "x" * 40}]}, {"examples": [{"a": "y"}]}]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    unit = "line" if name == "a.jsonl" else "row"
    assert [raw[:3] for raw in read(content, name)] == [(unit, 1, rows[0]), (unit, 2, rows[1])]


@pytest.mark.parametrize(
    "row", [{"messages": [{"role": "user", "content": "x" * 40}]}, {"a": "x" * 40, "tags": ["y"]}, {"a": {"b": [1]}}]
)
def test_an_object_that_wraps_no_rows_is_a_row(row):
    assert read_rows(json.dumps(row).encode()) == [row]


def test_a_duplicate_key_makes_its_row_malformed():
    content = b'[{"prompt": "x"},\n {"a": "long enough for a block", "a": 1},\n {"b": [{"c": 1, "c": 2}]}, {}]'
    assert read_rows(content) == [{"prompt": "x"}, "duplicate_key", "duplicate_key", {}]


ROW = b'{"prompt": "a text", "n": 1}'
LATIN = '{"prompt": "ä text"}'.encode("latin-1")


@pytest.mark.parametrize(
    "content, says",
    [
        (b"[" + ROW + b", " + ROW, "ends within row 2"),
        (b"[" + ROW + b", " + ROW[:-9], "ends within row 2"),
        (b"[" + ROW + b", ", "ends within row 2"),
        (b"[" + ROW + b",]", "row 2: "),
        (b"[" + ROW + b",," + ROW + b"]", "row 2: "),
        (b"[," + ROW + b"]", "row 1: "),
        (b"[" + ROW + b" " + ROW + b"]", "row 1: Expecting ',' delimiter: line 1 column 31"),
        (b"[" + ROW + b"," + ROW + b"}", "row 2: Expecting ',' delimiter"),
        (b"[" + ROW + b"," + ROW + b"] " + b" " * 40 + b"x", "after the end of the array"),
        (b"[" + ROW + b"," + ROW + b"][]", "after the end of the array"),
        (b"[" + ROW + b', {"prompt": Infinity}, ' + ROW + b"]", "row 2: Infinity isn't valid JSON"),
        (b"[" + ROW + b', {"a": [1}, ' + ROW + b"]", "row 2"),
        (b"[" + ROW + b', {"a": "x}, ' + ROW + b"]", "row 2"),
        (b'{"rows": [' + ROW + b"," + ROW + b"]", "Expecting"),
        (b'{"rows": [' + ROW + b"," + ROW + b"]}}", "after the object around the rows"),
        (b'{"rows": [' + ROW + b"," + ROW, "ends within row 2"),
        (b'{"rows": [' + ROW + b'], "rows": 3}', "has the key 'rows' twice"),
    ],
)
def test_damage_fails_the_file_with_its_location(content, says):
    with pytest.raises(SnaketuneError, match=rf"a\.json isn't valid JSON: .*{says}.*cut off; fetch it again"):
        read(content)


def test_bytes_that_are_not_utf8_are_not_reported_as_truncation():
    with pytest.raises(SnaketuneError, match=r"a\.json isn't valid JSON: byte 72 isn't UTF-8") as error:
        read(b"[" + ROW + b"," + ROW + b"," + LATIN + b"]")
    assert "cut off" not in str(error.value)


def test_an_object_with_two_arrays_of_rows(capsys):
    many = b",".join([ROW] * (json_documents.BLOCK // len(ROW)))
    with pytest.raises(SnaketuneError, match=r"a\.json holds several arrays \(first, second\); write each"):
        read(b'{"first": [' + many + b'], "second": [' + ROW + b"]}")
    assert read_rows(b'{"train": [' + ROW + b'], "test": [' + ROW + b"]}") == [json.loads(ROW)]
    assert "a.json: of its splits, train is read; not read: test (1 rows)" in capsys.readouterr().out


class Counted(io.BytesIO):
    """A file that knows how much of it was read."""

    length = 0

    def read(self, size=-1):
        data = super().read(size)
        self.length += len(data)
        return data


@pytest.mark.parametrize("around", [b"[%s]", b'{"canary": "x", "examples": [%s]}'])
def test_a_row_at_a_time_is_in_memory(monkeypatch, around):
    monkeypatch.undo()
    row = json.dumps({"messages": [{"role": "user", "content": 'say "a, b"\n' * 30}] * 4}).encode()
    rows = 14_000
    content = around % b",".join([row] * rows)
    opened = []

    def opener():
        opened.append(Counted(content))
        return opened[-1]

    tracemalloc.start()
    try:
        made = read_json(opener, "a.json")
        assert next(made).number == 1
        # An object is read twice, the first time to its end.
        before = len(content) if around.startswith(b"{") else 0
        assert sum(file.length for file in opened) <= before + 2 * json_text.BLOCK < before + len(content) / 8
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert sum(not isinstance(raw.value, Malformed) for raw in made) == rows - 1
        assert tracemalloc.get_traced_memory()[1] - before < 10 * json_text.BLOCK < len(content) / 1.5
    finally:
        tracemalloc.stop()
