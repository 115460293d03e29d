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


def tables(evaluation: str, corpus: str, models: list[ScoredModel]) -> list[Table]:
    """Columns and rows of each of FILES, sorted by id."""
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
