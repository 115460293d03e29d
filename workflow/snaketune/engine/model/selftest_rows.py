"""The rows of the self-test: synthetic ones of random tokens, and the extreme ones of packs."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from snaketune.engine.model.packing_support import windows_of
from snaketune.engine.model.padded_documents import batch_dependent_rope
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import IGNORED

# Segment lengths, prefix lengths, prefix segments and padding of the synthetic rows.
DOCUMENTS = (([7, 19, 12], [0, 0, 0], [0, 1, 2], 9), ([16, 5, 11, 4], [0, 0, 0, 0], [0, 1, 2, 3], 3))
# Row 1: a document and a pair. Row 2: a tree of three levels with a segment that continues at its parent's end, and a pair.
PAIRS = (
    ([10, 14, 9], [0, 0, 6], [0, 1, 1], 5),
    ([12, 5, 8, 3, 6, 13, 6], [0, 7, 12, 8, 20, 0, 10], [0, 0, 1, 1, 2, 5, 5], 4),
)


def synthetic_rows(config: PretrainedConfig, prefixes: bool) -> list[list[dict[str, Any]]]:
    """Return batches of two synthetic rows in the format of `PackedRows`: documents, and pairs if the run has `prefixes`."""
    text = config.get_text_config()
    limits = (*windows_of(text), batch_dependent_rope(config), getattr(text, "max_position_embeddings", None))
    # A prefix and its completion each get half of the model's shortest limit.
    half = max(min((int(limit) for limit in limits if isinstance(limit, int) and limit > 0), default=2**20) // 2, 2)
    allowed = ordinary_ids(config)
    generator = np.random.default_rng(0)

    def row(lengths: list[int], prefix_lengths: list[int], prefix_segments: list[int], padding: int) -> dict[str, Any]:
        limited = np.minimum(lengths, half).astype(np.int32)
        ids = generator.choice(allowed, int(limited.sum()) + padding).astype(np.int32)
        return {
            "input_ids": ids,
            "labels": np.full(len(ids), IGNORED, np.int32),
            "segment_lengths": limited,
            "prefix_lengths": np.minimum(prefix_lengths, half).astype(np.int32),
            "prefix_segments": np.array(prefix_segments, np.int32),
        }

    return [[row(*shape) for shape in shapes] for shapes in ((DOCUMENTS, PAIRS) if prefixes else (DOCUMENTS,))]


def ordinary_ids(config: PretrainedConfig) -> np.ndarray:
    """Return all token ids without those that have a meaning in the model's code (padding, images)."""
    special: set[int] = set()
    pending = [config.to_dict()]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif str(key).endswith(("_token_id", "_token_index", "_token_ids")):
                values = value if isinstance(value, list | tuple) else [value]
                special |= {token for token in values if isinstance(token, int)}
    return np.array([token for token in range(config.get_text_config().vocab_size) if token not in special])


def rows_to_test(
    config: PretrainedConfig, packs: Sequence[PackedRows], prefixes: bool
) -> Iterator[tuple[list[dict[str, Any]], str]]:
    yield from zip(synthetic_rows(config, prefixes), ("synthetic documents", "synthetic pairs with a shared prompt"))
    if packs := [rows for rows in packs if len(rows)]:
        longest = max(packs, key=lambda rows: rows.longest[0])
        yield [longest[longest.longest[1]]], "the row with the longest sequence"
        yield [longest[longest.fullest]], "the row with the most sequences"
