"""Trees of messages: one message per row (`message_id`, `parent_id`, `role`, `text`, `rank`), or nested `replies`.

For conversations, the path of the best replies is used; for preferences, the best reply to a prompt with each lower-ranked one.
"""

from typing import Any

from snaketune.corpus.rows import Outcome
from snaketune.corpus.values.message_trees import MESSAGE_KEYS, rows_of_flat_tree, rows_of_tree
from snaketune.corpus.values.prompts import is_list
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant

KINDS = ("conversations", "preferences")
MESSAGE = tuple(Column(key, key) for key in sorted(MESSAGE_KEYS - {"replies"}))


def _is_tree(value: Any) -> bool:
    return isinstance(value, dict) and "replies" in value


def read(values: Values, file: RowFile) -> list[Outcome]:
    return rows_of_tree(values.get("prompt", values), file.kind, file.speakers)


def join(rows: list[Values], file: RowFile) -> list[Outcome]:
    return rows_of_flat_tree(rows, file.kind, file.speakers)


SCHEMA = Schema(
    "message-tree",
    read,
    Variant("prompt", Column("prompt", "prompt", holds=_is_tree)),
    Variant("replies", Column("replies", "replies", holds=is_list), *MESSAGE),
    Variant("message_id role", *MESSAGE, joins=KINDS),
    kinds=KINDS,
    join=join,
)
