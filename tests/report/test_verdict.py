"""Verdicts: which of two models is better, by how much, with which interval, and the sentence if they can't be compared."""

import json
from dataclasses import replace

import numpy as np
import pytest
from invented_sweeps import result_set, sft_and_pairs

from snaketune.artifacts.manifest import write_manifest
from snaketune.publishing.results import Result
from snaketune.report.compare.variants import compare_variants
from snaketune.report.data.packing_flow import pack_flows
from snaketune.report.data.results import logged_numbers
from snaketune.report.judge.data_rules import (
    pack_findings,
    prompt_findings,
    sweep_findings,
    swept_values,
    users_of_packs,
)
from snaketune.report.judge.findings import steps
from snaketune.report.judge.headline import collect_findings, headline, judged_lineage
from snaketune.report.judge.training_rules import training_findings, trainings
from snaketune.report.judge.verdict import paired, row_outcomes
from snaketune.stages.specs import ReportedJob

PAIRS = [f"p{n:02}" for n in range(40)]


def judged(results):
    reported = result_set(results)
    return headline(reported, judged_lineage(reported))


@pytest.mark.parametrize(("gained", "size"), [(0.0, 30), (0.1, 60), (0.4, 40)])
def test_the_paired_interval_has_its_nominal_coverage(gained, size):
    """Coverage is higher where few rows changed: counts are discrete, so it can't be exact."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1500):
        before = random.random(size) < 0.4
        after = np.where(before, random.random(size) < 0.9, random.random(size) < (gained + 0.04) / 0.6)
        low, high = paired(before, after)
        held += low <= gained <= high
    assert 0.93 <= held / 1500 < 1


def test_the_verdict_pairs_common_rows(results):
    before = dict.fromkeys(PAIRS, -0.2)
    after = {pair: 0.1 if number < 20 else -0.1 for number, pair in enumerate(PAIRS)}
    results.dpo("a", *sft_and_pairs(results))
    for model, margins, right in (
        ("base-a", before, 0.0),
        ("sft-a", before, 0.5),
        ("dpo-a", after | {"new": 1.0}, 0.5),
    ):
        results.pairs(f"main/{model}", margins)
        results.evaluate(f"main/{model}", right=right)
    verdict = judged(results)
    assert verdict.sentence == "dpo:a is better than base:a on both measures."
    assert verdict.more == ["dpo:a is better than sft:a on 1 of 2 measures; 1 is inconclusive."]
    assert verdict.models == ["base:a", "sft:a", "dpo:a"]
    lines = {line.name: line for line in verdict.table}
    votes = lines["log-prob accuracy, per token"]
    # A pair that only one model has isn't counted.
    assert (votes.rows, votes.values) == (40, ["0%", "0%", "50%"])
    assert votes.differences[0].interval == paired(np.zeros(40, bool), np.arange(40) < 20)
    # Older results have no losses per document, so their difference has no interval.
    assert [one.outcome for one in lines["held-out loss"].differences] == ["no interval", "no interval"]
    assert verdict.tone == "better"


def test_a_loss_counts_if_losses_per_document_are_known(results):
    results.dpo("a", *sft_and_pairs(results))
    # By model, the loss per token, and how it varies over the documents.
    losses = {"base-a": (2.0, 1), "sft-a": (1.51, 2), "dpo-a": (1.5, 3)}
    for model, (loss, own) in losses.items():
        results.losses(f"main/{model}", {n: (loss + 0.02 * (n * own % 5)) * (10 + n) for n in range(12)}, 10)
        results.evaluate(f"main/{model}", right=0.5, preferences=())
    line = {one.name: one for one in judged(results).table}["held-out loss"]
    assert [one.outcome for one in line.differences] == ["better", "inconclusive"] and line.rows == 12
    low, high = line.differences[0].interval
    assert -0.6 < low < -0.5 < high < -0.4
    # Documents of another pack can't be paired.
    results.losses("main/dpo-a", {n: 0.1 * (10 + n) for n in range(12)}, 10)
    results.evaluate("main/dpo-a", right=0.5, preferences=(), packs=(next(iter(results.contents)),))
    line = {one.name: one for one in judged(results).table}["held-out loss"]
    assert [one.outcome for one in line.differences] == ["no interval", "no interval"]


def test_a_worse_model_is_reported(results):
    model, _ = sft_and_pairs(results)
    assert model == "sft/a"
    results.evaluate("main/base-a", right=1.0, preferences=())
    results.evaluate("main/sft-a", right=0.0, preferences=())
    verdict = judged(results)
    assert (verdict.sentence, verdict.tone) == ("sft:a is worse than base:a on the only measure.", "worse")
    warnings = collect_findings(
        result_set(results), ["base:a", "sft:a"], verdict.verdicts, compare_variants(result_set(results), None)
    )
    assert warnings[0].kind == "worse: base:a, exact match of chat"
    assert warnings[0].key == "sft.a.training.learning_rate"


def test_rows_without_a_checkable_answer_are_not_counted(results):
    sft_and_pairs(results)
    results.evaluate("main/sft-a", preferences=())
    scored = result_set(results).evaluations["main"][0]
    unchecked = replace(scored, responses=[row | {"correct": None} for row in scored.responses])
    assert len(row_outcomes(scored)["conversations.chat.exact_match.share"]) == 12
    assert row_outcomes(unchecked) == {}


def test_reward_accuracy_counts_only_pairs_that_the_reference_has(results):
    sft_and_pairs(results)
    results.evaluate("main/sft-a", reference=True)
    results.pairs("main/sft-a", {"up": 0.2, "down": 0.2, "new": 1.0}, reference={"up": 0.1, "down": 0.3})
    results.evaluate("main/sft-a", reference=True)
    reported = row_outcomes(result_set(results).evaluations["main"][0])
    assert reported["preferences.pairs.reward_accuracy"] == {"up": 1.0, "down": 0.0}
    assert reported["preferences.pairs.logp_accuracy_per_token"] == {"up": 1.0, "down": 1.0, "new": 1.0}


def test_the_verdict_has_the_reward_accuracy_of_a_model_whose_reference_was_not_scored(results):
    """The others have no rewards: a reward is relative to the reference, by which chance is right in half of the pairs."""
    results.dpo("a", *sft_and_pairs(results))
    kept = dict.fromkeys(PAIRS, -0.2)
    for model in ("base-a", "sft-a"):
        results.pairs(f"main/{model}", kept)
        results.evaluate(f"main/{model}", right=0.5)
    results.pairs("main/dpo-a", dict.fromkeys(PAIRS, -0.1), reference=kept)
    results.evaluate("main/dpo-a", right=0.5, reference=True, reward_accuracy=1.0)
    verdict = judged(results)
    line = {one.name: one for one in verdict.table}["reward accuracy"]
    assert (line.values, line.rows) == (["50% by chance", "50% by chance", "100%"], 40)
    low, high = line.differences[0].interval
    # Chance is half, so nothing is more than half above it.
    assert low == paired(np.full(40, 0.5), np.ones(40))[0] and high == 0.5 < paired(np.full(40, 0.5), np.ones(40))[1]
    assert verdict.sentence == "dpo:a is better than base:a on 1 of 3 measures; 2 are inconclusive."


def test_intervals_of_a_unit_have_one_scale_on_which_narrow_ones_are_seen(results):
    results.dpo("a", *sft_and_pairs(results))
    for model, right in (("base-a", 0.5), ("sft-a", 0.5), ("dpo-a", 0.6)):
        results.pairs(f"main/{model}", dict.fromkeys(PAIRS, -0.2))
        results.evaluate(f"main/{model}", right=right)
    verdict = judged(results)
    found = [one for line in verdict.table for one in line.differences if one.interval]
    drawn = [one.positions(verdict.scales[one.measure.unit]) for one in found]
    assert all(0 <= low <= middle <= high <= 100 for low, middle, high in drawn)
    furthest = max(abs(bound) for one in found for bound in one.interval)
    assert furthest <= verdict.scales["share"] <= 2.5 * furthest
    assert verdict.shown_scales == "±10 and ±40 points"
    one = replace(found[0], interval=(0.01, 0.03))
    low, _, high = one.positions(1.0)
    assert low > 54 and high - low > 3


def test_next_steps_are_those_that_gain_most_first(results):
    results.corpus("other", quarantined={"not_json": 3})
    sft_and_pairs(results)
    for model, right in (("base-a", 1.0), ("sft-a", 0.0)):
        results.evaluate(f"main/{model}", right=right, preferences=())
    reported = result_set(results)
    found = collect_findings(
        reported, judged_lineage(reported), judged(results).verdicts, compare_variants(reported, None)
    )
    first, *_, last = steps(found)
    assert (first.reasons, last.reasons) == (["worse"], ["quarantined"])


def test_ties_count_half(results):
    sft_and_pairs(results)
    results.pairs("main/sft-a", {"same": 0.25, "tie": 0.0}, reference={"same": 0.25, "tie": 0.0})
    results.evaluate("main/sft-a", reference=True)
    reported = row_outcomes(result_set(results).evaluations["main"][0])
    assert reported["preferences.pairs.reward_accuracy"] == {"same": 0.5, "tie": 0.5}
    assert reported["preferences.pairs.logp_accuracy_per_token"] == {"same": 1.0, "tie": 0.5}


def test_the_paired_interval_accepts_halves():
    before, after = np.array([0.5] * 20), np.array([1.0] * 10 + [0.5] * 10)
    low, high = paired(before, after)
    assert 0 < low < 0.25 < high
    # Half changes give a narrower interval than full ones.
    all_, none = np.array([0.0] * 10 + [1.0] * 10), np.array([1.0] * 20)
    assert high - low < np.subtract(*paired(all_, none)[::-1])
    assert paired(before, before) == pytest.approx((-paired(before, before)[1], paired(before, before)[1]))


def test_without_a_comparison_the_page_says_why(results):
    results.corpus("chat")
    assert judged(results).sentence == "No model was trained or evaluated; 80 rows are ready."
    sft_and_pairs(results)
    verdict = judged(results)
    assert verdict.sentence.startswith("sft:a was trained, and nothing was evaluated, so the models can't be compared.")
    assert "Its training loss went from 5." in verdict.sentence
    results.evaluate("main/sft-a")
    assert "only sft:a was evaluated" in judged(results).sentence
    results.jobs.pop("sft/a")
    assert judged(results).sentence == "Only sft:a was evaluated: there is nothing to compare it with."


def test_models_without_a_common_measure_have_no_verdict(results):
    sft_and_pairs(results)
    results.evaluate("main/base-a", corpora=())
    results.evaluate("main/sft-a", preferences=())
    assert judged(results).sentence == (
        "sft:a against base:a: no common measure; without intervals, significance is unknown."
    )


def test_the_overview_begins_with_verdict_cost_warnings_and_steps(sweep_pages):
    page = (sweep_pages / "index.html").read_text("utf-8")
    top = page[: page.index('<section id="sft">')]
    for text in (
        "dpo:soft is better than base:small on all 3 measures.",
        "+83.3 points",
        "GPU hours",
        "8.3% of the conversations and 25.9% of the tokens",
        "<code>sft.long.packing.length</code>: set it to 448, which keeps 99% of the tokens",
        "6 of 12 held-out prompts of chat are duplicates",
    ):
        assert text in top


def test_runs_of_a_grid_have_the_config_key_of_the_grid(results):
    model, pack = sft_and_pairs(results)
    for name, beta in (("s-b1", 0.1), ("s-b2", 0.2), ("s-b3", 0.3)):
        key = results.dpo(name, model, pack, spec={"beta": beta})
        results.jobs[key] = results.jobs[key].model_copy(update={"config_key": "dpo.s"})
        results.evaluate(f"main/dpo-{name}", right=beta)
    reported = result_set(results)
    assert {facts.run.key for facts in trainings(reported)} == {"sft.a", "dpo.s"}
    sorted_, unsorted = (compare_variants(reported, by) for by in ("preferences.pairs.logp_accuracy", None))
    assert swept_values(sorted_) == {"beta": {"dpo:s-b1": 0.1, "dpo:s-b2": 0.2, "dpo:s-b3": 0.3}}
    # Three runs aren't many.
    (edge,) = sweep_findings(reported, sorted_)
    assert (edge.where, edge.key) == ("dpo.s", "dpo.s.grid")
    assert edge.message == "the best run, dpo:s-b3, has the highest beta that was tried, 0.3"
    assert list(sweep_findings(reported, unsorted)) == []


def test_facts_of_a_training_are_taken_from_its_run(results):
    sft_and_pairs(results)
    for model, right in (("base-a", 0.2), ("sft-a", 0.5)):
        results.evaluate(f"main/{model}", right=right, preferences=())
    path = results.folder / "results/sft/a/run.json"
    run = json.loads(path.read_text())
    measured = {"device": "NVIDIA H200", "mfu_median": 0.1, "waited_for_data_s": 2.0, "slower_than_best_percent": 20.0}
    path.write_text(json.dumps(run | measured | {"seconds": 20.0, "calibration": {"trials": []}}))
    (reported,) = trainings(result_set(results))
    found = {one.kind: one for one in training_findings(reported)}
    # As of a GPU whose micro-batches were calibrated.
    assert found["low MFU"].message.startswith("MFU is 10%; 30 to 50% is usual")
    assert found["low MFU"].key == "sft.a.training.batch_rows"
    assert "is 20% slower than the best" in found["slow micro-batch"].message
    assert found["waited for data"].message == "waited 2.0 s for data, 10% of its time"
    # The first and the last three of thirty steps.
    losses = [entry["loss"] for entry in run["history"]]
    assert reported.loss == pytest.approx((np.mean(losses[:3]), np.mean(losses[-3:])))
    assert reported.held_out == {"chat": (1.8, 1.5)}
    flow, _ = pack_flows(result_set(results))
    assert users_of_packs(result_set(results))[f"pack/{flow.name}"] == "sft.a.packing"
    assert not list(pack_findings(flow, "sft.a.packing"))


def test_log_entries_that_are_no_numbers_are_ignored():
    history = [{"loss": 1}, {"loss": "2"}, {"loss": True}, {"loss": float("nan")}, {}, "x"]
    run = Result(job=ReportedJob(stage="sft", name="a"), artifact=None, run={"history": history})
    assert logged_numbers(run, "loss") == [1.0]


def test_truncated_responses_are_counted(results):
    results.evaluate("main/base-a", preferences=())
    path = results.folder / "results/eval/main/base-a/manifest.json"
    manifest = json.loads(path.read_text())
    for most, cut_off in ((5, ["100% of the responses of base:a to chat were truncated at 5 tokens"]), (6, [])):
        write_manifest(path, manifest | {"spec": {"samples": 3, "generation": {"max_new_tokens": most}}})
        repeated, *truncated = (one.message for one in prompt_findings(result_set(results), ["base:a"]))
        assert repeated.startswith("6 of 12 held-out prompts of chat are duplicates")
        assert truncated == cut_off


def test_preflight_findings_are_on_the_page(results):
    results.everything()
    key = "sft.demo.training.learning_rate"
    one = {"severity": "warns", "where": "sft.demo", "key": key, "found": "1 <is> much", "do": "1e-4"}
    for path in results.folder.glob("results/sft/*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"preflight": [one]}), encoding="utf-8")
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert "<b>sft.demo</b>: 1 &lt;is&gt; much" in page
    assert '<code>sft.demo.training.learning_rate</code>: 1e-4 <span class="quiet">(preflight)</span>' in page


def test_what_preflight_found_in_a_pack_is_not_repeated(results):
    results.everything()
    key = "sft.long.packing.length"
    one = {"severity": "warns", "where": "sft.long", "key": key, "found": "33% of the tokens are dropped", "do": "448"}
    for preflight, expected in (([], "tokens lost"), ([one], "preflight")):
        for path in results.folder.glob("results/sft/*/run.json"):
            path.write_text(
                json.dumps(json.loads(path.read_text("utf-8")) | {"preflight": preflight}), encoding="utf-8"
            )
        reported = result_set(results)
        found = collect_findings(reported, [], [], compare_variants(reported, None))
        assert {finding.kind.partition(":")[0] for finding in found if finding.key == key} == {expected}


def test_without_warnings_the_page_says_so(results):
    results.corpus("chat")
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert '<p class="quiet">None.</p>' in page
    assert "preflight" not in page
