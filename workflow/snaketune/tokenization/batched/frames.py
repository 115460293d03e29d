"""What a template writes around the words of a conversation, by the roles of its turns.

A conversation is literal, content, literal, content, ..., literal. A literal that holds control tokens is taken apart:

    literal     <|im_end|>\\n<|im_start|>assistant\\n
    tail        (nothing)                     joins the content before it
    fixed       <|im_end|>\\n<|im_start|>      always these ids: [2 5 3]
    head        assistant\\n                   joins the content after it

Text between two control tokens is encoded by itself, whatever stands outside. So tail and head are encoded together with
the contents beside them, as the tokenizer does, and what is between is known.

Where supervised text starts and ends, and where a turn ends, are facts of literals too, so that a batch finds them by
looking its literals up.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from snaketune.errors import SnaketuneError
from snaketune.tokenization.batched.chunks import Chunks
from snaketune.tokenization.batched.separable import SPACE, Separable
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.control import unused_characters
from snaketune.tokenization.template import Span

# Whitespace that no template writes, by which one sees whether it trims.
EM_SPACE = "\u2003"


@dataclass(frozen=True)
class Literal:
    """A literal as bytes for `Chunks`, and what is where in it; -1 where there is none.

    Attributes:
        spelled: tail, the name of the fixed ids, head.
        fixed_at, head_at: where in `spelled` the name starts, and where the head does.
        supervised_from: where in `spelled` a supervised stretch starts.
        supervised_to: how many of the fixed ids are before the end of such a stretch.
        turn_ends: how many of the fixed ids are before the end of the turn before it.
    """

    spelled: bytes
    fixed_at: int
    head_at: int
    supervised_from: int
    supervised_to: int
    turn_ends: int


@dataclass(frozen=True)
class Frame:
    """The literals of a conversation with m turns (m + 1 numbers in `Frames.literals`), and which contents it trims."""

    literals: np.ndarray
    trimmed: np.ndarray


class Frames:
    """Frames by roles, made when they are first asked for; the template has passed `check_verbatim`.

    Attributes:
        literals: all literals so far.
    """

    def __init__(self, chat: ChatTokenizer, separable: Separable, chunks: Chunks):
        self._chat, self._separable, self._chunks = chat, separable, chunks
        self._frames: dict[tuple[str, ...], Frame | None] = {}
        self._numbers: dict[Literal, int] = {}
        names = chat.added.values()
        self._heads = {name[:cut] for name in names for cut in range(1, len(name))}
        self._tails = {name[cut:] for name in names for cut in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        self.literals: list[Literal] = []

    def table(self, name: str) -> np.ndarray:
        """int64: one attribute of all literals."""
        return np.array([getattr(literal, name) for literal in self.literals], np.int64)

    def of(self, roles: tuple[str, ...]) -> Frame | None:
        """The frame, or None if such conversations must be rendered one by one."""
        if roles not in self._frames:
            try:
                self._frames[roles] = self._made(roles)
            except (SnaketuneError, _Unfit):
                # What is wrong with it is said when a row of this kind is rendered.
                self._frames[roles] = None
        return self._frames[roles]

    def _made(self, roles: tuple[str, ...]) -> Frame:
        left, right = unused_characters([self._chat.template], 2)
        marks = [f"{left}{number}{right}" for number in range(len(roles))]
        plain, padded = (
            [{"role": role, "content": pad + mark + pad} for role, mark in zip(roles, marks)] for pad in ("", EM_SPACE)
        )
        (text, spread), (spans, _) = self._chat.render([plain, padded])
        _require(sum(role == "assistant" for role in roles) == len(spans))
        contents, cursor = [], 0
        for mark in marks:
            _require(text.count(mark) == 1 and text.find(mark) >= cursor)
            contents.append((text.find(mark), cursor := text.find(mark) + len(mark)))
        starts, ends = [0, *(end for _, end in contents)], [*(start for start, _ in contents), len(text)]
        encoding = self._chat.encode_text(text)
        numbers = []
        for number, literal in enumerate(zip(starts, ends)):
            made = self._literal(text, literal, spans, encoding, first=number == 0, last=number == len(roles))
            numbers.append(self._numbers.setdefault(made, len(self.literals)))
            if numbers[-1] == len(self.literals):
                self.literals.append(made)
        _require(all(self._counts(numbers, name) == len(spans) for name in ("supervised_from", "supervised_to")))
        return Frame(np.array(numbers, np.int64), np.array([_trims(mark, text, spread) for mark in marks], bool))

    def _counts(self, numbers: list[int], name: str) -> int:
        return sum(getattr(self.literals[number], name) >= 0 for number in numbers)

    def _literal(
        self, text: str, literal: Span, spans: list[Span], encoding: Encoding, *, first: bool, last: bool
    ) -> Literal:
        """
        Args:
            literal: its characters in `text`.
            first, last: whether it is the first or last of its conversation.
        """
        start, end = literal
        written = text[start:end]
        _require(written or first or last)
        _require(not self._joins(written, before=not first, after=not last))
        added = [
            token
            for token, ((at, to), id) in enumerate(zip(encoding.offsets, encoding.ids))
            if start <= at < to <= end and self._chat.added.get(id) == text[at:to].strip()
        ]
        opens = [at for at, _ in spans if start <= at <= end]
        closes = [to for _, to in spans if start <= to <= end]
        _require(len(opens) <= 1 and len(closes) <= 1)
        prefix = self._separable.prefix
        if not added:
            _require(not closes and not (first and prefix != "none"))
            at = len(text[start : opens[0]].encode()) if opens else -1
            return Literal(written.encode(), -1, -1, at, -1, -1)

        opening, closing = encoding.offsets[added[0]][0], encoding.offsets[added[-1]][1]
        tail, head = text[start:opening].encode(), text[closing:end]
        _require(not (first and prefix != "none" and tail))
        fixed = range(added[0], added[-1] + 1)
        name = self._chunks.fixed(tuple(encoding.ids[token] for token in fixed))
        spaced = prefix == "always" or (prefix == "unless_space" and not head.startswith(SPACE))
        # At the very end there is no content after it, so perhaps nothing to put a space before.
        pad = SPACE if spaced and (head or not last) else ""
        at = -1
        if opens:
            character = opens[0]
            if character <= opening:
                at = len(text[start:character].encode())
            else:
                # What is supervised may start with whitespace that the control token before it swallows.
                _require(character > encoding.offsets[added[-1]][0])
                at = len(tail + name)
                if character > closing:
                    at += len((pad + text[closing:character]).encode())
        ended = -1
        if closes:
            _require(opening < closes[0] <= closing)
            ended = sum(encoding.offsets[token][0] < closes[0] for token in fixed)
        telling = [number for number, token in enumerate(fixed, 1) if self._chat.tells(encoding.ids[token])]
        return Literal(
            spelled=tail + name + (pad + head).encode(),
            fixed_at=len(tail),
            head_at=len(tail + name),
            supervised_from=at,
            supervised_to=ended,
            turn_ends=telling[0] if telling and not first else -1,
        )

    def _joins(self, written: str, *, before: bool, after: bool) -> bool:
        """Whether this literal could make an added token together with the end of the content before it, or with the
        start of the one after it.
        """
        lengths = range(1, min(self._longest, len(written) + 1))
        if before and any(written[:length] in self._tails for length in lengths):
            return True
        if after and any(written[-length:] in self._heads for length in lengths):
            return True
        within = before and after and len(written) < self._longest
        return within and any(written in token[1:-1] for token in self._chat.added.values())


class _Unfit(Exception):
    """Conversations with these roles must be rendered one by one."""


def _require(condition: object) -> None:
    if not condition:
        raise _Unfit


def _trims(mark: str, text: str, spread: str) -> bool:
    """Whether the template trims this content, given its rendering without and with whitespace around the contents."""
    _require(spread.count(mark) == 1 and spread.replace(EM_SPACE, "") == text.replace(EM_SPACE, ""))
    start = spread.find(mark)
    before, after = spread[:start].endswith(EM_SPACE), spread[start + len(mark) :].startswith(EM_SPACE)
    _require(before == after)
    return not before
