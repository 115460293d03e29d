"""Raw rows to canonical ones: each layout, the fields mapping, labels and ids."""

import pytest

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts import canonical
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import Malformed, RawRow, content_hash
from tests.corpus.row_spelling import CHAT, read, read_all, reasons, turns


@pytest.mark.parametrize(
    "raw, answer, task",
    [
        ({"messages": CHAT}, None, None),
        ({"messages": CHAT, "answer": "7", "task": "sum"}, "7", "sum"),
        ({"messages": CHAT, "answer": 7.0, "task": 3}, "7", "3"),
        ({"messages": CHAT, "answer": None, "task": " "}, None, None),
        ({"question": "hi", "answer": "x", "task": "sum"}, None, "sum"),
        ({"question": "hi", "response": "x", "answer": "7"}, "7", None),
    ],
)
def test_answer_and_task_columns(raw, answer, task):
    _, row = read(raw)
    assert (row.answer, row.task) == (answer, task)


@pytest.mark.parametrize(
    "raw, notes",
    [
        ({"instruction": "Add", "input": " <No Input> ", "output": "3"}, ("noinput_placeholder",)),
        ({"messages": CHAT}, ()),
    ],
)
def test_notes(raw, notes):
    assert read(raw)[1].notes == notes


SVAMP = {"ID": "chal-1", "Body": "A pack costs 76 dollars.", "Question": "How much?", "Answer": 51.0, "Type": "Sum"}


def test_fields_with_a_template():
    name, row = read(SVAMP, prompt="{Body} {Question}", response="It is {Answer}", answer="Answer", task="Type")
    assert name == "prompt-response"
    assert row.messages == turns("U A pack costs 76 dollars. How much?", "A It is 51")
    assert (row.answer, row.task) == ("51", "Sum")


def test_fields_map_pairs_and_override_the_layout():
    raw = {"messages": CHAT, "q": "hi", "good": "x", "bad": 2, "who": "be brief"}
    _, row = read(raw, kind="preferences", system="who", prompt="q", chosen="good", rejected="bad")
    assert (row.prompt, row.chosen, row.rejected) == (turns("S be brief", "U hi"), turns("A x"), turns("A 2"))


def test_fields_read_nothing_that_they_do_not_name():
    _, row = read({"question": "hi", "answer": "x", "task": "t", "system": "s"}, prompt="question", response="answer")
    assert (row.messages, row.answer, row.task) == (turns("U hi", "A x"), None, None)


def test_fields_with_labels_alone_add_to_the_layout():
    _, row = read({"question": "hi", "answer": "x #### 7", "gold": 7, "kind": "sum"}, answer="gold", task="{kind}s")
    assert (row.messages, row.answer, row.task) == (turns("U hi", "A x #### 7"), "7", "sums")


def test_a_null_label_is_none():
    raw = {"q": "hi", "a": "x", "gold": None, "who": None}
    row = read(raw, prompt="q", response="a", answer="gold", system="who", task="gold")[1]
    assert (row.messages, row.answer, row.task) == (turns("U hi", "A x"), None, None)
    row = read({"prompt": "hi", "response": "x", "gold": None}, answer="gold", system="gold")[1]
    assert (row.messages, row.answer) == (turns("U hi", "A x"), None)
    assert read({"question": "hi", "response": None, "answer": "x"})[1].answer is None


@pytest.mark.parametrize(
    "value, text", [(51.0, "51"), (-0.5, "-0.5"), (3, "3"), (1e300, "1e+300"), (False, "false"), ("5.0", "5.0")]
)
def test_numbers_as_text(value, text):
    assert read({"q": "hi", "a": value}, prompt="q", response="a")[1].messages[-1]["content"] == text


def test_id_depends_on_content_only():
    def hash_of(raw, **options):
        return content_hash(read(raw, **options)[1])

    assert hash_of({"messages": turns("U hi", "A x")}) == hash_of({"prompt": "hi", "response": "x", "task": "t"})
    assert hash_of({"messages": turns("U hi", "A x")}) != hash_of({"messages": turns("U hi", "A x ")})
    preferred = hash_of({"prompt": "hi", "chosen": "x", "rejected": "y"}, kind="preferences")
    assert preferred != hash_of({"prompt": "hi", "chosen": "y", "rejected": "x"}, kind="preferences")


def test_every_instance_is_a_row():
    raw = {
        "instruction": "Add",
        "name": "sum",
        "task": "t",
        "instances": [{"input": "1", "output": "1"}, {"input": [2], "output": "2"}, "3", {"input": "", "output": "4"}],
    }
    made = read_all([raw, {"instruction": "Add", "instances": []}])
    assert reasons(made) == ["row", "wrong_type", "wrong_type", "row", "no_instances"]
    assert [m.raw.number for m in made] == [1, 1, 1, 1, 2]
    assert [(m.row.messages, m.row.task) for m in (made[0], made[3])] == [
        (turns("U Add\n\n1", "A 1"), "t"),
        (turns("U Add", "A 4"), "t"),
    ]
    assert "instance 2" in made[1].row.detail


def test_speakers_give_roles():
    messages = [{"from": "Caller", "value": "hi"}, {"from": "Agent", "value": "x"}]
    speakers = {"Caller": "user", "Agent": "assistant"}
    for raw in (
        {"conversations": messages},
        {"messages": messages},
        {"turns": messages},
    ):
        assert read(raw, speakers=speakers)[1].messages == turns("U hi", "A x")
    for text in ("Caller: hi\nAgent: x", "caller: hi\nAGENT: x"):
        row = read({"chat": text}, layout="dialogue", speakers=speakers, messages="chat")[1]
        assert row.messages == turns("U hi", "A x")
    with pytest.raises(Malformed, match=r"unknown_role.*Caller.*speakers"):
        read({"conversations": messages})


def test_speakers_override_what_a_name_means():
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}]
    swapped = {"assistant": "user", "user": "assistant"}
    assert read({"messages": messages}, speakers=swapped)[1].messages == turns("U hi", "A x")
    conversation = [{"speaker": "USER", "utterance": "hi"}, {"speaker": "SYSTEM", "utterance": "x"}]
    with pytest.raises(Malformed, match="no_assistant_turn"):
        read({"turns": conversation}, speakers={"SYSTEM": "system"})


def test_malformed_raw_rows_are_passed_on():
    made = read_all([Malformed("not_json", "cut off"), {"prompt": "hi", "response": "x"}])
    assert reasons(made) == ["not_json", "row"] and made[0].row.detail == "cut off"


def test_the_first_rows_decide_and_the_others_are_read_lazily(monkeypatch):
    def raws():
        yield from [{"prompt": "hi", "response": "x"}] * 3
        raise AssertionError("read ahead")

    monkeypatch.setattr(canonical, "ROWS_COMPARED", 2)
    source = Source(files=["x"])
    rows = canonical_rows((RawRow("row", 1, raw) for raw in raws()), kind="conversations", source=source, repair=())
    assert [next(rows).row.messages for _ in range(3)] == [turns("U hi", "A x")] * 3
