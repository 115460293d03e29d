"""All that is suspicious, gathered and put together, and what to try next: each step with the key of the config to edit."""

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

# Of what many runs have in common, so many are named.
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Group:
    """The same suspicion of one run or several; the sentence is the first one's."""

    where: list[str]
    first: ReportFinding

    @property
    def unnamed(self) -> int:
        """How many aren't named."""
        return max(0, len(self.where) - NAMED)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What to try, where in the config, and because of what."""

    action: str
    key: str
    reasons: list[str]


def report_findings(
    results: ResultSet,
    line: list[str],
    verdicts: Sequence[Verdict],
    findings: Variants,
    unnamed: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[ReportFinding]:
    """Warnings first, in the order of what matters most: results, trainings, data, machines.

    Args:
        line: the models that the verdicts are about.
        others: label and run.json of runs of another time, whose machines are held against ours.
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
        *_apply(rules.PROMPT_RULES, facts.evaluated_prompts(results, line)),
        *preflight_findings(results),
        *slow_nodes([*((run.label, run.run) for run in results.of("sft", "dpo")), *unnamed]),
        *_apply(rules.BEST_RUN_RULES, facts.best_runs(findings)),
        *_apply(rules.SWEEP_RULES, facts.swept_keys(results, findings)),
    ]
    return sorted(all_findings, key=lambda one: one.severity != WARNS)


def _apply(table: Iterable[Callable[[Any], ReportFinding | None]], about: list[Any]) -> list[ReportFinding]:
    return [finding for rule in table for one in about if (finding := rule(one))]


def groups(findings: list[ReportFinding]) -> list[Group]:
    """Those of one rule and one key together, in the order of the first ones; what names no key stands alone."""
    grouped: dict[tuple[str, ...], list[ReportFinding]] = {}
    for one in findings:
        grouped.setdefault((one.kind, one.key) if one.key else (one.kind, one.where, one.findings), []).append(one)
    return [Group(where=list(dict.fromkeys(one.where for one in alike)), first=alike[0]) for alike in grouped.values()]


def steps(findings: list[ReportFinding]) -> list[Step]:
    """What they say to do, each once: of several that say otherwise about the same key, the first."""
    grouped: dict[str, Step] = {}
    for one in findings:
        if not one.action:
            continue
        step = grouped.setdefault(one.key or one.action, Step(action=one.action, key=one.key, reasons=[]))
        kind = one.kind.partition(":")[0]
        if kind not in step.reasons:
            step.reasons.append(kind)
    return list(grouped.values())
