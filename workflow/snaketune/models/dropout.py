"""Turning a model's own randomness off while it is trained.

DPO compares what a policy gives a completion with what its reference gave it; where dropout makes the policy another model at
every step, the two differ before anything was learned (TRL's DPOTrainer has `disable_dropout` for the same reason).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

# Names of probabilities in modules and configs: dropout, attn_pdrop, layerdrop, and the noise on what experts and their routers
# read. phimoe's `router_jitter_noise` isn't one: it is a threshold, in evaluation too.
RANDOM = re.compile(r"(?!router_jitter_noise).*(dropout|pdrop|layerdrop|jitter_noise|moe_jitter_eps).*")


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `model` computes in training mode what it computes in evaluation; what is wrapped around it later may drop out.

    Its settings, which are saved with it, are put back at the end.
    """
    owners: list[tuple[Any, str, float]] = []
    seen: set[int] = set()
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            if owner is None or id(owner) in seen:
                continue
            seen.add(id(owner))
            owners += [
                (owner, name, value) for name, value in vars(owner).items() if _is_probability(owner, name, value)
            ]
    for owner, name, _ in owners:
        setattr(owner, name, 0.0)
    try:
        yield
    finally:
        for owner, name, value in owners:
            setattr(owner, name, value)


def _is_probability(owner: Any, name: str, value: Any) -> bool:
    named = RANDOM.fullmatch(name) or (isinstance(owner, _DropoutNd) and name == "p")
    return bool(named) and isinstance(value, float) and value > 0
