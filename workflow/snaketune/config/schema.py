"""`config/schema.json`: the config models as JSON Schema, so that an editor completes and checks a config.

Written by docs/write_config.py.
"""

from collections.abc import Iterable
from typing import Any

from snaketune.config.workflow import Workflow


def config_schema(stages: Iterable[str]) -> dict[str, Any]:
    """The schema of a config file: `Workflow`, and in runs also `extends` and `grid`, which are gone once it is loaded.

    Args:
        stages: the names that `reruns_on` may hold.
    """
    schema = Workflow.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "snaketune config"
    schema["properties"]["reruns_on"]["propertyNames"] = {"enum": list(stages)}
    for run in ("Sft", "Dpo"):
        model = schema["$defs"][run]
        model["properties"] |= {
            "extends": {"type": "string", "description": "Name of a run in this section to take all other keys from."},
            "grid": {
                "type": "object",
                "description": "Dotted keys, each with a list of values: one run for every combination.",
                "additionalProperties": {"type": "array", "minItems": 1},
            },
        }
        # What a run that extends another leaves out, it inherits; what a grid sets, it needn't set.
        model["if"] = {"not": {"anyOf": [{"required": ["extends"]}, {"required": ["grid"]}]}}
        model["then"] = {"required": model.pop("required")}
    return schema
