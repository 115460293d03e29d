"""Where a text may be cut so that its parts encode to the ids that the whole encodes to.

A tokenizer looks at a whole text, but most of what it could see from afar it can't use. Two proofs, for two families:

Merges or pieces over the whole stretch (sentencepiece's kind: BPE or unigram, no pre-tokenizer). A token is a piece of the
vocabulary. Where two bytes stand side by side in no piece, no token spans them. BPE's merges left and right of such a
place then don't touch, and neither hastens nor hinders the other; a unigram model's best path is the best path of the left
and that of the right. A table of 65,536 byte pairs says where. Sentencepiece's own pieces put a space only in front, and
don't mix letters, digits and signs, so nearly every word is cut free of its full stop.

Merges within the matches of a pattern (GPT-2's kind: byte-level BPE). In every pattern of PATTERNS, each alternative is one
of: an optional single character in front, and then no whitespace (but newlines at the very end); or whitespace alone. So
no match holds a visible character and then a space. Such a place always lies between two matches. Matching looks back
nowhere, and looks ahead only in `\\s+(?!\\S)`, whose match ends in whitespace, so not at such a place. Hence matching a part
alone finds what matching the whole finds there.

In both, a cut falls only where no added token has these two bytes side by side, so each lies whole in one part, and a part
that holds one is told (`foreign`): what is text and what is control isn't decided here.

The proofs are about NFC too: a space is in no composition, with anything before or after it.

A tokenizer that neither proof covers is refused with the reason.
"""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

SPACE, METASPACE = " ", "▁"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# GPT-2's; then those of cl100k and Llama 3, Qwen 2 and 3, and o200k.
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
# Every character that \s matches: what stands before a space and isn't one of these is visible.
WHITESPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# Unigram scores of this grain sum without rounding, so that ties are ties wherever a text begins.
EXACT_GRAIN = 1 / 128
Prefix = Literal["none", "first", "always", "unless_space"]


class NotSeparable(Exception):
    """No proof covers this tokenizer; the message says why."""


@dataclass(frozen=True)
class Separable:
    """A tokenizer whose texts can be cut.

    Attributes:
        bare: encodes a part: the tokenizer without its added tokens, and without the space that it puts in front.
        cuts: bool[65536], at `next byte * 256 + byte`: whether a text may be cut between the two.
        spaces: bool[65536] or None, at `byte * 256 + byte before`: whether these bytes may end a character of whitespace,
            after which there is no cut.
        prefix: when a stretch of text between added tokens gets a space in front; `first` is the one that starts a text.
        foreign: what a part must not hold.
        swallows: whether an added token takes whitespace beside it along.
    """

    bare: Tokenizer
    cuts: np.ndarray
    spaces: np.ndarray | None
    prefix: Prefix
    foreign: re.Pattern[bytes]
    swallows: bool


def separable(description: dict[str, Any]) -> Separable:
    """The proof for a tokenizer.

    Args:
        description: `tokenizer.json`, parsed.
    Raises:
        NotSeparable: there is none.
    """
    model, added = description["model"], description["added_tokens"]
    if any(token["single_word"] for token in added):
        raise NotSeparable("an added token is one only where it stands as a word (single_word)")
    if description["normalizer"] is not None and any(token["normalized"] for token in added):
        raise NotSeparable("an added token is looked for in the normalized text")
    if model.get("dropout"):
        raise NotSeparable("its merges are left out at random (dropout)")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotSeparable("its pieces know where a word starts or ends")
    bare = {**description, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    steps = _steps(description["pre_tokenizer"], "pretokenizers")
    if model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in steps):
        _check_byte_level(description["normalizer"], steps)
        cuts, spaces, prefix, foreign = _after_visible(), _ends_of_whitespace(), "none", []
    else:
        changed, prefix, writes_spaces, splits = _sentencepiece_like(description["normalizer"], steps)
        bare |= changed
        cuts, spaces = _between_pieces(model, writes_spaces, splits), None
        foreign = [METASPACE] if writes_spaces else []
    for token in added:
        for before, after in pairwise(token["content"].encode()):
            cuts[after, before] = False
    # Bytes that UTF-8 hasn't name control tokens (see `chunks`).
    cuts[0xF8:] = False
    foreign = sorted({*foreign, *(token["content"] for token in added)}, key=len, reverse=True)
    return Separable(
        bare=Tokenizer.from_str(json.dumps(bare)),
        cuts=cuts.reshape(-1),
        spaces=spaces,
        prefix=prefix,
        foreign=re.compile(b"|".join(re.escape(string.encode()) for string in foreign) or rb"(?!)"),
        swallows=any(token["lstrip"] or token["rstrip"] for token in added),
    )


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _check_byte_level(normalizer: dict[str, Any] | None, steps: list[dict[str, Any]]) -> None:
    if normalizer is not None and normalizer["type"] != "NFC":
        raise NotSeparable(f"its normalizer ({normalizer['type']}) isn't one that is known to leave spaces alone")
    *before, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise NotSeparable("it puts a space before the text, or does more after its byte alphabet")
    # A digit by itself is a match without whitespace too.
    before = [step for step in before if step["type"] != "Digits"]
    patterns = [GPT2] if last["use_regex"] else []
    for step in before:
        if step["type"] != "Split" or step["behavior"] not in ("Isolated", "Removed") or "Regex" not in step["pattern"]:
            raise NotSeparable(f"its pre-tokenizer ({step['type']}) isn't a known one")
        if step["invert"] != (step["behavior"] == "Removed"):
            raise NotSeparable("its pre-tokenizer drops what it splits at")
        patterns.append(step["pattern"]["Regex"])
    if len(patterns) != 1 or patterns[0] not in PATTERNS:
        raise NotSeparable("its pre-tokenizer's pattern isn't a known one")


def _after_visible() -> np.ndarray:
    """bool[256, 256] by next byte and byte: cuts before a space, after anything but ASCII whitespace."""
    cuts = np.zeros((256, 256), bool)
    cuts[ord(SPACE), :] = True
    for character in WHITESPACE:
        if character.isascii():
            cuts[:, ord(character)] = False
    return cuts


def _ends_of_whitespace() -> np.ndarray:
    """bool[65536]: the last two bytes of each wider character of whitespace."""
    ends = np.zeros((256, 256), bool)
    for character in WHITESPACE:
        spelled = character.encode()
        if len(spelled) > 1:
            ends[spelled[-1], spelled[-2]] = True
    return ends.reshape(-1)


def _sentencepiece_like(
    normalizer: dict[str, Any] | None, steps: list[dict[str, Any]]
) -> tuple[dict[str, Any], Prefix, bool, bool]:
    """What to change so that nothing is put in front; when something is; whether a space is written `▁`; and whether
    the text is split before every space."""
    prefix: Prefix = "none"
    writes_spaces = splits = False
    kept = []
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == METASPACE and not kept:
            prefix = "always"
        elif step["type"] == "Replace" and step["pattern"] == {"String": SPACE} and step["content"] == METASPACE:
            writes_spaces = True
            kept.append(step)
        else:
            raise NotSeparable(f"its normalizer ({step['type']}) isn't one that is known to leave texts alone")
    if prefix != "none" and not writes_spaces:
        raise NotSeparable("it puts a character in front that isn't a space")
    changed: dict[str, Any] = {"normalizer": {"type": "Sequence", "normalizers": kept} if kept else None}
    for step in steps:
        if step["type"] == "Metaspace" and len(steps) == 1 and step["replacement"] == METASPACE:
            if step["prepend_scheme"] == "always":
                if prefix != "none":
                    raise NotSeparable("it puts two spaces in front")
                prefix = "unless_space"
            elif step["prepend_scheme"] == "first" and prefix == "none":
                prefix = "first"
            writes_spaces, splits = True, step["split"]
            changed["pre_tokenizer"] = {**step, "prepend_scheme": "never"}
        elif not (step["type"] == "Split" and step["pattern"] == {"String": SPACE} and writes_spaces and kept):
            # There is no space left to split at (Gemma has such a step).
            raise NotSeparable(f"its pre-tokenizer ({step['type']}) isn't a known one")
    return changed, prefix, writes_spaces, splits


def _between_pieces(model: dict[str, Any], writes_spaces: bool, splits: bool) -> np.ndarray:
    """bool[256, 256] by next byte and byte: cuts where no piece has the two side by side."""
    if model["type"] == "BPE":
        if model.get("ignore_merges"):
            raise NotSeparable("it takes a whole text for a piece without merging (ignore_merges)")
        parts = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        pieces = ["".join(merge) for merge in parts]
        vocabulary = model["vocab"].keys()
        unknown = model.get("unk_token")
        fuses, exact = model.get("fuse_unk", False), True
        if unknown is not None and any(unknown in merge for merge in parts):
            raise NotSeparable("it merges the unknown token with others")
    elif model["type"] == "Unigram":
        pieces = [piece for piece, _ in model["vocab"]]
        vocabulary = set(pieces)
        unknown, fuses = model.get("unk_id"), True
        exact = all((score / EXACT_GRAIN).is_integer() for _, score in model["vocab"])
        if not exact and not splits:
            raise NotSeparable("its scores aren't round, so that their sums depend on where a text begins")
    else:
        raise NotSeparable(f"it is a {model['type']} model; BPE and unigram are known")

    cuts = np.ones((256, 256), bool)
    # Not within a character.
    cuts[0x80:0xC0] = False
    for piece in pieces:
        spelled = (piece.replace(METASPACE, SPACE) if writes_spaces else piece).encode()
        for before, after in pairwise(spelled):
            cuts[after, before] = False
    spells = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not spells and (unknown is None or (METASPACE if writes_spaces else SPACE) not in vocabulary):
        raise NotSeparable("it drops what it doesn't know, or doesn't know the space")
    if not exact or (fuses and not spells):
        # Sums start again at spaces only; and unknown characters run together, though not with a space.
        cuts[np.arange(256) != ord(SPACE)] = False
    return cuts
