"""The layouts that are nearest to a file's columns, and an entry that maps its columns to one, for messages."""

import re

from snaketune.config.corpus_sources import Source
from snaketune.config.row_fields import LISTS, MAPPINGS
from snaketune.corpus.layouts.table import LAYOUTS
from snaketune.corpus.values.schema import Schema, Variant, columns_in

# A column in an entry that the user has to fill in.
COLUMN = "COLUMN"


def nearest(columns: tuple[str, ...], kind: str, without: str = "") -> list[str]:
    """The nearest two layouts for a kind of corpus, each with the columns that it needs and the file lacks.

    >>> nearest(("prompt", "chosen"), "preferences")[0]
    'pairs (chosen, rejected): `rejected` is missing'
    """
    by_layout: dict[str, tuple[float, str]] = {}
    for schema, variant in _variants(kind):
        names, missing, other = [], [], []
        for key in variant.needed:
            name, alike = _found(variant, key, columns)
            names.append(name)
            if alike:
                other.append(f"`{alike}` would have to be called `{name}`")
            elif not set(columns) >= set(name.split(", ")):
                missing.append(f"`{name}` is missing")
        # A column with another spelling counts as half a missing one.
        distance = (len(missing) + 0.5 * len(other)) / len(names)
        text = f"{schema.name} ({', '.join(names)}): {', '.join(missing + other) or 'other columns are left'}"
        typed = any(column.holds or column.beside for column in variant.columns if column.key in variant.needed)
        # A column of another type has the name, too.
        if schema.name != without and (distance or not typed) and distance < by_layout.get(schema.name, (1.0, ""))[0]:
            by_layout[schema.name] = distance, text
    return [text for _, text in sorted(by_layout.values(), key=lambda pair: pair[0])[:2]]


def _variants(kind: str) -> list[tuple[Schema, Variant]]:
    return [(schema, variant) for schema in LAYOUTS.values() if kind in schema.kinds for variant in schema.variants]


def _found(variant: Variant, key: str, columns: tuple[str, ...]) -> tuple[str, str | None]:
    """The name of a layout's column, as the file has it if it has one; and a column with nearly that name."""
    several = [column for column in variant.columns if column.key == key]
    names = [", ".join(columns_in(name)) for column in several for name in column.names_in(dict.fromkeys(columns, ()))]
    if found := next((name for name in names if set(name.split(", ")) <= set(columns)), None):
        return found, None
    plain = {_plain(column): column for column in columns}
    alike = next((name for name in names if _plain(name) in plain), None)
    if alike:
        return alike, plain[_plain(alike)]
    return (key if callable(several[0].names) or not names else names[0]), None


def _plain(name: str) -> str:
    """A name in lower case, without plural and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.casefold()).rstrip("s")


def entry_of_fields(columns: tuple[str, ...], kind: str, source: Source) -> str:
    """The source with `fields` for the nearest layout that they can express; the columns that lack are to be filled in."""
    if source.speakers and len(columns) == 1:
        return source.entry(layout="dialogue", fields={"messages": columns[0]})
    found: list[dict[str, str]] = []
    for layout, keys in MAPPINGS.items():
        for variant in LAYOUTS[layout].variants if kind in LAYOUTS[layout].kinds else ():
            if not {column.key for column in variant.columns} >= set(keys):
                continue
            names = {key: _found(variant, key, columns) for key in keys}
            found.append(
                {
                    key: alike or (name if set(name.split(", ")) <= set(columns) else COLUMN)
                    for key, (name, alike) in names.items()
                }
            )
    fields = min(found, key=lambda mapped: list(mapped.values()).count(COLUMN))
    return source.entry(fields={key: name.split(", ") if key in LISTS else name for key, name in fields.items()})
