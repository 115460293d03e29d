"""Rows rendered by a chat template: the first ones with their supervision, the lengths of all, and those that it refuses.

Rendered by the tokenizer if there is one, else by a byte tokenizer, with the code that tokenizes corpora.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.config.tokenizers import DEFAULT_CHAT_TEMPLATE
from snaketune.corpus.rows import SCHEMAS, TEXT, Row
from snaketune.errors import SnaketuneError
from snaketune.preview.bytes_tokenizer import bytes_tokenizer
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.creation.check import check
from snaketune.tokenization.encode_rows import encode_turns, holds_control
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.template import SHIPPED, Refused
from snaketune.tokenization.token_rows import completion_rows, conversation_rows, pair_rows
from snaketune.tokenization.turn_columns import Turns, completion_turns, conversation_turns, pair_turns

ROWS_PER_BATCH = 64
# Common row lengths.
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BYTES_PER_TOKEN = 4
# Characters shown of a long text; a cut of fewer than MIN_OMITTED characters isn't made.
TEXT_BEGINS, TEXT_ENDS, MIN_OMITTED = 300, 150, 100
FIRST_SPANS, LAST_SPANS = 50, 25


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """A span of a row's text, supervised or not; a control token is a span of its own.

    Attributes:
        omitted: number of characters not shown, if the span stands for them.
    """

    text: str
    supervised: bool
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
        """Return the number of rows longer than each of these lengths, up to the first that no row exceeds."""
        counts = {}
        for length in lengths:
            counts[length] = int((self.lengths > length).sum())
            if not counts[length]:
                break
        return counts


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A tokenizer with its chat template.

    Attributes:
        exact: whether it is a real tokenizer; else a byte tokenizer.
    """

    chat: ChatTokenizer
    template: str
    exact: bool

    def as_substitute_for(self, model: str) -> "Renderer":
        """Return this renderer, named as the substitute for a model's own template, which isn't available yet."""
        return replace(self, template=f"{self.template}, instead of {model}'s own, which isn't available yet")


def load_renderer(template: Path | None, tokenizer: Path | None) -> Renderer:
    """Load a renderer from a template file and a tokenizer folder, each optional.

    Without a template file, the tokenizer's own template is used, else ChatML.

    Raises:
        SnaketuneError: one of them can't be read, or the `tokenizer` stage would refuse the template.
    """
    renderer = _load_renderer(template, tokenizer)
    try:
        check(renderer.chat, [])
    except SnaketuneError as error:
        raise SnaketuneError(f"{renderer.template}: {error}") from None
    return renderer


def _load_renderer(template: Path | None, tokenizer: Path | None) -> Renderer:
    if tokenizer is None:
        text = _text_of(template or DEFAULT_CHAT_TEMPLATE)
        chat = ChatTokenizer(*bytes_tokenizer(text), text)
        return Renderer(chat=chat, template=_named(template), exact=False)
    try:
        description = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
        config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
        path = tokenizer / "chat_template.jinja"
        own_template = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise SnaketuneError(
            f"--tokenizer {tokenizer}: {error}; name a folder with tokenizer.json and tokenizer_config.json"
        ) from None
    if config.get("pad_token") is None:
        config["pad_token"] = config.get("unk_token") or config.get("eos_token")
    if template is None and isinstance(own_template, str):
        return Renderer(
            chat=ChatTokenizer(description, config, own_template), template=f"{tokenizer}'s own", exact=True
        )
    chat = ChatTokenizer(description, config, _text_of(template or DEFAULT_CHAT_TEMPLATE))
    return Renderer(chat=chat, template=_named(template), exact=True)


def render(renderer: Renderer, kind: str, rows: list[tuple[str, Row]], train_on: str = "assistant") -> RenderedRows:
    """Render rows; the first, the last and one between of those that the template accepts are kept to be shown."""
    rendered = RenderedRows(template=renderer.template, exact=renderer.exact)
    chat = renderer.chat.for_documents() if kind == TEXT else renderer.chat
    taken: list[tuple[str, Row]] = []
    lengths = [np.zeros(0, np.int64)]
    total = supervised = 0
    for start in range(0, len(rows), ROWS_PER_BATCH):
        for batch_rows, encoded in _encoded(
            chat, kind, rows[start : start + ROWS_PER_BATCH], train_on, rendered.refused
        ):
            sequences, by_row, control = _sequences(chat, kind, [row for _, row in batch_rows], encoded, train_on)
            taken += batch_rows
            lengths.append(_tokens(renderer, chat, sequences))
            total += len(sequences.ids)
            supervised += int(by_row.sum())
            rendered.unsupervised += int((by_row == 0).sum())
            rendered.control_text += int(control.sum())
    rendered.lengths = np.concatenate(lengths)
    rendered.supervised = supervised / total if total else 0.0
    for number in sorted({0, len(taken) // 2, len(taken) - 1} if taken else ()):
        for _, encoded in _encoded(chat, kind, [taken[number]], train_on, []):
            rendered.rows.append(_rendered_row(chat, kind, *taken[number], encoded))
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
        result += [
            replace(span, text=span.text[:TEXT_BEGINS]),
            TextSpan(text="", supervised=span.supervised, omitted=omitted),
            replace(span, text=span.text[-TEXT_ENDS:]),
        ]
    if len(result) <= FIRST_SPANS + LAST_SPANS:
        return result
    middle = result[FIRST_SPANS:-LAST_SPANS]
    characters = sum(len(span.text) + span.omitted for span in middle)
    return [*result[:FIRST_SPANS], TextSpan(text="", supervised=False, omitted=characters), *result[-LAST_SPANS:]]


def _encoded(
    chat: ChatTokenizer, kind: str, rows: list[tuple[str, Row]], train_on: str, refused: list[tuple[str, str]]
) -> Iterator[tuple[list[tuple[str, Row]], EncodedBatch]]:
    """Yield the rows that the template accepts, with their conversations encoded; append the others to `refused`."""
    try:
        yield rows, encode_turns(chat, _turns(kind, _table(kind, [row for _, row in rows]), train_on))
        return
    except Refused as error:
        if len(rows) == 1:
            refused.append((rows[0][0], str(error)))
            return
    taken, parts = [], []
    for row in rows:
        for _, encoded in _encoded(chat, kind, [row], train_on, refused):
            taken.append(row)
            parts.append(encoded)
    if taken:
        yield taken, concatenated(parts)


def _table(kind: str, rows: list[Row]) -> pa.Table:
    schema = SCHEMAS[kind]
    columns = {field.name: [_value(row, field.name) for row in rows] for field in schema}
    return pa.table(columns, schema=schema)


def _value(row: Row, column: str) -> Any:
    if column in row.columns:
        return [{"supervised": True} | turn for turn in getattr(row, column)]
    return getattr(row, column, None)


def _turns(kind: str, table: pa.Table, train_on: str) -> Turns:
    by_kind = {"preferences": pair_turns, "unpaired": completion_turns}
    # Documents are supervised entirely.
    return by_kind[kind](table) if kind in by_kind else conversation_turns(table, "all" if kind == TEXT else train_on)


def _sequences(
    chat: ChatTokenizer, kind: str, rows: list[Row], encoded: EncodedBatch, train_on: str
) -> tuple[EncodedBatch, np.ndarray, np.ndarray]:
    """Return the sequences of rows, a pair's prompt once; their supervised tokens; and whether a text holds a control token."""
    table = _table(kind, rows)
    names = table["id"].combine_chunks()
    control = holds_control(chat, _turns(kind, table, train_on)).reshape(len(rows), -1).any(1)
    if kind == "preferences":
        token_rows = pair_rows(names, encoded, control)
    elif kind == "unpaired":
        token_rows = completion_rows(names, encoded, table["label"].combine_chunks(), control)
    else:
        token_rows = conversation_rows(names, encoded, control)
    return token_rows.sequences, token_rows.supervised_tokens, control


def _tokens(renderer: Renderer, chat: ChatTokenizer, sequences: EncodedBatch) -> np.ndarray:
    """Return int64[n], the lengths of sequences in tokens; a byte tokenizer's are estimated, control tokens one each."""
    if renderer.exact:
        return sequences.lengths
    control = np.add.reduceat(chat.is_control(sequences.ids).astype(np.int64), sequences.starts)
    return control + -(-(sequences.lengths - control) // BYTES_PER_TOKEN)


def _rendered_row(chat: ChatTokenizer, kind: str, location: str, row: Row, encoded: EncodedBatch) -> RenderedRow:
    """Return a row's tokens as text, with a pair's prompt once: up to where its completions differ or are supervised."""
    if kind == "preferences":
        chosen, rejected = (_spans(chat, encoded, side) for side in (0, 1))
        first_difference = next(
            (index for index, (a, b) in enumerate(zip(chosen, rejected)) if a != b or a.supervised), 0
        )
        parts = [("chosen", shortened(chosen[first_difference:])), ("rejected", shortened(rejected[first_difference:]))]
        return RenderedRow(location=location, prompt=shortened(chosen[:first_difference]), parts=parts)
    spans = _spans(chat, encoded, 0)
    if kind == "unpaired":
        start = next((index for index, span in enumerate(spans) if span.supervised), len(spans))
        label = "good" if getattr(row, "label", False) else "bad"
        completion = f"completion, labelled {label}", shortened(spans[start:])
        return RenderedRow(location=location, prompt=shortened(spans[:start]), parts=[completion])
    return RenderedRow(location=location, prompt=[], parts=[("", shortened(spans))])


def _spans(chat: ChatTokenizer, encoded: EncodedBatch, number: int) -> list[TextSpan]:
    """Return the tokens of a conversation as spans of text."""
    start, end = encoded.offsets[number : number + 2]
    ids, supervised = encoded.ids[start:end], encoded.supervised[start:end]
    control = chat.is_control(ids)
    edges = np.flatnonzero((np.diff(supervised) != 0) | control[1:] | control[:-1]) + 1
    return [
        TextSpan(text=chat.text(ids[a:b]), supervised=bool(supervised[a]), control=bool(control[a]))
        for a, b in pairwise([0, *edges.tolist(), len(ids)])
        if a < b
    ]


def _text_of(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnaketuneError(f"the chat template {template} can't be read: {error}") from None


def _named(template: Path | None) -> str:
    return str(template) if template else f"ChatML ({SHIPPED}/chatml.jinja)"
