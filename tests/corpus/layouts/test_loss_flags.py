"""Weights of turns in the loss, and flags of supervision, through cleaning, repair and the comparison of rows."""

import pytest


def turns(*weights, key="weight", texts=("a", "b", "c", "d")):
    roles = ("user", "assistant", "user", "assistant")
    return [
        {"role": role, "content": text} | ({} if weight == "-" else {key: weight})
        for role, text, weight in zip(roles, texts, weights)
    ]


def supervised(row, column="messages"):
    return [turn["supervised"] for turn in row[column]]


@pytest.mark.parametrize("key", ["weight", "loss_weight", "train", "loss", "training"])
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (0.0, 1.0), (False, True), (0, None), (False, "-")])
def test_weights_are_yes_or_no(make, key, no, yes):
    (row,) = make([{"messages": turns("-", no, "-", yes, key=key)}]).train
    assert supervised(row) == [True, False, True, True]


@pytest.mark.parametrize("key", ["weight", "loss_weight", "loss_scale"])
def test_numbers_are_weights(make, key):
    """A row with other weights than 0 and 1 gives all rows the column; without any, rows are as before."""
    rows = [{"messages": turns("-", 0.5, "-", 2, key=key)}, {"messages": turns(0, "-", "-", 0)}]
    built = make(rows)
    assert [[turn["weight"] for turn in row["messages"]] for row in built.train] == [[1, 0.5, 1, 2], [0, 1, 1, 0]]
    assert built.counts["kept"] == {"train": 2, "held_out": 0}
    (plain,) = make(rows[1:]).train
    assert supervised(plain) == [False, True, True, False]
    # The same rows have the same ids.
    assert plain["id"] == built.train[1]["id"]


@pytest.mark.parametrize("weight", [-1, "0", "yes", [1], 101])
def test_other_weights_are_quarantined(make, weight):
    rows = [{"messages": turns("-", weight, "-", 1)}, {"messages": turns("-", 1, "-", 1)}]
    built = make(rows, max_quarantined_fraction=1.0)
    (record,) = built.quarantine
    assert record["reason"] == "unsupported_weight"
    assert "turn 2" in record["detail"] and "expected a number from 0 to 100" in record["detail"]


@pytest.mark.parametrize("key", ["loss", "train", "training", "output_with_loss"])
def test_flags_are_yes_or_no(make, key):
    """A number in `loss` may be a loss that somebody measured."""
    built = make([{"messages": turns("-", value, key=key)} for value in (0.5, 1)], max_quarantined_fraction=1.0)
    (record,) = built.quarantine
    assert "expected 1 or 0, true or false" in record["detail"]


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_weights_in_pairs_are_quarantined(make, column):
    row = {
        name: [{"role": "user" if name == "prompt" else "assistant", "content": name}]
        for name in ("prompt", "chosen", "rejected")
    }
    bad = {**row, column: [row[column][0] | {"weight": 0.5}]}
    built = make([bad, row], kind="preferences", max_quarantined_fraction=0.5)
    (record,) = built.quarantine
    assert "has weight 0.5; completions are compared as wholes" in record["detail"]
    assert len(built.train) == 1


@pytest.mark.parametrize("mask", [0, 1, True, False])
def test_a_mask_that_may_mean_either_is_quarantined(make, mask):
    built = make([{"messages": turns("-", value, key="mask")} for value in (mask, None)], max_quarantined_fraction=1.0)
    (record,) = built.quarantine
    assert record["reason"] == "unsupported_weight" and "turn 2: mask may mean" in record["detail"]


@pytest.mark.parametrize("key", ["output_with_loss", "loss", "weight"])
def test_an_answer_in_an_exchange_may_be_unsupervised(make, key):
    exchanges = [{"input": "a", "output": "b", key: 0}, {"input": "c", "output": "d", key: 1}]
    (row,) = make([{"conversation": exchanges}]).train
    assert supervised(row) == [True, False, True, True]


def test_a_turn_that_is_supervised_in_parts_is_quarantined(make):
    detail = [{"begin_offset": 0, "end_offset": 0, "train": False}]
    rows = [{"messages": turns("-", value, key="train_detail")} for value in (detail, [], None)]
    built = make(rows, max_quarantined_fraction=1.0)
    (record,) = built.quarantine
    assert record["reason"] == "unsupported_weight" and "turn 2: train_detail supervises parts" in record["detail"]
    assert supervised(built.train[0]) == [True, True]


def test_weights_that_contradict_each_other_are_quarantined(make):
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "weight": 1, "train": False},
        ]
    }
    built = make([row, {"messages": turns("-", 1)}], max_quarantined_fraction=1.0)
    assert [record["reason"] for record in built.quarantine] == ["unsupported_weight"]


def test_rows_that_differ_in_weights_are_no_duplicates(make):
    rows = [{"messages": turns("-", *weights)} for weights in ((1, "-", 1), (0, "-", 1), (1, "-", 0), ("-", "-", None))]
    built = make(rows)
    # The last row equals the first.
    assert built.counts["dropped"] == {"duplicate": 1}
    assert len({row["id"] for row in built.train}) == 3


def test_weights_survive_cleaning_and_template_removal(make):
    texts = ("a@example.org", "b", "[INST] c [/INST]", "d</s>")
    built = make([{"messages": turns("-", 0, "-", 1, texts=texts)}], cleaning={"mask_personal_data": ["email"]})
    assert built.train[0]["messages"][0]["content"] == "[EMAIL]"
    assert supervised(built.train[0]) == [True, False, True, True]


def test_turns_of_one_role_are_merged_only_if_both_are_supervised_or_neither(make):
    def row(*weights):
        answers = [{"role": "assistant", "content": str(n), "weight": weight} for n, weight in enumerate(weights)]
        return {"messages": [{"role": "user", "content": f"q{weights}"}, *answers]}

    built = make([row(0, 0), row(1, 1), row(0, 1)], repair=["merge-same-role"], max_quarantined_fraction=1.0)
    assert [supervised(row) for row in built.train] == [[True, False], [True, True]]
    assert [record["reason"] for record in built.quarantine] == ["two_turns_in_a_row"]


def test_weights_of_whole_conversations_do_not_change_the_prompt(make):
    chosen, rejected = turns(1, 0, "-", 1), turns("-", 1, "-", 1, texts=("a", "b", "c", "e"))
    (row,) = make([{"chosen": chosen, "rejected": rejected}], kind="preferences").train
    assert [turn["content"] for turn in row["prompt"]] == ["a", "b", "c"]
    same = make([{"chosen": chosen, "rejected": turns(1, 1, 1, 0)}, {"chosen": chosen, "rejected": rejected}],
                kind="preferences", max_quarantined_fraction=1.0)  # fmt: skip
    assert [record["reason"] for record in same.quarantine] == ["identical_chosen_and_rejected"]
