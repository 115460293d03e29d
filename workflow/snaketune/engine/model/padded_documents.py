"""The documents of packed rows as sequences of their own, padded on the right, in groups of similar length.

Padding on the right changes nothing before it, whatever a causal layer does: attention, convolution or recurrence. A document
begins with its prefix, so a shared prompt is computed again for each completion. The pair [abCD][EF] of `segments` and
the document [g] become one group or two:

    a b C D        tokens_P [0, 1, 2, 3, 0, 1, 4, 5]  [6]        places_T [0, 1, 2, 3, 6, 7, 8]
    a b E F   g    shapes   ((2, 4), (1, 1))

Shapes: T packed tokens, D documents, P positions of all groups, B documents of a group, L tokens of its longest one.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from snaketune.engine.packing.segments import SegmentLayout

# Types of rotary embeddings whose factors depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = {"longrope", "dynamic"}
# Padding, in tokens, that costs as much as running one group more.
GROUP_COST = 64


@dataclass(frozen=True, kw_only=True)
class PaddedDocuments:
    """Groups of documents: B and L of each; the token at each of their positions, group after group, row after row
    (int64[P], 0 for padding); and the position of each token in its own document (int64[T], 0 for the padding of rows)."""

    shapes: tuple[tuple[int, int], ...]
    tokens_P: torch.Tensor
    places_T: torch.Tensor

    @classmethod
    def of(cls, layout: SegmentLayout, device: torch.device, boundary: int | None = None) -> "PaddedDocuments":
        """Return the groups of a batch, on `device`. No group has both longer and shorter documents than `boundary` tokens.

        >>> from snaketune.engine.packing.segments import layout
        >>> rows = layout([[4, 2, 1]], [[0, 2, 0]], row_lengths=[8])
        >>> padded = PaddedDocuments.of(rows, torch.device("cpu"), boundary=2)
        >>> padded.shapes, padded.tokens_P.tolist(), padded.places_T.tolist()
        (((2, 4), (1, 1)), [0, 1, 2, 3, 0, 1, 4, 5, 6], [0, 1, 2, 3, 6, 7, 8, 0])
        """
        lengths_D = layout.sequence_lengths[layout.documents]
        order_D = np.argsort(-lengths_D, kind="stable")
        places_T, tokens, shapes, begin = np.zeros(layout.tokens, np.int64), [], [], 0
        for first, stop in group_by_length(lengths_D[order_D], layout.tokens, boundary):
            length = int(lengths_D[order_D[first]])
            segments_B1 = layout.documents[order_D[first:stop]][:, None]
            is_token_BL = np.arange(length) < layout.sequence_lengths[segments_B1]
            columns_BL = np.where(is_token_BL, np.arange(length), 0)
            tokens_BL = np.where(is_token_BL, layout.sequence_tokens(segments_B1, columns_BL), 0)
            is_own_BL = is_token_BL & (columns_BL >= layout.prefix_lengths[segments_B1])
            places_T[tokens_BL[is_own_BL]] = begin + np.flatnonzero(is_own_BL)
            tokens.append(tokens_BL.ravel())
            shapes.append((stop - first, length))
            begin += is_own_BL.size
        # An empty batch has one token, which is padding.
        tokens_P = np.concatenate(tokens) if tokens else np.zeros(1, np.int64)
        tensors = {"tokens_P": to_device(tokens_P, device), "places_T": to_device(places_T, device)}
        return cls(shapes=tuple(shapes) or ((1, 1),), **tensors)

    def split(self, values_T: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values [B, L, ...] of each group, given those of all tokens, [T, ...]."""
        values_P = values_T.index_select(0, self.tokens_P)
        for values, shape in zip(values_P.split([rows * length for rows, length in self.shapes]), self.shapes):
            yield values.reshape(*shape, *values.shape[1:])

    def merge(self, groups: Iterable[torch.Tensor], positions_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values [N, ...] of some tokens (default: of all), given those of the groups, [B, L, ...]."""
        values_P = torch.cat([group.reshape(-1, *group.shape[2:]) for group in groups])
        places_N = self.places_T if positions_N is None else self.places_T.index_select(0, positions_N)
        return values_P.index_select(0, places_N)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor with the array's values on `device`; the host doesn't wait for it."""
    tensor = torch.from_numpy(array)
    # Only a copy from pinned memory lets the host go on.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def group_by_length(lengths_D: np.ndarray, most_tokens: int, boundary: int | None = None) -> list[tuple[int, int]]:
    """Return ranges of documents, sorted by falling length, that cost least: padded tokens, and GROUP_COST for each range.

    A range of several documents has at most `most_tokens` padded tokens, and none crosses `boundary` tokens.

    >>> group_by_length(np.array([1000, 990, 300, 290, 20]), 4000), group_by_length(np.array([9, 8, 7]), 16)
    ([(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 3)])
    """
    count = len(lengths_D)
    best, first_of = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for stop in range(1, count + 1):
        first = np.arange(stop)
        padded = lengths_D[:stop] * (stop - first)
        refused = (padded > most_tokens) & (first < stop - 1)
        if boundary:
            refused |= (lengths_D[:stop] > boundary) & (lengths_D[stop - 1] <= boundary)
        costs = np.where(refused, np.inf, best[:stop] + padded + GROUP_COST)
        first_of[stop] = costs.argmin()
        best[stop] = costs[first_of[stop]]
    ranges, stop = [], count
    while stop:
        ranges.append((int(first_of[stop]), stop))
        stop = int(first_of[stop])
    return ranges[::-1]


def batch_dependent_rope(config: PretrainedConfig, kinds: Collection[str] = BATCH_DEPENDENT_ROPE) -> int | None:
    """Return the length beyond which rotary factors of these kinds depend on the batch; None if they never do."""
    text = config.get_text_config()
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    original = getattr(text, "original_max_position_embeddings", None)
    lengths = [
        rope.get("original_max_position_embeddings") or original or text.max_position_embeddings
        for rope in (parameters, *nested)
        if rope.get("rope_type") in kinds
    ]
    return min(map(int, lengths), default=None)
