"""Linear layers of float32 models whose products a CPU computes in bfloat16, at several times the rate of float32: in training
steps, and in the reference log-probabilities that they are compared with. Evaluations compute in float32, since rounding shows
in the log-probabilities of single documents.

Both factors are rounded to bfloat16, sums are in float32, and the product is rounded once; weights, gradients and everything
between the layers stay in float32. Autocast rounds the same products, but also runs what lies between them in bfloat16, for
which a CPU has no units.

oneDNN keeps a program with its buffers, about 1 MB, for each shape, and every packed batch has another number of tokens. So
factors get rows of zeros up to a multiple of ROWS. Shapes: T tokens, I features of the input, O of the output.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F

# Layers with fewer rows, as in generation, gain nothing: rounding the weights takes as long as the product.
ROWS = 64
_linear_in_float32 = F.linear


@contextmanager
def bfloat16_products(enabled: bool = True) -> Iterator[None]:
    """Compute linear layers of float32 tensors with bfloat16 factors while the context lasts, if enabled.

    It has to last until the end of the backward pass, which may run layers again. torch's function is replaced, since a
    torch function mode is off in backward passes, and changed modules would differ outside the context too.
    """
    with patch.object(F, "linear", _linear) if enabled else nullcontext():
        yield


def products_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the data type of products with this tensor here: that of autocast or of `bfloat16_products`, else its own."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.bfloat16 if F.linear is _linear and device == "cpu" else tensor.dtype


def as_factor(tensor_TI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a factor in this data type; in bfloat16 on a CPU with up to ROWS rows of zeros more.

    >>> as_factor(torch.ones(64, 2), torch.bfloat16).shape, as_factor(torch.ones(3, 2), torch.float32).shape
    (torch.Size([128, 2]), torch.Size([3, 2]))
    """
    factor_TI = tensor_TI.to(dtype)
    if dtype != torch.bfloat16 or tensor_TI.device.type != "cpu":
        return factor_TI
    # At least one row, since compiled code would differ for none.
    return F.pad(factor_TI, (0, 0, 0, ROWS - len(tensor_TI) % ROWS))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    in_float32 = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    many = input.device.type == "cpu" and input.numel() >= ROWS * input.shape[-1]
    # ZeRO 3 gathers weights for the module's own code only.
    if not (in_float32 and many) or hasattr(weight, "ds_id"):
        return _linear_in_float32(input, weight, bias)
    # The views are made outside, since models may change the result in place.
    return _Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias).view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_TI, weight_OI, bias_O):
        input_TI = as_factor(rows_TI, torch.bfloat16)
        ctx.save_for_backward(input_TI if ctx.needs_input_grad[1] else None, weight_OI)
        output_TO = (input_TI @ weight_OI.to(torch.bfloat16).t())[: len(rows_TI)].float()
        return output_TO if bias_O is None else output_TO.add_(bias_O)

    @staticmethod
    def backward(ctx, grad_TO):
        input_TI, weight_OI = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        factor_TO = as_factor(grad_TO, torch.bfloat16)
        grad_TI = grad_OI = None
        if needs_input:
            grad_TI = (factor_TO @ weight_OI.to(torch.bfloat16))[: len(grad_TO)].float()
        if needs_weight:
            grad_OI = (factor_TO.t() @ input_TI).float()
        return grad_TI, grad_OI, grad_TO.sum(0) if needs_bias else None
