"""The losses of direct preference optimization on log-ratios of policy to reference.

With pi = policy and ref = reference, each summed over a completion's tokens:

    chosen   = log pi(chosen)   - log ref(chosen)
    rejected = log pi(rejected) - log ref(rejected)
    reward   = beta * chosen (or rejected), margin = reward(chosen) - reward(rejected)
"""

import torch
import torch.nn.functional as F


def dpo_loss(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    counts_P2: torch.Tensor,
    *,
    loss: str,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of each pair.

    sigmoid (Rafailov et al., 2023, eq. 7), with label smoothing s the expectation over labels that are flipped with
        probability s ("conservative DPO", Mitchell, 2023): -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)
    hinge (SLiC, Zhao et al., 2023): max(0, 1 - margin)
    ipo (Azar et al., 2023, eq. 17): (d - 1 / (2 beta))^2, where d is the difference of the log-ratios per token, the
        normalization that its authors use.

    Args:
        chosen_P, rejected_P: float32[P], log-ratios.
        counts_P2: int64[P, 2], tokens of the chosen and the rejected completion.
    Returns:
        float32[P].
    Raises:
        ValueError: no loss of that name.

    >>> ratio = torch.tensor([2.0])
    >>> round(dpo_loss(ratio, -ratio, torch.tensor([[4, 4]]), loss="sigmoid", beta=0.5).item(), 4)
    0.1269
    >>> dpo_loss(ratio, -ratio, torch.tensor([[4, 4]]), loss="hinge", beta=0.1).item()
    0.6000000238418579
    >>> dpo_loss(ratio, -ratio, torch.tensor([[4, 4]]), loss="ipo", beta=0.25).item()
    1.0
    """
    if loss == "ipo":
        counts = counts_P2.clamp(min=1)
        return (chosen_P / counts[:, 0] - rejected_P / counts[:, 1] - 1 / (2 * beta)) ** 2
    margin_P = beta * (chosen_P - rejected_P)
    if loss == "hinge":
        return torch.relu(1 - margin_P)
    if loss != "sigmoid":
        raise ValueError(f"no formula for loss {loss!r}")
    return -(1 - label_smoothing) * F.logsigmoid(margin_P) - label_smoothing * F.logsigmoid(-margin_P)
