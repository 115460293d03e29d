"""Rows as they are read, and canonical rows, which every layout is converted to, with their ids and Arrow schemas.

A conversation is a list of turns that alternate and end on the assistant. A preference is a prompt that ends before the
assistant's turn, and two different completions of it. An unpaired row has one completion and a label, good or bad. Text isn't
changed, NUL characters included; only a lone surrogate is refused, because UTF-8 can't encode it. An id takes 2 µs per row.

A document is a conversation with one turn, whose role is TEXT. In memory, a message whose weight in the loss isn't 1 has the
key `weight`, 0 if it isn't supervised. On disk, messages have `supervised`, or `weight` if any has another one than 0 and 1;
rows have the number of their source, so that metrics can be reported by source.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import pyarrow as pa
import xxhash

Message = dict[str, Any]

TURN = [("role", pa.string()), ("content", pa.string())]
MESSAGES = pa.list_(pa.struct([*TURN, ("supervised", pa.bool_())]))
WEIGHTED_MESSAGES = pa.list_(pa.struct([*TURN, ("weight", pa.float32())]))
ID = pa.field("id", pa.string())
# Fields besides the turns: the tools that the prompt offers (see `values.tools`), and the checkable answer.
LABEL_FIELDS = [("tools", pa.string()), ("answer", pa.string()), ("task", pa.string())]
SOURCE = pa.field("source", pa.int16())
# Variables of the chat template, an object as JSON: a column of corpora in which a row has any.
VARIABLES = pa.field("template_variables", pa.string())
# By how much the chosen completion of a pair is rated higher: a column of corpora in which a pair has ratings.
MARGIN = pa.field("margin", pa.float64())
# The column of `<split>-order.arrow`, if a corpus has `order_column`.
ORDER_COLUMN = "order"
PAIR_FIELDS = [("prompt", MESSAGES), ("chosen", MESSAGES), ("rejected", MESSAGES)]
UNPAIRED_FIELDS = [("prompt", MESSAGES), ("completion", MESSAGES), ("label", pa.bool_())]
SCHEMAS = {
    "conversations": pa.schema([ID, ("messages", MESSAGES), *LABEL_FIELDS, SOURCE]),
    "preferences": pa.schema([ID, *PAIR_FIELDS, *LABEL_FIELDS, SOURCE]),
    "unpaired": pa.schema([ID, *UNPAIRED_FIELDS, *LABEL_FIELDS, SOURCE]),
}
SCHEMAS["text"] = SCHEMAS["conversations"]


def with_weights(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose messages have weights."""
    return pa.schema([field.with_type(WEIGHTED_MESSAGES) if field.type == MESSAGES else field for field in schema])


TEXT = "text"
SPLITS = ("train", "held_out")
NAN_AS_NULL = ("nan_as_null",)


class Malformed(Exception):
    """Raised for a row that can't be used.

    Attributes:
        reason: a short stable name, counted in the manifest.
        detail: what exactly is wrong.
        excerpt: the beginning of the raw text, where it gave no row that an excerpt could be taken from.
        repairs: the configurable repairs that would make the row valid.
    """

    def __init__(self, reason: str, detail: str, excerpt: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.excerpt = reason, detail, excerpt
        self.repairs: tuple[str, ...] = ()


class Dropped(Exception):
    """Raised for a valid row that isn't used, for instance a tie; `reason` is a short stable name, counted in the manifest."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class RawRow(NamedTuple):
    """A row as read, or why there is none, with its number: the line of a text file, else the index of the row from 1.

    `notes` name what was changed on reading; canonical rows made of it inherit them.
    """

    unit: Literal["line", "row"]
    number: int
    value: dict[str, Any] | Malformed | Dropped
    notes: tuple[str, ...] = ()


class Noted(NamedTuple):
    """A value that was changed on reading, with the notes for its row."""

    value: Any
    notes: tuple[str, ...] = NAN_AS_NULL


@dataclass(kw_only=True, slots=True)
class _Row:
    """What all rows have: the tools offered, template variables, labels of the reply, and `notes` on what was changed, for
    the counts."""

    tools: str | None = None
    template_variables: str | None = None
    answer: str | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()

    # The columns of turns; the second, if there are several, has the reply.
    columns: ClassVar[tuple[str, ...]]

    @property
    def turns(self) -> list[Message]:
        return [turn for column in self.columns for turn in getattr(self, column)]

    @property
    def reply(self) -> str:
        """The text that an answer pattern is searched in."""
        return getattr(self, self.columns[:2][-1])[-1]["content"]


@dataclass(kw_only=True, slots=True)
class Conversation(_Row):
    """Turns that end on the assistant's."""

    messages: list[Message]

    columns = ("messages",)
    # The turns that the split is decided by.
    opening = turns = property(attrgetter("messages"))


@dataclass(kw_only=True, slots=True)
class Preference(_Row):
    """A prompt and two completions. `answer` is the checkable answer of the chosen one; `margin` is by how much it is rated
    higher, None without ratings."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float | None = None

    columns = ("prompt", "chosen", "rejected")
    opening = property(attrgetter("prompt"))

    @property
    def turns(self) -> list[Message]:
        return self.prompt + self.chosen + self.rejected


@dataclass(kw_only=True, slots=True)
class Unpaired(_Row):
    """A prompt, a completion, and whether it is good. `answer` is the checkable answer of the completion."""

    prompt: list[Message]
    completion: list[Message]
    label: bool

    columns = ("prompt", "completion")
    opening = property(attrgetter("prompt"))


Row = Conversation | Preference | Unpaired
Outcome = Row | Malformed | Dropped | None


class RowResult(NamedTuple):
    """The result for one raw row, or one of several.

    Attributes:
        raw: the raw row. One raw row can give several rows, and is then in the result of each.
        layout: the name of its layout.
        row: the canonical row; or the reason why there is none; or None if the raw row became part of another row (a message
            of a tree).
        ignored: columns, and keys of turns such as `messages[].name`, that hold something and aren't read. Of several
            results of one raw row, only the first has them.
        marks: those ignored columns that mark the row as a bad one, such as `is_correct: false`.
    """

    raw: RawRow
    layout: str
    row: Outcome
    ignored: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def content_hash(row: Row) -> int:
    """Return the 64-bit XXH3 of a row's turns, roles, tools, template variables and weights of turns; answer and task don't
    count.

    Each text follows its role and length, so that different turns never give the same hashed text.

    Raises:
        Malformed: a text that UTF-8 can't encode.
    """
    serialized = "".join(
        [f"{turn['role']}{_weight_mark(turn)}:{len(content := turn['content'])}:{content}" for turn in row.turns]
    )
    if isinstance(row, Preference):
        serialized = f"{len(row.prompt)}:{len(row.chosen)}:{serialized}"
    elif isinstance(row, Unpaired):
        serialized = f"{len(row.prompt)}:{'good' if row.label else 'bad'}:{serialized}"
    if row.tools:
        tools = _sorted_json(row.tools)
        serialized = f"tools:{len(tools)}:{tools}{serialized}"
    if row.template_variables:
        serialized = f"variables:{len(row.template_variables)}:{row.template_variables}{serialized}"
    try:
        if row.answer is not None:
            row.answer.encode()
        if row.task is not None:
            row.task.encode()
        return xxhash.xxh3_64_intdigest(serialized.encode())
    except UnicodeEncodeError as error:
        raise Malformed(
            "lone_surrogate", f"holds {error.object[error.start]!a}, a lone surrogate, which UTF-8 can't encode"
        ) from None


def _weight_mark(turn: Message) -> str:
    weight = turn.get("weight", 1)
    return "" if weight == 1 else f"!{weight or ''}"


@lru_cache(maxsize=256)
def _sorted_json(serialized: str) -> str:
    """Return JSON with sorted keys, so that rows that differ only in the order of keys are the same."""
    return json.dumps(json.loads(serialized), sort_keys=True, ensure_ascii=False)


def roles_and_texts(turns: list[Message]) -> list[tuple[str, str]]:
    """Return role and content of each turn, supervised or not."""
    return [(turn["role"], turn["content"]) for turn in turns]


def id_of(content: int) -> str:
    return f"{content:016x}"


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in a JSON value at any depth and is no object or list itself, in order; without recursion.

    >>> list(leaves([{"a": 1, "b": ["x"]}, None]))
    [1, 'x', None]
    """
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as mapping:
                pending += reversed(mapping.values())
            case list() as items:
                pending += reversed(items)
            case leaf:
                yield leaf


def table_row(number: int, row: dict[str, Any]) -> RawRow:
    """Return a row of a table with its columns as JSON has them; NaN, which is null there, is noted."""
    cleaned = nan_as_null(row)
    columns = {column: json_value(value) for column, value in cleaned.items()}
    return RawRow("row", number, columns, () if cleaned is row else NAN_AS_NULL)


def json_value(value: Any) -> Any:
    """Return a value of a table as JSON has it.

    Null keys are removed, because every struct has the keys of all structs; bytes that are UTF-8 are text in many tables.

    >>> json_value([{"a": 1, "b": None}, {"a": None, "b": {"c": None}}, b"x", b"\\xff"])
    [{'a': 1}, {'b': {}}, 'x', b'\xff']
    """
    match value:
        case str():
            return value
        case dict():
            return {key: json_value(item) for key, item in value.items() if item is not None}
        case list():
            return [json_value(item) for item in value]
        case bytes():
            with suppress(UnicodeDecodeError):
                return value.decode()
    return value


def nan_as_null(value: Any) -> Any:
    """Replace each NaN, which is how pandas writes a missing value, with null; return the same object if there is none.

    >>> nan_as_null({"a": [float("nan"), 1.5]})
    {'a': [None, 1.5]}
    """
    if not _holds_nan(value):
        return value
    match value:
        case dict():
            return {key: nan_as_null(item) for key, item in value.items()}
        case list():
            return [nan_as_null(item) for item in value]
    return None


def _holds_nan(value: Any) -> bool:
    match value:
        case str():
            return False
        case dict():
            return any(map(_holds_nan, value.values()))
        case list():
            return any(map(_holds_nan, value))
        case float():
            return value != value
    return False
