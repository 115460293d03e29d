"""The numbers in the tables: that they add up, and that the page says so where they don't."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from snaketune.report.findings import Findings
from snaketune.report.flow import corpus_flows, pack_flows, training_flows
from snaketune.report.headline import cards, lineage
from snaketune.report.samples import choose
from snaketune.report.scores import measures, wilson


def findings(results) -> Findings:
    return Findings(*(sorted(results.folder.glob(f"results/**/{name}.json")) for name in ("manifest", "run")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_add_up_from_reading_to_packing(sweep_pages):
    rows: Counter[tuple[str, str]] = Counter()
    for line in table(sweep_pages / "data.csv"):
        if line["stage"] in ("corpus", "pack"):
            rows[line["stage"], line["name"], line["what"]] += int(line["rows"])
    for stage, name in {key[:2] for key in rows}:
        gone = rows[stage, name, "quarantined"] + rows[stage, name, "dropped"]
        assert rows[stage, name, "read"] == gone + rows[stage, name, "kept"], (stage, name)
    assert rows["corpus", "chat", "kept"] == rows["pack", "chat-demo-128-aa", "read"]
    assert rows["corpus", "chat", "quarantined"] == 3
    assert rows["pack", "chat-demo-128-aa", "dropped"] == 3


def test_counts_that_do_not_add_up_are_called_out(results):
    corpus = results.corpus("chat", read=1000)
    results.pack("chat-demo-128-aa", corpus, results.tokenizer(), train=59)
    found = findings(results)
    assert not corpus_flows(found)[0].adds_up
    train, held_out = pack_flows(found)[0].splits
    assert (train.adds_up, held_out.adds_up) == (False, True)
    _, pages = results.report()
    assert (pages / "index.html").read_text("utf-8").count("add up") == 2


def test_links_between_results_are_found_by_content(sweep):
    found = findings(sweep)
    assert {flow.name: flow.corpus for flow in pack_flows(found)} == {
        "chat-demo-128-aa": "chat",
        "other-demo-128-bb": "other",
        "pairs-demo-128-cc": "pairs",
    }
    flows = {flow.label: flow for flow in training_flows(found)}
    assert flows["sft:small"].tokens == 3000
    assert flows["sft:raw"].tokens is None
    pairs = next(flow for flow in pack_flows(found) if flow.corpus == "pairs")
    assert flows["dpo:soft"].tokens == pairs.train.tokens


def test_the_headline_follows_the_best_model_back_to_its_base(sweep):
    found = findings(sweep)
    assert lineage(found, found.evaluations["main"]) == ["base:small", "sft:small", "dpo:soft"]
    assert lineage(found, found.evaluations["second"]) == ["sft:raw"]
    headline = {card.title: card for card in cards(found)}
    assert [value for _, value in headline["Exact match"].steps] == ["0%", "50%", "83.3%"]
    assert headline["Tokens per second"].steps == [("sft", "22 k"), ("dpo", "9 k")]


def test_without_checkable_answers_the_headline_is_the_held_out_loss(results):
    results.evaluate("main/sft-a", preferences=())
    path = results.folder / "results/eval/main/sft-a/scores/scores.json"
    scores = json.loads(path.read_text())
    scores["conversations"]["chat"]["exact_match"] = {"prompts": 0, "correct": 0, "share": None, "by_task": {}}
    path.write_text(json.dumps(scores))
    results.add("eval", "main/sft-a", spec={"samples": 3}, counts={"prompts": 0})
    assert [card.title for card in cards(findings(results))] == ["Held-out loss", "Computing time"]


def test_scores_side_by_side(sweep, sweep_pages):
    found = findings(sweep)
    lines = {(m.on, m.name): m for m in measures(found.evaluations["main"])}
    reward = lines["pairs", "chosen gained more than rejected"]
    assert [reward.shown(model) for model in reward.values] == ["–", "–", "90%", "90%"]
    loss = lines["chat", "held-out loss"]
    assert [model for model in loss.values if loss.is_best(model)] == ["dpo:soft"]
    assert not any(lines["chat", "mean response length"].is_best(model) for model in loss.values)
    assert lines["demo_choice", "acc"].shown("dpo:hard") == "70%"
    rows = {(row["evaluation"], row["on"], row["measure"]): row for row in table(sweep_pages / "evaluation.csv")}
    assert rows["main", "chat", "exact match: counting"]["sft:small"] == "0.5"
    assert rows["main", "chat", "exact match"]["sft:raw"] == ""
    scores = json.loads((sweep_pages / "evaluation.json").read_text("utf-8"))
    assert scores["main"]["base:small"]["preferences"]["pairs"]["reward_accuracy"] is None


def test_samples_take_turns_among_tasks_and_keep_models_together(results):
    results.evaluate("main/base-a", right=0.0, samples=3)
    results.evaluate("main/sft-a", right=1.0, samples=3)
    chosen = choose(findings(results).evaluations["main"])
    assert [sample.task for sample in chosen] == ["counting", "weekday", "counting"]
    assert [[answer.verdict for answer in sample.answers] for sample in chosen] == [["wrong", "right"]] * 3


@pytest.mark.parametrize(("share", "size"), [(0.0, 5), (1.0, 5), (0.3, 1000)])
def test_an_interval_holds_its_share_and_narrows_with_size(share, size):
    low, high = wilson(share, size)
    assert 0 <= low <= share <= high <= 1
    assert high - low > wilson(share, size * 10)[1] - wilson(share, size * 10)[0]
