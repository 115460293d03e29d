"""`pairs.arrow`: a model's log-probabilities of both completions of every held-out pair, with its reference's."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

# source: index of the pair's source in the corpus, from 0. logp: summed log-probabilities in nats, over so many tokens. The
# reference's are null where there is none, or none that can be compared.
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
    """Return the pairs of one corpus as a table with the schema PAIRS.

    Args:
        ids, sources: pair ids, and the indices of their sources.
        sums_P2, counts_P2: log-probabilities and token counts, chosen first.
        references: log-probabilities of the reference by pair id; pairs may be missing.
    """
    rows = [
        (corpus, pair, source, *sums, *counts, *references.get(pair, (None, None)))
        for pair, source, sums, counts in zip(ids, sources, sums_P2, counts_P2, strict=True)
    ]
    return pa.Table.from_pylist([dict(zip(PAIRS.names, row)) for row in rows], schema=PAIRS)
