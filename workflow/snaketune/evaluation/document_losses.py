"""`losses.arrow`: a model's loss on the supervised tokens of each held-out document, as packed."""

from collections.abc import Iterable

import pyarrow as pa
import torch

# document: index in the packed rows, the same for all models that are evaluated on them; loss_nats: summed negative
# log-probabilities of its supervised tokens; tokens: their number. Documents without supervised tokens are excluded.
LOSSES = pa.schema(
    [("corpus", pa.string()), ("document", pa.int32()), ("loss_nats", pa.float64()), ("tokens", pa.int32())]
)


class DocumentLosses:
    """Collects the losses of documents over batches."""

    def __init__(self):
        self.counted = 0
        self.numbers: list[int] = []
        self.sums: list[float] = []
        self.tokens: list[int] = []

    def add(self, losses_N: torch.Tensor, document_N: torch.Tensor, documents: int) -> None:
        """Add a batch.

        Args:
            losses_N: negative log-probabilities of the batch's supervised tokens.
            document_N: int64[N], index of each token's document within the batch.
            documents: number of documents in the batch.
        """
        sums_D = torch.zeros(documents, dtype=torch.float64)
        sums_D.index_add_(0, document_N.cpu(), losses_N.double().cpu())
        tokens_D = torch.bincount(document_N.cpu(), minlength=documents)
        for number in tokens_D.nonzero().flatten().tolist():
            self.numbers.append(self.counted + number)
            self.sums.append(sums_D[number].item())
            self.tokens.append(int(tokens_D[number]))
        self.counted += documents

    def table(self, corpus: str) -> pa.Table:
        """Return a table with the schema LOSSES."""
        columns = ([corpus] * len(self.numbers), self.numbers, self.sums, self.tokens)
        return pa.Table.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, LOSSES)], schema=LOSSES
        )


def loss_table(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the concatenated tables of all corpora."""
    return pa.concat_tables([LOSSES.empty_table(), *tables])
