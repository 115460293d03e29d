"""Tokenized corpora: their counts, and sample rows as spans that are supervised or not."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from snaketune.publishing.results import Result
from snaketune.report.data.results import ResultSet, by_whole
from snaketune.report.text import clip

SPLITS = ("train", "held_out")
TOKEN_COUNTS = ("rows", "tokens", "supervised_tokens", "control_text", "nothing_supervised")
TOKENIZER = "tokenizer.json"
SPAN_CHARACTERS = 1200


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """All parts of one tokenized corpus.

    Attributes:
        counts: Sums over the parts, by split.
        paths: Number of parts by code path and reason, `("fast", "")` or `("reference", "the template ...")`.
    """

    name: str
    kind: str
    train_on: str
    counts: dict[str, Counter[str]]
    paths: dict[tuple[str, str], int]
    parity_rows: int
    rows_by_reference: int
    parts: int
    expected_parts: int


def merge_parts(name: str, parts: list[Result]) -> Tokenized:
    """The counts of one tokenized corpus from its parts."""
    counts: dict[str, Counter[str]] = {split: Counter(dict.fromkeys(TOKEN_COUNTS, 0)) for split in SPLITS}
    for part in parts:
        for split in SPLITS:
            counts[split].update({count: part.counts[split][count] for count in TOKEN_COUNTS})
    spec, manifests = parts[0].spec, [part.manifest for part in parts]
    return Tokenized(
        name=name,
        kind=spec["kind"],
        train_on=manifests[0]["train_on"],
        counts=counts,
        paths=dict(Counter((manifest["path"], manifest["why"]) for manifest in manifests)),
        parity_rows=sum(part.run.get("parity_rows", 0) for part in parts),
        rows_by_reference=sum(part.run.get("rows_by_reference", 0) for part in parts),
        parts=len(parts),
        expected_parts=spec["parts"],
    )


def tokenized_corpora(results: ResultSet) -> list[tuple[Tokenized, list[Result]]]:
    """Every tokenized corpus with its parts."""
    return [(merge_parts(name, parts), parts) for (_, name), parts in by_whole(results.of("tokenize")).items()]


def tokenized_rows(results: ResultSet) -> list[dict[str, Any]]:
    """Every tokenized corpus (`flow`), whether it is `paired`, and the spans of its first rows (`samples`), shorter ones first.

    Raises:
        SnaketuneError: If a tokenizer is damaged.
    """
    corpora = []
    for flow, parts in tokenized_corpora(results):
        samples = next((part.manifest["samples"] for part in parts if part.manifest.get("samples")), [])
        tokenizer = results.first(parts[0], "tokenizer")
        tokens = special_tokens(tokenizer) if tokenizer else []
        paired = parts[0].manifest["kind"] == "preference"
        corpora.append({"flow": flow, "paired": paired, "samples": [spans(sample, tokens) for sample in samples]})
    return corpora


def spans(sample: list[Any], special: list[str]) -> list[dict[str, Any]]:
    """Split sample text at special tokens.

    >>> [tuple(span.values()) for span in spans([["<s>Hi", False], ["Yes</s>", True]], ["<s>", "</s>"])]
    [('<s>', False, True), ('Hi', False, False), ('Yes', True, False), ('</s>', True, True)]
    """
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
    return [
        {"text": clip(text, SPAN_CHARACTERS), "supervised": bool(supervised), "special": bool(number % 2)}
        for part, supervised in sample
        # The matches of a group are at odd positions.
        for number, text in enumerate(pattern.split(part))
        if text
    ]


def special_tokens(tokenizer: Result) -> list[str]:
    """The special tokens of a tokenizer; empty if it has no tokenizer.json."""
    if TOKENIZER not in tokenizer.manifest["payload"]:
        return []
    content = json.loads(tokenizer.artifact.file(TOKENIZER).read_text(encoding="utf-8"))
    return [token["content"] for token in content.get("added_tokens", []) if token.get("special")]
