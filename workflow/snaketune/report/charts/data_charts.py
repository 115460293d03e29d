"""Charts of the data: lengths of texts and documents, fill of packed rows, and share of supervised tokens."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from snaketune.report.charts.style import COLOURS, Chart, Panel, message
from snaketune.report.data.corpus_flow import CorpusFlow, corpus_flows
from snaketune.report.data.histograms import Distribution, Histogram, read_distribution
from snaketune.report.data.packing_flow import PackFlow, pack_flow
from snaketune.report.data.results import ResultSet
from snaketune.report.text import percent, whole

DATA, BAD, MUTED, SURFACE = (COLOURS[name][0] for name in ("data", "bad", "muted", "surface"))
NOTHING_PACKED = "No rows are packed; the trainer pads each batch."
# Right of this share of the axis, the label of a mark is drawn to its left.
RIGHT = 0.6
CHARACTER_TICKS = 7

Packed = list[tuple[PackFlow, Distribution]]


def data_charts(results: ResultSet) -> dict[str, Chart]:
    """Charts by the stem of their file name: a panel per corpus, or per pack with packed rows."""
    packs = [(pack_flow(results, result), result) for result in results.of("pack")]
    packed = [(flow, read_distribution(result)) for flow, result in packs if flow.packed]
    charts = {}
    if results.of("corpus"):
        panels = [_characters_panel(flow) for flow in corpus_flows(results)]
        charts["characters"] = Chart(name="characters", panels=panels, key={})
    if packs:
        charts["lengths"] = _chart("lengths", packed, _lengths_panel)
        charts["packing"] = _chart("packing", packed, _fill_panel)
        charts["supervised"] = _chart("supervised", packed, _supervised_panel)
    return charts


def _chart(name: str, packed: Packed, panel: Callable[[PackFlow, Distribution], Panel]) -> Chart:
    return Chart(name=name, panels=[panel(*pack) for pack in packed] or [message(NOTHING_PACKED)], key={})


def _characters_panel(flow: CorpusFlow) -> Panel:
    """A histogram with bins of doubling width, drawn as bars of equal width."""
    rows = np.array(flow.characters["rows"] if flow.characters else [], np.int64)
    if not rows.sum():
        return message(f"{flow.name}: the manifest has no lengths")
    bounds = flow.characters["bounds"]
    first, last = np.flatnonzero(rows)[[0, -1]]
    half = bounds[int(np.searchsorted(np.cumsum(rows), rows.sum() / 2))]

    def draw(ax: Axes) -> None:
        positions = np.arange(first, last + 1)
        ax.bar(positions, rows[first : last + 1], 0.92, align="edge", color=DATA)
        step = -(-(len(positions) + 1) // CHARACTER_TICKS)
        ticks = np.arange(first, last + 2, step)
        # The left edge of bar i is the bound of the bar before it.
        ax.set_xticks(ticks, [whole(bounds[tick - 1]) if tick else "0" for tick in ticks])
        ax.set(xlabel="characters; each bin is twice as wide as the one before", ylabel="rows")
        _whole_numbers(ax)

    return Panel(title=f"{flow.name}: {whole(rows.sum())} rows, half of them below {whole(half)} characters", draw=draw)


def _lengths_panel(flow: PackFlow, lengths: Distribution) -> Panel:
    tokens = lengths.tokens
    unit = "parts" if any(split.split_up["rows"] for split in flow.splits) else flow.unit
    if not tokens.total:
        return message(f"{flow.title}: no {unit}")
    too_long = sum(split.dropped.get("longer_than_row", 0) for split in flow.splits)

    def draw(ax: Axes) -> None:
        _bars(ax, tokens)
        right = tokens.edges[-1]
        if right >= flow.length or too_long:
            right = flow.length
        for length in flow.lengths or [flow.length]:
            if length <= right:
                ax.axvline(length, color=BAD, linewidth=1.0)
        if right == flow.length:
            ax.annotate(
                "row length", (flow.length, 0.92), (-3, 0), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="right", fontsize=8, color=BAD,
            )  # fmt: skip
        if too_long:
            ax.bar(right * 1.06, too_long, right * 0.05, facecolor="none", edgecolor=BAD, hatch="////", linewidth=0.8)
            ax.annotate(
                f"{whole(too_long)} longer,\nnot packed", (right, too_long), (-3, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=8, color=BAD,
            )  # fmt: skip
        ax.set(xlabel=f"tokens; a row holds {whole(flow.length)}", ylabel=unit, xlim=(0, None))
        _mark(ax, tokens.median, f"median {whole(tokens.median)}", left=True)
        _mark(ax, lengths.p95, f"p95 {whole(lengths.p95)}")

    title = f"{flow.title}: {whole(tokens.total)} {unit}, median {whole(tokens.median)} tokens"
    return Panel(title=title, draw=draw)


def _fill_panel(flow: PackFlow, lengths: Distribution) -> Panel:
    metadata = flow.metadata
    if not lengths.fill.total:
        return message(f"{flow.title}: no rows to train on")
    mean = float(metadata["packing_efficiency"]) / 100

    def draw(ax: Axes) -> None:
        _bars(ax, lengths.fill)
        _shares(ax, "fill of a row: share of tokens that are not padding")
        _mark(ax, mean, f"mean {percent(mean)}")

    title = (
        f"{flow.title}: {whole(metadata['rows'])} rows are {percent(mean)} full; "
        f"lower bound {whole(metadata['lower_bound_rows'])} rows"
    )
    if flow.lengths:
        title = f"{flow.title}: {whole(metadata['rows'])} rows of {len(flow.lengths)} lengths are {percent(mean)} full"
    return Panel(title=title, draw=draw)


def _supervised_panel(flow: PackFlow, lengths: Distribution) -> Panel:
    supervised = lengths.supervised
    if not supervised.total:
        return message(f"{flow.title}: no rows to train on")

    def draw(ax: Axes) -> None:
        _bars(ax, supervised)
        _shares(ax, "supervised share of a row's tokens")
        _mark(ax, supervised.median, f"median {percent(supervised.median)}")

    title = (
        f"{flow.title}: {percent(supervised.median)} of a row's tokens are supervised (median), "
        f"from {percent(supervised.low)} to {percent(supervised.high)}"
    )
    return Panel(title=title, draw=draw)


def _bars(ax: Axes, histogram: Histogram) -> None:
    edges = histogram.edges
    ax.hist(edges[:-1], bins=edges, weights=histogram.counts, color=DATA, edgecolor=SURFACE, linewidth=0.4)
    _whole_numbers(ax)


def _shares(ax: Axes, label: str) -> None:
    ax.set(xlabel=label, ylabel="rows", xlim=(-0.02, 1.02))
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _mark(ax: Axes, at: float, text: str, left: bool | None = None) -> None:
    """Draw a dotted line with a label above it, on the side with more space."""
    ax.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
    if left is None:
        left = at > RIGHT * ax.get_xlim()[1]
    ax.text(
        at, 1.0, f"{text} " if left else f" {text}", transform=ax.get_xaxis_transform(),
        va="bottom", ha="right" if left else "left", fontsize=8, color=MUTED,
    )  # fmt: skip


def _whole_numbers(ax: Axes) -> None:
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(False, axis="x")
