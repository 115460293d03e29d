"""`pairs.arrow`: how likely a model finds both completions of every held-out pair, beside its reference."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

# Which of the corpus' sources a pair is from, counted from 0. Summed log-probabilities in nats, and the tokens that they are
# over. The reference's are null where there is none, or none that can be compared.
PAIRS = pa.schema(
    [
        ("corpus", pa.string()),
        ("id", pa.string()),
        ("source", pa.int16()),
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
    sources: Sequence[int],
    sums_P2: Sequence[Sequence[float]],
    counts_P2: Sequence[Sequence[int]],
    references: Mapping[str, tuple[float, float]],
) -> pa.Table:
    """The pairs of one corpus as PAIRS.

    Args:
        ids, sources: pair ids, and the numbers of their sources.
        sums_P2, counts_P2: log-probabilities and token counts, chosen first.
        references: log-probabilities of the reference, by id; those of some pairs may be missing.
    """
    rows = [
        (corpus, pair, source, *sums, *counts, *references.get(pair, (None, None)))
        for pair, source, sums, counts in zip(ids, sources, sums_P2, counts_P2, strict=True)
    ]
    return pa.Table.from_pylist([dict(zip(PAIRS.names, row)) for row in rows], schema=PAIRS)
