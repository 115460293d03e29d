"""Columns that a recognised layout leaves stop the run if they may hold turns or mark rows, with the entry to paste."""

import json
import re
from datetime import datetime

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts import canonical, unstated
from snaketune.corpus.layouts.unstated import UnstatedColumns
from snaketune.corpus.rows import Malformed, RawRow, RowResult
from snaketune.errors import SnaketuneError
from tests.corpus.row_spelling import PREFERENCES, turns

ROWS = 60


def rows(**columns):
    """Rows of prompt and response; the value of another column is called with the row's number."""
    return [
        {"prompt": f"q{i}", "response": "r"} | {name: value(i) for name, value in columns.items()} for i in range(ROWS)
    ]


def stops(make, raws, **options):
    """The columns in question by path, as the message lists them; and the entry that it ends with."""
    with pytest.raises(SnaketuneError, match="recognised as") as error:
        make(raws, **options)
    text = str(error.value)
    listed = re.findall(r"^  (\S+): .* \((?:line|row|\d+ different texts)", text, re.MULTILINE)
    (entry,) = yaml.safe_load(text[text.index("\n- ") :])
    return listed, entry


@pytest.mark.parametrize("name", ["instruction", "instructions", "systemPrompt", "context", "meta.system_prompt"])
def test_texts_under_the_names_of_turns_stop_the_run_also_if_they_repeat(make, name):
    outer, _, inner = name.partition(".")
    raws = rows(**{outer: lambda i: {inner: "Answer in French."} if inner else "Answer in French."})
    raws = [{"messages": turns(f"U {row.pop('prompt')}", f"A {row.pop('response')}")} | row for row in raws]
    assert stops(make, raws)[0] == [name]


@pytest.mark.parametrize(
    "value",
    [
        lambda i: i,
        lambda i: i / 7,
        lambda i: i % 2 == 0,
        lambda i: f"row-{i}",
        lambda i: f"3f2a9c{i:010x}",
        lambda i: f"https://example.org/pages/{i}",
        lambda i: f"2026-11-{i % 28 + 1:02} 10:00:00",
        lambda i: ["coding", "small talk", "maths"][i % 3],
        lambda i: [0.1 * i, None, -1.0],
        lambda i: [[i, i + 1], [i]],
        lambda i: {"split": "train", "index": i, "inner": {"seconds": 0.5, "kind": "long context"}},
        lambda i: "" if i % 2 else None,
    ],
)
def test_what_cannot_be_a_turn_is_left_and_counted(make, value):
    (source,) = make(rows(extra=value)).counts["sources"]
    assert source["ignored"].get("extra", 0) in (ROWS, 0)


@pytest.mark.parametrize("spelled", [json.dumps, lambda metadata: metadata])
def test_tools_within_a_column_are_read_by_the_entry(make, spelled):
    """Nemotron's datasets have them there."""
    tools = [{"name": "bus", "description": "When a bus leaves.", "parameters": {"type": "object", "properties": {}}}]
    raws = [
        {"messages": turns(f"U q{i}", "A r"), "metadata": spelled({"tools": tools}), "comment": f"It took {i} minutes"}
        for i in range(ROWS)
    ]
    listed, entry = stops(make, raws)
    assert "comment" in listed and any(path.startswith("metadata") for path in listed)
    assert entry["layout"] == "messages" and entry["fields"] == {"tools": "metadata.tools"}
    assert entry["ignore"] == ["comment"]
    del entry["files"]
    (row, *_) = make(raws, source=entry).train
    assert "bus" in row["tools"]


def test_short_texts_in_columns_of_known_metadata_may_all_differ(make):
    built = make(rows(source=lambda i: f"Forum of town {i}", **{"meta.model": lambda i: f"Model {i} (large)"}))
    assert len(built.train) == ROWS


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (lambda i: f"A remark on row {i}, which may be another answer", ["extra"]),
        (lambda i: f"answer {i}", ["extra"]),  # as many short texts as rows are no category
        (lambda i: "line\nline", ["extra"]),
        (lambda i: ["coding", "maths"], ["extra"]),
        (lambda i: turns("U q", "A r"), ["extra"]),
        (
            lambda i: {"id": i, "comment": f"The whole story of row {i}, in more words than a category has"},
            ["extra.comment"],
        ),
        (lambda i: {"inner": {"turns": turns("U q")}}, ["extra.inner.turns"]),
        (lambda i: None if i < 50 else f"Only the last rows have this text, here {i}", ["extra"]),
    ],
)
def test_texts_and_lists_stop_the_run(make, value, paths):
    listed, entry = stops(make, rows(extra=value))
    assert listed == paths
    assert entry == {"files": ["data/0.jsonl"], "layout": "prompt-response", "ignore": paths}
    pasted = {"layout": entry["layout"], "ignore": entry["ignore"]}
    assert len(make(rows(extra=value), source=pasted).train) == ROWS
    # With or without the layout, and by the column that holds the path.
    assert len(make(rows(extra=value), source={"ignore": ["extra"]}).train) == ROWS
    assert len(make(rows(extra=value), source={"layout": "prompt-response"}).train) == ROWS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("is_correct", "Is_Safe", "toxic", "resolved") for value in (True, 1, "yes")),
        ("label", 3),  # true and false are labels of completions
        ("labels", {"quality": 0.5}),
    ],
)
def test_columns_that_mark_rows_stop_the_run_whatever_they_hold(make, name, value):
    raws = [{"instruction": f"q{i}", "output": "r", name: value} for i in range(3)]
    listed, entry = stops(make, raws)
    assert entry["ignore"] == listed and listed[0].startswith(name)
    with pytest.raises(SnaketuneError, match=f"`where: {listed[0]} == VALUE`"):
        make(raws)
    if not isinstance(value, dict):
        assert len(make(raws, source={"where": f"{name} == {str(value).lower()}"}).train) == 3


def test_all_columns_in_question_are_named_at_once_and_soon(make, monkeypatch):
    from snaketune.corpus import first_pass

    raws = [
        row | {"first": f"a remark {i} on this", "late": f"another {i} remark"} if i > 20 else row
        for i, row in enumerate(rows(first=lambda i: f"remark {i} on this", is_correct=lambda i: False))
    ]
    listed, _ = stops(make, raws)
    assert listed == ["is_correct", "first", "late"]
    monkeypatch.setattr(first_pass, "ROWS_BEFORE_STOP", 10)
    monkeypatch.setattr(canonical, "ROWS_COMPARED", 5)
    monkeypatch.setattr(first_pass, "progress", lambda raws, *_: counted(raws))
    read = []

    def counted(raws):
        for raw in raws:
            read.append(raw)
            yield raw

    assert stops(make, raws)[0] == ["is_correct"]
    assert len(read) == 10


def test_keys_that_are_ids_are_in_question_after_so_many(monkeypatch):
    monkeypatch.setattr(unstated, "PATHS", 20)
    columns = UnstatedColumns(Source(files=("x",)))
    for i in range(40):
        raw = RawRow("line", i, {"remarks": {f"key{i}": "short text"}})
        columns.add(RowResult(raw, "messages", Malformed("", ""), ("remarks",)))
    assert len(columns.in_question) == 20


def test_the_entry_of_many_files_names_none():
    columns = UnstatedColumns(Source(files=[f"f{i}" for i in range(11)], weight=2.0))
    columns.in_question["extra"] = "row 1", '"a"'
    text = columns.entry("messages")
    assert text.startswith("- # files: as they are\n  weight: 2.0\n")
    assert yaml.safe_load(text) == [{"weight": 2.0, "layout": "messages", "ignore": ["extra"]}]


def test_the_message_names_place_value_and_another_layout(make):
    raws = rows(chosen=lambda i: f"a better answer, number {i}")
    with pytest.raises(SnaketuneError) as error:
        make(raws)
    message = str(error.value)
    assert message.startswith("data/0.jsonl: rows were recognised as prompt-response")
    assert re.search(
        r'\n  chosen: "a better answer, number \d+" \((line 51|60 different texts in 60 rows)\)\n', message
    )
    raws = rows(instruction=lambda i: f"a better question, number {i}")
    with pytest.raises(SnaketuneError, match=r"Another layout is instances .*: `instances` is missing"):
        make(raws)


def test_pairs_documents_and_trees(make):
    pair = {
        "prompt": "q",
        "chosen": turns("U q", "A x"),
        "rejected": turns("U q", "A y"),
        "messages": turns("U q", "A x"),
    }
    listed, entry = stops(make, [pair], kind=PREFERENCES)
    assert listed == ["messages"] and entry["layout"] == "pairs"
    assert make([pair], kind=PREFERENCES, source={"ignore": ["messages"]}).train
    listed, entry = stops(make, [{"text": f"a b c {i}", "abstract": f"d e {i}"} for i in range(9)], kind="text")
    assert listed == ["abstract"] and entry["layout"] == "text"
    tree = [
        {"message_id": "1", "parent_id": None, "role": "prompter", "text": "q", "review": "a careful question"},
        {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "r", "review": "and its answer"},
    ]
    assert stops(make, tree)[0] == ["review"]


def test_keys_of_turns(make):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "r", "draft": "the answer before it"},
    ]
    listed, _ = stops(make, [{"messages": messages}])
    assert listed == ["messages[].draft"]
    assert make([{"messages": messages}], source={"ignore": ["messages[].draft"]}).train
    named = [turn | {"id": f"turn-{i}", "time": 1.5} for i, turn in enumerate(turns("U q", "A r"))]
    assert make([{"messages": named}]).train


def test_bytes_and_times_of_tables(make, tmp_path):
    table = pa.table({"prompt": ["q"], "response": ["r"], "at": [datetime(2026, 11, 1)], "blob": [b"abc"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    listed, _ = stops(make, (tmp_path / "a.parquet").read_bytes(), suffix=".parquet")
    assert listed == ["blob"]


def test_mapped_columns_order_and_stated_layouts_are_not_in_question(make):
    raws = [{"q": f"q{i}", "r": "r", "remark": f"some text {i}", "level": f"{i}"} for i in range(5)]
    assert len(make(raws, source={"fields": {"prompt": "q", "response": "r"}}).train) == 5
    assert len(make(rows(level=lambda i: str(i)), order_column="level").train) == ROWS


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=60) | st.binary(max_size=3)
VALUES = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(st.lists(VALUES, min_size=1, max_size=8))
@settings(deadline=None, max_examples=300)
def test_any_column_is_left_or_in_question_and_never_both_after_pasting(values):
    raws = [RawRow("line", i, {"extra": value}) for i, value in enumerate(values)]
    results = [RowResult(raw, "messages", Malformed("", ""), ("extra",)) for raw in raws]
    columns = UnstatedColumns(Source(files=("x",)))
    for result in results:
        columns.add(result)
    columns.finish()
    (entry,) = yaml.safe_load(columns.entry("messages"))
    pasted = UnstatedColumns(Source(files=("x",), ignore=entry["ignore"]))
    for result in results:
        pasted.add(result)
    pasted.finish()
    assert not pasted.in_question
