"""Single keys by their whole names: `snakemake --config dpo__aligned__beta=0.4`, or `dpo.aligned.beta: 0.4` in a second config
file. Snakemake allows no dots in the keys of `--config`."""

import re
from copy import deepcopy
from typing import Any, get_origin

from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown

SEPARATOR = re.compile(r"\.|__")
# Sections that hold entries under names that the user chose.
NAMED = {name for name, field in Workflow.model_fields.items() if get_origin(field.annotation) is dict}


def apply_overrides(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the values at the whole names put in their places.

    >>> apply_overrides({"dpo": {"a": {"from": "b"}}, "dpo.a.training.epochs": 2, "dpo__a__beta": 0.4})
    {'dpo': {'a': {'from': 'b', 'training': {'epochs': 2}, 'beta': 0.4}}}
    """
    config = deepcopy(raw)
    for key in [key for key in config if SEPARATOR.search(str(key))]:
        _put(config, key, config.pop(key))
    return config


def _put(config: dict[str, Any], whole: str, value: Any) -> None:
    section: Any = config
    path: list[str] = []
    rest = whole
    while rest:
        listed = isinstance(section, list)
        if not listed and not isinstance(section, dict):
            raise SnaketuneError(f"{whole}: {'.'.join(path)} has no keys; expected a section")
        keys = [str(key) for key in (range(len(section)) if listed else section)]
        # Names may contain a separator: the longest known one is meant.
        known = [key for key in keys if rest == key or rest.startswith((f"{key}.", f"{key}__"))]
        name = max(known, key=len, default=SEPARATOR.split(rest, maxsplit=1)[0])
        rest = SEPARATOR.sub("", rest.removeprefix(name), count=1)
        names_entry = len(path) == 1 and path[0] in NAMED and rest
        if not known and (names_entry or listed):
            raise SnaketuneError(f"{whole}: there is no {name!r} in {'.'.join(path)}{unknown(name, keys)}")
        key: Any = int(name) if listed else name
        if not rest:
            section[key] = value
        elif not listed:
            section.setdefault(key, {})
        section = section[key]
        path.append(name)
