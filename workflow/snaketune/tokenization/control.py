"""Encoding in which only the template writes control tokens.

A tokenizer finds `<|im_end|>` wherever it stands, so a user who types it ends the turn. The way out is a second tokenizer
that is the same but for the names of its control tokens: each is called by a string that occurs in no text. Where the
template wrote `<|im_end|>`, that name is put into the rendered text; the user's `<|im_end|>` stays, and means nothing to
this tokenizer. All else (normalizing, prefix spaces, merges) is as ever, across the user's `<|im_end|>` too.

    rendered   <|im_start|>user\\nsay <|im_end|> now<|im_end|>\\n
    swapped    ①user\\nsay <|im_end|> now②\\n

Which ones the template wrote is known because the messages are rendered with a guard (another character that occurs
nowhere) inside every control string of theirs, and at both their ends so that none forms across the seam either.

Only rows with something to guard come this way. Such a row costs two to three times the plain way, and the second
tokenizer is built when the first one comes (as long as loading the first: 2 to 3 s for 150,000 pieces).
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from snaketune.tokenization.template import Message, Span
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.tool_calls import with_said

# Private-use characters, from which those that occur in no text of a batch are taken.
PRIVATE_USE = range(0x10FFFD, 0xFFFFF, -1)


def any_of(strings: Iterable[str]) -> str:
    """Pattern that matches the longest of `strings`, as tokenizers do."""
    return "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True)) or r"(?!)"


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """`count` private-use characters that occur in none of `texts`."""
    used = set().union(*map(set, texts))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    return [next(free) for _ in range(count)]


@dataclass(frozen=True)
class Guarded:
    """A text in the renamed tokenizer: `ids` are real ones, `spans` are in characters of what `encoding` encodes."""

    ids: np.ndarray
    encoding: Encoding
    spans: list[Span]


class ControlTokens:
    """The control tokens of a tokenizer, and how to keep them to the template.

    Attributes:
        ids: id of each control token, by its string.
    """

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any], names: Iterable[str]):
        """
        Args:
            description: `tokenizer` as parsed from `tokenizer.json`.
            names: the control tokens, all among its added tokens.
        """
        self.ids = {name: tokenizer.token_to_id(name) for name in sorted(names)}
        self._tokenizer, self._description = tokenizer, description
        self._added = [token["content"] for token in description["added_tokens"]]
        self._somewhere = re.compile(any_of(self.ids))
        # A lookahead consumes nothing, so that overlapping ones are all found.
        self._everywhere = re.compile(f"(?=({any_of(self.ids)}))")
        self._renamed: dict[str, _Renamed] = {}

    def written_in(self, text: str) -> bool:
        """Whether `text` holds a control token's string."""
        return self._somewhere.search(text) is not None

    def guard(self, messages: list[Message], guard: str, ends: bool = True) -> list[Message]:
        """The messages with a guard inside every control string, and at both ends of what is visible.

        With guard `!`, the content ` a</s> ` becomes ` !a<!/s>! `: outside the ends there is only whitespace, which
        forms no control token, and a template that trims finds what to trim.
        """
        # Names and arguments of calls are put into JSON or the like, where guards at the ends would be in the way.
        inside = partial(self.guarded, guard=guard, ends=False)
        return [with_said(message, self.guarded(message["content"], guard, ends), inside) for message in messages]

    def guarded(self, text: str, guard: str, ends: bool) -> str:
        """One text with its guards."""
        inserts = []
        for match in self._everywhere.finditer(text):
            # A control token of one character has no inside: two guards before it mark it.
            if text[match.start()] in self.ids:
                inserts.append((match.start(), guard * 2))
            if len(match[1]) > 1:
                inserts.append((match.start() + 1, guard))
        if ends and (visible := text.strip()):
            start = len(text) - len(text.lstrip())
            inserts += [(start, guard), (start + len(visible), guard)]
        pieces, cursor = [], 0
        for position, insert in sorted(inserts):
            pieces += [text[cursor:position], insert]
            cursor = position
        return "".join([*pieces, text[cursor:]])

    def encode(self, texts: list[str], spans: list[list[Span]], lead: str, guard: str) -> Iterator[Guarded]:
        """Encode texts rendered from guarded messages.

        Args:
            spans: per text, character spans in it.
            lead: a character that the texts don't hold.
            guard: the one that their messages were guarded with.
        Raises:
            SnaketuneError: the tokenizer doesn't see a control token where its template writes one.
        """
        if lead not in self._renamed:
            self._renamed = {lead: _Renamed(self._tokenizer, self._description, self.ids, lead)}
        renamed = self._renamed[lead]
        single = any_of(name for name in self.ids if len(name) == 1)
        pattern = re.compile(f"(?P<own>{guard}{guard}(?:{single}))|{guard}|(?P<added>{any_of(self._added)})")

        def swapped(match: re.Match[str]) -> str:
            if match["own"]:
                return match["own"][2:]
            return renamed.names.get(match["added"], match["added"]) if match["added"] else ""

        changed = [_substitute(pattern, swapped, text, own) for text, own in zip(texts, spans, strict=True)]
        encodings = renamed.tokenizer.encode_batch([text for text, _ in changed], add_special_tokens=False)
        for (text, moved), encoding in zip(changed, encodings, strict=True):
            found = np.array(encoding.ids, np.int64)
            # The names start and end with `lead`, once each.
            if 2 * int(np.isin(found, renamed.told_apart).sum()) != text.count(lead) - 2 * renamed.count_unk(text):
                raise Refused(
                    "control_text",
                    f"the tokenizer misses control tokens that its chat template writes, in {text[:80]!r}, so a text that "
                    "looks like one can't be told from one; drop such rows from the corpus or use another tokenizer",
                )
            yield Guarded(renamed.back[found].astype(np.int32), encoding, moved)


class _Renamed:
    """The tokenizer with other names for its control tokens: `lead` + number + `lead`.

    Attributes:
        names: new name by old name.
        back: real id by id in `tokenizer`.
        told_apart: ids in `tokenizer` of the control tokens, without unk, which unknown characters become too.
    """

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any], control: dict[str, int], lead: str):
        self.names = {name: f"{lead}{number}{lead}" for number, name in enumerate(control)}
        model = dict(description["model"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._new(piece): id for piece, id in model["vocab"].items()}
            self._unk = model.get("unk_token")
            model["unk_token"] = self._new(self._unk)
        else:
            self._unk = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else None
            model["vocab"] = [[self._new(piece), *score] for piece, *score in model["vocab"]]
        if "unk_token" in model and self._unk is None:
            model["unk_token"] = None
        if "merges" in model:
            # No text becomes a control token by merging.
            model["merges"] = [merge for merge in model["merges"] if self.names.keys().isdisjoint(_parts(merge))]
        added = [{**token, "content": self._new(token["content"])} for token in description["added_tokens"]]
        self.tokenizer = Tokenizer.from_str(json.dumps({**description, "model": model, "added_tokens": added}))

        old = {new: name for name, new in self.names.items()}
        real = tokenizer.get_vocab(with_added_tokens=True)
        here = self.tokenizer.get_vocab(with_added_tokens=True)
        self.back = np.zeros(max(here.values()) + 1, np.int64)
        for piece, id in here.items():
            self.back[id] = real[old.get(piece, piece)]
        self.told_apart = np.array([here[new] for name, new in self.names.items() if name != self._unk], np.int64)

    def _new(self, name: str | None) -> str | None:
        return self.names.get(name, name)

    def count_unk(self, text: str) -> int:
        """How often the template wrote unk."""
        return text.count(self.names[self._unk]) if self._unk in self.names else 0


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _substitute(
    pattern: re.Pattern[str], swapped: Callable[[re.Match[str]], str], text: str, spans: list[Span]
) -> tuple[str, list[Span]]:
    """`pattern.sub`, and the spans moved along.

    Replacing `bb` by `x` in `a bb ccc` moves the span (5, 8) of `ccc` to (4, 7).
    """
    pieces, cursor, shift = [], 0, 0
    ends, shifts = [0], [0]
    for match in pattern.finditer(text):
        new = swapped(match)
        pieces += [text[cursor : match.start()], new]
        cursor = match.end()
        shift += len(new) - (match.end() - match.start())
        ends.append(cursor)
        shifts.append(shift)
    pieces.append(text[cursor:])

    def moved(position: int) -> int:
        return position + shifts[bisect_right(ends, position) - 1]

    return "".join(pieces), [(moved(start), moved(end)) for start, end in spans]
