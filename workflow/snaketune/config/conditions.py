"""Conditions of a source's `where:` key on one column of its rows, such as `is_correct == true` or `helpfulness >= 3`."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema, model_validator

from snaketune.config.base import Model

CONDITION = re.compile(r"(?P<column>[^=!<>]+?)\s*(?P<operator>==|!=|<=|>=|<|>)\s*(?P<value>[^=\s].*)")
# Signs of a second condition in a value without quotes.
SEVERAL = re.compile(r"^[^'\"].*(?:\s(?:and|or)\s|&&|\|\||[=!<>]=|[<>])", re.IGNORECASE)
CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
TEXT = {"type": "string"}


class Condition(Model):
    """A column, a comparison operator, and the value to compare with; written as one text in a config.

    >>> Condition.model_validate("helpfulness>=3"), Condition.model_validate("source != web crawl").value
    (Condition(column='helpfulness', operator='>=', value=3), 'web crawl')
    """

    column: str
    operator: Literal["==", "!=", "<=", ">=", "<", ">"]
    value: bool | int | float | str | None
    """A boolean, a number, a text, or None for null."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, text: Any) -> Any:
        """Split a text; the value is parsed as JSON, and anything else is a literal text."""
        if not isinstance(text, str):
            return text
        match = CONDITION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a condition; expected a column, one of == != < <= > >=, and a value: helpfulness >= 3"
            )
        spelled = match["value"]
        try:
            # Python's spellings True and None are accepted, too.
            value = json.loads(CONSTANTS.get(spelled.lower(), spelled))
        except (ValueError, RecursionError):
            if SEVERAL.search(spelled):
                raise ValueError(
                    f"{text!r} looks like more than one condition; write a list of conditions, or put the value in quotes"
                ) from None
            quoted = len(spelled) > 1 and spelled[0] == spelled[-1] == "'"
            value = spelled[1:-1] if quoted else spelled
        if isinstance(value, (list, dict)):
            raise ValueError(
                f"{text!r} compares with a list or an object; expected true, false, null, a number or a text"
            )
        if (value is None or isinstance(value, bool)) and match["operator"] not in ("==", "!="):
            raise ValueError(f"{text!r}: {spelled} has no order; compare with == or !=")
        return match.groupdict() | {"value": value}


Conditions = Annotated[tuple[Condition, ...], WithJsonSchema({"anyOf": [TEXT, {"type": "array", "items": TEXT}]})]
