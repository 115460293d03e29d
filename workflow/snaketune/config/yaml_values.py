"""Checks of a config file before its values are used: only plain values, each key once, nothing executable, limited size.

Snakemake loads a config through YTE, which runs text that begins with `?` as Python if the file has the key `__use_yte__`, and
with a YAML reader that silently takes the last of two equal keys and expands aliases without limit. The checks here use YAML
events, so nothing is constructed or run, and the expanded size is counted without expanding. An untrusted file can therefore be
checked first: `python -m snaketune check FILE`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from snaketune.errors import SnaketuneError

# The longest recipe has about 200 values.
MAX_VALUES = 100_000
MAX_DEPTH = 50
MERGE, YTE_KEY = "<<", "__use_yte__"
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")} | {"!"}
# libyaml's loader, if PyYAML was built with it, gives the same events ten times as fast.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_file(path: Path) -> None:
    """Raise SnaketuneError, with the line, if a JSON or YAML file can't be read, has a key twice, values that aren't plain, or
    too many. A missing file is ignored, as Snakemake reports it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise SnaketuneError(f"{path} can't be read: {error}") from None
    try:
        # Like Snakemake, which reads a file as YAML if it isn't JSON.
        json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
    except RecursionError:
        raise SnaketuneError(f"{path} is nested too deeply for a config") from None
    except ValueError:
        _check_yaml(path, text)


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        _check_key(f"{path}", name, names.count(name) > 1)
    return dict(pairs)


def _check_key(where: str, name: str, twice: bool) -> None:
    if name == YTE_KEY:
        raise SnaketuneError(
            f"{where}: `{YTE_KEY}` lets Snakemake run parts of the config as Python, which isn't allowed: write the values "
            "out. If Snakemake was started with this file (--configfile), it has already run them; check untrusted files "
            "first, with: python -m snaketune check FILE"
        )
    if twice:
        raise SnaketuneError(
            f"{where}: the key {name!r} occurs twice, and only the last one would count; merge the two"
        )


@dataclass
class _Collection:
    """A list or mapping that is being read."""

    anchor: str | None
    keys: set[str] | None  # of a mapping, so far; None for a list
    key: str = ""  # of a mapping, the last one
    size: int = 1  # number of values so far; those of an alias are counted at each use
    at_key: bool = False  # whether a mapping's key is next


def _check_yaml(path: Path, text: str) -> None:
    inside = [_Collection(None, None)]
    sizes: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=LOADER):
            _check_event(f"{path}, line {event.start_mark.line + 1}", event, inside, sizes)
    except yaml.YAMLError as error:
        raise SnaketuneError(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from None


def _check_event(where: str, event: yaml.Event, inside: list[_Collection], sizes: dict[str, int]) -> None:
    """Check one event. Args: inside: the open collections; sizes: number of values by anchor."""
    if (tag := getattr(event, "tag", None)) not in (None, *PLAIN_TAGS):
        raise SnaketuneError(f"{where}: found {tag}; a config takes only texts, numbers, lists and mappings")
    match event:
        case yaml.AliasEvent():
            if event.anchor not in sizes:
                raise SnaketuneError(f"{where}: *{event.anchor} refers to itself, or to an anchor that follows it")
            size = sizes[event.anchor]
        case yaml.ScalarEvent():
            size, current = 1, inside[-1]
            if current.keys is not None and current.at_key:
                _check_key(where, event.value, event.value in current.keys and event.value != MERGE)
                current.keys.add(event.value)
                current.key = event.value
            elif current.keys is not None and not event.value and not event.style:
                raise SnaketuneError(
                    f"{where}: `{current.key}:` is empty, which could mean its defaults or none of it; write "
                    f"`{current.key}: {{}}` for the defaults, `{current.key}: null` for none of it (also of what `extends` "
                    "inherits), or remove it"
                )
            if event.anchor:
                sizes[event.anchor] = 1
        case yaml.CollectionStartEvent():
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            inside.append(_Collection(event.anchor, set() if is_mapping else None, at_key=is_mapping))
            if len(inside) > MAX_DEPTH:
                raise SnaketuneError(f"{where}: nested too deeply for a config ({MAX_DEPTH} levels)")
            return
        case yaml.CollectionEndEvent():
            closed = inside.pop()
            size = closed.size
            if closed.anchor:
                sizes[closed.anchor] = size
        case _:
            return
    current = inside[-1]
    current.size += size
    current.at_key = current.keys is not None and not current.at_key
    if current.size > MAX_VALUES:
        raise SnaketuneError(
            f"{where}: with its aliases expanded, the config has more than {MAX_VALUES:,} values; shorten it"
        )
