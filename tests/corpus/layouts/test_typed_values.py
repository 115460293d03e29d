"""Values that are typed once, for all layouts: choices, arguments of calls, reasoning, missing values, numbers, system text."""

import json

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, read, read_all, turns

METALS = ["wood", "iron", "glass", "wool"]
CALL = {"name": "lookup", "arguments": {"city": "Lima"}}


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"choices": METALS, "answer": "iron"}, "iron"),
        ({"choices": METALS, "answer": "B"}, "B"),
        ({"choices": METALS, "answer": 0.5}, "0.5"),
        ({"choices": [2, 4, 8], "answer": 2}, "2"),
        ({"choices": ["one of 1", "two"], "answer": "1"}, "B"),
        ({"choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answer": "1"}, "1"),
        ({"choices": ["x", "y"], "answer": True}, "true"),
        ({"answer": 1}, "1"),
    ],
)
def test_labels_texts_and_other_numbers_stay(columns, answer):
    assert read({"question": "q"} | columns)[1].messages[-1]["content"] == answer


def answers(*rows):
    return [result.row.messages[-1]["content"] for result in read_all([{"question": "q"} | row for row in rows])]


def test_an_integer_beside_texts_is_an_index_even_if_a_text_is_that_number():
    numbers = {"choices": ["1", "2", "3", "4"]}
    assert answers(*(numbers | {"answer": index} for index in range(4))) == ["A", "B", "C", "D"]
    # Texts are answers, of which none may be an index elsewhere in the file.
    assert answers(numbers | {"answer": "1"}, numbers | {"answer": "4"}) == ["1", "4"]


@pytest.mark.parametrize(
    "rows",
    [
        # As in a CSV.
        ({"choices": ["1", "2"], "answer": "1"}, {"choices": METALS, "answer": "0"}),
        ({"choices": ["1", "2"], "answer": 1}, {"choices": ["8", "9"], "answer": 9}),
    ],
)
def test_numbers_that_are_indexes_here_and_texts_there_are_refused(rows):
    with pytest.raises(Malformed, match=r"ambiguous_choices: answer holds numbers .*write the letters"):
        answers(*rows)


@pytest.mark.parametrize("rows", [(1, 4), (4,), ("2", "4")])
def test_indexes_that_count_from_one_are_refused(rows):
    with pytest.raises(Malformed, match=r"ambiguous_choices: answer holds .*count from 1"):
        answers(*({"choices": METALS, "answer": index} for index in rows))


def test_a_number_beside_choices_in_one_text_is_a_label_or_text_in_it():
    listed = {"question": "q", "choices": "A) 38 B) 27.5 C) 4"}
    assert read(listed | {"answer": "38"})[1].messages[-1]["content"] == "38"
    for index in (0, "1", 27):
        with pytest.raises(
            Malformed, match=r"unknown_choice: answer is .*, which choices doesn't hold; write the answer's l"
        ):
            read(listed | {"answer": index})
    assert read({"question": "q", "choices": ["x"], "answer": 0})[1].messages[-1]["content"] == "A"


@pytest.mark.parametrize("answer", [-1, 5, "7"])
def test_a_number_that_is_no_choice_is_malformed(answer):
    with pytest.raises(Malformed, match=r"unknown_choice: answer is .*, which is none of 4 choices"):
        read({"question": "q", "choices": METALS, "answer": answer})


@pytest.mark.parametrize("arguments", [{"city": "Lima"}, '{"city": "Lima"}', json.dumps('{"city": "Lima"}')])
def test_arguments_are_an_object(arguments):
    messages = [*turns("U q"), {"role": "assistant", "content": "", "tool_calls": [CALL | {"arguments": arguments}]}]
    text = read({"messages": messages})[1].messages[1]["content"]
    assert json.loads(text.splitlines()[1]) == CALL


@pytest.mark.parametrize("arguments", [[1, 2], "[1]", "null", "3", '"Lima"', "Lima", True])
def test_other_arguments_are_refused(arguments):
    messages = [*turns("U q"), {"role": "assistant", "content": "", "tool_calls": [CALL | {"arguments": arguments}]}]
    with pytest.raises(Malformed, match="bad_tool_call"):
        read({"messages": messages})


def answer(**keys):
    return {"messages": [*turns("U q"), {"role": "assistant"} | keys]}


def test_reasoning_is_opened_and_closed():
    for text in ("2 and 2.\n</think>\n\n4", "2 and 2</think>4"):
        with pytest.raises(Malformed, match=r"reasoning_not_opened: turn 2 .*`repair: \[open-reasoning\]`"):
            read(answer(content=text))
        (made,) = read_all([answer(content=text)], CONVERSATIONS, repair=("open-reasoning",))
        assert made.row.messages[1]["content"] == f"<think>\n{text}"
        assert made.row.notes == ("repaired_open_reasoning",)
    with pytest.raises(Malformed, match="reasoning_not_closed: turn 2"):
        read(answer(content="<think>\nLet me see, for a long"))
    assert read(answer(content="The tag <think> opens reasoning."))
    pair = {"prompt": "q", "chosen": "so\n</think>\n\nyes", "rejected": "no"}
    with pytest.raises(Malformed, match="reasoning_not_opened"):
        read(pair, PREFERENCES)
    (made,) = read_all([pair], PREFERENCES, repair=("open-reasoning",))
    assert made.row.chosen[0]["content"] == "<think>\nso\n</think>\n\nyes"


def test_texts_that_stand_for_missing_values_are_counted(make):
    rows = [
        {"instruction": f"q{i}", "output": text} for i, text in enumerate(("fine", "nan", "NaN", "None", "none of it"))
    ]
    built = make(rows)
    assert built.counts["notes"] == {"missing_as_text": 3}
    assert [row["messages"][1]["content"] for row in built.train][1] == "nan"


def test_a_comma_that_may_separate_thousands_is_ambiguous():
    rated = {"prompt": "q", "completions": [{"text": "x", "score": "1,234"}, {"text": "y", "score": "987"}]}
    for raw in (
        rated,
        {"prompt": "q", "chosen": "x", "rejected": "y", "chosen_score": "987", "rejected_score": "1,234"},
    ):
        with pytest.raises(Malformed, match="ambiguous_number: '1,234'"):
            read(raw, PREFERENCES)
