"""Columns that are part of a prompt or of its response: context, choices, reasoning, and which of two answers is trained."""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, compact, read, turns

THOUGHT = "<think>\nt u\n</think>\n\n"
READ = {
    "question and context": ({"question": "q", "context": "c", "answer": "r"}, "U q\n\nc|A r"),
    "contexts": ({"question": "q", "contexts": ["c", " ", "d"], "answer": "r"}, "U q\n\nc\n\nd|A r"),
    "a context that the prompt holds": ({"prompt": "By c alone: q", "context": "c\n", "response": "r"}, "U By c alone: q|A r"),
    "passage": ({"question": "q", "passage": "c", "answer": "yes"}, "U q\n\nc|A yes"),
    "an empty input and a context": ({"instruction": "q", "input": "", "context": "c", "output": "r"}, "U q\n\nc|A r"),
    "an input and a context": ({"instruction": "q", "input": "i", "context": "c", "output": "r"}, "U q\n\ni\n\nc|A r"),
    "article, question and options": (
        {"article": "c d", "question": "q", "options": ["x", "y"], "answer": "A"},
        "U q\n\nc d\n\nA. x\nB. y|A A",
    ),
    "choices with labels": (
        {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "1"},
        "U q\n\n1. x\n2. y|A 1",
    ),
    "arc": (
        {"question": "q", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"},
        "U q\n\nA. x\nB. y|A B",
    ),
    "choices by letter": ({"question": "q", "options": {"A": "x", "B": 7}, "answer": "B"}, "U q\n\nA. x\nB. 7|A B"),
    "choices as objects": (
        {"question": "q", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}], "answer": "B"},
        "U q\n\nA. x\nB. y|A B",
    ),
    "choices with letters of their own": ({"question": "q", "options": ["A)x", "B)y"], "answer": "A"}, "U q\n\nA)x\nB)y|A A"),
    "choices as a text": ({"problem": "q", "options": "a ) x , b ) y", "solution": "r"}, "U q\n\na ) x , b ) y|A r"),
    "choices that the prompt holds": (
        {"prompt": "q\n\n(A) Xx (B) yy", "choices": ["xx", "yy"], "response": "r"},
        "U q\n\n(A) Xx (B) yy|A r",
    ),
    "choices whose words the prompt has": (
        {"prompt": "Do you know it, yes or no?", "choices": ["yes", "no"], "response": "A"},
        "U Do you know it, yes or no?\n\nA. yes\nB. no|A A",
    ),
    "choices that begin like labels": (
        {"question": "q", "options": ["1.4 m", "2.8 m", "U.S. Navy", "A. Jones"], "answer": "C"},
        "U q\n\nA. 1.4 m\nB. 2.8 m\nC. U.S. Navy\nD. A. Jones|A C",
    ),
    "times as choices": ({"question": "q", "options": ["1:2", "2:4"], "answer": "B"}, "U q\n\nA. 1:2\nB. 2:4|A B"),
    "choices in the spelling of Python": ({"question": "q", "options": "['x', 'y']", "answer": "B"}, "U q\n\nA. x\nB. y|A B"),
    "choices of which some are empty": ({"question": "q", "options": {"A": "x", "B": "y", "C": "", "D": None}, "answer": "B"},
        "U q\n\nA. x\nB. y|A B"),
    "what an API answered": (
        {"prompt": "q", "completion": "r", "choices": [{"index": 0, "text": "r", "finish_reason": "stop"}]},
        "U q|A r",
    ),
    "settings of a model": ({"prompt": "q", "response": "r", "options": {"temperature": 0.8, "num_predict": 128}}, "U q|A r"),
    "two rival answers": ({"prompt": "q", "A": "r", "B": "other", "response": "r"}, "U q|A r"),
    "numbers in the place of texts": (
        {"prompt": "q", "response": "r", "paragraph": "3", "article": 17, "options": "4", "context": "0", "reasoning": "1"},
        "U q|A r",
    ),
    "a link": ({"prompt": "q", "response": "r", "context": "https://example.org/a"}, "U q|A r"),
    "a context that is in the system turn": (
        {"system": "Use this: c d e", "question": "q", "context": "c  d e", "answer": "r"},
        "S Use this: c d e|U q|A r",
    ),
    "a paragraph that is the response": (
        {"instruction": "Write a paragraph.", "output": "It is so.", "paragraph": "It is so."},
        "U Write a paragraph.|A It is so.",
    ),
    "passages with titles": (
        {"question": "q", "context": [{"title": "t", "text": "c"}, {"text": "d"}], "answer": "r"},
        "U q\n\nt\nc\n\nd|A r",
    ),
    "hotpotqa": (
        {"question": "q", "context": {"title": ["t", "u"], "sentences": [["a. ", "b."], ["c."]]}, "answer": "r"},
        "U q\n\nt\na. b.\n\nu\nc.|A r",
    ),
    "a way to reason": ({"prompt": "q", "response": "r", "thinking": "enabled", "cot": "Let's think step by step."}, "U q|A r"),
    "reasoning in other tags": (
        {"prompt": "q", "response": "<reasoning>so it is</reasoning>r", "cot": "so it is"},
        "U q|A <reasoning>so it is</reasoning>r",
    ),
    "reasoning that the response begins with": ({"prompt": "q", "response": "t u. So r", "cot": "t u."}, "U q|A t u. So r"),
    "reasoning in its tags": ({"prompt": "q", "response": "r", "reasoning": "<think>\nt u\n</think>"}, f"U q|A {THOUGHT}r"),
    "mmlu": (
        {"question": "q", "subject": "s", "choices": ["x", "y", "z", "w"], "answer": 2},
        "U q\n\nA. x\nB. y\nC. z\nD. w|A C",
    ),
    "boolq": ({"question": "q", "passage": "c d", "answer": True}, "U q\n\nc d|A true"),
    "an answer that is a number": ({"question": "1 + 1?", "answer": 2}, "U 1 + 1?|A 2"),
    "numbers of all kinds": ({"instruction": 7, "input": 0.5, "output": 3.0}, "U 7\n\n0.5|A 3"),
    "a number as a message": ({"messages": [*turns("U q"), {"role": "assistant", "content": 42}]}, "U q|A 42"),
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
    assert compact(row.messages) == expected
    if "solution" in raw:
        assert row.answer == raw.get("answer")


@pytest.mark.parametrize(
    "column", ["reasoning", "thinking", "cot", "reasoning_content", "chain_of_thought", "thinking_trajectories"]
)
@pytest.mark.parametrize("prompt", [{"prompt": "q", "response": "r"}, {"instruction": "q", "output": "r"}])
def test_reasoning_precedes_the_response(column, prompt):
    thought = ["t u"] if column == "thinking_trajectories" else "t u"
    assert compact(read(prompt | {column: thought})[1].messages) == f"U q|A {THOUGHT}r"


def test_pairs_and_labelled_completions_have_their_context():
    pair = {"prompt": "q", "context": "c", "chosen": "x", "rejected": "y"}
    assert compact(read(pair, PREFERENCES)[1].prompt) == "U q\n\nc"
    assert compact(read(pair | {"context": turns("U a", "A b", "U q")}, PREFERENCES)[1].prompt) == "U a|A b|U q"
    voted = {"question": "q", "context": "c", "response_a": "x", "response_b": "y", "winner": "a"}
    assert compact(read(voted, PREFERENCES)[1].prompt) == "U q\n\nc"
    labelled = {"prompt": "q", "context": "c", "completion": "r", "label": True}
    assert compact(read(labelled, "unpaired")[1].prompt) == "U q\n\nc"


def test_rows_that_differ_only_in_context_are_no_duplicates(make):
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
            {"prompt": "q", "context": ["Hi", "Hello"], "response": "r"},
            CONVERSATIONS,
            "unread_context",
            "fields.context",
        ),
        (
            {"prompt": "q", "context": turns("U a"), "chosen": "x", "rejected": "y"},
            PREFERENCES,
            "unread_context",
            "history",
        ),
        (
            {"question": "q", "choices": [{"a": 1}, {"b": 2}], "answer": "r"},
            CONVERSATIONS,
            "unread_choices",
            "holds list",
        ),
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
        (
            {"prompt": "q", "response": "r", "score": 3, "reasoning": "It is so."},
            CONVERSATIONS,
            "unread_reasoning",
            "a judge",
        ),
        ({"question": " ", "context": "c", "answer": "r"}, CONVERSATIONS, "empty_turn", "turn 1"),
    ],
)
def test_columns_without_text_are_refused_with_advice(raw, kind, reason, says):
    with pytest.raises(Malformed, match=f"^{reason}: .*{says}"):
        read(raw, kind)
    if kind == CONVERSATIONS and reason != "empty_turn":
        prompt = "question" if "question" in raw else "prompt"
        assert read(raw, prompt=prompt, response="answer" if "answer" in raw else "response")
