"""The `tools` column: one canonical form for every format, part of a row's id, and never ignored silently."""

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
def test_tools_have_one_canonical_form(make, chat, tools):
    row = make([chat(tools=tools)]).train[0]
    assert row["tools"] == json.dumps(wrapped(WEATHER, NOW), ensure_ascii=False)


@pytest.mark.parametrize("tools", [None, "", " ", "[]", "null", []])
def test_empty_tools_do_not_change_the_row(make, chat, tools):
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
    built = make([chat(text, text, tools=one) for one in (*tools, tools[0])], near_duplicates={})
    assert built.counts["dropped"] == {"duplicate": 1}


@pytest.mark.parametrize(
    "tools",
    ["{not json", '[{"name": ', "hammer, nail", [{"description": "no name"}], [{"type": "retrieval"}], [5], 7, [[NOW]]],
)
def test_invalid_tools_are_quarantined(make, chat, tools):
    built = make([chat(tools=tools), chat("sound")], max_quarantined_fraction=1.0)
    (record,) = built.quarantine
    assert record["reason"] == "bad_tools"
    assert "tools" in record["detail"]
    assert len(built.train) == 1


def test_tools_of_a_table_lose_its_nulls(make, chat, tmp_path):
    rows = [chat("a", tools=[WEATHER]), chat("b", tools=[NOW | {"strict": True}])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    built = make((tmp_path / "rows.parquet").read_bytes(), suffix=".parquet")
    assert [json.loads(row["tools"]) for row in built.train] == [wrapped(WEATHER), wrapped(NOW | {"strict": True})]


def test_tools_of_pairs_and_by_fields(make):
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


def test_other_names_of_tools_and_parameters_are_read(make, chat):
    as_parameters = {key: value for key, value in WEATHER.items() if key != "parameters"}
    expected = json.dumps(wrapped(WEATHER), ensure_ascii=False)
    for key in ("input_schema", "inputSchema"):
        assert make([chat(tools=[as_parameters | {key: WEATHER["parameters"]}])]).train[0]["tools"] == expected
    for functions in ([WEATHER], json.dumps([WEATHER]), wrapped(WEATHER)):
        assert make([chat() | {"functions": functions}]).train[0]["tools"] == expected
    for code in (["def f(): pass"], [{"name": "f", "code": "def f(): pass"}]):
        (row,) = make([chat() | {"functions": code}], source={"ignore": ["functions"]}).train
        assert row["tools"] is None
    assert make([chat() | {"functions": [WEATHER]}]).train[0]["tools"] == expected
    assert make([chat() | {"tools": [{"functionDeclarations": [WEATHER]}]}]).train[0]["tools"] == expected


def test_tools_that_the_system_turn_offers_are_offered_once(make, chat):
    system = {"role": "system", "content": f"Call one of <tools>{json.dumps([WEATHER, NOW])}</tools>."}
    messages = [system, *chat()["messages"]]
    named = {"role": "system", "content": "You have tools called 'weather' and 'now'."}
    assert make([{"messages": [named, *chat()["messages"]], "tools": [WEATHER, NOW]}]).train[0]["tools"] is not None
    rows = [{"messages": messages, "tools": tools} for tools in ([WEATHER, NOW], [WEATHER, NOW | {"name": "then"}])]
    built = make(rows)
    assert [row["tools"] is None for row in built.train] == [True, False]
    assert built.counts["notes"]["tools_in_system_turn"] == 1


def call_turn(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls
    ]}  # fmt: skip


def result(id, content):
    return {"role": "tool", "tool_call_id": id, "content": content}


def test_results_of_parallel_calls_follow_the_order_of_the_calls(make):
    turns = [
        {"role": "user", "content": "q"},
        call_turn(("a", "f", {"x": 1}), ("b", "g", {"y": 2})),
        result("b", "two"),
        result("a", "one"),
        {"role": "assistant", "content": "r"},
    ]
    (row,) = make([{"messages": turns}]).train
    assert [turn["content"] for turn in row["messages"][2:]] == ["one", "two", "r"]
    assert make([{"messages": turns}]).counts["sources"][0]["ignored"] == {}
    wrong = make(
        [{"messages": [*turns[:2], result("c", "two"), *turns[3:]]}, {"messages": turns}], max_quarantined_fraction=1.0
    )
    (record,) = wrong.quarantine
    assert record["reason"] == "unknown_tool_call"
    assert "turn 3: tool_call_id 'c' matches none of the calls before it (a, b)" in record["detail"]


@pytest.mark.parametrize("write", ["parquet", "arrow"])
def test_arguments_have_no_nulls_for_absent_keys(make, tmp_path, write):
    messages = [
        [{"role": "user", "content": "q", "tool_calls": None}, call_turn((str(i), name, arguments)) | {"content": None}]
        for i, (name, arguments) in enumerate([("f", {"a": "1"}), ("g", {"b": {"c": "0"}}), ("h", {})])
    ]
    table = pa.Table.from_pylist([{"messages": turns} for turns in messages])
    path = tmp_path / f"rows.{write}"
    if write == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    built = make(path.read_bytes(), suffix=f".{write}")
    calls = [json.loads(row["messages"][1]["content"].splitlines()[1]) for row in built.train]
    assert [call["arguments"] for call in calls] == [{"a": "1"}, {"b": {"c": "0"}}, {}]
    # In JSON lines, a null is explicit.
    (row,) = make([{"messages": [messages[0][0], call_turn(("1", "f", {"a": None}))]}]).train
    assert '"arguments": {"a": null}' in row["messages"][1]["content"]
