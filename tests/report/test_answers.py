"""answers.csv: all responses, for a spreadsheet; and scores with their intervals."""

import csv
import json
from pathlib import Path

MODELS = ("base:a", "sft:a", "dpo:a")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_model_has_a_column_and_each_prompt_a_row(results):
    for label in MODELS:
        results.evaluate(
            f"main/{label.replace(':', '-')}", corpora=("chat", "other"), text=f'{label} says\n"{{answer}}", so'
        )
    rows = read(results.report()[1] / "answers.csv")
    assert list(rows[0]) == ["evaluation", "corpus", "id", "prompt", "expected", *MODELS]
    expected = {
        (corpus, f"{corpus}-{task}-{n}")
        for corpus in ("chat", "other")
        for task in ("counting", "weekday")
        for n in range(6)
    }
    assert [(row["corpus"], row["id"]) for row in rows] == sorted(expected)
    for row in rows:
        assert row["prompt"].startswith("[user] Question") and row["expected"] == "7"
        assert [row[label].startswith(f"{label} says\n") for label in MODELS] == [True] * 3


def test_a_missing_response_is_empty(results):
    for label in MODELS:
        results.evaluate(
            f"main/{label.replace(':', '-')}", task_names=("counting",) if label == "sft:a" else ("counting", "weekday")
        )
    rows = read(results.report()[1] / "answers.csv")
    assert [bool(row["sft:a"]) for row in rows] == ["counting" in row["id"] for row in rows]
    assert all(row["base:a"] and row["dpo:a"] for row in rows)


def test_surrogates_and_bidirectional_controls_are_replaced(results):
    results.evaluate("main/sft-a", text="a\ud800\u202eb\x00", task_names=("counting",))
    assert {row["sft:a"] for row in read(results.report()[1] / "answers.csv")} == {"a��b�"}


def test_scores_are_shown_with_their_intervals(results):
    results.evaluate("main/sft-a", tasks={"arc": {"acc": 0.5, "bits": 2.0}}, logp_margin_nats_interval=[2.5, 3.5])
    path = results.folder / "results/eval/main/sft-a/scores/scores.json"
    scores = json.loads(path.read_text())
    scores["task_intervals"] = {"arc": {"acc": [0.41, 0.59]}}
    scores["conversations"]["chat"]["exact_match"]["share_interval"] = [0.2, 0.8]
    path.write_text(json.dumps(scores))
    results.add("eval", "main/sft-a", spec={"samples": 3}, counts={"prompts": 12})
    page = (results.report()[1] / "index.html").read_text("utf-8")
    for shown in ('50% <span class="interval">[41%, 59%]', '3 <span class="interval">[2.5, 3.5]', "[20%, 80%]"):
        assert shown in page
    # Scores without an interval.
    assert "2</td>" in page
