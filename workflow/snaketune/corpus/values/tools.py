"""What a row passes to its chat template besides the turns, as JSON: the tools that the prompt offers, `[{"type": "function",
"function": {"name": …, …}}, …]`, and the template's variables, `{"enable_thinking": false}`.

Names come first, because templates write keys in order; the order of other keys is the source's, and doesn't change the id.
"""

import json
import re
from functools import lru_cache
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.rows import Malformed, Message, json_value
from snaketune.corpus.values.cells import json_of, kind_of

LEADING_KEYS = ("name", "description", "parameters")
# Names of the parameters in other APIs.
SCHEMA_KEYS = ("input_schema", "inputSchema")
# A function has at least one of these beside its name.
DESCRIPTION_KEYS = ("description", "parameters", *SCHEMA_KEYS)
# Keys of Gemini's lists of functions.
DECLARATIONS = ("functionDeclarations", "function_declarations")
RENAME = "rename the column if it holds something else"
EXPECTED = f"expected a list of functions, each with a name; {RENAME}"


def tools_of(value: Any, column: str = "tools") -> str | None:
    """Return the tools in canonical form; None if there are none.

    >>> tools_of([{"parameters": {}, "name": "now"}])
    '[{"type": "function", "function": {"name": "now", "parameters": {}}}]'
    """
    if value is None:
        return None
    return _from_text(value, column) if isinstance(value, str) else _serialized(json_value(value), column)


def variables_of(value: Any, column: str, defaults: dict[str, Any]) -> str | None:
    """Return template variables, of a row and by default, with sorted keys; None if there are none.

    >>> variables_of('{"enable_thinking": true, "tools_xml": null}', "kwargs", {"enable_thinking": False, "budget": 8})
    '{"budget": 8, "enable_thinking": true}'
    """
    parsed = json_of(value.strip() or "{}") if isinstance(value, str) else {} if value is None else value
    if not isinstance(parsed, dict):
        what = f"text that isn't JSON of an object, {value[:80]!r}" if isinstance(value, str) else kind_of(value)
        raise Malformed("bad_template_variables", f"{column} holds {what}; expected an object of names and values")
    variables = defaults | json_value(parsed)
    try:
        return json.dumps(variables, sort_keys=True, ensure_ascii=False, allow_nan=False) if variables else None
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed("bad_template_variables", f"{column}: {str(error)[:EXCERPT_LENGTH]}") from None


def may_be_functions(value: Any) -> bool:
    """Return True if the value of a column `functions` is a list of tools, and not, for instance, source code."""
    value = json_of(value) if isinstance(value, str) else value
    items = [value] if isinstance(value, dict) else value
    return isinstance(items, list) and all(map(_is_function, items))


def _is_function(item: Any) -> bool:
    function = item.get("function", item) if isinstance(item, dict) else None
    return isinstance(function, dict) and "name" in function and any(key in function for key in DESCRIPTION_KEYS)


def are_offered_in(tools: str, turn: Message) -> bool:
    """Return True if a system turn already lists all of these tools: their names and parameters are in it, in quotes."""
    return turn["role"] == "system" and all(_is_listed(tool["function"], turn["content"]) for tool in json.loads(tools))


def _is_listed(function: dict[str, Any], text: str) -> bool:
    parameters = function.get("parameters")
    properties = parameters.get("properties", parameters) if isinstance(parameters, dict) else None
    names = [*properties] if isinstance(properties, dict) else []
    quoted = all(f'"{name}"' in text or f"'{name}'" in text for name in (function["name"], *names))
    return quoted and re.search(rf"""["']name["']\s*:\s*["']{re.escape(function["name"])}["']""", text) is not None


# Rows of one source share a few sets of tools.
@lru_cache(maxsize=256)
def _from_text(text: str, column: str) -> str | None:
    return _serialized(_parsed(text, column), column) if text.strip() else None


def _parsed(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("bad_tools", f"{column} isn't valid JSON: {str(error)[:EXCERPT_LENGTH]}; {RENAME}") from None


def _serialized(value: Any, column: str) -> str | None:
    tools = value if isinstance(value, list) else [value]
    if value is None or not tools:
        return None
    declared = [
        next((tool[key] for key in DECLARATIONS if isinstance(tool.get(key), list)), [tool])
        if isinstance(tool, dict)
        else [tool]
        for tool in tools
    ]
    functions = [
        _function(_parsed(tool, column) if isinstance(tool, str) else tool, column)
        for tools in declared
        for tool in tools
    ]
    try:
        return json.dumps(functions, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed("bad_tools", f"{column}: {str(error)[:EXCERPT_LENGTH]}") from None


def _function(tool: Any, column: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else tool
    if not isinstance(function, dict):
        raise Malformed("bad_tools", f"{column} holds {kind_of(function)}, {EXPECTED}")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Malformed("bad_tools", f"{column} holds a tool without a name, {EXPECTED}")
    fields = {key: value for key, value in function.items() if (key, value) != ("type", "function")}
    if schema := next((key for key in SCHEMA_KEYS if key in fields and "parameters" not in fields), None):
        fields["parameters"] = fields.pop(schema)
    return {"type": "function", "function": {key: fields[key] for key in LEADING_KEYS if key in fields} | fields}
