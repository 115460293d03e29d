"""`snakemake preview`: a look at the sources of a config before anything is made, whenever it is a target."""

import pytest

from .conftest import rules_in

pytestmark = pytest.mark.workflow


def test_a_preview_needs_no_result_and_runs_each_time(fresh):
    fresh.config["corpora"]["chat"]["cleaning"] = {"min_characters": 60}
    (fresh.folder / "data/more.jsonl").write_text(
        '{"question": "a{b}?", "answer": "c", "is_correct": false}\n', encoding="utf-8"
    )
    # Braces in a config are no wildcards.
    fresh.config["corpora"]["chat"]["answer_pattern"] = r"Answer: (.{1,99})"
    fresh.config["corpora"]["chat"]["sources"].append({"files": ["data/more.jsonl"], "where": "is_correct != false"})
    said = fresh.snakemake("preview")
    assert rules_in(said) == {"preview"}
    assert "chat, source 1: data/chat.jsonl\n  JSON lines" in said
    assert "conversations: as the config says; reads" in said
    assert "too short; line" in said
    assert "chat, source 2: data/more.jsonl" in said
    assert "1 row, where is_correct != false; line 1" in said
    assert "pairs: data/preferences.jsonl" in said
    assert "template    data/chatml.jinja" in said
    assert "no row longer than 256" in said
    assert "until the tokenizer is made" in said
    assert fresh.stale("preview") == {"preview"}
    assert "<h2>pairs: data/preferences.jsonl" in fresh.read("results/preview/preview.html")
    assert not (fresh.folder / "results/corpus").exists()


def test_a_tokenizer_that_is_made_counts(project):
    said = project.snakemake("preview")
    assert "estimated" not in said
    assert " per row in the median" in said
    assert project.stale() == set()
