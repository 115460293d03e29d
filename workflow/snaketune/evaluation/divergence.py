"""How far a model's responses are from another model: the KL divergence of the two distributions at each token.

    D_KL(p ‖ q) = Σ_v p(v) (log p(v) - log q(v))        p: the model that responded, q: the other one, given the same tokens

Summed over a response, it estimates the divergence of the responses' distributions with less variance than the tokens'
log-probabilities alone, and isn't negative.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.engine.model.devices import Compute
from snaketune.evaluation.score_intervals import per_token, per_token_interval
from snaketune.progress import progress

# Nats of a response, and its tokens.
Divergence = tuple[float, int]


@torch.no_grad()
def kl_of_responses(
    model: torch.nn.Module,
    other: torch.nn.Module,
    prompts: Sequence[np.ndarray],
    responses: Sequence[Sequence[int]],
    compute: Compute,
) -> list[Divergence]:
    """The divergence of each response of `model` from `other`.

    Args:
        prompts, responses: the tokens of each prompt and of its response.
    """
    return [
        (_nats(model, other, prompt, response, compute) if len(response) else 0.0, len(response))
        for prompt, response in progress(
            zip(prompts, responses, strict=True), "divergence", "responses", len(responses)
        )
    ]


def _nats(
    model: torch.nn.Module, other: torch.nn.Module, prompt: np.ndarray, response: Sequence[int], compute: Compute
) -> float:
    ids_1L = torch.tensor([[*prompt.tolist(), *response]], device=compute.device)
    logps = []
    for policy in (model, other):
        with compute.autocast():
            logits_LV = policy(input_ids=ids_1L, use_cache=False).logits[0]
        # The token before a response's first one predicts it.
        logps.append(logits_LV[len(prompt) - 1 : -1].float().log_softmax(-1))
    model_TV, other_TV = logps
    return float((model_TV.exp() * (model_TV - other_TV)).sum())


def summarize_kl(divergences: Sequence[Divergence]) -> dict[str, Any]:
    """Nats per token with a 95% interval, and per response.

    >>> summarize_kl([(1.0, 4), (0.5, 2)])
    {'per_token': 0.25, 'per_token_interval': None, 'per_response': 0.75}
    """
    sums, tokens = [nats for nats, _ in divergences], [count for _, count in divergences]
    if not sum(tokens):
        return {"per_token": None, "per_token_interval": None, "per_response": None}
    return {
        "per_token": round(per_token(sums, tokens)[0], 4),
        "per_token_interval": per_token_interval(sums, tokens),
        "per_response": round(sum(sums) / len(sums), 4),
    }
