"""The CSV files of the report.

data.csv            every count of every job, one per line
evaluation.csv      a measure per row, a model per column
variants.csv        a DPO run per row
side_by_side/EVALUATION/CORPUS/: all responses, for human evaluation in a spreadsheet
    side_by_side.csv    id, prompt, expected answer, a column per model, and two to fill in: `better`, `note`
    blind.csv           the same with anonymous columns, whose order of models differs from row to row
    key.csv             the model of each column of blind.csv, by row

The blind order is a hash of names and ids. So the files are deterministic, and a key fits a file that was filled in weeks ago,
as long as the models have the same names.
"""

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

from snaketune.publishing.measures import measures
from snaketune.publishing.results import is_number
from snaketune.publishing.scored_models import ScoredModel
from snaketune.report.compare.variants import Variants
from snaketune.report.data.results import ResultSet, unique
from snaketune.text import clean

# Spreadsheets compute a cell that begins with one of these (also in full width); some ignore leading whitespace.
FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Row = dict[str, Any]
Table = tuple[list[str], list[Row]]
TO_FILL_IN = ("better", "note")


def count_rows(results: ResultSet) -> Table:
    """Columns and rows of data.csv: the numbers among the counts of each job, by their dotted path there."""
    rows = [
        {"stage": result.stage, "name": result.name, "count": clean(path), "value": value}
        for result in results.all
        for path, value in _numbers(result.counts)
    ]
    return ["stage", "name", "count", "value"], rows


def _numbers(counts: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Every number below `counts`, by the keys and places that lead to it.

    >>> list(_numbers({"kept": {"train": 9}, "sources": [{"read": 4, "files": ["a"]}]}))
    [('kept.train', 9), ('sources.0.read', 4)]
    """
    if is_number(counts):
        yield ".".join(path), counts
    if isinstance(counts, dict | list):
        for key, inner in counts.items() if isinstance(counts, dict) else enumerate(counts):
            yield from _numbers(inner, (*path, str(key)))


def prompt_corpora(evaluations: Mapping[str, list[ScoredModel]]) -> dict[str, list[str]]:
    """The corpora whose prompts the models answered, by evaluation."""
    return {
        name: unique(corpus for scored in models for corpus in scored.result.spec.get("conversations", ()))
        for name, models in evaluations.items()
    }


def tables(evaluation: str, corpus: str, models: list[ScoredModel]) -> list[Table]:
    """Columns and rows of each of `pages.JUDGING`, sorted by id."""
    labels = [scored.model for scored in models]
    columns = [f"response_{number}" for number in range(1, len(labels) + 1)]
    texts: dict[str, dict[str, str]] = {}
    about: dict[str, dict[str, str]] = {}
    for scored in models:
        for row in scored.responses:
            if row["corpus"] == corpus:
                prompt = {"prompt": clean(row["prompt"]), "expected": clean(row["answer"] or "")}
                about[row["id"]] = {"id": clean(row["id"])} | prompt
                texts.setdefault(row["id"], dict.fromkeys(labels, ""))[scored.model] = clean(row["response"])
    open_rows, blind_rows, key_rows = [], [], []
    for id in sorted(about):
        # Ids may hold lone surrogates.
        names = {label: "\0".join((evaluation, corpus, id, label)).encode("utf-8", "surrogatepass") for label in labels}
        digests = {label: hashlib.sha256(name).digest() for label, name in names.items()}
        shuffled = sorted(labels, key=digests.get)
        open_rows.append(about[id] | texts[id])
        blind_rows.append(about[id] | {column: texts[id][label] for column, label in zip(columns, shuffled)})
        key_rows.append({"id": about[id]["id"]} | dict(zip(columns, shuffled)))
    head = ["id", "prompt", "expected"]
    return [
        ([*head, *labels, *TO_FILL_IN], open_rows),
        ([*head, *columns, *TO_FILL_IN], blind_rows),
        (["id", *columns], key_rows),
    ]


def csv_text(table: Table) -> str:
    columns, rows = table
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: _escape_formula(value) for column, value in row.items()} for row in rows)
    return buffer.getvalue()


def _escape_formula(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute as a formula; numbers stay numbers.

    Column names and responses are untrusted, and may be `=HYPERLINK(...)`.

    >>> [_escape_formula(value) for value in ("=1+1", "@x", "-x", "a=b", -1.5, "-1.5", "")]
    ["'=1+1", "'@x", "'-x", 'a=b', -1.5, '-1.5', '']
    >>> [_escape_formula(value) for value in (" =1", "\\n+1|x", "\uff1d1")]
    ["' =1", "'\\n+1|x", "'\uff1d1"]
    """
    if not isinstance(value, str) or not value.lstrip().startswith(FORMULAS):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def score_rows(results: ResultSet) -> Table:
    """Columns and rows of evaluation.csv: a measure per row, a model per column, unrounded."""
    rows = [
        {"evaluation": evaluation, "on": measure.on, "measure": measure.name, "unit": measure.unit} | measure.values
        for evaluation, models in results.all_evaluations.items()
        for measure in measures(models)
    ]
    models = unique(scored.model for models in results.all_evaluations.values() for scored in models)
    return ["evaluation", "on", "measure", "unit", *models], rows


def variant_rows(variants: Variants) -> Table:
    """Columns and rows of variants.csv: a run per row, unrounded, in the order of the table."""
    named = {f"{column.on}: {column.name}": column for column in variants.columns}
    rows = []
    for label in variants.labels:
        stopped = variants.stopped.get(label)
        rows.append(
            {"variant": label, "best": "yes" if label == variants.best else ""}
            | {key: values[label] for key, values in variants.keys.items()}
            | {heading: column.values[label] for heading, column in named.items()}
            | {"warnings": ", ".join(warning.kind for warning in variants.warnings.get(label, []))}
            | {"stopped at step": stopped and stopped.step, "because": stopped and stopped.reason}
        )
    return ["variant", "best", *variants.keys, *named, "warnings", "stopped at step", "because"], rows
