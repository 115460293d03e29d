"""Histograms of `documents.arrow`: document lengths, fill of the rows, and supervised share of the rows.

Columns are read one record batch at a time: ten million documents take a few seconds and 24 bytes of memory per row.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from snaketune.publishing.results import Result
from snaketune.tables import read_table

BINS, SHARE_BINS = 30, 25


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
