"""The top of the page: the verdict on the final model, the table of score differences, and the cost."""

from dataclasses import dataclass, field

from snaketune.report.data.packing_flow import pack_flows, training_flows
from snaketune.report.data.results import Result, ResultSet, ScoredModel
from snaketune.report.judge.facts import is_gpu, numbers
from snaketune.report.judge.verdict import INCONCLUSIVE, NO_INTERVAL, Difference, Verdict, lineage_verdicts
from snaketune.report.text import clean, decimal, duration, percent, short, whole


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number, or one per stage (`values`: label and text), with a note."""

    title: str
    value: str = ""
    values: list[tuple[str, str]] = field(default_factory=list)
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
    """The verdict and its table.

    Attributes:
        sentence, more: The verdict against the base model, and against the initial model if that isn't the base.
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
    if not verdicts:
        return Headline(
            sentence=_no_verdict(results, lineage), more=[], tone=INCONCLUSIVE, models=[], table=[], verdicts=[]
        )
    return Headline(
        sentence=verdicts[0].sentence,
        more=[one.sentence for one in verdicts[1:]],
        tone=verdicts[0].tone,
        models=[*(one.against for one in verdicts), verdicts[0].model],
        table=_table(verdicts),
        verdicts=verdicts,
    )


def judged_lineage(results: ResultSet, best: str | None = None) -> list[str]:
    """The lineage of the best model in the first evaluation with two of its models, else in the first with one.

    Args:
        best: Label of the best DPO run, if they are sorted.
    """
    lineages = [model_lineage(results, models, best) for models in results.evaluations.values()]
    return next(
        (lineage for lineage in lineages if len(lineage) > 1), next((lineage for lineage in lineages if lineage), [])
    )


def _table(verdicts: list[Verdict]) -> list[ComparedMeasure]:
    by_measure: dict[tuple[str, str], list[Difference | None]] = {}
    for number, verdict in enumerate(verdicts):
        for one in verdict.differences:
            row = by_measure.setdefault((one.evaluation, one.measure.path), [None] * len(verdicts))
            row[number] = one
    measures = []
    for row in by_measure.values():
        known = next(one for one in row if one)
        values = [one.shown(one.before) if one else "–" for one in row]
        measures.append(
            ComparedMeasure(
                on=known.measure.on,
                name=known.measure.name,
                unit=known.measure.unit,
                rows=max(one.rows for one in row if one),
                values=[*values, known.shown(known.after)],
                differences=row,
            )
        )
    # Measures with an interval first.
    return sorted(measures, key=lambda row: all(one is None or one.interval is None for one in row.differences))


def _no_verdict(results: ResultSet, lineage: list[str]) -> str:
    """The sentence in place of a verdict, if no two models of a lineage were evaluated together."""
    trained = results.of("sft", "dpo")
    if trained:
        runs = f"{trained[0].label} was" if len(trained) == 1 else f"{len(trained)} models were"
        evaluated = f"only {lineage[-1]} was evaluated" if lineage else "nothing was evaluated"
        loss = ""
        if len(trained) == 1 and (losses := numbers(trained[0].history, "loss")):
            loss = f" Its training loss went from {decimal(losses[0])} to {decimal(losses[-1])}."
        return f"{runs} trained, and {evaluated}, so the models can't be compared.{loss}"
    if lineage:
        return f"Only {lineage[-1]} was evaluated: there is nothing to compare it with."
    kept = sum(sum(corpus.counts["kept"].values()) for corpus in results.of("corpus"))
    return f"No model was trained or evaluated; {whole(kept)} rows are ready."


def cards(results: ResultSet) -> list[Card]:
    """Cards about cost and utilization; a card without data is omitted."""
    all_cards = [
        _time_card(results),
        _gpu_card(results),
        _tokens_card(results),
        _speed_card(results),
        _packing_card(results),
    ]
    return [card for card in all_cards if card]


def model_lineage(results: ResultSet, models: list[ScoredModel], best: str | None = None) -> list[str]:
    """The best model of one evaluation with the models that it was trained from, base first.

    The best is `best` if it is among the models; else the DPO model (without DPO, the SFT model) with the highest exact match,
    or with the lowest held-out loss if no answers can be checked.
    """
    labels = {scored.model for scored in models}
    for kind in ("dpo", "sft", "base"):
        if candidates := [scored for scored in models if scored.model.startswith(f"{kind}:")]:
            first = best if best in labels else max(candidates, key=_quality).model
            break
    else:
        return []
    lineage = [first]
    trained = {result.label: result for stage in ("sft", "dpo") for result in results.of(stage)}
    # A run may start from the result of another run.
    while lineage[-1] in trained and (sources := results.made_from(trained[lineage[-1]], "model")):
        lineage.append(sources[0].label)
    if lineage[-1].startswith("sft:"):
        # Evaluations name a base model after the run that starts from it.
        lineage.append(lineage[-1].replace("sft:", "base:", 1))
    return [label for label in reversed(lineage) if label in labels]


def _quality(scored: ScoredModel) -> tuple[float, float]:
    entries = list((scored.scores.get("conversations") or {}).values())
    shares = [share for entry in entries if (share := (entry.get("exact_match") or {}).get("share")) is not None]
    losses = [loss for entry in entries if (loss := entry.get("held_out_loss")) is not None]
    return sum(shares), -sum(losses)


def _speed_card(results: ResultSet) -> Card | None:
    timed = [result for result in results.of("sft", "dpo") if result.run.get("tokens_per_second_median")]
    if not timed:
        return None
    values = []
    for stage in ("sft", "dpo"):
        if fastest := [result.run["tokens_per_second_median"] for result in timed if result.stage == stage]:
            values.append((stage, short(max(fastest))))
    devices = sorted({str(result.run.get("device", "")) for result in timed} - {""})
    return Card(
        title="Tokens per second", values=values, note=f"median, without padding, on {', '.join(devices) or '–'}"
    )


def _packing_card(results: ResultSet) -> Card | None:
    packs = [flow for flow in pack_flows(results) if flow.packed and flow.train.capacity]
    if not packs:
        return None
    tokens, capacity = (sum(values) for values in zip(*((flow.train.tokens, flow.train.capacity) for flow in packs)))
    unpacked = sum(flow.train.documents * flow.length for flow in packs)
    note = f"of all train rows is tokens, not padding; {percent(tokens / unpacked)} with one document per row"
    return Card(title="Packing efficiency", value=percent(tokens / capacity), note=note)


def _time_card(results: ResultSet) -> Card | None:
    timed: list[Result] = [result for result in results.all if result.run.get("seconds")]
    if not timed:
        return None
    longest = max(timed, key=lambda result: result.run["seconds"])
    note = (
        f"{whole(len(timed))} jobs; the longest is {longest.stage} {longest.name}, {duration(longest.run['seconds'])}"
    )
    return Card(title="Compute time", value=duration(sum(result.run["seconds"] for result in timed)), note=note)


def _gpu_card(results: ResultSet) -> Card | None:
    """GPU hours of all attempts that run.json counts, with the process count of the last one."""
    hours: dict[str, float] = {}
    for result in results.all:
        if is_gpu(result.run) and result.run.get("seconds"):
            device = clean(result.run["device"])
            # Reference passes and evaluations record only the kind of device.
            name = "GPU" if device.startswith("cuda") else device
            spent = result.run["seconds"] * result.run.get("processes", 1) / 3600
            hours[name] = hours.get(name, 0.0) + spent
    if not hours:
        return None
    note = ", ".join(f"{_hours(spent)} on {name}" for name, spent in sorted(hours.items()))
    return Card(title="GPU hours", value=_hours(sum(hours.values())), note=note)


def _hours(spent: float) -> str:
    return f"{spent:,.2f}" if spent >= 0.01 else "under 0.01"


def _tokens_card(results: ResultSet) -> Card | None:
    flows = training_flows(results)
    known = [flow for flow in flows if flow.tokens]
    if not known:
        return None
    steps = sum(flow.steps for flow in flows)
    uncounted = len(flows) - len(known)
    note = f"without padding, by {len(known)} {'run' if len(known) == 1 else 'runs'}, {whole(steps)} steps in total"
    note += f"; {uncounted} more on raw rows, whose tokens weren't counted" if uncounted else ""
    return Card(title="Tokens trained", value=short(sum(flow.tokens for flow in known)), note=note)
