"""Training without a model's own dropout.

DPO compares log-probabilities of the policy with the reference's; dropout would make them differ before anything is learned
(TRL's DPOTrainer has `disable_dropout` for the same reason).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

# Names of probabilities in modules and configs: dropout, attn_pdrop, layerdrop, and the noise on inputs of experts and routers.
# phimoe's `router_jitter_noise` is excluded: it is a threshold, used in evaluation too.
RANDOM = re.compile(r"(?!router_jitter_noise).*(dropout|pdrop|layerdrop|jitter_noise|moe_jitter_eps).*")


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Make `model` compute in training mode as in evaluation mode while the context lasts.

    Modules that are added inside (adapters) retain their dropout. The model's settings, which are saved with it, are restored.
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
    matches = RANDOM.fullmatch(name) or (isinstance(owner, _DropoutNd) and name == "p")
    return bool(matches) and isinstance(value, float) and value > 0
