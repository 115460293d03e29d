"""JSON that is neither plain lines nor an array: NaN, lists of messages, splits in one object, consecutive objects."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snaketune.corpus.reading.json_text import BLOCK
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

ROW = {"prompt": "a", "response": "b"}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_file(path, f"data/{name}"))


def read_rows(tmp_path, name, content):
    return [getattr(raw.value, "reason", raw.value) for raw in read(tmp_path, name, content)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json", "pretty.json"])
def test_nan_is_null_and_noted(make, name):
    rows = [ROW | {"score": float("nan"), "n": {"x": [1.5, float("nan")]}, "i": i} for i in range(3)] + [ROW | {"i": 9}]
    spelled = {
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "array.json": json.dumps(rows),
        "pretty.json": json.dumps(rows, indent=1),
    }
    content = spelled.get(name, spelled["a.jsonl"]).encode()
    built = make(content, suffix="." + name.rpartition(".")[2])
    assert built.counts["kept"]["train"] == 1 and built.counts["quarantined"]["total"] == 0
    distinct = [row | {"prompt": f"a{i}"} for i, row in enumerate(rows)]
    built = make("".join(json.dumps(row) + "\n" for row in distinct).encode())
    assert built.counts["kept"]["train"] == 4 and built.counts["notes"]["nan_as_null"] == 3


def test_what_a_row_with_nan_holds(tmp_path):
    (raw,) = read(tmp_path, "a.jsonl", b'{"a": NaN, "b": [1.5, NaN, {"c": NaN}], "d": "NaN", "e": 1.0}\n')
    assert raw.value == {"a": None, "b": [1.5, None, {"c": None}], "d": "NaN", "e": 1.0}
    assert raw.notes == ("nan_as_null",)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity"])
def test_infinity_is_refused(tmp_path, number):
    assert read_rows(tmp_path, "a.jsonl", b'{"a": %s}\n{"a": 1}\n' % number.encode()) == ["not_json", {"a": 1}]


def test_nan_and_a_key_twice(tmp_path):
    assert read_rows(tmp_path, "a.jsonl", b'{"a": NaN, "a": 1}\n{"a": 1}\n') == ["duplicate_key", {"a": 1}]
    # JSON lines by its first line, so that another malformed line is a row, too.
    lines = b'{"a": 1, "a": 2}\n{"a": 1}\n{"a": \n{"a": 2}\n'
    assert read_rows(tmp_path, "a.json", lines) == ["duplicate_key", {"a": 1}, "not_json", {"a": 2}]
    document = b'{"a": {"b": 1, "b": 2},\n"c": 1}\n{"d": 1}\n'
    assert read_rows(tmp_path, "a.json", document) == ["duplicate_key", {"d": 1}]
    assert read_rows(tmp_path, "a.json", b'[{"a": NaN}, {"b": 1, "b": 2}, {"c": 1}]') == [
        {"a": None}, "duplicate_key", {"c": 1}
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("type_", [pa.float64(), pa.float32(), pa.float16()])
def test_nan_in_tables(tmp_path, suffix, type_):
    import numpy as np

    scores = pa.array(np.array([0.5, np.nan, 1.5], np.dtype(type_.to_pandas_dtype())), type_)
    nested = pa.array([[{"x": 1.0}], [{"x": 2.0}, {"x": float("nan")}], None])
    table = pa.table({"prompt": ["a", "b", "c"], "score": scores, "n": nested})
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "made")
    else:
        with pa.OSFile(str(tmp_path / "made"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    first, second, third = read(tmp_path, f"a.{suffix}", (tmp_path / "made").read_bytes())
    assert first.value == {"prompt": "a", "score": 0.5, "n": [{"x": 1.0}]} and first.notes == ()
    assert second.value == {"prompt": "b", "score": None, "n": [{"x": 2.0}, {}]}
    assert second.notes == ("nan_as_null",)
    assert third.value == {"prompt": "c", "score": 1.5, "n": None} and third.notes == ()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_messages_is_a_row(tmp_path, name, count):
    lines = (json.dumps(TURNS) + "\n") * count
    content = (json.dumps([TURNS] * count) if name == "array.json" else lines).encode()
    assert read_rows(tmp_path, name, content) == [{"messages": TURNS}] * count


@pytest.mark.parametrize("indent", [None, 1])
def test_messages_of_several_conversations_are_rows(tmp_path, indent):
    rows = [turn | {"conversation_id": number} for number in range(2) for turn in TURNS]
    assert read_rows(tmp_path, "a.json", json.dumps(rows, indent=indent).encode()) == rows
    one = [turn | {"conversation_id": 7} for turn in TURNS]
    counted = [turn | {"session": number} for number, turn in enumerate(TURNS)]
    for messages in (one, counted):
        assert read_rows(tmp_path, "a.jsonl", json.dumps(messages).encode()) == [{"messages": messages}]
    # Each line is a conversation, whatever its messages hold.
    lines = json.dumps(rows) + "\n" + json.dumps(rows)
    assert read_rows(tmp_path, "a.jsonl", lines.encode()) == [{"messages": rows}] * 2


def test_lists_of_messages_in_the_spelling_of_sharegpt(make):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    built = make([turns])
    assert built.train[0]["messages"][1]["content"] == "Hello"


@pytest.mark.parametrize(
    "value", [[], [3], [TURNS[0], 3], [{"a": 1}], [{"message_id": 1, "parent_id": None, "role": "user", "text": "x"}]]
)
def test_other_lists_are_not_rows(tmp_path, value):
    content = (json.dumps(value) + "\n").encode() * 2
    assert read_rows(tmp_path, "a.jsonl", content) == ["not_an_object"] * 2


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("rows", [2, 2000])
@pytest.mark.parametrize("order", [("train", "test", "validation"), ("test", "train", "validation")])
def test_of_an_object_of_splits_train_is_read(tmp_path, capsys, indent, rows, order):
    # More than a block, if there are many.
    train = [ROW | {"n": i, "text": "x" * rows} for i in range(rows)]
    splits = {"train": train, "test": [ROW], "validation": [ROW, ROW]}
    document = {"version": 1} | {name: splits[name] for name in order}
    found = read_rows(tmp_path, "a.json", json.dumps(document, indent=indent).encode())
    assert found == [row | {"version": 1} for row in splits["train"]]
    others = ", ".join(f"{name} ({len(splits[name])} rows)" for name in order if name != "train")
    assert f"data/a.json: of its splits, train is read; not read: {others}" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["data", "rows", "test"])
def test_an_object_with_one_list_is_that_list(tmp_path, key):
    assert read_rows(tmp_path, "a.json", json.dumps({key: [ROW, ROW]}).encode()) == [ROW, ROW]


@pytest.mark.parametrize("train", [[1, 2], []])
def test_a_row_with_a_column_train_is_a_row(tmp_path, train):
    row = {"prompt": "x", "train": train, "messages": []}
    assert read_rows(tmp_path, "a.json", json.dumps(row).encode()) == [row]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
@pytest.mark.parametrize("joined", ["\n", "", "\n\n", " "])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("rows", [2, 2000])
def test_objects_one_after_another(tmp_path, name, joined, indent, rows):
    # More than a block, if there are many.
    objects = [{"prompt": f'}}{{ "{i}\\' * (rows // 20 or 1), "response": {"n": [i]}} for i in range(rows)]
    content = joined.join(json.dumps(row, indent=indent) for row in objects).encode()
    assert (len(content) > BLOCK) == (rows > 2)
    assert read_rows(tmp_path, name, content) == objects


def test_objects_on_one_line_among_others(tmp_path):
    content = b'{"a": 1}\n{"a": 2} {"a": 3}\n{"a": 4}{"a": \n{"a": 5}\n'
    raws = [(raw.number, getattr(raw.value, "reason", raw.value)) for raw in read(tmp_path, "a.jsonl", content)]
    assert raws == [(1, {"a": 1}), (2, {"a": 2}), (2, {"a": 3}), (3, "not_json"), (4, {"a": 5})]


def test_damage_among_objects_one_after_another(tmp_path):
    content = b'{\n"a": 1}\n{\n"a": 2,}\n{\n"a": 3}\n'
    with pytest.raises(SnaketuneError, match=r"data/a\.json isn't valid JSON: row 2: "):
        read(tmp_path, "a.json", content)
    with pytest.raises(SnaketuneError, match=r"isn't valid JSON: .*cut off; fetch it again"):
        read(tmp_path, "a.json", content[:-4])


def test_a_key_twice_and_nan_among_objects_one_after_another(tmp_path):
    content = b'{\n"a": 1}\n{\n"a": 2, "a": 3}\n{\n"a": NaN}\n'
    raws = read(tmp_path, "a.json", content)
    assert [getattr(raw.value, "reason", raw.value) for raw in raws] == [{"a": 1}, "duplicate_key", {"a": None}]
    assert raws[2].notes == ("nan_as_null",) and isinstance(raws[1].value, Malformed)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("count", [2, 2000])
def test_what_an_object_holds_around_its_rows_belongs_to_each(make, indent, count):
    # More than a block, if there are many.
    questions = [{"question": f"q{i}", "answer": "r" * count} for i in range(count)]
    document = {"title": "Harbour", "context": "It has nine cranes.", "system": "Be brief.", "n": None, "qa": questions}
    content = json.dumps(document, indent=indent).encode()
    assert (len(content) > BLOCK) == (count > 2)
    built = make(content, suffix=".json")
    assert len(built.train) == count and built.counts["sources"][0]["ignored"] == {"title": count}
    assert [turn["content"] for turn in built.train[0]["messages"]] == [
        "Be brief.", "q0\n\nIt has nine cranes.", "r" * count
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 2000])
def test_a_column_of_the_rows_and_around_them(tmp_path, make, count):
    rows = [ROW | {"system": "Be brief.", "text": "x" * count, "score": float("nan")} for _ in range(count)]
    content = json.dumps({"system": "Be kind to all.", "data": rows}).encode()
    (first, *_) = read(tmp_path, "a.json", content)
    assert first.value == {"system (around the rows)": "Be kind to all."} | rows[0] | {"score": None}
    assert first.notes == ("nan_as_null",)
    named = json.dumps({"remark": "Be kind to all.", "data": [ROW]}).encode()
    with pytest.raises(SnaketuneError, match=r'\n  remark: "Be kind to all\."'):
        make(named, suffix=".json")
    assert make(named, suffix=".json", source={"ignore": ["remark"]}).train


@pytest.mark.parametrize("count", [2, 2000])
def test_what_follows_the_rows_belongs_to_each(tmp_path, count):
    rows = [ROW | {"n": i, "text": "x" * 1000} for i in range(count)]
    content = json.dumps({"data": rows, "version": "1.0", "system": "Be brief."}).encode()
    assert read_rows(tmp_path, "a.json", content) == [{"version": "1.0", "system": "Be brief."} | row for row in rows]


REPR = b"{'prompt': 'a', 'response': 'b'}\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv"])
@pytest.mark.parametrize("content", [REPR * 3, REPR, b"[" + REPR.rstrip() + b",\n" + REPR + b"]"])
def test_rows_as_python_prints_them_are_named(make, name, content):
    with pytest.raises(
        SnaketuneError, match=r"single quotes, as Python prints them; write the row with json\.dumps"
    ) as error:
        make(content, suffix=name[1:])
    assert "fetch it again" not in str(error.value)
