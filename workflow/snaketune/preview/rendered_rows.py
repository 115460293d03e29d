"""Rows rendered by a chat template: the first ones with their supervision, the lengths of all, and those that it refuses.

Rendered by the tokenizer if there is one, else by a byte tokenizer, with the code that tokenizes corpora.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import pre_tokenizers

from snaketune.config.corpus_sources import EmptyReasoning, Reasoning
from snaketune.config.tokenizers import DEFAULT_CHAT_TEMPLATE
from snaketune.corpus.rows import SCHEMAS, TEXT, VARIABLES, Message, Row, with_weights
from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.creation.check import check, training_template
from snaketune.tokenization.creation.train import TURN_END
from snaketune.tokenization.encode_rows import encode_turns, holds_control
from snaketune.tokenization.encoded_rows import NO_BRANCHES, EncodedBatch, concatenated
from snaketune.tokenization.template import SHIPPED, Refused
from snaketune.tokenization.token_rows import rows_of
from snaketune.tokenization.turn_columns import Turns, turns_of

ROWS_PER_BATCH = 64
# Common row lengths.
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BYTES_PER_TOKEN = 4
# Characters shown of a long text; a cut of fewer than MIN_OMITTED characters isn't made.
TEXT_BEGINS, TEXT_ENDS, MIN_OMITTED = 300, 150, 100
FIRST_SPANS, LAST_SPANS = 50, 25
# Control tokens in chat templates: <|im_end|>, <start_of_turn>, [INST], <s>, <｜User｜>.
CONTROL = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|</?s>|<[a-z]+(?:_[a-z]+)*_turn>|\[/?[A-Z][A-Z_]*\]|<[be]os>")
BEGIN, END, PAD = "<s>", "</s>", "<pad>"

# Rows, each with its location.
LocatedRows = list[tuple[str, Row]]


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """A span of a row's text, supervised or not; a control token is a span of its own.

    Attributes:
        weight: its weight in the loss, if it is supervised.
        omitted: number of characters not shown, if the span stands for them.
    """

    text: str
    supervised: bool
    weight: float = 1.0
    control: bool = False
    omitted: int = 0


@dataclass(frozen=True, kw_only=True)
class RenderedRow:
    """A row to be shown: its prompt, if it has completions, and the named parts after it."""

    location: str
    prompt: list[TextSpan]
    parts: list[tuple[str, list[TextSpan]]]


@dataclass(kw_only=True)
class RenderedRows:
    """The rendered rows of a source.

    Attributes:
        template: name of the chat template.
        exact: whether a tokenizer counted tokens; else they are estimated from bytes.
        rows: a few rows to be shown.
        lengths: int64[n], in tokens.
        supervised: share of all tokens that is supervised.
        unsupervised: number of rows without supervised tokens.
        refused: rows that the template refuses: location and reason.
        control_text: number of rows with text that looks like a control token, which stays text.
    """

    template: str
    exact: bool
    rows: list[RenderedRow] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    supervised: float = 0.0
    unsupervised: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    control_text: int = 0

    def longer(self, lengths: tuple[int, ...] = LENGTHS) -> dict[int, int]:
        """The number of rows longer than each of these lengths, up to the first that no row exceeds."""
        counts = {}
        for length in lengths:
            counts[length] = int((self.lengths > length).sum())
            if not counts[length]:
                break
        return counts


# Where loss is taken in conversations: `train_on` and `reasoning` of the config.
Supervision = tuple[str, Reasoning | None]


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A tokenizer with its chat template; `exact` if it is a real tokenizer, else a byte tokenizer."""

    chat: ChatTokenizer
    template: str
    exact: bool


def load_renderer(template: Path | None, tokenizer: Path | None, empty_reasoning: EmptyReasoning = "mask") -> Renderer:
    """Load a renderer from a template file and a tokenizer folder, each optional.

    Without a template file, the tokenizer's own template is used, else ChatML.

    Raises:
        SnaketuneError: one of them can't be read, or the `tokenizer` stage would refuse the template.
    """
    own_template = None
    if tokenizer:
        try:
            description = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
            config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
            path = tokenizer / "chat_template.jinja"
            own_template = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        except (OSError, ValueError) as error:
            what = "name a folder with tokenizer.json and tokenizer_config.json"
            raise SnaketuneError(f"--tokenizer {tokenizer}: {error}; {what}") from None
        if config.get("pad_token") is None:
            config["pad_token"] = config.get("unk_token") or config.get("eos_token")
    if template is None and isinstance(own_template, str):
        text, name = own_template, f"{tokenizer}'s own"
    else:
        text, name = _text_of(template or DEFAULT_CHAT_TEMPLATE), str(template or f"ChatML ({SHIPPED}/chatml.jinja)")
    if not tokenizer:
        description, config = _bytes_tokenizer(text)
    _, training = training_template(text) or ("", "")
    renderer = Renderer(
        chat=ChatTokenizer(description, config, text, training, empty_reasoning),
        template=name,
        exact=tokenizer is not None,
    )
    try:
        check(renderer.chat, [])
    except SnaketuneError as error:
        raise SnaketuneError(f"{name}: {error}") from None
    return renderer


def _text_of(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnaketuneError(f"the chat template {template} can't be read: {error}") from None


def _bytes_tokenizer(template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parsed `tokenizer.json` and `tokenizer_config.json` of a byte tokenizer, with the control tokens of a template.

    With it, rows pass through the same code as with a real tokenizer: the chat template, its refusals, and the supervision
    of each byte.
    """
    added_tokens = dict.fromkeys([BEGIN, END, PAD, *CONTROL.findall(template)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    description = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(alphabet) + number, "content": token, **flags} for number, token in enumerate(added_tokens)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {byte: id for id, byte in enumerate(alphabet)}, "merges": []},
    }
    end = TURN_END if TURN_END in added_tokens else END
    return description, {"bos_token": BEGIN, "eos_token": end, "pad_token": PAD}


def render(
    renderer: Renderer, kind: str, rows: LocatedRows, supervision: Supervision = ("assistant", "exact")
) -> RenderedRows:
    """Render rows; the first, the last and one between of those that the template accepts are kept to be shown."""
    rendered = RenderedRows(template=renderer.template, exact=renderer.exact)
    chat = renderer.chat.for_documents() if kind == TEXT else renderer.chat
    accepted_rows: LocatedRows = []
    lengths = [np.zeros(0, np.int64)]
    total = supervised = 0
    for start in range(0, len(rows), ROWS_PER_BATCH):
        batch = rows[start : start + ROWS_PER_BATCH]
        for accepted, encoded in _encoded(chat, kind, batch, supervision, rendered.refused):
            sequences, by_row, control = _sequences(chat, kind, [row for _, row in accepted], encoded, supervision)
            accepted_rows += accepted
            lengths.append(_tokens(renderer, chat, sequences))
            total += len(sequences.ids)
            supervised += int(by_row.sum())
            rendered.unsupervised += int((by_row == 0).sum())
            rendered.control_text += int(control.sum())
    rendered.lengths = np.concatenate(lengths)
    rendered.supervised = supervised / total if total else 0.0
    for number in sorted({0, len(accepted_rows) // 2, len(accepted_rows) - 1} if accepted_rows else ()):
        for _, encoded in _encoded(chat, kind, [accepted_rows[number]], supervision, []):
            rendered.rows.append(_rendered_row(chat, kind, *accepted_rows[number], encoded))
    return rendered


def shortened(spans: list[TextSpan]) -> list[TextSpan]:
    """Cut the middle of long texts, and the middle of very many spans.

    >>> [(span.text[:1], span.omitted) for span in shortened([TextSpan(text="a" * 1000, supervised=True)])]
    [('a', 0), ('', 550), ('a', 0)]
    """
    result: list[TextSpan] = []
    for span in spans:
        omitted = len(span.text) - TEXT_BEGINS - TEXT_ENDS
        if span.control or omitted < MIN_OMITTED:
            result.append(span)
            continue
        gap = TextSpan(text="", supervised=span.supervised, omitted=omitted)
        result += [replace(span, text=span.text[:TEXT_BEGINS]), gap, replace(span, text=span.text[-TEXT_ENDS:])]
    if len(result) <= FIRST_SPANS + LAST_SPANS:
        return result
    characters = sum(len(span.text) + span.omitted for span in result[FIRST_SPANS:-LAST_SPANS])
    return [*result[:FIRST_SPANS], TextSpan(text="", supervised=False, omitted=characters), *result[-LAST_SPANS:]]


def _encoded(
    chat: ChatTokenizer, kind: str, rows: LocatedRows, supervision: Supervision, refused: list[tuple[str, str]]
) -> Iterator[tuple[LocatedRows, EncodedBatch]]:
    """Yield the rows that the template accepts, with their conversations encoded; append the others to `refused`."""
    try:
        yield rows, encode_turns(chat, _turns(kind, _table(kind, [row for _, row in rows]), supervision))
        return
    except Refused as error:
        if len(rows) == 1:
            refused.append((rows[0][0], str(error)))
            return
    one_by_one = [result for row in rows for result in _encoded(chat, kind, [row], supervision, refused)]
    if one_by_one:
        yield [row for (row,), _ in one_by_one], concatenated([encoded for _, encoded in one_by_one])


def _table(kind: str, rows: list[Row]) -> pa.Table:
    weighted = any(turn.get("weight", 1) not in (0, 1) for row in rows for turn in row.turns)

    def turn_of(turn: Message) -> Message:
        weight = turn.get("weight", 1.0)
        return turn | ({"weight": weight} if weighted else {"supervised": weight != 0})

    def value(row: Row, column: str) -> Any:
        if column in row.columns:
            return [turn_of(turn) for turn in getattr(row, column)]
        return getattr(row, column, None)

    schema = (with_weights(SCHEMAS[kind]) if weighted else SCHEMAS[kind]).append(VARIABLES)
    return pa.table({field.name: [value(row, field.name) for row in rows] for field in schema}, schema=schema)


def _turns(kind: str, table: pa.Table, supervision: Supervision) -> Turns:
    train_on, reasoning = supervision
    # Documents are supervised entirely.
    return turns_of(table, "all" if kind == TEXT else train_on, reasoning)


def _sequences(
    chat: ChatTokenizer, kind: str, rows: list[Row], encoded: EncodedBatch, supervision: Supervision
) -> tuple[EncodedBatch, np.ndarray, np.ndarray]:
    """The sequences of rows, a pair's prompt once; their supervised tokens; and whether a text holds a control token."""
    table = _table(kind, rows)
    token_rows = rows_of(table, encoded, holds_control(chat, _turns(kind, table, supervision)))
    return token_rows.sequences, token_rows.supervised_tokens, token_rows.control_text


def _tokens(renderer: Renderer, chat: ChatTokenizer, sequences: EncodedBatch) -> np.ndarray:
    """int64[n], the lengths of sequences in tokens; a byte tokenizer's are estimated, control tokens one each."""
    if renderer.exact:
        return sequences.lengths
    control = np.add.reduceat(chat.is_control(sequences.ids).astype(np.int64), sequences.starts)
    return control + -(-(sequences.lengths - control) // BYTES_PER_TOKEN)


def _rendered_row(chat: ChatTokenizer, kind: str, location: str, row: Row, encoded: EncodedBatch) -> RenderedRow:
    """A row's tokens as text, with a pair's prompt once: up to where its completions differ or are supervised."""
    (branches,) = encoded.branches or (NO_BRANCHES,)
    starts = [*branches[:, 0].tolist(), int(encoded.lengths[0])]
    spans, start = _spans(chat, encoded, 0, starts[0]), 0
    parts = [("", spans)]
    for (begin, prefix, _), end in zip(branches.tolist(), starts[1:]):
        title = f"another turn as it is generated, after the first {prefix} tokens"
        parts.append((title, _spans(chat, encoded.slices(np.array([begin]), np.array([end - begin])), 0)))
    if kind == "preferences":
        rejected = _spans(chat, encoded, 1)
        start = next((i for i, (a, b) in enumerate(zip(spans, rejected)) if a != b or a.supervised), 0)
        parts = [("chosen", spans), ("rejected", rejected)]
    elif kind == "unpaired":
        start = next((i for i, span in enumerate(spans) if span.supervised), len(spans))
        parts = [(f"completion, labelled {'good' if row.label else 'bad'}", spans)]
    return RenderedRow(
        location=location,
        prompt=shortened(spans[:start]),
        parts=[(title, shortened(side[start:])) for title, side in parts],
    )


def _spans(chat: ChatTokenizer, encoded: EncodedBatch, number: int, tokens: int | None = None) -> list[TextSpan]:
    """The text of a conversation, or of its first `tokens` tokens."""
    start, end = encoded.offsets[number : number + 2]
    end = end if tokens is None else start + tokens
    ids, supervised = encoded.ids[start:end], encoded.supervised[start:end]
    control = chat.is_control(ids)
    edges = np.flatnonzero((np.diff(supervised) != 0) | control[1:] | control[:-1]) + 1
    return [
        TextSpan(
            text=chat.text(ids[a:b]),
            supervised=bool(supervised[a]),
            weight=float(supervised[a] or 1),
            control=bool(control[a]),
        )
        for a, b in pairwise([0, *edges.tolist(), len(ids)])
        if a < b
    ]
