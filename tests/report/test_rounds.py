"""Rounds in the report: found in the results, with shares of solved prompts, and findings about them."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from snaketune.report.charts.round_charts import rounds_chart
from snaketune.report.data.results import ResultSet
from snaketune.report.data.rounds import HeldOutScores, Round, Rounds, Sampled, rounds_of
from snaketune.report.judge.round_rules import round_findings

RIGHT = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def sampled(scores: list[list[float]], *, at_least: float | None = None, checked: bool = True, tokens: float = 10.0):
    result = SimpleNamespace()
    made = Sampled(sample=result, score=result, checked=checked, at_least=at_least, rows=3)
    made.__dict__.update({"of_prompt": [np.array(values) for values in scores], "tokens": tokens})
    return made


def chain(*samples: Sampled, exact: dict[int, float], tokens: dict[int, float]) -> Rounds:
    """Rounds with an evaluation of 100 prompts."""
    rounds = [Round(number=n, model=f"sft:own-{n}", sampled=sample) for n, sample in enumerate((*samples, None))]
    scores = HeldOutScores(
        evaluation="all", corpus="chat", tokens=tokens, kl={}, others={},
        exact={number: (share, (share - 0.1, share + 0.1)) for number, share in exact.items()},
    )  # fmt: skip
    return Rounds(key="sft.own", rounds=rounds, held_out=[scores])


def test_prompts_are_solved_at_first_try_and_at_least_once():
    two = sampled(RIGHT)
    assert (two.first_try, two.at_least_once, two.settled, two.mean) == (0.375, 0.5, (1, 2), 0.375)
    low, high = two.once_interval
    assert low < 0.5 < high
    # Of scores of many values, only the selection says what is right.
    graded = [[2.0, 5.0, 9.0], [1.0, 2.0, 3.0]]
    assert sampled(graded).first_try is None and sampled(graded).shares == [] and sampled(graded).settled == (0, 0)
    assert sampled(graded, at_least=4.0).at_least_once == 0.5


def test_the_rounds_are_found_by_what_runs_are_trained_on(results):
    """Two rounds, and a run on responses of another model than it starts from."""
    tokenizer = results.tokenizer()
    start = results.sft("few", results.pack("few-demo-128-aa", results.corpus("few"), tokenizer), tokenizer)
    pack = results.add
    before, packs = start, {}
    for number in (1, 2):
        name = f"own-{number}"
        sample = results.sample(name, before, responses=3)
        selected = results.select(name, results.score(name, sample), sample=sample)
        corpus = results.add("corpus", name, spec={}, counts={}, inputs={"selected": [selected]})
        tokens = pack("tokenize", f"{name}/1-of-1", spec={}, counts={}, inputs={"corpus": [corpus]})
        plan = pack("plan", name, spec={}, counts={}, inputs={"tokens": [tokens]})
        packs[name] = pack("pack", name, spec={}, counts={}, inputs={"plan": [plan]})
        before = results.add("sft", name, spec={}, counts={}, inputs={"pack": [packs[name]], "model": [before]})
    results.add("sft", "other", spec={}, counts={}, inputs={"pack": [packs["own-2"]], "model": [start]})
    files = results.files()
    (found,) = rounds_of(ResultSet(results.named(), files["manifests"], files["runs"]))
    assert [one.model for one in found.rounds] == ["sft:few", "sft:own-1", "sft:own-2"]
    assert [one.sampled and one.sampled.sample.name for one in found.rounds] == ["own-1", "own-2", None]


@pytest.mark.parametrize(
    ("exact", "tokens", "kinds"),
    [
        ({0: 0.4, 2: 0.4}, {0: 10.0, 2: 20.0}, ["longer responses"]),
        # The score grew too; or the length didn't.
        ({0: 0.4, 2: 0.7}, {0: 10.0, 2: 20.0}, []),
        ({0: 0.4, 2: 0.4}, {0: 10.0, 2: 11.0}, []),
        ({2: 0.4}, {2: 20.0}, []),
    ],
)
def test_responses_that_grow_while_the_score_does_not_are_a_finding(exact, tokens, kinds):
    found = list(round_findings([chain(sampled(RIGHT), sampled(RIGHT), exact=exact, tokens=tokens)]))
    assert [finding.kind for finding in found] == kinds
    assert all(finding.key == "sft.own.score" for finding in found)


def test_a_score_that_grows_while_checked_answers_fall_is_a_finding():
    low, high = [[1.0, 2.0], [1.5, 2.0]] * 20, [[8.0, 9.0], [8.5, 9.0]] * 20
    judged = [sampled(scores, checked=False) for scores in (low, high)]
    tokens = {0: 10.0, 2: 10.0}
    (finding,) = round_findings([chain(*judged, exact={0: 0.6, 2: 0.3}, tokens=tokens)])
    assert finding.kind == "scores part" and "60%, then 30%" in finding.message
    # Within the interval; or the score is that of the checked answers itself.
    assert not list(round_findings([chain(*judged, exact={0: 0.6, 2: 0.55}, tokens=tokens)]))
    checked = [sampled(scores) for scores in (low, high)]
    assert not list(round_findings([chain(*checked, exact={0: 0.6, 2: 0.3}, tokens=tokens)]))


def test_without_an_evaluation_the_samples_say_whether_responses_only_grow():
    one = chain(sampled(RIGHT), sampled(RIGHT, tokens=15.0), exact={}, tokens={})
    (finding,) = round_findings([one])
    assert finding.kind == "longer responses" and "10 to 15 tokens" in finding.message


def test_the_chart_says_how_it_went_from_the_start_to_the_last_round():
    one = chain(sampled(RIGHT), exact={0: 0.4, 1: 0.7}, tokens={0: 10.0, 1: 9.0})
    right, lengths = rounds_chart([one]).panels
    assert (right.title, lengths.title) == ("own: 40% of chat right, then 70%", "own: tokens per response")
    axes = Figure().subplots()
    right.draw(axes)
    assert {text.get_text() for text in axes.texts} == {"40%", "70%"}
