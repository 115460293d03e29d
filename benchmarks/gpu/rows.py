"""Generated documents and pairs, and the rows that our planner makes of them."""

from dataclasses import dataclass

import numpy as np

from snaketune.engine.packing.best_fit import plan_best_fit_decreasing
from snaketune.engine.packing.rows import DocumentColumns, PackedRows
from snaketune.engine.packing.shards import IGNORED

# Mean tokens of a prompt and of each of its completions, as shares of a sequence; as long as this, give or take a quarter.
PROPORTIONS = {"1:1": (1 / 2, 1 / 2), "3:1": (3 / 4, 1 / 4)}
SEQUENCE = 640


class MadeRows(PackedRows):
    """Rows in memory with the interface of the shard reader.

    Args:
        rows: the token ids of each document in each row, with the number of its first ids that aren't supervised.
        columns: of lists, by row.
    """

    def __init__(self, rows: list[list[tuple[np.ndarray, int]]], length: int, **columns: list[np.ndarray]):
        ids = np.zeros((len(rows), length), np.int32)
        labels = np.full_like(ids, IGNORED)
        for row, documents in enumerate(rows):
            at = 0
            for whole, unsupervised in documents:
                end = at + len(whole)
                ids[row, at:end], labels[row, at + unsupervised : end] = whole, whole[unsupervised:]
                at = end
        self.row_length, self.lists = length, tuple(columns)
        self.batches = [{"input_ids": ids, "labels": labels} | {name: _column(some) for name, some in columns.items()}]
        self.offsets = np.array([0, len(ids)])
        self.order, self.weighted, self.documents = "shuffled", False, None
        if "completions" in columns:
            # Zero reference, one source.
            offsets = _column(columns["completions"])[0] // 2
            zeros = {"reference": np.zeros((offsets[-1], 2), np.float32), "source": np.zeros(offsets[-1], np.int64)}
            self.documents = DocumentColumns(offsets, zeros)


def _column(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and values of a list column."""
    return np.cumsum([0, *map(len, rows)]), np.concatenate(rows).astype(np.int32)


def make_documents(rows: int, length: int, vocabulary: int) -> list[np.ndarray]:
    """Generate lognormal documents (median 120) that fill about this many rows."""
    generator = np.random.default_rng(0)
    documents: list[np.ndarray] = []
    tokens = 0
    while tokens < rows * length:
        drawn = int(np.clip(generator.lognormal(np.log(min(120, length / 4)), 1.0), 4, length))
        documents.append(generator.integers(2, vocabulary, drawn).astype(np.int32))
        tokens += drawn
    return documents


def make_rows(rows: int, length: int, vocabulary: int) -> MadeRows:
    """Pack generated documents; the second half of each is supervised."""
    documents = make_documents(rows, length, vocabulary)
    plan = plan_best_fit_decreasing(np.array([len(document) for document in documents]), [length])
    planned = [[documents[i] for i in plan.row(row)] for row in range(plan.rows)]
    lengths = [np.array([len(document) for document in row]) for row in planned]
    columns = {"segment_lengths": lengths, "prefix_lengths": [np.zeros_like(some) for some in lengths]}
    return MadeRows([[(document, len(document) // 2) for document in row] for row in planned], length, **columns)


@dataclass(frozen=True, kw_only=True)
class MadePair:
    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences that trainers without shared prompts compute."""
        return np.concatenate([self.prompt, self.chosen]), np.concatenate([self.prompt, self.rejected])

    @property
    def shared(self) -> np.ndarray:
        """Return its tokens with the prompt once."""
        return np.concatenate([self.prompt, self.chosen, self.rejected])


def make_pairs(rows: int, length: int, vocabulary: int, proportion: str) -> list[MadePair]:
    """Generate pairs that fill about this many rows."""
    generator, pairs, tokens = np.random.default_rng(0), [], 0
    prompt, completion = (min(SEQUENCE, length // 3) * share for share in PROPORTIONS[proportion])
    while tokens < rows * length:
        lengths = [max(2, round(mean * generator.uniform(0.75, 1.25))) for mean in (prompt, completion, completion)]
        drawn = [generator.integers(2, vocabulary, one).astype(np.int32) for one in lengths]
        pairs.append(MadePair(prompt=drawn[0], chosen=drawn[1], rejected=drawn[2]))
        tokens += sum(lengths)
    return pairs


def pair_rows(pairs: list[MadePair], length: int) -> MadeRows:
    """Pack pairs, two segments each: prompt and chosen completion; rejected completion, which sees the prompt."""
    plan = plan_best_fit_decreasing(np.array([len(pair.shared) for pair in pairs]), [length])
    planned = [[pairs[i] for i in plan.row(row)] for row in range(plan.rows)]
    segments = [[(len(pair.sequences[0]), len(pair.rejected)) for pair in row] for row in planned]
    prefixes = [[(0, len(pair.prompt)) for pair in row] for row in planned]
    columns = {
        "segment_lengths": [np.ravel(row) for row in segments],
        "prefix_lengths": [np.ravel(row) for row in prefixes],
        "prefix_segments": [np.repeat(np.arange(0, 2 * len(row), 2), 2) for row in planned],
        "completions": [np.arange(2 * len(row)) for row in planned],
    }
    return MadeRows([[(pair.shared, len(pair.prompt)) for pair in row] for row in planned], length, **columns)
