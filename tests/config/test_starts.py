"""Validation of initial weights and adapters of runs."""

import itertools

import pytest

from snaketune.config.base_models import Pretrained
from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph


@pytest.fixture
def more(raw):
    """The default config, with a run that starts from its SFT run."""
    raw["sft"]["more"] = {key: raw["sft"]["demo"][key] for key in ("corpus", "tokenizer", "training")} | {
        "use_base": "sft:demo",
        "lora": {"rank": 4},
    }
    return raw


def test_a_run_starts_from_another(more):
    config, _ = load(more)
    assert config.sft["more"].continues == "demo"
    assert config.sft["more"].base is None
    assert config.sft["demo"].continues is None


def refused(raw, message: str) -> None:
    with pytest.raises(SnaketuneError, match=message):
        load(raw)


def test_a_run_has_exactly_one_source_of_weights(more):
    more["sft"]["more"]["base"] = {"path": "some/model"}
    refused(more, r"sft\.more: .*`use_base: sft:NAME` as the initial weights; found both")
    del more["sft"]["more"]["base"], more["sft"]["more"]["use_base"]
    refused(more, r"sft\.more: .*found neither")


def test_an_unknown_run_as_initial_weights_is_refused(more):
    more["sft"]["more"]["use_base"] = "sft:dmo"
    refused(more, r"sft\.more\.use_base: there is no 'dmo' under `sft:`; did you mean 'demo'")
    for wrong in ("demo", "dpo:demo", "sft:"):
        more["sft"]["more"]["use_base"] = wrong
        refused(more, rf"sft\.more\.use_base: found '{wrong}'")


def test_circular_initial_weights_are_refused(more):
    more["sft"]["most"] = more["sft"]["more"] | {"use_base": "sft:more"}
    more["sft"]["more"]["use_base"] = "sft:most"
    refused(more, r"sft\.more → sft\.most → sft\.more; set `base` in one of them")
    more["sft"]["more"]["use_base"] = "sft:more"
    refused(more, r"sft\.more → sft\.more; set `base`")


def test_a_run_must_have_the_tokenizer_of_its_initial_weights(more):
    more["tokenizers"]["other"] = more["tokenizers"]["demo"]
    more["sft"]["more"]["tokenizer"] = "other"
    refused(more, r"sft\.more\.tokenizer: found 'other', but 'sft:demo', from which the run starts, has 'demo'")


def test_rows_must_fit_the_first_model_of_the_chain(more):
    more["sft"]["more"]["packing"] = {"length": 2**15}
    refused(more, r"sft\.more\.packing\.length: 32768 tokens, but the model's base\.max_positions is")
    del more["sft"]["more"]["packing"]
    more["dpo"]["more"] = more["dpo"]["demo"] | {"from": "more", "packing": {"length": 2**15}}
    refused(more, r"dpo\.more\.packing\.length: 32768 tokens")


def test_a_continued_adapter_has_no_dropout_like_its_reference(more):
    more["sft"]["more"]["lora"]["dropout"] = 0.05
    more["dpo"]["further"] = more["dpo"]["demo"] | {"from": "more", "lora": "continued"}
    more["dpo"]["anew"] = more["dpo"]["demo"] | {"from": "more", "lora": {"rank": 2, "dropout": 0.1}}
    graph = JobGraph(*load(more))
    assert graph.job("sft", "more").spec.lora.dropout == 0.05
    assert graph.job("dpo", "further").spec.lora.dropout == 0.0
    assert graph.job("dpo", "anew").spec.lora.dropout == 0.1


def test_an_extending_run_may_replace_its_initial_weights(more):
    more["sft"]["again"] = {"extends": "demo", "use_base": "sft:more"}
    more["sft"]["anew"] = {"extends": "again", "base": {"path": "some/model"}, "tokenizer": "adopted"}
    more["tokenizers"]["adopted"] = {"adopt": "some/model"}
    config, _ = load(more)
    assert (config.sft["again"].base, config.sft["again"].continues) == (None, "more")
    assert config.sft["anew"].base == Pretrained(path="some/model")
    assert config.sft["anew"].continues is None


def test_a_grid_over_use_base_is_named_by_the_runs(more):
    more["sft"]["again"] = {"extends": "demo", "grid": {"use_base": ["sft:demo", "sft:more"]}}
    more["sft"]["ranks"] = {"extends": "more", "grid": {"lora.rank": [2, 8], "lora.dora": [True]}}
    config, variants = load(more)
    assert variants["sft"]["again"] == ("again-use_basedemo", "again-use_basemore")
    assert config.sft["again-use_basemore"].continues == "more"
    assert [config.sft[name].lora.rank for name in variants["sft"]["ranks"]] == [2, 8]
    assert all(config.sft[name].continues == "demo" for name in variants["sft"]["ranks"])


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": "layers.(q|v"}, r"lora\.target_modules: .* is not a regular expression: "),
        ({"target_modules": []}, r"lora\.target_modules"),
        ({"modules_to_save": [""]}, r"lora\.modules_to_save"),
        ({"rslora": 1.5}, r"lora\.rslora"),
        ({"merged": False}, r"lora\.merged: .*did you mean 'merge'"),
    ],
)
def test_invalid_adapters_are_refused(more, lora, message):
    more["sft"]["more"]["lora"] = lora
    refused(more, rf"sft\.more\.{message}")


def test_a_continued_adapter_counts_as_an_adapter_in_the_preflight(more):
    """Otherwise the memory check would assume that all weights are trained, and refuse runs that fit."""
    more["dpo"]["more"] = {
        key: more["dpo"]["demo"][key] for key in more["dpo"]["demo"] if key not in ("from", "lora", "grid")
    } | {"from": "more", "lora": "continued", "reference": {"path": "some/judge"}}
    job = JobGraph(*load(more)).job("preflight", "demo")
    (run,) = [run for run in job.spec.runs if run.key == "dpo.more"]
    assert run.run.lora.rank == 4
    assert run.reference == Pretrained(path="some/judge")


def test_timings_that_are_compared_run_one_after_the_other(more):
    """In parallel they would compete for the machine, or run on different machines."""
    more["doctor"] = {
        "repeats": 2,
        "changes": {"one": {"training.batch_rows": 8}, "other": {"packing.length": 128}},
    }
    more["sft"]["demo"]["training"] |= {"precision": "float32", "optimizer": "adamw_torch"}
    graph = JobGraph(*load(more))
    timings = [job for job in graph.stage("timing") if job.name.startswith("sft-demo/")]
    assert len(timings) == 2 * 5
    for before, job in itertools.pairwise(timings):
        assert [one.name for one in job.after if one.stage == "timing"] == [before.name]
