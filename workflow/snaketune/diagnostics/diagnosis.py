"""The `diagnosis` stage: how much of a speed-up each change explains, from interleaved trials.

Variants are compared within a round, in which they ran one after the other, and a figure is the median over rounds with the
lowest and the highest, so changes of the machine between rounds favour no variant. Losses are compared at equal tokens, since a
variant with longer rows has seen more tokens at the same step.

    one-at-a-time    gain of a change = its tokens/s over the baseline's
    add-one-in       gain of a change = tokens/s with it over those with all changes before it
    share            ln(gain) over the sum of all positive ones: gains multiply, so their logarithms add up

    attribution.json, table.csv, table.md, attribution.svg
    learning_rates.json, learning_rates.svg    see `diagnostics.learning_rates`
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.diagnostics.trial_files import MEASURED
from snaketune.errors import SnaketuneError
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DiagnosisSpec

STAGE = Stage(
    module=__name__,
    spec=DiagnosisSpec,
    payload="attribution",
    inputs={"trials": any_number("trial"), "learning_rates": any_number("trial")},
    libraries=libraries.always("matplotlib"),
)

# The largest relative difference from the baseline's loss of a variant that counts as the same training.
COMPARABLE = 0.05
# The largest relative spread of the machine's probe between trials; above it, the machine is reported as changed.
STEADY = 0.05
PROBES = {"matmul_flops_per_second": "matrix products", "copy_bytes_per_second": "copies in memory"}
# Spreadsheets take a cell that begins with one of these for a formula.
FORMULAS = ("=", "+", "-", "@", "\t", "\r")

COLUMNS = {
    "variant": "variant",
    "changes": "changes",
    "tokens_per_second": "tokens/s",
    "gain_percent": "gain %",
    "share_percent": "share of the gain %",
    "sequences_per_second": "sequences/s",
    "peak_gb": "memory GB",
    "loss": "loss at equal tokens",
    "note": "note",
}


def build(
    spec: DiagnosisSpec, work: WorkFolder, *, trials: Sequence[Artifact] = (), learning_rates: Sequence[Artifact] = ()
) -> Outcome:
    """Fill `work.payload` with the attribution, and the learning rates that were tested.

    Args:
        trials: round by round, the variants of each in their order.
        learning_rates: the trial that tests them, if any.
    """
    from snaketune.diagnostics.learning_rates import write_learning_rates

    if trials:
        _write_attribution(spec, work, trials)
    for one in learning_rates:
        write_learning_rates(json.loads(one.file(MEASURED).read_text(encoding="utf-8")), work.payload)
    return Outcome(counts={"variants": len(spec.variants), "trials": len(trials) + len(learning_rates)})


def _write_attribution(spec: DiagnosisSpec, work: WorkFolder, trials: Sequence[Artifact]) -> None:
    from snaketune.diagnostics.attribution_picture import attribution_svg

    measured = (json.loads(one.file(MEASURED).read_text(encoding="utf-8")) for one in trials)
    names = [one.name for one in spec.variants]
    rounds = [{name: next(measured) for name in names} for _ in range(len(trials) // len(names))]
    result = attribution(spec, rounds)
    table = as_markdown(result)
    write_json(work.payload / "attribution.json", result)
    for name, text in {
        "table.csv": as_csv(result),
        "table.md": table,
        "attribution.svg": attribution_svg(result),
    }.items():
        (work.payload / name).write_text(text, encoding="utf-8")
    print(table, flush=True)


def attribution(spec: DiagnosisSpec, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return what each variant measured, and the share of its change in the gain; SnaketuneError if the baseline doesn't fit.

    Args:
        rounds: for each round, the measurements of each variant's trial.
    """
    by_name = {one.name: [trials[one.name] for trials in rounds] for one in spec.variants}
    fitting = {name: trials for name, trials in by_name.items() if all(one["fits"] for one in trials)}
    baseline = spec.variants[0].name
    if baseline not in fitting:
        raise SnaketuneError(
            f"the {baseline} doesn't fit on this machine ({by_name[baseline][0]['why']}); nothing can be compared"
        )
    seen = min(_tokens_seen(one) for trials in fitting.values() for one in trials)
    rows, log_gains, previous = [], {}, baseline
    for variant in spec.variants:
        name, trials = variant.name, by_name[variant.name]
        changes = ", ".join(f"{key}: {json.dumps(value)}" for key, value in variant.changes.items())
        row: dict[str, Any] = {"variant": name, "changes": changes, "fits": name in fitting, "note": ""}
        rows.append(row)
        if name not in fitting:
            row["note"] = f"doesn't fit: {next(one['why'] for one in trials if not one['fits'])}"
            continue
        ratios = _ratios(trials, by_name[previous if spec.mode == "add-one-in" else baseline])
        whole = _ratios(trials, by_name[baseline])
        row |= {
            "tokens_per_second": _spread([one["tokens_per_second"] for one in trials]),
            "sequences_per_second": _spread([one.get("sequences_per_second", 0.0) for one in trials]),
            "step_seconds": _spread([one["step_seconds"] for one in trials]),
            "peak_gb": _spread([one["peak_bytes"] / 1e9 for one in trials]),
            "gain_percent": _spread([100 * (ratio - 1) for ratio in ratios]),
            "over_baseline_percent": _spread([100 * (ratio - 1) for ratio in whole]),
            **_loss_figures(trials, by_name[baseline], seen),
        }
        log_gains[name] = math.log(median(ratios))
        previous = name
    gained = sum(gain for gain in log_gains.values() if gain > 0)
    for row in rows:
        if row["fits"]:
            row["share_percent"] = round(100 * log_gains[row["variant"]] / gained, 1) if gained > 0 else 0.0
    compared = [one for trials in fitting.values() for one in trials]
    return {
        "mode": spec.mode,
        "repeats": len(rounds),
        "device": " and ".join(sorted({one["device"] for one in compared})),
        "tokens_compared_at": round(seen),
        "rows": rows,
        "notes": _machine_notes(compared),
    }


def _ratios(trials: list[dict[str, Any]], against: list[dict[str, Any]]) -> list[float]:
    return [one["tokens_per_second"] / other["tokens_per_second"] for one, other in zip(trials, against)]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def _loss_figures(trials: list[dict[str, Any]], baseline: list[dict[str, Any]], tokens: float) -> dict[str, Any]:
    """Return the loss of a variant after this many tokens, and whether it is comparable with the baseline's."""
    losses, against = ([loss_at(one, tokens) for one in some] for some in (trials, baseline))
    figures = {} if None in losses else {"loss": _spread(losses)}
    if None in (*losses, *against):
        return figures | {"comparable": False, "note": "not comparable: its loss, or the baseline's, isn't finite"}
    loss, usual = median(losses), median(against)
    difference = loss / usual - 1 if usual else 0.0 if loss == 0 else math.inf
    figures |= {"loss_off_percent": round(100 * difference, 2), "comparable": abs(difference) <= COMPARABLE}
    if not figures["comparable"]:
        figures["note"] = f"not comparable: at the same tokens its loss differs by {100 * difference:+.1f}%"
    return figures


def loss_at(measured: dict[str, Any], tokens: float) -> float | None:
    """Return the mean loss of a trial after this many tokens, interpolated between windows; None if it isn't finite.

    >>> windows = [{"tokens": 100, "loss": 4.0}, {"tokens": 100, "loss": 3.0}]
    >>> loss_at({"tokens_in_warmup": 50, "windows": windows}, 150)
    3.5
    """
    seen, previous = float(measured["tokens_in_warmup"]), None
    for window in measured["windows"]:
        # A window's loss belongs to its middle.
        middle = seen + window["tokens"] / 2
        seen += window["tokens"]
        if middle >= tokens:
            if previous is None:
                return window["loss"]
            if None in (previous[1], window["loss"]):
                return None
            share = (tokens - previous[0]) / (middle - previous[0])
            return previous[1] + share * (window["loss"] - previous[1])
        previous = middle, window["loss"]
    return previous[1]


def _tokens_seen(measured: dict[str, Any]) -> float:
    """Return the tokens seen up to the middle of the last window."""
    whole = measured["tokens_in_warmup"] + sum(window["tokens"] for window in measured["windows"])
    return whole - measured["windows"][-1]["tokens"] / 2


def _machine_notes(measured: list[dict[str, Any]]) -> list[str]:
    """Return notes on changes of the machine, its libraries or its device between trials."""
    notes = []
    for key, what in PROBES.items():
        values = [one["probe"][key] for one in measured]
        if (off := max(values) / min(values) - 1) > STEADY:
            changed = f"{what} differed by {100 * off:.0f}%: something else ran, or the clock changed"
            notes.append(f"between trials, {changed}")
    for library in sorted({name for one in measured for name in one.get("libraries", {})}):
        versions = sorted({str(one.get("libraries", {}).get(library)) for one in measured})
        if len(versions) > 1:
            ran = f"trials ran with {library} {' and '.join(versions)}"
            notes.append(f"{ran}; `snakemake diagnose --forcerun trial` repeats all of them")
    if len({one["device"] for one in measured}) > 1:
        notes.append("trials ran on different devices; run them again on one")
    return notes


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, dict):
        return str(value)
    digits = 0 if value["median"] >= 1000 else 1 if key == "gain_percent" else 3
    middle, least, most = (f"{value[name]:,.{digits}f}" for name in ("median", "least", "most"))
    return middle if least == most else f"{middle} ({least} to {most})"


def as_markdown(result: dict[str, Any]) -> str:
    """Return a Markdown table, with the lowest and the highest value if rounds differ."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in result["rows"]:
        lines.append("| " + " | ".join(_cell(row, key).replace("|", "\\|") for key in COLUMNS) + " |")
    summary = f"{result['mode']}, {result['repeats']} rounds on {result['device']}; "
    summary += f"losses at {result['tokens_compared_at']:,} tokens."
    return "\n".join([*lines, "", summary, *(f"Note: {note}." for note in result["notes"])]) + "\n"


def as_csv(result: dict[str, Any]) -> str:
    """Return the table as CSV; a cell that a spreadsheet would take for a formula begins with an apostrophe."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(COLUMNS.values())
    for row in result["rows"]:
        cells = [_cell(row, key) for key in COLUMNS]
        table.writerow(f"'{cell}" if cell.startswith(FORMULAS) and not _is_number(cell) else cell for cell in cells)
    return written.getvalue()


def _is_number(cell: str) -> bool:
    return cell.split(" ")[0].replace(",", "").lstrip("-").replace(".", "", 1).isdigit()
