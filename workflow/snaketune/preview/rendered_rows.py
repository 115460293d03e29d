"""Rows as a chat template writes them: what is supervised of the first, how long all are, and which it refuses and why.

By the tokenizer that is there, or else by one of bytes, for the same code that tokenizes corpora.
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
from snaketune.tokenization.template import SHIPPED
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.token_rows import completion_rows, conversation_rows, pair_rows
from snaketune.tokenization.turn_columns import Turns, completion_turns, conversation_turns, pair_turns

ROWS_AT_ONCE = 64
# As long as rows are commonly packed.
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BYTES_PER_TOKEN = 4
# What is shown of a long text; fewer characters than LEAST_LEFT_OUT aren't worth a cut.
TEXT_BEGINS, TEXT_ENDS, LEAST_LEFT_OUT = 300, 150, 100
FIRST_PIECES, LAST_PIECES = 50, 25


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of a row, supervised or not; a control token is a piece of its own.

    Attributes:
        left_out: instead of a text, how many characters aren't shown here.
    """

    text: str
    supervised: bool
    control: bool = False
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A row to look at: its prompt, where it has completions, and what follows, by name."""

    place: str
    prompt: list[Piece]
    parts: list[tuple[str, list[Piece]]]


@dataclass(kw_only=True)
class Written:
    """All rows through the template.

    Attributes:
        template: where the chat template is from.
        exact: whether a tokenizer counted; else tokens are estimated by bytes.
        lengths: int64[n], in tokens.
        supervised: what share of all tokens is supervised.
        unsupervised: rows of which nothing is.
        refused: rows that the template can't write: where, and why.
        control_text: rows in which somebody wrote a control token, which stays text.
    """

    template: str
    exact: bool
    shown: list[Shown] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    supervised: float = 0.0
    unsupervised: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    control_text: int = 0

    def longer(self, lengths: tuple[int, ...] = LENGTHS) -> dict[int, int]:
        """Of common row lengths how many rows are longer, up to the first that holds all."""
        found = {}
        for length in lengths:
            found[length] = int((self.lengths > length).sum())
            if not found[length]:
                break
        return found


@dataclass(frozen=True, kw_only=True)
class Writer:
    """What writes rows: a tokenizer with its chat template, and whether it is more than a stand-in."""

    chat: ChatTokenizer
    template: str
    exact: bool

    def in_place_of(self, model: str) -> "Writer":
        """This one, said to stand for a model's own template, which isn't here yet."""
        return replace(self, template=f"{self.template}, in the place of {model}'s own, which isn't here yet")


def writer_of(template: Path | None, tokenizer: Path | None) -> Writer:
    """From a template's file, ChatML where none is named, and a tokenizer's folder, whose own template comes before ChatML.

    Raises:
        SnaketuneError: one of them can't be read, or the `tokenizer` stage would refuse the template.
    """
    writer = _writer_of(template, tokenizer)
    try:
        check(writer.chat, [])
    except SnaketuneError as error:
        raise SnaketuneError(f"{writer.template}: {error}") from None
    return writer


def _writer_of(template: Path | None, tokenizer: Path | None) -> Writer:
    if tokenizer is None:
        text = _text_of(template or DEFAULT_CHAT_TEMPLATE)
        chat = ChatTokenizer(*bytes_tokenizer(text), text)
        return Writer(chat=chat, template=_named(template), exact=False)
    try:
        description = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
        config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
        path = tokenizer / "chat_template.jinja"
        own = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise SnaketuneError(
            f"--tokenizer {tokenizer}: {error}; name a folder with tokenizer.json and tokenizer_config.json"
        ) from None
    if config.get("pad_token") is None:
        config["pad_token"] = config.get("unk_token") or config.get("eos_token")
    if template is None and isinstance(own, str):
        return Writer(chat=ChatTokenizer(description, config, own), template=f"{tokenizer}'s own", exact=True)
    chat = ChatTokenizer(description, config, _text_of(template or DEFAULT_CHAT_TEMPLATE))
    return Writer(chat=chat, template=_named(template), exact=True)


def write(writer: Writer, kind: str, rows: list[tuple[str, Row]], train_on: str = "assistant") -> Written:
    """Rows through the template; of those that it takes the first, the last and one between them to look at."""
    written = Written(template=writer.template, exact=writer.exact)
    chat = writer.chat.for_documents() if kind == TEXT else writer.chat
    taken: list[tuple[str, Row]] = []
    lengths = [np.zeros(0, np.int64)]
    total = supervised = 0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        for own, encoded in _encoded(chat, kind, rows[start : start + ROWS_AT_ONCE], train_on, written.refused):
            sequences, by_row, control = _sequences(chat, kind, [row for _, row in own], encoded, train_on)
            taken += own
            lengths.append(_tokens(writer, chat, sequences))
            total += len(sequences.ids)
            supervised += int(by_row.sum())
            written.unsupervised += int((by_row == 0).sum())
            written.control_text += int(control.sum())
    written.lengths = np.concatenate(lengths)
    written.supervised = supervised / total if total else 0.0
    for number in sorted({0, len(taken) // 2, len(taken) - 1} if taken else ()):
        for _, encoded in _encoded(chat, kind, [taken[number]], train_on, []):
            written.shown.append(_shown(chat, kind, *taken[number], encoded))
    return written


def shortened(pieces: list[Piece]) -> list[Piece]:
    """Long texts without their middle, and of very many pieces the first and the last.

    >>> [(piece.text[:1], piece.left_out) for piece in shortened([Piece(text="a" * 1000, supervised=True)])]
    [('a', 0), ('', 550), ('a', 0)]
    """
    found: list[Piece] = []
    for piece in pieces:
        left_out = len(piece.text) - TEXT_BEGINS - TEXT_ENDS
        if piece.control or left_out < LEAST_LEFT_OUT:
            found.append(piece)
            continue
        found += [
            replace(piece, text=piece.text[:TEXT_BEGINS]),
            Piece(text="", supervised=piece.supervised, left_out=left_out),
            replace(piece, text=piece.text[-TEXT_ENDS:]),
        ]
    if len(found) <= FIRST_PIECES + LAST_PIECES:
        return found
    middle = found[FIRST_PIECES:-LAST_PIECES]
    characters = sum(len(piece.text) + piece.left_out for piece in middle)
    return [*found[:FIRST_PIECES], Piece(text="", supervised=False, left_out=characters), *found[-LAST_PIECES:]]


def _encoded(
    chat: ChatTokenizer, kind: str, rows: list[tuple[str, Row]], train_on: str, refused: list[tuple[str, str]]
) -> Iterator[tuple[list[tuple[str, Row]], EncodedBatch]]:
    """The rows that the template takes, and their conversations encoded; the others are added to `refused`."""
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
    # Documents are supervised as a whole.
    return by_kind[kind](table) if kind in by_kind else conversation_turns(table, "all" if kind == TEXT else train_on)


def _sequences(
    chat: ChatTokenizer, kind: str, rows: list[Row], encoded: EncodedBatch, train_on: str
) -> tuple[EncodedBatch, np.ndarray, np.ndarray]:
    """The sequences that rows become, a pair's prompt once; how many tokens of each are supervised; and whether a text of
    theirs holds a control token."""
    table = _table(kind, rows)
    names = table["id"].combine_chunks()
    control = holds_control(chat, _turns(kind, table, train_on)).reshape(len(rows), -1).any(1)
    if kind == "preferences":
        found = pair_rows(names, encoded, control)
    elif kind == "unpaired":
        found = completion_rows(names, encoded, table["label"].combine_chunks(), control)
    else:
        found = conversation_rows(names, encoded, control)
    return found.sequences, found.supervised_tokens, control


def _tokens(writer: Writer, chat: ChatTokenizer, sequences: EncodedBatch) -> np.ndarray:
    """int64[n]: their lengths; where tokens are bytes, a control token counts as one and four bytes as another."""
    if writer.exact:
        return sequences.lengths
    control = np.add.reduceat(chat.is_control(sequences.ids).astype(np.int64), sequences.starts)
    return control + -(-(sequences.lengths - control) // BYTES_PER_TOKEN)


def _shown(chat: ChatTokenizer, kind: str, place: str, row: Row, encoded: EncodedBatch) -> Shown:
    """A row's tokens as text: a pair's prompt once, up to where its completions part or are supervised."""
    if kind == "preferences":
        chosen, rejected = (_pieces(chat, encoded, side) for side in (0, 1))
        alike = next((at for at, (a, b) in enumerate(zip(chosen, rejected)) if a != b or a.supervised), 0)
        parts = [("chosen", shortened(chosen[alike:])), ("rejected", shortened(rejected[alike:]))]
        return Shown(place=place, prompt=shortened(chosen[:alike]), parts=parts)
    pieces = _pieces(chat, encoded, 0)
    if kind == "unpaired":
        begins = next((at for at, piece in enumerate(pieces) if piece.supervised), len(pieces))
        label = "good" if getattr(row, "label", False) else "bad"
        completion = f"completion, labelled {label}", shortened(pieces[begins:])
        return Shown(place=place, prompt=shortened(pieces[:begins]), parts=[completion])
    return Shown(place=place, prompt=[], parts=[("", shortened(pieces))])


def _pieces(chat: ChatTokenizer, encoded: EncodedBatch, number: int) -> list[Piece]:
    """The tokens of a conversation as text."""
    start, end = encoded.offsets[number : number + 2]
    ids, supervised = encoded.ids[start:end], encoded.supervised[start:end]
    control = chat.is_control(ids)
    edges = np.flatnonzero((np.diff(supervised) != 0) | control[1:] | control[:-1]) + 1
    return [
        Piece(text=chat.text(ids[a:b]), supervised=bool(supervised[a]), control=bool(control[a]))
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
