"""Corpora of documents, in a config."""

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph

from .edits import put, refused


@pytest.mark.parametrize(
    ("dotted", "value", "messages"),
    [
        ("sft.demo.packing.train_on", "last", ["sft.demo.packing.train_on", "every token of a document"]),
        ("sft.demo.packing.strategy", "none", ["sft.demo.packing.strategy", "chat template"]),
        ("eval.demo.packing.train_on", "last", ["eval.demo.packing.train_on", "every token of a document"]),
        ("dpo.demo.corpus", "demo-chat", ["dpo.demo.corpus", "is of kind text", "expected preferences"]),
        ("corpora.demo-chat.answer_pattern", "(.*)", ["corpora.demo-chat", "answer_pattern applies to turns"]),
    ],
)
def test_keys_of_turns_are_refused_for_documents(raw, dotted, value, messages):
    raw["corpora"]["demo-chat"]["kind"] = "text"
    del raw["eval"]["demo"]["exact_match"]
    load(raw)
    refused(put(raw, dotted, value), messages)


def test_auto_overflow_is_planned_by_what_the_corpus_holds(raw):
    raw["corpora"]["book"] = raw["corpora"]["demo-chat"] | {"kind": "text"}
    raw["sft"]["text"] = raw["sft"]["demo"] | {"corpus": "book"}
    graph = JobGraph(*load(raw))
    overflows = {job.name.partition("-demo-")[0]: (job.spec.kind, job.spec.overflow) for job in graph.stage("plan")}
    assert overflows == {
        "demo-chat": ("sft", "truncate"),
        "demo-preferences": ("preference", "drop"),
        "book": ("sft", "split"),
    }
    tokens = {job.name.partition("-demo-")[0]: (job.spec.kind, job.spec.train_on) for job in graph.stage("tokenize")}
    assert tokens["book"] == ("text", "all") and tokens["demo-chat"] == ("sft", "assistant")
