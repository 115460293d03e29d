"""Conversations in the formats of other APIs, responses that are calls, and `fields`."""

import json

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import PREFERENCES, compact, read, read_all, turns

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
THOUGHT = "<think>\nt\n</think>\n\n"


def part(text):
    return {"parts": [{"text": text}]}


def moss(**texts):
    names = {"human": ("Human", "<|Human|>: {}<eoh>\n"), "thoughts": ("Inner Thoughts", "<|Inner Thoughts|>: {}<eot>\n"),
             "commands": ("Commands", "<|Commands|>: {}<eoc>\n"), "results": ("Tool Responses", "<|Results|>:\n{}<eor>\n"),
             "moss": ("MOSS", "<|MOSS|>: {}<eom>\n")}  # fmt: skip
    return {key: frame.format(texts.get(name, "None")) for name, (key, frame) in names.items()}


READ = {
    "gemini": (
        {
            "systemInstruction": {"role": "system", **part("s")},
            "contents": [{"role": "user", **part("q")}, {"role": "model", "parts": [{"text": "r"}, {"text": " s"}]}],
        },
        "S s|U q|A r s",
    ),
    "gemini with a thought": (
        {
            "contents": [
                {"role": "user", **part("q")},
                {"role": "model", "parts": [{"text": "t", "thought": True}, {"text": "r"}]},
            ]
        },
        f"U q|A {THOUGHT}r",
    ),
    "a column contents of something else": ({"prompt": "q", "response": "r", "contents": "a list"}, "U q|A r"),
    "gemini with a call": (
        {
            "contents": [
                {"role": "user", **part("q")},
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": 1}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"y": 2}}}]},
                {"role": "model", **part("r")},
            ]
        },
        f'U q|A {CALL}|T {{"y": 2}}|A r',
    ),
    "moss": (
        {
            "meta_instruction": "s",
            "chat": {
                "turn_2": moss(human="c", moss="d"),
                "turn_1": moss(human="a", thoughts="t", commands='Search("a")', results="5", moss="b"),
                "turn_10": moss(human="e", moss="None of them"),
            },
        },
        f'S s|U a|A {THOUGHT}Search("a")|T 5|A b|U c|A d|U e|A None of them',
    ),
    "anthropic blocks": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "So:"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                    {"type": "tool_use", "id": "2", "name": "f", "input": {"x": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
                    {"type": "tool_result", "tool_use_id": "1", "content": "one"},
                ]},
                {"role": "assistant", "content": "r"},
            ]
        },
        f"U q|A So:\n{CALL}\n{CALL}|T one|T two|A r",
    ),
    "xlam": (
        {"query": "q", "answers": json.dumps([{"name": "f", "arguments": {"x": 1}}]), "tools": '[{"name": "f"}]', "id": 1},
        f"U q|A {CALL}",
    ),
    "bfcl": (
        {
            "question": [turns("S s", "U q")], "function": [{"name": "f", "parameters": {}}],
            "ground_truth": [{"f": {"x": [1, 2], "y": ["", 3]}}],
        },
        f"S s|U q|A {CALL}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "expected"), READ.values(), ids=READ)
def test_read(raw, expected):
    (made,) = read_all([raw])
    assert compact(made.row.messages) == expected
    assert made.ignored == tuple(
        name for name in ("contents", "id") if name in raw and made.layout == "prompt-response"
    )
    assert (made.row.tools is not None) is bool({"tools", "function"} & raw.keys())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a", "b", "c", "d"], "U a|A b|U c|A d"),
        (turns("U a", "A b"), "U a|A b"),
        (json.dumps(turns("U a", "A b")), "U a|A b"),
        ({"turn_2": "b", "turn_1": "a", "turn_10": "d", "turn_3": "c"}, "U a|A b|U c|A d"),
        ([{"turn": 2, "role": "assistant", "content": "b"}, {"turn": 1, "role": "user", "content": "a"}], "U a|A b"),
        ([{"index": 1, "user": "c", "assistant": "d"}, {"index": 0, "user": "a", "assistant": "b"}], "U a|A b|U c|A d"),
    ],
)
def test_any_column_may_be_the_conversation(value, expected):
    raw = {"dialog": value, "prompt": "p", "response": "r", "system": "s", "id": 1}
    (made,) = read_all([raw], messages="dialog")
    assert (made.layout, compact(made.row.messages)) == ("messages", f"S s|{expected}")
    assert made.ignored == ("prompt", "response", "id")


def test_alternating_texts_are_refused_with_the_field_that_reads_them():
    with pytest.raises(Malformed, match=r"turn 1 holds str.*`fields.messages`"):
        read({"conversations": ["a", "b"]})
    with pytest.raises(Malformed, match="missing_column: no column dialog"):
        read({"conversations": ["a", "b"]}, messages="dialog")


def test_context_and_reasoning_by_fields():
    raw = {"q": "q", "docs": ["c", "d"], "trace": "t", "r": "r", "context": "not this"}
    row = read(raw, prompt="q", response="r", context="docs", reasoning="trace")[1]
    assert compact(row.messages) == f"U q\n\nc\n\nd|A {THOUGHT}r"
    assert compact(read(raw, prompt="q", response="r")[1].messages) == "U q|A r"
    assert compact(
        read(raw | {"s": "x"}, PREFERENCES, prompt="q", chosen="r", rejected="s", context="{docs}!")[1].prompt
    ) == ("U q\n\nc\nd!")
    # With its own layout, instead of the column that it would read.
    raw = {"question": "q", "answer": "r", "evidence": "e", "context": "id-7", "trace": "t"}
    (made,) = read_all([raw], context="evidence", reasoning="trace")
    assert compact(made.row.messages) == f"U q\n\ne|A {THOUGHT}r" and made.ignored == ("context",)


def test_a_template_joins_lists_by_lines():
    raw = {"facts": ["a", 2], "q": "q", "r": "r", "bad": [{}]}
    assert compact(read(raw, prompt="Facts:\n{facts}\n{q}", response="r")[1].messages) == "U Facts:\na\n2\nq|A r"
    with pytest.raises(Malformed, match="bad holds list, expected a text, a number, or a list of them"):
        read(raw, prompt="{bad}", response="r")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": "m", "prompt": "p", "response": "r"}, "messages is a whole conversation"),
        ({"messages": "m", "context": "c"}, "context belongs to a prompt"),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "reasoning": "t"}, "reasoning belongs to a response"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, says):
    from pydantic import ValidationError

    from snaketune.config.row_fields import Fields

    with pytest.raises(ValidationError, match=says):
        Fields(**fields)
