"""Responses that are only tool calls, as data sets for function calling have them.

query, answers            answers: [{"name": …, "arguments": {…}}, …], mostly as JSON in a text (xlam)
question, ground_truth    ground_truth: [{"f": {"x": [1, 1.0]}}, …], lists of correct values; the first is taken (BFCL)
"""

import json
from typing import Any

from snaketune.corpus.layouts.content_parts import ARGUMENTS_KEYS, calls_text, kind_of
from snaketune.corpus.rows import Malformed

COLUMNS = ("answers", "ground_truth")
# The correct value of an argument that may be omitted.
OMITTED = ""


def calls_as_text(value: Any, column: str) -> str:
    """Return the calls of a response as text.

    Raises:
        Malformed: it holds anything but calls.
    """
    calls = value
    if isinstance(value, str):
        try:
            calls = json.loads(value)
        except (ValueError, RecursionError):
            calls = None
    if not isinstance(calls, list) or not calls or not all(map(_is_call, calls)):
        raise Malformed(
            "bad_tool_call", f"{column} holds {kind_of(value)} that isn't a list of calls; map columns with `fields`"
        )
    return calls_text([call if "name" in call else _first_values(call) for call in calls], column)


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict):
        return False
    has_name = isinstance(call.get("name"), str) and any(key in call for key in ARGUMENTS_KEYS)
    return has_name or (len(call) == 1 and all(isinstance(values, dict) for values in call.values()))


def _first_values(call: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ((name, values),) = call.items()
    first = {key: value[0] if isinstance(value, list) and value else value for key, value in values.items()}
    return {"name": name, "arguments": {key: value for key, value in first.items() if value != OMITTED}}
