"""One file, as its layout reads it: the names of its columns, and the values of each row by the layout's keys."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from snaketune.config.corpus_sources import Source
from snaketune.config.row_fields import Fields
from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.cells import Raw, column_of, columns_of, flat, json_of, plain_text, wrong_type
from snaketune.corpus.values.marks import bad_values
from snaketune.corpus.values.schema import Clue, Name, Schema, Values, Variant, bind, columns_in
from snaketune.corpus.values.validation import media_keys, refuse_media
from snaketune.corpus.values.vendor_turns import messages_of_field

COLUMN_IN_TEMPLATE = re.compile(r"{([^{}]+)}")
# Where keys are ids, rows have a set of columns each.
MAX_PLANS, MAX_COLUMNS = 4096, 10_000


class Plan(NamedTuple):
    """How rows with one set of columns are read.

    Attributes:
        simple: key and column of values that are read as they are.
        special: key and getter of other values.
        left: columns that aren't read.
        media: columns of images, audio or video.
        marks: those left whose values may mark a row as bad.
    """

    simple: list[tuple[str, str]]
    special: list[tuple[str, Callable[[Raw], Any]]]
    left: list[str]
    media: tuple[str, ...]
    marks: list[str]


def maps_rows(fields: Fields) -> bool:
    """Whether rows are read by these columns alone."""
    return bool(fields.prompt or fields.conversation)


class RowFile:
    """One file.

    Attributes:
        bound: its columns by the layout's keys; later rows may add columns that earlier ones lack.
        names: the same for messages.
        stated: those that the config names.
        speakers: roles by name, besides the usual ones.
        columns: all columns of its rows so far.
        clues: what its rows show of the meaning of numbers: column, kind of number, and what was found.
    """

    def __init__(self, kind: str, source: Source, schema: Schema, variant: Variant, bound: Mapping[str, Name]):
        self.kind, self.source, self.schema, self.variant, self.bound = kind, source, schema, variant, dict(bound)
        self.stated, self.speakers = stated_names(source), source.speakers
        self.only_stated = maps_rows(source.fields)
        fields = source.fields
        self.settings = bool(source.template_variables or fields.template_variables or fields.weight)
        self.needed, self.joins = variant.needed, kind in variant.joins
        self.names: dict[str, str] = {}
        self.columns: set[str] = set()
        self.plans: dict[tuple[str, ...], Plan] = {}
        self.clues: set[Clue] = set()

    def values(self, raw: Raw) -> tuple[Values, Plan]:
        """The values of a row by key, without nulls. Malformed: a needed one is missing."""
        if type(raw.get("input")) is dict:
            raw = flat(raw)
        columns = tuple(raw)
        plan = self.plans.get(columns) or self._plan(columns, raw)
        if plan.media:
            refuse_media(raw)
        values: Values = {}
        for key, column in plan.simple:
            value = raw[column]
            if value is not None:
                values[key] = value
        for key, get in plan.special:
            value = get(raw)
            if value is not None:
                values[key] = value
        for key in self.needed:
            if key not in values:
                raise Malformed("missing_column", f"no {self._names(key)}, or it is null; {columns_of(raw)}")
        return values, plan

    def _names(self, key: str) -> str:
        """A column that a row lacks, for messages: as the file has it, else as data sets have it."""
        if key in self.bound:
            return f"column {self.names[key]}"
        columns = [column for column in self.variant.columns if column.key == key]
        names = [", ".join(columns_in(name)) for column in columns for name in column.names_in({})]
        return f"column {' or '.join(names[:6]) or key}"

    def _plan(self, columns: tuple[str, ...], raw: Raw) -> Plan:
        new = [column for column in columns if column not in self.columns]
        if new and not self.only_stated:
            ignored = self.source.ignore
            samples = {
                column: [raw[column]] if raw[column] is not None else [] for column in columns if column not in ignored
            }
            self.bound = bind(self.variant, samples, self.bound)
        if len(self.columns) < MAX_COLUMNS:
            self.columns.update(new)
        self.names = {key: ", ".join(columns_in(name)) for key, name in self.bound.items()}
        plan = Plan([], [], [], () if self.only_stated else media_keys(columns), [])
        fields = self.source.fields
        read = {name.split(".")[0].removesuffix("[]") for name in (fields.template_variables, fields.weight) if name}
        for key, name in self.bound.items():
            if isinstance(name, tuple):
                plan.special.append((key, partial(_several, name)))
            elif key in self.stated and (name not in raw or key == "messages"):
                get = _field if name != self.stated.get("messages") else _messages
                plan.special.append((key, partial(get, name)))
            elif name in raw:
                plan.simple.append((key, name))
            read.update(columns_in(name), COLUMN_IN_TEMPLATE.findall(name) if isinstance(name, str) else ())
        plan.left.extend(column for column in columns if column not in read)
        plan.marks.extend(filter(bad_values, plan.left))
        if len(self.plans) < MAX_PLANS:
            self.plans[columns] = plan
        return plan


def stated_names(source: Source) -> dict[str, Name]:
    """The columns that the config's `fields` name, by key."""
    # Those of settings are read for each row, whatever its layout.
    fields = source.fields.model_dump(exclude_defaults=True, exclude={"template_variables", "weight"})
    return {key: name[0] if isinstance(name, tuple) and len(name) == 1 else name for key, name in fields.items()}


def _several(columns: tuple[str, ...], raw: Raw) -> list[Any] | None:
    values = [column_at(raw, column) if "." in column else raw.get(column) for column in columns]
    return None if values.count(None) == len(values) else values


def _messages(name: str, raw: Raw) -> Any:
    return messages_of_field(_field(name, raw))


def _field(name: str, raw: Raw) -> Any:
    """The value at a path, or a template with its columns filled in."""
    if name in raw or not COLUMN_IN_TEMPLATE.search(name):
        return column_at(raw, name)
    return COLUMN_IN_TEMPLATE.sub(lambda match: _cell(raw, match[1]), name)


def _cell(raw: Raw, column: str) -> str:
    value = column_at(raw, column)
    texts = [plain_text(item) for item in (value if isinstance(value, list) else [value])]
    if None in texts:
        raise wrong_type(column, value, "a text, a number, or a list of them")
    return "\n".join(texts)


def column_at(raw: Raw, path: str) -> Any:
    """The value of a column, or at a path of keys within it, also within JSON that a text holds, or in the first item of a list
    that has one; Malformed without one.

    >>> column_at({"metadata": '{"tools": [1]}'}, "metadata.tools"), column_at({"turns": [{}, {"a": 1}]}, "turns[].a")
    ([1], 1)
    """
    value: Any = raw
    if path not in raw and "." in path and path.split(".")[0].removesuffix("[]") in raw:
        for key in path.split("."):
            value = json_of(value) if isinstance(value, str) else value
            name, items = key.removesuffix("[]"), value if isinstance(value, list) else [value]
            value = next((item[name] for item in items if isinstance(item, dict) and item.get(name) is not None), None)
        if value is not None:
            return value
    return column_of(raw, path)
