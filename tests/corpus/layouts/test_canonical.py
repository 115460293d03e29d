"""Raw rows to canonical ones: each layout, the fields mapping, labels and ids."""

import pytest

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import Malformed, RawRow, content_hash
from tests.corpus.row_spelling import ALPACA, CHAT, read, read_all, reasons, turns

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input.\n\n"
    "### Instruction:\nAdd\n\n### Input:\n1, 2\n\n### Response:"
)
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "hello"},
    {"from": "user", "value": "more"},
    {"from": "bot", "value": "no"},
]


@pytest.mark.parametrize(
    "raw, layout, messages",
    [
        ({"messages": CHAT}, "messages", CHAT),
        ({"messages": SHAREGPT}, "messages", CHAT),
        (
            {"messages": turns("U hi", "A call", "T 5", "T 6", "A 11")},
            "messages",
            turns("U hi", "A call", "T 5", "T 6", "A 11"),
        ),
        ({"messages": turns("U  hi\0 ", "A \nhello ")}, "messages", turns("U  hi\0 ", "A \nhello ")),
        ({"messages": turns("U hi", "A x"), "system": "be brief"}, "messages", turns("S be brief", "U hi", "A x")),
        ({"messages": turns("U hi", "A x"), "system": ""}, "messages", turns("U hi", "A x")),
        ({"messages": CHAT, "system": "be brief"}, "messages", CHAT),
        ({"messages": None, "prompt": "hi", "response": "x"}, "prompt-response", turns("U hi", "A x")),
        ({"conversations": SHAREGPT, "id": 3}, "sharegpt", CHAT),
        ({"conversations": CHAT}, "sharegpt", CHAT),
        ({"conversation": CHAT, "model": "m"}, "sharegpt", CHAT),
        (
            {"turns": [{"speaker": "USER", "utterance": "hi", "frames": []}, {"speaker": "SYSTEM", "utterance": "x"}]},
            "turns",
            turns("U hi", "A x"),
        ),
        (
            {"turns": [{"speaker": "human", "text": "hi"}, {"role": "bot", "content": "x"}]},
            "turns",
            turns("U hi", "A x"),
        ),
        (
            {"instruction": "Add", "instances": [{"input": "1, 2", "output": "3"}]},
            "instances",
            turns("U Add\n\n1, 2", "A 3"),
        ),
        ({"instruction": "Add", "input": "", "response": "3", "id": 1}, "alpaca", turns("U Add", "A 3")),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, "alpaca", turns("U Add\n\n1, 2", "A 3")),
        ({"instruction": "Add", "input": " ", "output": "3"}, "alpaca", turns("U Add", "A 3")),
        ({"instruction": "Add", "input": None, "response": "3"}, "alpaca", turns("U Add", "A 3")),
        ({"instruction": "Add", "output": "3"}, "alpaca", turns("U Add", "A 3")),
        ({"instruction": "Add", "input": "<noinput>", "output": "3"}, "alpaca", turns("U Add", "A 3")),
        ({"instruction": "Add", "input": "No input", "output": "3"}, "alpaca", turns("U Add\n\nNo input", "A 3")),
        ({"prompt": "hi", "response": "x"}, "prompt-response", turns("U hi", "A x")),
        ({"prompt": "hi", "completion": "x"}, "prompt-response", turns("U hi", "A x")),
        *(
            ({prompt: "hi", response: "x"}, "prompt-response", turns("U hi", "A x"))
            for prompt in ("prompt", "question", "query")
            for response in ("response", "completion", "answer")
        ),
        ({"prompt": turns("S s", "U hi"), "answer": "3"}, "prompt-response", turns("S s", "U hi", "A 3")),
        ({"prompt": turns("S s", "U hi"), "completion": turns("A x")}, "prompt-response", turns("S s", "U hi", "A x")),
        ({"prompt": ALPACA.format("Add"), "response": "3"}, "prompt-response", turns("U Add", "A 3")),
        ({"prompt": ALPACA_WITH_INPUT, "response": "3"}, "prompt-response", turns("U Add\n\n1, 2", "A 3")),
        ({"input": "hi", "target": "x"}, "prompt-response", turns("U hi", "A x")),
        ({"input": "hi", "output": "x"}, "prompt-response", turns("U hi", "A x")),
        ({"prompt": "hi", "completion": "x", "label": "greeting"}, "prompt-response", turns("U hi", "A x")),
        ({"question": "hi", "answer": "so\n#### 7"}, "prompt-response", turns("U hi", "A so\n#### 7")),
        ({"prompt": "See " + ALPACA, "response": "3"}, "prompt-response", turns("U See " + ALPACA, "A 3")),
    ],
)
def test_conversations(raw, layout, messages):
    name, row = read(raw)
    assert (name, row.messages) == (layout, messages)
    assert read(raw, layout=layout)[1] == row
    with pytest.raises(Malformed, match="wrong_kind"):
        read(raw, kind="preferences")


@pytest.mark.parametrize(
    "raw, layout, expected",
    [
        ({"prompt": "hi", "chosen": "x", "rejected": "y"}, "pairs", ("U hi", "A x", "A y")),
        ({"question": "hi", "chosen": "x", "rejected": "y", "system": "s"}, "pairs", ("S s|U hi", "A x", "A y")),
        (
            {"prompt": turns("S s", "U hi"), "chosen": turns("A x"), "rejected": turns("A y", "U z", "A w")},
            "pairs",
            ("S s|U hi", "A x", "A y|U z|A w"),
        ),
        ({"prompt": turns("U hi"), "chosen": "x", "rejected": turns("A y")}, "pairs", ("U hi", "A x", "A y")),
        ({"chosen": turns("U hi", "A x"), "rejected": turns("U hi", "A y")}, "pairs", ("U hi", "A x", "A y")),
        (
            {"chosen": turns("U a", "A b", "U c", "A x"), "rejected": turns("U a", "A b", "U c", "A y", "U e", "A f")},
            "pairs",
            ("U a|A b|U c", "A x", "A y|U e|A f"),
        ),
        (
            {"prompt": "hi", "chosen": turns("U hi", "A x"), "rejected": turns("U hi", "A y")},
            "pairs",
            ("U hi", "A x", "A y"),
        ),
        (
            {"prompt": turns("U hi"), "chosen": turns("U hi", "A x"), "rejected": turns("U hi", "A y")},
            "pairs",
            ("U hi", "A x", "A y"),
        ),
        (
            {"instruction": "Add", "input": "1", "output": "x", "chosen": "x", "rejected": "y"},
            "pairs",
            ("U Add\n\n1", "A x", "A y"),
        ),
        ({"prompt": ALPACA.format("Add"), "chosen": "x", "rejected": "y"}, "pairs", ("U Add", "A x", "A y")),
        (
            {"prompt": "hi", "chosen": {"role": "assistant", "content": "x"}, "rejected": {"text": "y"}},
            "pairs",
            ("U hi", "A x", "A y"),
        ),
        ({"prompt": "hi", "chosen": {"text": "x", "role": None}, "rejected": "y"}, "pairs", ("U hi", "A x", "A y")),
        (
            {
                "prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
                "chosen": " x",
                "rejected": " y",
            },
            "pairs",
            ("U a|A b|U c", "A x", "A y"),
        ),
        (
            {
                "prompt": "Human: a\n\nAssistant:",
                "chosen": "\n\nHuman: a\n\nAssistant: x",
                "rejected": "\n\nHuman: a\n\nAssistant: y",
            },
            "pairs",
            ("U a", "A x", "A y"),
        ),
        (
            {
                "chosen": "\n\nHuman: Hi\nyou\n\nthere\n\nAssistant: Hello\n\nHuman: Who?\n\nAssistant: Me ",
                "rejected": "\n\nHuman: Hi\nyou\n\nthere\n\nAssistant: Hello\n\nHuman: Who?\n\nAssistant:  You",
            },
            "transcripts",
            ("U Hi\nyou\n\nthere|A Hello|U Who?", "A Me ", "A  You"),
        ),
        (
            {"chosen": "Human: a\n\nAssistant: x", "rejected": "Human: a\n\nAssistant: y"},
            "transcripts",
            ("U a", "A x", "A y"),
        ),
    ],
)
def test_preferences(raw, layout, expected):
    name, row = read(raw, kind="preferences")
    assert name == layout
    assert (row.prompt, row.chosen, row.rejected) == tuple(turns(*part.split("|")) for part in expected)
    assert read(raw, kind="preferences", layout=layout)[1] == row
    with pytest.raises(Malformed, match="wrong_kind"):
        read(raw)


@pytest.mark.parametrize(
    "raw, answer, task",
    [
        ({"messages": CHAT}, None, None),
        ({"messages": CHAT, "answer": "7", "task": "sum"}, "7", "sum"),
        ({"messages": CHAT, "answer": 7.0, "task": 3}, "7", "3"),
        ({"messages": CHAT, "answer": None, "task": " "}, None, None),
        ({"messages": CHAT, "answer": ["7"]}, None, None),
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
        ({"prompt": ALPACA.format("Add"), "response": "3"}, ("unwrapped_alpaca_template",)),
        ({"instruction": "Add", "input": " <No Input> ", "output": "3"}, ("noinput_placeholder",)),
        ({"messages": CHAT, "answer": {"value": 7}}, ("answer_column_not_text",)),
        ({"messages": CHAT}, ()),
    ],
)
def test_notes(raw, notes):
    assert read(raw)[1].notes == notes


GOOD = [True, 1, 1.0, "true", "True", "TRUE", "1", "1.0", "yes", "good"]
BAD = [False, 0, 0.0, "false", "False", "FALSE", "0", "0.0", "no", "bad"]


@pytest.mark.parametrize("good, bad", zip(GOOD, BAD))
@pytest.mark.parametrize("column", ["completion", "response"])
def test_labels_of_unpaired_completions(good, bad, column):
    raws = [{"prompt": "hi", column: "y", "label": bad}, {"prompt": "hi", column: "x", "label": good}]
    for layout in ("auto", "unpaired"):
        first, second = read_all(raws, "preferences", layout=layout)
        assert (first.layout, first.row) == ("unpaired", None)
        assert (second.row.chosen, second.row.rejected) == (turns("A x"), turns("A y"))
        # A bad completion is never used as a conversation.
        assert reasons(read_all(raws, layout=layout)) == ["wrong_kind"] * 2
    assert reasons(read_all(raws, layout="prompt-response")) == ["row", "row"]


@pytest.mark.parametrize("label", ["greeting", "", 2, -3, 0.5, ["true"], {"x": 1}, float("nan")])
def test_other_labels_are_ignored(label):
    raw = {"prompt": "hi", "completion": "x", "label": label}
    assert read(raw)[0] == "prompt-response"
    with pytest.raises(Malformed, match=r"wrong_type: label holds .*expected true or false"):
        read(raw, kind="preferences", layout="unpaired")


def test_a_label_needs_a_prompt():
    assert read({"question": "hi", "answer": "x", "label": 1})[0] == "prompt-response"


SVAMP = {"ID": "chal-1", "Body": "A pack costs 76 dollars.", "Question": "How much?", "Answer": 51.0, "Type": "Sum"}


def test_fields_with_a_template():
    name, row = read(SVAMP, prompt="{Body} {Question}", response="It is {Answer}", answer="Answer", task="Type")
    assert name == "fields"
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
        {"chat": "Caller: hi\nAgent: x"},
        {"chat": "caller: hi\nAGENT: x"},
    ):
        assert read(raw, speakers=speakers)[1].messages == turns("U hi", "A x")
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


def test_layouts_may_be_mixed_in_a_file():
    tree = {"message_id": "1", "role": "prompter", "text": "q", "parent_id": None}
    reply = {"message_id": "2", "role": "assistant", "text": "a", "parent_id": "1"}
    made = read_all([tree, {"prompt": "hi", "response": "x"}, {"messages": CHAT}, reply])
    assert [(m.raw.number, m.layout) for m in made] == [
        (2, "prompt-response"),
        (3, "messages"),
        (1, "message-tree"),
        (4, "message-tree"),
    ]


def test_rows_are_read_lazily():
    def raws():
        yield {"prompt": "hi", "response": "x"}
        raise AssertionError("read ahead")

    source = Source(files=["x"])
    rows = canonical_rows((RawRow("row", 1, raw) for raw in raws()), kind="conversations", source=source, repair=())
    assert next(rows).row.messages == turns("U hi", "A x")
