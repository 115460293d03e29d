"""Single completions with a label, in the shapes of public data sets: read as pairs.

The shapes are those that the data sets' cards and the documentation of other trainers show; the texts are our own.
"""

import json

import pytest

from tests.corpus.row_spelling import (
    CONVERSATIONS,
    PREFERENCES,
    compact,
    read_all,
    reasons,
    sharegpt,
    turns,
    typed,
)

KTO = {
    "kto-mix-14k": lambda text, good: {"prompt": turns("U q"), "completion": turns(f"A {text}"), "label": good},
    "llamafactory kto_en_demo": lambda text, good: {"messages": turns("U q", f"A {text}"), "label": good},
    "sharegpt": lambda text, good: {"conversations": sharegpt("U q", f"A {text}"), "label": good},
    "sharegpt as numbers": lambda text, good: {"conversations": sharegpt("U q", f"A {text}"), "label": int(good)},
    "messages as words": lambda text, good: {"messages": turns("U q", f"A {text}"), "label": str(good).lower()},
    "llamafactory alpaca": lambda text, good: {"instruction": "q", "input": "", "output": text, "kto_tag": good},
    "axolotl chatml.argilla": lambda text, good: {"instruction": "q", "completion": text, "label": good},
    "axolotl chatml.intel": lambda text, good: {"question": "q", "completion": text, "label": good},
    "question and answer": lambda text, good: {"question": "q", "answer": text, "label": good},
    "in typed parts": lambda text, good: {"messages": typed("U q", f"A {text}"), "label": good},
}


@pytest.mark.parametrize("spell", KTO.values(), ids=KTO)
def test_labels_of_single_completions(spell):
    raws = [spell("x", True), spell("y", False)]
    made = read_all(raws, PREFERENCES)
    assert reasons(made) == ["row", "part"]
    row = made[0].row
    assert (compact(row.prompt), compact(row.chosen), compact(row.rejected)) == ("U q", "A x", "A y")
    lone = read_all(raws, "unpaired")
    assert [(compact(one.row.prompt), compact(one.row.completion), one.row.label) for one in lone] == [
        ("U q", "A x", True),
        ("U q", "A y", False),
    ]
    # A bad completion is never used as a conversation.
    assert reasons(read_all(raws, CONVERSATIONS)) == ["wrong_kind"] * 2


def test_the_label_of_a_conversation_is_that_of_its_last_turn():
    raws = [
        {"system": "s", "messages": turns("U a", "A b", "U q", "A y"), "label": 0},
        {"system": "s", "messages": turns("U a", "A b", "U q", "A x"), "label": 1},
        {"system": "s", "messages": turns("U a", "A other", "U q", "A z"), "label": 0},
        {"system": "s", "messages": turns("U a", "A b", "U q"), "label": 1},
    ]
    made = read_all(raws, PREFERENCES)
    assert reasons(made) == ["part", "row", "unpaired", "ends_on_user"]
    row = made[1].row
    assert (compact(row.prompt), compact(row.chosen), compact(row.rejected)) == ("S s|U a|A b|U q", "A x", "A y")


@pytest.mark.parametrize("system", ["system", "system_prompt", "who"])
def test_completions_under_another_system_text_are_no_pair(system):
    raws = [
        {"prompt": "q", "completion": "x", "label": True, system: "be brief"},
        {"prompt": "q", "completion": "y", "label": False, system: "be long"},
        {"prompt": "q", "completion": "z", "label": False, system: "be brief"},
    ]
    made = read_all(raws, PREFERENCES, **({"system": "who"} if system == "who" else {}))
    assert reasons(made) == ["row", "unpaired", "part"]
    assert (compact(made[0].row.prompt), compact(made[0].row.rejected)) == ("S be brief|U q", "A z")


def test_completions_under_other_tools_are_no_pair():
    def row(text, name):
        tools = [{"name": name, "parameters": {}}]
        return {
            "prompt": "q",
            "completion": text,
            "label": text == "x",
            "tools": tools if text != "z" else str(json.dumps(tools)),
        }

    made = read_all([row("x", "f"), row("y", "g"), row("z", "f")], PREFERENCES)
    assert reasons(made) == ["row", "unpaired", "part"]
    assert made[0].row.tools == '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'


def test_weights_do_not_change_the_prompt():
    raws = [{"messages": turns("U q", "A b", "U c", f"A {text}"), "label": text == "x"} for text in "xy"]
    raws[1]["messages"][1] |= {"weight": 0}
    assert reasons(read_all(raws, PREFERENCES)) == ["row", "part"]
