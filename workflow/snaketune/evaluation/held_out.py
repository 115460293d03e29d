"""Loss and perplexity on held-out rows, packed if the model passes its self-test, else one sequence at a time."""

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
    """Choose between packed rows, and one sequence at a time with the model's own attention.

    Returns:
        Device, data type and kernel; entries for the manifest; entries for run.json.
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
        print(
            f"{error}. Held-out rows therefore run one sequence at a time, with the model's own attention", flush=True
        )
        separate = replace(compute, kernel=SEPARATE)
        return separate, separate.about(), {}
    return compute, tested.about(), {"self_test_share": tested.share}


def held_out_loss(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, name: str
) -> tuple[dict[str, Any], pa.Table]:
    """Compute the mean negative log-probability of the supervised tokens in nats, its 95% interval, and perplexity.

    Returns:
        These scores, and the losses of single documents with the schema LOSSES.
    """
    documents = DocumentLosses()
    for batch, losses_N in losses_by_batch(model, rows, compute, f"loss, {name}"):
        documents.add(losses_N, batch["target_documents"], len(batch["segments"].layout.documents))
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
