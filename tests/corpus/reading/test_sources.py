"""Files to raw rows: every format, under any name, and the effect of damage."""

import gzip
import json
import os
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError
from snaketune.tables import write_table

ROWS = [{"prompt": "Größe?", "response": "5\u2028m"}, {"prompt": "a\r\nb", "response": 'say "x", y'}, {"prompt": "3"}]
FULL = [{"prompt": row["prompt"], "response": row.get("response", "")} for row in ROWS]


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


PACK = {"": bytes, ".gz": zipped, ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True)}


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(path: Path) -> bytes:
    rows = pa.Table.from_pylist(FULL)
    pq.write_table(rows, path) if path.suffix == ".parquet" else write_table(path, rows)
    return path.read_bytes()


def stream() -> bytes:
    sink = pa.BufferOutputStream()
    rows = pa.Table.from_pylist(FULL)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def read(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    return [raw[:3] for raw in read_file(path, f"as/written/{name}")]


@pytest.mark.parametrize(
    "name, content, unit",
    [
        ("a.jsonl", lines(FULL), "line"),
        ("a.jsonl", lines(FULL).rstrip(b"\n"), "line"),
        ("bom.jsonl", b"\xef\xbb\xbf" + lines(FULL), "line"),
        ("crlf.jsonl", lines(FULL).replace(b"\n", b"\r\n"), "line"),
        ("really_lines.json", lines(FULL), "line"),
        ("a.json", json.dumps(FULL).encode(), "row"),
        ("pretty.json", b"\xef\xbb\xbf" + json.dumps(FULL, indent=2).encode(), "row"),
        ("wrapped.json", json.dumps({"canary": "", "examples": FULL}).encode(), "row"),
        ("wrapped_pretty.json", json.dumps({"examples": FULL, "n": None}, indent=1).encode(), "row"),
        ("really_an_array.jsonl", json.dumps(FULL).encode(), "row"),
        ("really_pretty.jsonl", json.dumps(FULL, indent=2).encode(), "row"),
        ("really_wrapped.jsonl", json.dumps({"rows": FULL}, indent=2).encode(), "row"),
        ("A.JSONL", lines(FULL), "line"),
        ("lines.txt", lines(FULL), "line"),
        ("lines.csv", lines(FULL), "line"),
        ("lines.parquet", lines(FULL), "line"),
        ("lines", lines(FULL), "line"),
        ("array.csv", json.dumps(FULL).encode(), "row"),
        ("pretty.txt", json.dumps(FULL, indent=2).encode(), "row"),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_json_in_every_form(tmp_path, name, content, unit, packed):
    rows = read(tmp_path, name + packed, PACK[packed](content))
    assert rows == [(unit, number, row) for number, row in enumerate(FULL, start=1)]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", ["plain.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_compression_is_detected_by_content(tmp_path, packed, name):
    assert read(tmp_path, name, PACK[packed](lines(FULL))) == read(tmp_path, "plain.jsonl", lines(FULL))


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a", "a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_csv_is_detected_by_content(tmp_path, name):
    content = b'prompt,response\n"Sum, please","{""a"": 1}"\n[x],y\n'
    rows = [{"prompt": "Sum, please", "response": '{"a": 1}'}, {"prompt": "[x]", "response": "y"}]
    assert [raw for _, _, raw in read(tmp_path, name, content)] == rows


@pytest.mark.parametrize("first", [b"[id],text", b"{id},text"])
def test_a_header_in_brackets_is_still_a_header(tmp_path, first):
    assert len(read(tmp_path, "a.csv", first + b"\n1,x\n2,y\n")) == 2


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.csv", "a"])
@pytest.mark.parametrize("made", ["x.parquet", "x.arrow"])
def test_tables_are_detected_by_content(tmp_path, name, made):
    assert [raw for _, _, raw in read(tmp_path, name, table(tmp_path / made))] == FULL


def test_a_folder_and_a_pipe_are_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(SnaketuneError, match=r"data/folder\.jsonl is a folder; name the files in it"):
        list(read_file(tmp_path / "folder.jsonl", "data/folder.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SnaketuneError, match=r"data/pipe\.jsonl is not a regular file"):
        list(read_file(tmp_path / "pipe.jsonl", "data/pipe.jsonl"))


@pytest.mark.parametrize("row", [{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "x", "tags": ["a"]}])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_single_row_is_no_wrapper(tmp_path, row, indent):
    assert [rows for _, _, rows in read(tmp_path, "one.json", json.dumps(row, indent=indent).encode())] == [row]


def test_one_line_of_jsonl_is_a_row_whatever_it_holds(tmp_path):
    row = {"prompt": "x", "kwargs": [{}]}
    assert read(tmp_path, "one.jsonl", lines([row])) == [("line", 1, row)]


def test_csv_with_cells_over_lines(tmp_path):
    content = '\ufeffprompt,response\r\n"one\r\ntwo","say ""x"""\r\n\r\nGröße,\r\n'.encode()
    expected = [
        ("line", 2, {"prompt": "one\r\ntwo", "response": 'say "x"'}),
        # The third physical line ends the first row; the fourth is blank.
        ("line", 5, {"prompt": "Größe", "response": ""}),
    ]
    assert read(tmp_path, "a.csv", content) == expected
    assert read(tmp_path, "a.csv.gz", zipped(content)) == expected


def test_bad_csv_rows_affect_only_themselves(tmp_path):
    content = b'prompt,response\nfine,row\ntoo,many,cells\nbad \xff,bytes\n"a"b,c\nlong,' + b"x" * 200_000 + b"\n"
    rows = {
        number: raw.reason if isinstance(raw, Malformed) else "ok"
        for _, number, raw in read(tmp_path, "a.csv", content)
    }
    assert rows == {2: "ok", 3: "wrong_number_of_cells", 4: "not_utf8", 5: "not_csv", 6: "ok"}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.parquet.gz", "a.arrow.gz"])
def test_tables(tmp_path, name):
    content = table(tmp_path / f"plain.{name.split('.')[1]}")
    rows = read(tmp_path, name, zipped(content) if name.endswith(".gz") else content)
    assert rows == [("row", number, row) for number, row in enumerate(FULL, start=1)]


def test_arrow_streams_as_datasets_writes_them(tmp_path):
    assert [row for _, _, row in read(tmp_path, "a.arrow", stream())] == FULL


def test_invalid_text_in_a_table_makes_its_row_malformed(tmp_path):
    raw = pa.array([b"fine", b"\xff\xfe", b"fine too"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    write_table(tmp_path / "made.arrow", pa.table({"prompt": texts}))
    rows = [raw for _, _, raw in read(tmp_path, "a.arrow", (tmp_path / "made.arrow").read_bytes())]
    assert rows[0] == {"prompt": "fine"} and rows[2] == {"prompt": "fine too"}
    assert rows[1].reason == "not_utf8"


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary()])
def test_bytes_in_a_table_that_are_utf8_are_text(make, tmp_path, type_):
    bytes_ = {"prompt": ["Größe?".encode(), b"q"], "response": [b"5 m", b"\xff"], "tags": [[b"x"], [b"\xff", None]]}
    types = {"prompt": type_, "response": type_, "tags": pa.list_(type_)}
    pq.write_table(pa.table(bytes_, pa.schema(list(types.items()))), tmp_path / "made.parquet")
    content = (tmp_path / "made.parquet").read_bytes()
    assert read(tmp_path, "a.parquet", content) == [
        ("row", 1, {"prompt": "Größe?", "response": "5 m", "tags": ["x"]}),
        ("row", 2, {"prompt": "q", "response": b"\xff", "tags": [b"\xff", None]}),
    ]
    built = make(content, suffix=".parquet", source={"ignore": ["tags"]}, max_quarantined_fraction=1.0)
    assert built.prompts() == ["Größe?"]
    assert "response holds bytes" in built.quarantine[0]["detail"]


def test_maps_in_a_table_are_objects(tmp_path):
    turns = pa.list_(pa.map_(pa.string(), pa.string()))
    twice = [[("role", "user"), ("role", "assistant")]]
    table_ = pa.table({"messages": pa.array([[[("role", "user"), ("content", "hi")]], None, twice], turns)})
    write_table(tmp_path / "made.arrow", table_)
    rows = [raw for _, _, raw in read(tmp_path, "a.arrow", (tmp_path / "made.arrow").read_bytes())]
    assert rows[:2] == [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": None}]
    assert rows[2].reason == "unreadable_value" and "'role'" in rows[2].detail


def test_invalid_text_in_a_map_makes_its_row_malformed(tmp_path):
    raw = pa.array([b"fine", b"\xff"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    made = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["x", "x"]), texts)
    write_table(tmp_path / "made.arrow", pa.table({"meta": made}))
    rows = [raw for _, _, raw in read(tmp_path, "a.arrow", (tmp_path / "made.arrow").read_bytes())]
    assert rows[0] == {"meta": {"x": "fine"}} and rows[1].reason == "not_utf8"


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"prompt": "cut', "not_json"),
        (b'{"prompt": Infinity}', "not_json"),
        (b"{'prompt': 1}", "python_repr"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b'{"prompt": "\xff"}', "not_utf8"),
        (b'["a", "b"]', "not_an_object"),
        (b'{"prompt": 1, "prompt": 2}', "duplicate_key"),
        (b'{"messages": [{"role": "user", "content": "x", "role" : "system"}]}', "duplicate_key"),
        (b'{"prompt": "a\0b"}', "not_json"),
        (b'{"prompt": "a\tb"}', "not_json"),
        (b"null", "not_an_object"),
        (b"12", "not_an_object"),
        (b'"' + b"x" * 1000 + b'"', "not_an_object"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_bad_lines_affect_only_themselves(tmp_path, line, reason, position, suffix):
    parts = [lines([row]) for row in FULL]
    parts.insert(position, line + b"\n\n")
    rows = read(tmp_path, f"a{suffix}", b"".join(parts))
    good = [raw for _, _, raw in rows if not isinstance(raw, Malformed)]
    (bad,) = [(number, raw) for _, number, raw in rows if isinstance(raw, Malformed)]
    assert good == FULL
    assert bad[0] == position + 1 and bad[1].reason == reason and 0 < len(bad[1].excerpt) <= 201


def test_elements_of_an_array_that_are_no_objects(tmp_path):
    rows = read(tmp_path, "a.json", b'[{"prompt": "x"}, 3, "y"]')
    assert [getattr(raw, "reason", raw) for _, _, raw in rows] == [{"prompt": "x"}, "not_an_object", "not_an_object"]


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.json", b'{"examples": []}', "holds no rows"),
        ("a.csv", b"", "holds no rows"),
        ("a.csv", b"prompt,response\n", "holds no rows"),
        ("a.parquet", b"", "holds no rows"),
        ("a.arrow", b"", "holds no rows"),
        ("a.jsonl.zst", b"", "holds no rows"),
        ("a.jsonl.gz", zipped(b""), "holds no rows"),
        ("a.parquet", b"PAR1", "can't be read"),
        ("a.parquet", b"\0" * 3 + b"PAR1", "can't be read"),
        ("a.arrow", b"ARROW1\0\0", "can't be read"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\0\0\0", "can't be read"),
        ("a.json", json.dumps(FULL).encode()[:-9], "isn't valid JSON"),
        ("a.json", json.dumps(FULL, indent=1).encode()[:-9], "isn't valid JSON"),
        ("a.json", b"Not found", "isn't valid JSON"),
        ("a.jsonl.gz", zipped(lines(FULL * 999))[:-200], "cut off"),
        ("a.json.gz", zipped(json.dumps(FULL).encode())[:-9], "cut off"),
        ("a.csv.gz", zipped(b"prompt\n" + b"x\n" * 9999)[:-9], "cut off"),
        ("a.csv", b'prompt,response\nfine,row\n"never closed,x\n1,2\n', "line 3 opens a quote"),
        ("a.csv", b"prompt,prompt\n1,2\n", "column 'prompt' twice"),
        ("a.csv", b'"prompt\n1,2\n', "header.*fix its quotes"),
        ("a.txt", b"x", r"none of the supported formats.*JSON lines.*Parquet.*\.zst"),
        ("a", b"Dear reader,\n\nhello, all,\n", "none of the supported formats"),
        ("a.md", b"# Title\n\nText.\n", "none of the supported formats"),
        ("a.txt.gz", zipped(b"x"), "none of the supported formats"),
        ("a.jsonl", '{"prompt": "x", "response": "y"}\n'.encode("utf-16"), "UTF-16.*iconv"),
        ("a.jsonl", '{"prompt": "x", "response": "y"}\n'.encode("utf-16-le"), "UTF-16.*iconv"),
        ("a.csv", "prompt,response\nx,y\n".encode("utf-16-be"), "UTF-16.*iconv"),
        ("a.jsonl", b"\0" * 999, "nothing but zero bytes.*fetch it again"),
        ("a.jsonl", b"PK\x03\x04rest", "zip archive"),
        ("a.jsonl.bz2", b"BZh91AY", "bzip2"),
        ("a.jsonl.xz", b"\xfd7zXZ\0\0", "xz"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.parquet", b"<!DOCTYPE html>\n<html>", "web page"),
    ],
    ids=count(),
)
def test_a_broken_file_fails_the_stage(tmp_path, name, content, says):
    with pytest.raises(SnaketuneError, match=says) as error:
        read(tmp_path, name, content)
    assert f"as/written/{name}" in str(error.value)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.99])
def test_a_truncated_table(tmp_path, suffix, share):
    content = table(tmp_path / f"whole{suffix}")
    with pytest.raises(SnaketuneError, match="fetch it again"):
        read(tmp_path, f"half{suffix}", content[: int(len(content) * share)])


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_a_truncated_compressed_file(tmp_path, packed, share):
    rows = [{"prompt": f"{i * i}?", "response": str(i)} for i in range(5000)]
    content = PACK[packed](lines(rows))
    with pytest.raises(SnaketuneError, match=r"half\.jsonl\S* can't be read.*cut off; fetch it again"):
        read(tmp_path, f"half.jsonl{packed}", content[: int(len(content) * share)])


def test_invalid_offsets_are_not_followed(tmp_path):
    offsets = pa.py_buffer(np.array([0, 5, 2**30, 8], np.int32).tobytes())
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdefgh")])
    write_table(tmp_path / "made.arrow", pa.table({"prompt": texts}))
    with pytest.raises(SnaketuneError, match=r"a\.arrow can't be read"):
        read(tmp_path, "a.arrow", (tmp_path / "made.arrow").read_bytes())


def test_an_invalid_text_does_not_hide_an_invalid_offset(tmp_path):
    """Two faults in one table: the harmless one must not hide the other."""
    offsets = pa.py_buffer(np.array([0, 6, 2, 8], np.int32).tobytes())
    texts = [
        pa.Array.from_buffers(pa.string(), 3, pa.array([b"\xff", b"fine", b"x"], pa.binary()).buffers()),
        pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdefgh")]),
    ]
    turns = pa.StructArray.from_arrays(texts, ["role", "content"])
    write_table(tmp_path / "made.arrow", pa.table({"turn": turns}))
    with pytest.raises(SnaketuneError, match=r"a\.arrow can't be read"):
        read(tmp_path, "a.arrow", (tmp_path / "made.arrow").read_bytes())


def test_a_column_whose_name_is_no_text(tmp_path):
    content = table(tmp_path / "made.arrow").replace(b"response", b"respon\xffe")
    with pytest.raises(SnaketuneError, match=r"a\.arrow can't be read"):
        read(tmp_path, "a.arrow", content)


def test_a_table_with_a_column_twice_names_the_file(tmp_path):
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    write_table(tmp_path / "made.arrow", twice)
    with pytest.raises(SnaketuneError, match=r"as/written/a\.arrow: the table has the column 'prompt' twice"):
        read(tmp_path, "a.arrow", (tmp_path / "made.arrow").read_bytes())


def test_a_duplicate_key_in_an_array_makes_its_row_malformed(tmp_path):
    content = b'[{"prompt": "x"},\n {"messages": [{"role": "user", "role": "x"}]},\n {"prompt": "y"}]'
    rows = [getattr(raw, "reason", raw) for _, _, raw in read(tmp_path, "a.json", content)]
    assert rows == [{"prompt": "x"}, "duplicate_key", {"prompt": "y"}]


def test_a_missing_file(tmp_path):
    with pytest.raises(SnaketuneError, match=r"data/gone\.jsonl doesn't exist"):
        list(read_file(tmp_path / "gone.jsonl", "data/gone.jsonl"))
