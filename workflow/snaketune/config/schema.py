"""The JSON Schema of a config, with which editors complete and check it; docs/write_config.py writes `config/schema.json`."""

from collections.abc import Iterable
from typing import Any

from snaketune.config.workflow import Workflow


def config_schema(stages: Iterable[str]) -> dict[str, Any]:
    """The JSON Schema of a config file: that of `Workflow`, with `extends` and `grid` of runs, which loading resolves.

    Args:
        stages: the keys that `reruns_on` may have.
    """
    schema = Workflow.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "snaketune config"
    schema["properties"]["reruns_on"]["propertyNames"] = {"enum": list(stages)}
    for run in ("Sft", "Dpo"):
        model = schema["$defs"][run]
        model["properties"] |= {
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
        # A run may inherit required keys through `extends`, or set them in its grid.
        model["if"] = {"not": {"anyOf": [{"required": ["extends"]}, {"required": ["grid"]}]}}
        model["then"] = {"required": model.pop("required")}
    return schema
