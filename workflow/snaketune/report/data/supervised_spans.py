"""Sample rows as spans: supervised or not, with special tokens as separate spans."""

import json
import re
from dataclasses import dataclass
from typing import Any

from snaketune.report.data.packing_flow import Tokenized, tokenized_corpora
from snaketune.report.data.results import Result, ResultSet
from snaketune.report.text import clip

TOKENIZER = "tokenizer.json"
SPAN_CHARACTERS = 1200


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of text that is supervised or not, or one special token."""

    text: str
    supervised: bool
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """One tokenized corpus, and the spans of its first rows, shorter rows first."""

    flow: Tokenized
    paired: bool
    samples: list[list[Span]]


def tokenized_rows(results: ResultSet) -> list[TokenizedCorpus]:
    """Sample rows of every tokenized corpus. Raises SnaketuneError if its tokenizer is damaged."""
    special: dict[str, list[str]] = {}
    corpora = []
    for flow, parts in tokenized_corpora(results):
        samples = next((part.manifest["samples"] for part in parts if part.manifest.get("samples")), [])
        tokenizer = next(iter(results.made_from(parts[0], "tokenizer")), None)
        if tokenizer and tokenizer.name not in special:
            special[tokenizer.name] = special_tokens(tokenizer)
        tokens = special[tokenizer.name] if tokenizer else []
        corpora.append(
            TokenizedCorpus(
                flow=flow,
                paired=parts[0].manifest["kind"] == "preference",
                samples=[spans(sample, tokens) for sample in samples],
            )
        )
    return corpora


def spans(sample: list[Any], special: list[str]) -> list[Span]:
    """Split sample text at special tokens.

    >>> [(s.text, s.supervised, s.special) for s in spans([["<s>Hi", False], ["Yes</s>", True]], ["<s>", "</s>"])]
    [('<s>', False, True), ('Hi', False, False), ('Yes', True, False), ('</s>', True, True)]
    """
    pattern = re.compile(
        "|".join(f"({re.escape(token)})" for token in sorted(special, key=len, reverse=True)) or "(?!)"
    )
    parts = []
    for text, supervised in sample:
        position = 0
        for match in pattern.finditer(text):
            parts += [(text[position : match.start()], supervised, False), (match[0], supervised, True)]
            position = match.end()
        parts.append((text[position:], supervised, False))
    return [
        Span(text=clip(text, SPAN_CHARACTERS), supervised=bool(supervised), special=is_special)
        for text, supervised, is_special in parts
        if text
    ]


def special_tokens(tokenizer: Result) -> list[str]:
    """The special tokens of a tokenizer; empty if it has no tokenizer.json."""
    if TOKENIZER not in tokenizer.manifest["payload"]:
        return []
    content = json.loads(tokenizer.artifact.file(TOKENIZER).read_text(encoding="utf-8"))
    return [token["content"] for token in content.get("added_tokens", []) if token.get("special")]
