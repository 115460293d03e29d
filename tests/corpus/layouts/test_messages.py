"""Turns: typed parts, reasoning and tool calls as plain text."""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import PREFERENCES, read, turns

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ä"}'}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ä"}}\n</tool_call>'
THOUGHT = "<think>\n1 + 1\n</think>\n\n"


def content_of(turn):
    """The content of the assistant's turn."""
    return read({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant"} | turn]})[1].messages[1][
        "content"
    ]


@pytest.mark.parametrize(
    "turn, content",
    [
        ({"content": "x"}, "x"),
        ({"content": "x", "tool_calls": None, "reasoning_content": None, "name": "bot"}, "x"),
        ({"content": "x", "tool_calls": [], "reasoning_content": ""}, "x"),
        ({"content": [{"type": "text", "text": "x"}]}, "x"),
        ({"content": [{"type": "text", "text": "x ", "image_url": None}, {"type": "output_text", "text": "y"}]}, "x y"),
        ({"content": [{"text": "x"}, "y"]}, "xy"),
        ({"content": ["def f():", "    pass"]}, "def f():\n    pass"),
        ({"content": ["def f():\n", "    pass"]}, "def f():\n    pass"),
        ({"content": [{"type": "reasoning", "text": "1 + 1"}, {"type": "text", "text": "2"}]}, THOUGHT + "2"),
        ({"content": [{"type": "thinking", "thinking": " 1 + 1\n"}, {"type": "text", "text": "2"}]}, THOUGHT + "2"),
        ({"content": "2", "reasoning_content": "1 + 1"}, THOUGHT + "2"),
        ({"content": "2", "thinking": "1 + 1"}, THOUGHT + "2"),
        ({"content": THOUGHT + "2", "reasoning_content": "1 + 1"}, THOUGHT + "2"),
        ({"content": None, "tool_calls": [CALL]}, CALLED),
        ({"tool_calls": [CALL]}, CALLED),
        ({"content": "Let me add.", "tool_calls": [CALL, CALL]}, f"Let me add.\n{CALLED}\n{CALLED}"),
        ({"content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": "ä"}}]}, CALLED),
        ({"content": "", "function_call": {"name": "add", "arguments": '{"a": 1, "b": "ä"}'}}, CALLED),
        ({"content": "", "tool_calls": [CALL], "reasoning_content": "1 + 1"}, THOUGHT + CALLED),
        ({"content": [{"type": "text", "text": "So:"}, {"type": "tool_call"} | CALL["function"]]}, f"So:\n{CALLED}"),
        ({"content": [{"type": "tool_calls", "tool_calls": [CALL]}]}, CALLED),
        (
            {"content": [{"type": "tool_use", "name": "now", "input": {}}]},
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ),
        (
            {"content": "", "tool_calls": [{"name": "now"}]},
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ),
    ],
)
def test_content_as_text(turn, content):
    assert content_of(turn) == content


@pytest.mark.parametrize(
    "turn, reason, says",
    [
        ({"content": None}, "non_string_content", "turn 2.*null"),
        ({"content": True}, "non_string_content", "turn 2.*bool"),
        ({"content": {"text": "x"}}, "non_string_content", "dict"),
        ({"content": [{"type": "text"}]}, "non_string_content", "null"),
        ({"content": [{"type": "text", "text": ["x"]}]}, "non_string_content", "list"),
        ({"content": "x", "reasoning_content": ["y"]}, "non_string_content", "reasoning holds list"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "unsupported_part", "image_url"),
        ({"content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}, "unsupported_part", "input_audio"),
        ({"content": [3]}, "unsupported_part", "int"),
        ({"content": [{"type": ["text"], "text": "x"}]}, "unsupported_part", "text"),
        ({"content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}, "bad_tool_call", "has no name"),
        ({"content": "", "tool_calls": ["add"]}, "bad_tool_call", "has no name"),
        ({"content": "", "tool_calls": [{"name": "add", "arguments": "{a: 1}"}]}, "bad_tool_call", "isn't valid JSON"),
        ({"content": "", "tool_calls": [{"name": "add", "arguments": {"a": float("nan")}}]}, "bad_tool_call", "turn 2"),
        ({"content": "", "tool_calls": "add"}, "bad_tool_call", "isn't valid JSON"),
        ({}, "missing_column", "turn 2 has no content"),
        ({"role": None, "content": "x"}, "missing_speaker", "turn 2"),
        ({"role": " ", "content": "x"}, "missing_speaker", "turn 2"),
        ({"role": ["assistant"], "content": "x"}, "wrong_type", "role holds list"),
        ({"role": "narrator", "content": "x"}, "unknown_role", "narrator"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "unsupported_part", "the assistant's"),
    ],
)
def test_content_that_is_not_text(turn, reason, says):
    with pytest.raises(Malformed, match=says) as error:
        content_of(turn)
    assert error.value.reason == reason


def test_calls_and_results_in_sharegpt():
    messages = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "1 + 1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": "ä"}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ]
    assert read({"conversations": messages})[1].messages == turns("S s", "U 1 + 1?", f"A {CALLED}", "T 2", "A It is 2.")


@pytest.mark.parametrize(
    "value, content",
    [
        (CALLED, CALLED),
        (f"Wait. {CALLED}", f"Wait. {CALLED}"),
        ('[{"name": "a", "arguments": "{}"}, {"name": "b"}]', '{"name": "b", "arguments": {}}'),
    ],
)
def test_formats_of_a_call(value, content):
    messages = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": value}]
    assert content in read({"conversations": messages})[1].messages[1]["content"]


@pytest.mark.parametrize("value", ["add(1, 1)", "", None, "3", "[1]", "{}"])
def test_invalid_calls(value):
    with pytest.raises(Malformed, match="bad_tool_call"):
        read({"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": value}]})


@pytest.mark.parametrize(
    "system",
    [
        {"role": "system", "content": ""},
        {"role": "system", "content": " \n"},
        {"role": "system", "content": None},
        {"role": "system", "content": [], "name": None},
        {"role": "system"},
        {"from": "system", "value": None},
    ],
)
def test_a_system_turn_without_text_is_no_turn(make, system):
    chat = turns("U hi", "A x")
    row = read({"messages": [system, *chat]})[1]
    assert row.messages == chat and row.notes == ("empty_system_turn",)
    # The column says what the turn doesn't.
    assert read({"messages": [system, *chat], "system": "s"})[1].messages == turns("S s", *("U hi", "A x"))
    pair = read({"prompt": [system, chat[0]], "chosen": "x", "rejected": "y"}, PREFERENCES)[1]
    assert pair.prompt == chat[:1] and pair.notes == ("empty_system_turn",)
    assert make([{"messages": [system, *chat]}]).counts["notes"] == {"empty_system_turn": 1}


def test_other_turns_without_text_are_malformed():
    with pytest.raises(Malformed, match=r"empty_turn: turn 3 \(system\)"):
        read({"messages": turns("U hi", "A x", "S ", "U a", "A b")})
    with pytest.raises(Malformed, match="no_assistant_turn"):
        read({"messages": [{"role": "system", "content": None}]})


def test_a_list_of_texts_is_no_conversation():
    for column in ("messages", "conversations"):
        with pytest.raises(Malformed, match=r"turn 1 holds str.*texts of alternating speakers.*`fields.messages`"):
            read({column: ["a", "b"]})
