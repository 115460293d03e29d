"""Columns that are part of a prompt or of its response: context, choices, reasoning, and which of two answers is trained."""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, read, spelled, turns

THOUGHT = "<think>\nt u\n</think>\n\n"
READ = {
    "question and context": ({"question": "q", "context": "c", "answer": "r"}, "U q\n\nc|A r"),
    "a context of several texts": ({"question": "q", "context": ["c", " ", "d"], "answer": "r"}, "U q\n\nc\n\nd|A r"),
    "a context that the prompt holds": ({"prompt": "By c alone: q", "context": "c\n", "response": "r"}, "U By c alone: q|A r"),
    "passage": ({"question": "q", "passage": "c", "answer": "yes"}, "U q\n\nc|A yes"),
    "an empty input and a context": ({"instruction": "q", "input": "", "context": "c", "output": "r"}, "U q\n\nc|A r"),
    "an input and a context": ({"instruction": "q", "input": "i", "context": "c", "output": "r"}, "U q\n\ni\n\nc|A r"),
    "article, question and options": (
        {"article": "c", "question": "q", "options": ["x", "y"], "answer": "A"},
        "U q\n\nc\n\nA. x\nB. y|A A",
    ),
    "choices with labels": (
        {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "1"},
        "U q\n\n1. x\n2. y|A 1",
    ),
    "choices by letter": ({"question": "q", "options": {"A": "x", "B": 7}, "answer": "B"}, "U q\n\nA. x\nB. 7|A B"),
    "choices as objects": (
        {"question": "q", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}], "answer": "B"},
        "U q\n\nA. x\nB. y|A B",
    ),
    "choices with letters of their own": ({"question": "q", "options": ["A)x", "B)y"], "answer": "A"}, "U q\n\nA)x\nB)y|A A"),
    "choices as a text": ({"problem": "q", "options": "a ) x , b ) y", "solution": "r"}, "U q\n\na ) x , b ) y|A r"),
    "choices that the prompt holds": ({"prompt": "xx or yy?", "choices": ["xx", "yy"], "response": "r"}, "U xx or yy?|A r"),
    "columns of letters": (
        {"question": "q", "A": "x", "B": "y", "C": "z", "D": 4, "answer": "C"},
        "U q\n\nA. x\nB. y\nC. z\nD. 4|A C",
    ),
    "a column A of something else": ({"question": "q", "A": "x", "answer": "r"}, "U q|A r"),
    "the prompt as turns": ({"prompt": turns("U a", "A b", "U q"), "context": "c", "response": "r"}, "U a|A b|U q\n\nc|A r"),
    "a mode of reasoning": ({"input": "q", "reasoning": "on", "output": "r"}, "U q|A r"),
    "reasoning that the response holds": ({"prompt": "q", "reasoning": "t u", "response": THOUGHT + "r"}, f"U q|A {THOUGHT}r"),
    "no reasoning": ({"prompt": "q", "thinking": "", "cot": None, "response": "r"}, "U q|A r"),
    "question, solution and answer": ({"question": "q", "solution": "long", "answer": "7"}, "U q|A long"),
    "problem, solution and answer": ({"problem": "q", "solution": "long", "answer": "7"}, "U q|A long"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "expected"), READ.values(), ids=READ)
def test_read(raw, expected):
    row = read(raw)[1]
    assert spelled(row.messages) == expected
    assert row.answer == ("7" if "solution" in raw and "answer" in raw else None)


@pytest.mark.parametrize(
    "column", ["reasoning", "thinking", "cot", "reasoning_content", "chain_of_thought", "thinking_trajectories"]
)
@pytest.mark.parametrize("prompt", [{"prompt": "q", "response": "r"}, {"instruction": "q", "output": "r"}])
def test_reasoning_stands_before_the_response(column, prompt):
    thought = ["t u"] if column == "thinking_trajectories" else "t u"
    assert spelled(read(prompt | {column: thought})[1].messages) == f"U q|A {THOUGHT}r"


def test_pairs_and_labelled_completions_have_their_context():
    pair = {"prompt": "q", "context": "c", "chosen": "x", "rejected": "y"}
    assert spelled(read(pair, PREFERENCES)[1].prompt) == "U q\n\nc"
    assert spelled(read(pair | {"context": turns("U a", "A b", "U q")}, PREFERENCES)[1].prompt) == "U a|A b|U q"
    voted = {"question": "q", "context": "c", "response_a": "x", "response_b": "y", "winner": "a"}
    assert spelled(read(voted, PREFERENCES)[1].prompt) == "U q\n\nc"
    labelled = {"prompt": "q", "context": "c", "completion": "r", "label": True}
    assert spelled(read(labelled, "unpaired")[1].prompt) == "U q\n\nc"


def test_rows_that_differ_there_alone_are_no_duplicates(make):
    rows = [
        {"question": "q", "context": f"c{i}", "options": [f"x{j}", "y"], "answer": "r"}
        for i in range(3)
        for j in range(3)
    ]
    assert make(rows).counts["dropped"] == {"duplicate": 0}


@pytest.mark.parametrize(
    ("raw", "kind", "reason", "says"),
    [
        (
            {"question": "q", "context": {"title": ["t"]}, "answer": "r"},
            CONVERSATIONS,
            "unread_context",
            "context holds dict",
        ),
        ({"prompt": "q", "context": turns("U a", "A b"), "response": "r"}, CONVERSATIONS, "unread_context", "history"),
        (
            {"prompt": "q", "context": turns("U a"), "chosen": "x", "rejected": "y"},
            PREFERENCES,
            "unread_context",
            "history",
        ),
        (
            {"question": "q", "choices": [None, "x"], "answer": "r"},
            CONVERSATIONS,
            "unread_choices",
            "choices holds list",
        ),
        ({"question": "q", "choices": 4, "answer": "r"}, CONVERSATIONS, "unread_choices", "choices holds int"),
        (
            {"question": "q", "thinking_trajectories": ["a", "b"], "answer": "r"},
            CONVERSATIONS,
            "unread_reasoning",
            "2 items",
        ),
        (
            {"question": "q", "reasoning": {"a": 1}, "answer": "r"},
            CONVERSATIONS,
            "unread_reasoning",
            "reasoning holds dict",
        ),
        ({"question": " ", "context": "c", "answer": "r"}, CONVERSATIONS, "empty_turn", "turn 1"),
    ],
)
def test_what_cannot_be_read_as_text_is_refused_with_a_way_out(raw, kind, reason, says):
    with pytest.raises(Malformed, match=f"^{reason}: .*{says}"):
        read(raw, kind)
    if kind == CONVERSATIONS and reason != "empty_turn":
        prompt = "question" if "question" in raw else "prompt"
        assert read(raw, prompt=prompt, response="answer" if "answer" in raw else "response")
