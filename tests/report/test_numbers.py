"""The numbers in the tables: they add up, and the page says so if they don't."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invented_data import bad

from snaketune.evaluation.score_intervals import wilson
from snaketune.publishing.measures import measures
from snaketune.report.charts.data_charts import read_shares
from snaketune.report.data.job_table import cards, job_rows
from snaketune.report.data.packing_flow import pack_flows
from snaketune.report.data.results import ResultSet
from snaketune.report.data.samples import choose, dropped_examples, tokenized_rows
from snaketune.report.judge.headline import model_lineage
from snaketune.report.judge.training_rules import training_findings, trainings
from snaketune.text import short


def result_set(results) -> ResultSet:
    return ResultSet(results.named(), **results.files())


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def source(**counts: int) -> dict[str, Any]:
    none = dict.fromkeys(("extra", "repeated", "joined", "quarantined"), 0)
    return none | {"files": ["a"], "dropped": {}, "layouts": {}, "ignored": {}} | counts


def test_rows_add_up_from_reading_to_packing(sweep_pages):
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for line in table(sweep_pages / "data.csv"):
        counts.setdefault((line["stage"], line["name"]), {})[line["count"]] = int(line["value"])

    def sum_of(of: dict[str, int], *names: str) -> int:
        """The sum of counts, and of all counts below them."""
        below = tuple(f"{name}." for name in names)
        return sum(value for count, value in of.items() if count in names or count.startswith(below))

    for (stage, name), of in counts.items():
        if stage == "corpus":
            # The total of the quarantined rows stands beside their reasons.
            total = of["quarantined.total"]
            assert sum_of(of, "read", "extra", "repeated") == (
                sum_of(of, "joined", "dropped", "kept", "quarantined") - total
            ), name
            source = {what.removeprefix("sources.0."): n for what, n in of.items() if what.startswith("sources.0.")}
            incoming = sum_of(source, "read", "extra", "repeated")
            assert incoming == sum_of(source, "joined", "dropped", "kept", "quarantined"), name
        elif stage == "pack":
            for split in ("train", "held_out"):
                rows = [f"{split}.{what}" for what in ("dropped", "kept")]
                assert of[f"{split}.read"] == sum_of(of, *rows), name
                parts = ("dropped_tokens", "truncated.tokens", "shared_prompt_tokens", "shared_answer_tokens", "tokens")
                assert of[f"{split}.read_tokens"] == sum_of(of, *(f"{split}.{part}" for part in parts)), name
    chat, packed, pairs = (
        counts["corpus", "chat"],
        counts["pack", "chat-demo-128-aa"],
        counts["pack", "pairs-demo-128-cc"],
    )
    assert sum_of(chat, "kept") == packed["train.read"] + packed["held_out.read"]
    assert chat["quarantined.total"] == chat["sources.0.quarantined"] == 3
    assert packed["train.dropped.longer_than_row"] == 3
    assert packed["train.truncated.tokens"] == 20
    assert pairs["train.shared_prompt_tokens"] == 50
    assert pairs["train.shared_answer_tokens"] == 3
    tokenized = [of for (stage, name), of in counts.items() if name.startswith("chat-tokens-aa/")]
    assert sum(of["train.rows"] + of["held_out.rows"] for of in tokenized) == 80


def test_ignored_columns_are_listed_with_their_rows(results):
    counts = {"read": 5, "kept": 5, "ignored": {"id": 1, "messages[].weight": 5}}
    results.corpus("chat", train=5, held_out=0, sources=[source(**counts), source(read=0, kept=0)])
    _, pages = results.report()
    page = (pages / "corpus.html").read_text("utf-8")
    assert "Ignored in a: <code>messages[].weight</code> (5 rows), <code>id</code> (1 rows)." in page
    assert page.count("Ignored in") == 1
    found = {line["count"]: line["value"] for line in table(pages / "data.csv") if ".ignored." in line["count"]}
    assert found == {"sources.0.ignored.messages[].weight": "5", "sources.0.ignored.id": "1"}


def test_parts_of_a_tokenized_corpus_are_one(sweep):
    chat = next(
        corpus["flow"] for corpus in tokenized_rows(result_set(sweep)) if corpus["flow"].name == "chat-tokens-aa"
    )
    assert chat.counts["train"]["rows"] == 60
    assert chat.paths == {("fast", ""): 2, ("reference", "the template trims"): 1}
    assert (len(chat.parts), chat.of_runs("parity_rows")) == (3, 40)


def test_only_supervised_text_is_marked_and_special_tokens_are_separate(sweep, sweep_pages):
    samples = [corpus["samples"] for corpus in tokenized_rows(result_set(sweep))]
    spans = [(span["text"], span["supervised"], span["special"]) for span in samples[0][0]]
    assert spans == [("<s>", False, True), ("Hi", False, False), ("Yes", True, False), ("</s>", True, True)]
    page = (sweep_pages / "packing.html").read_text("utf-8")
    assert '<span>Hi</span><mark>Yes</mark><mark class="control">&lt;/s&gt;</mark>' in page


def test_examples_come_from_the_records(sweep, sweep_pages):
    chat = next(result for result in result_set(sweep).of("corpus") if result.name == "chat")
    examples = dropped_examples(chat)
    assert [row["location"] for row in examples["quarantined"]["not_json"]] == ["chat.jsonl:3", "chat.jsonl:9"]
    assert [group["rows"] for group in examples["groups"]] == [4, 3]
    assert [(hit["count"], hit["evaluated"], hit["location"]) for hit in examples["hits"]] == [
        (2, "pairs, row 6a", "chat.jsonl:5")
    ]
    page = (sweep_pages / "corpus.html").read_text("utf-8")
    for text in (
        "group 4",
        "seven words that no",
        "chat.jsonl:12",
        "drop trailing user",
        "2 groups of near-duplicate rows",
    ):
        assert text in page


def test_only_the_first_lines_of_a_record_are_read(results):
    lines = [bad("not_json", line) for line in range(5000)] + [bad("late", 5000)]
    results.corpus("chat", quarantined={"not_json": 5000, "late": 1}, records={"quarantine.jsonl": lines})
    reported = dropped_examples(result_set(results).of("corpus")[0])
    assert {reason: len(rows) for reason, rows in reported["quarantined"].items()} == {"not_json": 3}
    _, pages = results.report()
    assert "late" in (pages / "corpus.html").read_text("utf-8")


def test_rows_of_a_table_are_named_by_number(results):
    row = {"file": "a.parquet", "row": 7, "reason": "x", "detail": "y", "excerpt": "z"}
    results.corpus("chat", quarantined={"x": 1}, records={"quarantine.jsonl": [row]})
    assert (
        dropped_examples(result_set(results).of("corpus")[0])["quarantined"]["x"][0]["location"] == "a.parquet, row 7"
    )


def test_rows_are_measured_against_their_own_length(results):
    results.pack("chat-demo-128-aa", results.corpus("chat"), results.tokenizer(), lengths=(32, 64, 128))
    (flow,) = pack_flows(result_set(results))
    lengths, fill, supervised = read_shares(flow)
    assert len(lengths) == 80 and len(fill) == len(supervised) == flow.metadata["rows"]
    assert fill.min() > 0 and fill.max() <= 1
    assert supervised.max() <= 1 / 3
    assert list(flow.lengths) == [32, 64, 128]
    assert flow.length == 128


def test_results_with_equal_content_are_linked_by_name(results):
    tokenizer = results.tokenizer()
    for name in ("one", "two"):
        results.pack(f"{name}-demo-128-aa", results.corpus(name), tokenizer)
        results.contents[f"corpus/{name}"] = "same"
    assert {flow.name: flow.corpus for flow in pack_flows(result_set(results))} == {
        "one-demo-128-aa": "one",
        "two-demo-128-aa": "two",
    }


def test_inputs_are_those_of_the_jobs(sweep):
    reported = result_set(sweep)
    assert {flow.name: flow.corpus for flow in pack_flows(reported)} == {
        "chat-demo-128-aa": "chat",
        "other-demo-128-bb": "other",
        "pairs-demo-128-cc": "pairs",
    }


@pytest.mark.parametrize(
    ("counts", "epoch", "tokens", "epochs"),
    [
        # Stopped early by stop_if, and half an epoch.
        ({"tokens": 300, "tokens_per_epoch": 1500}, 0.25, 300, 0.2),
        ({"tokens": 3000, "tokens_per_epoch": 1500}, 2.0, 3000, 2.0),
        # Raw rows, whose tokens per epoch aren't known.
        ({"tokens": 300}, 0.25, 300, 0.25),
    ],
)
def test_tokens_trained_are_those_of_the_steps_that_ran(results, counts, epoch, tokens, epochs):
    history = [{"step": 1, "loss": 1.0}] + ([{"step": 2, "loss": 1.0, "epoch": epoch}] if epoch else [])
    counts = {"rows": 12, "steps": 2} | counts
    results.add("sft", "a", spec={"training": {"epochs": 30.0}}, counts=counts, run={"history": history})
    reported = result_set(results)
    assert trainings(reported)[0].epochs == epochs
    shown = [card.value for card in cards(reported) if card.title == "Tokens trained"]
    assert shown == [short(tokens)]
    _, pages = results.report()
    assert "Training data" in (pages / "index.html").read_text("utf-8")


def test_the_headline_follows_the_best_model_back_to_its_base(sweep):
    reported = result_set(sweep)
    assert model_lineage(reported, reported.evaluations["main"]) == ["base:small", "sft:small", "dpo:soft"]
    assert model_lineage(reported, reported.evaluations["second"]) == ["sft:raw"]


def test_cost_is_summed(sweep):
    cost = {card.title: card for card in cards(result_set(sweep))}
    assert cost["Tokens per second"].values == (("sft", "22 k"), ("dpo", "9 k"))
    # Two DPO runs of one second with two processes each; CPU jobs aren't counted.
    assert cost["GPU hours"].value == "under 0.01"
    assert "by 5 runs, 5,081 steps in total" in cost["Tokens trained"].note
    assert cost["Compute time"].value == "32.0 s"


def test_gpu_hours_are_of_all_gpus(results):
    for name, run in {
        "a": {"device": "NVIDIA H200", "seconds": 5400.0, "processes": 4},
        "b": {"device": "cpu", "seconds": 9000.0},
        "c": {"device": "cuda:0", "seconds": 1800.0},
    }.items():
        results.add(
            "sft", name, spec={"training": {"epochs": 1.0}}, counts={"rows": 1, "steps": 1, "tokens": 9}, run=run
        )
    (card,) = (card for card in cards(result_set(results)) if card.title == "GPU hours")
    assert (card.value, card.note) == ("6.50", "0.50 on GPU, 6.00 on NVIDIA H200")


def test_the_time_of_a_run_includes_all_attempts(results):
    run = {"device": "cpu", "seconds": 310.0, "attempts": [100.0, 200.0, 10.0], "waited_for_data_s": 5.0}
    results.add("sft", "a", spec={"training": {"epochs": 1.0}}, counts={"rows": 1, "steps": 1, "tokens": 9}, run=run)
    reported = result_set(results)
    (row,) = job_rows(reported)
    assert (row["seconds"], "3 attempts, the last one 10.0 s" in row["facts"]) == ("5 min 10 s", True)
    # The waiting time is that of the last attempt.
    (training,) = trainings(reported)
    (waited,) = (one.message for one in training_findings(training) if one.kind == "waited for data")
    assert waited == "waited 5.0 s for data, 50% of its time"
    (card,) = (card for card in cards(reported) if card.title == "Compute time")
    assert (card.value, card.note.split(";")[0]) == ("5 min 10 s", "1 jobs in 3 attempts")


def test_scores_side_by_side(sweep, sweep_pages):
    reported = result_set(sweep)
    lines = {(m.on, m.name): m for m in measures(reported.evaluations["main"])}
    reward = lines["pairs", "reward accuracy"]
    assert [reward.shown(model) for model in reward.values] == ["–", "–", "90%", "90%"]
    loss = lines["chat", "held-out loss"]
    assert [model for model in loss.values if loss.is_best(model)] == ["dpo:soft"]
    assert not any(lines["chat", "mean response length"].is_best(model) for model in loss.values)
    assert lines["demo_choice", "acc"].shown("dpo:hard") == "70%"
    rows = {(row["evaluation"], row["on"], row["measure"]): row for row in table(sweep_pages / "evaluation.csv")}
    assert rows["main", "chat", "exact match: counting"]["sft:small"] == "0.5"
    assert rows["main", "chat", "exact match"]["sft:raw"] == ""
    scores = json.loads((sweep_pages / "evaluation.json").read_text("utf-8"))
    assert scores["main"]["base:small"]["preferences"]["pairs"]["reward_accuracy"] is None


def test_samples_are_round_robin_over_tasks_with_all_models(results):
    results.evaluate("main/base-a", right=0.0, samples=3)
    results.evaluate("main/sft-a", right=1.0, samples=3)
    chosen = choose(result_set(results).evaluations["main"])
    assert [sample["task"] for sample in chosen] == ["counting", "weekday", "counting"]
    assert [[answer["verdict"] for answer in sample["answers"]] for sample in chosen] == [["wrong", "right"]] * 3


@pytest.mark.parametrize(("share", "size"), [(0.0, 5), (1.0, 5), (0.3, 1000)])
def test_an_interval_contains_its_share_and_narrows_with_size(share, size):
    low, high = wilson(share, size)
    assert 0 <= low <= share <= high <= 1
    assert high - low > wilson(share, size * 10)[1] - wilson(share, size * 10)[0]


def test_a_run_follows_the_run_that_it_was_trained_from():
    jobs = {label: SimpleNamespace(label=label) for label in ("sft:one", "sft:two", "dpo:run")}
    sources = {"dpo:run": "sft:two", "sft:two": "sft:one"}
    results = SimpleNamespace(
        of=lambda *stages: [job for label, job in jobs.items() if label.startswith(stages)],
        first=lambda job, role: jobs.get(sources.get(job.label)) if job else None,
    )
    models = [SimpleNamespace(model=label, scores={}) for label in ("dpo:run", "base:one", "sft:two", "sft:one")]
    assert model_lineage(results, models) == ["base:one", "sft:one", "sft:two", "dpo:run"]
