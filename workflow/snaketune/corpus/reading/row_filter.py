"""The `where:` conditions of a source, which drop rows by the values of their columns."""

import json
import operator
from contextlib import suppress
from typing import Any

from snaketune.config.conditions import Condition
from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import Dropped, Malformed

COMPARISONS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip


def text_of(condition: Condition) -> str:
    """A condition as it is written in a config.

    >>> text_of(Condition(column="source", operator="!=", value="web crawl"))
    'source != "web crawl"'
    """
    return f"{condition.column} {condition.operator} {json.dumps(condition.value, ensure_ascii=False)}"


class RowFilter:
    """The conditions of one source, for the rows of one file."""

    def __init__(self, conditions: tuple[Condition, ...]):
        self.conditions = {text_of(condition): condition for condition in conditions}
        self.absent = dict.fromkeys(self.conditions)

    def check(self, raw: dict[str, Any]) -> None:
        """Raise unless a raw row meets all conditions; null meets only `!=`.

        Raises:
            Dropped: the row doesn't meet a condition.
            Malformed: the column's value can't be compared with the condition's.
        """
        for text, condition in self.conditions.items():
            if condition.column in raw:
                self.absent.pop(text, None)
            if not _fulfils(raw.get(condition.column), condition, text):
                raise Dropped(f"where {text}")

    def finish(self) -> None:
        """Raise Malformed if no row of the file had a column of the conditions."""
        for text in self.absent:
            what = f"no row has the column {self.conditions[text].column!r} of `where: {text}`; check its name"
            raise Malformed("missing_column", what)


def _fulfils(value: Any, condition: Condition, text: str) -> bool:
    expected = condition.value
    if value is None or expected is None:
        return (value is expected) == (condition.operator == "==")
    if isinstance(value, str) and not isinstance(expected, str):
        # CSV files have truth values and numbers as text.
        with suppress(ValueError, RecursionError):
            value = json.loads(value.strip().lower())
    if type(value) is not type(expected) and value in (0, 1) and expected in (0, 1):
        # One is a boolean, the other a number.
        value, expected = int(value), int(expected)
    if _kind(value) is not _kind(expected):
        what = f"{excerpt(value)[:40]}, which can't be compared as `where: {text}` does"
        raise Malformed("wrong_type", f"{condition.column} holds {what}")
    return COMPARISONS[condition.operator](value, expected)


def _kind(value: Any) -> type:
    """Return the type of a value, float for all numbers."""
    return float if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)
