"""CSV files of all responses for human evaluation in a spreadsheet.

For each evaluation and corpus:

side_by_side.csv    id, prompt, expected answer, a column per model, and two to fill in: `better`, `note`
blind.csv           the same with anonymous columns, whose order of models differs from row to row
key.csv             the model of each column of blind.csv, by row

The order is a hash of names and ids. So the files are deterministic, and a key fits a file that was filled in weeks ago, as
long as the models have the same names.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from snaketune.report.data.results import ScoredModel, unique
from snaketune.report.text import clean

Table = tuple[list[str], list[dict[str, Any]]]
FILES = ("side_by_side", "blind", "key")
TO_FILL_IN = ("better", "note")


def side_by_side_files(corpora: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """The files of each evaluation and corpus, as `evaluation/corpus` → paths below the report's pages.

    Args:
        corpora: By evaluation, its corpora of conversations.

    >>> side_by_side_files({"main": ["chat"]})["main/chat"][0]
    'side_by_side/main/chat/side_by_side.csv'
    """
    keys = [f"{evaluation}/{corpus}" for evaluation, corpora in corpora.items() for corpus in corpora]
    return {key: [f"side_by_side/{key}/{name}.csv" for name in FILES] for key in keys}


def prompt_corpora(evaluations: Mapping[str, list[ScoredModel]]) -> dict[str, list[str]]:
    """The corpora whose prompts the models answered, by evaluation."""
    return {
        name: unique(corpus for scored in models for corpus in scored.result.spec.get("conversations", ()))
        for name, models in evaluations.items()
    }


def tables(evaluation: str, corpus: str, models: list[ScoredModel]) -> dict[str, Table]:
    """Columns and rows of each of FILES, sorted by id."""
    labels = [scored.model for scored in models]
    responses = {
        scored.model: {row["id"]: row for row in scored.responses if row["corpus"] == corpus} for scored in models
    }
    rows = {id: row for answered in responses.values() for id, row in answered.items()}
    columns = [f"response_{number}" for number in range(1, len(labels) + 1)]
    open_rows, blind_rows, key_rows = [], [], []
    for id in sorted(rows):
        shown = {"id": clean(id), "prompt": clean(rows[id]["prompt"]), "expected": clean(rows[id]["answer"] or "")}
        texts = {label: clean(responses[label][id]["response"]) if id in responses[label] else "" for label in labels}
        shuffled = sorted(labels, key=lambda label: _shuffle_key(evaluation, corpus, id, label))
        open_rows.append(shown | texts)
        blind_rows.append(shown | {column: texts[label] for column, label in zip(columns, shuffled)})
        key_rows.append({"id": clean(id)} | dict(zip(columns, shuffled)))
    about = ["id", "prompt", "expected"]
    return {
        "side_by_side": ([*about, *labels, *TO_FILL_IN], open_rows),
        "blind": ([*about, *columns, *TO_FILL_IN], blind_rows),
        "key": (["id", *columns], key_rows),
    }


def _shuffle_key(*parts: str) -> bytes:
    """A sort key that shuffles the models of a row. Lone surrogates are allowed."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
