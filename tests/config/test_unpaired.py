"""Corpora of single completions with a label, in a config."""

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph

from .edits import put, refused


@pytest.mark.parametrize(
    ("dotted", "value", "messages"),
    [
        ("eval.demo.preferences", ["labels"], ["eval.demo.preferences", "is of kind unpaired, expected preferences"]),
        ("sft.demo.corpus", "labels", ["sft.demo.corpus", "is of kind unpaired, expected conversations or text"]),
        (
            "corpora.labels.sources.0.layout",
            "pairs",
            ["corpora.labels", "completions with a label; found layout pairs"],
        ),
        (
            "corpora.labels.sources.0.fields",
            {"prompt": "a", "response": "b"},
            ["corpora.labels", "completions with a label; found fields without label"],
        ),
    ],
)
def test_completions_with_a_label_are_no_pairs(raw, dotted, value, messages):
    raw["corpora"]["labels"] = {
        "kind": "unpaired",
        "sources": [{"files": ["resources/demo/preferences.jsonl"], "fields": {"system": "s"}}],
    }
    load(raw)
    refused(put(raw, dotted, value), messages)


def test_completions_with_a_label_are_packed_as_such(raw):
    sources = [{"files": ["resources/demo/preferences.jsonl"]}]
    raw["corpora"]["labels"] = {"kind": "unpaired", "sources": sources}
    raw["dpo"]["kto"] = raw["dpo"]["demo"] | {"corpus": "labels", "loss": "kto"}
    graph = JobGraph(*load(raw))
    (run,) = (job for job in graph.stage("dpo") if job.name == "kto")
    (pack,) = run.artifacts["pack"]
    (plan,) = pack.artifacts["plan"]
    assert (pack.spec.kind, plan.spec.kind, plan.spec.overflow) == ("unpaired", "unpaired", "drop")
    assert {(job.spec.kind, job.spec.train_on) for job in plan.artifacts["tokens"]} == {("unpaired", "assistant")}
