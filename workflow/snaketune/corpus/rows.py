"""Canonical rows, which every layout is converted to; their ids and Arrow schemas.

A conversation is a list of turns that alternate and end on the assistant. A preference is a prompt that ends before the
assistant's turn, and two different completions of it. An unpaired row has one completion and a label, good or bad. Text isn't
changed, NUL characters included; only a lone surrogate is refused, because UTF-8 can't encode it. An id takes 2 µs per row.

A document is a conversation with one turn, whose role is TEXT. A message that isn't supervised has `supervised: False`; in
memory the key is absent otherwise, on disk it is always present. On disk, preferences and unpaired rows have the number of
their source, so that preference metrics can be reported by source.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import xxhash

Message = dict[str, Any]

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("supervised", pa.bool_())]))
# Fields besides the turns: the tools that the prompt offers (see `tools`), and the checkable answer.
LABEL_FIELDS = [("tools", pa.string()), ("answer", pa.string()), ("task", pa.string())]
SOURCE = pa.field("source", pa.int16())
SCHEMAS = {
    "conversations": pa.schema([("id", pa.string()), ("messages", MESSAGES), *LABEL_FIELDS]),
    "preferences": pa.schema(
        [("id", pa.string()), ("prompt", MESSAGES), ("chosen", MESSAGES), ("rejected", MESSAGES), *LABEL_FIELDS, SOURCE]
    ),
    "unpaired": pa.schema(
        [
            ("id", pa.string()),
            ("prompt", MESSAGES),
            ("completion", MESSAGES),
            ("label", pa.bool_()),
            *LABEL_FIELDS,
            SOURCE,
        ]
    ),
}
SCHEMAS["text"] = SCHEMAS["conversations"]
TEXT = "text"


class Malformed(Exception):
    """Raised for a row that can't be used.

    Attributes:
        reason: a short stable name, counted in the manifest.
        detail: what exactly is wrong.
        excerpt: the beginning of the raw text, where it gave no row that an excerpt could be taken from.
    """

    def __init__(self, reason: str, detail: str, excerpt: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.excerpt = reason, detail, excerpt


class Dropped(Exception):
    """Raised for a valid row that isn't used, for instance a tie between two answers.

    Attributes:
        reason: a short stable name, counted in the manifest.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Turns, the tools offered, and labels of the last turn. `notes` name what was changed on the way, for the counts."""

    messages: list[Message]
    tools: str | None = None
    answer: str | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()

    kind = "conversations"
    columns = ("messages",)

    @property
    def opening(self) -> list[Message]:
        """The turns that the split is decided by."""
        return self.messages

    @property
    def turns(self) -> list[Message]:
        """All turns."""
        return self.messages

    @property
    def reply(self) -> str:
        """The text that an answer pattern is searched in."""
        return self.messages[-1]["content"]


@dataclass(kw_only=True, slots=True)
class Preference:
    """A prompt and two completions. `answer` is the checkable answer of the chosen one."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: str | None = None
    answer: str | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()

    kind = "preferences"
    columns = ("prompt", "chosen", "rejected")

    @property
    def opening(self) -> list[Message]:
        """The turns that the split is decided by."""
        return self.prompt

    @property
    def turns(self) -> list[Message]:
        """All turns."""
        return self.prompt + self.chosen + self.rejected

    @property
    def reply(self) -> str:
        """The text that an answer pattern is searched in."""
        return self.chosen[-1]["content"]


@dataclass(kw_only=True, slots=True)
class Unpaired:
    """A prompt, a completion, and whether it is good. `answer` is the checkable answer of the completion."""

    prompt: list[Message]
    completion: list[Message]
    label: bool
    tools: str | None = None
    answer: str | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()

    kind = "unpaired"
    columns = ("prompt", "completion")

    @property
    def opening(self) -> list[Message]:
        """The turns that the split is decided by."""
        return self.prompt

    @property
    def turns(self) -> list[Message]:
        """All turns."""
        return self.prompt + self.completion

    @property
    def reply(self) -> str:
        """The text that an answer pattern is searched in."""
        return self.completion[-1]["content"]


Row = Conversation | Preference | Unpaired


def content_hash(row: Row) -> int:
    """Return the 64-bit XXH3 of a row's turns, roles, tools and unsupervised turns; answer and task don't count.

    Each text follows its role and length, so that different turns never give the same hashed text.

    Raises:
        Malformed: a text that UTF-8 can't encode.
    """
    serialized = "".join(
        [
            f"{turn['role']}{'' if turn.get('supervised', True) else '!'}:{len(content := turn['content'])}:{content}"
            for turn in row.turns
        ]
    )
    if isinstance(row, Preference):
        serialized = f"{len(row.prompt)}:{len(row.chosen)}:{serialized}"
    elif isinstance(row, Unpaired):
        serialized = f"{len(row.prompt)}:{'good' if row.label else 'bad'}:{serialized}"
    if row.tools:
        tools = _sorted_json(row.tools)
        serialized = f"tools:{len(tools)}:{tools}{serialized}"
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


@lru_cache(maxsize=256)
def _sorted_json(serialized: str) -> str:
    """Return JSON with sorted keys, so that rows that differ only in the order of keys are the same."""
    return json.dumps(json.loads(serialized), sort_keys=True, ensure_ascii=False)


def roles_and_texts(turns: list[Message]) -> list[tuple[str, str]]:
    """Return role and content of each turn, supervised or not."""
    return [(turn["role"], turn["content"]) for turn in turns]


def id_of(content: int) -> str:
    """Return the id of a row with this `content_hash`: 16 hex digits."""
    return f"{content:016x}"
