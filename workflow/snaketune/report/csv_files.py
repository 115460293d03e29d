"""The CSV files of the report.

answers.csv         all responses: a prompt per row, a model per column
evaluation.csv      a measure per row, a model per column
variants.csv        a DPO run per row
"""

import csv
import io
from typing import Any

from snaketune.report.compare.measures import measures
from snaketune.report.compare.variants import Variants
from snaketune.report.data.results import ResultSet, unique
from snaketune.report.text import clean

# Spreadsheets compute a cell that begins with one of these (also in full width); some ignore leading whitespace.
FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Table = tuple[list[str], list[dict[str, Any]]]


def answer_rows(results: ResultSet) -> Table:
    """Columns and rows of answers.csv: a prompt per row, by id, a model per column."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for scored in results.scored:
        for row in scored.responses:
            about = {"evaluation": scored.evaluation, "corpus": row["corpus"], "id": clean(row["id"])}
            about |= {"prompt": clean(row["prompt"]), "expected": clean(row["answer"] or "")}
            rows.setdefault((scored.evaluation, row["corpus"], row["id"]), about)[scored.model] = clean(row["response"])
    columns = ["evaluation", "corpus", "id", "prompt", "expected", *unique(scored.model for scored in results.scored)]
    return columns, [row for _, row in sorted(rows.items(), key=lambda entry: entry[0])]


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
        for evaluation, models in results.evaluations.items()
        for measure in measures(models)
    ]
    return ["evaluation", "on", "measure", "unit", *unique(scored.model for scored in results.scored)], rows


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
