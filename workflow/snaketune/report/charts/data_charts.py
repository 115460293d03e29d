"""Charts of the data: lengths of texts and documents, fill of packed rows, and share of supervised tokens.

Shapes: D documents, R train rows.
"""

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes

from snaketune.report.charts.style import COLOURS, MUTED, Chart, Panel, message, percentages, whole_numbers
from snaketune.report.data.corpus_flow import CorpusFlow, corpus_flows
from snaketune.report.data.packing_flow import PackFlow, pack_flows
from snaketune.report.data.results import ResultSet
from snaketune.report.data.sampled import SampledTable, Selection, sampled_tables, selections
from snaketune.tables import read_table
from snaketune.text import decimal, percent, whole

BINS, SHARE_BINS = 30, 25

DATA, BAD, SURFACE = (COLOURS[name][0] for name in ("data", "bad", "surface"))
# Right of this share of the axis, the label of a mark is drawn to its left.
RIGHT = 0.6
CHARACTER_TICKS = 7


def data_charts(results: ResultSet) -> dict[str, Chart]:
    """Charts by the stem of their file name: a panel per corpus, or per pack with packed rows."""
    panels = {}
    if results.of("corpus"):
        panels["characters"] = [_characters_panel(flow) for flow in corpus_flows(results)]
    if flows := pack_flows(results):
        drawn = [_pack_panels(flow) for flow in flows if flow.packed]
        nothing = message("No rows are packed; the trainer pads each batch.")
        for number, name in enumerate(("lengths", "packing", "supervised")):
            panels[name] = [of_pack[number] for of_pack in drawn] or [nothing]
    if sampled := sampled_tables(results):
        panels["sampled"] = [panel for table in sampled for panel in (_responses_panel(table), _distinct_panel(table))]
    if selected := selections(results):
        panels["selected"] = [_solved_panel(selection) for selection in selected]
    return {name: Chart(name=name, panels=drawn, key={}) for name, drawn in panels.items()}


def _pack_panels(flow: PackFlow) -> tuple[Panel, Panel, Panel]:
    lengths_D, fill_R, supervised_R = read_shares(flow)
    return _lengths_panel(flow, lengths_D), _fill_panel(flow, fill_R), _supervised_panel(flow, supervised_R)


def read_shares(flow: PackFlow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From the document index of a pack: the lengths of the documents of both splits, and for each train row the share of it
    that is tokens, and the share of these that is supervised. Raises SnaketuneError if the index is damaged."""
    rows, file = flow.metadata["rows"], flow.result.artifact.file("documents.arrow")
    table = read_table(file).select(["split", "row", "tokens", "supervised"])
    train = table.filter(pc.field("split") == "train")
    tokens_R, supervised_R = (np.bincount(train["row"], train[what], rows) for what in ("tokens", "supervised"))
    # Rows are sorted by length, shorter ones first.
    lengths = flow.lengths or {flow.length: rows}
    capacity_R = np.repeat([*lengths], [*lengths.values()])
    return table["tokens"].to_numpy(), tokens_R / capacity_R, supervised_R / np.maximum(tokens_R, 1)


def _length_edges(lengths_D: np.ndarray, longest: int) -> np.ndarray:
    """Edges of bins, up to `longest` if the longest document is above half of it, else up to the longest document."""
    high = lengths_D.max(initial=1)
    return np.linspace(0, longest if high > longest / 2 else high, BINS + 1)


def _quantile(lengths_D: np.ndarray, share: float) -> float:
    """The smallest length that at least `share` of the documents don't exceed."""
    return float(np.quantile(lengths_D, share, method="inverted_cdf"))


def _characters_panel(flow: CorpusFlow) -> Panel:
    """A histogram with bins of doubling width, drawn as bars of equal width."""
    rows = np.array(flow.counts["characters"]["rows"] if flow.counts["characters"] else [], np.int64)
    if not rows.sum():
        return message(f"{flow.name}: the manifest has no lengths")
    bounds = flow.counts["characters"]["bounds"]
    first, last = np.flatnonzero(rows)[[0, -1]]
    half = bounds[int(np.searchsorted(np.cumsum(rows), rows.sum() / 2))]

    def draw(ax: Axes) -> None:
        positions = np.arange(first, last + 1)
        ax.bar(positions, rows[first : last + 1], 0.92, align="edge", color=DATA)
        ticks = np.arange(first, last + 2, -(-(len(positions) + 1) // CHARACTER_TICKS))
        # The left edge of bar i is the bound of the bar before it.
        ax.set_xticks(ticks, [whole(bounds[tick - 1]) if tick else "0" for tick in ticks])
        ax.set(xlabel="characters; each bin is twice as wide as the one before", ylabel="rows")
        whole_numbers(ax, "y", 5)

    return Panel(title=f"{flow.name}: {whole(rows.sum())} rows, half of them below {whole(half)} characters", draw=draw)


def _lengths_panel(flow: PackFlow, lengths_D: np.ndarray) -> Panel:
    unit = "parts" if any(split.counts["split"]["rows"] for split in flow.splits) else flow.unit
    if not len(lengths_D):
        return message(f"{flow.title}: no {unit}")
    too_long = sum(split.counts["dropped"].get("longer_than_row", 0) for split in flow.splits)
    edges = _length_edges(lengths_D, flow.length)
    median, p95 = (_quantile(lengths_D, share) for share in (0.5, 0.95))

    def draw(ax: Axes) -> None:
        _bars(ax, lengths_D, edges)
        right = flow.length if edges[-1] >= flow.length or too_long else edges[-1]
        for length in flow.lengths or [flow.length]:
            if length <= right:
                ax.axvline(length, color=BAD, linewidth=1.0)
        near = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": BAD}
        if right == flow.length:
            ax.annotate("row length", (flow.length, 0.92), (-3, 0), xycoords=("data", "axes fraction"), **near)
        if too_long:
            ax.bar(right * 1.06, too_long, right * 0.05, facecolor="none", edgecolor=BAD, hatch="////", linewidth=0.8)
            ax.annotate(f"{whole(too_long)} longer,\nnot packed", (right, too_long), (-3, 2), va="bottom", **near)
        ax.set(xlabel=f"tokens; a row holds {whole(flow.length)}", ylabel=unit, xlim=(0, None))
        _mark(ax, median, f"median {whole(median)}", left=True)
        _mark(ax, p95, f"p95 {whole(p95)}")

    return Panel(title=f"{flow.title}: {whole(len(lengths_D))} {unit}, median {whole(median)} tokens", draw=draw)


def _fill_panel(flow: PackFlow, fill_R: np.ndarray) -> Panel:
    mean = float(flow.metadata["packing_efficiency"]) / 100
    several = f" of {len(flow.lengths)} lengths" if flow.lengths else ""
    least = "" if flow.lengths else f"; lower bound {whole(flow.metadata['lower_bound_rows'])} rows"
    title = f"{whole(flow.metadata['rows'])} rows{several} are {percent(mean)} full{least}"
    label = "fill of a row: share of tokens that are not padding"
    return _shares_panel(flow, title, fill_R, label, mean, "mean")


def _supervised_panel(flow: PackFlow, supervised_R: np.ndarray) -> Panel:
    low, median, high = np.quantile(supervised_R, [0, 0.5, 1]).tolist() if len(supervised_R) else (0.0, 0.0, 0.0)
    title = f"{percent(median)} of a row's tokens are supervised (median), from {percent(low)} to {percent(high)}"
    return _shares_panel(flow, title, supervised_R, "supervised share of a row's tokens", median, "median")


def _shares_panel(flow: PackFlow, title: str, shares_R: np.ndarray, label: str, at: float, what: str) -> Panel:
    if not len(shares_R):
        return message(f"{flow.title}: no rows to train on")

    def draw(ax: Axes) -> None:
        _bars(ax, shares_R, np.linspace(0.0, 1.0, SHARE_BINS + 1))
        ax.set(xlabel=label, ylabel="rows", xlim=(-0.02, 1.02))
        percentages(ax, "x")
        _mark(ax, at, f"{what} {percent(at)}")

    return Panel(title=f"{flow.title}: {title}", draw=draw)


def _responses_panel(sampled: SampledTable) -> Panel:
    median = _quantile(sampled.lengths, 0.5)
    edges = _length_edges(sampled.lengths, sampled.spec["decoding"]["max_new_tokens"])

    def draw(ax: Axes) -> None:
        _bars(ax, sampled.lengths, edges)
        ax.set(xlabel="tokens", ylabel="responses", xlim=(0, None))
        _mark(ax, median, f"median {whole(median)}")

    title = f"{sampled.name}: {whole(len(sampled.lengths))} responses, {percent(sampled.truncated)} of them truncated"
    return Panel(title=title, draw=draw)


def _distinct_panel(sampled: SampledTable) -> Panel:
    counts = sampled.distinct_counts

    def draw(ax: Axes) -> None:
        ax.bar(np.arange(1, len(counts)), counts[1:], 0.92, color=DATA)
        ax.set(xlabel="distinct responses to a prompt", ylabel="prompts")
        whole_numbers(ax, "x", 8)
        whole_numbers(ax, "y", 5)

    mean = f"{np.mean(sampled.distinct):.3g} of {sampled.spec['responses']}"
    return Panel(title=f"{sampled.name}: {mean} responses to a prompt are distinct", draw=draw)


def _solved_panel(selection: Selection) -> Panel:
    solved = selection.solved
    bins, low, high = solved["prompts"], solved["low"], solved["high"]
    if not sum(bins):
        return message(f"{selection.name}: all scores are {decimal(low)}")

    def draw(ax: Axes) -> None:
        edges = np.linspace(low, high, len(bins) + 1)
        ax.bar(edges[:-1], bins, np.diff(edges) * 0.92, align="edge", color=DATA)
        ax.set(xlabel="mean score of a prompt's responses", ylabel="prompts")
        whole_numbers(ax, "y", 5)

    always, never = bins[-1] / sum(bins), bins[0] / sum(bins)
    title = f"{selection.name}: {percent(never)} of the prompts score lowest, {percent(always)} highest"
    return Panel(title=title, draw=draw)


def _bars(ax: Axes, values: np.ndarray, edges: np.ndarray) -> None:
    ax.hist(values, bins=edges, color=DATA, edgecolor=SURFACE, linewidth=0.4)
    whole_numbers(ax, "y", 5)


def _mark(ax: Axes, at: float, text: str, left: bool = False) -> None:
    """Draw a dotted line with a label above it, to its right; to its left if `left`, or if it is far right."""
    left = left or at > RIGHT * ax.get_xlim()[1]
    ax.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
    align = {"va": "bottom", "ha": "right" if left else "left", "fontsize": 8, "color": MUTED}
    ax.text(at, 1.0, f"{text} " if left else f" {text}", transform=ax.get_xaxis_transform(), **align)
