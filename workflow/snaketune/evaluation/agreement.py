"""How often a model and a teacher expect the same token, how far their probabilities are apart, and at which tokens they part:
on held-out rows for which the teacher's most likely tokens are stored."""

from dataclasses import dataclass, field
from typing import Any

import torch

from snaketune.engine.distillation import agreement, collate_teacher
from snaketune.engine.model.batches import Batch, collate
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import packed_values
from snaketune.engine.model.logprobs import over_all_rows
from snaketune.engine.packing.rows import PackedRows
from snaketune.evaluation.held_out import by_document, document_of
from snaketune.evaluation.score_intervals import per_token, per_token_interval
from snaketune.tokenization.chat import ChatTokenizer

# Pairs of tokens that are reported, and the tokens before an example.
PARTING, CONTEXT = 20, 16


@dataclass
class Parting:
    """Where a teacher expects one token and the model another: how often, the summed divergence, and the tokens before it where
    that is largest."""

    count: int = 0
    nats: float = 0.0
    largest: float = -1.0
    before: list[int] = field(default_factory=list)


def teacher_agreement(
    model: torch.nn.Module, rows: PackedRows, temperature: float, compute: Compute, chat: ChatTokenizer
) -> dict[str, Any]:
    """Share of the supervised tokens with the same most likely token, and the mean divergence D(teacher ‖ model) in nats, with
    95% intervals over documents; and the pairs of different tokens with the largest summed divergence. Args: rows: with the
    teacher's columns."""
    documents: list[tuple[float, float, int]] = []
    parting: dict[tuple[int, int], Parting] = {}

    def forward(chosen: list[dict[str, Any]]) -> tuple[Batch, Any]:
        batch = collate(chosen, compute.kernel, rows.longest[0])
        batch = (batch | collate_teacher(chosen, batch)).to(compute.device)
        return batch, packed_values(model, batch, agreement(temperature, batch))

    for batch, (_, values_U) in over_all_rows(rows, compute, "agreement with the teacher", forward):
        token_N, kl_N = (values.index_select(0, batch["source_rows"]).cpu() for values in values_U)
        teacher_N = batch["teacher_ids"].index_select(0, batch["source_rows"])[:, 0].cpu()
        agreed_D, tokens_D = by_document(token_N == teacher_N, *document_of(batch))
        nats_D, _ = by_document(kl_N, *document_of(batch))
        documents += [one for one in zip(agreed_D, nats_D, tokens_D) if one[2]]
        _add_parting(parting, batch, token_N, teacher_N, kl_N)
    if not documents:
        return {"agreement": None, "kl": None, "tokens": 0, "parting": []}
    agreed, nats, tokens = zip(*documents)
    largest = sorted(parting.items(), key=lambda pair: (-pair[1].nats, pair[0]))[:PARTING]
    return {
        "agreement": round(per_token(agreed, tokens)[0], 5),
        "agreement_interval": per_token_interval(agreed, tokens),
        # Of equal models, rounding may leave a negative one.
        "kl": round(max(per_token(nats, tokens)[0], 0.0), 5),
        "kl_interval": per_token_interval(nats, tokens),
        "tokens": sum(tokens),
        "parting": [
            {
                "teacher": chat.text([teacher]),
                "model": chat.text([token]),
                "count": found.count,
                "nats": round(found.nats, 3),
                "after": chat.text(found.before),
            }
            for (teacher, token), found in largest
        ],
    }


def _add_parting(
    parting: dict[tuple[int, int], Parting],
    batch: Any,
    token_N: torch.Tensor,
    teacher_N: torch.Tensor,
    kl_N: torch.Tensor,
) -> None:
    ids_T, positions_T = batch["input_ids"][0].cpu(), batch["segments"].positions_T.cpu()
    source_N = batch["sources"].index_select(0, batch["source_rows"]).cpu()
    for n in (token_N != teacher_N).nonzero()[:, 0].tolist():
        found = parting.setdefault((int(teacher_N[n]), int(token_N[n])), Parting())
        found.count += 1
        found.nats += float(kl_N[n])
        if kl_N[n] > found.largest:
            # Positions restart with each document.
            end = int(source_N[n]) + 1
            begin = end - min(CONTEXT, int(positions_T[end - 1]) + 1)
            found.largest, found.before = float(kl_N[n]), ids_T[begin:end].tolist()
