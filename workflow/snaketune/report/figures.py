"""The charts of data and training: document lengths, fill of rows, SFT and DPO curves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from snaketune.artifacts.tables import read_table
from snaketune.report.drawing import COLOURS, Chart, Panel, Style, message, trace
from snaketune.report.findings import Findings, Result
from snaketune.report.flow import PackFlow, pack_flow
from snaketune.report.text import decimal, percent, whole

UNITS = {"sft": "conversations", "preference": "pairs"}
DATA, WEAK, BAD, MUTED = (COLOURS[name][0] for name in ("data", "data-weak", "bad", "muted"))
FILL_BINS = 25


def lengths_chart(findings: Findings) -> Chart:
    """How long conversations and pairs are, a panel per pack, with those that no row could hold."""
    return _packs_chart("lengths", findings, _lengths_panel, "No rows are packed, so nothing was counted in tokens.")


def _lengths_panel(flow: PackFlow, result: Result) -> Panel:
    tokens = read_table(result.artifact.file("documents.arrow"))["tokens"].to_numpy()
    unit = UNITS[flow.kind]
    too_long = sum(sum(split.dropped.values()) for split in flow.splits)
    if not len(tokens):
        return message(f"{flow.title}: no {unit}")

    def draw(ax: Axes) -> None:
        longest = int(tokens.max())
        right = flow.length if too_long or longest > flow.length / 2 else longest
        ax.hist(tokens, bins=np.linspace(0, right, 31), color=DATA, edgecolor=COLOURS["surface"][0], linewidth=0.4)
        if too_long:
            ax.bar(right * 1.06, too_long, right * 0.05, facecolor="none", edgecolor=BAD, hatch="////", linewidth=0.8)
            _label(ax, right * 1.06, too_long, f"{whole(too_long)} longer,\nnot packed", BAD)
        for share, name in ((50, "median"), (95, "95%")):
            at = float(np.percentile(tokens, share))
            ax.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
            ax.text(
                at,
                1.0,
                f" {name} {whole(at)}",
                transform=ax.get_xaxis_transform(),
                va="bottom",
                fontsize=8,
                color=MUTED,
            )
        ax.set(xlabel=f"tokens; a row holds {whole(flow.length)}", ylabel=unit, xlim=(0, None))
        _whole_numbers(ax)

    title = f"{flow.title}: half of {whole(len(tokens))} {unit} have at most {whole(float(np.median(tokens)))} tokens"
    return Panel(title=title, draw=draw)


def packing_chart(findings: Findings) -> Chart:
    """How full the rows of the train splits are, a panel per pack."""
    return _packs_chart("packing", findings, _fill_panel, "No rows are packed; the trainer pads each batch.")


def _packs_chart(name: str, findings: Findings, panel: Callable[[PackFlow, Result], Panel], nothing: str) -> Chart:
    packs = [(pack_flow(findings, result), result) for result in findings.of("pack")]
    panels = [panel(flow, result) for flow, result in packs if flow.packed]
    return Chart(name=name, panels=panels or [message(nothing)], key={})


def _fill_panel(flow: PackFlow, result: Result) -> Panel:
    documents = read_table(result.artifact.file("documents.arrow"))
    train = pc.equal(documents["split"], "train").to_numpy()
    used = np.bincount(documents["row"].to_numpy()[train], weights=documents["tokens"].to_numpy()[train])
    metadata = flow.metadata
    if not len(used):
        return message(f"{flow.title}: no rows to train on")

    def draw(ax: Axes) -> None:
        ax.hist(
            100 * used / flow.length,
            bins=np.linspace(0, 100, FILL_BINS + 1),
            color=DATA,
            edgecolor=COLOURS["surface"][0],
            linewidth=0.4,
        )
        mean = float(metadata["packing_efficiency"])
        ax.axvline(mean, color=MUTED, linewidth=0.8, linestyle=":")
        text = f"mean {percent(mean / 100)} "
        ax.text(mean, 1.0, text, transform=ax.get_xaxis_transform(), va="bottom", ha="right", fontsize=8, color=MUTED)
        ax.set(xlabel="share of a row that is tokens, not padding", ylabel="rows", xlim=(0, 100))
        ax.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        _whole_numbers(ax)

    return Panel(
        title=f"{flow.title}: {whole(metadata['rows'])} rows are {percent(metadata['packing_efficiency'] / 100)} full; "
        f"at least {whole(metadata['lower_bound_rows'])} are needed",
        draw=draw,
    )


def sft_chart(findings: Findings, styles: dict[str, Style]) -> Chart:
    """Loss and throughput of all SFT runs."""
    runs = findings.of("sft")
    panels = [
        _curve("loss", "Training loss", "loss, nats per token", runs, styles, decimal),
        _throughput(runs, styles),
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


def _label(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.annotate(text, (x, y), (-6, 2), textcoords="offset points", ha="right", va="bottom", fontsize=8, color=colour)


def _whole_numbers(ax: Axes) -> None:
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(False, axis="x")


def _steps_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(False, axis="x")
