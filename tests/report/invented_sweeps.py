"""Helpers for tests with several DPO runs: their inputs, and reading tables of a report."""

import csv

from invented_results import Results

from snaketune.report.data.results import ResultSet

# Margins per token of held-out pairs before and after a run; one pair is won and one lost.
MARGINS = {"up": -0.5, "down": 0.4, "high": 1.0, "low": -1.0}
MOVED = {"up": 0.3, "down": -0.1, "high": 1.5, "low": -0.2}


def result_set(results: Results) -> ResultSet:
    return ResultSet(results.named(), **results.files())


def sft_and_pairs(results: Results) -> tuple[str, str]:
    """Write an SFT run and packed pairs; return their keys."""
    tokenizer = results.tokenizer()
    model = results.sft("a", results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer), tokenizer)
    pairs = results.corpus("pairs", kind="preferences")
    return model, results.pack("pairs-demo-128-bb", pairs, tokenizer, kind="preference")


def table(pages, name: str = "variants") -> list[dict[str, str]]:
    with (pages / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
