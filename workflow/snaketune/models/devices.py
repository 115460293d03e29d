"""What a process computes with: device, data type and attention kernel, resolved once and handed on together."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from snaketune.errors import SnaketuneError
from snaketune.models.attention import usable_kernels


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What a process computes with.

    Attributes:
        dtype: of matrix products.
        kernel: of attention over segments, one of `models.kernels.KERNELS`; see also `models.logprobs.SEPARATE`.
    """

    device: torch.device
    dtype: torch.dtype
    kernel: str

    def about(self) -> dict[str, str]:
        """For the manifest."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "kernel": self.kernel}

    def autocast(self) -> torch.autocast:
        """Inside, matrix products are of this data type."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def weights_dtype(self, *, frozen: bool) -> torch.dtype:
        """The data type that weights are kept in: that of the computation where they are frozen, else float32 masters.

        The reference model is loaded by the same rule as the policy, so that both start from the same log-probabilities.
        """
        return self.dtype if frozen else torch.float32


# FLOPs of a matrix product from which on a second thread pays. Between products threads sleep, so as not to hold cores that
# others need, and to wake one takes longer than a small product.
WORTH_A_THREAD = 5e7


def use_threads(hidden_size: int, tokens: int, compute: Compute) -> None:
    """On a CPU, compute with one thread where a model's products are too small to be shared.

    Args:
        tokens: of a forward pass.
    """
    if compute.device.type == "cpu" and 2 * tokens * hidden_size**2 < WORTH_A_THREAD:
        torch.set_num_threads(1)


# mallopt(3): what is smaller isn't mapped by itself; what is free at the end is kept; one arena, for others give back heaps.
MALLOC = {-3: 32 * 2**20, -1: 2**31 - 1, -8: 1}


def keep_freed_memory() -> None:
    """Have glibc hold on to memory that tensors free: to get it back costs a page fault for each 4 KB of the next tensor.

    Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, value in MALLOC.items() if mallopt else ():
        mallopt(name, value)


# What torch says of an operation that it has no such kernel of.
NOT_DETERMINISTIC = "does not have a deterministic implementation"
# Those that cuBLAS computes deterministically with.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Inside, if enabled, torch takes kernels that give the same bits for the same input, or refuses.

    See torch's notes on reproducibility.
    Attention kernels read torch's switch. torch reads what cuBLAS may use from the environment, once, at the process's first
    matrix product: so this is entered before there is any, and what it sets stays set.

    Raises:
        SnaketuneError: an operation has no such kernel.
    """
    if not enabled:
        yield
        return
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = DETERMINISTIC_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that it hasn't written, and to fill it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if NOT_DETERMINISTIC not in str(error):
            raise
        first_sentence = str(error).partition(", but you set")[0]
        raise SnaketuneError(f"training.deterministic: {first_sentence}; expected `false` for this model") from error
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def resolve_compute(precision: str) -> Compute:
    """CUDA, else Apple's MPS, else the CPU; the data type for `training.precision`; and the kernel for both.

    Raises:
        SnaketuneError: bfloat16 was asked for on a GPU that lacks it.
    """
    device, dtype = _device(), _dtype(precision)
    return Compute(device=device, dtype=dtype, kernel=usable_kernels(device, dtype)[0])


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _dtype(precision: str) -> torch.dtype:
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" and torch.cuda.is_available() and not has_bf16:
        major, minor = torch.cuda.get_device_capability()
        raise SnaketuneError(
            f"training.precision: bfloat16 needs a GPU of compute capability 8.0 or higher, and {torch.cuda.get_device_name()} "
            f"has {major}.{minor}; expected `float32`, or `auto`, which is float32 there"
        )
    if precision == "bfloat16" or (precision == "auto" and has_bf16):
        return torch.bfloat16
    return torch.float32
