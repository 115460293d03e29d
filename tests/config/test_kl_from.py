"""`eval.NAME.kl_from`: the model from which the divergence of responses is measured."""

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph


def test_a_model_is_compared_with_the_named_one_but_not_with_itself(raw):
    raw["eval"]["demo"]["kl_from"] = "sft:demo"
    jobs = {job.key: job for job in JobGraph(*load(raw)).jobs.values()}
    aligned, itself, before = (jobs[f"eval/demo/{name}"] for name in ("dpo-demo", "sft-demo", "base-demo"))
    assert aligned.spec.kl and [job.key for job in aligned.artifacts["kl_from"]] == ["sft/demo"]
    assert not itself.spec.kl and itself.artifacts["kl_from"] == ()
    assert before.spec.kl
    raw["eval"]["demo"]["kl_from"] = "base:demo"
    jobs = {job.key: job for job in JobGraph(*load(raw)).jobs.values()}
    # A model from scratch has no result.
    assert jobs["eval/demo/dpo-demo"].spec.kl_base == load(raw)[0].sft["demo"].base
    for key, value, message in (
        ("kl_from", "sft:cat", "eval.demo.kl_from: there is no 'cat'"),
        ("conversations", [], "kl_from compares responses to held-out prompts"),
    ):
        wrong = raw["eval"]["demo"] | {key: value}
        with pytest.raises(SnaketuneError, match=message):
            load(raw | {"eval": {"demo": wrong}})
