"""Trainings in rounds expand to the entries that a person would write by hand."""

from copy import deepcopy

import pytest

from snaketune.config import lineage
from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph
from tests.stages.plan.large import made_from

from .edits import put

ROUNDS = {
    "sample": {"prompts": {"corpora": ["demo-chat"], "limit": 100}, "responses": 4, "generation": {"temperature": 0.8}},
    "score": {"by": {"answer": {"pattern": "Answer: ([^\\n]*)"}}},
    "training": {"learning_rate": 1e-3},
}


@pytest.fixture
def rounds(raw):
    """The default config with an SFT run and a DPO run in two rounds."""
    raw["corpora"]["few"] = raw["corpora"]["demo-chat"] | {"answer_pattern": "Answer: (.*)"}
    raw["sft"]["own"] = deepcopy(ROUNDS) | {
        "use_base": "sft:demo",
        "corpus": "few",
        "tokenizer": "demo",
        "rounds": 2,
        "rows": {"rule": "best", "at_least": 1.0, "min_rows": 10},
    }
    raw["dpo"]["self"] = deepcopy(ROUNDS) | {
        "from": "demo",
        "rounds": 2,
        "reference": "start",
        "mix": {"demo-preferences": 0.2},
        "pairs": {"rule": "best-worst", "margin": 0.5},
    }
    return raw


def _jobs(raw):
    return {job.key: job for job in JobGraph(*load(raw)).jobs.values()}


def test_rejection_sampling_trains_on_the_labelled_rows_and_the_right_answers_of_all_rounds(rounds):
    jobs = _jobs(rounds)
    assert made_from(jobs["sample/own-1"])["model"] == ["sft/demo"]
    assert made_from(jobs["sft/own-1"])["model"] == ["sft/demo"]
    assert made_from(jobs["sample/own-2"])["model"] == made_from(jobs["sft/own-2"])["model"] == ["sft/own-1"]
    config, variants = load(rounds)
    few, second = config.corpora["few"], config.corpora["own-2"]
    assert second.sources[0] == few.sources[0] and [source.scores for source in second.sources[1:]] == [
        "own-1",
        "own-2",
    ]
    assert {(source.rows, source.at_least, source.min_rows) for source in second.sources[1:]} == {("best", 1.0, 10)}
    assert (second.held_out, second.split_seed, second.answer_pattern) == (few.held_out, few.split_seed, "Answer: (.*)")
    # The rows of the first round are selected once.
    graph = JobGraph(*load(rounds))
    assert graph.same_as["results/select/own-2-1/manifest.json"].name == "own-1-1"
    assert variants["sft"]["own"] == ("own-1", "own-2") and "own" not in config.sft


def test_each_round_of_pairs_starts_from_the_round_before(rounds):
    jobs = _jobs(rounds)
    first, second = jobs["dpo/self-1"], jobs["dpo/self-2"]
    assert made_from(first)["model"] == ["sft/demo"] and made_from(second)["model"] == ["dpo/self-1"]
    assert made_from(jobs["sample/self-2"])["model"] == ["dpo/self-1"]
    # The reference stays the model before the first round, of which the second has no other trace.
    assert first.spec.reference is None and second.spec.reference == "result"
    assert made_from(second)["reference"] == made_from(second.artifacts["ref_logps"][0])["model"] == ["sft/demo"]
    config, _ = load(rounds)
    for number in (1, 2):
        made, mixed = config.corpora[f"self-{number}"].sources
        assert (made.scores, made.pairs, made.margin) == (f"self-{number}", "best-worst", 0.5)
        assert mixed == config.corpora["demo-preferences"].sources[0].model_copy(update={"weight": 0.2})
    rounds["dpo"]["self"]["reference"] = "previous"
    second = _jobs(rounds)["dpo/self-2"]
    assert made_from(second.artifacts["ref_logps"][0])["model"] == ["dpo/self-1"] and second.spec.reference is None


def test_a_round_takes_prompts_that_earlier_rounds_did_not_take(rounds):
    rounds["sft"]["own"]["rounds"] = [{}, {"sample.prompts.limit": 300}, {}]
    config, _ = load(rounds)
    prompts = [config.sample[f"own-{number}"].prompts for number in (1, 2, 3)]
    assert [(one.skip, one.limit, one.scored) for one in prompts] == [(0, 100, ()), (100, 300, ()), (400, 100, ())]
    rounds = put(rounds, "sft.own.sample.prompts.solved", 0.1)
    config, _ = load(rounds)
    prompts = [config.sample[f"own-{number}"].prompts for number in (1, 2, 3)]
    assert [(one.scored, one.solved) for one in prompts] == [((), 1.0), (("own-1",), 0.1), (("own-1", "own-2"), 0.1)]


def test_a_change_in_a_round_leaves_those_before_it_alone_and_a_further_one_all(rounds):
    before = _jobs(rounds)
    rounds["dpo"]["self"]["rounds"] = [{}, {"beta": 0.3, "training.epochs": 3}, {}]
    after = _jobs(rounds)
    assert after["dpo/self-2"].spec.beta == 0.3 and after["dpo/self-2"].spec.training.epochs == 3
    assert (after["dpo/self-1"], after["sample/self-2"]) == (before["dpo/self-1"], before["sample/self-2"])
    assert after["dpo/self-3"].spec.beta == before["dpo/self-1"].spec.beta
    rounds["dpo"]["self"]["rounds"] = 3
    after = _jobs(rounds)
    of_run = {key for key in before if "/self-" in key and not key.startswith(("bottleneck", "timing", "report"))}
    assert {key: after[key] for key in of_run} == {key: before[key] for key in of_run}
    assert "dpo/self-3" in after


def test_a_name_stands_for_all_rounds_also_in_a_grid(rounds):
    rounds["eval"]["demo"]["models"] = ["sft:demo", "dpo:swept"]
    rounds["dpo"]["swept"] = {"extends": "self", "grid": {"beta": [0.1, 0.2]}}
    _, variants = load(rounds)
    assert variants["dpo"]["swept"] == ("swept-beta0.1-1", "swept-beta0.1-2", "swept-beta0.2-1", "swept-beta0.2-2")
    assert {"eval/demo/dpo-swept-beta0.2-2", "sample/swept-beta0.1-2"} <= _jobs(rounds).keys()


def test_a_pretrained_model_is_sampled_before_it_is_trained(rounds):
    run = rounds["sft"]["own"]
    del run["use_base"]
    run["base"] = rounds["sft"]["demo"]["base"]
    config, _ = load(rounds)
    assert [config.sample[f"own-{number}"].model for number in (1, 2)] == ["base:own-1", "sft:own-1"]
    assert config.sft["own-2"].base is None and config.sft["own-2"].use_base == "sft:own-1"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sft.own.sample", None, "sft.own: rounds need sample, score, rows; sample is missing"),
        ("sft.own.rounds", None, "sample belongs to rounds; set rounds: 2"),
        ("sft.own.sample.prompts.skip", 5, "sample.prompts.skip: rounds set it for each round"),
        ("sft.own.sample.prompts.split", "held_out", "held-out prompts stay apart"),
        (
            "sft.own.sample.prompts.corpora",
            ["cat"],
            "sft.own.sample.prompts.corpora: there is no 'cat' under `corpora:`",
        ),
        ("sft.own.rounds", [{"use_base": "sft:x"}], "sft.own.rounds.0.use_base: is one for all rounds"),
        ("sft.own.rounds", [{"trainin.epochs": 2}], "sft.own.rounds.0.trainin: unknown key; did you mean 'training'"),
        ("sft.own.rounds", [{"training.epochs": -2}], "sft.own.rounds.0.training.epochs: found -2"),
        ("sft.own-2", {"extends": "demo"}, "a round would be called sft.own-2, and there is an entry of this name"),
        (
            "corpora.few.held_out",
            0.2,
            "corpora.few.held_out: found 0.2, but demo-chat has 0.1, and the rounds of sft.own",
        ),
        ("corpora.few.split_seed", 3, "corpora.few.split_seed: found 3"),
        (
            "corpora.demo-preferences.split_seed",
            3,
            "corpora.demo-preferences.split_seed: found 3, .* rounds of dpo.self",
        ),
        ("dpo.self.corpus", "demo-preferences", "name demo-preferences under mix"),
        ("dpo.self.mix", {"few": 1}, "dpo.self.mix: few has conversations"),
        ("dpo.demo.corpus", "", "corpus is missing: name a corpus of preferences"),
        ("dpo.demo.reference", "start", "reference start belongs to rounds"),
        ("dpo.self.from", "dpo:self", "there is no 'self' under `dpo:`, which is a grid or rounds"),
        ("sft.own.score.by", {"sum": {"a": 1}}, "it names entries of `score:`, of other samples"),
        ("sft.self", {"extends": "own"}, "dpo.self.rounds: a round would be called sample.self-1"),
    ],
)
def test_rounds_that_cannot_be_are_refused(rounds, key, value, message):
    rounds = put(rounds, key, value)
    with pytest.raises(SnaketuneError, match=message):
        load(rounds)


def test_what_a_round_is_made_from_is_known(rounds):
    entries = lineage.made_from(load(rounds)[0])
    assert entries["dpo.self-2"] == ["dpo.self-1", "sft.demo", "corpora.self-2"]
    assert entries["sft.own-2"] == ["sft.own-1", "corpora.own-2", "tokenizers.demo"]
    assert entries["corpora.own-2"] == ["score.own-1", "score.own-2"]


def test_a_chain_of_preference_runs_may_not_be_a_circle(raw):
    raw["dpo"]["second"] = raw["dpo"]["demo"] | {"from": "dpo:third"}
    raw["dpo"]["third"] = raw["dpo"]["demo"] | {"from": "dpo:second"}
    with pytest.raises(SnaketuneError, match=r"dpo\.second → dpo\.third → dpo\.second; start one of them `from`"):
        load(raw)
