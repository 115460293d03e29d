"""Linear layers of float32 models on a CPU, multiplied by oneDNN: in bfloat16 or in float32.

In bfloat16, for CPUs that have units for it, a product takes a quarter of the time of torch's own in float32. Both factors are
rounded to bfloat16, sums are in float32, and the product is rounded once; weights, gradients and everything between the layers
stay in float32. Autocast rounds the same products, but also runs what lies between them in bfloat16, for which a CPU has no
units. Training steps use it, and the reference log-probabilities that they are compared with; evaluations don't, since rounding
shows in the log-probabilities of single documents.

In float32 nothing is rounded. torch's own products are MKL's, which doesn't use AVX-512 on AMD's processors; there oneDNN is
twice as fast.

oneDNN keeps a program with its buffers, about 1 MB, for each shape, and every packed batch has another number of tokens. So
factors get rows of zeros up to a multiple of ROWS. Shapes: T tokens, I features of the input, O of the output.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F

# Layers with fewer rows, as in generation, gain nothing: rounding the weights takes as long as the product.
ROWS = 64
_torchs_linear = F.linear
# A private operation of torch's compiler; a torch without it multiplies float32 as it does by itself.
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


# An operation of our own, since the compiler expects constant weights in torch's. Not `torch.library.custom_op`, which searches
# all imported modules for its source, 40 ms in each process.
_LIBRARY = torch.library.Library("snaketune", "FRAGMENT")
_LIBRARY.define("onednn_product(Tensor one_MK, Tensor other_KN) -> Tensor")
_onednn_product = torch.ops.snaketune.onednn_product


@torch.library.impl(_LIBRARY, "onednn_product", "CPU")
def _(one_MK: torch.Tensor, other_KN: torch.Tensor) -> torch.Tensor:
    return _onednn_linear(one_MK, other_KN.t(), None, "none", [], "")


@torch.library.impl(_LIBRARY, "onednn_product", "Meta")
def _(one_MK: torch.Tensor, other_KN: torch.Tensor) -> torch.Tensor:
    return one_MK.new_empty(one_MK.shape[0], other_KN.shape[1])


@contextmanager
def cpu_products(dtype: torch.dtype) -> Iterator[None]:
    """Multiply in linear layers of float32 tensors on a CPU with factors of this data type while the context lasts.

    It has to last until the end of the backward pass, which may run layers again. torch's function is replaced, since a
    torch function mode is off in backward passes, and changed modules would differ outside the context too.
    """
    with patch.object(F, "linear", _LINEAR[dtype]):
        yield


def products_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the data type of products with this tensor here: that of autocast or of `cpu_products`, else its own."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.bfloat16 if F.linear is _LINEAR[torch.bfloat16] and device == "cpu" else tensor.dtype


def as_factor(tensor_TI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a factor in this data type; where oneDNN multiplies it, with up to ROWS rows of zeros more.

    >>> with cpu_products(torch.float32):
    ...     as_factor(torch.ones(64, 2), torch.float32).shape
    torch.Size([128, 2])
    >>> as_factor(torch.ones(64, 2), torch.float32).shape
    torch.Size([64, 2])
    """
    factor_TI = tensor_TI.to(dtype)
    if not _is_onednns(factor_TI):
        return factor_TI
    # At least one row, since compiled code would differ for none.
    return F.pad(factor_TI, (0, 0, 0, ROWS - len(tensor_TI) % ROWS))


def product(one_MK: torch.Tensor, other_KN: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the matrix product of factors of one data type, [M, N]."""
    if one_MK.dtype == torch.float32 and _is_onednns(one_MK):
        product_MN = _onednn_product(one_MK, other_KN)
        return product_MN if out is None else out.copy_(product_MN)
    return torch.mm(one_MK, other_KN, out=out)


def _is_onednns(factor: torch.Tensor) -> bool:
    if factor.device.type != "cpu":
        return False
    return factor.dtype == torch.bfloat16 or (
        factor.dtype == torch.float32 and F.linear in _LINEAR.values() and _onednn_linear is not None
    )


def _linear_with(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        in_float32 = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        many = input.device.type == "cpu" and input.numel() >= ROWS * input.shape[-1]
        # ZeRO 3 gathers weights for the module's own code only.
        if not (in_float32 and many) or hasattr(weight, "ds_id"):
            return _torchs_linear(input, weight, bias)
        # The views are made outside, since models may change the result in place.
        rows_TI = input.reshape(-1, input.shape[-1])
        output_TO = _Linear.apply(rows_TI, weight, bias, dtype)
        # In float32 with the zeros' rows.
        return (output_TO if dtype == torch.bfloat16 else output_TO[: len(rows_TI)]).view(*input.shape[:-1], -1)

    return linear


_LINEAR = {dtype: _linear_with(dtype) for dtype in (torch.float32, torch.bfloat16)}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_TI, weight_OI, bias_O, dtype):
        ctx.dtype, ctx.tokens = dtype, len(rows_TI)
        input_TI = as_factor(rows_TI, dtype)
        output_TO = product(input_TI, weight_OI.to(dtype).t())
        if dtype == torch.bfloat16:
            rows_TI, output_TO = input_TI, output_TO[: len(rows_TI)].float()
        # In float32 the rows are saved by the layer before, too, and those with zeros would be a second copy.
        ctx.save_for_backward(rows_TI if ctx.needs_input_grad[1] else None, weight_OI)
        return output_TO if bias_O is None else output_TO.add_(bias_O)

    @staticmethod
    def backward(ctx, grad_TO):
        rows_TI, weight_OI = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_TI = grad_OI = None
        factor_TO = as_factor(grad_TO, ctx.dtype) if ctx.dtype == torch.bfloat16 else grad_TO
        if needs_input:
            grad_TI = product(factor_TO, weight_OI.to(ctx.dtype))[: ctx.tokens].float()
        if needs_weight:
            input_TI = rows_TI if ctx.dtype == torch.bfloat16 else as_factor(rows_TI, ctx.dtype)
            grad_OI = product(factor_TO.t(), input_TI).float()
        return grad_TI, grad_OI, grad_TO.sum(0) if needs_bias else None, None
