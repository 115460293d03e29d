"""Control tokens: encoding in which no text of a user becomes one.

A tokenizer encodes `<|im_end|>` as a control token wherever it occurs, so a user who types it would end the turn. Such rows are
encoded with a second tokenizer that differs only in the names of its control tokens, which are strings that occur in no text.
Each `<|im_end|>` of the template is replaced by that name in the rendered text; the user's stays, and is ordinary text for this
tokenizer. Everything else (normalization, prefix spaces, merges) is unchanged, also across it.

    rendered   <|im_start|>user\\nsay <|im_end|> now<|im_end|>\\n
    swapped    ①user\\nsay <|im_end|> now②\\n

To tell the two apart, the messages are rendered with a guard (another character that occurs in no text) inside each of their
control strings, and at both ends of each message, so that no control string forms across the boundary either.

Only rows that contain control strings are encoded this way. Such a row costs two to three times as much as others, and the
second tokenizer is built for the first of them (which takes as long as loading the first: 2 to 3 s for 150,000 pieces).
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from snaketune.tokenization.prompt_boundaries import PromptBoundaries
from snaketune.tokenization.template import Message, Refused, Span
from snaketune.tokenization.tool_calls import replace_texts

# Private-use characters; those that occur in no text of a batch are used as guards.
PRIVATE_USE = range(0x10FFFD, 0xFFFFF, -1)


def any_of(strings: Iterable[str]) -> str:
    """A pattern that matches the longest of `strings`, as tokenizers do."""
    return "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True)) or r"(?!)"


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """`count` private-use characters that occur in none of `texts`."""
    used = set().union(*map(set, texts))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    return [next(free) for _ in range(count)]


class ControlTokens:
    """The control tokens of a tokenizer; encodes rows such that only the template's control strings become control tokens.

    Attributes:
        ids: the id of each control token, by its string.
    """

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any], names: Iterable[str]):
        """Set up for a tokenizer, its parsed `tokenizer.json`, and its control tokens, all among its added tokens."""
        self.ids = {name: tokenizer.token_to_id(name) for name in sorted(names)}
        self._tokenizer, self._description = tokenizer, description
        self._any = re.compile(any_of(self.ids))
        # A lookahead consumes nothing, so overlapping strings all match.
        self._overlapping = re.compile(f"(?=({any_of(self.ids)}))")
        self._renamed: dict[str, _Renamed] = {}

    def written_in(self, text: str) -> bool:
        return self._any.search(text) is not None

    def guard(self, messages: list[Message], guard: str, ends: bool = True) -> list[Message]:
        """Insert guards inside every control string of the messages, and at both ends of their visible text.

        With guard `!`, the content ` a</s> ` becomes ` !a<!/s>! `: outside the guards there is only whitespace, which forms no
        control token, and which a template that trims still trims.
        """
        # Templates write names and arguments of calls into JSON or the like, which guards at the ends would break.
        inside = partial(self.guard_text, guard=guard, ends=False)
        return [
            replace_texts(message, self.guard_text(message["content"], guard, ends), inside) for message in messages
        ]

    def guard_text(self, text: str, guard: str, ends: bool) -> str:
        """Insert guards into one text; `ends`: also at both ends of its visible part."""
        inserts = []
        for match in self._overlapping.finditer(text):
            # A control token of one character has no inside: two guards before it mark it.
            if text[match.start()] in self.ids:
                inserts.append((match.start(), guard * 2))
            if len(match[1]) > 1:
                inserts.append((match.start() + 1, guard))
        if ends and (visible := text.strip()):
            start = len(text) - len(text.lstrip())
            inserts += [(start, guard), (start + len(visible), guard)]
        parts, cursor = [], 0
        for position, insert in sorted(inserts):
            parts += [text[cursor:position], insert]
            cursor = position
        return "".join([*parts, text[cursor:]])

    def encode(
        self,
        texts: list[str],
        spans: list[list[Span | None]],
        prompt_ends: list[dict[int, int]],
        lead: str,
        guard: str,
    ) -> Iterator[tuple[np.ndarray, Encoding, list[Span | None], list[int]]]:
        """Encode texts with character spans, rendered from messages with `guard`; `lead` doesn't occur in them.

        Args:
            prompt_ends: as for `PromptBoundaries.apart`.
        Yields:
            The ids of the original tokenizer (int32), the encoding by the renamed one, the spans in its text, and the numbers
            of those that are encoded apart from their prompts.
        Raises:
            SnaketuneError: the tokenizer doesn't encode a control token that its template writes as one.
        """
        if lead not in self._renamed:
            self._renamed = {lead: _Renamed(self._tokenizer, self._description, self.ids, lead)}
        renamed = self._renamed[lead]
        single = any_of(name for name in self.ids if len(name) == 1)
        added = any_of(token["content"] for token in self._description["added_tokens"])
        pattern = re.compile(f"(?P<own>{guard}{guard}(?:{single}))|{guard}|(?P<added>{added})")

        def swapped(match: re.Match[str]) -> str:
            if match["own"]:
                return match["own"][2:]
            return renamed.names.get(match["added"], match["added"]) if match["added"] else ""

        positions = [
            [*text_spans, *((end, end) for end in ends.values())]
            for text_spans, ends in zip(spans, prompt_ends, strict=True)
        ]
        changed = [
            substitute(pattern, swapped, text, text_positions)
            for text, text_positions in zip(texts, positions, strict=True)
        ]
        encodings = renamed.tokenizer.encode_batch([text for text, _ in changed], add_special_tokens=False)
        for (text, shifted), encoding, ends in zip(changed, encodings, prompt_ends, strict=True):
            first = len(shifted) - len(ends)
            ends = {number: end for number, (end, _) in zip(ends, shifted[first:])}
            encoding, apart = renamed.boundaries.apart(text, encoding, ends)
            ids = np.array(encoding.ids, np.int64)
            # Each name contains `lead` twice.
            written = text.count(lead) // 2 - (text.count(renamed.unk) if renamed.unk else 0)
            if np.isin(ids, renamed.template_ids).sum() != written:
                raise Refused(
                    "control_text",
                    f"the tokenizer misses control tokens that its chat template writes, in {text[:80]!r}, so text that "
                    "looks like one can't be distinguished; drop such rows from the corpus or use another tokenizer",
                )
            yield renamed.original_ids[ids].astype(np.int32), encoding, shifted[:first], apart


class _Renamed:
    """The tokenizer with other names for its control tokens: `lead` + number + `lead`.

    Attributes:
        names: the new name by the old name; `unk` is that of the unknown token, None if it is no control token.
        original_ids: the id in the original tokenizer, by the id in the renamed one.
        template_ids: the renamed ids of the control tokens except unk, which unknown characters become too.
    """

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any], control: dict[str, int], lead: str):
        self.names = {name: f"{lead}{number}{lead}" for number, name in enumerate(control)}

        def new(name: str) -> str:
            return self.names.get(name, name)

        model = dict(description["model"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {new(piece): id for piece, id in model["vocab"].items()}
            unk = model.get("unk_token")
            model["unk_token"] = None if unk is None else new(unk)
        else:
            unk = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else None
            model["vocab"] = [[new(piece), *score] for piece, *score in model["vocab"]]
        self.unk = self.names.get(unk)
        if "merges" in model:
            # Text must not become a control token by merging.
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if self.names.keys().isdisjoint([*pair, "".join(pair)])]
        added = [{**token, "content": new(token["content"])} for token in description["added_tokens"]]
        description = {**description, "model": model, "added_tokens": added}
        self.tokenizer = Tokenizer.from_str(json.dumps(description))
        self.boundaries = PromptBoundaries(self.tokenizer, description)

        old = {new: name for name, new in self.names.items()}
        original_vocab = tokenizer.get_vocab(with_added_tokens=True)
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.original_ids = np.zeros(max(vocab.values()) + 1, np.int64)
        for piece, id in vocab.items():
            self.original_ids[id] = original_vocab[old.get(piece, piece)]
        self.template_ids = np.array([vocab[new] for name, new in self.names.items() if name != unk], np.int64)


def substitute(
    pattern: re.Pattern[str], swapped: Callable[[re.Match[str]], str], text: str, spans: list[Span | None]
) -> tuple[str, list[Span | None]]:
    """The result of `pattern.sub`, and the spans in it.

    Replacing `bb` by `x` in `a bb ccc` shifts the span (5, 8) of `ccc` to (4, 7).
    """
    ends, shifts = [0], [0]

    def recorded(match: re.Match[str]) -> str:
        new = swapped(match)
        ends.append(match.end())
        shifts.append(shifts[-1] + len(new) - len(match[0]))
        return new

    changed = pattern.sub(recorded, text)

    def shifted(position: int) -> int:
        return position + shifts[bisect_right(ends, position) - 1]

    return changed, [span and (shifted(span[0]), shifted(span[1])) for span in spans]
