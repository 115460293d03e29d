"""Every way for a row to be malformed, each with its reason; and that there is no third way to end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_spelling import ALPACA, BOTH, CHAT, read, turns

from snaketune.corpus.layouts import READERS
from snaketune.corpus.rows import Conversation, Malformed, Preference, row_id

SVAMP = {"ID": "chal-1", "Body": "A pack costs 76 dollars.", "Question": "How much?", "Answer": 51.0, "Type": "Sum"}


def pair_of(**columns):
    return {"prompt": "hi", "chosen": "x", "rejected": "y", **columns}


@pytest.mark.parametrize(
    "raw, kinds, options, reason, says",
    [
        ({}, BOTH, {}, "unknown_layout", "isn't null"),
        ({"text": "x", "n": 1}, BOTH, {}, "unknown_layout", "text, n"),
        ({"messages": None}, BOTH, {}, "unknown_layout", "isn't null"),
        ({"prompt": "x"}, BOTH, {"layout": "prompt-response"}, "missing_column", "neither"),
        ({"text": "x"}, BOTH, {"layout": "messages"}, "missing_column", "no column messages"),
        ({"chosen": "x", "rejected": "y"}, BOTH, {}, "missing_column", "prompt"),
        ({"chosen": "x"}, BOTH, {"layout": "pairs"}, "missing_column", "rejected"),
        (SVAMP, BOTH, {"prompt": "Bdy", "response": "Answer"}, "missing_column", "Bdy.*Body"),
        (SVAMP, BOTH, {"prompt": "{Bdy} {Question}", "response": "Answer"}, "missing_column", "Bdy"),
        (SVAMP, BOTH, {"prompt": "Body", "response": "Answer", "task": "Kind"}, "missing_column", "Kind"),
        ({"messages": CHAT}, BOTH, {"answer": "gold"}, "missing_column", "gold"),
        ({"q": "x", "a": None}, BOTH, {"prompt": "q", "response": "a"}, "wrong_type", "null"),
        ({"q": "x", "a": None}, BOTH, {"prompt": "q", "response": "{a}!"}, "wrong_type", "a holds null"),
        ({"q": "x", "a": float("inf")}, BOTH, {"prompt": "q", "response": "a"}, "wrong_type", "float"),
        ({"q": "x", "a": "y", "g": [1]}, BOTH, {"prompt": "q", "response": "a", "answer": "g"}, "wrong_type", "list"),
        ({"messages": "hi"}, BOTH, {}, "wrong_type", "str"),
        ({"messages": ["hi"]}, BOTH, {}, "wrong_type", "turn 1"),
        ({"messages": [{"role": "user"}]}, BOTH, {}, "missing_column", "turn 1 has no content"),
        ({"messages": [{"role": "user", "content": None}]}, BOTH, {}, "wrong_type", "null"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, BOTH, {}, "wrong_type", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, BOTH, {}, "wrong_type", "list"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, BOTH, {}, "unknown_role", "narrator"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]},
            BOTH,
            {},
            "unsupported_turn",
            "tool_calls",
        ),
        ({"messages": CHAT, "system": 3}, BOTH, {}, "wrong_type", "system"),
        ({"prompt": "hi", "response": 3}, BOTH, {}, "wrong_type", "int"),
        ({"instruction": "hi", "input": 3, "output": "x"}, BOTH, {}, "wrong_type", "input"),
        ({"messages": []}, BOTH, {}, "empty_turn", "no turns"),
        ({"messages": turns("U hi", "A  \n")}, BOTH[:1], {}, "empty_turn", "turn 2"),
        ({"messages": turns("S ", "U hi", "A x")}, BOTH[:1], {}, "empty_turn", "turn 1"),
        ({"prompt": "", "response": "x"}, BOTH[:1], {}, "empty_turn", "user"),
        ({"prompt": "x", "response": ""}, BOTH[:1], {}, "empty_turn", "assistant"),
        ({"messages": turns("S s", "U hi")}, BOTH[:1], {}, "no_assistant_turn", ""),
        ({"messages": turns("U hi", "A x", "U y")}, BOTH[:1], {}, "ends_on_user", ""),
        ({"messages": turns("U hi", "A x", "T y")}, BOTH[:1], {}, "ends_on_tool", ""),
        ({"messages": turns("U hi", "U there", "A x")}, BOTH[:1], {}, "two_turns_in_a_row", "1 and 2"),
        ({"messages": turns("U hi", "A x", "A y")}, BOTH[:1], {}, "two_turns_in_a_row", "assistant"),
        ({"messages": turns("S a", "S b", "U hi", "A x")}, BOTH[:1], {}, "two_turns_in_a_row", "system"),
        ({"messages": CHAT, "system": "another"}, BOTH[:1], {}, "two_turns_in_a_row", "system"),
        ({"messages": turns("U hi", "A x", "S s", "U y", "A z")}, BOTH[:1], {}, "turn_out_of_order", "turn 3"),
        ({"messages": turns("A hello")}, BOTH[:1], {}, "turn_out_of_order", "comes first"),
        ({"messages": turns("S s", "A hello")}, BOTH[:1], {}, "turn_out_of_order", "follows system"),
        ({"messages": turns("U hi", "T 5", "A x")}, BOTH[:1], {}, "turn_out_of_order", "tool"),
        ({"messages": turns("U hi", "A \ud83d")}, BOTH[:1], {}, "lone_surrogate", "ud83d"),
        ({"messages": CHAT, "task": "\ud83d"}, BOTH[:1], {}, "lone_surrogate", ""),
        (pair_of(rejected="x"), BOTH[1:], {}, "identical_chosen_and_rejected", ""),
        ({"chosen": CHAT, "rejected": CHAT}, BOTH, {}, "identical_chosen_and_rejected", ""),
        (pair_of(chosen=" \n"), BOTH[1:], {}, "empty_completion", "chosen"),
        (pair_of(rejected=""), BOTH[1:], {}, "empty_completion", "rejected"),
        (pair_of(rejected=[]), BOTH, {}, "empty_completion", "rejected"),
        (pair_of(prompt=" "), BOTH[1:], {}, "empty_turn", "turn 1"),
        (pair_of(chosen=None), BOTH, {}, "unknown_layout", ""),
        (pair_of(chosen=3), BOTH, {}, "wrong_type", "chosen"),
        (pair_of(prompt=turns("U hi", "A x")), BOTH[1:], {}, "turn_out_of_order", "prompt ends on assistant"),
        (pair_of(chosen=turns("A x", "U y")), BOTH[1:], {}, "ends_on_user", "chosen"),
        (pair_of(chosen=turns("U y", "A x")), BOTH[1:], {}, "two_turns_in_a_row", "chosen"),
        ({"chosen": turns("U a", "A x"), "rejected": turns("U b", "A y")}, BOTH, {}, "different_prompts", "turn 1"),
        (
            {"chosen": turns("U a", "A b", "U c", "A x"), "rejected": turns("U a", "A b", "U d", "A x")},
            BOTH,
            {},
            "different_prompts",
            "turn 3",
        ),
        (
            {"prompt": "z", "chosen": turns("U a", "A x"), "rejected": turns("U a", "A y")},
            BOTH,
            {},
            "different_prompts",
            "prompt",
        ),
        ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}, BOTH, {}, "different_prompts", "turn 1"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "y"}, BOTH, {}, "not_a_transcript", "rejected"),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: a\n\nAssistant:"},
            BOTH[1:],
            {},
            "empty_completion",
            "rejected",
        ),
    ],
)
def test_malformed(raw, kinds, options, reason, says):
    for kind in kinds:
        with pytest.raises(Malformed) as error:
            row_id(read(raw, kind=kind, **options)[1])
        assert error.match(f"^{reason}: .*{says}")


def test_wrong_kind_says_what_would_help():
    with pytest.raises(Malformed, match=r"wrong_kind: .*pairs.*preferences.*conversations.*layout: alpaca"):
        read({"instruction": "Add", "output": "x", "chosen": "x", "rejected": "y"})


TEXTS = st.text(max_size=8) | st.sampled_from(["", " ", "Human: a\n\nAssistant: b", "\ud800", ALPACA.format("x")])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
TURN = st.fixed_dictionaries(
    {},
    optional={
        key: st.sampled_from(["user", "assistant", "system", "x"]) | JSON
        for key in ("role", "content", "from", "value")
    },
)
COLUMNS = ["messages", "conversations", "instruction", "input", "output", "prompt", "question", "response"]
COLUMNS += ["completion", "chosen", "rejected", "answer", "task", "system"]
RAW = st.dictionaries(st.sampled_from(COLUMNS), TEXTS | JSON | st.lists(TURN, max_size=4), max_size=6)


@given(
    RAW,
    st.sampled_from(BOTH),
    st.sampled_from(["auto", *READERS]),
    st.sampled_from(
        [
            {},
            {"answer": "task"},
            {"prompt": "{prompt}?", "response": "output"},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "messages", "system": "system"},
        ]
    ),
)
@settings(deadline=None, max_examples=300)
def test_any_row_is_sound_or_malformed(raw, kind, layout, fields):
    try:
        _, row = read(raw, kind=kind, layout=layout, **fields)
        row_id(row)
    except Malformed as error:
        assert error.reason.isidentifier() and error.detail
        return
    assert isinstance(row, Conversation if kind == "conversations" else Preference)
    for said in (row.messages,) if kind == "conversations" else (row.prompt + row.chosen, row.prompt + row.rejected):
        roles = [turn["role"] for turn in said if turn["role"] not in ("system", "tool")]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(turn["content"].strip() for turn in said)
