"""`losses.arrow`: how unlikely a model finds what is supervised of every held-out document, as it was packed."""

from collections.abc import Iterable

import pyarrow as pa
import torch

# The number of a document is its place in the packed rows, the same for all models that are asked about these. Summed negative
# log-probabilities of its supervised tokens in nats, and how many these are; documents without any are left out.
LOSSES = pa.schema(
    [("corpus", pa.string()), ("document", pa.int32()), ("loss_nats", pa.float64()), ("tokens", pa.int32())]
)


class DocumentLosses:
    """Gathers the losses of documents, batch after batch."""

    def __init__(self):
        self.seen = 0
        self.numbers: list[int] = []
        self.sums: list[float] = []
        self.tokens: list[int] = []

    def add(self, losses_N: torch.Tensor, document_N: torch.Tensor, documents: int) -> None:
        """A batch.

        Args:
            losses_N: negative log-probabilities of its supervised tokens.
            document_N: int64[N], the document of the batch that each is in.
            documents: how many the batch has.
        """
        sums_D = torch.zeros(documents, dtype=torch.float64)
        sums_D.index_add_(0, document_N.cpu(), losses_N.double().cpu())
        tokens_D = torch.bincount(document_N.cpu(), minlength=documents)
        for number in tokens_D.nonzero().flatten().tolist():
            self.numbers.append(self.seen + number)
            self.sums.append(sums_D[number].item())
            self.tokens.append(int(tokens_D[number]))
        self.seen += documents

    def table(self, corpus: str) -> pa.Table:
        """As LOSSES."""
        columns = ([corpus] * len(self.numbers), self.numbers, self.sums, self.tokens)
        return pa.Table.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, LOSSES)], schema=LOSSES
        )


def loss_table(tables: Iterable[pa.Table]) -> pa.Table:
    """Of all corpora."""
    return pa.concat_tables([LOSSES.empty_table(), *tables])
