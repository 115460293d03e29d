"""Frames: the text that a template writes around the contents of a conversation, by the roles of its turns.

A rendered conversation is literal, content, literal, content, ..., literal. A literal with control tokens has three parts:

    literal     <|im_end|>\\n<|im_start|>assistant\\n
    tail        (nothing)                     encoded together with the content before it
    fixed       <|im_end|>\\n<|im_start|>      always these ids: [2 5 3]
    head        assistant\\n                   encoded together with the content after it

Text between two control tokens is encoded independently of the text outside them. The starts and ends of supervised text and
the ends of turns are attributes of literals too, so that for a batch they are looked up.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from snaketune.errors import SnaketuneError
from snaketune.tokenization.batched.chunks import ChunkEncoder
from snaketune.tokenization.batched.separable import SPACE, Separable
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.control import unused_characters
from snaketune.tokenization.template import Span

# Whitespace that templates don't write, to detect whether they trim contents.
EM_SPACE = "\u2003"


@dataclass(frozen=True)
class Literal:
    """A literal as bytes for `ChunkEncoder`, and positions in it; a position is -1 if it doesn't exist.

    Attributes:
        data: tail, the name of the fixed ids, head.
        fixed_at, head_at: the start of the name and of the head in `data`.
        supervised_from: the start of a supervised span in `data`.
        supervised_to: the number of fixed ids before the end of a supervised span.
        turn_ends: the number of fixed ids before the end of the previous turn.
        prompt: the ids that follow the fixed ones in the prompt of the turn whose span starts here.
    """

    data: bytes
    fixed_at: int
    head_at: int
    supervised_from: int
    supervised_to: int
    turn_ends: int
    prompt: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frame:
    """The literals of a conversation with m turns, int64[m + 1], and which contents the template trims, bool[m]."""

    literals: np.ndarray
    trimmed: np.ndarray


class Frames:
    """A cache of frames by roles, for a template that has passed `check_verbatim`, with all `literals` so far."""

    def __init__(self, chat: ChatTokenizer, separable: Separable, chunks: ChunkEncoder):
        self._chat, self._separable, self._chunks = chat, separable, chunks
        self._frames: dict[tuple[str, ...], Frame | None] = {}
        names = chat.added.values()
        self._heads = {name[:cut] for name in names for cut in range(1, len(name))}
        self._tails = {name[cut:] for name in names for cut in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        self.literals: list[Literal] = []

    def table(self, name: str) -> np.ndarray:
        """int64, one attribute of all literals."""
        return np.array([getattr(literal, name) for literal in self.literals], np.int64)

    def get(self, roles: tuple[str, ...]) -> Frame | None:
        """The frame for these roles, or None if such conversations have to be rendered one by one."""
        if roles not in self._frames:
            try:
                self._frames[roles] = self._build(roles)
            except (SnaketuneError, _Unsupported):
                # Rendering such a row on the reference path reports the error.
                self._frames[roles] = None
        return self._frames[roles]

    def _build(self, roles: tuple[str, ...]) -> Frame:
        left, right = unused_characters([self._chat.template.text], 2)
        marks = [f"{left}{number}{right}" for number in range(len(roles))]
        plain, padded = (
            [{"role": role, "content": pad + mark + pad} for role, mark in zip(roles, marks)] for pad in ("", EM_SPACE)
        )
        (text, padded_text), (spans, _) = self._chat.template.render([plain, padded])
        _require(all(text.count(mark) == 1 for mark in marks))
        begins = [text.find(mark) for mark in marks]
        starts, ends = [0, *(at + len(mark) for at, mark in zip(begins, marks))], [*begins, len(text)]
        _require(all(start <= end for start, end in zip(starts, ends)))
        encoding = self._chat.encode_text(text)
        literals = [
            self._literal(text, literal, spans, encoding, first=number == 0, last=number == len(roles))
            for number, literal in enumerate(zip(starts, ends))
        ]
        speaking = roles.count("assistant")
        _require(len(spans) == speaking and None not in spans)
        _require(
            not self._chat.template.rewritten(plain, [at for at, role in enumerate(roles, 1) if role == "assistant"])
        )
        _require(sum(literal.supervised_from >= 0 for literal in literals) == speaking)
        _require(sum(literal.supervised_to >= 0 for literal in literals) == speaking)
        trimmed = np.array([_trims(mark, text, padded_text) for mark in marks], bool)
        self.literals += [literal for literal in dict.fromkeys(literals) if literal not in self.literals]
        return Frame(np.array([self.literals.index(literal) for literal in literals], np.int64), trimmed)

    def _literal(
        self, text: str, literal: Span, spans: list[Span], encoding: Encoding, *, first: bool, last: bool
    ) -> Literal:
        """Build a literal, given its characters in `text`, and whether it is the first or last of its conversation."""
        start, end = literal
        written = text[start:end]
        _require(written or first or last)
        _require(not self._joins(written, before=not first, after=not last))
        tokens = [(id, at, to) for id, (at, to) in zip(encoding.ids, encoding.offsets)]
        added = [
            number
            for number, (id, at, to) in enumerate(tokens)
            if start <= at < to <= end and self._chat.added.get(id) == text[at:to].strip()
        ]
        opens = [at for at, _ in spans if start <= at <= end]
        closes = [to for _, to in spans if start <= to <= end]
        _require(len(opens) <= 1 and len(closes) <= 1)
        prefix = self._separable.prefix
        if not added:
            _require(not closes and not (first and prefix != "none"))
            # The tokens of the prompt depend on the content before it, so they aren't known here.
            _require(not opens or self._cuts(written, self._chat.template.prompt_end(text, opens[0]) - start))
            at = len(text[start : opens[0]].encode()) if opens else -1
            return Literal(written.encode(), -1, -1, at, -1, -1)

        fixed = tokens[added[0] : added[-1] + 1]
        (_, opening, _), (_, last_at, closing) = fixed[0], fixed[-1]
        tail, head = text[start:opening].encode(), text[closing:end]
        _require(not (first and prefix != "none" and tail))
        name = self._chunks.fixed(tuple(id for id, _, _ in fixed))
        spaced = prefix == "always" or (prefix == "unless_space" and not head.startswith(SPACE))
        # After the last literal there is no content, so without a head there is nothing to put a space before.
        pad = SPACE if spaced and (head or not last) else ""
        supervised_from = -1
        if opens and opens[0] <= opening:
            supervised_from = len(text[start : opens[0]].encode())
        elif opens:
            # A supervised span may start with whitespace that the control token before it strips.
            _require(opens[0] > last_at)
            before = (pad + text[closing : opens[0]]).encode() if opens[0] > closing else b""
            supervised_from = len(tail + name + before)
        prompt = ()
        if opens:
            prompt_end = self._chat.template.prompt_end(text, opens[0])
            _require(prompt_end <= end and (prompt_end >= closing or prompt_end in {at for _, at, _ in fixed}))
            prompt = self._chat.encode_text(text[last_at:prompt_end]).ids[1:] if prompt_end > closing else ()
        _require(not closes or opening < closes[0] <= closing)
        ends = [number for number, (id, _, _) in enumerate(fixed, 1) if self._chat.template_only[id]]
        return Literal(
            data=tail + name + (pad + head).encode(),
            fixed_at=len(tail),
            head_at=len(tail + name),
            supervised_from=supervised_from,
            supervised_to=sum(at < closes[0] for _, at, _ in fixed) if closes else -1,
            turn_ends=ends[0] if ends and not first else -1,
            prompt=tuple(prompt),
        )

    def _cuts(self, written: str, at: int) -> bool:
        """Whether every text is cut at this position of a literal, after a visible character."""
        before, after = written[:at].encode()[-1:], written[at:].encode()[:1]
        visible = before.isascii() and not before.isspace()
        return bool(before and after and visible and self._separable.cuts[after[0] << 8 | before[0]])

    def _joins(self, written: str, *, before: bool, after: bool) -> bool:
        """Whether this literal could form an added token with the end of the content before it or the start of the next."""
        lengths = range(1, min(self._longest, len(written) + 1))
        return (
            (before and any(written[:length] in self._tails for length in lengths))
            or (after and any(written[-length:] in self._heads for length in lengths))
            or (before and after and any(written in token[1:-1] for token in self._chat.added.values()))
        )


class _Unsupported(Exception):
    """Conversations with these roles have to be rendered one by one."""


def _require(condition: object) -> None:
    if not condition:
        raise _Unsupported


def _trims(mark: str, text: str, padded: str) -> bool:
    """Whether the template trims this content, given renderings without and with whitespace around the contents."""
    _require(padded.count(mark) == 1 and padded.replace(EM_SPACE, "") == text.replace(EM_SPACE, ""))
    start = padded.find(mark)
    before, after = padded[:start].endswith(EM_SPACE), padded[start + len(mark) :].startswith(EM_SPACE)
    _require(before == after)
    return not before
