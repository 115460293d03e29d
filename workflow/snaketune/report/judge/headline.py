"""What the page answers first: did it work, is it better than before and by how much, and what did it cost."""

from dataclasses import dataclass, field

from snaketune.report.data.packing_flow import pack_flows, training_flows
from snaketune.report.data.results import Findings, Result, Scored
from snaketune.report.judge.facts import is_gpu, numbers
from snaketune.report.judge.verdict import OPEN, UNCOUNTED, Difference, Verdict, verdicts
from snaketune.report.text import clean, decimal, duration, percent, short, whole


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number, or one per model, and what it means."""

    title: str
    value: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Compared:
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
    table: list[Compared]
    verdicts: list[Verdict]

    @property
    def uncounted(self) -> bool:
        """Whether some measure has no interval."""
        return any(one.of(UNCOUNTED) for one in self.verdicts)


def headline(findings: Findings, line: list[str]) -> Headline:
    """Args: line: the models to compare, from the base on, as `judged_line` has them."""
    told = verdicts(findings, line)
    if not told:
        return Headline(sentence=_unjudged(findings, line), more=[], tone=OPEN, models=[], table=[], verdicts=[])
    return Headline(
        sentence=told[0].sentence,
        more=[one.sentence for one in told[1:]],
        tone=told[0].tone,
        models=[*(one.against for one in told), told[0].model],
        table=_table(told),
        verdicts=told,
    )


def judged_line(findings: Findings, best: str | None = None) -> list[str]:
    """Of the first evaluation that has two models of one line, else of the first that has any. Args: best: sorted first."""
    lines = [lineage(findings, models, best) for models in findings.evaluations.values()]
    return next((line for line in lines if len(line) > 1), next((line for line in lines if line), []))


def _table(told: list[Verdict]) -> list[Compared]:
    by_measure: dict[tuple[str, str], list[Difference | None]] = {}
    for number, verdict in enumerate(told):
        for one in verdict.differences:
            found = by_measure.setdefault((one.evaluation, one.measure.path), [None] * len(told))
            found[number] = one
    lines = []
    for found in by_measure.values():
        known = next(one for one in found if one)
        values = [one.shown(one.before) if one else "–" for one in found]
        lines.append(
            Compared(
                on=known.measure.on,
                name=known.measure.name,
                unit=known.measure.unit,
                rows=max(one.rows for one in found if one),
                values=[*values, known.shown(known.after)],
                differences=found,
            )
        )
    # What counts first.
    return sorted(lines, key=lambda line: all(one is None or one.interval is None for one in line.differences))


def _unjudged(findings: Findings, line: list[str]) -> str:
    """What can be said where no two models of one line were asked the same."""
    trained = findings.of("sft", "dpo")
    if trained:
        runs = f"{trained[0].label} was" if len(trained) == 1 else f"{len(trained)} models were"
        asked = f"only {line[-1]} was evaluated" if line else "nothing was evaluated"
        fell = ""
        if len(trained) == 1 and (losses := numbers(trained[0].history, "loss")):
            fell = f" Its training loss went from {decimal(losses[0])} to {decimal(losses[-1])}."
        return f"{runs} trained, and {asked}: whether that is better than before isn't known.{fell}"
    if line:
        return f"Only {line[-1]} was evaluated: there is nothing to compare it with."
    kept = sum(sum(corpus.counts["kept"].values()) for corpus in findings.of("corpus"))
    return f"No model was trained or evaluated; {whole(kept)} rows are ready."


def cards(findings: Findings) -> list[Card]:
    """What it cost, and how well the machines were used; a card that would be empty isn't there."""
    found = [
        _time_card(findings),
        _gpu_card(findings),
        _tokens_card(findings),
        _speed_card(findings),
        _packing_card(findings),
    ]
    return [card for card in found if card]


def lineage(findings: Findings, models: list[Scored], best: str | None = None) -> list[str]:
    """Of the models of one evaluation the best DPO model, what it was made from, and what that was made from.

    "Best" is the one that is named, if it is among them; else by exact match, or held-out loss where no answer can be checked;
    without DPO, the best SFT model.
    """
    labels = {scored.model for scored in models}
    for kind in ("dpo", "sft", "base"):
        if candidates := [scored for scored in models if scored.model.startswith(f"{kind}:")]:
            first = best if best in labels else max(candidates, key=_goodness).model
            break
    else:
        return []
    line = [first]
    trained = {result.label: result for stage in ("sft", "dpo") for result in findings.of(stage)}
    # A run may go on from another one's result.
    while line[-1] in trained and (sources := findings.made_from(trained[line[-1]], "model")):
        line.append(sources[0].label)
    if line[-1].startswith("sft:"):
        # The evaluations call a base by the run that starts from it.
        line.append(line[-1].replace("sft:", "base:", 1))
    return [label for label in reversed(line) if label in labels]


def _goodness(scored: Scored) -> tuple[float, float]:
    entries = list((scored.scores.get("conversations") or {}).values())
    shares = [share for entry in entries if (share := (entry.get("exact_match") or {}).get("share")) is not None]
    losses = [loss for entry in entries if (loss := entry.get("held_out_loss")) is not None]
    return sum(shares), -sum(losses)


def _speed_card(findings: Findings) -> Card | None:
    timed = [result for result in findings.of("sft", "dpo") if result.run.get("tokens_per_second_median")]
    if not timed:
        return None
    steps = []
    for stage in ("sft", "dpo"):
        if fastest := [result.run["tokens_per_second_median"] for result in timed if result.stage == stage]:
            steps.append((stage, short(max(fastest))))
    devices = sorted({str(result.run.get("device", "")) for result in timed} - {""})
    return Card(title="Tokens per second", steps=steps, note=f"median, without padding, on {', '.join(devices) or '–'}")


def _packing_card(findings: Findings) -> Card | None:
    packs = [flow for flow in pack_flows(findings) if flow.packed and flow.train.capacity]
    if not packs:
        return None
    tokens, capacity = (sum(values) for values in zip(*((flow.train.tokens, flow.train.capacity) for flow in packs)))
    alone = sum(flow.train.pieces * flow.length for flow in packs)
    note = f"of all train rows is tokens; one document per row would be {percent(tokens / alone)}"
    return Card(title="Packing efficiency", value=percent(tokens / capacity), note=note)


def _time_card(findings: Findings) -> Card | None:
    timed: list[Result] = [result for result in findings.results if result.run.get("seconds")]
    if not timed:
        return None
    longest = max(timed, key=lambda result: result.run["seconds"])
    note = (
        f"{whole(len(timed))} jobs; the longest is {longest.stage} {longest.name}, {duration(longest.run['seconds'])}"
    )
    return Card(title="Computing time", value=duration(sum(result.run["seconds"] for result in timed)), note=note)


def _gpu_card(findings: Findings) -> Card | None:
    """Of all attempts, as far as run.json counts those that were cut off; with the processes of the last one."""
    hours: dict[str, float] = {}
    for result in findings.results:
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


def _tokens_card(findings: Findings) -> Card | None:
    flows = training_flows(findings)
    known = [flow for flow in flows if flow.tokens]
    if not known:
        return None
    steps = sum(flow.steps for flow in flows)
    uncounted = len(flows) - len(known)
    note = f"without padding, by {len(known)} {'run' if len(known) == 1 else 'runs'}, {whole(steps)} steps in all"
    note += f"; {uncounted} more on raw rows, whose tokens weren't counted" if uncounted else ""
    return Card(title="Tokens trained", value=short(sum(flow.tokens for flow in known)), note=note)
