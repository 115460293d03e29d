"""What a row has beside its turns, in any layout: the system text, the tools that its prompt offers, its answer and task."""

import re
from typing import TYPE_CHECKING, Any

from snaketune.corpus.rows import Row
from snaketune.corpus.values.cells import plain_text, wrong_type
from snaketune.corpus.values.choices import letter_of
from snaketune.corpus.values.content import text_of
from snaketune.corpus.values.schema import LABELS, Values
from snaketune.corpus.values.tools import are_offered_in, tools_of

if TYPE_CHECKING:
    from snaketune.corpus.values.row_file import RowFile

SYSTEM_TAG = re.compile(r"\A\s*SYSTEM:\s*")


KEYS = frozenset(column.key for column in LABELS)


def add_labels(values: Values, row: Row, file: "RowFile") -> None:
    if system := values.get("system"):
        _prepend_system(row, system)
    if tools := values.get("tools"):
        row.tools = tools_of(tools, file.names["tools"])
        if row.tools and row.opening and are_offered_in(row.tools, row.opening[0]):
            # A chat template would write them again.
            row.tools = None
            row.notes += ("tools_in_system_turn",)
    for key in ("answer", "task"):
        if key in values:
            value = values[key]
            if key == "answer" and "choices" in values:
                value = letter_of(values["choices"], value, (file.names["choices"], file.names["answer"]), file.clues)
            text = value if type(value) is str else plain_text(value)
            if text is None:
                raise wrong_type(file.names[key], value, "a text or a number")
            if text and not text.isspace():
                setattr(row, key, text)


def _prepend_system(row: Row, system: Any) -> None:
    """Insert a system turn at the beginning, unless it is there."""
    if isinstance(system, list):
        system = text_of(system, "system")
    if not isinstance(system, str):
        raise wrong_type("system", system)
    turn = {"role": "system", "content": SYSTEM_TAG.sub("", system)}
    # An empty system turn may have been all that the row opened with.
    if turn["content"].strip() and row.opening[:1] != [turn]:
        row.opening.insert(0, turn)
