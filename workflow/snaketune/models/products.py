"""Losses of output heads that are a product with their weight, forward and backward at the speed of matrix products.

The trick of making gradients in the forward, where the loss is a sum, is that of Liger's fused linear cross entropy (Hsu et
al., 2024) and of torch's `linear_cross_entropy`. Shapes as in `models.head`.
"""

import torch

# Logits of a chunk whose gradients are made at once: on a CPU as many as fit into its caches.
AT_ONCE = {"cpu": 2**21, "other": 2**26}
# Logits that are held for the backward pass.
FREE = 2**25
# Fewer rows make slow matrix products.
FEWEST_ROWS = 128


def target_logits(logits_CV: torch.Tensor, begin: int, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """[N]: of tokens that the C places from `begin` on predict, their logits; 0 for others."""
    place_N = rows_N - begin
    inside_N = (place_N >= 0) & (place_N < len(logits_CV))
    return torch.where(inside_N, logits_CV[place_N.clamp(0, len(logits_CV) - 1), targets_N], 0.0)


class TokenLosses(torch.autograd.Function):
    """Negative log-probabilities of targets under softmax(hidden x weight^T), float32[N].

    With E the exponentials of a place's logits, s their sum and g the gradients of the tokens that it predicts,
    d loss / d logits = sum(g) / s x E, less g at each token's own place. The factor goes into the hidden states, so that E is
    only multiplied by matrices. Of a place that predicts one token, s is taken off E there, in float32: of likely tokens
    little is left, which would drown in the rounding of 16 bits. Of the few that predict several, g is taken off the results.
    """

    @staticmethod
    def forward(ctx, hidden_UH, weight_VH, rows_N, targets_N, kept):
        """
        Args:
            rows_N: the hidden state that predicts each token.
            kept: whether there will be a backward pass.
        """
        device = hidden_UH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_UH.dtype
        cast_UH, cast_VH = hidden_UH.to(dtype), weight_VH.to(dtype)
        target_logits_N = torch.zeros(len(targets_N), dtype=torch.float32, device=hidden_UH.device)
        highest_U1, sums_U1 = (target_logits_N.new_empty(len(cast_UH), 1) for _ in range(2))
        target_U1 = torch.zeros(len(cast_UH), 1, dtype=torch.int64, device=hidden_UH.device)
        target_U1[rows_N, 0] = targets_N
        predicted_U1 = torch.zeros_like(highest_U1).index_add_(0, rows_N, torch.ones_like(target_logits_N)[:, None])
        single_U1 = (predicted_U1 == 1).float()
        ctx.rows = _rows_at_once(weight_VH)
        # Kept chunk by chunk: what is larger is memory that the system takes back and gives again.
        ctx.exponentials, free = [], max(FREE // len(weight_VH), ctx.rows) if kept else 0
        spare_CV = None
        with torch.autocast(device, enabled=False):
            for begin in range(0, len(cast_UH), ctx.rows):
                hidden_CH, chunk = cast_UH[begin : begin + ctx.rows], slice(begin, begin + ctx.rows)
                if spare_CV is None:
                    spare_CV = cast_UH.new_empty(len(hidden_CH), len(weight_VH))
                # In float32 the logits' own memory is worked in.
                work_CV = torch.mm(hidden_CH, cast_VH.t(), out=spare_CV[: len(hidden_CH)]).float()
                target_logits_N += target_logits(work_CV, begin, rows_N, targets_N)
                torch.amax(work_CV, 1, keepdim=True, out=highest_U1[chunk])
                torch.sum(work_CV.sub_(highest_U1[chunk]).exp_(), 1, keepdim=True, out=sums_U1[chunk])
                if begin + len(hidden_CH) <= free:
                    work_CV.scatter_add_(1, target_U1[chunk], -sums_U1[chunk] * single_U1[chunk])
                    ctx.exponentials.append(work_CV.to(dtype))
                    spare_CV = None
        if kept:
            ctx.save_for_backward(hidden_UH, weight_VH, rows_N, targets_N, highest_U1, sums_U1, target_U1, single_U1)
            ctx.dtype = dtype
        return (highest_U1 + sums_U1.log())[:, 0].index_select(0, rows_N) - target_logits_N

    @staticmethod
    def backward(ctx, grad_N):
        hidden_UH, weight_VH, rows_N, targets_N, highest_U1, sums_U1, target_U1, single_U1 = ctx.saved_tensors
        of_hidden, of_weight, *_ = ctx.needs_input_grad
        cast_UH, cast_VH = hidden_UH.to(ctx.dtype), weight_VH.to(ctx.dtype)
        factor_U1 = torch.zeros_like(sums_U1[:, 0]).index_add_(0, rows_N, grad_N)[:, None] / sums_U1
        grad_UH = torch.empty_like(cast_UH) if of_hidden else None
        grad_VH = torch.zeros_like(weight_VH) if of_weight else None
        exponentials, ctx.exponentials = ctx.exponentials[::-1], []
        with torch.autocast(hidden_UH.device.type, enabled=False):
            for begin in range(0, len(cast_UH), ctx.rows):
                chunk = slice(begin, begin + ctx.rows)
                if exponentials:
                    made_CV = exponentials.pop()
                else:
                    made_CV = (cast_UH[chunk] @ cast_VH.t()).float().sub_(highest_U1[chunk]).exp_()
                    made_CV.scatter_add_(1, target_U1[chunk], -sums_U1[chunk] * single_U1[chunk])
                    made_CV = made_CV.to(ctx.dtype)
                if of_hidden:
                    torch.mm(made_CV, cast_VH, out=grad_UH[chunk])
                if of_weight:
                    _add_product(grad_VH, made_CV.t(), (cast_UH[chunk] * factor_U1[chunk]).to(ctx.dtype))
            # What is still to be taken off.
            grad_N = grad_N * (1 - single_U1[rows_N, 0])
            if of_hidden:
                grad_UH = grad_UH.mul_(factor_U1).to(hidden_UH.dtype)
                grad_UH.index_add_(0, rows_N, (weight_VH[targets_N] * -grad_N[:, None]).to(grad_UH.dtype))
            if of_weight:
                grad_VH.index_add_(0, targets_N, (hidden_UH[rows_N] * -grad_N[:, None]).to(grad_VH.dtype))
        return grad_UH, grad_VH, None, None, None


def _rows_at_once(weight_VH: torch.Tensor) -> int:
    """So many logits of a chunk stay in a CPU's caches."""
    return max(AT_ONCE.get(weight_VH.device.type, AT_ONCE["other"]) // len(weight_VH), FEWEST_ROWS)


def _add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    else:
        total += one @ other


class SummedLosses(torch.autograd.Function):
    """Sum of the negative log-probabilities of targets under softmax(hidden x weight^T), with gradients made on the way.

    With p the probabilities and 1 the target's place, d loss / d logits = p - 1, whatever comes later but for a factor.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N):
        """float32 scalar; matrix products in autocast's data type, everything else in float32."""
        device = hidden_NH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
        of_hidden, of_weight, _ = ctx.needs_input_grad
        rows = _rows_at_once(weight_VH)
        cast_NH, cast_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        grad_NH = torch.empty_like(cast_NH) if of_hidden else None
        grad_VH = torch.zeros_like(weight_VH) if of_weight else None
        buffer_CV = cast_NH.new_empty(min(rows, len(cast_NH)), len(weight_VH))
        with torch.autocast(device, enabled=False):
            for begin in range(0, len(cast_NH), rows):
                hidden_CH, target_C1 = cast_NH[begin : begin + rows], targets_N[begin : begin + rows, None]
                logits_CV = torch.mm(hidden_CH, cast_VH.t(), out=buffer_CV[: len(hidden_CH)])
                # In float32 the logits' own memory is worked in.
                work_CV = logits_CV.float()
                target_logits_C1 = work_CV.gather(1, target_C1)
                highest_C1 = work_CV.amax(1, keepdim=True)
                sums_C1 = work_CV.sub_(highest_C1).exp_().sum(1, keepdim=True)
                total += (highest_C1 + sums_C1.log() - target_logits_C1).sum()
                if not (of_hidden or of_weight):
                    continue
                work_CV.div_(sums_C1).scatter_add_(1, target_C1, torch.full_like(target_logits_C1, -1.0))
                grad_CV = work_CV.to(dtype)
                if of_hidden:
                    torch.mm(grad_CV, cast_VH, out=grad_NH[begin : begin + rows])
                if of_weight:
                    _add_product(grad_VH, grad_CV.t(), hidden_CH)
        ctx.gradients = (None if grad_NH is None else grad_NH.to(hidden_NH.dtype), grad_VH)
        return total

    @staticmethod
    def backward(ctx, grad):
        """Scales what the forward made, in place: once."""
        grad_NH, grad_VH = ctx.gradients
        del ctx.gradients
        return *(None if made is None else made.mul_(grad) for made in (grad_NH, grad_VH)), None
