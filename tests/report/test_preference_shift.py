"""Changes by DPO in held-out pairs: before and after, by source, and flipped pairs."""

import pytest
from invented_results import Results
from invented_sweeps import MARGINS, MOVED, result_set, sft_and_pairs, table

from snaketune.report.data.preference_shift import flips, preference_changes


def test_changes_are_broken_down_by_source(results):
    made = sft_and_pairs(results)
    counts = {"read": 40, "quarantined": 0, "kept": 40, "dropped": {}, "extra": 0, "joined": 0, "repeated": 0}
    sources = [counts | {"files": [name], "layouts": {}, "ignored": {}} for name in ("one/<b>.jsonl", "two.jsonl")]
    results.corpus("pairs", kind="preferences", sources=sources)
    results.dpo("a", *made, spec={"beta": 0.5})
    results.pairs("main/dpo-a", MOVED, reference=MARGINS, sources=2)
    results.evaluate("main/dpo-a", by_source={str(number): {"reward_accuracy": number / 4} for number in (1, 0)})
    (change,) = preference_changes(result_set(results))
    first, second = change.by_source()
    # up and high; down and low.
    assert (first["name"], first["pairs"], first["before"], first["after"]) == ("0: one/<b>.jsonl", 2, 0.5, 1.0)
    assert (second["name"], second["pairs"], second["before"], second["after"]) == ("1: two.jsonl", 2, 0.5, 0.0)
    assert first["chosen"] == pytest.approx(0.5 * 10 * (0.8 + 0.5) / 2) and first["rejected"] == 0
    _, pages = results.report()
    page = (pages / "preferences.html").read_text("utf-8")
    assert "0: one/&lt;b&gt;.jsonl" in page and "50% → 100%" in page
    shares = {row["measure"]: row["dpo:a"] for row in table(pages, "evaluation") if "source" in row["measure"]}
    assert shares == {f"reward accuracy: source {number}": str(number / 4) for number in (0, 1)}


@pytest.mark.figures
def test_a_tie_is_half_a_preference(results):
    made = sft_and_pairs(results)
    counts = {"read": 40, "quarantined": 0, "kept": 40, "dropped": {}, "extra": 0, "joined": 0, "repeated": 0}
    results.corpus(
        "pairs", kind="preferences", sources=[counts | {"files": [n], "layouts": {}, "ignored": {}} for n in ("a", "b")]
    )
    results.dpo("a", *made, spec={"beta": 0.5})
    ties = dict.fromkeys(MARGINS, 0.0)
    results.pairs("main/dpo-a", ties, reference=ties, sources=2)
    results.evaluate("main/dpo-a")
    (change,) = preference_changes(result_set(results))
    assert [(one["before"], one["after"]) for one in change.by_source()] == [(0.5, 0.5)] * 2
    _, pages = results.report()
    assert "chosen preferred per token in 50% → 50%" in (pages / "preferences.html").read_text("utf-8")


def moved(results: Results, **evaluated) -> list:
    """Changes of a run with pairs flipped both ways. `evaluated`: margins of the `sft` model and of the `reference`."""
    made = sft_and_pairs(results)
    results.dpo("a", *made, spec={"beta": 0.5})
    results.pairs("main/dpo-a", MOVED, reference=evaluated.get("reference"))
    results.evaluate("main/dpo-a")
    if "sft" in evaluated:
        results.pairs("main/sft-a", evaluated["sft"])
        results.evaluate("main/sft-a")
    return preference_changes(result_set(results))


@pytest.mark.parametrize("known", [{"sft": MARGINS}, {"reference": MARGINS}, {"sft": MARGINS, "reference": MARGINS}])
def test_before_is_the_initial_model_or_the_reference(results, known):
    (change,) = moved(results, **known)
    assert change.before == ("sft:a" if "sft" in known else "reference")
    assert change.outcomes(per_token=True) == {"won": 1, "lost": 1, "right": 1, "wrong": 1}
    assert [change.ids[index] for won in (True, False) for index in change.flipped(won, 9)] == ["up", "down"]
    before_P2, after_P2 = change.rewards()
    assert not before_P2.any()
    scale = 0.5 if "reference" in known else 1.0
    assert after_P2[:, 0].tolist() == pytest.approx([scale * 10 * (MOVED[pair] - MARGINS[pair]) for pair in change.ids])
    results.report()


def test_rewards_before_are_not_zero_if_the_reference_is_not_the_initial_model(results):
    other = {pair: margin + 1 for pair, margin in MARGINS.items()}
    (change,) = moved(results, sft=MARGINS, reference=other)
    before_P2, _ = change.rewards()
    assert before_P2[:, 0].tolist() == pytest.approx([-0.5 * 10] * 4)
    _, pages = results.report()
    assert "(outlines: before)" in (pages / "preferences.html").read_text("utf-8")


def test_a_run_without_a_reference_is_compared_with_its_initial_model(results):
    (change,) = moved(results, sft=MARGINS)
    assert change.beta is None
    before_P2, after_P2 = change.rewards()
    assert not before_P2.any()
    assert after_P2[:, 0].tolist() == pytest.approx([10 * (MOVED[pair] - MARGINS[pair]) for pair in change.ids])
    _, pages = results.report()
    assert "dpo:a: mean log-prob gains, chosen" in (pages / "preferences.html").read_text("utf-8")


def test_without_reference_and_initial_model_there_are_no_changes(results):
    assert moved(results) == []
    _, pages = results.report()
    assert "No evaluation scored" in (pages / "preferences.html").read_text("utf-8")


def test_pairs_that_only_one_model_has_are_excluded(results):
    (change,) = moved(results, sft={pair: MARGINS[pair] for pair in ("low", "up")})
    assert sorted(change.ids) == ["low", "up"]


def test_summed_and_per_token_preferences_may_differ(results):
    made = sft_and_pairs(results)
    results.dpo("a", *made)
    results.pairs("main/dpo-a", {"p": 0.5}, reference={"p": -0.5})
    results.evaluate("main/dpo-a")
    (change,) = preference_changes(result_set(results))
    # The same sums, with fewer tokens in the rejected completion.
    change.counts_P2[:] = [[100, 5]]
    assert change.outcomes(per_token=True)["right"] == 1
    assert change.outcomes(per_token=False)["won"] == 1


def test_flipped_pairs_are_shown_with_their_texts(results):
    texts = {pair: (f"ask {pair}", f"<i>good {pair}</i>", f"bad {pair} " + "x" * 5000) for pair in MARGINS}
    tokenizer = results.tokenizer()
    model = results.sft("a", results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer), tokenizer)
    pairs = results.texts("pairs", texts)
    results.dpo("a", model, results.pack("pairs-demo-128-bb", pairs, tokenizer, kind="preference"))
    results.pairs("main/dpo-a", MOVED, reference=MARGINS)
    results.evaluate("main/dpo-a")
    reported = result_set(results)
    (flip,) = flips(reported, preference_changes(reported)[0], True, 5)
    assert (flip["prompt"], flip["chosen"]) == ("[user] ask up", "<i>good up</i>")
    assert len(flip["rejected"]) < 1000
    _, pages = results.report()
    for name in ("index.html", "preferences.html"):
        page = (pages / name).read_text("utf-8")
        assert "&lt;i&gt;good up&lt;/i&gt;" in page
        assert "&lt;i&gt;good down&lt;/i&gt;" in page
        assert "good high" not in page
