"""Where evaluated models part from a teacher, as the report shows it."""

import json
from dataclasses import dataclass
from typing import Any

from snaketune.report.data.results import ResultSet
from snaketune.text import clean, decimal, percent, whole


@dataclass(frozen=True, kw_only=True)
class TeacherComparison:
    """One model in one evaluation with `teacher_of`, and the cells of its table: the teacher's token, the model's, how often,
    nats, and the text before."""

    model: str
    about: str
    parting: list[list[str]]


def teacher_comparisons(results: ResultSet) -> list[TeacherComparison]:
    """All comparisons, by evaluation and model."""
    return [
        TeacherComparison(
            model=scored.model,
            about=f"{scored.evaluation}: {_with_interval(entry, 'agreement', percent)} the same token, "
            f"{_with_interval(entry, 'kl', decimal)} nats per token, {whole(entry['tokens'])} tokens",
            parting=[_cells(parting) for parting in entry["parting"]],
        )
        for scored in results.scored
        for entry in (scored.scores.get("teachers") or {}).values()
        if entry["tokens"]
    ]


def _cells(parting: dict[str, Any]) -> list[str]:
    teacher, model, after = (
        clean(json.dumps(parting[key], ensure_ascii=False)) for key in ("teacher", "model", "after")
    )
    return [teacher, model, whole(parting["count"]), decimal(parting["nats"]), after]


def _with_interval(entry: dict[str, Any], name: str, shown: Any) -> str:
    bounds = entry.get(f"{name}_interval")
    return shown(entry[name]) + (f" [{shown(bounds[0])}, {shown(bounds[1])}]" if bounds else "")
