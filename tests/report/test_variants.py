"""The table and the chart of the DPO runs: differing keys, order, best run, and missing scores."""

import json

import pytest
from invented_results import Results
from invented_sweeps import MARGINS, MOVED, result_set, sft_and_pairs, table

from snaketune.errors import SnaketuneError
from snaketune.publishing.measures import PREFERENCES
from snaketune.report.compare.variants import compare_variants
from snaketune.report.data.races import paused_runs
from snaketune.report.judge.headline import judged_lineage

SORT_BY = "preferences.pairs.reward_accuracy"


def swept(results: Results, accuracies: dict[str, float | None], specs: dict[str, dict] | None = None) -> None:
    """Write an evaluated DPO run for each accuracy."""
    made = sft_and_pairs(results)
    for name, accuracy in accuracies.items():
        results.dpo(name, *made, spec=(specs or {}).get(name))
        results.evaluate(f"main/dpo-{name}", reference=True, reward_accuracy=accuracy)


def test_variants_are_sorted_and_the_first_is_the_best(results):
    swept(results, {"b0.1": 0.7, "b0.2": 0.9, "b0.3": 0.8}, {f"b0.{n}": {"beta": n / 10} for n in (1, 2, 3)})
    outcome, pages = results.report(sort_by=SORT_BY)
    rows = table(pages)
    assert [(row["variant"], row["best"], row["beta"]) for row in rows] == [
        ("dpo:b0.2", "yes", "0.2"), ("dpo:b0.3", "", "0.3"), ("dpo:b0.1", "", "0.1"),
    ]  # fmt: skip
    assert outcome.about["best"] == {
        "run": "dpo:b0.2", "sort_by": SORT_BY, "value": 0.9, "payload": "dpo/b0.2/model",
    }  # fmt: skip
    page = (pages / "index.html").read_text("utf-8")
    assert "<b>dpo:b0.2</b> comes first and is linked at <code>results/best</code>" in page
    # A key with one value isn't listed.
    assert "loss" not in rows[0]


def test_the_headline_is_about_the_best_run(results):
    swept(results, {"a": 0.7, "b": 0.6})
    for best in ("dpo:a", "dpo:b"):
        assert judged_lineage(result_set(results), best)[-1] == best


def test_the_lowest_loss_is_first(results):
    made = sft_and_pairs(results)
    for name, right in (("good", 0.9), ("bad", 0.1)):
        results.dpo(name, *made)
        results.evaluate(f"main/dpo-{name}", right=right)
    reported = compare_variants(result_set(results), "conversations.chat.held_out_loss")
    assert (reported.labels, reported.highest_first) == (["dpo:good", "dpo:bad"], False)


def test_runs_without_the_score_are_last(results):
    swept(results, {"a": None, "b": 0.6, "c": None, "d": 0.8})
    made = sft_and_pairs(results)
    results.dpo("unevaluated", *made)
    reported = compare_variants(result_set(results), SORT_BY)
    assert reported.labels == ["dpo:d", "dpo:b", "dpo:a", "dpo:c", "dpo:unevaluated"]
    assert reported.sorted_by.shown("dpo:a") == "–"
    results.report(sort_by=SORT_BY)


def test_ties_are_sorted_by_name_and_reported(results):
    swept(results, {"lr-10": 0.8, "lr-2": 0.8, "lr-1": 0.5})
    reported = compare_variants(result_set(results), SORT_BY)
    assert (reported.best, reported.tied) == ("dpo:lr-2", ["dpo:lr-10"])
    _, pages = results.report(sort_by=SORT_BY)
    assert "tied with dpo:lr-10 and first by name" in (pages / "index.html").read_text("utf-8")


def test_an_unknown_score_is_refused_with_the_known_ones(results):
    swept(results, {"a": None, "b": None})
    with pytest.raises(SnaketuneError, match=r"known: .*conversations.chat.exact_match.by_task.counting.share, "):
        results.report(sort_by="zzz")


def test_missing_rewards_leave_runs_unsorted_with_a_warning(results, capsys):
    swept(results, {"b": None, "a": None})
    outcome, pages = results.report(sort_by=SORT_BY)
    assert "best" not in outcome.about
    assert [row["variant"] for row in table(pages)] == ["dpo:a", "dpo:b"]
    printed = capsys.readouterr().out
    assert "reward_accuracy'; did you mean 'preferences.pairs.logp_accuracy'" in printed
    assert "the runs aren't sorted, and none is the best" in printed
    assert "Sorted by name, without a best run: no run has" in (pages / "index.html").read_text("utf-8")


def test_without_sort_by_runs_are_sorted_by_name_without_a_best_one(results):
    swept(results, {"b": 0.9, "a": 0.1})
    outcome, pages = results.report()
    assert [row["variant"] for row in table(pages)] == ["dpo:a", "dpo:b"]
    assert "best" not in outcome.about
    assert "<code>results/best</code>: " not in (pages / "index.html").read_text("utf-8")


def test_a_single_run_has_a_table(results):
    swept(results, {"only": 0.7})
    _, pages = results.report(sort_by=SORT_BY)
    (row,) = table(pages)
    assert (row["variant"], row["best"]) == ("dpo:only", "yes")
    assert ">differences<" not in (pages / "index.html").read_text("utf-8")


def test_two_sweeps_share_a_table(results):
    specs = {
        "beta-0.1": {}, "beta-0.3": {"beta": 0.3},
        "loss-a": {"loss": {"sigmoid": 1.0, "sft": 0.2}, "training": {"epochs": 2.0}},
        "loss-b": {"loss": "ipo", "training": {"epochs": 2.0}, "lora": {"rank": 4}},
    }  # fmt: skip
    swept(results, {"beta-0.1": 0.1, "beta-0.3": 0.4, "loss-a": 0.3, "loss-b": 0.2}, specs)
    reported = compare_variants(result_set(results), SORT_BY)
    assert reported.labels == ["dpo:beta-0.3", "dpo:loss-a", "dpo:loss-b", "dpo:beta-0.1"]
    assert list(reported.keys) == ["loss", "beta", "epochs", "lora"]
    assert reported.keys["loss"]["dpo:loss-a"] == "sigmoid + 0.2 sft"
    assert reported.keys["lora"] == dict.fromkeys(reported.labels, "–") | {"dpo:loss-b": "rank 4"}
    assert reported.names["dpo:loss-a"] == "sigmoid + 0.2 sft, beta 0.1, epochs 2"
    results.report(sort_by=SORT_BY)


def test_runs_from_two_models_list_the_models(results):
    tokenizer = results.tokenizer()
    chat = results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer)
    pairs = results.pack("pairs-demo-128-bb", results.corpus("pairs", kind="preferences"), tokenizer, kind="preference")
    for name in ("one", "two"):
        results.dpo(name, results.sft(name, chat, tokenizer), pairs)
    assert compare_variants(result_set(results), None).keys == {"from": {"dpo:one": "one", "dpo:two": "two"}}


@pytest.mark.figures
def test_a_run_that_was_stopped_early_has_a_reason_and_is_not_the_best(results):
    reason = "<b>margin</b> -2.1 below -1 at 3 lines of the log"
    made = sft_and_pairs(results)
    for name, accuracy, about in (("a", 0.95, {"stopped": {"step": 1200, "reason": reason}}), ("b", 0.7, {})):
        spec = {"beta": accuracy, "stop_if": {"margin_below": -1.0, "window": 3, "kl_above": None} if about else None}
        results.dpo(name, *made, spec=spec, logged={"kl": 3000.0 if about else 0.5}, **about)
        results.pairs(f"main/dpo-{name}", MOVED, reference=MARGINS)
        results.evaluate(f"main/dpo-{name}", reference=True, reward_accuracy=accuracy)
    outcome, pages = results.report(sort_by=SORT_BY)
    assert outcome.about["best"]["run"] == "dpo:b"
    assert [row["stopped at step"] for row in table(pages)] == ["1200", ""]
    page = (pages / "index.html").read_text("utf-8")
    assert "&lt;b&gt;margin&lt;/b&gt; -2.1" in page
    assert "step 1,200" in page
    assert "<td>margin_below -1, window 3</td>" in page
    assert "<b>dpo:b</b> is the first that wasn't stopped early and is linked" in page
    # Axes are scaled to the runs that weren't stopped early.
    assert "KL to the reference: 0.5 → 0.5" in page
    assert "the reference compared with dpo:b" in page
    assert "stopped early" in page


def test_names_may_contain_dots(results):
    made = sft_and_pairs(results)
    results.dpo("a", *made)
    results.evaluate("main/dpo-a", tasks={"arc.v1.5": {"acc_norm,strict-match": 0.25}})
    reported = compare_variants(result_set(results), "tasks.arc.v1.5.acc_norm,strict-match")
    assert reported.sorted_by.values == {"dpo:a": 0.25}


def test_runs_can_be_sorted_by_a_breakdown(results):
    swept(results, {"a": 0.5, "b": 0.6})
    reported = compare_variants(result_set(results), "conversations.chat.exact_match.by_task.weekday.share")
    assert reported.columns[0] is reported.sorted_by
    assert reported.sorted_by.shown("dpo:a") == "50%"


def test_runs_can_be_sorted_by_every_score_of_an_evaluation(sweep):
    chat = ("held_out_loss", "perplexity", "exact_match.share", "exact_match.mean_response_tokens")
    paths = [f"conversations.chat.{figure}" for figure in (*chat, "exact_match.by_task.weekday.share")]
    pairs = next(iter(result_set(sweep).evaluations.values()))[-1].scores["preferences"]["pairs"]
    paths += [f"preferences.pairs.{figure}" for figure in PREFERENCES.keys() & pairs.keys()]
    assert len(paths) == 14
    for path in paths:
        assert compare_variants(result_set(sweep), path).sorted_by.path == path


def test_warnings_of_a_training_are_shown(results):
    made = sft_and_pairs(results)
    results.dpo("a", *made)
    results.dpo("b", *made)
    warning = {
        "step": 40,
        "text": "chosen <i>completions</i> are collapsing: 0.21 nats",
        "numbers": {"x": 1},
        "kind": "collapse",
    }
    warnings = [
        warning | {"at_end": warning | {"text": "collapsing: 0.5 nats"}},
        warning | {"kind": "only_rejected", "at_end": None},
    ]
    path = results.folder / "results/dpo/b/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"warnings": warnings}))
    _, pages = results.report()
    assert [row["warnings"] for row in table(pages)] == ["", "collapse, only rejected"]
    page = (pages / "index.html").read_text("utf-8")
    assert (
        "chosen &lt;i&gt;completions&lt;/i&gt; are collapsing: 0.21 nats</span> At the end: collapsing: 0.5 nats"
        in page
    )
    assert "0.21 nats</span> Resolved at the end." in page


@pytest.mark.figures
def test_unknown_metrics_are_drawn(results):
    made = sft_and_pairs(results)
    # Metrics of single sources would hide the others.
    logged = {
        "sources.0/kl": 0.7,
        "kl": 0.5,
        "logps_chosen": -20.0,
        "logps_rejected": -30.0,
        "sft_term": 2.0,
        "grad_norm": 1.0,
    }
    results.dpo("a", *made, logged=logged)
    _, pages = results.report()
    svg = (pages / "index.html").read_text("utf-8")
    for title in ("KL to the reference: 0.5", "Logps chosen: chosen (solid) and", "Sft term: 2", "Grad norm: 1"):
        assert title in svg
    assert "Logps rejected" not in svg
    assert "ources.0" not in svg


def test_responses_show_the_changes_from_the_initial_model(results):
    made = sft_and_pairs(results)
    results.dpo("a", *made)
    results.evaluate("main/sft-a", text="Sure! The\nanswer is <b>{answer}</b>.")
    results.evaluate("main/dpo-a", text="The\nanswer is <b>{answer}</b>!")
    _, pages = results.report()
    page = (pages / "samples.html").read_text("utf-8")
    assert "<del>Sure! </del>The\nanswer is &lt;b&gt;7&lt;/b&gt;<del>.</del><ins>!</ins>" in page
    assert page.count("changes from sft:a") == page.count("<del>Sure! ") == 3


def test_a_run_that_a_race_paused_is_never_the_best_of_those_that_went_on(results):
    model, pack = sft_and_pairs(results)
    for name, right in (("a", 0.9), ("b", 0.5)):
        results.dpo(name, model, pack)
        results.evaluate(f"main/dpo-{name}", right=right)
    results.race("s", 0.5, {"b": 1.5, "a": 0.5}, paused={"a": 0.5})
    compared = compare_variants(result_set(results), "preferences.pairs.logp_accuracy")
    assert (compared.labels, compared.best) == (["dpo:a", "dpo:b"], "dpo:b")
    assert compared.stopped["dpo:a"].reason == "paused by its race after 50% of the steps"
    assert "paused after 50%" in (results.report()[1] / "index.html").read_text(encoding="utf-8")


def test_snapshots_beyond_its_pause_are_the_paused_run(results):
    model, pack = sft_and_pairs(results)
    for name in ("a@0.2", "a@0.9", "a", "b"):
        results.dpo(name, model, pack)
        results.evaluate(f"main/dpo-{name}")
    results.race("s", 0.5, {"b": 1.5, "a": 0.5}, paused={"a": 0.5})
    assert paused_runs(result_set(results)) == {"dpo:a": 0.5, "dpo:a@0.9": 0.5}
    compared = compare_variants(result_set(results), "preferences.pairs.logp_accuracy")
    assert compared.stopped.keys() == {"dpo:a", "dpo:a@0.9"}
    assert "at 90% of" not in (results.report()[1] / "index.html").read_text(encoding="utf-8")


def test_a_run_that_stopped_by_itself_isnt_called_paused(results):
    model, pack = sft_and_pairs(results)
    results.dpo("a", model, pack, stopped={"step": 3, "reason": "kl above 1"})
    results.dpo("b", model, pack)
    results.race("s", 0.5, {"b": 1.5}, paused={}, stopped={"a": 3})
    compared = compare_variants(result_set(results), None)
    assert compared.stopped["dpo:a"].reason == "kl above 1"
    page = (results.report()[1] / "index.html").read_text(encoding="utf-8")
    assert "stopped early, at step 3" in page and "0 of 2 variants paused" in page
