"""Sections in sections: merge two of them, and set a key by its dotted name."""

from typing import Any

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
