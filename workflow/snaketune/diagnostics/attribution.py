"""Compute how much of a speed-up each change explains, from interleaved trials: the work of the `diagnosis` stage.

Variants are compared within a round, in which they ran one after the other, and a figure is the median over rounds with the
lowest and the highest, so changes of the machine between rounds favour no variant. Losses are compared at equal tokens, since a
variant with longer rows has seen more tokens at the same step.

    one-at-a-time    gain of a change = its tokens/s over the baseline's
    add-one-in       gain of a change = tokens/s with it over those with all changes before it
    share            ln(gain) over the sum of all positive ones: gains multiply, so their logarithms add up

    attribution.json, table.csv, table.md, attribution.svg
"""

import csv
import io
import json
import math
from typing import Any

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.diagnostics.attribution_picture import attribution_svg
from snaketune.diagnostics.trial_files import MEASURED
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DiagnosisSpec

# The largest relative difference from the baseline's loss of a variant that counts as the same training.
COMPARABLE = 0.05
# The largest relative spread of the machine's probe between trials; above it, the machine is reported as changed.
STEADY = 0.05
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


def write_attribution(spec: DiagnosisSpec, work: WorkFolder, *, trials: list[Artifact]) -> Outcome:
    """Fill `work.payload` with the attribution as JSON, tables and a figure.

    Args:
        trials: round by round, the variants of each in their order.
    Raises:
        SnaketuneError: the baseline couldn't be measured.
    """
    measured = [json.loads(one.file(MEASURED).read_text(encoding="utf-8")) for one in trials]
    names = [one.name for one in spec.variants]
    rounds = [dict(zip(names, measured[start : start + len(names)])) for start in range(0, len(measured), len(names))]
    result = attribution(spec, rounds)
    write_json(work.payload / "attribution.json", result)
    (work.payload / "table.csv").write_text(as_csv(result), encoding="utf-8")
    table = as_markdown(result)
    (work.payload / "table.md").write_text(table, encoding="utf-8")
    (work.payload / "attribution.svg").write_text(attribution_svg(result), encoding="utf-8")
    print(table, flush=True)
    return Outcome(counts={"variants": len(names), "trials": len(trials)})


def attribution(spec: DiagnosisSpec, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return what each variant measured, and the share of its change in the gain.

    Args:
        rounds: for each round, the measurements of each variant's trial.
    Raises:
        SnaketuneError: the baseline doesn't fit on the machine.
    """
    changes = {one.name: one.changes for one in spec.variants}
    names = list(changes)
    baseline = names[0]
    if not all(one[baseline]["fits"] for one in rounds):
        raise SnaketuneError(
            f"the {baseline} doesn't fit on this machine ({rounds[0][baseline]['why']}); nothing can be compared"
        )
    fits = [name for name in names if all(one[name]["fits"] for one in rounds)]
    seen = min(_tokens_seen(one[name]) for one in rounds for name in fits)
    rows = []
    previous = baseline
    for name in names:
        row: dict[str, Any] = {"variant": name, "changes": _describe(changes[name]), "fits": name in fits, "note": ""}
        rows.append(row)
        if name not in fits:
            row["note"] = f"doesn't fit: {next(one[name]['why'] for one in rounds if not one[name]['fits'])}"
            continue
        against = previous if spec.mode == "add-one-in" else baseline
        ratios = [one[name]["tokens_per_second"] / one[against]["tokens_per_second"] for one in rounds]
        whole = [one[name]["tokens_per_second"] / one[baseline]["tokens_per_second"] for one in rounds]
        losses = [loss_at(one[name], seen) for one in rounds]
        difference = _loss_difference(losses, [loss_at(one[baseline], seen) for one in rounds])
        row |= {
            "tokens_per_second": _spread([one[name]["tokens_per_second"] for one in rounds]),
            "sequences_per_second": _spread([one[name].get("sequences_per_second", 0.0) for one in rounds]),
            "step_seconds": _spread([one[name]["step_seconds"] for one in rounds]),
            "peak_gb": _spread([one[name]["peak_bytes"] / 1e9 for one in rounds]),
            "gain_percent": _spread([100 * (ratio - 1) for ratio in ratios]),
            "over_baseline_percent": _spread([100 * (ratio - 1) for ratio in whole]),
            "log_gain": math.log(_median(ratios)),
            "comparable": difference is not None and abs(difference) <= COMPARABLE,
        }
        if None not in losses:
            row["loss"] = _spread(losses)
        if difference is None:
            row["note"] = "not comparable: its loss, or the baseline's, isn't finite"
        else:
            row["loss_off_percent"] = round(100 * difference, 2)
        if difference is not None and not row["comparable"]:
            row["note"] = f"not comparable: at the same tokens its loss differs by {100 * difference:+.1f}%"
        previous = name
    gained = sum(row["log_gain"] for row in rows if row.get("log_gain", 0) > 0)
    for row in rows:
        if "log_gain" in row:
            row["share_percent"] = round(100 * row.pop("log_gain") / gained, 1) if gained > 0 else 0.0
    fitting = [one[name] for one in rounds for name in fits]
    return {
        "mode": spec.mode,
        "repeats": len(rounds),
        "device": " and ".join(sorted({one["device"] for one in fitting})),
        "tokens_compared_at": round(seen),
        "rows": rows,
        "notes": _machine_notes(fitting),
    }


def _loss_difference(losses: list[float | None], baseline: list[float | None]) -> float | None:
    """Return the relative difference of a loss from the baseline's; None if one of them isn't finite."""
    if None in (*losses, *baseline):
        return None
    against = _median(baseline)
    return _median(losses) / against - 1 if against else 0.0 if _median(losses) == 0 else math.inf


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
    for key, what in (("matmul_flops_per_second", "matrix products"), ("copy_bytes_per_second", "copies in memory")):
        values = [one["probe"][key] for one in measured]
        off = max(values) / min(values) - 1
        if off > STEADY:
            notes.append(
                f"between trials, {what} differed by {100 * off:.0f}%: something else ran, or the clock changed"
            )
    for library in sorted({name for one in measured for name in one.get("libraries", {})}):
        versions = sorted({str(one.get("libraries", {}).get(library)) for one in measured})
        if len(versions) > 1:
            notes.append(
                f"trials ran with {library} {' and '.join(versions)}; `snakemake diagnose --forcerun trial` repeats all of them"
            )
    if len({one["device"] for one in measured}) > 1:
        notes.append("trials ran on different devices; run them again on one")
    return notes


def _describe(change: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in change.items())


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(_median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def _cells(row: dict[str, Any]) -> list[str]:
    def shown(key: str) -> str:
        value = row.get(key, "")
        if isinstance(value, dict):
            digits = 0 if value["median"] >= 1000 else 1 if key == "gain_percent" else 3
            middle, least, most = (f"{value[name]:,.{digits}f}" for name in ("median", "least", "most"))
            return middle if least == most else f"{middle} ({least} to {most})"
        return str(value)

    return [shown(key) for key in COLUMNS]


def as_markdown(result: dict[str, Any]) -> str:
    """Return a Markdown table, with the lowest and the highest value if rounds differ."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |" for row in result["rows"]]
    summary = f"{result['mode']}, {result['repeats']} rounds on {result['device']}; "
    summary += f"losses at {result['tokens_compared_at']:,} tokens."
    return "\n".join([*lines, "", summary, *(f"Note: {note}." for note in result["notes"])]) + "\n"


def as_csv(result: dict[str, Any]) -> str:
    """Return the table as CSV; a cell that a spreadsheet would take for a formula begins with an apostrophe."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(COLUMNS.values())
    for row in result["rows"]:
        table.writerow(
            f"'{cell}" if cell.startswith(FORMULAS) and not _is_number(cell) else cell for cell in _cells(row)
        )
    return written.getvalue()


def _is_number(cell: str) -> bool:
    return cell.split(" ")[0].replace(",", "").lstrip("-").replace(".", "", 1).isdigit()
