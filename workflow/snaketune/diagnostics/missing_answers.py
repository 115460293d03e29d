"""Checks for evaluations that configure exact match where no held-out row has a checkable answer."""

from collections.abc import Iterable

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightEvaluation
from snaketune.tables import read_table


def check_missing_answers(evaluations: Iterable[PreflightEvaluation], evaluated: list[Artifact]) -> list[Finding]:
    """Return a finding for each such evaluation. The answers are known after reading the rows, unlike in `config.workflow`."""
    corpora = {corpus.folder.parent.name: corpus for corpus in evaluated}
    findings = []
    for one in evaluations:
        answers = [read_table(corpora[name].file("held_out.arrow")).column("answer") for name in one.exact_match]
        if answers and all(column.null_count == len(column) for column in answers):
            findings.append(
                Finding(
                    key=f"{one.key}.exact_match",
                    problem=f"none of the {sum(map(len, answers)):,} held-out rows of {' and '.join(one.exact_match)} has a "
                    "checkable answer, so there is nothing to compare",
                    do=f"set corpora.{one.exact_match[0]}.answer_pattern to a pattern for it in the last assistant turn, or "
                    "fields.answer of its sources to the column that holds it, or remove exact_match",
                )
            )
    return findings
