"""The charts of training: SFT and DPO curves."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from snaketune.report.calibration import calibration_panels
from snaketune.report.drawing import COLOURS, Chart, Panel, Style, message, trace
from snaketune.report.findings import Findings, Result
from snaketune.report.text import decimal, percent, whole

MUTED = COLOURS["muted"][0]


def sft_chart(findings: Findings, styles: dict[str, Style]) -> Chart:
    """Loss and throughput of all SFT runs."""
    runs = findings.of("sft")
    panels = [
        _curve("loss", "Training loss", "loss, nats per token", runs, styles, decimal),
        _throughput(runs, styles),
        *calibration_panels(runs, styles),
    ]
    return _training_chart("sft", runs, styles, panels)


def dpo_chart(findings: Findings, styles: dict[str, Style]) -> Chart:
    """Loss, accuracy, margin and rewards of all DPO runs."""
    runs = findings.of("dpo")
    losses = sorted({run.spec["loss"] for run in runs})
    name = f"{losses[0]} loss" if len(losses) == 1 else "loss (of different kinds, not comparable)"
    panels = [
        _curve("loss", "Training loss", name, runs, styles, decimal),
        _curve("accuracy", "Pairs whose chosen answer gains more", "share of pairs", runs, styles, percent, line=0.5),
        _curve("margin", "Margin, chosen over rejected", "margin, nats × beta", runs, styles, decimal, line=0.0),
        _rewards(runs, styles),
        *calibration_panels(runs, styles),
    ]
    return _training_chart("dpo", runs, styles, panels)


def _training_chart(name: str, runs: list[Result], styles: dict[str, Style], panels: list[Panel | None]) -> Chart:
    drawn = [panel for panel in panels if panel] or [message("No run logged anything; see operation.log_steps.")]
    return Chart(name=name, panels=drawn, key={run.label: styles[run.label] for run in runs})


def _curve(
    key: str,
    title: str,
    axis: str,
    runs: list[Result],
    styles: dict[str, Style],
    shown: Callable[[float | None], str],
    line: float | None = None,
) -> Panel | None:
    """A line per run; None if no run logged `key`. The title says where it began and ended, if there is one run."""
    logged = [run for run in runs if _values(run, key)]
    if not logged:
        return None

    def draw(ax: Axes) -> None:
        if line is not None:
            ax.axhline(line, color=MUTED, linewidth=0.8, linestyle=":")
        for run in logged:
            trace(ax, _steps(run), [entry.get(key) for entry in run.history], styles[run.label])
        ax.set(xlabel="optimizer step", ylabel=axis)
        if shown is percent:
            ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            ax.set_ylim(-0.03, 1.03)
        _steps_axis(ax)

    ends = {run.label: (_values(run, key)[0], _end(_values(run, key))) for run in logged}
    if len(logged) == 1:
        first, last = next(iter(ends.values()))
        return Panel(title=f"{title}: {shown(first)} → {shown(last)}", draw=draw)
    lasts = [last for _, last in ends.values()]
    return Panel(title=f"{title}: {_span(min(lasts), max(lasts), shown)} at the end", draw=draw)


def _rewards(runs: list[Result], styles: dict[str, Style]) -> Panel | None:
    logged = [run for run in runs if _values(run, "chosen_reward")]
    if not logged:
        return None

    def draw(ax: Axes) -> None:
        ax.axhline(0.0, color=MUTED, linewidth=0.8, linestyle=":")
        for run in logged:
            for key, dash in (("chosen_reward", "-"), ("rejected_reward", (0, (3, 2)))):
                trace(ax, _steps(run), [entry.get(key) for entry in run.history], styles[run.label], dash)
        ax.set(xlabel="optimizer step", ylabel="reward, nats × beta")
        _steps_axis(ax)

    return Panel(title="Rewards: chosen (solid) and rejected (dashed)", draw=draw)


def _throughput(runs: list[Result], styles: dict[str, Style]) -> Panel | None:
    panel = _curve("tokens_per_second", "Throughput", "tokens per second", runs, styles, whole)
    if panel is None:
        return None

    def draw(ax: Axes) -> None:
        panel.draw(ax)
        ax.set_ylim(0, None)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    medians = [
        run.run.get("tokens_per_second_median") or float(np.median(values))
        for run in runs
        if (values := _values(run, "tokens_per_second"))
    ]
    return Panel(title=f"Throughput: median {_span(min(medians), max(medians), whole)} tokens/s", draw=draw)


def _span(low: float, high: float, shown: Callable[[float | None], str]) -> str:
    return shown(low) if shown(low) == shown(high) else f"{shown(low)} to {shown(high)}"


def _steps(run: Result) -> list[float]:
    return [entry.get("step", number) for number, entry in enumerate(run.history, start=1)]


def _values(run: Result, key: str) -> list[float]:
    """What was logged and is a number."""
    found: list[Any] = [entry.get(key) for entry in run.history]
    return [value for value in found if value is not None and np.isfinite(value)]


def _end(values: list[float]) -> float:
    """The median of the last twentieth: one noisy step says little about where a run ended."""
    return float(np.median(values[-max(1, len(values) // 20) :]))


def _steps_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(False, axis="x")
