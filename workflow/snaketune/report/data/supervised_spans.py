"""What is supervised of sample rows, piece by piece, with special tokens apart from text."""

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
    """Text that is supervised or not; special tokens are spans of their own."""

    text: str
    supervised: bool
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """One tokenized corpus, and what is supervised of its first rows, short ones before long ones."""

    flow: Tokenized
    paired: bool
    samples: list[list[Span]]


def tokenized_rows(results: ResultSet) -> list[TokenizedCorpus]:
    """Of every tokenized corpus. Raises SnaketuneError if its tokenizer is damaged."""
    special: dict[str, list[str]] = {}
    found = []
    for flow, parts in tokenized_corpora(results):
        samples = next((part.manifest["samples"] for part in parts if part.manifest.get("samples")), [])
        tokenizer = next(iter(results.made_from(parts[0], "tokenizer")), None)
        if tokenizer and tokenizer.name not in special:
            special[tokenizer.name] = special_tokens(tokenizer)
        tokens = special[tokenizer.name] if tokenizer else []
        found.append(
            TokenizedCorpus(
                flow=flow,
                paired=parts[0].manifest["kind"] == "preference",
                samples=[spans(sample, tokens) for sample in samples],
            )
        )
    return found


def spans(sample: list[Any], special: list[str]) -> list[Span]:
    """
    >>> [(s.text, s.supervised, s.special) for s in spans([["<s>Hi", False], ["Yes</s>", True]], ["<s>", "</s>"])]
    [('<s>', False, True), ('Hi', False, False), ('Yes', True, False), ('</s>', True, True)]
    """
    cut = re.compile("|".join(f"({re.escape(token)})" for token in sorted(special, key=len, reverse=True)) or "(?!)")
    found = []
    for text, supervised in sample:
        at = 0
        for match in cut.finditer(text):
            found += [(text[at : match.start()], supervised, False), (match[0], supervised, True)]
            at = match.end()
        found.append((text[at:], supervised, False))
    return [
        Span(text=clip(text, SPAN_CHARACTERS), supervised=bool(supervised), special=is_special)
        for text, supervised, is_special in found
        if text
    ]


def special_tokens(tokenizer: Result) -> list[str]:
    """Control tokens of a tokenizer; none if it has no file of the fast kind."""
    if TOKENIZER not in tokenizer.manifest["payload"]:
        return []
    content = json.loads(tokenizer.artifact.file(TOKENIZER).read_text(encoding="utf-8"))
    return [token["content"] for token in content.get("added_tokens", []) if token.get("special")]
