"""What every model answered, side by side, for people to judge in a spreadsheet: of each evaluation and corpus

side_by_side.csv    id, prompt, expected answer, a column per model, and two to fill in: `better`, `note`
blind.csv           the same, but nobody sees who wrote what: the models are in another order in each row
key.csv             which model wrote which column of blind.csv, by row

The order is drawn from names and ids, so the files are the same every time, and a key fits the file that was filled in weeks
ago as long as the models have the same names.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from snaketune.report.data.results import Scored, unique
from snaketune.report.text import clean

Table = tuple[list[str], list[dict[str, Any]]]
FILES = ("side_by_side", "blind", "key")
TO_FILL_IN = ("better", "note")


def names_of(asked: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """By evaluation and corpus, the files below the report's pages.

    Args:
        asked: by evaluation, its corpora of conversations.

    >>> names_of({"main": ["chat"]})["main/chat"][0]
    'side_by_side/main/chat/side_by_side.csv'
    """
    places = [f"{evaluation}/{corpus}" for evaluation, corpora in asked.items() for corpus in corpora]
    return {place: [f"side_by_side/{place}/{name}.csv" for name in FILES] for place in places}


def conversations_of(evaluations: Mapping[str, list[Scored]]) -> dict[str, list[str]]:
    """By evaluation, the corpora that its models were asked about."""
    return {
        name: unique(corpus for scored in models for corpus in scored.result.spec.get("conversations", ()))
        for name, models in evaluations.items()
    }


def tables(evaluation: str, corpus: str, models: list[Scored]) -> dict[str, Table]:
    """Columns and rows of each of FILES, in the order of the ids."""
    labels = [scored.model for scored in models]
    said = {scored.model: {row["id"]: row for row in scored.responses if row["corpus"] == corpus} for scored in models}
    asked = {id: row for answered in said.values() for id, row in answered.items()}
    columns = [f"response_{number}" for number in range(1, len(labels) + 1)]
    open_rows, blind_rows, key_rows = [], [], []
    for id in sorted(asked):
        shown = {"id": clean(id), "prompt": clean(asked[id]["prompt"]), "expected": clean(asked[id]["answer"] or "")}
        texts = {label: clean(said[label][id]["response"]) if id in said[label] else "" for label in labels}
        shuffled = sorted(labels, key=lambda label: _drawn(evaluation, corpus, id, label))
        open_rows.append(shown | texts)
        blind_rows.append(shown | {column: texts[label] for column, label in zip(columns, shuffled)})
        key_rows.append({"id": clean(id)} | dict(zip(columns, shuffled)))
    about = ["id", "prompt", "expected"]
    return {
        "side_by_side": ([*about, *labels, *TO_FILL_IN], open_rows),
        "blind": ([*about, *columns, *TO_FILL_IN], blind_rows),
        "key": (["id", *columns], key_rows),
    }


def _drawn(*parts: str) -> bytes:
    """A place in an order that nobody can guess by looking. A lone half of a character is one too."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
