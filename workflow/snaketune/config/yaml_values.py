"""Checks of a config file before its values are used: only plain values, each key once, nothing executable, limited size.

Snakemake loads a config through YTE, which runs text that begins with `?` as Python if the file has the key `__use_yte__`, and
with a YAML reader that silently takes the last of two equal keys and expands aliases without limit. The checks here use YAML
nodes, so nothing is constructed or run, and the expanded size is counted without expanding. An untrusted file can therefore be
checked first: `python -m snaketune check FILE`.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from snaketune.errors import SnaketuneError

# The longest recipe has about 200 values.
MAX_VALUES = 100_000
MAX_DEPTH = 50
MERGE, YTE_KEY = "<<", "__use_yte__"
PLAIN = ("str", "int", "float", "bool", "null", "timestamp", "value", "merge", "seq", "map")
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in PLAIN}


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
        try:
            json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
        except ValueError:
            _check_yaml(path, text)
    except RecursionError:
        raise SnaketuneError(f"{path} is nested too deeply for a config") from None


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


def _check_yaml(path: Path, text: str) -> None:
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise SnaketuneError(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from None
    if document is not None:
        _size(path, text, document, {})


def _size(path: Path, text: str, node: yaml.Node, sizes: dict[int, int], depth: int = 1) -> int:
    """Count the values of a node with its aliases expanded, and check that they are plain and no more than a config has.

    Args: sizes: of the lists and mappings so far, by `id`; 0 for those that are being counted.
    """
    where = f"{path}, line {node.start_mark.line + 1}"
    if node.tag not in PLAIN_TAGS:
        raise SnaketuneError(f"{where}: found {node.tag}; a config takes only texts, numbers, lists and mappings")
    if isinstance(node, yaml.ScalarNode):
        return 1
    if depth > MAX_DEPTH:
        raise SnaketuneError(f"{where}: nested too deeply for a config ({MAX_DEPTH} levels)")
    if sizes.get(id(node)) == 0:
        # Its anchor is the first one from its start.
        anchor = text[node.start_mark.index :].partition("&")[2].split()[0]
        raise SnaketuneError(f"{where}: *{anchor} refers to itself")
    if id(node) not in sizes:
        sizes[id(node)] = 0
        values = node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys(path, node)
            values = chain(*node.value)
        sizes[id(node)] = 1 + sum(_size(path, text, value, sizes, depth + 1) for value in values)
    if sizes[id(node)] > MAX_VALUES:
        raise SnaketuneError(
            f"{where}: with its aliases expanded, the config has more than {MAX_VALUES:,} values; shorten it"
        )
    return sizes[id(node)]


def _check_keys(path: Path, mapping: yaml.MappingNode) -> None:
    keys: set[str] = set()
    for key, value in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        where = f"{path}, line {key.start_mark.line + 1}"
        _check_key(where, key.value, key.value in keys and key.value != MERGE)
        if key.tag.endswith((":bool", ":null")):
            read_as = "nothing" if key.tag.endswith(":null") else "true or false"
            raise SnaketuneError(f"{where}: YAML reads the key {key.value!r} as {read_as}; put it in quotes")
        keys.add(key.value)
        if value.tag.endswith(":null") and not value.value:
            raise SnaketuneError(
                f"{where}: `{key.value}:` is empty, which could mean its defaults or none of it; write "
                f"`{key.value}: {{}}` for the defaults, `{key.value}: null` for none of it (also of what `extends` "
                "inherits), or remove it"
            )
