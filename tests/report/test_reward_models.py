"""Reward models in the report: their curves, their scores on held-out pairs, and that they are no policies."""

import json
import re

import numpy as np
import pytest
from invented_results import Results

from snaketune.evaluation.pair_scores import by_source
from snaketune.evaluation.reward_scores import calibration_scores, reward_scores
from snaketune.files import write_json
from snaketune.report.charts.reward_charts import reward_evaluation_chart
from snaketune.report.charts.style import model_styles
from snaketune.report.data.results import ResultSet
from snaketune.report.pages import pages_for
from snaketune.text import percent


def train(results: Results, name: str) -> str:
    """Write a reward run of 12 steps."""
    history = [
        {"step": n, "epoch": n / 12, "loss": 0.7 - n / 40, "accuracy": 0.5 + n / 30, "margin": n / 12}
        | {"chosen_reward": n / 24, "rejected_reward": -n / 24, "tokens_per_second": 9000.0}
        for n in range(1, 13)
    ]
    run = {"history": history, "device": "cpu", "tokens_per_second_median": 9000.0, "processes": 1}
    counts = {"rows": 5, "pairs": 9, "steps": 12, "tokens": 1800, "tokens_per_epoch": 1800}
    about = {"parameters": 33472, "trainable_parameters": 33472, "run": run, "counts": counts}
    return results.add("reward", name, spec={"training": {"epochs": 1.0}, "margin": False}, **about)


def evaluate(results: Results, name: str, rewards_P2: np.ndarray, sources: int = 1) -> str:
    """Write the evaluation of a reward model on the corpus `pairs`."""
    preferences = {}
    if len(rewards_P2):
        numbers = np.arange(len(rewards_P2)) % sources
        scores = reward_scores(rewards_P2) | calibration_scores(rewards_P2)
        scores |= by_source(numbers, lambda own_P: reward_scores(rewards_P2[own_P]))
        preferences = {"pairs": scores}
    write_json(
        results.payload("eval", name, "scores.json"),
        {"parameters": 33472, "conversations": {}, "preferences": preferences},
    )
    return results.add("eval", name, spec={"rewards": True, "preferences": ["pairs"]}, run={"device": "cpu"})


def rewards(results: Results, pairs: int, shift: float) -> np.ndarray:
    return results.random.normal(0, 1, (pairs, 2)) + np.array([shift, 0])


def section(page: str, name: str = "reward") -> str:
    (found,) = re.findall(f'<section id="{name}".*?</section>', page, re.DOTALL)
    return found


@pytest.mark.figures
def test_the_section_has_the_curves_the_scores_by_source_and_both_charts(results):
    train(results, "good")
    rewards_P2 = rewards(results, 60, 1.0)
    evaluate(results, "main/reward-good", rewards_P2, sources=2)
    outcome, pages = results.report()
    assert {path.name for path in pages.iterdir() if path.is_file()} == {*pages_for(outcome.counts["results"])}
    page = (pages / "index.html").read_text("utf-8")
    shown, scores = section(page), section(page, "evaluation")
    right = float(np.mean(rewards_P2[:, 0] > rewards_P2[:, 1]))
    assert f'{percent(right)} <span class="interval">[' in scores
    for name in ("reward accuracy", "reward margin"):
        assert re.findall(f"<td>({name}[^<]*)", scores) == [name, f"{name}: source 0", f"{name}: source 1"]
    assert "calibration error" in scores and "chosen reward" in scores and 'id="samples"' not in page
    captions = re.findall(r"<figcaption>([^<]*)", shown)
    for title in ("Training loss", "Accuracy", "Margin", "Rewards", "Throughput", "pairs: calibration, mean error"):
        assert any(caption.startswith(title) for caption in captions), title
    assert any("accuracy by margin" in caption for caption in captions)


def test_reward_models_are_in_the_tables_and_policies_are_judged_without_them(results):
    results.evaluate("main/base-small", right=0.1)
    results.evaluate("main/sft-small", right=0.5)
    policies = results.report()[1]
    train(results, "good")
    evaluate(results, "main/reward-good", rewards(results, 60, 1.0))
    both = results.report()[1]
    before, after = (json.loads((pages / "evaluation.json").read_text("utf-8"))["main"] for pages in (policies, both))
    assert after.pop("reward:good")["preferences"]["pairs"]["pairs"] == 60 and before == after
    before, after = ((pages / "index.html").read_text("utf-8") for pages in (policies, both))
    assert "reward:good" in section(after, "evaluation")
    table = r'<div class="scroll"><table>.*?</table>'
    assert (
        re.search(table, section(before, "verdict"), re.DOTALL)[0]
        == (re.search(table, section(after, "verdict"), re.DOTALL)[0])
    )
    assert section(before, "samples") == section(after, "samples")


def test_an_evaluation_without_held_out_pairs_says_so(results):
    train(results, "good")
    evaluate(results, "main/reward-good", np.empty((0, 2)))
    shown = section((results.report()[1] / "index.html").read_text("utf-8"))
    assert "Held-out pairs" not in shown, shown


def test_each_corpus_of_an_evaluation_has_two_panels_with_all_models(results):
    for model in ("better", "good"):
        evaluate(results, f"main/reward-{model}", rewards(results, 40, 1.0))
    evaluate(results, "other/reward-good", rewards(results, 40, 1.0))
    found = ResultSet(results.named(), **results.files())
    chart = reward_evaluation_chart(found, model_styles(found.models))
    assert list(chart.key) == ["reward:better", "reward:good"]
    assert [panel.title.partition(":")[0] for panel in chart.panels] == ["pairs (main)"] * 2 + ["pairs (other)"] * 2
