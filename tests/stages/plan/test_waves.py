"""Corpora of a model's own responses, in rounds: planned without a circle, and checked when their rows are there."""

import copy

import pytest

from snaketune.config.lineage import made_from, waves
from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph
from tests.workflow.conftest import MICRO, Project
from tests.workflow.reruns import CHECKED, SAMPLED

PAIRS = {"kind": "preferences", "held_out": 0.2}


def rounds() -> dict:
    """DPO on pairs of the SFT model's responses, then on pairs of that DPO run's."""
    config = copy.deepcopy(MICRO)
    before = "sft:run"
    for number in (1, 2):
        config.setdefault("sample", {})[f"tries{number}"] = SAMPLED | {"model": before}
        config.setdefault("score", {})[f"worth{number}"] = CHECKED | {"samples": f"tries{number}"}
        source = {"scores": f"worth{number}", "pairs": "best-worst"}
        config["corpora"][f"own{number}"] = PAIRS | {"sources": [source]}
        config["dpo"][f"round{number}"] = config["dpo"]["run"] | {"corpus": f"own{number}"}
        before = f"dpo:round{number}"
    config["eval"]["both"] |= {"models": ["sft:run", "dpo:round1", "dpo:round2"], "preferences": ["pairs", "own1"]}
    return config


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(Project(tmp_path / "project").write_data().folder)


def test_each_wave_of_sampling_has_a_preflight_of_its_own():
    graph = JobGraph(*load(rounds()))
    for number, wave in (("", ""), ("1", "-1"), ("2", "-2")):
        preflight = graph.job("preflight", f"run{wave}")
        keys = {run.key for run in preflight.spec.runs}
        assert keys == ({f"dpo.round{number}"} if number else {"sft.run", "dpo.run"})
        job = graph.job("dpo", f"round{number}" if number else "run")
        assert job.operation.preflight == preflight.manifest
    # An evaluation on pairs that aren't there yet isn't checked before the first training.
    corpora = [evaluation.corpora for evaluation in graph.job("preflight", "run").spec.evaluations]
    assert corpora == [("chat", "pairs")]
    assert graph.job("preflight", "run-1").spec.evaluations[0].corpora == ("chat", "pairs", "own1")


def test_all_jobs_are_behind_what_they_are_made_from():
    graph = JobGraph(*load(rounds()))
    before: set[str] = set()
    for job in graph.jobs.values():
        read = {upstream.key for jobs in (*job.artifacts.values(), job.after) for upstream in jobs}
        assert read <= before, job.key
        before.add(job.key)
    select = graph.job("select", "own2")
    assert [job.key for job in graph.job("corpus", "own2").artifacts["selected"]] == [select.key]
    assert graph.job("sample", "tries2").artifacts["model"] == (graph.job("dpo", "round1"),)


def test_waves_count_how_often_models_are_sampled():
    config, _ = load(rounds())
    of_entries = waves(config)
    assert [of_entries[f"dpo.{name}"] for name in ("run", "round1", "round2")] == [0, 1, 2]
    assert of_entries["corpora.chat"] == 0 and of_entries["score.worth2"] == 2
    assert {*made_from(config)["sample.tries1"]} == {"sft.run", "corpora.chat"}


@pytest.mark.parametrize(
    ("model", "circle"),
    [
        ("dpo:round1", "corpora.own1 → score.worth1 → sample.tries1 → dpo.round1 → corpora.own1"),
        ("dpo:round2", "dpo.round2 → corpora.own2 → score.worth2 → sample.tries2 → dpo.round1 → corpora.own1"),
    ],
)
def test_a_corpus_that_is_made_from_itself_is_refused(model, circle):
    config = rounds()
    config["sample"]["tries1"] = SAMPLED | {"model": model}
    with pytest.raises(SnaketuneError, match=circle):
        load(config)


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("preferences", {"scores": "no-such", "pairs": "best-worst"}, "no 'no-such' under `score:`"),
        ("preferences", {"scores": "worth1"}, "need pairs, such as pairs: best-worst"),
        ("conversations", {"scores": "worth1"}, "need rows, such as rows: best"),
        ("unpaired", {"scores": "worth1", "good_from": 1.0}, "need bad_to"),
        ("unpaired", {"scores": "worth1", "good_from": 1.0, "bad_to": 1.0}, "bad_to 1 is not below good_from 1"),
        ("conversations", {"scores": "worth1", "rows": "best", "margin": 0.5}, "margin doesn't select conversations"),
        ("text", {"scores": "worth1", "rows": "best"}, "scored responses make no rows of kind text"),
        (
            "preferences",
            {"scores": "worth1", "pairs": "best-worst", "layout": "pairs"},
            "layout applies to rows that are read",
        ),
        ("preferences", {"files": ["data/preferences.jsonl"], "per_prompt": 2}, "per_prompt selects scored responses"),
        (
            "preferences",
            {"scores": "worth1", "files": ["data/preferences.jsonl"]},
            "exactly one of `files`, `hub` and `scores`",
        ),
    ],
)
def test_a_source_of_scored_responses_says_how_rows_are_selected_and_nothing_else(kind, source, said):
    config = rounds()
    config["corpora"]["other"] = {"kind": kind, "sources": [source]}
    with pytest.raises(SnaketuneError, match=said):
        load(config)
