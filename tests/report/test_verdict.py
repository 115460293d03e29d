"""The verdict: which of two models is better, by how much, how sure that is, and what is said where nothing can be."""

import json
from dataclasses import replace

import numpy as np
import pytest
from invented_sweeps import begun, result_set

from snaketune.report.compare.variants import variants
from snaketune.report.judge import facts
from snaketune.report.judge.difference_intervals import paired, separate
from snaketune.report.judge.headline import headline, judged_lineage
from snaketune.report.judge.run_warnings import report_findings
from snaketune.report.judge.verdict import row_outcomes

PAIRS = [f"p{n:02}" for n in range(40)]


def judged(results):
    found = result_set(results)
    return headline(found, judged_lineage(found))


@pytest.mark.parametrize(("gained", "size"), [(0.0, 30), (0.1, 60), (0.4, 40)])
def test_the_paired_interval_holds_the_true_difference_as_often_as_it_says(gained, size):
    """More often where few rows changed: of whole rows no interval holds it exactly as often."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1500):
        before = random.random(size) < 0.4
        after = np.where(before, random.random(size) < 0.9, random.random(size) < (gained + 0.04) / 0.6)
        low, high = paired(before, after)
        held += low <= gained <= high
    assert 0.93 <= held / 1500 < 1


def test_pairing_narrows_the_interval_where_the_models_fail_alike():
    before = np.arange(100) < 50
    after = np.arange(100) < 60
    low, high = paired(before, after)
    apart = separate(0.5, 100, 0.6, 100)
    assert low > 0 > apart[0]
    assert high - low < 0.6 * (apart[1] - apart[0])


def test_the_verdict_pairs_the_rows_that_both_were_asked(results):
    before = dict.fromkeys(PAIRS, -0.2)
    after = {pair: 0.1 if number < 20 else -0.1 for number, pair in enumerate(PAIRS)}
    results.dpo("a", *begun(results))
    for model, margins, right in (
        ("base-a", before, 0.0),
        ("sft-a", before, 0.5),
        ("dpo-a", after | {"new": 1.0}, 0.5),
    ):
        results.pairs(f"main/{model}", margins)
        results.evaluate(f"main/{model}", right=right)
    found = judged(results)
    assert found.sentence == "dpo:a is better than base:a on both measures."
    assert found.more == ["dpo:a is better than sft:a on 1 of 2 measures; 1 is too close to call."]
    assert found.models == ["base:a", "sft:a", "dpo:a"]
    lines = {line.name: line for line in found.table}
    votes = lines["chosen is likelier, per token"]
    # The pair that only one of them knows isn't counted.
    assert (votes.rows, votes.values) == (40, ["0%", "0%", "50%"])
    assert votes.differences[0].interval == paired(np.zeros(40, bool), np.arange(40) < 20)
    # Of losses from before those of documents were kept: less is better, but whether that is noise isn't known.
    assert [one.outcome for one in lines["held-out loss"].differences] == ["uncounted", "uncounted"]
    assert found.tone == "better"


def test_a_loss_counts_where_those_of_documents_are_known(results):
    results.dpo("a", *begun(results))
    # By model, the loss of a token, and how much easier or harder some documents are to it.
    lost = {"base-a": (2.0, 1), "sft-a": (1.51, 2), "dpo-a": (1.5, 3)}
    for model, (loss, own) in lost.items():
        results.losses(f"main/{model}", {n: (loss + 0.02 * (n * own % 5)) * (10 + n) for n in range(12)}, 10)
        results.evaluate(f"main/{model}", right=0.5, preferences=())
    line = {one.name: one for one in judged(results).table}["held-out loss"]
    assert [one.outcome for one in line.differences] == ["better", "open"] and line.rows == 12
    low, high = line.differences[0].interval
    assert -0.6 < low < -0.5 < high < -0.4
    # Rows of another packing are other documents.
    results.losses("main/dpo-a", {n: 0.1 * (10 + n) for n in range(12)}, 10)
    results.evaluate("main/dpo-a", right=0.5, preferences=(), packs=(next(iter(results.contents)),))
    line = {one.name: one for one in judged(results).table}["held-out loss"]
    assert [one.outcome for one in line.differences] == ["uncounted", "uncounted"]


def test_a_model_that_got_worse_is_called_so(results):
    model, _ = begun(results)
    assert model == "sft/a"
    results.evaluate("main/base-a", right=1.0, preferences=())
    results.evaluate("main/sft-a", right=0.0, preferences=())
    found = judged(results)
    assert (found.sentence, found.tone) == ("sft:a is worse than base:a on the one measure.", "worse")
    told = report_findings(
        result_set(results), ["base:a", "sft:a"], found.verdicts, variants(result_set(results), None)
    )
    assert told[0].kind == "worse: base:a, exact match of chat"
    assert told[0].key == "sft.a.training.learning_rate"


def test_results_without_pairs_are_compared_as_separate_shares(results):
    begun(results)
    for model, right in (("base-a", 0.5), ("sft-a", 0.9)):
        results.evaluate(f"main/{model}", right=right, corpora=())
    (line,) = judged(results).table
    assert line.rows == 0
    assert line.differences[0].interval == separate(0.5, 20, 0.9, 20)


def test_rows_that_cannot_be_checked_are_no_outcomes(results):
    begun(results)
    results.evaluate("main/sft-a", preferences=())
    scored = result_set(results).evaluations["main"][0]
    unchecked = replace(scored, responses=[row | {"correct": None} for row in scored.responses])
    assert len(row_outcomes(scored)["conversations.chat.exact_match.share"]) == 12
    assert row_outcomes(unchecked) == {}


def test_what_gained_more_is_counted_of_the_pairs_that_the_reference_knows(results):
    begun(results)
    results.evaluate("main/sft-a", reference=True)
    results.pairs("main/sft-a", {"up": 0.2, "down": 0.2, "new": 1.0}, reference={"up": 0.1, "down": 0.3})
    results.evaluate("main/sft-a", reference=True)
    found = row_outcomes(result_set(results).evaluations["main"][0])
    assert found["preferences.pairs.reward_accuracy"] == {"up": 1.0, "down": 0.0}
    assert found["preferences.pairs.logp_accuracy_per_token"] == {"up": 1.0, "down": 1.0, "new": 1.0}


def test_pairs_that_neither_completion_wins_count_half_here_too(results):
    begun(results)
    results.pairs("main/sft-a", {"same": 0.25, "tie": 0.0}, reference={"same": 0.25, "tie": 0.0})
    results.evaluate("main/sft-a", reference=True)
    found = row_outcomes(result_set(results).evaluations["main"][0])
    assert found["preferences.pairs.reward_accuracy"] == {"same": 0.5, "tie": 0.5}
    assert found["preferences.pairs.logp_accuracy_per_token"] == {"same": 1.0, "tie": 0.5}


def test_the_paired_interval_takes_halves():
    before, after = np.array([0.5] * 20), np.array([1.0] * 10 + [0.5] * 10)
    low, high = paired(before, after)
    assert 0 < low < 0.25 < high
    # Of what moved by half as much it is narrower than of what moved by all.
    all_, none = np.array([0.0] * 10 + [1.0] * 10), np.array([1.0] * 20)
    assert high - low < np.subtract(*paired(all_, none)[::-1])
    assert paired(before, before) == pytest.approx((-paired(before, before)[1], paired(before, before)[1]))


def test_where_nothing_can_be_compared_the_page_says_why(results):
    results.corpus("chat")
    assert judged(results).sentence == "No model was trained or evaluated; 80 rows are ready."
    begun(results)
    found = judged(results)
    assert found.sentence.startswith(
        "sft:a was trained, and nothing was evaluated: whether that is better than before isn't known."
    )
    assert "Its training loss went from 5." in found.sentence
    results.evaluate("main/sft-a")
    assert "only sft:a was evaluated" in judged(results).sentence
    results.jobs.pop("sft/a")
    assert judged(results).sentence == "Only sft:a was evaluated: there is nothing to compare it with."


def test_models_of_no_common_measure_are_not_judged(results):
    begun(results)
    results.evaluate("main/base-a", corpora=())
    results.evaluate("main/sft-a", preferences=())
    assert judged(results).sentence == (
        "sft:a against base:a: nothing was measured of both; whether that is noise isn't known."
    )


def test_the_first_page_tells_verdict_cost_suspicions_and_steps_before_all_else(sweep_pages):
    page = (sweep_pages / "index.html").read_text("utf-8")
    top = page[: page.index('<section id="data">')]
    for said in (
        "dpo:soft is better than base:small on both measures.",
        "+83.3 points",
        "GPU hours",
        "8.3% of the conversations and 25.9% of the tokens",
        "<code>sft.long.packing.length</code>: 448 keeps 99% of the tokens",
        "6 of 12 held-out prompts of chat repeat another",
    ):
        assert said in top


def test_runs_of_a_grid_are_named_by_the_key_that_asks_for_them(results):
    model, pack = begun(results)
    for name, beta in (("s-b1", 0.1), ("s-b2", 0.2), ("s-b3", 0.3)):
        key = results.dpo(name, model, pack, spec={"beta": beta})
        results.jobs[key] = results.jobs[key].model_copy(update={"config_key": "dpo.s"})
        results.evaluate(f"main/dpo-{name}", right=beta)
    found = result_set(results)
    assert {run.key for run in facts.trainings(found)} == {"sft.a", "dpo.s"}
    (beta,) = facts.swept(found, variants(found, "preferences.pairs.logp_accuracy"))
    assert (beta.values, beta.best, beta.key) == ((0.1, 0.2, 0.3), 0.3, "dpo.s")
    assert facts.swept(found, variants(found, None)) == []
    (best,) = facts.picked(variants(found, "preferences.pairs.logp_accuracy"))
    assert (best.run, best.of) == ("dpo:s-b3", 3)
    assert facts.picked(variants(found, None)) == []


def test_facts_of_a_training_are_taken_from_its_run(results):
    begun(results)
    for model, right in (("base-a", 0.2), ("sft-a", 0.5)):
        results.evaluate(f"main/{model}", right=right, preferences=())
    path = results.folder / "results/sft/a/run.json"
    run = json.loads(path.read_text())
    told = {"device": "NVIDIA H200", "mfu_median": 0.4, "waited_for_data_s": 2.0, "slower_than_best_percent": 20.0}
    path.write_text(json.dumps(run | told | {"calibration": {"trials": []}}))
    (found,) = facts.trainings(result_set(results))
    assert (found.gpu, found.mfu, found.waited, found.slower, found.measured) == (True, 0.4, 2.0, 20.0, True)
    # The first and the last three of thirty steps.
    losses = [entry["loss"] for entry in run["history"]]
    assert found.loss == pytest.approx((np.mean(losses[:3]), np.mean(losses[-3:])))
    assert found.held_out == {"chat": (1.8, 1.5)}
    train, held_out, *_ = facts.packed(result_set(results))
    assert (train.key, train.lost, held_out.split) == ("sft.a.packing", None, "held_out")


def test_a_line_of_a_log_that_holds_no_number_counts_for_nothing():
    assert facts.numbers([{"loss": 1}, {"loss": "2"}, {"loss": True}, {"loss": float("nan")}, {}, "x"], "loss") == [1.0]


def test_answers_as_long_as_they_may_be_are_counted(results):
    results.evaluate("main/base-a", preferences=())
    path = results.folder / "results/eval/main/base-a/manifest.json"
    manifest = json.loads(path.read_text())
    for most, cut_off in ((5, 12), (6, 0)):
        path.write_text(json.dumps(manifest | {"spec": {"samples": 3, "generation": {"max_new_tokens": most}}}))
        (found,) = facts.asked(result_set(results), ["base:a"])
        assert (found.answers, found.different, found.cut_off) == (12, 6, cut_off)


def test_what_preflight_found_is_on_the_page(results):
    results.everything()
    key = "sft.demo.training.learning_rate"
    one = {"severity": "warns", "where": "sft.demo", "key": key, "found": "1 <is> much", "do": "1e-4"}
    for path in results.folder.glob("results/sft/*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"preflight": [one]}), encoding="utf-8")
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert "<b>sft.demo</b>: 1 &lt;is&gt; much" in page
    assert '<code>sft.demo.training.learning_rate</code>: 1e-4 <span class="quiet">(preflight)</span>' in page


def test_without_preflight_and_with_nothing_suspicious_the_page_says_so(results):
    results.corpus("chat")
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert "Nothing that these results say of themselves." in page
    assert "preflight" not in page
