"""All that is suspicious, gathered and put together, and what to try next: each step with the key of the config to edit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from snaketune.report.compare.variants import Variants
from snaketune.report.data.preflight_findings import found_before
from snaketune.report.data.results import Findings
from snaketune.report.judge import facts, rules
from snaketune.report.judge.rules import WARNS, Suspicion
from snaketune.report.judge.slow_nodes import slow_nodes
from snaketune.report.judge.verdict import Verdict

# Of what many runs have in common, so many are named.
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Group:
    """The same suspicion of one run or several; the sentence is the first one's."""

    where: list[str]
    first: Suspicion

    @property
    def others(self) -> int:
        """How many aren't named."""
        return max(0, len(self.where) - NAMED)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What to try, where in the config, and because of what."""

    do: str
    key: str
    because: list[str]


def suspicions(
    findings: Findings,
    line: list[str],
    told: Sequence[Verdict],
    found: Variants,
    others: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[Suspicion]:
    """Warnings first, in the order of what matters most: results, trainings, data, machines.

    Args:
        line: the models that the verdicts are about.
        others: label and run.json of runs of another time, whose machines are held against ours.
    """
    of_differences = [
        said
        for verdict in told
        for one, rule in product(verdict.differences, rules.OF_DIFFERENCES)
        if (said := rule(one, verdict))
    ]
    all_ = [
        *of_differences,
        *_said(rules.OF_TRAININGS, facts.trainings(findings)),
        *_said(rules.OF_PACKS, facts.packed(findings)),
        *_said(rules.OF_CORPORA, facts.rows(findings)),
        *_said(rules.OF_PROMPTS, facts.asked(findings, line)),
        *found_before(findings),
        *slow_nodes([*((run.label, run.run) for run in findings.of("sft", "dpo")), *others]),
        *_said(rules.OF_PICKED, facts.picked(found)),
        *_said(rules.OF_SWEEPS, facts.swept(findings, found)),
    ]
    return sorted(all_, key=lambda one: one.severity != WARNS)


def _said(table: Iterable[Callable[[Any], Suspicion | None]], about: list[Any]) -> list[Suspicion]:
    return [said for rule in table for one in about if (said := rule(one))]


def groups(found: list[Suspicion]) -> list[Group]:
    """Those of one rule and one key together, in the order of the first ones; what names no key stands alone."""
    by: dict[tuple[str, ...], list[Suspicion]] = {}
    for one in found:
        by.setdefault((one.kind, one.key) if one.key else (one.kind, one.where, one.found), []).append(one)
    return [Group(where=list(dict.fromkeys(one.where for one in alike)), first=alike[0]) for alike in by.values()]


def steps(found: list[Suspicion]) -> list[Step]:
    """What they say to do, each once: of several that say otherwise about the same key, the first."""
    by: dict[str, Step] = {}
    for one in found:
        if not one.do:
            continue
        step = by.setdefault(one.key or one.do, Step(do=one.do, key=one.key, because=[]))
        kind = one.kind.partition(":")[0]
        if kind not in step.because:
            step.because.append(kind)
    return list(by.values())
