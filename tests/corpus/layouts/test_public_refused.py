"""Rows in the shapes of public data sets that are refused with a reason.

The shapes are those that the data sets' cards and the documentation of other trainers show; the texts are our own.
"""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import (
    CONVERSATIONS,
    PREFERENCES,
    read,
    turns,
)

REFUSED = {
    "lima": ({"conversations": ["q", "r"], "source": "z"}, CONVERSATIONS, "wrong_type", "turn 1 holds str"),
    "mt-bench questions": ({"question_id": 1, "turns": ["q", "q2"]}, CONVERSATIONS, "wrong_type", "turn 1"),
    "nectar with one answer": (
        {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": [{"answer": "x", "rank": 1.0}], "turns": 1},
        PREFERENCES,
        "unknown_layout",
        "prompt, answers, turns",
    ),
    "math-shepherd": ({"prompt": "q", "completions": ["x"], "labels": [True]}, PREFERENCES, "unknown_layout", "prompt"),
    "shp without scores": (
        {"history": "q", "human_ref_A": "x", "human_ref_B": "y", "labels": 1},
        PREFERENCES,
        "unknown_layout",
        "human_ref_A",
    ),
    "gemini with a picture": (
        {
            "contents": [
                {"role": "user", "parts": [{"inlineData": {"data": "x"}}]},
                {"role": "model", "parts": [{"text": "r"}]},
            ]
        },
        CONVERSATIONS,
        "unsupported_part",
        "inlineData",
    ),
    "anthropic tool results of no call": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "5"}]}, *turns("A r")]},
        CONVERSATIONS,
        "turn_out_of_order",
        "turn 1 .tool. comes first",
    ),
    "answers to look for": (
        {"query": "q", "answers": ["x", "y"]},
        CONVERSATIONS,
        "bad_tool_call",
        "answers holds list",
    ),
    "columns of lists": ({"conversations": {"from": ["human"], "value": ["q"]}}, CONVERSATIONS, "wrong_type", "dict"),
    "several rows as columns": (
        {"prompt": ["q"], "response": ["r"]},
        CONVERSATIONS,
        "wrong_type",
        "response holds a list of texts",
    ),
    "rows by id": ({"0": {"prompt": "q", "response": "r"}}, CONVERSATIONS, "unknown_layout", "0"),
    "pandas' spelling": (
        {"prompt": "q", "chosen": str(turns("U q", "A x")), "rejected": str(turns("U q", "A y"))},
        PREFERENCES,
        "turns_as_text",
        "chosen .*JSON",
    ),
    "pandas' spelling of a prompt": (
        {"prompt": str(turns("U q")), "completion": str(turns("A x"))},
        CONVERSATIONS,
        "turns_as_text",
        "completion .*JSON",
    ),
    "history as a text": (
        {"prompt": "q", "response": "r", "history": "User: a\nBot: b"},
        CONVERSATIONS,
        "wrong_type",
        "history",
    ),
    "letters of the better one": (
        {"prompt": "q", "response_a": "x", "response_b": "y", "chosen": "a", "rejected": "b"},
        PREFERENCES,
        "verdicts_as_completions",
        "chosen",
    ),
    "names of the better one": (
        {"prompt": "q", "response_1": "x", "response_2": "y", "chosen": "response_1", "rejected": "response_2"},
        PREFERENCES,
        "verdicts_as_completions",
        "chosen",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, *turns("A r")]},
        CONVERSATIONS,
        "unsupported_part",
        "image",
    ),
    "labelled conversation without an answer": (
        {"messages": turns("U q"), "label": True},
        PREFERENCES,
        "no_assistant_turn|ends_on_user",
        "",
    ),
}


@pytest.mark.parametrize("raw, kind, reason, says", REFUSED.values(), ids=REFUSED)
def test_refused(raw, kind, reason, says):
    with pytest.raises(Malformed, match=f"^({reason}).*: .*{says}"):
        read(raw, kind)
