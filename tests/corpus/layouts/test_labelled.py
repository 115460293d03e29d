"""Single completions with a label: unchanged, or as pairs."""

import json

import pytest

from snaketune.errors import SnaketuneError
from tests.corpus.row_spelling import (
    PREFERENCES,
    compact,
    read_all,
    reasons,
    turns,
)

GOOD = [True, 1, 1.0, "true", "True", "1", "1.0", "yes", "good"]
BAD = [False, 0, 0.0, "false", "False", "0", "0.0", "no", "bad"]


@pytest.mark.parametrize(("good", "bad"), zip(GOOD, BAD))
def test_labels(good, bad):
    raws = [{"prompt": "q", "completion": "y", "label": bad}, {"prompt": "q", "completion": "x", "label": good}]
    first, second = read_all(raws, PREFERENCES)
    assert (first.layout, first.row, compact(second.row.chosen)) == ("unpaired", None, "A x")
    assert [made.row.label for made in read_all(raws, "unpaired")] == [False, True]


@pytest.mark.parametrize("label", ["greeting", "", 2, -3, 0.5, ["true"], {"x": 1}, float("nan")])
def test_other_labels_are_refused(label):
    (made,) = read_all([{"prompt": "q", "completion": "x", "label": label}], "unpaired")
    assert made.row.reason == "wrong_type" and "label holds" in made.row.detail


def test_a_bad_completion_is_used_as_a_conversation_only_if_the_config_says_so(make):
    raws = [{"prompt": "q", "completion": "x", "label": False}]
    with pytest.raises(SnaketuneError, match=r"layout: \"prompt-response\"\n  ignore: \[\"label\"\]"):
        make(raws)
    assert make(raws, source={"layout": "prompt-response", "ignore": ["label"]}).train


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
