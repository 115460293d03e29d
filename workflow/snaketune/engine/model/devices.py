"""Device, compute data type and attention kernel of a process, resolved once; threads, allocator and determinism."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

from snaketune.engine.model.attention import usable_kernels
from snaketune.engine.threads import MIN_WIDTH_FOR_THREADS
from snaketune.errors import SnaketuneError

# mallopt(3): M_MMAP_THRESHOLD, smaller blocks aren't mmapped; M_TRIM_THRESHOLD, the heap's top isn't returned; M_ARENA_MAX, one
# arena, since others return their heaps.
MALLOC_OPTIONS = {-3: 32 * 2**20, -1: 2**31 - 1, -8: 1}
# Part of torch's error message for operations without a deterministic kernel.
NOT_DETERMINISTIC = "does not have a deterministic implementation"
# Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Device, data type of the computation, and kernel (of `engine.model.kernels.KERNELS`, or `engine.model.kernels.SEPARATE`).

    Attributes:
        matmul_precision: torch's setting for products of float32 matrices in training steps on a CPU. "medium" lets torch
            choose oneDNN, which rounds the factors to bfloat16 where the processor has matrix units for it (AMX).
    """

    device: torch.device
    dtype: torch.dtype
    kernel: str
    matmul_precision: Literal["highest", "medium"] = "highest"

    def about(self) -> dict[str, str]:
        """Return data type and kernel for the manifest, and the precision of products if it isn't the data type's."""
        reduced = {"matmul_precision": self.matmul_precision} if self.matmul_precision != "highest" else {}
        return {"dtype": str(self.dtype).removeprefix("torch."), "kernel": self.kernel} | reduced

    @property
    def products(self) -> torch.dtype:
        """The data type that factors of matmuls in training steps are rounded to at most."""
        return torch.bfloat16 if self.matmul_precision == "medium" else self.dtype

    @contextmanager
    def training_precision(self) -> Iterator[None]:
        """Multiply float32 matrices as in training steps while the context lasts. It has to last until the end of the backward
        pass. Reference passes, evaluations and measurements are outside of it, at "highest"."""
        before = torch.get_float32_matmul_precision()
        if self.matmul_precision != "highest":
            torch.set_float32_matmul_precision(self.matmul_precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def autocast(self) -> torch.autocast:
        """Return a context in which matmuls run in `dtype`."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def weights_dtype(self, *, frozen: bool) -> torch.dtype:
        """Return the data type to load weights in: the compute data type if frozen, else float32 (master weights). The
        reference model follows the same rule as the policy, so that both start from the same log-probabilities."""
        return self.dtype if frozen else torch.float32


def resolve_compute(precision: str, training: bool = False) -> Compute:
    """Return the device (CUDA, else MPS, else CPU), the data type for `training.precision`, and the fastest usable kernel.

    Args:
        training: whether for training steps: with `auto`, a CPU with matrix units (AMX) multiplies at torch's matmul precision
            "medium", in bfloat16. On others, that setting makes attention over short documents up to three times slower.
    Raises:
        SnaketuneError: `precision` is bfloat16 on a GPU that doesn't support it.
    """
    on_gpu = torch.cuda.is_available()
    has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" and on_gpu and not has_bf16:
        major, minor = torch.cuda.get_device_capability()
        raise SnaketuneError(
            f"training.precision: bfloat16 needs a GPU of compute capability 8.0 or higher, and {torch.cuda.get_device_name()} "
            f"has {major}.{minor}; expected `float32`, or `auto`, which is float32 there"
        )
    in_bf16 = precision == "bfloat16" or (precision == "auto" and has_bf16)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    reduced = training and precision == "auto" and device.type == "cpu"
    reduced = reduced and bool(torch.cpu.get_capabilities().get("amx_bf16"))
    kernel = usable_kernels(device, dtype)[0]
    return Compute(device=device, dtype=dtype, kernel=kernel, matmul_precision="medium" if reduced else "highest")


def use_threads(config: PretrainedConfig, compute: Compute) -> None:
    """On a CPU, compute with one thread if the model is too small to gain from several."""
    if compute.device.type == "cpu" and config.get_text_config().hidden_size < MIN_WIDTH_FOR_THREADS:
        torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """Make glibc retain freed memory: getting it back from the system costs a page fault per 4 KB of the next tensor."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, value in MALLOC_OPTIONS.items() if mallopt else ():
        mallopt(name, value)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms in torch while the context lasts, if enabled; SnaketuneError: an operation has none.

    Attention kernels read torch's switch. cuBLAS' workspace is read from the environment once, at the process's first
    matmul: enter this context before it. The environment variable stays set.
    """
    if not enabled:
        yield
        return
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = DETERMINISTIC_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    # Filling takes time, and no code here reads uninitialized memory.
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
