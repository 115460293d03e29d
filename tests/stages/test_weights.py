"""Stages that read a model get all results that hold its weights, base layers included."""

import copy
from typing import Any

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job

TRAINING = {"learning_rate": 0.1}
ALONE = {"rank": 4, "merge": False}
CONFIG: dict[str, Any] = {
    "corpora": {
        "chat": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "f00"}}]},
        "pairs": {"kind": "preferences", "sources": [{"hub": {"path": "a/c", "revision": "f00"}}]},
    },
    "tokenizers": {"own": {"adopt": "some/model"}},
    "sft": {
        "one": {
            "base": {"path": "some/model", "revision": "f00", "trust_remote_code": True},
            "corpus": "chat",
            "tokenizer": "own",
            "training": TRAINING,
            "lora": ALONE,
        },
        "two": {
            "use_base": "sft:one",
            "corpus": "chat",
            "tokenizer": "own",
            "training": TRAINING,
            "lora": ALONE,
        },
    },
    "dpo": {"run": {"from": "two", "corpus": "pairs", "training": TRAINING, "lora": ALONE}},
    "eval": {"all": {"models": ["base:one", "base:two", "sft:two", "dpo:run"], "preferences": ["pairs"]}},
}


def graph(**edits: bool) -> JobGraph:
    """Args: edits: by run, whether it merges."""
    config = copy.deepcopy(CONFIG)
    for name, merge in edits.items():
        section = "dpo" if name == "run" else "sft"
        config[section][name]["lora"] = {"rank": 4, "merge": merge}
    return JobGraph(*load(config))


def made_from(job: Job) -> tuple[str | None, list[str], bool]:
    """The base's path, the results from the uppermost down, and whether their code may run."""
    results = [made.key for role in ("model", "base_layers") for made in job.artifacts[role]]
    return job.spec.base and job.spec.base.path, results, job.spec.trust_remote_code


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({}, {
            "sft/one": ("some/model", []),
            "sft/two": ("some/model", ["sft/one"]),
            "ref_logps": ("some/model", ["sft/two", "sft/one"]),
            "dpo/run": ("some/model", ["sft/two", "sft/one"]),
            "eval/all/base-one": ("some/model", []),
            "eval/all/base-two": ("some/model", ["sft/one"]),
            "eval/all/sft-two": ("some/model", ["sft/two", "sft/one"]),
            "eval/all/dpo-run": ("some/model", ["dpo/run", "sft/two", "sft/one"]),
        }),
        ({"one": True}, {
            "sft/two": (None, ["sft/one"]),
            "dpo/run": (None, ["sft/two", "sft/one"]),
            "eval/all/base-two": (None, ["sft/one"]),
            "eval/all/dpo-run": (None, ["dpo/run", "sft/two", "sft/one"]),
        }),
        ({"two": True}, {
            "sft/two": ("some/model", ["sft/one"]),
            "ref_logps": (None, ["sft/two"]),
            "dpo/run": (None, ["sft/two"]),
            "eval/all/dpo-run": (None, ["dpo/run", "sft/two"]),
        }),
        ({"run": True}, {
            "dpo/run": ("some/model", ["sft/two", "sft/one"]),
            "eval/all/dpo-run": (None, ["dpo/run"]),
        }),
    ],
)  # fmt: skip
def test_adapters_are_read_with_all_their_base_layers(edits, expected):
    jobs = {
        job.key.split("/two-")[0] if job.stage == "ref_logps" else job.key: job for job in graph(**edits).jobs.values()
    }
    for key, (base, results) in expected.items():
        assert made_from(jobs[key]) == (base, results, True), key


def test_the_initial_model_of_a_run_is_evaluated_once():
    plan = graph()
    plan_of_one = plan.job("eval", "all/base-two")
    config = copy.deepcopy(CONFIG)
    config["eval"]["all"]["models"] = ["sft:one", "base:two"]
    twice = JobGraph(*load(config))
    assert twice.same_as[twice.job("eval", "all/base-two").manifest].name == "all/sft-one"
    assert plan_of_one.manifest not in plan.same_as
