"""The top of the page: the verdict on the final model, the table of score differences, and the findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snaketune.publishing.scored_models import ScoredModel
from snaketune.report.compare.variants import Variants
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.packing_flow import pack_flows
from snaketune.report.data.results import ResultSet, logged_numbers
from snaketune.report.data.rounds import rounds_of
from snaketune.report.data.sampled import sampled_tables, selections
from snaketune.report.data.win_rates import judged_comparisons
from snaketune.report.judge import data_rules, round_rules, sampling_rules, win_rate_rules
from snaketune.report.judge.findings import WARNS, ReportFinding
from snaketune.report.judge.training_rules import preflight_findings, slow_nodes, training_findings, trainings
from snaketune.report.judge.verdict import (
    INCONCLUSIVE,
    NO_INTERVAL,
    POINTS,
    Difference,
    Verdict,
    interval_scales,
    lineage_verdicts,
    signed,
)
from snaketune.text import NOTHING, decimal, whole


@dataclass(frozen=True, kw_only=True)
class ComparedMeasure:
    """One row of the table below the verdict: a measure, and its difference to each baseline model."""

    on: str
    name: str
    unit: str
    rows: int
    values: list[str]
    differences: list[Difference | None]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The verdict against the base model (`sentence`), and against the initial model if that isn't the base (`more`).

    Attributes:
        tone: `better`, `worse` or `inconclusive`.
        models: Labels of the table's columns, the final model last; empty if nothing can be compared.
    """

    sentence: str
    more: list[str]
    tone: str
    models: list[str]
    table: list[ComparedMeasure]
    verdicts: list[Verdict]

    @property
    def scales(self) -> dict[str, float]:
        """By unit, the end of the scale to which all of its intervals are drawn."""
        return interval_scales(difference for verdict in self.verdicts for difference in verdict.differences)

    @property
    def shown_scales(self) -> str:
        """The middles and the ends of the scales as text: `±5 and ±20 points, ±0.1 and ±0.4 nats`."""
        texts = []
        for unit, end in self.scales.items():
            middle, end = (signed(value, unit).removeprefix("+").removesuffix(POINTS) for value in (end / 4, end))
            texts.append(f"±{middle} and ±{end}{POINTS if unit == 'share' else ' nats' if unit == 'nats' else ''}")
        return ", ".join(texts)

    @property
    def without_interval(self) -> bool:
        return any(verdict.of(NO_INTERVAL) for verdict in self.verdicts)


def headline(results: ResultSet, lineage: list[str]) -> Headline:
    """The headline of a lineage from `judged_lineage`: labels of models, the base first."""
    verdicts = lineage_verdicts(results, lineage)
    sentences = [verdict.sentence for verdict in verdicts] or [_no_verdict(results, lineage)]
    return Headline(
        sentence=sentences[0],
        more=sentences[1:],
        tone=verdicts[0].tone if verdicts else INCONCLUSIVE,
        models=[*(verdict.against for verdict in verdicts), verdicts[0].model] if verdicts else [],
        table=_table(verdicts),
        verdicts=verdicts,
    )


def judged_lineage(results: ResultSet, best: str | None = None) -> list[str]:
    """The lineage of the best model in the first evaluation with two of its models, else in the first with one.

    Args:
        best: Label of the best DPO run, if they are sorted.
    """
    lineages = [model_lineage(results, models, best) for models in results.evaluations.values()]
    return max(lineages, key=lambda lineage: min(len(lineage), 2), default=[])


def model_lineage(results: ResultSet, models: list[ScoredModel], best: str | None = None) -> list[str]:
    """The best model of one evaluation with the models that it was trained from, base first.

    The best is `best` if it is among the models; else, of those that no other one was trained from, that with the highest exact
    match, or with the lowest held-out loss if no answers can be checked.
    """
    labels = {scored.model for scored in models}
    trained = {result.label: result for result in results.of("sft", "dpo")}
    starts = {initial.label for label in labels if (initial := results.first(trained.get(label), "model"))}
    ends = [scored for scored in models if scored.model.startswith(("sft:", "dpo:")) and scored.model not in starts]
    candidates = ends or [scored for scored in models if scored.model.startswith("base:")]
    if not candidates:
        return []
    # Of equal ones the last, which is a DPO model where there is one.
    lineage = [best if best in labels else max(reversed(candidates), key=_quality).model]
    # A run may start from the result of another run.
    while initial := results.first(trained.get(lineage[-1]), "model"):
        lineage.append(initial.label)
    if lineage[-1].startswith("sft:"):
        # Evaluations name a base model after the run that starts from it.
        lineage.append(lineage[-1].replace("sft:", "base:", 1))
    return [label for label in reversed(lineage) if label in labels]


def _quality(scored: ScoredModel) -> tuple[float, float]:
    entries = (scored.scores.get("conversations") or {}).values()
    shares = [share for entry in entries if (share := (entry.get("exact_match") or {}).get("share")) is not None]
    losses = [loss for entry in entries if (loss := entry.get("held_out_loss")) is not None]
    return sum(shares), -sum(losses)


def _table(verdicts: list[Verdict]) -> list[ComparedMeasure]:
    by_measure: dict[tuple[str, str], list[Difference | None]] = {}
    for number, verdict in enumerate(verdicts):
        for difference in verdict.differences:
            by_measure.setdefault((difference.evaluation, difference.measure.path), [None] * len(verdicts))[number] = (
                difference
            )
    table = []
    for row in by_measure.values():
        known = next(cell for cell in row if cell)
        values = [*(cell.shown_before if cell else NOTHING for cell in row), known.shown(known.after)]
        about = {name: getattr(known.measure, name) for name in ("on", "name", "unit")}
        rows = max(cell.rows for cell in row if cell)
        table.append(ComparedMeasure(**about, rows=rows, values=values, differences=row))
    # Measures with an interval first.
    return sorted(table, key=lambda row: all(cell is None or cell.interval is None for cell in row.differences))


def _no_verdict(results: ResultSet, lineage: list[str]) -> str:
    """The sentence in place of a verdict, if no two models of a lineage were evaluated together."""
    if trained := results.of("sft", "dpo"):
        runs = f"{trained[0].label} was" if len(trained) == 1 else f"{len(trained)} models were"
        evaluated = f"only {lineage[-1]} was evaluated" if lineage else "nothing was evaluated"
        sentence = f"{runs} trained, and {evaluated}, so the models can't be compared."
        if len(trained) == 1 and (losses := logged_numbers(trained[0], "loss")):
            sentence += f" Its training loss went from {decimal(losses[0])} to {decimal(losses[-1])}."
        return sentence
    if lineage:
        return f"Only {lineage[-1]} was evaluated: there is nothing to compare it with."
    kept = sum(sum(corpus.counts["kept"].values()) for corpus in results.of("corpus"))
    return f"No model was trained or evaluated; {whole(kept)} rows are ready."


def collect_findings(
    results: ResultSet,
    lineage: list[str],
    verdicts: Sequence[Verdict],
    variants: Variants,
    others: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[ReportFinding]:
    """All findings, warnings first, and those first by which most is lost.

    Args:
        lineage: The models of the verdicts.
        others: Label and run.json of earlier runs, whose hosts are compared with ours.
    """
    findings = preflight_findings(results)
    checked = {finding.key for finding in findings}
    findings += data_rules.sweep_findings(results, variants)
    findings += slow_nodes([*((run.label, run.run) for run in results.trainings), *others])
    for verdict in verdicts:
        for difference in verdict.differences:
            findings += data_rules.difference_findings(difference, verdict)
    for run in trainings(results):
        findings += training_findings(run)
    users = data_rules.users_of_packs(results)
    for flow in pack_flows(results):
        # What preflight found in the train rows isn't repeated for the held-out ones, which the same key would change.
        of_pack = data_rules.pack_findings(flow, users.get(f"pack/{flow.name}", ""))
        findings += [finding for finding in of_pack if not finding.key or finding.key not in checked]
    for flow in corpus_flows(results):
        findings += data_rules.corpus_findings(flow)
    findings += data_rules.prompt_findings(results, lineage)
    findings += sampling_rules.sample_findings(sampled_tables(results))
    findings += sampling_rules.selection_findings(selections(results))
    findings += sampling_rules.engine_findings(results)
    findings += win_rate_rules.judge_findings(judged_comparisons(results))
    findings += round_rules.round_findings(rounds_of(results))
    return sorted(findings, key=lambda finding: (finding.severity != WARNS, -finding.gain))
