"""`pairs.arrow`: how likely a model finds both completions of every held-out pair, beside its reference."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

# Summed log-probabilities in nats, and the tokens that they are over. The reference's are null where there is none, or none
# that can be compared.
PAIRS = pa.schema(
    [
        ("corpus", pa.string()),
        ("id", pa.string()),
        ("chosen_logp", pa.float64()),
        ("rejected_logp", pa.float64()),
        ("chosen_tokens", pa.int32()),
        ("rejected_tokens", pa.int32()),
        ("reference_chosen_logp", pa.float64()),
        ("reference_rejected_logp", pa.float64()),
    ]
)


def pair_table(
    corpus: str,
    ids: Sequence[str],
    sums_P2: Sequence[Sequence[float]],
    counts_P2: Sequence[Sequence[int]],
    references: Mapping[str, tuple[float, float]],
) -> pa.Table:
    """The pairs of one corpus as PAIRS.

    Args:
        ids: pair ids.
        sums_P2, counts_P2: log-probabilities and token counts, chosen first.
        references: log-probabilities of the reference, by id; those of some pairs may be missing.
    """
    rows = [
        (corpus, pair, *sums, *counts, *references.get(pair, (None, None)))
        for pair, sums, counts in zip(ids, sums_P2, counts_P2, strict=True)
    ]
    return pa.Table.from_pylist([dict(zip(PAIRS.names, row)) for row in rows], schema=PAIRS)
