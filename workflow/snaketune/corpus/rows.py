"""Canonical rows: what every layout is turned into, its id, and its Arrow schema.

A conversation is turns that alternate and end on the assistant. A preference is a prompt that ends where the assistant
is to speak, and two different completions of it; what is unpaired has one, and whether that is good. Text is kept exactly as it
came, NUL characters included; only a lone surrogate is refused, because no UTF-8 file can hold it. An id costs 2 µs per row.

A document is a conversation with one turn, whose role is TEXT. A message that isn't supervised says `supervised: False`; in
memory the key is left out elsewhere, on disk it is always there. On disk a preference, and what is unpaired, also tells which
of the corpus' sources it is from, so that what is measured of pairs can be told by source.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import xxhash

Message = dict[str, Any]

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("supervised", pa.bool_())]))
# What a row knows besides its turns: the tools that its prompt offers (see `tools`), and the checkable answer.
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
    """A row that can't be used.

    Attributes:
        reason: a short stable name, counted in the manifest.
        detail: what exactly is wrong, for a person.
        excerpt: the beginning of what was found, where no row came of it that it could be taken from.
    """

    def __init__(self, reason: str, detail: str, excerpt: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.excerpt = reason, detail, excerpt


class Dropped(Exception):
    """A row that is sound, and left out all the same: a tie between two answers, say.

    Attributes:
        reason: a short stable name, counted in the manifest.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Turns, the tools offered, and what is known about the last turn. `notes` name things worth counting that happened on
    the way."""

    messages: list[Message]
    tools: str | None = None
    answer: str | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()

    kind = "conversations"
    columns = ("messages",)

    @property
    def opening(self) -> list[Message]:
        """The turns that the split goes by."""
        return self.messages

    @property
    def turns(self) -> list[Message]:
        """All turns."""
        return self.messages

    @property
    def reply(self) -> str:
        """The text that an answer pattern searches."""
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
        """The turns that the split goes by."""
        return self.prompt

    @property
    def turns(self) -> list[Message]:
        """All turns."""
        return self.prompt + self.chosen + self.rejected

    @property
    def reply(self) -> str:
        """The text that an answer pattern searches."""
        return self.chosen[-1]["content"]


@dataclass(kw_only=True, slots=True)
class Unpaired:
    """A prompt, a completion, and whether that is good. `answer` is its checkable answer."""

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
        """The turns that the split goes by."""
        return self.prompt

    @property
    def turns(self) -> list[Message]:
        """All turns."""
        return self.prompt + self.completion

    @property
    def reply(self) -> str:
        """The text that an answer pattern searches."""
        return self.completion[-1]["content"]


Row = Conversation | Preference | Unpaired


def content_hash(row: Row) -> int:
    """64-bit XXH3 of what the row says and who says it, which tools it offers, and what isn't supervised; answer and task don't
    count.

    Each text follows its role and length, so that no text can be taken for the end of one turn and the beginning of
    another.

    Raises:
        Malformed: a text that UTF-8 can't hold.
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
            "lone_surrogate", f"holds {error.object[error.start]!a}, half of a character, which UTF-8 can't spell"
        ) from None


@lru_cache(maxsize=256)
def _sorted_json(serialized: str) -> str:
    """JSON with its keys in order, so that their order makes no other row."""
    return json.dumps(json.loads(serialized), sort_keys=True, ensure_ascii=False)


def roles_and_texts(turns: list[Message]) -> list[tuple[str, str]]:
    """Who says what, whether or not it is supervised."""
    return [(turn["role"], turn["content"]) for turn in turns]


def id_of(content: int) -> str:
    """The id of a row with this `content_hash`: 16 hex digits."""
    return f"{content:016x}"
