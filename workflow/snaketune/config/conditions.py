"""`where:` of a source: a condition on one column of its rows, such as `is_correct == true` or `helpfulness >= 3`."""

import json
import re
from typing import NamedTuple

CONDITION = re.compile(r"(?P<column>[^=!<>]+?)\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?P<value>[^=\s].*)")


class Condition(NamedTuple):
    """A column, a comparison, and the value to compare with: a truth value, a number, a text, or None for null."""

    column: str
    operator: str
    value: bool | float | str | None


def condition_of(text: str) -> Condition:
    """The condition that a text spells; its value is JSON, or else a text as it stands there.

    >>> condition_of("helpfulness >= 3"), condition_of("source != web crawl").value
    (Condition(column='helpfulness', operator='>=', value=3.0), 'web crawl')

    Raises:
        ValueError: it spells none.
    """
    found = CONDITION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is no condition; expected a column, one of == != < <= > >=, and a value: helpfulness >= 3"
        )
    try:
        value = json.loads(found["value"])
    except ValueError:
        value = found["value"]
    if isinstance(value, (list, dict)):
        raise ValueError(f"{text!r} compares with a list or an object; expected true, false, null, a number or a text")
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (value is None or isinstance(value, bool)) and found["operator"] not in ("==", "!="):
        raise ValueError(f"{text!r}: {found['value']} has no order; compare with == or !=")
    return Condition(found["column"], found["operator"], value)
