"""All reasons for which a row is malformed; and every row is valid or malformed."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.config.corpus_sources import Layout
from snaketune.corpus.rows import Conversation, Dropped, Malformed, Preference, content_hash
from snaketune.corpus.values.validation import STEPS
from tests.corpus.row_spelling import ALPACA, BOTH, CHAT, CONVERSATIONS, PREFERENCES, read, read_all, turns

SVAMP = {"ID": "chal-1", "Body": "A pack costs 76 dollars.", "Question": "How much?", "Answer": 51.0, "Type": "Sum"}


def pair_of(**columns):
    return {"prompt": "hi", "chosen": "x", "rejected": "y", **columns}


@pytest.mark.parametrize(
    "raw, options, reason, says",
    [
        ({"text": "x", "n": 1}, {}, "unknown_layout", "text, n"),
        ({"messages": None}, {}, "unknown_layout", "messages"),
        ({"prompt": "x"}, {"layout": "prompt-response"}, "missing_column", "no column response"),
        ({"text": "x"}, {"layout": "messages"}, "missing_column", "no column messages"),
        (SVAMP, {"prompt": "Bdy", "response": "Answer"}, "missing_column", "Bdy.*Body"),
        (SVAMP, {"prompt": "{Bdy} {Question}", "response": "Answer"}, "missing_column", "Bdy"),
        (SVAMP, {"prompt": "Body", "response": "Answer", "task": "Kind"}, "missing_column", "Kind"),
        ({"messages": CHAT}, {"answer": "gold"}, "missing_column", "gold"),
        ({"q": "x", "a": None}, {"prompt": "q", "response": "a"}, "missing_column", "a, or it is null"),
        ({"q": "x", "a": None}, {"prompt": "q", "response": "{a}!"}, "wrong_type", "a holds null"),
        ({"q": "x", "a": float("inf")}, {"prompt": "q", "response": "a"}, "wrong_type", "float"),
        ({"q": "x", "a": "y", "g": [1]}, {"prompt": "q", "response": "a", "answer": "g"}, "wrong_type", "list"),
        ({"messages": "hi"}, {}, "wrong_type", "str"),
        ({"messages": ["hi"]}, {}, "wrong_type", "turn 1"),
        ({"messages": CHAT, "system": 3}, {}, "wrong_type", "system"),
        ({"prompt": "hi", "response": True}, {}, "wrong_type", "bool"),
        ({"instruction": "hi", "input": [3], "output": "x"}, {}, "wrong_type", "input"),
        ({"turns": ["a", "b"]}, {}, "wrong_type", "turn 1 holds str"),
        ({"messages": []}, {}, "empty_turn", "no turns"),
        ({"messages": turns("U hi", "A  \n")}, {}, "empty_turn", "turn 2"),
        ({"prompt": "", "response": "x"}, {}, "empty_turn", "user"),
        ({"prompt": "x", "response": ""}, {}, "empty_turn", "assistant"),
        ({"messages": turns("S s", "U hi")}, {}, "no_assistant_turn", ""),
        ({"messages": turns("U hi", "A x", "U y")}, {}, "ends_on_user", ""),
        ({"messages": turns("U hi", "A x", "T y")}, {}, "ends_on_tool", ""),
        ({"messages": turns("U hi", "U there", "A x")}, {}, "two_turns_in_a_row", "1 and 2"),
        ({"messages": turns("U hi", "A x", "A y")}, {}, "two_turns_in_a_row", "assistant"),
        ({"messages": CHAT, "system": "another"}, {}, "two_turns_in_a_row", "system"),
        ({"messages": turns("U hi", "A x", "S s", "U y", "A z")}, {}, "turn_out_of_order", "turn 3"),
        ({"messages": turns("A hello")}, {}, "turn_out_of_order", "comes first"),
        ({"messages": turns("S s", "A hello")}, {}, "turn_out_of_order", "follows system"),
        ({"messages": turns("U hi", "T 5", "A x")}, {}, "turn_out_of_order", "tool"),
        ({"messages": turns("U hi", "A \ud83d")}, {}, "lone_surrogate", "ud83d"),
        ({"messages": CHAT, "task": "\ud83d"}, {}, "lone_surrogate", ""),
    ],
)
def test_conversations(raw, options, reason, says):
    with pytest.raises(Malformed) as error:
        content_hash(read(raw, CONVERSATIONS, **options)[1])
    assert error.match(f"^{reason}: .*{says}")


@pytest.mark.parametrize(
    "raw, options, reason, says",
    [
        ({"chosen": "x", "rejected": "y"}, {}, "missing_column", "prompt"),
        ({"chosen": "x"}, {"layout": "pairs"}, "missing_column", "rejected"),
        (pair_of(chosen=None), {}, "unknown_layout", ""),
        (pair_of(chosen=True), {}, "wrong_type", "chosen"),
        (pair_of(chosen={"content": "x"}), {}, "missing_speaker", "chosen"),
        (pair_of(chosen={"text": {}}), {}, "non_string_content", "chosen"),
        (pair_of(chosen={"role": "user", "content": "x"}), {}, "two_turns_in_a_row", "chosen"),
        (pair_of(rejected="x"), {}, "identical_chosen_and_rejected", ""),
        ({"chosen": CHAT, "rejected": CHAT}, {}, "identical_chosen_and_rejected", ""),
        (pair_of(chosen=" \n"), {}, "empty_completion", "chosen"),
        (pair_of(rejected=""), {}, "empty_completion", "rejected"),
        (pair_of(rejected=[]), {}, "empty_turn", "rejected"),
        (pair_of(prompt=" "), {}, "empty_turn", "turn 1"),
        (pair_of(prompt=turns("U hi", "A x")), {}, "turn_out_of_order", "prompt ends on assistant"),
        (pair_of(chosen=turns("A x", "U y")), {}, "ends_on_user", "chosen"),
        (pair_of(chosen=turns("U y", "A x")), {}, "two_turns_in_a_row", "chosen"),
        ({"chosen": turns("U a", "A x"), "rejected": turns("U b", "A y")}, {}, "different_prompts", "turn 1"),
        (
            {"chosen": turns("U a", "A b", "U c", "A x"), "rejected": turns("U a", "A b", "U d", "A x")},
            {},
            "different_prompts",
            "turn 3",
        ),
        (pair_of(chosen=turns("U a", "A x"), rejected=turns("U a", "A y")), {}, "different_prompts", "prompt"),
        (
            pair_of(chosen="Human: a\n\nAssistant: x", rejected="Human: a\n\nAssistant: y"),
            {},
            "different_prompts",
            "prompt",
        ),
        (
            {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: a\n\nAssistant:"},
            {},
            "empty_completion",
            "rejected",
        ),
    ],
)
def test_preferences(raw, options, reason, says):
    with pytest.raises(Malformed) as error:
        content_hash(read(raw, PREFERENCES, **options)[1])
    assert error.match(f"^{reason}: .*{says}")


TEXTS = st.text(max_size=8) | st.sampled_from(
    [
        "",
        " ",
        "A>B",
        '[{"role": "user", "content": "q"}]',
        "[{'role': 'user'}]",
        "Human: a\n\nAssistant: b",
        "\ud800",
        ALPACA.format("x"),
        "User 1: a\nUser 2: b",
        "USER: a ASSISTANT:",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
SPEAKERS = st.sampled_from(["user", "assistant", "system", "SYSTEM", "tool", "function_call", "x"])
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "reasoning", "tool_call", "image"]) | JSON,
        "text": TEXTS | JSON,
        "name": TEXTS,
    },
)
KEYS = ("role", "from", "speaker", "content", "value", "utterance", "tool_calls", "function_call", "reasoning_content")
KEYS += ("text", "replies", "message_id", "rank")
TURN = st.fixed_dictionaries({}, optional={key: SPEAKERS | TEXTS | JSON | st.lists(PART, max_size=2) for key in KEYS})
COLUMNS = ["messages", "conversations", "instruction", "input", "output", "prompt", "question", "response", "turns"]
COLUMNS += ["completion", "chosen", "rejected", "answer", "task", "system", "instances", "label", "chat", "winner"]
COLUMNS += ["conversation", "history", "context", "system_prompt", "kto_tag", "query", "trajectory", "response_j"]
COLUMNS += [
    "chosen_messages",
    "rejected_messages",
    "rejected_response",
    "response_k",
    "preference_strength",
    "answer_0",
]
COLUMNS += ["response_a", "response_b", "annotator1", "message_id", "parent_id", "role", "text", "rank", "replies"]
RAW = st.dictionaries(st.sampled_from(COLUMNS), TEXTS | JSON | TURN | st.lists(TURN, max_size=4), max_size=7)


@pytest.mark.parametrize("column", [{"system": "Be brief."}, {"tools": [{"name": "f", "parameters": {}}]}])
def test_a_row_of_an_empty_system_turn_is_malformed(column):
    (made,) = read_all([{"messages": [{"role": "system", "content": ""}]} | column])
    assert isinstance(made.row, Malformed) and made.row.detail


@given(
    st.lists(RAW, min_size=1, max_size=3),
    st.sampled_from(BOTH),
    st.sampled_from(get_args(Layout)),
    st.sampled_from([(), tuple(STEPS)]),
    st.sampled_from(
        [
            {},
            {"answer": "task"},
            {"prompt": "{prompt}?", "response": "output"},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "messages", "system": "system"},
        ]
    ),
)
@settings(deadline=None, max_examples=600)
def test_any_row_is_sound_or_malformed(raws, kind, layout, repair, fields):
    try:
        made = read_all(raws, kind, layout, repair, {"x": "user"}, **fields)
    except Malformed as error:
        # An error about the file as a whole.
        assert error.reason in ("ambiguous_votes", "unknown_layout", "wrong_kind")
        return
    assert {m.raw.number for m in made} == set(range(1, len(raws) + 1))
    for row in (m.row for m in made if m.row is not None):
        try:
            if isinstance(row, Malformed | Dropped):
                raise row
            content_hash(row)
        except Malformed as error:
            assert error.reason.isidentifier() and error.detail
            continue
        except Dropped as why:
            assert why.reason.isidentifier()
            continue
        assert isinstance(row, Conversation if kind == CONVERSATIONS else Preference)
        for messages in (
            (row.messages,) if kind == CONVERSATIONS else (row.prompt + row.chosen, row.prompt + row.rejected)
        ):
            roles = [turn["role"] for turn in messages if turn["role"] not in ("system", "tool")]
            assert roles[:1] == ["user"] and roles[-1] == "assistant"
            assert all(turn["content"].strip() and turn.keys() == {"role", "content"} for turn in messages)
