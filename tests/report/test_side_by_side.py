"""CSV files for human evaluation: side by side, blind with a different column order per row, and the key."""

import csv
import json
from pathlib import Path

import pytest

from snaketune.config.load import load
from snaketune.report.pages import judging_files, side_by_side_files
from snaketune.stages.graph import JobGraph

MODELS = ("base:a", "sft:a", "dpo:a")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def judged(results) -> Path:
    for label in MODELS:
        results.evaluate(
            f"main/{label.replace(':', '-')}", corpora=("chat", "other"), text=f'{label} says\n"{{answer}}", so'
        )
    return results.report()[1] / "side_by_side/main/chat"


def test_each_model_has_a_column(judged):
    rows = read(judged / "side_by_side.csv")
    assert list(rows[0]) == ["id", "prompt", "expected", *MODELS, "better", "note"]
    assert [row["id"] for row in rows] == sorted(
        f"chat-{task}-{n}" for task in ("counting", "weekday") for n in range(6)
    )
    for row in rows:
        assert row["prompt"].startswith("[user] Question") and row["expected"] == "7"
        assert [row[label].startswith(f"{label} says\n") for label in MODELS] == [True] * 3
        assert (row["better"], row["note"]) == ("", "")


def test_blind_columns_are_shuffled_per_row_and_the_key_has_the_models(judged):
    open_rows, blind, key = (read(judged / f"{name}.csv") for name in ("side_by_side", "blind", "key"))
    columns = ["response_1", "response_2", "response_3"]
    assert list(blind[0]) == ["id", "prompt", "expected", *columns, "better", "note"]
    for shown, hidden, names in zip(open_rows, blind, key, strict=True):
        assert shown["id"] == hidden["id"] == names["id"]
        assert sorted(names[column] for column in columns) == sorted(MODELS)
        assert all(hidden[column] == shown[names[column]] for column in columns)
    assert len({tuple(row[column] for column in columns) for row in key}) > 2


def test_a_missing_response_is_empty(results):
    for label in MODELS:
        results.evaluate(
            f"main/{label.replace(':', '-')}", task_names=("counting",) if label == "sft:a" else ("counting", "weekday")
        )
    rows = read(results.report()[1] / "side_by_side/main/chat/side_by_side.csv")
    assert [bool(row["sft:a"]) for row in rows] == ["counting" in row["id"] for row in rows]
    assert all(row["base:a"] and row["dpo:a"] for row in rows)


def test_surrogates_and_bidirectional_controls_are_replaced(results):
    results.evaluate("main/sft-a", text="a\ud800\u202eb\x00", task_names=("counting",))
    assert {row["sft:a"] for row in read(results.report()[1] / "side_by_side/main/chat/side_by_side.csv")} == {"a��b�"}


def test_the_samples_page_links_to_the_files(judged):
    page = (judged.parents[2] / "samples.html").read_text("utf-8")
    for name in (name for names in side_by_side_files({"main": ["chat", "other"]}).values() for name in names):
        assert f'href="{name}"' in page
        assert (judged.parents[2] / name).is_file()


def test_the_files_are_those_declared_for_the_graph(raw_default, results):
    config = load(raw_default)[0]
    declared = judging_files(JobGraph(*load(raw_default)))
    expected = {name: one.conversations for name, one in config.eval.items()}
    assert declared == [name for names in side_by_side_files(expected).values() for name in names] and declared


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
