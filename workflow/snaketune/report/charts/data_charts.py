"""Charts of the data: lengths of texts and documents, fill of packed rows, and share of supervised tokens.

Columns of `documents.arrow` are read one record batch at a time: ten million documents take a few seconds and 24 bytes of
memory per row.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes

from snaketune.publishing.results import Result
from snaketune.report.charts.style import COLOURS, MUTED, Chart, Panel, message, percentages, whole_numbers
from snaketune.report.data.corpus_flow import CorpusFlow, corpus_flows
from snaketune.report.data.packing_flow import PackFlow, pack_flow
from snaketune.report.data.results import ResultSet
from snaketune.report.data.sampled import SampledTable, Selection, sampled_tables, selections
from snaketune.report.text import decimal, percent, whole
from snaketune.tables import read_table

BINS, SHARE_BINS = 30, 25

DATA, BAD, SURFACE = (COLOURS[name][0] for name in ("data", "bad", "surface"))
# Right of this share of the axis, the label of a mark is drawn to its left.
RIGHT = 0.6
CHARACTER_TICKS = 7


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`; `low` and `high` are the smallest and the largest value."""

    edges: np.ndarray
    counts: np.ndarray
    total: int
    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Histograms of one pack.

    Attributes:
        tokens: Document lengths of both splits.
        fill: Share of each train row that is tokens.
        supervised: Share of each train row's tokens that is supervised.
        p95: 95th percentile of the document lengths.
    """

    tokens: Histogram
    fill: Histogram
    supervised: Histogram
    p95: float


def data_charts(results: ResultSet) -> dict[str, Chart]:
    """Charts by the stem of their file name: a panel per corpus, or per pack with packed rows."""
    packs = [(pack_flow(results, result), result) for result in results.of("pack")]
    packed = [(flow, read_distribution(result)) for flow, result in packs if flow.packed]
    panels = {}
    if results.of("corpus"):
        panels["characters"] = [_characters_panel(flow) for flow in corpus_flows(results)]
    if packs:
        for name, draw in (("lengths", _lengths_panel), ("packing", _fill_panel), ("supervised", _supervised_panel)):
            nothing = message("No rows are packed; the trainer pads each batch.")
            panels[name] = [draw(*pack) for pack in packed] or [nothing]
    if sampled := sampled_tables(results):
        panels["sampled"] = [panel for table in sampled for panel in (_responses_panel(table), _distinct_panel(table))]
    if selected := selections(results):
        panels["selected"] = [_solved_panel(selection) for selection in selected]
    return {name: Chart(name=name, panels=drawn, key={}) for name, drawn in panels.items()}


def read_distribution(result: Result) -> Distribution:
    """Read the document index of a packed pack. Raises SnaketuneError if it is damaged."""
    metadata, longest = result.manifest["packing_metadata"], result.manifest["row_length"]
    rows = metadata["rows"]
    documents = np.zeros(longest + 1, np.int64)
    tokens, supervised = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    table = read_table(result.artifact.file("documents.arrow")).select(["split", "row", "tokens", "supervised"])
    for batch in table.to_batches():
        train = pc.equal(batch["split"], "train").to_numpy(zero_copy_only=False)
        row = batch["row"].to_numpy()[train]
        documents += np.bincount(batch["tokens"].to_numpy(), minlength=len(documents))
        np.add.at(tokens, row, batch["tokens"].to_numpy()[train])
        np.add.at(supervised, row, batch["supervised"].to_numpy()[train])
    # Rows are sorted by length, shorter ones first.
    lengths = sorted((int(length), n) for length, n in metadata.get("rows_by_length", {longest: rows}).items())
    capacity = np.repeat([length for length, _ in lengths], [n for _, n in lengths])
    return Distribution(
        tokens=_length_histogram(documents),
        fill=_share_histogram(tokens / capacity),
        supervised=_share_histogram(supervised / np.maximum(tokens, 1)),
        p95=_quantile(documents, 0.95),
    )


def _length_histogram(documents: np.ndarray) -> Histogram:
    """A histogram from the number of documents of each length."""
    total, longest = int(documents.sum()), len(documents) - 1
    low, high = np.flatnonzero(documents)[[0, -1]].tolist() if total else (0, 0)
    # Extend the axis to the row length if the longest document is above half of it.
    edges = np.linspace(0, max(longest if high > longest / 2 else high, 1), BINS + 1)
    counts, _ = np.histogram(np.arange(len(documents)), edges, weights=documents)
    median = _quantile(documents, 0.5)
    return Histogram(edges=edges, counts=counts.astype(np.int64), total=total, median=median, low=low, high=high)


def _share_histogram(shares: np.ndarray) -> Histogram:
    counts, edges = np.histogram(shares, SHARE_BINS, (0.0, 1.0))
    low, median, high = np.quantile(shares, [0, 0.5, 1]).tolist() if len(shares) else (0.0, 0.0, 0.0)
    return Histogram(edges=edges, counts=counts, total=len(shares), median=median, low=low, high=high)


def _quantile(documents: np.ndarray, share: float) -> float:
    """The smallest length that at least `share` of the documents don't exceed.

    >>> _quantile(np.array([0, 2, 1, 1]), 0.5)
    1.0
    """
    return float(np.searchsorted(np.cumsum(documents), share * documents.sum()))


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


def _lengths_panel(flow: PackFlow, lengths: Distribution) -> Panel:
    tokens = lengths.tokens
    unit = "parts" if any(split.counts["split"]["rows"] for split in flow.splits) else flow.unit
    if not tokens.total:
        return message(f"{flow.title}: no {unit}")
    too_long = sum(split.counts["dropped"].get("longer_than_row", 0) for split in flow.splits)

    def draw(ax: Axes) -> None:
        _bars(ax, tokens)
        right = flow.length if tokens.edges[-1] >= flow.length or too_long else tokens.edges[-1]
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
        _mark(ax, tokens.median, f"median {whole(tokens.median)}", left=True)
        _mark(ax, lengths.p95, f"p95 {whole(lengths.p95)}", left=lengths.p95 > RIGHT * ax.get_xlim()[1])

    title = f"{flow.title}: {whole(tokens.total)} {unit}, median {whole(tokens.median)} tokens"
    return Panel(title=title, draw=draw)


def _fill_panel(flow: PackFlow, lengths: Distribution) -> Panel:
    mean = float(flow.metadata["packing_efficiency"]) / 100
    several = f" of {len(flow.lengths)} lengths" if flow.lengths else ""
    least = "" if flow.lengths else f"; lower bound {whole(flow.metadata['lower_bound_rows'])} rows"
    title = f"{whole(flow.metadata['rows'])} rows{several} are {percent(mean)} full{least}"
    label = "fill of a row: share of tokens that are not padding"
    return _shares_panel(flow, title, lengths.fill, label, mean, "mean")


def _supervised_panel(flow: PackFlow, lengths: Distribution) -> Panel:
    shares = lengths.supervised
    title = f"{percent(shares.median)} of a row's tokens are supervised (median), "
    title += f"from {percent(shares.low)} to {percent(shares.high)}"
    return _shares_panel(flow, title, shares, "supervised share of a row's tokens", shares.median, "median")


def _shares_panel(flow: PackFlow, title: str, shares: Histogram, label: str, at: float, what: str) -> Panel:
    if not shares.total:
        return message(f"{flow.title}: no rows to train on")

    def draw(ax: Axes) -> None:
        _bars(ax, shares)
        ax.set(xlabel=label, ylabel="rows", xlim=(-0.02, 1.02))
        percentages(ax, "x")
        _mark(ax, at, f"{what} {percent(at)}", left=at > RIGHT * ax.get_xlim()[1])

    return Panel(title=f"{flow.title}: {title}", draw=draw)


def _responses_panel(sampled: SampledTable) -> Panel:
    lengths = _length_histogram(np.bincount(sampled.lengths, minlength=sampled.spec["decoding"]["max_new_tokens"] + 1))

    def draw(ax: Axes) -> None:
        _bars(ax, lengths)
        ax.set(xlabel="tokens", ylabel="responses", xlim=(0, None))
        _mark(ax, lengths.median, f"median {whole(lengths.median)}", left=lengths.median > RIGHT * ax.get_xlim()[1])

    title = f"{sampled.name}: {whole(lengths.total)} responses, {percent(sampled.truncated)} of them truncated"
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


def _bars(ax: Axes, histogram: Histogram) -> None:
    edges = histogram.edges
    ax.hist(edges[:-1], bins=edges, weights=histogram.counts, color=DATA, edgecolor=SURFACE, linewidth=0.4)
    whole_numbers(ax, "y", 5)


def _mark(ax: Axes, at: float, text: str, left: bool) -> None:
    """Draw a dotted line with a label above it, to its left or right."""
    ax.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
    align = {"va": "bottom", "ha": "right" if left else "left", "fontsize": 8, "color": MUTED}
    ax.text(at, 1.0, f"{text} " if left else f" {text}", transform=ax.get_xaxis_transform(), **align)
