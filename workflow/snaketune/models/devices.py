"""Which device and data type a job computes with."""

import torch

from snaketune.errors import SnaketuneError


def device() -> torch.device:
    """CUDA, else Apple's MPS, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def compute_dtype(precision: str) -> torch.dtype:
    """The data type of matrix products for `training.precision`.

    Raises:
        SnaketuneError: bfloat16 was asked for on a GPU that lacks it.
    """
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" and torch.cuda.is_available() and not has_bf16:
        raise SnaketuneError("training.precision: this GPU has no bfloat16; expected `auto` or `float32`")
    if precision == "bfloat16" or (precision == "auto" and has_bf16):
        return torch.bfloat16
    return torch.float32


def computing(precision: str) -> tuple[torch.device, torch.dtype, str]:
    """Device, data type and attention kernel that this process computes with."""
    from snaketune.models.attention import choose_kernel

    where, dtype = device(), compute_dtype(precision)
    return where, dtype, choose_kernel(where, dtype)


def weights_dtype(compute: torch.dtype, *, frozen: bool) -> torch.dtype:
    """The data type that weights are kept in: that of the computation where they are frozen, else float32 masters.

    The reference model is loaded by the same rule as the policy, so that both start from the same log-probabilities.
    """
    return compute if frozen else torch.float32
