"""Generate config/schema.json, with which editors complete and check a config, and the tables of keys in docs/config.

A line `<!-- keys: Training -->` precedes the table of that model; `<!-- keys: Workflow reruns_on -->` selects the keys to show.

Run by: make docs
"""

import ast
import inspect
import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from snaketune.config.workflow import Workflow
from snaketune.stages.table import STAGES

CONFIG = Path(__file__).parents[1] / "config"
PAGES = [CONFIG / "README.md", *sorted(Path(__file__).with_name("config").glob("*.md"))]
MARKED = re.compile(r"(<!-- keys: (\w+)((?: \w+)*) -->\n\n)(?:\|.*\n)*\n*")
HEAD = "| key | value | default | meaning |\n|---|---|---|---|\n"
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "mapping"}
# Keys of runs that loading resolves.
RESOLVED = {
    "extends": {
        "type": "string",
        "description": "Name of a run in this section from which all keys that aren't set here are inherited.",
    },
    "grid": {
        "type": "object",
        "description": "Dotted keys, each with a list of values; makes one run for every combination.",
        "additionalProperties": {"type": "array", "minItems": 1},
    },
}


class WithDescriptions(GenerateJsonSchema):
    """Adds the docstrings of attributes. pydantic's `use_attribute_docstrings` would search for them in every process that
    imports the models, which is each job."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        result, model = super().model_schema(schema), schema["cls"]
        for name, text in attribute_docstrings(model).items():
            result["properties"][model.model_fields[name].alias or name].setdefault("description", text)
        return result


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The strings below the attributes of a model, and of the models that it inherits from, by attribute."""
    result = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            body = ast.parse(dedent(inspect.getsource(kind))).body[0].body
            for attribute, below in pairwise(body):
                match attribute, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        result[name] = inspect.cleandoc(text)
    return result


def config_schema(stages: Iterable[str]) -> dict[str, Any]:
    """The JSON Schema of a config file: that of `Workflow`, with `extends` and `grid`. Args: stages: keys of `reruns_on`."""
    schema = Workflow.model_json_schema(by_alias=True, schema_generator=WithDescriptions)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "snaketune config"
    schema["properties"]["reruns_on"]["propertyNames"] = {"enum": list(stages)}
    for run in ("Sft", "Dpo", "Reward"):
        model = schema["$defs"][run]
        model["properties"] |= RESOLVED
        # A run may inherit required keys through `extends`, or set them in its grid.
        model["if"] = {"not": {"anyOf": [{"required": ["extends"]}, {"required": ["grid"]}]}}
        model["then"] = {"required": model.pop("required")}
    return schema


def with_tables(text: str) -> str:
    """Rewrite the tables below the markers of a text; KeyError if a marker names an unknown model or key.

    Each is followed by a blank line, as Markdown would take any other line for another row.
    """
    schema = Workflow.model_json_schema(by_alias=True, schema_generator=WithDescriptions)
    models = schema["$defs"] | {"Workflow": schema}
    written = MARKED.sub(lambda match: match[1] + HEAD + _rows(models, match[2], match[3].split()) + "\n", text)
    return written.rstrip("\n") + "\n"


def _rows(models: dict[str, Any], model: str, keys: list[str]) -> str:
    properties, required = models[model]["properties"], models[model].get("required", ())
    rows = ""
    for key in keys or properties:
        field = properties[key]
        default = "required" if key in required else _default(field.get("default"))
        rows += f"| `{key}` | {_value(field, models)} | {default} | {_meaning(field, models)} |\n"
    return rows


def _value(field: dict[str, Any], models: dict[str, Any]) -> str:
    """The values that a key takes, as Markdown.

    >>> _value({"anyOf": [{"type": "integer"}, {"items": {"enum": ["a", "b"]}, "type": "array"}, {"type": "null"}]}, {})
    'integer or list of `a` \\\\| `b`'
    """
    if "$ref" in field:
        model = _referred(field, models)
        return "section" if "properties" in model else _value(model, models)
    if several := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_value(one, models) for one in several if one.get("type") != "null"))
    if "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        return " \\| ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)
    if not field:
        return "any value"
    if "prefixItems" in field:
        return f"[{', '.join(_value(item, models) for item in field['prefixItems'])}]"
    if field["type"] == "array":
        return f"list of {_value(field['items'], models)}"
    if isinstance(inner := field.get("additionalProperties"), dict):
        return f"mapping to {_value(inner, models)}"
    return TYPES[field["type"]]


def _default(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if default in (None, "", [], {}):
        return "none"
    return "its defaults" if isinstance(default, dict) else f"`{default}`"


def _meaning(field: dict[str, Any], models: dict[str, Any]) -> str:
    """The docstring of a key, or else that of its section."""
    sections = (_referred(one, models) for one in (field, *field.get("anyOf", ())) if "$ref" in one)
    text = field.get("description") or next((section.get("description", "") for section in sections), "")
    return " ".join(text.split()).replace("|", "\\|")


def _referred(field: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    return models[field["$ref"].rpartition("/")[2]]


if __name__ == "__main__":
    schema = json.dumps(config_schema(STAGES), indent=2, ensure_ascii=False)
    (CONFIG / "schema.json").write_text(schema + "\n", encoding="utf-8")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
