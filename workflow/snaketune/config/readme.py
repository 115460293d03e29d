"""Tables of keys in `config/README.md`, generated from the config models by docs/write_config.py.

A line `<!-- keys: Training -->` precedes the table of that model; `<!-- keys: Workflow reruns_on -->` selects the keys to show.
"""

import re
from typing import Any

from snaketune.config.workflow import Workflow

MARKED = re.compile(r"(<!-- keys: (\w+)((?: \w+)*) -->\n\n)(?:\|.*\n)*\n*")
HEAD = "| key | value | default | meaning |\n|---|---|---|---|\n"
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "mapping"}


def with_tables(text: str) -> str:
    """Rewrite the tables below the markers of a text. Each is followed by a blank line, as Markdown would take any other line
    for another row.

    Raises:
        KeyError: a marker names an unknown model or key.
    """
    schema = Workflow.model_json_schema(by_alias=True)
    models = schema["$defs"] | {"Workflow": schema}
    return MARKED.sub(lambda match: match[1] + HEAD + _rows(models, match[2], match[3].split()) + "\n", text)


def _rows(models: dict[str, Any], model: str, keys: list[str]) -> str:
    properties, required = models[model]["properties"], models[model].get("required", ())
    return "".join(
        f"| `{key}` | {_value(field, models)} | {_default(field, key in required)} | {_meaning(field, models)} |\n"
        for key, field in ((key, properties[key]) for key in keys or properties)
    )


def _value(field: dict[str, Any], models: dict[str, Any]) -> str:
    """The values that a key takes, as Markdown.

    >>> _value({"anyOf": [{"type": "integer"}, {"items": {"enum": ["a", "b"]}, "type": "array"}, {"type": "null"}]}, {})
    'integer or list of `a` \\\\| `b`'
    """
    if "$ref" in field:
        return "section" if "properties" in models[_named(field)] else _value(models[_named(field)], models)
    if several := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_value(one, models) for one in several if one.get("type") != "null"))
    if "enum" in field or "const" in field:
        return " \\| ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "prefixItems" in field:
        return f"[{', '.join(_value(item, models) for item in field['prefixItems'])}]"
    if field["type"] == "array":
        return f"list of {_value(field['items'], models)}"
    if isinstance(inner := field.get("additionalProperties"), dict):
        return f"mapping to {_value(inner, models)}"
    return TYPES[field["type"]]


def _default(field: dict[str, Any], required: bool) -> str:
    default = field.get("default")
    if required:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    if default in (None, "", [], {}):
        return "none"
    return "see below" if isinstance(default, dict) else f"`{default}`"


def _meaning(field: dict[str, Any], models: dict[str, Any]) -> str:
    """The docstring of a key, or else that of its section."""
    sections = [models[_named(one)] for one in (field, *field.get("anyOf", ())) if "$ref" in one]
    text = field.get("description") or next((section.get("description", "") for section in sections), "")
    return " ".join(text.split()).replace("|", "\\|")


def _named(field: dict[str, Any]) -> str:
    return field["$ref"].rpartition("/")[2]
