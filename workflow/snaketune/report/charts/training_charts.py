"""Charts of SFT and DPO runs: the curves that they logged, and the measurements of `calibrate`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter, StrMethodFormatter

from snaketune.publishing.results import Result, is_number
from snaketune.report.charts.style import (
    COLOURS,
    MUTED,
    Chart,
    Panel,
    Style,
    line_at,
    message,
    percentages,
    trace,
    whole_numbers,
)
from snaketune.report.compare.variants import loss_text, stopped_early
from snaketune.report.data.results import ResultSet, logged_numbers, measurements
from snaketune.text import clean, decimal, percent, short, whole, words

Styles = dict[str, Style]
# Title, axis label, number format and baseline (the value before anything is learned) of known DPO metrics.
KNOWN: dict[str, tuple[str, str, Callable[[float | None], str], float | None]] = {
    "accuracy": ("Reward accuracy", "share of pairs", percent, 0.5),
    "margin": ("Reward margin", "margin, nats × beta", decimal, 0.0),
    "chosen_reward": ("Rewards", "reward, nats × beta", decimal, 0.0),
    "kl": ("KL to the reference", "nats per response", decimal, 0.0),
    "chosen_logp": ("Log-probabilities", "nats per response", decimal, None),
    "chosen_logp_per_token": ("Log-probabilities per token", "nats per token", decimal, None),
    "chosen_tokens": ("Lengths", "tokens", decimal, None),
    "length_correlation": ("Correlation of margin and length", "correlation", decimal, 0.0),
}
# Metrics that describe the run rather than what was learned, and the x axis.
NOT_DRAWN = (
    "step", "epoch", "loss", "learning_rate", "memory_gb", "mfu", "mfu_computed", "tokens_per_second",
    "supervised_tokens_per_second", "warming_up",
)  # fmt: skip
# Of rejected completions, and of trials with activation checkpointing; and of held-out rows.
DASHED, DOTTED = (0, (3, 2)), (0, (1, 1.5))
GB = 1e9


def sft_chart(results: ResultSet, styles: Styles) -> Chart:
    """Loss and throughput of all SFT runs."""
    runs = whole_runs(results, "sft")
    panels = [curve("loss", "Training loss", "loss, nats per token", runs, styles, decimal), throughput(runs, styles)]
    return training_chart("sft", runs, styles, panels)


def dpo_chart(results: ResultSet, styles: Styles) -> Chart:
    """Loss, accuracy, margin, rewards and all other metrics that the DPO runs logged, known ones first."""
    runs = whole_runs(results, "dpo")
    losses = sorted({loss_text(run.spec["loss"]) for run in runs})
    name = f"{losses[0]} loss" if len(losses) == 1 else "loss (different kinds, not comparable)"
    panels = [curve("loss", "Training loss", name, runs, styles, decimal)]
    logged = {key for run in runs for entry in run.history for key, value in entry.items() if is_number(value)}
    # Metrics of single sources (`sources.0/margin`) would hide the others.
    logged = {key for key in logged if "/" not in key}
    # A rejected metric is drawn with the chosen one.
    drawn = {key for key in logged - set(NOT_DRAWN) if not ("rejected" in key and _other(key) in logged)}
    for key in (*(key for key in KNOWN if key in drawn), *sorted(drawn - KNOWN.keys())):
        title, axis, shown, baseline = KNOWN.get(key, (clean(words(key)).capitalize(), words(key), decimal, None))
        panels.append(curve(key, title, axis, runs, styles, shown, baseline))
    return training_chart("dpo", runs, styles, panels)


def whole_runs(results: ResultSet, stage: str) -> list[Result]:
    """The trainings of a stage without snapshots, whose curves are parts of those of their runs."""
    return [run for run in results.of(stage) if "@" not in run.name]


def _other(key: str) -> str:
    """The rejected metric of a chosen one, and the reverse.

    >>> _other("chosen_reward"), _other("logps_rejected")
    ('rejected_reward', 'logps_chosen')
    """
    return key.replace("chosen", "rejected") if "chosen" in key else key.replace("rejected", "chosen")


def training_chart(name: str, runs: list[Result], styles: Styles, panels: list[Panel | None]) -> Chart:
    calibrated = [run for run in runs if run.run.get("calibration")]
    panels += [_speed(calibrated, styles), _memory(calibrated, styles)] if calibrated else []
    drawn = [panel for panel in panels if panel] or [message("No run logged anything; see operation.log_steps.")]
    return Chart(name=name, panels=drawn, key={run.label: styles[run.label] for run in runs})


def curve(
    key: str,
    title: str,
    axis: str,
    runs: list[Result],
    styles: Styles,
    shown: Callable[[float | None], str],
    baseline: float | None = None,
) -> Panel | None:
    """A line per run, a dashed one of the rejected completions for a metric of the chosen ones, and a dotted one of held-out
    rows, with a vertical line where the loss of a single run is lowest before it rises.

    The title has the last values; for a single run, also the first. None if no run logged `key`.
    """
    logged = [run for run in runs if logged_numbers(run, key)]
    if not logged:
        return None
    keys = {key: None} if "chosen" not in key else {key: "-", _other(key): DASHED}

    def draw(ax: Axes) -> None:
        line_at(ax, baseline)
        for run in logged:
            steps = [entry.get("step", number) for number, entry in enumerate(run.history, start=1)]
            for name, dash in keys.items():
                trace(ax, steps, [entry.get(name) for entry in run.history], styles[run.label], dash)
            if points := held_out_points(run, key):
                trace(ax, *zip(*points), styles[run.label], DOTTED)
                line_at(ax, _turn(points) if key == "loss" and len(logged) == 1 else None, vertical=True)
        completed = _completed(logged)
        known = [value for run in completed for name in keys for value in logged_numbers(run, name)]
        if len(completed) < len(logged) and known:
            # A diverged run would compress the others.
            space = 0.08 * (max(known) - min(known)) or 1.0
            ax.set_ylim(min(known) - space, max(known) + space)
        ax.set(xlabel="optimizer step", ylabel=axis)
        if shown is percent:
            percentages(ax, "y")
            ax.set_ylim(-0.03, 1.03)
        whole_numbers(ax, "x", 6)

    measured = [points for run in logged if (points := held_out_points(run, key))]
    dotted = " (held out: dotted)" if measured else ""
    if len(keys) > 1:
        return Panel(title=f"{title}: chosen (solid) and rejected (dashed){dotted}", draw=draw)
    values = [logged_numbers(run, key) for run in _completed(logged)]
    # The median of the last twentieth of the values, since single steps are noisy.
    lasts = [float(np.median(series[-max(1, len(series) // 20) :])) for series in values]
    ends = f"{shown(values[0][0])} → {shown(lasts[0])}" if len(values) == 1 else f"{_span(lasts, shown)} at the end"
    if len(logged) == 1 and measured:
        (points,) = measured
        turn = _turn(points) if key == "loss" else None
        lowest = f", lowest {shown(dict(points)[turn])} at step {turn}" if turn is not None else ""
        dotted = f"; held out (dotted): {shown(points[0][1])} → {shown(points[-1][1])}{lowest}"
    return Panel(title=f"{title}: {ends}{dotted}", draw=draw)


def _turn(points: list[tuple[int, float]]) -> int | None:
    """The step of the lowest value, if later ones are higher.

    >>> _turn([(0, 3.0), (5, 1.0), (9, 2.0)]), _turn([(0, 3.0), (5, 2.0), (9, 1.0)])
    (5, None)
    """
    step, _ = min(points, key=lambda point: point[1])
    return step if step != points[-1][0] else None


def throughput(runs: list[Result], styles: Styles, prefix: str = "") -> Panel | None:
    """Tokens per second of each run; None if no run logged them."""
    key = "tokens_per_second"
    panel = curve(key, "", "tokens per second", runs, styles, whole)
    if panel is None:
        return None

    def draw(ax: Axes) -> None:
        panel.draw(ax)
        ax.set_ylim(0, None)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    logged = [(run.run.get(f"{key}_median"), values) for run in runs if (values := logged_numbers(run, key))]
    medians = [median or float(np.median(values)) for median, values in logged]
    return replace(panel, title=f"{prefix}Throughput: median {_span(medians, whole)} tokens/s", draw=draw)


def _completed(runs: list[Result]) -> list[Result]:
    """The runs that weren't stopped early; all, if every one was."""
    return [run for run in runs if not stopped_early(run)] or runs


def _span(values: list[float], shown: Callable[[float | None], str]) -> str:
    return " to ".join(dict.fromkeys((shown(min(values)), shown(max(values)))))


def _speed(runs: list[Result], styles: Styles) -> Panel:
    """Throughput over the micro-batch size of the calibrated runs."""

    def draw(ax: Axes) -> None:
        for run in runs:
            _trials(ax, run, styles[run.label], "tokens_per_second", 1)
            for size in run.run["calibration"]["trials"]:
                if not size["fits"]:
                    # At the bottom of the axes: a size that ran out of memory has no throughput.
                    rows, bad = size["micro_batch_rows"], COLOURS["bad"][0]
                    ax.plot(rows, 0.03, "x", color=bad, transform=ax.get_xaxis_transform())
        ax.set(xlabel="rows per micro-batch (x: out of memory, ring: used)", ylabel="tokens per second")
        ax.set_ylim(0, None)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        _rows_axis(ax)

    title = "Throughput by micro-batch size"
    if len(runs) == 1 and (trial := _trial_of_run(runs[0])):
        title += f": {whole(trial['tokens_per_second'])} tokens/s with {trial['micro_batch_rows']} rows"
    return Panel(title=f"{title} (dashed: activation checkpointing)", draw=draw)


def _memory(runs: list[Result], styles: Styles) -> Panel:
    """Peak memory over the micro-batch size of the calibrated runs."""
    calibrations = [run.run["calibration"] for run in runs]

    def draw(ax: Axes) -> None:
        most = max(size["peak_bytes"] for curve in calibrations for size in curve["trials"] if size["fits"])
        for run in runs:
            _trials(ax, run, styles[run.label], "peak_bytes", GB)
            memory = run.run["calibration"]["memory_bytes"]
            # A limit far above the curves would flatten them.
            if memory and memory < 4 * most:
                ax.axhline(memory / GB, color=MUTED, linewidth=0.8, linestyle=":")
        ax.set(xlabel="rows per micro-batch", ylabel="peak memory, GB")
        ax.set_ylim(0, None)
        _rows_axis(ax)

    devices = {curve["device"]: curve["memory_bytes"] for curve in calibrations}
    on = ", ".join(f"{device}, {short(memory)}B" if memory else device for device, memory in devices.items())
    peaks = [trial["peak_bytes"] / GB for run in runs if (trial := _trial_of_run(run))]
    most = f": {decimal(max(peaks))} GB at most" if peaks else ""
    return Panel(title=f"Peak memory by micro-batch size{most} ({on})", draw=draw)


def _trials(ax: Axes, run: Result, style: Style, key: str, unit: float) -> None:
    """Draw the trials that fit in memory, and mark the one whose batch plan the run used."""
    for recomputed in (False, True):
        fit = [size for size in run.run["calibration"]["trials"] if size["fits"]]
        points = sorted(
            (size["micro_batch_rows"], size[key] / unit) for size in fit if size["gradient_checkpointing"] == recomputed
        )
        if points:
            trace(ax, *zip(*points), style, DASHED if recomputed else "-")
    if trial := _trial_of_run(run):
        ring = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": style.hex}
        ax.plot(trial["micro_batch_rows"], trial[key] / unit, "o", **ring)


def _trial_of_run(run: Result) -> dict[str, Any] | None:
    """The measurement of the batch plan that the run used; None if it wasn't measured or didn't fit."""
    wanted = {key: run.run.get(key) for key in ("micro_batch_rows", "gradient_checkpointing")}
    fit = (trial for trial in run.run["calibration"]["trials"] if trial["fits"])
    return next((trial for trial in fit if wanted.items() <= trial.items()), None)


def _rows_axis(ax: Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.grid(False, axis="x")


def held_out_points(run: Result, key: str) -> list[tuple[int, float]]:
    """The step and value of each measurement of a metric."""
    return [(point["step"], point[key]) for point in measurements(run) if is_number(point.get(key))]
