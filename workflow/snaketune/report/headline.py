"""The page's first line of numbers: how good it got, how fast it ran, how little was wasted."""

from dataclasses import dataclass, field

from snaketune.report.findings import Findings, Result, Scored
from snaketune.report.flow import pack_flows
from snaketune.report.scores import Measure, measures
from snaketune.report.text import duration, percent, short, whole


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number, or one per model, and what it means."""

    title: str
    value: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


def cards(findings: Findings, best: str | None = None) -> list[Card]:
    """What is known; a card that would be empty isn't there. Args: best: the model that the report sorts first."""
    found = [*_score_cards(findings, best), _speed_card(findings), _packing_card(findings), _time_card(findings)]
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


def _score_cards(findings: Findings, best: str | None) -> list[Card]:
    """Of the first evaluation and its first corpora; the table below has all."""
    if not findings.evaluations:
        return []
    models = next(iter(findings.evaluations.values()))
    line = lineage(findings, models, best)
    table = measures(models)
    cards_ = []
    if measure := _first(table, "exact match") or _first(table, "held-out loss"):
        size = next((n for n in measure.sizes.values() if n), None)
        note = f"of {whole(size)} held-out prompts of {measure.on}" if size else f"on {measure.on}, nats per token"
        cards_.append(Card(title=measure.name.capitalize(), steps=_steps(measure, line), note=note))
    # Per token, since a whole answer is the likelier for being short, even to a model that has learned nothing.
    if measure := _first(table, "chosen is likelier, per token"):
        size = next((n for n in measure.sizes.values() if n), 0)
        note = f"chosen answer likelier per token than the rejected, {whole(size)} pairs of {measure.on}"
        gained = _first(table, "chosen gained more than rejected")
        if gained and line and gained.values.get(line[-1]) is not None:
            note += f"; gained more in {gained.shown(line[-1])}"
        cards_.append(Card(title="Preference accuracy", steps=_steps(measure, line), note=note))
    return cards_


def _first(table: list[Measure], name: str) -> Measure | None:
    return next((measure for measure in table if measure.name == name), None)


def _steps(measure: Measure, line: list[str]) -> list[tuple[str, str]]:
    return [(label, measure.shown(label)) for label in line]


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
