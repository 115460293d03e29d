"""A race pauses variants that are clearly worse; a changed rule resumes them to the same bytes."""

import json
import re

import pytest

pytestmark = pytest.mark.workflow

# One variant that learns, one a little slower, one that doesn't learn.
RATES = (0.003, 0.002, 1e-8)
NAMES = [f"sweep-learning_rate{rate}" for rate in RATES]
RACE = {"metric": "reward_margin_nats", "rungs": [0.25, 0.5]}


def manifest_of(project, stage, name):
    return json.loads(project.read(f"results/{stage}/{name}/manifest.json"))


@pytest.mark.slow
def test_a_race_pauses_variants_and_resumes_them_to_the_same_weights(finished, tmp_path):
    plain, project = (finished.copy_to(tmp_path / name) for name in ("plain", "project"))
    for one in (plain, project):
        one.cores = 2
        # As many held-out pairs as a comparison needs.
        one.config["corpora"]["pairs"]["held_out"] = 0.5
        sweep = {"extends": "run", "training": {"epochs": 4}, "grid": {"training.learning_rate": list(RATES)}}
        one.config["dpo"]["sweep"] = sweep
        one.config["eval"]["both"]["models"] = ["dpo:sweep"]
    plain.snakemake(*(f"results/dpo/{name}/manifest.json" for name in NAMES))
    whole = {name: manifest_of(plain, "dpo", name) for name in NAMES}

    project.config["dpo"]["sweep"]["race"] = RACE
    project.snakemake()
    decisions = json.loads(project.read("results/race/dpo-sweep@0.25/decisions/race.json"))
    paused = decisions["paused"]
    assert f"dpo/{NAMES[2]}" in paused and f"dpo/{NAMES[0]}" not in paused
    assert decisions["rows"] >= 20 and decisions["table"][-1]["run"] == f"dpo/{NAMES[2]}"
    last = json.loads(project.read("results/race/dpo-sweep@0.5/decisions/race.json"))["paused"]
    for name in NAMES:
        made = manifest_of(project, "dpo", name)
        if share := last.get(f"dpo/{name}"):
            # It is its snapshot at that rung.
            assert made["payload"] == manifest_of(project, "dpo", f"{name}@{share}")["payload"]
            assert made["spec"]["training"]["until"] == share
            assert made["counts"]["steps"] < whole[name]["counts"]["steps"]
        else:
            assert (made["payload"], made["spec"]) == (whole[name]["payload"], whole[name]["spec"])
    assert f"paused after {paused[f'dpo/{NAMES[2]}']:.0%}" in project.read(f"results/logs/dpo/{NAMES[2]}.log")
    page = project.read("results/report/pages/index.html")
    assert "paused after 25%" in page and 'id="races"' in page
    assert "paused by its race after 25% of the steps" in page
    # The evaluations of rungs are not evaluations of the report.
    assert "race-dpo-sweep" not in page and f"{NAMES[0]}@" not in page
    assert not project.stale()

    # With a higher `keep`, paused runs resume, each from its own snapshot.
    project.config["dpo"]["sweep"]["race"] = RACE | {"keep": 2}
    project.snakemake(*(f"results/dpo/{name}/manifest.json" for name in NAMES))
    resumed = json.loads(project.read("results/race/dpo-sweep@0.5/decisions/race.json"))["paused"]
    assert len(resumed) <= 1
    for name in NAMES:
        if f"dpo/{name}" not in resumed:
            assert manifest_of(project, "dpo", name)["payload"] == whole[name]["payload"]
    # Without a race, only paused ones are trained further.
    del project.config["dpo"]["sweep"]["race"]
    stale = [line for line in project.snakemake("--dry-run").splitlines() if line.startswith("stale: dpo/")]
    for name in NAMES:
        assert any(f"dpo/{name}" in line and "until" in line for line in stale) == (f"dpo/{name}" in resumed)


def test_until_a_rule_whose_runs_have_snapshots_is_refused(fresh):
    fresh.config["dpo"]["sweep"] = {"extends": "run", "grid": {"beta": [0.1, 0.2]}, "race": RACE}
    said = fresh.snakemake("--dry-run", "--until", "dpo", check=False)
    assert re.search(
        r"--until dpo would end before dpo/sweep-beta0\.1@0\.5, .* snakemake results/dpo/sweep-beta0\.1@0\.5/", said
    )
    # Evaluations of rungs are evaluations too.
    assert "--until eval would end before eval/" in fresh.snakemake("--dry-run", "--until", "eval", check=False)
    # So does one rule of several after another, as ref_logps after tokenize.
    both = fresh.snakemake("--dry-run", "--until", "tokenize", "ref_logps", check=False)
    assert re.search(r"--until tokenize ref_logps would end before ref_logps/.*another tokenize or ref_logps job", both)
    assert "sft" in fresh.stale("--until", "sft")
