"""Charts of the measurements of `calibrate`: throughput and memory over the micro-batch size, and the chosen size."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter, StrMethodFormatter

from snaketune.report.charts.style import COLOURS, Panel, Style, trace
from snaketune.report.data.results import Result
from snaketune.report.text import decimal, short, whole

GB = 1e9
# With activation checkpointing.
DASHED = (0, (3, 2))


def calibration_panels(runs: list[Result], styles: dict[str, Style]) -> list[Panel]:
    """Panels of throughput and memory of the calibrated runs; empty if there are none."""
    measured = [run for run in runs if run.run.get("calibration")]
    return [_speed(measured, styles), _memory(measured, styles)] if measured else []


def batch_plan_facts(run: dict[str, Any]) -> list[str]:
    """The batch plan of a run in words: rows per micro-batch and activation checkpointing."""
    rows = run.get("micro_batch_rows")
    if not rows:
        return []
    what = f"micro-batches of {rows} row{'s' if rows > 1 else ''}"
    if run.get("gradient_checkpointing"):
        what += ", activation checkpointing"
    slowdown = run.get("slower_than_best_percent")
    return [what + (f" ({slowdown:.0f}% slower than the best measured)" if slowdown and slowdown >= 1 else "")]


def _speed(runs: list[Result], styles: dict[str, Style]) -> Panel:
    def draw(ax: Axes) -> None:
        for run in runs:
            _lines(ax, run, styles[run.label], "tokens_per_second", 1)
            _mark_chosen(ax, run, styles[run.label], "tokens_per_second", 1)
            for one in run.run["calibration"]["trials"]:
                if not one["fits"]:
                    # At the bottom of the axes: a size that ran out of memory has no throughput.
                    ax.plot(
                        one["micro_batch_rows"], 0.03, "x", color=COLOURS["bad"][0], transform=ax.get_xaxis_transform()
                    )
        ax.set(xlabel="rows per micro-batch (x: out of memory)", ylabel="tokens per second")
        ax.set_ylim(0, None)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        _rows_axis(ax)

    trial = _trial_of_run(runs[0]) if len(runs) == 1 else None
    title = "Throughput by micro-batch size"
    if trial:
        title += f": {whole(trial['tokens_per_second'])} tokens/s with {trial['micro_batch_rows']} rows"
    return Panel(title=f"{title} (dashed: activation checkpointing)", draw=draw)


def _memory(runs: list[Result], styles: dict[str, Style]) -> Panel:
    def draw(ax: Axes) -> None:
        most = max(one["peak_bytes"] for run in runs for one in run.run["calibration"]["trials"] if one["fits"])
        for run in runs:
            _lines(ax, run, styles[run.label], "peak_bytes", GB)
            _mark_chosen(ax, run, styles[run.label], "peak_bytes", GB)
            memory = run.run["calibration"]["memory_bytes"]
            # A limit far above the curves would flatten them.
            if memory and memory < 4 * most:
                ax.axhline(memory / GB, color=COLOURS["muted"][0], linewidth=0.8, linestyle=":")
        ax.set(xlabel="rows per micro-batch", ylabel="peak memory, GB")
        ax.set_ylim(0, None)
        _rows_axis(ax)

    devices = {run.run["calibration"]["device"]: run.run["calibration"]["memory_bytes"] for run in runs}
    on = ", ".join(f"{device}, {short(memory)}B" if memory else device for device, memory in devices.items())
    peaks = [trial["peak_bytes"] / GB for run in runs if (trial := _trial_of_run(run))]
    most = f": {decimal(max(peaks))} GB at most" if peaks else ""
    return Panel(title=f"Peak memory by micro-batch size{most} ({on})", draw=draw)


def _lines(ax: Axes, run: Result, style: Style, key: str, unit: float) -> None:
    for recomputed in (False, True):
        some = sorted(
            (one["micro_batch_rows"], one[key] / unit)
            for one in run.run["calibration"]["trials"]
            if one["fits"] and one["gradient_checkpointing"] == recomputed
        )
        if some:
            trace(ax, *zip(*some), style, DASHED if recomputed else "-")


def _mark_chosen(ax: Axes, run: Result, style: Style, key: str, unit: float) -> None:
    if trial := _trial_of_run(run):
        ax.plot(
            trial["micro_batch_rows"], trial[key] / unit, "o",
            markersize=9, markerfacecolor="none", markeredgecolor=style.hex,
        )  # fmt: skip


def _trial_of_run(run: Result) -> dict[str, Any] | None:
    """The measurement of the batch plan that the run used; None if it wasn't measured or didn't fit."""
    wanted = {key: run.run.get(key) for key in ("micro_batch_rows", "gradient_checkpointing")}
    return next(
        (one for one in run.run["calibration"]["trials"] if one["fits"] and wanted.items() <= one.items()), None
    )


def _rows_axis(ax: Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.grid(False, axis="x")
