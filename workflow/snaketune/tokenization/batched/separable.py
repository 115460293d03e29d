"""Positions at which a text may be cut such that the ids of its parts are the ids of the whole.

Two proofs cover two families of tokenizers, also with NFC normalization, since a space is in no composition:

Merges or pieces over the whole text (sentencepiece's kind: BPE or unigram, no pre-tokenizer). If two bytes are neighbours in no
piece of the vocabulary, no token spans a position between them; BPE merges on the two sides of it are independent, and a
unigram model's best path is the best path of the left part followed by that of the right part. A table of 65,536 byte pairs
says between which bytes to cut. Sentencepiece's pieces have spaces only at the start and don't mix letters, digits and signs,
so nearly every word is cut from its full stop.

Merges within the matches of a pattern (GPT-2's kind: byte-level BPE). In every pattern of PATTERNS, each alternative is either
an optional single character followed by no whitespace (except newlines at the very end), or whitespace only. So the position
between a visible character and a space is always between two matches. Matching never looks behind, and looks ahead only in
`\\s+(?!\\S)`, whose match ends in whitespace, so not at such a position. Hence the matches in a part are those of the whole.

No added token has the two bytes beside a cut as neighbours, so each added token is in one part. Parts with an added token are
reported (`reserved`); whether it is text or control is decided elsewhere.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

SPACE, METASPACE = " ", "▁"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The patterns of GPT-2, of cl100k and Llama 3, of Qwen 2 and 3, and of o200k.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD_UPPER, WORD_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    GPT2,
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{WORD_UPPER}*{WORD_LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{WORD_UPPER}+{WORD_LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Every character that \s matches; all other characters are visible.
WHITESPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# Sums of unigram scores that are multiples of this are exact, so that ties are ties wherever a text begins.
EXACT_GRAIN = 1 / 128
Prefix = Literal["none", "first", "always", "unless_space"]


class NotSeparable(Exception):
    """No proof covers this tokenizer; the message is the reason."""


@dataclass(frozen=True)
class Separable:
    """A tokenizer whose texts can be cut.

    Attributes:
        bare: the tokenizer that encodes parts: without added tokens, and without the space that it puts before a text.
        cuts: bool[65536], indexed by `next byte * 256 + byte`: whether a text may be cut between the two.
        spaces: bool[65536] or None, indexed by `byte * 256 + byte before`: whether these bytes may end a whitespace character,
            after which there is no cut.
        prefix: when the text between added tokens gets a space in front; `first` means only at the start of a text.
        reserved: strings that a part must not contain to be encoded by itself.
        strips_whitespace: whether an added token includes whitespace beside it (lstrip, rstrip).
    """

    bare: Tokenizer
    cuts: np.ndarray
    spaces: np.ndarray | None
    prefix: Prefix
    reserved: re.Pattern[bytes]
    strips_whitespace: bool


def separable(description: dict[str, Any]) -> Separable:
    """Prove that texts can be cut, given a parsed `tokenizer.json`; NotSeparable if neither proof covers it."""
    model, added = description["model"], description["added_tokens"]
    _require(not any(token["single_word"] for token in added), "an added token matches only whole words (single_word)")
    normalized = description["normalizer"] is not None and any(token["normalized"] for token in added)
    _require(not normalized, "an added token is matched in the normalized text (normalized)")
    _require(not model.get("dropout"), "the tokenizer skips merges at random (dropout)")
    _require(
        not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix"),
        "the tokenizer's pieces depend on where a word starts or ends (continuing_subword_prefix, end_of_word_suffix)",
    )
    bare = {**description, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    steps = _steps(description["pre_tokenizer"], "pretokenizers")
    reserved = {token["content"] for token in added}
    spaces, prefix = None, "none"
    if model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in steps):
        _check_byte_level(description["normalizer"], steps)
        cuts, spaces = _around_spaces()
    else:
        changed, prefix, writes_spaces, splits = _sentencepiece_steps(description["normalizer"], steps)
        bare |= changed
        cuts = _between_pieces(model, writes_spaces, splits)
        reserved |= {METASPACE} if writes_spaces else set()
    _forbid(cuts, (token["content"] for token in added))
    # Bytes that don't occur in UTF-8 are names of control tokens (see `chunks`).
    cuts[0xF8:] = False
    patterns = [re.escape(string.encode()) for string in sorted(reserved, key=len, reverse=True)]
    return Separable(
        bare=Tokenizer.from_str(json.dumps(bare)),
        cuts=cuts.reshape(-1),
        spaces=spaces,
        prefix=prefix,
        reserved=re.compile(b"|".join(patterns) or rb"(?!)"),
        strips_whitespace=any(token["lstrip"] or token["rstrip"] for token in added),
    )


def _require(condition: object, otherwise: str) -> None:
    if not condition:
        raise NotSeparable(otherwise)


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _forbid(cuts: np.ndarray, strings: Iterable[str]) -> None:
    """Remove the cuts within any of the strings."""
    for string in strings:
        for before, after in pairwise(string.encode()):
            cuts[after, before] = False


def _check_byte_level(normalizer: dict[str, Any] | None, steps: list[dict[str, Any]]) -> None:
    _require(
        normalizer is None or normalizer["type"] == "NFC",
        f"the tokenizer's normalizer ({normalizer and normalizer['type']}) isn't known to leave spaces unchanged",
    )
    *before, last = steps
    _require(
        last["type"] == "ByteLevel" and not last["add_prefix_space"],
        "the tokenizer puts a space before the text, or has steps after its byte alphabet",
    )
    patterns = [GPT2] if last["use_regex"] else []
    for step in before:
        # A single digit is a match without whitespace too.
        if step["type"] == "Digits":
            continue
        known = step["type"] == "Split" and step["behavior"] in ("Isolated", "Removed") and "Regex" in step["pattern"]
        _require(known, f"the tokenizer's pre-tokenizer ({step['type']}) isn't a known one")
        drops = step["invert"] != (step["behavior"] == "Removed")
        _require(not drops, "the tokenizer's pre-tokenizer drops what it splits at")
        patterns.append(step["pattern"]["Regex"])
    _require(len(patterns) == 1 and patterns[0] in PATTERNS, "the pre-tokenizer's pattern isn't a known one")


def _around_spaces() -> tuple[np.ndarray, np.ndarray]:
    """bool[256, 256] by next byte and byte, the cuts before a space that doesn't follow ASCII whitespace, and
    bool[65536], the last two bytes of each whitespace character of several bytes.
    """
    cuts, ends = np.zeros((2, 256, 256), bool)
    cuts[ord(SPACE), :] = True
    for *before, last in map(str.encode, WHITESPACE):
        if before:
            ends[last, before[-1]] = True
        else:
            cuts[:, last] = False
    return cuts, ends.reshape(-1)


def _sentencepiece_steps(
    normalizer: dict[str, Any] | None, steps: list[dict[str, Any]]
) -> tuple[dict[str, Any], Prefix, bool, bool]:
    """The changes to a description of sentencepiece's kind such that no space is put in front; when one is put in front;
    whether spaces are written as `▁`; whether texts are split before every space.
    """
    prefix: Prefix = "none"
    splits = False
    retained = []
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == METASPACE and not retained:
            prefix = "always"
        elif step["type"] == "Replace" and step["pattern"] == {"String": SPACE} and step["content"] == METASPACE:
            retained.append(step)
        else:
            raise NotSeparable(f"the tokenizer's normalizer ({step['type']}) isn't known to leave texts unchanged")
    writes_spaces = bool(retained)
    _require(prefix == "none" or writes_spaces, "the tokenizer puts a character other than a space before the text")
    changed: dict[str, Any] = {"normalizer": {"type": "Sequence", "normalizers": retained} if retained else None}
    for step in steps:
        if step["type"] == "Metaspace" and len(steps) == 1 and step["replacement"] == METASPACE:
            if step["prepend_scheme"] == "always":
                _require(prefix == "none", "the tokenizer puts two spaces before the text")
                prefix = "unless_space"
            elif step["prepend_scheme"] == "first" and prefix == "none":
                prefix = "first"
            writes_spaces, splits = True, step["split"]
            changed["pre_tokenizer"] = {**step, "prepend_scheme": "never"}
        else:
            # No spaces remain to split at, so this step has no effect (Gemma has such a step).
            idle = step["type"] == "Split" and step["pattern"] == {"String": SPACE} and retained
            _require(idle, f"the tokenizer's pre-tokenizer ({step['type']}) isn't a known one")
    return changed, prefix, writes_spaces, splits


def _between_pieces(model: dict[str, Any], writes_spaces: bool, splits: bool) -> np.ndarray:
    """bool[256, 256] by next byte and byte: cuts between bytes that are neighbours in no piece."""
    if model["type"] == "BPE":
        _require(
            not model.get("ignore_merges"),
            "the tokenizer takes a whole text as one piece without merging (ignore_merges)",
        )
        parts = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        pieces, vocabulary = ["".join(merge) for merge in parts], model["vocab"].keys()
        unknown, fuses, exact = model.get("unk_token"), model.get("fuse_unk", False), True
        merged = unknown is not None and any(unknown in merge for merge in parts)
        _require(not merged, "the tokenizer merges the unknown token with others")
    elif model["type"] == "Unigram":
        pieces = [piece for piece, _ in model["vocab"]]
        vocabulary, unknown, fuses = set(pieces), model.get("unk_id"), True
        exact = all((score / EXACT_GRAIN).is_integer() for _, score in model["vocab"])
        _require(
            exact or splits,
            "the tokenizer's scores aren't multiples of 1/128, so their sums depend on where a text begins",
        )
    else:
        raise NotSeparable(f"the tokenizer is a {model['type']} model; only BPE and unigram are covered")

    cuts = np.ones((256, 256), bool)
    # No cut within a character.
    cuts[0x80:0xC0] = False
    _forbid(cuts, (piece.replace(METASPACE, SPACE) if writes_spaces else piece for piece in pieces))
    has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    has_space = (METASPACE if writes_spaces else SPACE) in vocabulary
    _require(
        has_bytes or (unknown is not None and has_space),
        "the tokenizer drops unknown characters, or has no piece for the space",
    )
    if not exact or (fuses and not has_bytes):
        # Inexact sums restart only at spaces; and unknown characters are fused, though not with a space.
        cuts[np.arange(256) != ord(SPACE)] = False
    return cuts
