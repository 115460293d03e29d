"""Columns that a recognised layout leaves and the config doesn't mention: those that may hold turns or mark rows stop the run.

A layout that `auto` recognises may leave what can't be a turn: ids, sources, links and times, numbers, lists of numbers, and
categories, that is a few short texts that repeat. Anything else is in question: other texts, texts under the names of turns
(`instruction`, `system_prompt`), lists, bytes, and columns whose names mark rows (`is_correct`, `label`), whatever they hold.
Where the config states the layout, or maps columns with `fields`, nothing is in question.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.excerpts import excerpt, printable
from snaketune.corpus.layouts.nearest import nearest
from snaketune.corpus.rows import RowResult
from snaketune.corpus.values.cells import json_of
from snaketune.corpus.values.marks import marks_rows
from snaketune.corpus.values.row_file import maps_rows
from snaketune.corpus.values.schema import columns_in
from snaketune.errors import SnaketuneError

# Rows after which the run stops for the columns in question so far, so that it stops soon and names most of them at once.
ROWS_BEFORE_STOP = 1000
CATEGORIES, CATEGORY_LENGTH, METADATA_LENGTH, PATHS = 50, 40, 200, 1000
# One word with a digit or an inner mark, as ids, hashes, paths, links and times have; or a date and a time.
IDENTIFIER = re.compile(r"(?=\S*(?:\d|\w[/_:@.-]\w))[!-~]{1,400}|[\d\s:.,/+TZ-]+")
# The last word of the names of columns whose short texts say where a row is from or what it is about.
METADATA = (
    " id uuid hash source src dataset subset config split url link file path license date time timestamp created lang language "
    "locale category domain model version "
)
# The last word of the names of columns whose texts are turns, or parts of them, also if they repeat.
TURNS = " system instruction instructions prompt preamble developer query question context "
NEVER_A_TURN = (bool, int, float)


class UnstatedColumns:
    """The columns in question of one file's rows.

    Attributes:
        in_question: by path, such as `metadata.comment`, the place and an excerpt of its first value.
        tools: the path of a key `tools` within a column in question, as object or as JSON in text.
    """

    def __init__(self, source: Source, order_column: str | None = None):
        fields = source.fields
        self.source, self.guessed = (
            source,
            source.layout == "auto" and not (maps_rows(fields) or fields.messages or fields.text),
        )
        named = [name for value in fields.model_dump(exclude_defaults=True).values() for name in columns_in(value)]
        self.stated = {*source.ignore, *(condition.column for condition in source.where), order_column, *named}
        # What begins with these is ignored as well; and columns that hold JSON which a stated path leads into.
        self.ignored = tuple(f"{name}{mark}" for name in source.ignore for mark in ".[")
        paths = [name.split(".") for name in self.stated if name]
        self.parents = {".".join(keys[:count]) for keys in paths for count in range(1, len(keys))}
        self.rows: Counter[str] = Counter()
        self.categories: dict[str, set[str]] = {}
        self.in_question: dict[str, tuple[str, str]] = {}
        self.tools: str | None = None
        # Layout and columns of the first row with a column that isn't read.
        self.first: tuple[str, tuple[str, ...]] | None = None

    def add(self, result: RowResult) -> None:
        """Look at the columns that a used row has and its layout doesn't read."""
        if not (self.guessed and result.ignored):
            return
        self.first = self.first or (result.layout, tuple(result.raw.value))
        row = result.raw.value
        for name in result.ignored:
            # Nearly all columns are numbers, or texts that are settled soon.
            value = row.get(name)
            if name in self.stated or (type(value) in NEVER_A_TURN and not marks_rows(name)):
                continue
            if type(value) is str and name not in self.in_question and not self._may_be_turn(name, value):
                continue
            for value in values_at(result.raw.value, name):
                for path, leaf in _leaves(value, name):
                    if path not in self.in_question and self._may_be_turn(path, leaf):
                        self.in_question[path] = f"{result.raw.unit} {result.raw.number}", excerpt(leaf)
                        self.tools = self.tools or _tools_within(path, leaf)

    def state(self) -> dict[str, Any]:
        """What `merge` reads, as plain JSON: of one range of the file, in which no column is in question yet."""
        categories = {path: sorted(texts) for path, texts in self.categories.items()}
        return {"rows": dict(self.rows), "categories": categories, "first": self.first}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the rows of another range of the file."""
        self.rows.update(state["rows"])
        self.first = self.first or (state["first"] and (state["first"][0], tuple(state["first"][1])))
        for path, texts in state["categories"].items():
            known = self.categories.setdefault(path, set())
            known.update(texts)
            if len(known) > CATEGORIES or len(self.categories) > PATHS:
                self.in_question[path] = f"{len(known)} different texts", excerpt(min(known))

    def finish(self) -> None:
        """Decide about the texts that were too few to be categories."""
        for path, texts in self.categories.items():
            if 2 * len(texts) > self.rows[path] and path not in self.in_question:
                self.in_question[path] = f"{len(texts)} different texts in {self.rows[path]} rows", excerpt(min(texts))

    def check(self, file: str, kind: str) -> None:
        """Raise SnaketuneError with the entry to paste if columns are in question."""
        if not self.in_question:
            return
        layout, columns = self.first or ("", ())
        lines = [
            f"{file}: rows were recognised as {layout}, which doesn't read columns that may hold turns or mark rows:",
            *(f"  {path}: {text} ({place})" for path, (place, text) in self.in_question.items()),
            *(f"Another layout is {text}." for text in nearest(columns, kind, without=layout)[:1]),
        ]
        if mark := next((path for path in self.in_question if marks_rows(path)), None):
            lines.append(
                f"To select rows by their marks, add a condition to the source, such as `where: {mark} == VALUE`."
            )
        lines += ["If these columns aren't part of the rows, state it; the source is then:", self.entry(layout)]
        raise SnaketuneError("\n".join(map(printable, "\n".join(lines).split("\n"))))

    def entry(self, layout: str) -> str:
        """The source with this layout and the columns in question under `ignore`, but for tools, which `fields` reads."""
        ignored = [path for path in self.in_question if not f"{self.tools}.".startswith(f"{path}.")]
        if self.tools is None:
            return self.source.entry(layout=layout, ignore=[*self.source.ignore, *ignored])
        fields = self.source.fields.model_dump(exclude_defaults=True) | {"tools": self.tools}
        keys = {"ignore": [*self.source.ignore, *ignored]} if ignored else {}
        return self.source.entry(layout=layout, fields=fields, **keys)

    def _may_be_turn(self, path: str, value: Any) -> bool:
        if path in self.stated or path in self.parents or path.startswith(self.ignored):
            return False
        if marks_rows(path):
            return True
        if isinstance(value, str):
            if IDENTIFIER.fullmatch(value) or (
                names_metadata(path) and len(value) <= METADATA_LENGTH and "\n" not in value
            ):
                return False
            texts = self.categories.setdefault(path, set())
            texts.add(value)
            self.rows[path] += 1
            # Where keys are ids, there is a path for each row.
            many = len(texts) > CATEGORIES or len(self.categories) > PATHS
            return many or len(value) > CATEGORY_LENGTH or "\n" in value or _last_word(path) in TURNS
        return not (isinstance(value, NEVER_A_TURN) or hasattr(value, "isoformat") or _are_numbers(value))


def names_metadata(path: str) -> bool:
    """Whether the name of a column says that its texts tell where a row is from, or what it is about.

    >>> names_metadata("meta.lang"), names_metadata("created_at"), names_metadata("question")
    (True, False, False)
    """
    return _last_word(path) in METADATA


def values_at(row: Any, name: str) -> Iterator[Any]:
    """Yield the values of a column, or of a key within it, that aren't empty.

    >>> list(values_at({"messages": [{"role": "user"}, {"name": "Ann"}]}, "messages[].name"))
    ['Ann']
    """
    values = [row]
    for part in name.split("."):
        key, lists = part.rstrip("[]"), part.count("[]")
        values = [value[key] for value in values if isinstance(value, dict) and key in value] or [
            value[part] for value in values if isinstance(value, dict) and part in value
        ]
        for _ in range(lists):
            values = [item for value in values if isinstance(value, list) for item in value]
    return (value for value in values if value not in (None, "", [], {}))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(value) is not dict:
        yield path, value
        return
    for key, inner in value.items():
        if inner not in (None, "", [], {}):
            yield from _leaves(inner, f"{path}.{key}")


def _tools_within(path: str, value: Any) -> str | None:
    """The path of a row's tools within a column that its layout doesn't read.

    >>> _tools_within("metadata.tools", [{"name": "f"}]), _tools_within("metadata", '{"tools": []}')
    ('metadata.tools', 'metadata.tools')
    """
    if "." in path and path.endswith(".tools"):
        return path
    inner = json_of(value) if isinstance(value, str) and value[:1] == "{" else None
    return f"{path}.tools" if isinstance(inner, dict) and "tools" in inner else None


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        item is None or isinstance(item, NEVER_A_TURN) or _are_numbers(item) for item in value
    )


@lru_cache(maxsize=4096)
def _last_word(path: str) -> str:
    """The last word of a name, between spaces.

    >>> _last_word("meta.systemPrompt"), _last_word("prompt_id"), _last_word("42")
    (' prompt ', ' id ', '?')
    """
    words = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*", path)
    return f" {words[-1].casefold()} " if words else "?"
