"""All findings of the report, grouped, and the next steps: an action and the config key to edit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from snaketune.report.compare.variants import Variants
from snaketune.report.data.preflight_findings import preflight_findings
from snaketune.report.data.results import ResultSet
from snaketune.report.judge import facts, rules
from snaketune.report.judge.rules import WARNS, ReportFinding
from snaketune.report.judge.slow_nodes import slow_nodes
from snaketune.report.judge.verdict import Verdict

# Number of runs that a group names.
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class FindingGroup:
    """The same finding in one or more runs, with the message of the first."""

    where: list[str]
    first: ReportFinding

    @property
    def unnamed(self) -> int:
        """The number of runs that aren't named."""
        return max(0, len(self.where) - NAMED)


@dataclass(frozen=True, kw_only=True)
class Step:
    """An action, the config key to edit, and the kinds of the findings that suggest it."""

    action: str
    key: str
    reasons: list[str]


def collect_findings(
    results: ResultSet,
    lineage: list[str],
    verdicts: Sequence[Verdict],
    variants: Variants,
    others: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[ReportFinding]:
    """All findings: warnings before notes, and within these results, trainings, data, machines.

    Args:
        lineage: The models of the verdicts.
        others: Label and run.json of earlier runs, whose hosts are compared with ours.
    """
    difference_findings = [
        finding
        for verdict in verdicts
        for one, rule in product(verdict.differences, rules.DIFFERENCE_RULES)
        if (finding := rule(one, verdict))
    ]
    all_findings = [
        *difference_findings,
        *_apply(rules.TRAINING_RULES, facts.trainings(results)),
        *_apply(rules.PACK_RULES, facts.packs(results)),
        *_apply(rules.CORPUS_RULES, facts.corpora(results)),
        *_apply(rules.PROMPT_RULES, facts.evaluated_prompts(results, lineage)),
        *preflight_findings(results),
        *slow_nodes([*((run.label, run.run) for run in results.of("sft", "dpo")), *others]),
        *_apply(rules.BEST_RUN_RULES, facts.best_runs(variants)),
        *_apply(rules.SWEEP_RULES, facts.swept_keys(results, variants)),
    ]
    return sorted(all_findings, key=lambda one: one.severity != WARNS)


def _apply(table: Iterable[Callable[[Any], ReportFinding | None]], about: list[Any]) -> list[ReportFinding]:
    return [finding for rule in table for one in about if (finding := rule(one))]


def groups(findings: list[ReportFinding]) -> list[FindingGroup]:
    """Group findings by kind and key, in order of first appearance. A finding without a key isn't grouped."""
    grouped: dict[tuple[str, ...], list[ReportFinding]] = {}
    for one in findings:
        grouped.setdefault((one.kind, one.key) if one.key else (one.kind, one.where, one.message), []).append(one)
    return [
        FindingGroup(where=list(dict.fromkeys(one.where for one in alike)), first=alike[0])
        for alike in grouped.values()
    ]


def steps(findings: list[ReportFinding]) -> list[Step]:
    """The actions of all findings without repetitions; of several for one key, the first."""
    grouped: dict[str, Step] = {}
    for one in findings:
        if not one.action:
            continue
        step = grouped.setdefault(one.key or one.action, Step(action=one.action, key=one.key, reasons=[]))
        kind = one.kind.partition(":")[0]
        if kind not in step.reasons:
            step.reasons.append(kind)
    return list(grouped.values())
