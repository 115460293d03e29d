"""Rows that `fields` map: rated answers, labels, messages in rows of their own, and values at paths."""

import json
from datetime import UTC, date, datetime

import pytest
from pydantic import ValidationError

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import Dropped, Malformed, RawRow
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, compact, read_all, turns


def rows(raws, kind, fields, **options):
    """The canonical rows or errors of each raw row; None for one that is part of another."""
    source = Source(files=("x",), fields=fields, **options)
    numbered = (RawRow("row", number, raw) for number, raw in enumerate(raws, start=1))
    return [made.row for made in canonical_rows(numbered, kind=kind, source=source, repair=())]


def spelled(row):
    return [compact(getattr(row, column)) for column in row.columns]


@pytest.mark.parametrize(
    "raw",
    [
        {"q": "q", "answer_1": "x", "answer_2": "y", "answer_3": "z", "s1": 1, "s2": "3", "s3": 2.0},
        {"q": "q", "all": ["x", "y", "z"], "scores": [1, 3, 2]},
    ],
)
def test_rated_answers(raw):
    several = "all" not in raw
    fields = {"prompt": "q", "answers": ["answer_1", "answer_2", "answer_3"], "ratings": ["s1", "s2", "s3"]}
    fields = fields if several else {"prompt": "q", "answers": ["all"], "ratings": ["scores"]}
    assert [spelled(row) for row in rows([raw], PREFERENCES, fields)] == [["U q", "A y", "A x"], ["U q", "A y", "A z"]]
    assert [spelled(row) for row in rows([raw], PREFERENCES, fields, pairing="worst")] == [["U q", "A y", "A x"]]
    assert isinstance(rows([raw], PREFERENCES, fields, margin=1.5)[1], Dropped)
    tie = raw | ({"s2": 1, "s3": 1} if several else {"scores": [1, 1, 1]})
    assert str(rows([tie], PREFERENCES, fields)[0]) == "tie"


def test_rated_answers_have_context_system_and_tools():
    raw = {"q": "q", "a": ["x", "y"], "r": [2, 1], "doc": "c", "sys": "s", "meta": {"tools": [{"name": "f"}]}}
    fields = {
        "prompt": "q",
        "answers": ["a"],
        "ratings": ["r"],
        "context": "doc",
        "system": "sys",
        "tools": "meta.tools",
    }
    (row,) = rows([raw], PREFERENCES, fields)
    assert spelled(row) == ["S s|U q\n\nc", "A x", "A y"]
    assert json.loads(row.tools)[0]["function"]["name"] == "f"


def test_labels():
    raws = [{"q": "q", "r": text, "ok": label} for text, label in (("x", "yes"), ("y", 0), ("z", True), ("w", "spam"))]
    fields = {"prompt": "q", "response": "r", "label": "ok"}
    *labelled, bad = rows(raws, "unpaired", fields)
    assert [(spelled(row), row.label) for row in labelled] == [
        (["U q", "A x"], True),
        (["U q", "A y"], False),
        (["U q", "A z"], True),
    ]
    assert isinstance(bad, Malformed)
    pair, joined, alone, bad = rows(raws, PREFERENCES, fields)
    assert spelled(pair) == ["U q", "A x", "A y"] and joined is None
    assert isinstance(alone, Dropped) and isinstance(bad, Malformed)
    with pytest.raises(Malformed, match="wrong_kind"):
        rows(raws, CONVERSATIONS, fields)


CHATS = {"conversation": "chat", "order": "at", "role": "who", "content": "said"}


@pytest.mark.parametrize(
    "places",
    [
        # Numbers in a CSV, of which ten precedes two as a text.
        [str(number) for number in range(12)],
        [f"{number}.0" for number in range(12)],
        # More digits than a float has.
        [10**17 + number for number in range(12)],
        [str(10**17 + number) for number in range(12)],
        [10**400 + number for number in range(12)],
        [datetime(2026, 11, 28, number) for number in range(12)],
        [date(2026, 11, number + 1) for number in range(12)],
        [f"2026-11-28 {number:02}:00" for number in range(12)],
    ],
)
def test_messages_are_ordered_by_numbers_also_in_texts_or_by_times(places):
    rows = [{"chat": 1, "at": at, "who": ["user", "assistant"][n % 2], "said": f"t{n}"} for n, at in enumerate(places)]
    (row,) = (result.row for result in read_all([*rows[1::2], *rows[::2]], **CHATS) if result.row)
    assert [turn["content"] for turn in row.messages] == [f"t{number}" for number in range(12)]


def test_other_orders_are_compared_as_they_are_or_malformed():
    def texts(*places):
        rows = [
            {"chat": 1, "at": at, "who": ["user", "assistant"][n % 2], "said": str(at)} for n, at in enumerate(places)
        ]
        (made,) = (result.row for result in read_all(rows, **CHATS) if result.row)
        return made.reason if isinstance(made, Malformed) else [turn["content"] for turn in made.messages]

    assert texts("1.1.1", "1.2") == ["1.1.1", "1.2"] and texts("a1", "a2") == ["a1", "a2"]
    assert texts("inf", "x1") == ["inf", "x1"]
    for mixed in (("1", date(2026, 11, 28)), (datetime(2026, 11, 28), datetime(2026, 11, 29, tzinfo=UTC)), (1, "x")):
        assert texts(*mixed) == "wrong_type"


def test_one_message_per_row():
    raws = [
        {"chat": "1", "at": 2, "who": "agent", "said": "Hello."},
        {"chat": 2, "at": "09:01", "who": "agent", "said": "Yes."},
        {"chat": "1", "at": 1, "who": "caller", "said": "Hi"},
        {"chat": 2, "at": "09:00", "who": "caller", "said": "Open?"},
        {"chat": None, "at": 1, "who": "caller", "said": "lost"},
        {"chat": "3", "at": 1, "who": "stranger", "said": "?"},
    ]
    fields = CHATS
    speakers = {"agent": "assistant", "caller": "user"}
    lost, *made = rows(raws, CONVERSATIONS, fields, speakers=speakers)
    assert made[:2] == [None, None]
    assert [spelled(row) for row in made[2:4]] == [["U Hi|A Hello."], ["U Open?|A Yes."]]
    assert [error.reason for error in (lost, *made[4:])] == ["missing_column", "unknown_role"]
    in_file_order = rows(raws[2:3] + raws[:1], CONVERSATIONS, fields | {"order": None}, speakers=speakers)
    assert spelled(in_file_order[1]) == ["U Hi|A Hello."]
    mixed = [raws[0], raws[2] | {"at": "one"}]
    assert rows(mixed, CONVERSATIONS, fields, speakers=speakers)[1].reason == "wrong_type"


def test_one_message_per_row_as_a_corpus(make):
    raws = [
        {"c": i // 2, "who": ("user", "assistant")[i % 2], "said": f"m{i}", "note": f"a note {i}"} for i in range(8)
    ]
    built = make(raws, source={"fields": {"conversation": "c", "role": "who", "content": "said"}})
    assert [compact(row["messages"]) for row in built.train] == [f"U m{i}|A m{i + 1}" for i in (0, 2, 4, 6)]


@pytest.mark.parametrize("text", [False, True])
def test_paths_lead_into_objects_and_into_json(text):
    def held(value):
        return json.dumps(value) if text else value

    raw = {
        "data": held({"turns": turns("U q", "A r"), "n": 7}),
        "metadata": held({"extra": {"tools": [{"name": "f"}]}}),
    }
    fields = {"messages": "data.turns", "tools": "metadata.extra.tools", "answer": "data.n"}
    (row,) = rows([raw], CONVERSATIONS, fields)
    assert spelled(row) == ["U q|A r"] and row.answer == "7" and '"name": "f"' in row.tools
    (row,) = rows([{"a.b": "q", "c": {"d": "r"}}], CONVERSATIONS, {"prompt": "a.b", "response": "say {c.d}"})
    assert spelled(row) == ["U q|A say r"]
    (error,) = rows([raw], CONVERSATIONS, fields | {"tools": "metadata.missing"})
    assert error.reason == "missing_column"


def test_a_path_into_a_column_is_not_in_question(make):
    raw = {"messages": turns("U q", "A r"), "metadata": json.dumps({"tools": [{"name": "f"}], "why": "a long story"})}
    assert make([raw], source={"fields": {"tools": "metadata.tools"}}).train[0]["tools"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "q"}, "map one of: prompt, response; "),
        ({"prompt": "q", "answers": ["a"]}, "found answers, prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "label": "c"}, "found chosen, label, prompt, rejected"),
        ({"order": "at", "prompt": "q", "response": "r"}, "order sorts the messages"),
        (
            {"messages": "m", "role": "r", "content": "c", "conversation": "i"},
            "messages is a whole conversation; remove",
        ),
        ({"conversation": "i", "role": "r", "content": "c", "context": "d"}, "context belongs to a prompt"),
        ({"prompt": "q", "answers": ["a"], "ratings": ["r"], "reasoning": "d"}, "remove reasoning"),
    ],
)
def test_columns_that_make_no_row_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        Source(files=("x",), fields=fields)
