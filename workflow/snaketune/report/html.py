"""Render templates as HTML pages. All text from data and models is untrusted, so it is escaped."""

from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from snaketune.report.charts.style import COLOURS
from snaketune.text import clean, decimal, duration, percent, short, whole, words

FILTERS = (whole, short, decimal, percent, duration, clean, words)


def render(name: str, **values: Any) -> str:
    """The page of a template, by the stem of its file name."""
    return environment().get_template(f"{name}.html.jinja").render(colours=COLOURS, **values)


@cache
def environment() -> Environment:
    """The Jinja environment of the templates: everything is escaped, and an undefined name is an error."""
    environment = Environment(
        loader=PackageLoader("snaketune", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {one.__name__: one for one in FILTERS}
    environment.filters |= {"zip": zip, "groupby_run": _runs}
    return environment


def _runs(values: list[Any], attribute: str) -> list[tuple[Any, list[Any]]]:
    """Group neighbours with the same value of `attribute`, in order."""
    return [(key, list(group)) for key, group in groupby(values, attrgetter(attribute))]
