"""A reward model in a run: trained, evaluated beside policies, and asked for the scores of responses."""

import json

import pytest

from .conftest import Project
from .reruns import SAMPLED

pytestmark = [pytest.mark.workflow, pytest.mark.slow]


def test_a_reward_model_is_trained_evaluated_and_scores_responses(project: Project):
    project.config["reward"] = {
        "liked": {
            "from": "run",
            "corpus": "pairs",
            "packing": {"length": 256},
            "training": {"epochs": 2, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 1e-3},
            "operation": {"log_steps": 1},
        }
    }
    project.config["eval"]["both"]["models"].append("reward:liked")
    project.config["sample"] = {"tries": SAMPLED}
    project.config["score"] = {"worth": {"samples": "tries", "by": {"reward": {"model": "reward:liked"}}}}
    said = project.snakemake()
    assert project.stale() == set(), said

    scores = json.loads(project.read("results/eval/both/reward-liked/scores/scores.json"))
    assert scores["conversations"] == {}
    pairs = scores["preferences"]["pairs"]
    assert sum(one["pairs"] for one in pairs["calibration"]) == pairs["pairs"] > 0
    trained = json.loads(project.read("results/reward/liked/manifest.json"))
    assert trained["counts"]["pairs"] > 0
    counts = json.loads(project.read("results/rate/worth/manifest.json"))["counts"]
    assert counts["scored"] == counts["responses"] == 12
    page = project.read("results/report/pages/index.html")
    assert '<section id="reward">' in page and "reward:liked" in page

    # Policies are evaluated without it, and a run of it anew is another scorer.
    project.config["reward"]["liked"]["center_rewards_coefficient"] = 0.1
    assert project.stale() == {"reward", "eval", "rate", "card", "report"}
