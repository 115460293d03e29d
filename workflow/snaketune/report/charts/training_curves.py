"""Charts of the SFT and DPO training curves."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from snaketune.report.charts.style import COLOURS, Chart, Panel, Style, message, trace
from snaketune.report.compare.differing_keys import loss_text
from snaketune.report.compare.variants import stopped_early
from snaketune.report.data.calibration_runs import calibration_panels
from snaketune.report.data.results import Result, ResultSet
from snaketune.report.text import clean, decimal, percent, whole, words

MUTED = COLOURS["muted"][0]
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


def sft_chart(results: ResultSet, styles: dict[str, Style]) -> Chart:
    """Loss and throughput of all SFT runs."""
    runs = results.of("sft")
    panels = [
        curve("loss", "Training loss", "loss, nats per token", runs, styles, decimal),
        throughput(runs, styles),
        *calibration_panels(runs, styles),
    ]
    return _training_chart("sft", runs, styles, panels)


def dpo_chart(results: ResultSet, styles: dict[str, Style]) -> Chart:
    """Loss, accuracy, margin, rewards and all other metrics that the DPO runs logged."""
    runs = results.of("dpo")
    losses = sorted({loss_text(run.spec["loss"]) for run in runs})
    name = f"{losses[0]} loss" if len(losses) == 1 else "loss (different kinds, not comparable)"
    panels = [curve("loss", "Training loss", name, runs, styles, decimal)]
    for key in _logged(runs):
        title, axis, shown, baseline = KNOWN.get(key, (clean(words(key)).capitalize(), words(key), decimal, None))
        if "chosen" in key:
            panels.append(
                _chosen_and_rejected(
                    key, f"{title}: chosen (solid) and rejected (dashed)", axis, runs, styles, baseline
                )
            )
        else:
            panels.append(curve(key, title, axis, runs, styles, shown, baseline))
    return _training_chart("dpo", runs, styles, [*panels, *calibration_panels(runs, styles)])


def _logged(runs: list[Result]) -> list[str]:
    """The metrics to draw, known ones first. Of a chosen/rejected pair of metrics, only the chosen one is returned."""
    logged = {key for run in runs for entry in run.history for key, value in entry.items() if _is_number(value)}
    # Metrics of single sources (`sources.0/margin`) would hide the others.
    logged = {key for key in logged if "/" not in key}
    drawn = {key for key in logged - set(NOT_DRAWN) if not ("rejected" in key and _other(key) in logged)}
    return [*(key for key in KNOWN if key in drawn), *sorted(drawn - KNOWN.keys())]


def _other(key: str) -> str:
    """The rejected metric of a chosen one, and the reverse.

    >>> _other("chosen_reward"), _other("logps_rejected")
    ('rejected_reward', 'logps_chosen')
    """
    return key.replace("chosen", "rejected") if "chosen" in key else key.replace("rejected", "chosen")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _training_chart(name: str, runs: list[Result], styles: dict[str, Style], panels: list[Panel | None]) -> Chart:
    drawn = [panel for panel in panels if panel] or [message("No run logged anything; see operation.log_steps.")]
    return Chart(name=name, panels=drawn, key={run.label: styles[run.label] for run in runs})


def curve(
    key: str,
    title: str,
    axis: str,
    runs: list[Result],
    styles: dict[str, Style],
    shown: Callable[[float | None], str],
    baseline: float | None = None,
) -> Panel | None:
    """A line per run; None if no run logged `key`. For a single run, the title has the first and the last value."""
    logged = [run for run in runs if _values(run, key)]
    if not logged:
        return None

    def draw(ax: Axes) -> None:
        if baseline is not None:
            ax.axhline(baseline, color=MUTED, linewidth=0.8, linestyle=":")
        for run in logged:
            trace(ax, _steps(run), [entry.get(key) for entry in run.history], styles[run.label])
        _fit_axis(ax, logged, (key,))
        ax.set(xlabel="optimizer step", ylabel=axis)
        if shown is percent:
            ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            ax.set_ylim(-0.03, 1.03)
        _steps_axis(ax)

    ends = {run.label: (_values(run, key)[0], _final(_values(run, key))) for run in _completed(logged)}
    if len(ends) == 1:
        first, last = next(iter(ends.values()))
        return Panel(title=f"{title}: {shown(first)} → {shown(last)}", draw=draw)
    lasts = [last for _, last in ends.values()]
    return Panel(title=f"{title}: {_span(min(lasts), max(lasts), shown)} at the end", draw=draw)


def _chosen_and_rejected(
    key: str, title: str, axis: str, runs: list[Result], styles: dict[str, Style], baseline: float | None
) -> Panel:
    """A metric of the chosen (solid) and the rejected (dashed) completions of each run."""

    def draw(ax: Axes) -> None:
        if baseline is not None:
            ax.axhline(baseline, color=MUTED, linewidth=0.8, linestyle=":")
        for run in runs:
            for name, dash in ((key, "-"), (_other(key), (0, (3, 2)))):
                trace(ax, _steps(run), [entry.get(name) for entry in run.history], styles[run.label], dash)
        _fit_axis(ax, runs, (key, _other(key)))
        ax.set(xlabel="optimizer step", ylabel=axis)
        _steps_axis(ax)

    return Panel(title=title, draw=draw)


def throughput(runs: list[Result], styles: dict[str, Style]) -> Panel | None:
    panel = curve("tokens_per_second", "Throughput", "tokens per second", runs, styles, whole)
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


def _completed(runs: list[Result]) -> list[Result]:
    """The runs that weren't stopped early; all, if every one was."""
    return [run for run in runs if not stopped_early(run)] or runs


def _fit_axis(ax: Axes, runs: list[Result], keys: tuple[str, ...]) -> None:
    """Scale the y axis to the runs that weren't stopped early: a diverged run would compress the others."""
    completed = _completed(runs)
    known = [value for run in completed for key in keys for value in _values(run, key)]
    if len(completed) < len(runs) and known:
        low, high = min(known), max(known)
        space = 0.08 * (high - low) or 1.0
        ax.set_ylim(low - space, high + space)


def _span(low: float, high: float, shown: Callable[[float | None], str]) -> str:
    return shown(low) if shown(low) == shown(high) else f"{shown(low)} to {shown(high)}"


def _steps(run: Result) -> list[float]:
    return [entry.get("step", number) for number, entry in enumerate(run.history, start=1)]


def _values(run: Result, key: str) -> list[float]:
    """All logged values of `key` that are finite numbers."""
    logged: list[Any] = [entry.get(key) for entry in run.history]
    return [value for value in logged if value is not None and np.isfinite(value)]


def _final(values: list[float]) -> float:
    """The median of the last twentieth of the values, since single steps are noisy."""
    return float(np.median(values[-max(1, len(values) // 20) :]))


def _steps_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(False, axis="x")
