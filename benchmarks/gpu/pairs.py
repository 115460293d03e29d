"""Generated pairs with two proportions of prompt to completion, and their rows with each prompt once."""

from dataclasses import dataclass, field

import numpy as np
import torch
from benchmarks.gpu.shapes import MadeRows

from snaketune.packing.best_fit import plan_best_fit_decreasing
from snaketune.packing.reader import SEGMENTS, TREES
from snaketune.packing.shards import IGNORED

# Mean tokens of a prompt and of each of its completions, as shares of a sequence; as long as this, give or take a quarter.
PROPORTIONS = {"1:1": (1 / 2, 1 / 2), "3:1": (3 / 4, 1 / 4)}
SEQUENCE = 640


@dataclass(frozen=True, kw_only=True)
class MadePair:
    """Token ids of a pair."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences that trainers without shared prompts compute."""
        return np.concatenate([self.prompt, self.chosen]), np.concatenate([self.prompt, self.rejected])

    @property
    def tokens(self) -> int:
        """Return the number of tokens with the prompt counted once."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, kw_only=True)
class MadePairs:
    """Pairs and the rows that our planner makes of them."""

    pairs: list[MadePair]
    rows: "MadePairRows" = field(repr=False)


class MadePairRows(MadeRows):
    """Rows in memory with the interface of `training.preference.pair_dataset`; zero reference, one source."""

    unpaired, sources = False, 1

    def __init__(self, ids: np.ndarray, labels: np.ndarray, columns: dict[str, list[np.ndarray]]):
        self.row_length, self.lists = ids.shape[1], (*SEGMENTS, *TREES)
        self.batches = [{"input_ids": ids, "labels": labels} | {name: _column(some) for name, some in columns.items()}]
        self.offsets = np.array([0, len(ids)])
        self.pairs = sum(map(len, columns["completions"])) // 2

    def blank(self, tokens=None):
        return super().blank(tokens) | _told(0)

    def __getitem__(self, row):
        found = super().__getitem__(row)
        return found | _told(len(found["completions"]) // 2)


def _told(pairs: int) -> dict[str, torch.Tensor]:
    return {"reference": torch.zeros(pairs, 2), "source": torch.zeros(pairs, dtype=torch.int64)}


def _column(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and values of a list column."""
    return np.cumsum([0, *map(len, rows)]), np.concatenate(rows).astype(np.int32)


def make_pairs(rows: int, length: int, vocabulary: int, proportion: str) -> MadePairs:
    """Generate pairs that fill about this many rows."""
    generator, pairs = np.random.default_rng(0), []
    longest = min(SEQUENCE, length // 3)
    means = [longest * share for share in (*PROPORTIONS[proportion], PROPORTIONS[proportion][1])]
    while sum(pair.tokens for pair in pairs) < rows * length:
        lengths = [max(2, round(mean * generator.uniform(0.75, 1.25))) for mean in means]
        drawn = [generator.integers(2, vocabulary, one).astype(np.int32) for one in lengths]
        pairs.append(MadePair(prompt=drawn[0], chosen=drawn[1], rejected=drawn[2]))
    plan = plan_best_fit_decreasing(np.array([pair.tokens for pair in pairs]), [length])
    return MadePairs(pairs=pairs, rows=_rows([[pairs[i] for i in plan.row(row)] for row in range(plan.rows)], length))


def _rows(planned: list[list[MadePair]], length: int) -> MadePairRows:
    ids = np.zeros((len(planned), length), np.int32)
    labels = np.full_like(ids, IGNORED)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*SEGMENTS, *TREES)}
    for row, pairs in enumerate(planned):
        at = 0
        for pair in pairs:
            whole = np.concatenate([pair.prompt, pair.chosen, pair.rejected])
            ids[row, at : at + len(whole)] = whole
            labels[row, at + len(pair.prompt) : at + len(whole)] = whole[len(pair.prompt) :]
            at += len(whole)
        # Two segments per pair: prompt and chosen completion; rejected completion, which sees the prompt.
        firsts = np.arange(0, 2 * len(pairs), 2)
        own = [(len(pair.prompt) + len(pair.chosen), len(pair.rejected)) for pair in pairs]
        columns["segment_lengths"].append(np.array(own).reshape(-1))
        columns["prefix_lengths"].append(np.array([(0, len(pair.prompt)) for pair in pairs]).reshape(-1))
        columns["prefix_segments"].append(np.stack([firsts, firsts], axis=1).reshape(-1))
        columns["completions"].append(np.arange(2 * len(pairs)))
    return MadePairRows(ids, labels, columns)
