"""Held-out rows through the model: packed where its self-test allows it, else one sequence at a time; loss and perplexity."""

import math
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.evaluation.document_losses import DocumentLosses
from snaketune.evaluation.score_intervals import per_token_interval
from snaketune.models.attention import Unpackable, use_own_attention
from snaketune.models.devices import Compute
from snaketune.models.logprobs import SEPARATE, losses_by_batch
from snaketune.models.packing_support import check_config, with_supported_kernel
from snaketune.models.selftest import self_test
from snaketune.packing.reader import PackedRows


def choose_forward(
    model: PreTrainedModel, config: PretrainedConfig | None, packs: list[PackedRows], compute: Compute
) -> tuple[Compute, dict[str, Any], dict[str, Any]]:
    """Whether rows can be run as they are packed; else one sequence at a time, by the model's own attention.

    Returns:
        What to compute with, and facts for the manifest and for run.json.
    """
    if not any(len(rows) for rows in packs):
        return compute, compute.about(), {}
    compute = with_supported_kernel(compute, config, dropout=False)
    try:
        if config:
            longest, prefixes = max(rows.longest[0] for rows in packs), any(rows.has_prefixes for rows in packs)
            check_config(config, longest, prefixes, compute.kernel)
        tested = self_test(model, packs, compute, training=False)
    except Unpackable as error:
        use_own_attention(model)
        print(f"{error}. Held-out rows are therefore run one sequence at a time, by its own attention", flush=True)
        separate = replace(compute, kernel=SEPARATE)
        return separate, separate.about(), {}
    return compute, tested.about(), {"self_test_share": tested.share}


def held_out_loss(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, name: str
) -> tuple[dict[str, Any], pa.Table]:
    """Mean negative log-probability of the supervised tokens in nats, its 95% interval over documents, and its exponential.

    Returns:
        These, and the losses of single documents, as LOSSES.
    """
    documents = DocumentLosses()
    for batch, losses_N in losses_by_batch(model, rows, compute, f"loss, {name}"):
        documents.add(losses_N, batch["target_documents"], len(batch["segments"].layout.documents))
    tokens = sum(documents.tokens)
    if not tokens:
        return {"held_out_loss": None, "perplexity": None, "supervised_tokens": 0}, documents.table(name)
    mean = math.fsum(documents.sums) / tokens
    found = {
        "held_out_loss": round(mean, 5),
        "held_out_loss_interval": per_token_interval(documents.sums, documents.tokens),
        "perplexity": round(math.exp(min(mean, 50.0)), 4),
        "supervised_tokens": tokens,
    }
    return found, documents.table(name)
