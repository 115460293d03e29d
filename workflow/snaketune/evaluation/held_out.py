"""Loss and perplexity on held-out rows."""

import math
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.evaluation.score_intervals import per_token_interval
from snaketune.models.devices import Compute
from snaketune.models.logprobs import losses_by_batch
from snaketune.models.packing_support import choose_kernel
from snaketune.models.passed_test import PassedTest
from snaketune.models.selftest import self_test
from snaketune.packing.reader import PackedRows

# `losses.arrow`. document: index in the packed rows, the same for all models that are evaluated on them; loss_nats: summed
# negative log-probabilities of its supervised tokens; tokens: their number. Documents without supervised tokens are excluded.
LOSSES = pa.schema(
    [("corpus", pa.string()), ("document", pa.int32()), ("loss_nats", pa.float64()), ("tokens", pa.int32())]
)


def choose_forward(
    model: PreTrainedModel,
    config: PretrainedConfig | None,
    packs: list[PackedRows],
    compute: Compute,
    record: PassedTest | None = None,
) -> tuple[Compute, dict[str, Any], dict[str, Any]]:
    """Return device, data type and kernel for held-out rows, entries for the manifest, and entries for run.json.
    `record`: of a self-test of a model with the same config on the same rows."""
    if not any(len(rows) for rows in packs):
        return compute, compute.about(), {}
    longest, prefixes = max(rows.longest[0] for rows in packs), any(rows.has_prefixes for rows in packs)
    compute = choose_kernel(compute, config, longest, prefixes=prefixes, dropout=False)
    tested = self_test(model, packs, compute, training=False, record=record)
    return tested.compute, tested.about(), {"self_test_share": tested.share}


class DocumentLosses:
    """Collects the losses of documents over batches."""

    def __init__(self):
        self.counted = 0
        self.numbers: list[int] = []
        self.sums: list[float] = []
        self.tokens: list[int] = []

    def add(self, losses_N: torch.Tensor, document_N: torch.Tensor, documents: int) -> None:
        """Add a batch of so many documents: its losses, and the document within the batch of each, int64[N]."""
        document_N = document_N.cpu()
        sums_D = torch.zeros(documents, dtype=torch.float64).index_add_(0, document_N, losses_N.double().cpu())
        tokens_D = torch.bincount(document_N, minlength=documents)
        with_tokens = tokens_D.nonzero().flatten()
        self.numbers += (self.counted + with_tokens).tolist()
        self.sums += sums_D[with_tokens].tolist()
        self.tokens += tokens_D[with_tokens].tolist()
        self.counted += documents

    def table(self, corpus: str) -> pa.Table:
        columns = ([corpus] * len(self.numbers), self.numbers, self.sums, self.tokens)
        return pa.table(dict(zip(LOSSES.names, columns)), schema=LOSSES)


def loss_table(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the concatenated tables of all corpora."""
    return pa.concat_tables([LOSSES.empty_table(), *tables])


def held_out_loss(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, name: str
) -> tuple[dict[str, Any], pa.Table]:
    """Return the mean negative log-probability of the supervised tokens in nats with its 95% interval, and perplexity; and the
    losses of single documents (LOSSES)."""
    documents = DocumentLosses()
    for batch, losses_N in losses_by_batch(model, rows, compute, f"loss, {name}"):
        layout = batch["segments"].layout
        # The turns of a conversation may be several segments, which form a tree.
        tree_D = torch.from_numpy(layout.trees[layout.documents])
        documents.add(losses_N, tree_D[batch["target_documents"].cpu()], int(layout.trees.max(initial=-1)) + 1)
    tokens = sum(documents.tokens)
    if not tokens:
        return {"held_out_loss": None, "perplexity": None, "supervised_tokens": 0}, documents.table(name)
    mean = math.fsum(documents.sums) / tokens
    losses = {
        "held_out_loss": round(mean, 5),
        "held_out_loss_interval": per_token_interval(documents.sums, documents.tokens),
        "perplexity": round(math.exp(min(mean, 50.0)), 4),
        "supervised_tokens": tokens,
    }
    return losses, documents.table(name)
