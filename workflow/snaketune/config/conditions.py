"""`where:` of a source: a condition on one column of its rows, such as `is_correct == true` or `helpfulness >= 3`."""

import json
import re
from typing import NamedTuple

CONDITION = re.compile(r"(?P<column>[^=!<>]+?)\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?P<value>[^=\s].*)")
CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class Condition(NamedTuple):
    """A column, a comparison, and the value to compare with: a truth value, a number, a text, or None for null."""

    column: str
    operator: str
    value: bool | int | float | str | None


def condition_of(text: str) -> Condition:
    """The condition that a text spells; its value is JSON, or else a text as it stands there.

    >>> condition_of("helpfulness >= 3"), condition_of("source != web crawl").value
    (Condition(column='helpfulness', operator='>=', value=3), 'web crawl')

    Raises:
        ValueError: it spells none.
    """
    found = CONDITION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is no condition; expected a column, one of == != < <= > >=, and a value: helpfulness >= 3"
        )
    spelled = found["value"]
    try:
        # True and None as Python has them, too.
        value = json.loads(CONSTANTS.get(spelled.lower(), spelled))
    except (ValueError, RecursionError):
        quoted = len(spelled) > 1 and spelled[0] == spelled[-1] == "'"
        value = spelled[1:-1] if quoted else spelled
    if isinstance(value, (list, dict)):
        raise ValueError(f"{text!r} compares with a list or an object; expected true, false, null, a number or a text")
    if (value is None or isinstance(value, bool)) and found["operator"] not in ("==", "!="):
        raise ValueError(f"{text!r}: {found['value']} has no order; compare with == or !=")
    return Condition(found["column"], found["operator"], value)
