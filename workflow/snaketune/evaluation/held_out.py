"""Loss and perplexity on held-out rows."""

import math
from typing import Any

import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import losses_by_batch
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.passed_test import PassedTest
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.rows import PackedRows
from snaketune.evaluation.score_intervals import per_token_interval

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
    `record`: of a self-test of a model with the same config on the same rows, with the kernel of `compute`."""
    if not any(len(rows) for rows in packs):
        return compute, compute.about(), {}
    longest, prefixes = max(rows.longest[0] for rows in packs), any(rows.has_prefixes for rows in packs)
    if record is None or record.share() is None:
        chosen = choose_kernel(compute, config, longest, prefixes=prefixes, dropout=False)
        compute, record = chosen, record if chosen == compute else None
    tested = self_test(model, packs, compute, training=False, record=record)
    return tested.compute, tested.about(), {"self_test_share": tested.share}


def by_document(losses_N: torch.Tensor, document_N: torch.Tensor, documents: int) -> tuple[list[float], list[int]]:
    """Return the summed losses and the tokens of a batch's documents; `document_N`: the document of each loss, int64[N]."""
    document_N = document_N.cpu()
    sums_D = torch.zeros(documents, dtype=torch.float64).index_add_(0, document_N, losses_N.double().cpu())
    return sums_D.tolist(), torch.bincount(document_N, minlength=documents).tolist()


def loss_table(corpus: str, sums: list[float], tokens: list[int]) -> pa.Table:
    """Return the losses of the documents of one corpus as a table with the schema LOSSES."""
    rows = [(corpus, number, *both) for number, both in enumerate(zip(sums, tokens, strict=True)) if both[1]]
    return pa.Table.from_pylist([dict(zip(LOSSES.names, row)) for row in rows], schema=LOSSES)


def held_out_loss(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, name: str
) -> tuple[dict[str, Any], pa.Table]:
    """Return the mean negative log-probability of the supervised tokens in nats with its 95% interval, and perplexity; and the
    losses of single documents (LOSSES)."""
    all_sums: list[float] = []
    all_tokens: list[int] = []
    for batch, losses_N in losses_by_batch(model, rows, compute, f"loss, {name}"):
        layout = batch["segments"].layout
        # The turns of a conversation may be several segments, which form a tree.
        tree_D = torch.from_numpy(layout.trees[layout.documents])
        document_N, documents = tree_D[batch["target_documents"].cpu()], int(layout.trees.max(initial=-1)) + 1
        sums, tokens = by_document(losses_N, document_N, documents)
        all_sums += sums
        all_tokens += tokens
    table = loss_table(name, all_sums, all_tokens)
    sums, tokens = table["loss_nats"].to_pylist(), table["tokens"].to_pylist()
    if not tokens:
        return {"held_out_loss": None, "perplexity": None, "supervised_tokens": 0}, table
    mean = math.fsum(sums) / sum(tokens)
    losses = {
        "held_out_loss": round(mean, 5),
        "held_out_loss_interval": per_token_interval(sums, tokens),
        "perplexity": round(math.exp(min(mean, 50.0)), 4),
        "supervised_tokens": sum(tokens),
    }
    return losses, table
