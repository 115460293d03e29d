"""The top of the page: the verdict on the final model, the table of score differences, and the cost."""

from collections.abc import Iterator
from dataclasses import dataclass

from snaketune.publishing.results import Result
from snaketune.report.data.packing_flow import pack_flows, training_flows
from snaketune.report.data.results import ResultSet, ScoredModel, is_gpu, logged_numbers
from snaketune.report.judge.verdict import INCONCLUSIVE, NO_INTERVAL, Difference, Verdict, lineage_verdicts
from snaketune.report.text import NOTHING, clean, decimal, duration, percent, short, whole


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number, or one per stage (`values`: label and text), with a note."""

    title: str
    value: str = ""
    values: tuple[tuple[str, str], ...] = ()
    note: str = ""


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
    def without_interval(self) -> bool:
        """Return True if some measure has no interval."""
        return any(one.of(NO_INTERVAL) for one in self.verdicts)


def headline(results: ResultSet, lineage: list[str]) -> Headline:
    """The headline of a lineage from `judged_lineage`: labels of models, the base first."""
    verdicts = lineage_verdicts(results, lineage)
    sentences = [one.sentence for one in verdicts] or [_no_verdict(results, lineage)]
    return Headline(
        sentence=sentences[0],
        more=sentences[1:],
        tone=verdicts[0].tone if verdicts else INCONCLUSIVE,
        models=[*(one.against for one in verdicts), verdicts[0].model] if verdicts else [],
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

    The best is `best` if it is among the models; else the DPO model (without DPO, the SFT model) with the highest exact match,
    or with the lowest held-out loss if no answers can be checked.
    """
    labels = {scored.model for scored in models}
    by_kind = ([one for one in models if one.model.startswith(f"{kind}:")] for kind in ("dpo", "sft", "base"))
    candidates = next(filter(None, by_kind), [])
    if not candidates:
        return []
    lineage = [best if best in labels else max(candidates, key=_quality).model]
    trained = {result.label: result for result in results.of("sft", "dpo")}
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
        for one in verdict.differences:
            by_measure.setdefault((one.evaluation, one.measure.path), [None] * len(verdicts))[number] = one
    table = []
    for row in by_measure.values():
        known = next(one for one in row if one)
        values = [*(one.shown(one.before) if one else NOTHING for one in row), known.shown(known.after)]
        about = {name: getattr(known.measure, name) for name in ("on", "name", "unit")}
        rows = max(one.rows for one in row if one)
        table.append(ComparedMeasure(**about, rows=rows, values=values, differences=row))
    # Measures with an interval first.
    return sorted(table, key=lambda row: all(one is None or one.interval is None for one in row.differences))


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


def cards(results: ResultSet) -> Iterator[Card]:
    """Cards about cost and utilization; a card without data is omitted."""
    timed = [result for result in results.all if result.run.get("seconds")]
    if timed:
        longest = max(timed, key=lambda result: result.run["seconds"])
        most = f"the longest is {longest.stage} {longest.name}, {duration(longest.run['seconds'])}"
        total = duration(sum(result.run["seconds"] for result in timed))
        attempts = sum(max(1, len(result.run.get("attempts", ()))) for result in timed)
        tried = f" in {whole(attempts)} attempts" if attempts > len(timed) else ""
        yield Card(title="Compute time", value=total, note=f"{whole(len(timed))} jobs{tried}; {most}")
    if hours := _gpu_hours(timed):
        note = ", ".join(f"{_hours(spent)} on {name}" for name, spent in sorted(hours.items()))
        yield Card(title="GPU hours", value=_hours(sum(hours.values())), note=note)
    flows = training_flows(results)
    if flows:
        steps = sum(flow.steps for flow in flows)
        note = f"without padding, by {len(flows)} {'run' if len(flows) == 1 else 'runs'}, {whole(steps)} steps in total"
        yield Card(title="Tokens trained", value=short(sum(flow.tokens for flow in flows)), note=note)
    speeds: dict[str, list[float]] = {}
    devices = set()
    for run in results.of("sft", "dpo"):
        if speed := run.run.get("tokens_per_second_median"):
            speeds.setdefault(run.stage, []).append(speed)
            devices.add(str(run.run.get("device", "")))
    if speeds:
        values = tuple((stage, short(max(speeds[stage]))) for stage in ("sft", "dpo") if stage in speeds)
        on = ", ".join(sorted(devices - {""})) or NOTHING
        yield Card(title="Tokens per second", values=values, note=f"median, without padding, on {on}")
    if packs := [flow for flow in pack_flows(results) if flow.packed and flow.train.capacity]:
        tokens, capacity = sum(flow.train.tokens for flow in packs), sum(flow.train.capacity for flow in packs)
        unpacked = sum(flow.train.documents * flow.length for flow in packs)
        note = f"of all train rows is tokens, not padding; {percent(tokens / unpacked)} with one document per row"
        yield Card(title="Packing efficiency", value=percent(tokens / capacity), note=note)


def _gpu_hours(timed: list[Result]) -> dict[str, float]:
    """GPU hours by device, of all attempts that run.json counts, with the process count of the last one."""
    hours: dict[str, float] = {}
    for run in (result.run for result in timed if is_gpu(result.run)):
        device = clean(run["device"])
        # Reference passes and evaluations record only the kind of device.
        name = "GPU" if device.startswith("cuda") else device
        hours[name] = hours.get(name, 0.0) + run["seconds"] * run.get("processes", 1) / 3600
    return hours


def _hours(spent: float) -> str:
    return f"{spent:,.2f}" if spent >= 0.01 else "under 0.01"
