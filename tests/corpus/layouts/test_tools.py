"""A `tools` column: one spelling whatever it came as, part of what a row is, and never passed over in silence."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

WEATHER = {
    "name": "weather",
    "description": "Wetter für eine Stadt, z. B. „Köln“ ☂",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}


def wrapped(*functions: dict) -> list[dict]:
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize(
    "tools",
    [
        wrapped(WEATHER, NOW),
        [WEATHER, NOW],
        [{"type": "function", **WEATHER}, NOW],
        json.dumps(wrapped(WEATHER, NOW)),
        json.dumps([WEATHER, NOW], ensure_ascii=False),
        [json.dumps(WEATHER), json.dumps(NOW)],
        [dict(reversed(WEATHER.items())), NOW],
    ],
)
def test_tools_come_in_one_spelling(make, chat, tools):
    row = make([chat(tools=tools)]).train[0]
    assert row["tools"] == json.dumps(wrapped(WEATHER, NOW), ensure_ascii=False)


@pytest.mark.parametrize("tools", [None, "", " ", "[]", "null", []])
def test_no_tools_are_none_and_leave_the_row_as_it_was(make, chat, tools):
    (row,) = make([chat(tools=tools)]).train
    assert row == make([chat()]).train[0]
    assert row["tools"] is None


def test_rows_that_differ_in_tools_alone_are_no_duplicates_and_on_one_side_of_the_split(make, chat):
    rows = [chat(f"q{i}", "a", tools=tools) for i in range(40) for tools in (None, [NOW], [WEATHER], [NOW, WEATHER])]
    built = make(rows, held_out=0.3)
    assert built.counts["dropped"] == {"duplicate": 0}
    assert len({row["id"] for row in built.train + built.held_out}) == 160
    assert not set(built.prompts("train")) & set(built.prompts("held_out"))
    # The order of keys makes no other row, also deep inside.
    deep = WEATHER | {"parameters": dict(reversed(WEATHER["parameters"].items()))}
    assert make([chat(tools=[WEATHER]), chat(tools=[deep])]).counts["dropped"]["duplicate"] == 1


def test_tools_count_among_near_duplicates(make, chat):
    text = " ".join(f"word{i}" for i in range(30))
    tools = [[{"name": f"f{n}", "description": " ".join(f"w{n}x{i}" for i in range(40))}] for n in range(3)]
    built = make([chat(text, text, tools=own) for own in (*tools, tools[0])], near_duplicates={})
    assert built.counts["dropped"] == {"duplicate": 1}


@pytest.mark.parametrize(
    "tools",
    ["{not json", '[{"name": ', "hammer, nail", [{"description": "no name"}], [{"type": "retrieval"}], [5], 7, [[NOW]]],
)
def test_what_are_no_tools_is_quarantined(make, chat, tools):
    built = make([chat(tools=tools), chat("sound")], max_quarantined_fraction=1.0)
    (record,) = built.quarantine
    assert record["reason"] == "bad_tools"
    assert "tools" in record["detail"]
    assert len(built.train) == 1


def test_tools_of_a_table_lose_the_nulls_that_the_table_gave_them(make, chat, tmp_path):
    rows = [chat("a", tools=[WEATHER]), chat("b", tools=[NOW | {"strict": True}])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    built = make((tmp_path / "rows.parquet").read_bytes(), suffix=".parquet")
    assert [json.loads(row["tools"]) for row in built.train] == [wrapped(WEATHER), wrapped(NOW | {"strict": True})]


def test_tools_beside_pairs_and_by_fields(make):
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    (row,) = make([pair | {"tools": [NOW]}], kind="preferences").train
    assert json.loads(row["tools"]) == wrapped(NOW)
    mapped = {"q": "p", "a": "r", "functions": json.dumps([NOW])}
    fields = {"prompt": "q", "response": "a", "tools": "functions"}
    (row,) = make([mapped], source={"fields": fields}).train
    assert json.loads(row["tools"]) == wrapped(NOW)
    messages = {
        "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}],
        "functions": [NOW],
    }
    (row,) = make([messages], source={"fields": {"tools": "functions"}}).train
    assert json.loads(row["tools"]) == wrapped(NOW)
