"""The page of sampled responses, and the findings about them."""

import pytest

from snaketune.report.data.results import ResultSet
from snaketune.report.data.sampled import sampled_tables, selections
from snaketune.report.judge.sampling_rules import engine_findings, sample_findings, selection_findings


def result_set(results) -> ResultSet:
    files = results.files()
    return ResultSet(results.named(), files["manifests"], files["runs"])


@pytest.fixture
def model(results) -> str:
    tokenizer = results.tokenizer()
    return results.sft("a", results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer), tokenizer)


def test_the_page_shows_lengths_ends_differences_and_samples(results, model):
    results.sample("tries", model, responses=3, truncated=6)
    (sampled,) = sampled_tables(result_set(results))
    assert (sampled.model, sampled.engine) == ("sft:a", "transformers 5.23.0 float32")
    facts = dict(sampled.facts)
    assert facts["truncated at the limit"] == "25%" and facts["distinct responses per prompt"] == "3 of 3"
    # 24 responses of 4, 5 and 6 tokens, at -1.5 nats each.
    assert facts["tokens"] == "120" and facts["log-probability per token"] == "-0.300 nats"
    page = (results.report()[1] / "sampling.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and page.count('<article class="sample">') == 6 and "Question 0?" in page
    assert "8 responses" not in page and "24 responses, 25% of them truncated" in page


def test_truncated_and_equal_responses_are_findings(results, model):
    results.sample("fine", model, truncated=2)
    results.sample("long", model, truncated=12)
    results.sample("same", model, truncated=0, same=True)
    found = {
        (finding.where, finding.kind, finding.key) for finding in sample_findings(sampled_tables(result_set(results)))
    }
    assert found == {
        ("long", "truncated responses", "sample.long.generation.max_new_tokens"),
        ("same", "same responses", "sample.same.generation.temperature"),
    }


def test_an_evaluation_by_several_engines_is_a_finding(results):
    results.corpus("chat")
    for model, engine in (("base-a", "transformers"), ("sft-a", "vllm")):
        results.evaluate(f"main/{model}", preferences=(), engine=engine)
    (finding,) = engine_findings(result_set(results))
    assert "base:a by transformers, sft:a by vllm" in finding.message and finding.where == "main"
    assert "Responses by transformers 1.0, vllm 1.0." in (results.report()[1] / "index.html").read_text(
        encoding="utf-8"
    )


def test_the_page_shows_scores_and_what_was_selected(results, model):
    score = results.score("checked", results.sample("tries", model), mean=0.25)
    results.select("own", score, chosen=9.0, rejected=8.0)
    results.select("long", score, chosen=20.0, rejected=8.0)
    page = (results.report()[1] / "sampling.html").read_text(encoding="utf-8")
    for shown in ("20 of 24", "0.25", "prompts without: equal scores", "responses left out: truncated"):
        assert shown in page
    assert "25% of the prompts score lowest, 12.5% highest" in page and page.count("<svg") == 4
    (finding,) = selection_findings(selections(result_set(results)))
    assert finding.where == "long" and "chosen responses are longer" in finding.message
