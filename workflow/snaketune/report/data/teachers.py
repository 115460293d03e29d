"""Where evaluated models part from a teacher, as the report shows it."""

from dataclasses import dataclass
from typing import Any

from snaketune.report.data.results import ResultSet
from snaketune.report.text import decimal, percent, whole


@dataclass(frozen=True, kw_only=True)
class TeacherComparison:
    """One model in one evaluation with `teacher_of`; `parting` as `evaluation.agreement` writes it."""

    model: str
    about: str
    parting: list[dict[str, Any]]


def teacher_comparisons(results: ResultSet) -> list[TeacherComparison]:
    """All comparisons, by evaluation and model."""
    return [
        TeacherComparison(
            model=scored.model,
            about=f"{scored.evaluation}: {_with_interval(entry, 'agreement', percent)} the same token, "
            f"{_with_interval(entry, 'kl', decimal)} nats per token, {whole(entry['tokens'])} tokens",
            parting=entry["parting"],
        )
        for scored in results.scored
        for entry in (scored.scores.get("teachers") or {}).values()
        if entry["tokens"]
    ]


def _with_interval(entry: dict[str, Any], name: str, shown: Any) -> str:
    bounds = entry.get(f"{name}_interval")
    return shown(entry[name]) + (f" [{shown(bounds[0])}, {shown(bounds[1])}]" if bounds else "")
