"""What the page answers first: did it work, is it better than before and by how much, and what did it cost."""

from dataclasses import dataclass, field

from snaketune.report.data.packing_flow import pack_flows, training_flows
from snaketune.report.data.results import Result, ResultSet, ScoredModel
from snaketune.report.judge.facts import is_gpu, numbers
from snaketune.report.judge.verdict import INCONCLUSIVE, NO_INTERVAL, Difference, Verdict, lineage_verdicts
from snaketune.report.text import clean, decimal, duration, percent, short, whole


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number, or one per model, and what it means."""

    title: str
    value: str = ""
    values: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ComparedMeasure:
    """One line of the table under the verdict: a measure, and its difference to each model that the verdicts are against."""

    on: str
    name: str
    unit: str
    rows: int
    values: list[str]
    differences: list[Difference | None]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The verdict.

    Attributes:
        sentence, more: the whole of it against the base; against what the model began from, where that is another model.
        tone: `better`, `worse` or `open`.
        models: labels of the table's columns, the judged one last; none where nothing can be compared.
    """

    sentence: str
    more: list[str]
    tone: str
    models: list[str]
    table: list[ComparedMeasure]
    verdicts: list[Verdict]

    @property
    def without_interval(self) -> bool:
        """Whether some measure has no interval."""
        return any(one.of(NO_INTERVAL) for one in self.verdicts)


def headline(results: ResultSet, lineage_: list[str]) -> Headline:
    """Args: line: the models to compare, from the base on, as `judged_line` has them."""
    verdicts_ = lineage_verdicts(results, lineage_)
    if not verdicts_:
        return Headline(
            sentence=_no_verdict(results, lineage_), more=[], tone=INCONCLUSIVE, models=[], table=[], verdicts=[]
        )
    return Headline(
        sentence=verdicts_[0].sentence,
        more=[one.sentence for one in verdicts_[1:]],
        tone=verdicts_[0].tone,
        models=[*(one.against for one in verdicts_), verdicts_[0].model],
        table=_table(verdicts_),
        verdicts=verdicts_,
    )


def judged_lineage(results: ResultSet, best: str | None = None) -> list[str]:
    """Of the first evaluation that has two models of one line, else of the first that has any. Args: best: sorted first."""
    lines = [model_lineage(results, models, best) for models in results.evaluations.values()]
    return next(
        (lineage_ for lineage_ in lines if len(lineage_) > 1), next((lineage_ for lineage_ in lines if lineage_), [])
    )


def _table(verdicts_: list[Verdict]) -> list[ComparedMeasure]:
    by_measure: dict[tuple[str, str], list[Difference | None]] = {}
    for number, verdict in enumerate(verdicts_):
        for one in verdict.differences:
            found = by_measure.setdefault((one.evaluation, one.measure.path), [None] * len(verdicts_))
            found[number] = one
    lines = []
    for found in by_measure.values():
        known = next(one for one in found if one)
        values = [one.shown(one.before) if one else "–" for one in found]
        lines.append(
            ComparedMeasure(
                on=known.measure.on,
                name=known.measure.name,
                unit=known.measure.unit,
                rows=max(one.rows for one in found if one),
                values=[*values, known.shown(known.after)],
                differences=found,
            )
        )
    # What counts first.
    return sorted(lines, key=lambda lineage_: all(one is None or one.interval is None for one in lineage_.differences))


def _no_verdict(results: ResultSet, lineage_: list[str]) -> str:
    """What can be said where no two models of one line were asked the same."""
    trained = results.of("sft", "dpo")
    if trained:
        runs = f"{trained[0].label} was" if len(trained) == 1 else f"{len(trained)} models were"
        asked = f"only {lineage_[-1]} was evaluated" if lineage_ else "nothing was evaluated"
        fell = ""
        if len(trained) == 1 and (losses := numbers(trained[0].history, "loss")):
            fell = f" Its training loss went from {decimal(losses[0])} to {decimal(losses[-1])}."
        return f"{runs} trained, and {asked}: whether that is better than before isn't known.{fell}"
    if lineage_:
        return f"Only {lineage_[-1]} was evaluated: there is nothing to compare it with."
    kept = sum(sum(corpus.counts["kept"].values()) for corpus in results.of("corpus"))
    return f"No model was trained or evaluated; {whole(kept)} rows are ready."


def cards(results: ResultSet) -> list[Card]:
    """What it cost, and how well the machines were used; a card that would be empty isn't there."""
    found = [
        _time_card(results),
        _gpu_card(results),
        _tokens_card(results),
        _speed_card(results),
        _packing_card(results),
    ]
    return [card for card in found if card]


def model_lineage(results: ResultSet, models: list[ScoredModel], best: str | None = None) -> list[str]:
    """Of the models of one evaluation the best DPO model, what it was made from, and what that was made from.

    "Best" is the one that is named, if it is among them; else by exact match, or held-out loss where no answer can be checked;
    without DPO, the best SFT model.
    """
    labels = {scored.model for scored in models}
    for kind in ("dpo", "sft", "base"):
        if candidates := [scored for scored in models if scored.model.startswith(f"{kind}:")]:
            first = best if best in labels else max(candidates, key=_quality).model
            break
    else:
        return []
    lineage_ = [first]
    trained = {result.label: result for stage in ("sft", "dpo") for result in results.of(stage)}
    # A run may go on from another one's result.
    while lineage_[-1] in trained and (sources := results.made_from(trained[lineage_[-1]], "model")):
        lineage_.append(sources[0].label)
    if lineage_[-1].startswith("sft:"):
        # The evaluations call a base by the run that starts from it.
        lineage_.append(lineage_[-1].replace("sft:", "base:", 1))
    return [label for label in reversed(lineage_) if label in labels]


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
    alone = sum(flow.train.documents * flow.length for flow in packs)
    note = f"of all train rows is tokens; one document per row would be {percent(tokens / alone)}"
    return Card(title="Packing efficiency", value=percent(tokens / capacity), note=note)


def _time_card(results: ResultSet) -> Card | None:
    timed: list[Result] = [result for result in results.all if result.run.get("seconds")]
    if not timed:
        return None
    longest = max(timed, key=lambda result: result.run["seconds"])
    note = (
        f"{whole(len(timed))} jobs; the longest is {longest.stage} {longest.name}, {duration(longest.run['seconds'])}"
    )
    return Card(title="Computing time", value=duration(sum(result.run["seconds"] for result in timed)), note=note)


def _gpu_card(results: ResultSet) -> Card | None:
    """Of all attempts, as far as run.json counts those that were cut off; with the processes of the last one."""
    hours: dict[str, float] = {}
    for result in results.all:
        if is_gpu(result.run) and result.run.get("seconds"):
            device = clean(result.run["device"])
            # Passes and evaluations know the kind alone.
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
    values = sum(flow.values for flow in flows)
    without_interval = len(flows) - len(known)
    note = f"without padding, by {len(known)} {'run' if len(known) == 1 else 'runs'}, {whole(values)} steps in all"
    note += f"; {without_interval} more on raw rows, whose tokens weren't counted" if without_interval else ""
    return Card(title="Tokens trained", value=short(sum(flow.tokens for flow in known)), note=note)
