"""Sections in sections: merge two of them, set a key by its dotted name, and change keys of a run."""

from typing import Any

from pydantic import ValidationError

from snaketune.errors import SnaketuneError

# Mappings that a new value replaces as a whole, instead of being merged with the former one.
NOT_MERGED = ("loss",)


def merge_keys(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """A section with the keys of another one, which replace its own.

    >>> merge_keys({"training": {"epochs": 1, "seed": 0}}, {"training": {"epochs": 2}, "beta": 0.1})
    {'training': {'epochs': 2, 'seed': 0}, 'beta': 0.1}
    """
    merged = dict(base)
    for key, value in override.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in NOT_MERGED
        merged[key] = merge_keys(merged[key], value) if both else value
    return merged


def put_key(key: str, section: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key, such as `training.epochs`, in a section. Args: key: of the section, for the error if it has no such key."""
    *sections, leaf = dotted.split(".")
    for name in sections:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise SnaketuneError(f"{key}.{dotted}: {name!r} is {section!r}, which has no keys; expected a section")
    section[leaf] = value


def changed(key: str, run: Any, changes: dict[str, Any]) -> Any:
    """A run with other values of some keys; SnaketuneError if it isn't valid then. Args: key: of the changes; changes: by
    dotted key."""
    # It knows the whole config, whose models import this module.
    from snaketune.config.invalid_values import TOP_LEVEL, lines_of

    nested: dict[str, Any] = {}
    for dotted, value in changes.items():
        put_key(key, nested, str(dotted), value)
    try:
        return type(run).model_validate(merge_keys(run.model_dump(by_alias=True, exclude_unset=True), nested))
    except ValidationError as error:
        lines = "\n".join(f"  {key}.{line}".replace(f".{TOP_LEVEL}", "", 1) for line in lines_of(error, type(run)))
        raise SnaketuneError(f"the config is wrong:\n{lines}") from None
