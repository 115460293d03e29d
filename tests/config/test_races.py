"""Races in a config: what is accepted, and the messages for what isn't."""

from copy import deepcopy

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph

RACE = {"metric": "reward_accuracy", "rungs": [0.1]}
BETAS = {"beta": [0.1, 0.2]}


@pytest.fixture
def plan(raw):
    """Return a function that plans the default config with a sweep of these keys, and changes of whole sections."""

    def planned(sweep, **sections):
        config = deepcopy(raw)
        config["dpo"]["sweep"] = {"extends": "demo"} | sweep
        for section, entries in sections.items():
            config[section] |= entries
        return JobGraph(*load(config))

    return planned


@pytest.mark.parametrize(
    "sweep",
    [
        {"grid": BETAS, "race": RACE | {"rungs": [0.1, 0.3], "keep": 1, "tolerance": 0.1}},
        # Keys that a race adds to are varied.
        {
            "grid": {"training": [{"epochs": 1, "learning_rate": 1e-3}, {"epochs": 2, "learning_rate": 1e-3}]},
            "race": RACE,
        },
        {"grid": BETAS | {"training.snapshots": [[0.2]]}, "race": RACE},
        {"grid": BETAS | {"race.metric": ["reward_accuracy"], "race.rungs": [[0.1]]}},
    ],
)
def test_a_race_is_planned_at_each_rung(plan, sweep):
    graph = plan(sweep)
    assert {job.name for job in graph.stage("race")} >= {"dpo-sweep@0.1"}
    runs = [job for job in graph.stage("dpo") if job.name.startswith("sweep") and "@" not in job.name]
    assert len(runs) == 2 and all(job.race for job in runs)


@pytest.mark.parametrize(
    ("race", "expected"),
    [
        ({"metric": "x"}, "race.metric: found 'x'"),
        ({"metric": "held_out_loss"}, "dpo.sweep.race.metric: found held_out_loss; expected reward_accuracy, "),
        ({"keep": 2}, "dpo.sweep.race.keep: found 2, but the grid has 2 variants"),
        ({"keep": 0}, "race.keep: found 0"),
        ({"tolerance": -1}, "race.tolerance: found -1"),
        ({"rungs": []}, "race.rungs: found []"),
        ({"rungs": [0.3, 0.1]}, "race.rungs: expected ascending shares, found [0.3, 0.1]"),
        ({"rungs": ["0.1"]}, "race.rungs.0: found '0.1'; expected a number"),
        ({"rungs": [1e-5]}, "race.rungs.0: found 1e-05; expected at least 0.001"),
        ({"rungs": [0.1, 0.10000000000001]}, "two snapshots (or rungs of a race) would have one name"),
        ({"rung": [0.1]}, "race.rung: unknown key; did you mean 'rungs'?"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(plan, race, expected):
    with pytest.raises(SnaketuneError) as refused:
        plan({"grid": BETAS, "race": RACE | race})
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ({"race": RACE}, "dpo.sweep.race.keep: found 1, but there is no grid"),
        ({"grid": BETAS | {"race.keep": [1, 2]}, "race": RACE}, "dpo.sweep.race: the grid varies it"),
        ({"grid": BETAS | {"loss": ["sigmoid", "simpo"]}, "race": RACE}, "reward_accuracy needs the reference's"),
        ({"grid": BETAS | {"packing.length": [256, 512]}, "race": RACE}, "variants have different held-out rows"),
        ({"grid": BETAS, "race": RACE, "training": {"until": 0.5}}, "aren't cut by training.until"),
        (
            {"grid": BETAS, "race": RACE, "training": {"keep": "best"}},
            "snapshots, and the rungs of a race, are weights on the way",
        ),
    ],
)
def test_variants_that_cant_be_compared_are_refused(plan, sweep, expected):
    with pytest.raises(SnaketuneError) as refused:
        plan(sweep)
    assert expected in str(refused.value)


def test_the_name_of_its_evaluations_is_reserved(plan, raw):
    with pytest.raises(SnaketuneError, match=r"eval\.race-dpo-sweep: the race of dpo\.sweep evaluates under this name"):
        plan({"grid": BETAS, "race": RACE}, eval={"race-dpo-sweep": raw["eval"]["demo"]})


def test_a_run_that_extends_a_sweep_inherits_no_race(plan):
    graph = plan({"grid": BETAS, "race": RACE}, dpo={"other": {"extends": "sweep"}})
    assert graph.job("dpo", "other").race is None
