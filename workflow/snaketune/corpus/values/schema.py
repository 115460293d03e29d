"""What a layout reads: columns, with their names and types in data sets, and one reader; and which columns of a file they are.

A reader sees the values of a row by the layout's keys, whatever the file calls its columns. The keys are those of `fields`, by
which the config names the columns itself.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from snaketune.corpus.rows import Outcome, Row
from snaketune.corpus.values.cells import is_plain
from snaketune.corpus.values.tools import may_be_functions

if TYPE_CHECKING:
    from snaketune.corpus.values.row_file import RowFile

# A column, or several, whose values are a list; where the config names it, also a path or a template.
Name = str | tuple[str, ...]
Values = dict[str, Any]
# Values of each column of a file, without nulls, as far as they are looked at.
Samples = Mapping[str, list[Any]]
VALUES_COMPARED = 20
# What a row shows of the meaning of a column's numbers: the column, the kind of number, and what was found.
Clue = tuple[str, str, str]


class Column(NamedTuple):
    """A column of a layout, or one of several with the same key, of which the first in the file counts.

    Attributes:
        names: its names in data sets, the likeliest first, between spaces; or a function of a file's columns.
        holds: whether a value has the column's type. Columns whose values mostly don't are another one.
        beside: a column without which this is another one.
        unless: columns beside which this is another one.
    """

    key: str
    names: str | Callable[[Samples], Iterable[Name]]
    holds: Callable[[Any], bool] | None = None
    beside: str | None = None
    unless: frozenset[str] = frozenset()

    def names_in(self, samples: Samples) -> Iterable[Name]:
        return self.names.split() if isinstance(self.names, str) else self.names(samples)


LABELS = (
    Column("system", "system system_prompt system_message"),
    Column("tools", "tools"),
    Column("tools", "functions function", holds=may_be_functions),
    Column("answer", "answer", holds=is_plain),
    Column("task", "task", holds=is_plain),
)


class Variant:
    """One set of columns in which data sets have the rows of a layout.

    Attributes:
        needed: keys without which a row isn't of this layout.
        joins: the kinds of corpora for which all rows of a file are read together.
    """

    def __init__(self, needed: str, *columns: Column, joins: tuple[str, ...] = ()):
        self.needed, self.columns, self.joins = needed.split(), columns, joins


class Schema:
    """One layout.

    Attributes:
        kinds: the kinds of corpora that its rows suit.
        read: the values of one row to its canonical row or rows.
        join: the values of all rows of a file to a result for each, in order.
        opaque: whether keys within its columns aren't reported.
    """

    def __init__(
        self,
        name: str,
        read: "Callable[[Values, RowFile], Row | list[Outcome]] | None",
        *variants: Variant,
        kinds: tuple[str, ...] = ("conversations",),
        join: "Callable[[list[Values], RowFile], list[Outcome]] | None" = None,
        opaque: bool = False,
        labelled: bool = True,
    ):
        self.name, self.read, self.variants = name, read, variants
        self.kinds, self.join, self.opaque = kinds, join, opaque
        for variant in variants if labelled else ():
            variant.columns += LABELS


def columns_in(name: Name) -> tuple[str, ...]:
    """
    >>> columns_in("prompt"), columns_in(("A", "B"))
    (('prompt',), ('A', 'B'))
    """
    return name if isinstance(name, tuple) else (name,)


def bind(variant: Variant, samples: Samples, stated: Mapping[str, Name]) -> dict[str, Name]:
    """The names in a file of a layout's columns, by key. Args: stated: those that the config names."""
    bound = dict(stated)
    used = {column for name in stated.values() for column in columns_in(name)}
    for column in variant.columns:
        key = column.key
        if key in bound or (column.beside and column.beside not in samples) or not column.unless.isdisjoint(samples):
            continue
        names = (name for name in column.names_in(samples) if used.isdisjoint(columns_in(name)))
        values = {
            name: [_typed(samples.get(file_column), column.holds) for file_column in columns_in(name)] for name in names
        }
        free = {name: of_each for name, of_each in values.items() if None not in of_each}
        found = [name for name, of_each in free.items() if all(_mostly(column.holds, of_one) for of_one in of_each)]
        if not found and key not in variant.needed:
            # Nothing is known of columns that are empty so far.
            found = [name for name, of_each in free.items() if not any(of_each)]
        if found:
            bound[key] = found[0]
            used.update(columns_in(found[0]))
    return bound


def _typed(values: list[Any] | None, holds: Callable[[Any], bool] | None) -> list[Any] | None:
    """The values that show a column's type; None without the column."""
    return [value for value in values if value not in ("", [], {})] if values and holds else values


def _mostly(holds: Callable[[Any], bool] | None, values: list[Any]) -> bool:
    values = values[:VALUES_COMPARED]
    return bool(values) if holds is None else 2 * sum(map(holds, values)) > len(values)
