"""Corpora of labelled completions: cleaned, without duplicates, split by prompt."""

import pytest

from snaketune.corpus.rows import MESSAGES, SCHEMAS
from snaketune.errors import SnaketuneError
from snaketune.tables import read_table


def row(prompt: str, completion: str, label, **columns) -> dict:
    return {"prompt": prompt, "completion": completion, "label": label, **columns}


def turn(role: str, content: str) -> list[dict]:
    return [{"role": role, "content": content}]


def summary(rows: list[dict]) -> list[tuple[str, str, bool]]:
    return [(row["prompt"][-1]["content"], row["completion"][-1]["content"], row["label"]) for row in rows]


def test_texts_and_turns_are_read_alike_and_keep_their_order(make):
    rows = [
        row("q", "x", True),
        row(turn("user", "q"), turn("assistant", "y"), False),
        row(turn("system", "s") + turn("user", "r"), turn("assistant", "x"), 1),
        row("q", turn("assistant", "z"), "false"),
    ]
    made = make(rows, kind="unpaired")
    assert summary(made.train) == [("q", "x", True), ("q", "y", False), ("r", "x", True), ("q", "z", False)]
    assert made.train[2]["prompt"][0] == {"role": "system", "content": "s", "supervised": True}
    assert read_table(made.folder / "train-00000.arrow").schema == SCHEMAS["unpaired"]
    assert SCHEMAS["unpaired"].field("completion").type == MESSAGES


def test_duplicates_have_the_same_text_and_label(make):
    rows = [row("q", "x", True), row("q", "x", False), row("q", "x", True), row("q", "y", True)]
    made = make(rows, kind="unpaired")
    assert summary(made.train) == [("q", "x", True), ("q", "x", False), ("q", "y", True)]
    assert made.counts["dropped"]["duplicate"] == 1
    assert len({row["id"] for row in made.train}) == 3


def test_completions_of_a_prompt_are_on_one_side_of_the_split(make):
    rows = [row(f"q{n}", f"{n} {good}", good) for n in range(60) for good in (True, False)]
    made = make(rows, kind="unpaired", held_out=0.3)
    assert len(made.held_out) + len(made.train) == 120
    assert made.held_out and not set(made.prompts("train")) & set(made.prompts("held_out"))


def test_cleaning_and_labels(make):
    rows = [row("mail a@b.org", "to c@d.org", True, system="s", answer="c@d.org"), row("q", "x" * 99, False)]
    made = make(rows, kind="unpaired", cleaning={"mask_personal_data": ["email"], "max_characters": 50})
    (only,) = made.train
    assert [turn["content"] for turn in only["prompt"] + only["completion"]] == ["s", "mail [EMAIL]", "to [EMAIL]"]
    assert (only["answer"], only["label"]) == ("[EMAIL]", True)
    assert made.counts["dropped"]["too_long"] == 1


def test_near_duplicates_and_contamination(make):
    text = " ".join(f"word{n}" for n in range(30))
    rows = [row("q", text, True), row("q", f"{text} more", False), row("r", "other words", True)]
    made = make(rows, kind="unpaired", near_duplicates={"threshold": 0.8})
    assert summary(made.train) == [("q", text, True), ("r", "other words", True)]
    held_out = make([row(text, "x", True)], kind="unpaired", held_out=1)
    made = make(rows, kind="unpaired", against=[held_out.artifact("evaluated")], decontamination={"ngram": 13})
    assert summary(made.train) == [("r", "other words", True)]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"prompt": "q", "completion": "x"}, "missing_column"),
        (row("q", "x", "greeting"), "wrong_type"),
        (row("q", "x", None), "missing_column"),
        (row("q", " ", True), "empty_completion"),
        (row(turn("user", "q") + turn("assistant", "a"), turn("assistant", "x"), True), "turn_out_of_order"),
        ({"completion": "x", "label": True}, "missing_column"),
    ],
)
def test_rows_without_label_or_prompt_are_quarantined(make, raw, reason):
    good = [row(f"q{n}", "x", True) for n in range(9)]
    made = make([*good, raw], kind="unpaired", max_quarantined_fraction=0.5)
    assert len(made.train) == 9
    (found,) = made.quarantine
    assert found["reason"] == reason
    with pytest.raises(SnaketuneError, match="quarantine"):
        make([*good, raw], kind="unpaired")


def test_the_same_rows_are_pairs_in_a_corpus_of_preferences(make):
    made = make([row("q", "x", True), row("q", "y", False)], kind="preferences")
    assert [turn["content"] for turn in made.train[0]["chosen"] + made.train[0]["rejected"]] == ["x", "y"]
