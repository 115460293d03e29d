"""How far log-probabilities of the same model may differ, and the check that a policy begins as its reference."""

import torch

from snaketune.errors import SnaketuneError

# Tolerances for the same model in batches of other shapes, in nats per token: the mean over completions may differ by ROUNDING,
# a single completion by OUTLIER times as much. In float32 that is ROUNDING for every completion.
OUTLIER = {torch.float32: 1, torch.bfloat16: 10, torch.float16: 10}
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check_policy_is_reference(
    trained_P2: torch.Tensor,
    evaluated_P2: torch.Tensor,
    counts_P2: torch.Tensor,
    dtype: torch.dtype,
    *,
    external: bool = False,
) -> None:
    """Check before the first step that the policy equals its reference: log-ratios are zero, so the sigmoid loss is log 2.

    Args:
        trained_P2, evaluated_P2: float32[P, 2], summed log-ratios of the same pairs in training and in evaluation mode. The
            two computations have the same shapes, so they may differ by a tenth of ROUNDING only.
        counts_P2: int64[P, 2], tokens per completion.
        dtype: data type of the computation.
        external: whether the reference is another model; then only training and evaluation mode are compared.
    Raises:
        SnaketuneError: log-ratios aren't zero, or differ between training and evaluation mode.
    """
    for from_what, ratios_P2, rounding in (
        *([] if external else [("from its own reference log-probabilities", trained_P2, ROUNDING[dtype])]),
        ("in training from itself in evaluation", trained_P2 - evaluated_P2, ROUNDING[dtype] / 10),
    ):
        if not len(ratios_P2):
            continue
        per_token_P2 = (ratios_P2 / counts_P2.clamp(min=1)).abs()
        mean, worst = per_token_P2.mean().item(), per_token_P2.max().item()
        if not (worst <= OUTLIER[dtype] * rounding and mean <= rounding):
            raise SnaketuneError(
                f"before the first step the model differs {from_what} by {mean:.2g} nats per token on average over a batch's "
                f"completions, and by {worst:.2g} at most ({rounding:g} is rounding): DPO would learn that difference. "
                "Nothing was trained. Use a model without noise in training (dropout, router jitter); if it has none, rebuild "
                "the reference log-probabilities"
            )
