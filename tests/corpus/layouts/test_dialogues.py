"""Dialogues in one text column: speakers, turns, and which column it is."""

import pytest

from snaketune.corpus.rows import Malformed
from tests.corpus.row_spelling import compact, read, read_all, reasons


@pytest.mark.parametrize(
    "text, inside",
    [
        ("User 1: a\nUser 2: b", "U a|A b"),
        ("User 1: a\n\nUser 2: b\n\nUser 1: c\n\nUser 2: d\n", "U a|A b|U c|A d"),
        ("\n  User 2:a\r\nUser 1:  b  ", "U a|A b"),
        ("Speaker A: a\nSpeaker B: b", "U a|A b"),
        ("Person_1: a\nPerson_2: b", "U a|A b"),
        ("user 1: a\nUSER 2: b\nUser 1: c\nUser 2: d", "U a|A b|U c|A d"),
        ("Human: a\nAssistant: b", "U a|A b"),
        ("Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d", "U a|A b|U c|A d"),
        ("User: a\nBot: b", "U a|A b"),
        ("User 1: a\nAssistant: b", "U a|A b"),
        ("User 1: list:\n- one\nNote: two\n\nUser 2: b\nNext day: c", "U list:\n- one\nNote: two|A b\nNext day: c"),
        ("User 1: see User 2: there\nUser 2: b", "U see User 2: there|A b"),
        ("**User 1:** a\n**User 2**: b", "U a|A b"),
        ("*User 1:* a\n*User 2*: b", "U a|A b"),
        ("* * User 1: * * a\n* * User 2: * * b", "U a|A b"),
        ("User: a\nAssistant: f()\nTool: 5\nAssistant: b", "U a|A f()|T 5|A b"),
        ("User: a\nAssistant: Name one:\nTool: Spade", "U a|A Name one:\nTool: Spade"),
        ("User: Fix:\nFunction: add(a, b)\nAssistant: b", "U Fix:\nFunction: add(a, b)|A b"),
        ("User: a\nAssistant: f()\nTool Output: 5\nObservation: 6\nAssistant: b", "U a|A f()|T 5|T 6|A b"),
    ],
)
def test_read(text, inside):
    layout, row = read({"chat": text})
    assert (layout, compact(row.messages), row.notes) == ("dialogue", inside, ())
    assert read({"chat": text}, layout="dialogue")[1] == row


@pytest.mark.parametrize(
    "remark", ["* * *", "***", "[The next day]", "(She looks up.)", "*At the bar*", "[Later]\n\n* * *"]
)
def test_stage_directions_between_turns_are_removed(remark):
    _, row = read({"chat": f"User 1: a\n\n{remark}\n\nUser 2: b"})
    assert compact(row.messages) == "U a|A b" and row.notes == ("removed_stage_direction",)
    assert compact(read({"chat": f"{remark}\nUser 1: a\nUser 2: b"})[1].messages) == "U a|A b"
    # Such a line may be the end of the last turn, or all of a turn.
    assert compact(read({"chat": f"User 1: a\nUser 2: b\n{remark}"})[1].messages) == f"U a|A b\n{remark}"
    first = remark.partition("\n")[0]
    assert compact(read({"chat": f"User 1: {first}\nUser 2: b"})[1].messages) == f"U {first}|A b"


@pytest.mark.parametrize(
    "text",
    [
        "Here it is:\n[1, 2, 3]",
        "The answer is\n[B]",
        "The answer is\n\n(B)",
        'As JSON.\n["a", "b"]',
        "These two.\n[Anna, Ben]",
        "Names:\n\n[The next day]",
        "They say\n[The next day]",
        "So:\n(x + 1)",
        "f(x) =\n(x + 1)",
    ],
)
def test_answers_in_brackets_stay(text):
    for end in ("", "\nUser 1: c\nUser 2: d"):
        row = read({"chat": f"User 1: a\nUser 2: {text}{end}"})[1]
        assert row.messages[1]["content"] == text and row.notes == ()


def test_the_dialogue_column_is_decided_once_by_content():
    rows = [
        {"likes": "Cats.\nDogs.", "user 1": "User 1: is shy", "best": "User 1: a\nUser 2: b", "id": 3},
        {"likes": "User 1: x\nUser 2: y", "user 1": "shy", "best": "User 1: c\nUser 2: d", "id": 4},
        {"likes": "Cats.", "user 1": "shy", "best": "They talk about cats.", "id": 5},
    ]
    made = read_all(rows)
    assert reasons(made) == ["row", "row", "not_a_dialogue"]
    assert [compact(m.row.messages) for m in made[:2]] == ["U a|A b", "U c|A d"]
    assert "best" in made[2].row.detail


@pytest.mark.parametrize("column", ["instruction", "prompt", "input", "question"])
def test_a_dialogue_inside_a_question_is_no_dialogue(column):
    with pytest.raises(Malformed, match="unknown_layout"):
        read({column: "User 1: a\nUser 2: b", "text": "User 1: a\nUser 2: b"})


@pytest.mark.parametrize(
    "text, reason, says",
    [
        ("Hello.\nUser 1: a\nUser 2: b", "not_a_dialogue", "begins? with a speaker"),
        ("nobody speaks", "not_a_dialogue", "begin with a speaker"),
        ("", "not_a_dialogue", "begin with"),
        (3, "wrong_type", "chat holds int"),
        ("User 1: a\nUser 2: b\nSpeaker 1: c", "unknown_role", "third speaker, 'speaker 1'"),
        ("User 1: a\nUser 2:\nUser 1: c\nUser 2: d", "empty_turn", "turn 2"),
        ("User 1: a\nUser 1: b\nUser 2: c", "two_turns_in_a_row", "1 and 2"),
        ("User 1: a\nUser 2: b\nUser 1: c", "ends_on_user", ""),
        ("Assistant: a\nUser: b\nAssistant: c", "turn_out_of_order", "comes first"),
    ],
)
def test_texts_that_are_no_dialogue(text, reason, says):
    with pytest.raises(Malformed, match=f"{reason}: .*{says}"):
        read({"chat": text}, layout="dialogue", messages="chat")


def test_speakers_map_names_to_roles():
    text = "Agent: Good morning.\nCaller: Hi.\nAgent: How can I help?"
    options = {"layout": "dialogue", "messages": "text", "speakers": {"Agent": "assistant", "Caller": "user"}}
    with pytest.raises(Malformed, match="turn_out_of_order"):
        read({"text": text}, **options)
    made = read({"text": text}, repair=("drop-leading-assistant",), **options)
    assert compact(made[1].messages) == "U Hi.|A How can I help?"
    swapped = read(
        {"text": "User 1: a\nUser 2: b\nUser 1: c"},
        speakers={"User 1": "assistant", "User 2": "user"},
        repair=("drop-leading-assistant",),
    )
    assert compact(swapped[1].messages) == "U b|A c"
