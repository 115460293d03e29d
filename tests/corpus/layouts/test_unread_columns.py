"""Columns and keys that aren't read are reported with their number of rows: in the result, the counts and the log."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, compact, read_all, turns

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def ignored(raws, kind=CONVERSATIONS, **options):
    """What is ignored of each row."""
    return [made.ignored for made in read_all(raws if isinstance(raws, list) else [raws], kind, **options)]


@pytest.mark.parametrize(
    "raw, kind, names",
    [
        ({"messages": turns("U q", "A r")}, CONVERSATIONS, ()),
        ({"messages": turns("U q", "A r"), "system": "s", "answer": "7", "task": "t"}, CONVERSATIONS, ()),
        (
            {"messages": turns("U q", "A r"), "urls": ["x.png"], "functions": ["def f(): ..."], "weight": 0},
            CONVERSATIONS,
            ("urls", "functions", "weight"),
        ),
        # These are empty.
        ({"messages": turns("U q", "A r"), "images": [], "note": "", "meta": {}, "id": None}, CONVERSATIONS, ()),
        ({"context": "c", "question": "q", "answer": "r", "title": "t"}, CONVERSATIONS, ("title",)),
        ({"instruction": "q", "context": "c", "response": "r", "category": "qa"}, CONVERSATIONS, ("category",)),
        ({"instruction": "q", "input": "i", "context": "c", "output": "r"}, CONVERSATIONS, ()),
        ({"prompt": "q", "response": "r", "reasoning": "off", "context": 3}, CONVERSATIONS, ("reasoning", "context")),
        ({"prompt": "q", "response": "r", "completion": "other"}, CONVERSATIONS, ("completion",)),
        ({"prompt": "q", "completion": "r", "label": "spam"}, CONVERSATIONS, ("label",)),
        ({"system": "s", "system_prompt": "t", "prompt": "q", "response": "r"}, CONVERSATIONS, ("system_prompt",)),
        ({"prompt": "q", "response": "r", "helpfulness": 0, "safe": False}, CONVERSATIONS, ("helpfulness", "safe")),
        ({"text": "Human: q\n\nAssistant: r", "score": 1}, CONVERSATIONS, ("score",)),
        (
            {"instruction": "q", "name": "n", "instances": [{"input": "", "output": "r", "weight": 2}]},
            CONVERSATIONS,
            ("name", "instances[].weight"),
        ),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "margin": 2.5}, PREFERENCES, ("margin",)),
        (
            {
                "prompt": "q",
                "messages": turns("U q", "A x"),
                "chosen": turns("U q", "A x"),
                "rejected": turns("U q", "A y"),
            },
            PREFERENCES,
            ("messages",),
        ),
        (
            {"prompt": "q", "response1": "x", "response2": "y", "annotator1": 1, "annotator2": 1, "reason": "r"},
            PREFERENCES,
            ("reason",),
        ),
        (
            {"question": "q", "response_1": "x", "response_2": "y", "preference_strength": 1, "label": "A"},
            PREFERENCES,
            ("preference_strength",),
        ),
        (
            {
                "message_id": "1",
                "role": "prompter",
                "text": "q",
                "lang": "en",
                "replies": [{"message_id": "2", "role": "assistant", "text": "r", "emojis": {"+1": 2}, "replies": []}],
            },
            CONVERSATIONS,
            ("lang", "replies[].emojis"),
        ),
    ],
)
def test_columns(raw, kind, names):
    assert ignored(raw, kind) == [names]


@pytest.mark.parametrize(
    "turn, names",
    [
        ({"content": "r"}, ()),
        ({"content": "r", "name": None, "tool_calls": [], "thinking": ""}, ()),
        ({"content": "r", "thought": "t", "train": False}, ("messages[].thought",)),
        ({"content": "r", "text": "other"}, ("messages[].text",)),
        ({"content": "r", "value": None, "reasoning": "t", "thinking": "u"}, ("messages[].thinking",)),
        ({"content": None, "tool_calls": [CALL]}, ()),
        ({"content": "", "tool_calls": [CALL | {"result": "5"}]}, ("messages[].tool_calls[].result",)),
        ({"content": [{"type": "text", "text": "r"}]}, ()),
        ({"content": [{"type": "text", "text": "r", "image_url": None}]}, ()),
        ({"content": [{"type": "text", "text": "r", "citations": [1]}]}, ("messages[].content[].citations",)),
    ],
)
def test_keys_of_turns(turn, names):
    raw = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant"} | turn]}
    assert ignored(raw) == [names]


def test_keys_of_one_message():
    raw = {"prompt": "q", "chosen": {"role": "assistant", "content": "x", "logprob": -1.5}, "rejected": "y"}
    assert ignored(raw, PREFERENCES) == [("chosen.logprob",)]


def test_fields_ignore_what_they_do_not_name():
    raw = {"q": "q", "r": "r", "who": None, "system": "s", "gold": 7, "id": 3}
    options = {"prompt": "{q}?", "response": "r", "answer": "gold", "system": "who"}
    assert ignored(raw, **options) == [("system", "id")]
    assert ignored({"prompt": "q", "response": "r", "gold": 7, "task": "t", "id": 3}, answer="gold") == [("id",)]


def test_labelled_completions_and_trees():
    raws = [{"prompt": "q", "completion": text, "label": text == "x", "system": "s", "id": text} for text in "xyz"]
    # The third has no partner, so it isn't used.
    assert ignored(raws, PREFERENCES) == [("id",), ("id",), ()]
    flat = [
        {"message_id": "1", "parent_id": None, "role": "prompter", "text": "q", "lang": "en"},
        {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "r", "labels": {"a": 1}},
    ]
    assert ignored(flat) == [("lang",), ("labels",)]


def test_a_row_that_makes_several_is_counted_once():
    raw = {"instruction": "q", "name": "n", "instances": [{"output": "r"}, {"output": "s"}]}
    assert ignored(raw) == [("name",), ()]


def test_each_source_logs_its_ignored_columns_once(make, capsys):
    rows = [
        {"title": "c", "question": f"q{i}", "answer": "r", "id": i} | ({"tags": ["x"]} if i % 2 else {})
        for i in range(50)
    ]
    rows.append({"title": "c", "question": "", "answer": "r", "odd": 1})
    built = make(
        rows,
        [{"question": "other", "answer": "r", "id": 7}],
        source={"ignore": ["tags"]},
        max_quarantined_fraction=1.0,
    )
    (source,) = built.counts["sources"]
    # Quarantined rows aren't used, so nothing of them counts as ignored.
    assert source["ignored"] == {"title": 50, "id": 51, "tags": 25}
    output = [line for line in capsys.readouterr().out.splitlines() if "ignored" in line]
    assert len(output) == 1
    assert output[0].startswith(
        "data/0.jsonl and 1 more files: ignored, because its layout doesn't read them: id (51 rows), "
    )
    assert "title (50 rows), tags (25 rows); to use one, map columns with `fields`" in output[0]


def test_tools_and_weights_are_read_and_documents_report_other_columns():
    tools = [{"name": "f", "parameters": {}}]
    messages = [
        {"role": "user", "content": "q", "weight": 0},
        {"role": "assistant", "content": "r", "train": True},
    ]
    assert ignored({"messages": messages, "tools": tools, "weight": 2}) == [("weight",)]
    assert ignored({"text": "a", "url": "u", "meta": {}}, "text") == [("url",)]
    assert ignored({"text": "a" * 300_000, "url": "u"}, "text") == [("url",), ()]
    assert ignored({"body": "a", "text": "b"}, "text", text="body") == [("text",)]
    assert ignored({"conversation": [{"human": "q", "assistant": "r", "mood": "m"}]}) == [("conversation[].mood",)]


def test_nothing_is_logged_if_all_is_read(make, chat, capsys):
    assert make([chat()]).counts["sources"][0]["ignored"] == {}
    assert "ignored" not in capsys.readouterr().out


def test_keys_that_are_data_are_limited(make, capsys):
    rows = [{"prompt": f"q{i}", "response": "r", f"key-{i}": 1} for i in range(1000)]
    (source,) = make(rows).counts["sources"]
    assert len(source["ignored"]) == 201 and source["ignored"]["…"] == 800


def test_control_characters_in_names_are_escaped(make, capsys):
    make([{"prompt": "q", "response": "r", "a\x1b[31m": 1}])
    output = capsys.readouterr().out
    assert "\x1b" not in output and "a\\u001b[31m (1 rows)" in output


def test_tables_with_nested_columns(make, tmp_path):
    table = pa.Table.from_pylist(
        [
            {
                "conversations": [
                    {"from": "human", "value": "q", "note": None},
                    {"from": "gpt", "value": "r", "note": "x"},
                ]
            },
            {
                "conversations": [
                    {"from": "human", "value": "p", "note": "y"},
                    {"from": "gpt", "value": "r", "note": None},
                ]
            },
        ]
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    ignore = {"ignore": ["conversations[].note"]}
    built = make((tmp_path / "a.parquet").read_bytes(), suffix=".parquet", source=ignore)
    assert built.counts["sources"][0]["ignored"] == {"conversations[].note": 2}
    assert built.prompts() == ["q", "p"]


def test_ambiguous_numeric_votes_fail_the_stage(make):
    from snaketune.errors import SnaketuneError

    rows = [{"question": f"q{i}", "response_a": "x", "response_b": "y", "label": i % 2} for i in range(4)]
    with pytest.raises(SnaketuneError, match=r"data/0.jsonl: label holds 0 and 1, and never 2.*write A, B or tie"):
        make(rows, kind=PREFERENCES)


def test_one_row_as_a_whole_document(make):
    row = {"trajectory": turns("U a", "A b", "U q"), "chosen": "x", "rejected": "y"}
    built = make(json.dumps(row, indent=1).encode(), kind=PREFERENCES, suffix=".json")
    assert [compact(r["prompt"]) for r in built.train] == ["U a|A b|U q"]


def test_a_csv_with_turns_as_json(make):
    rows = [("prompt", "chosen", "rejected")]
    rows += [(json.dumps(turns("U q")), json.dumps(turns("A x")), json.dumps(turns("A y")))]
    content = "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows).encode()
    (row,) = make(content, kind=PREFERENCES, suffix=".csv").train
    assert [compact(row[column]) for column in ("prompt", "chosen", "rejected")] == ["U q", "A x", "A y"]
