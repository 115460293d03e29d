"""Optimizers that transformers doesn't build: LoRA+ (peft), and Muon for matrices with AdamW for all else (torch). And a
schedule without a step at a rate of zero.
"""

from collections.abc import Iterable
from typing import Any

import torch
from peft.optimizers import create_loraplus_optimizer
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer

from snaketune.engine.model.parameters import REWARD_HEAD


def create_optimizer(
    trainer: Trainer, model: torch.nn.Module, muon: bool, loraplus_lr_ratio: float | None
) -> Optimizer | None:
    """Muon or LoRA+ for a trainer's model, with the trainer's arguments; None if transformers builds the optimizer."""
    args = trainer.args
    if loraplus_lr_ratio:
        kind, arguments = trainer.get_optimizer_cls_and_kwargs(args, model)
        arguments |= {"loraplus_weight_decay": args.weight_decay}
        # Where embeddings have adapters: peft's default would be a fixed 1e-6.
        arguments |= {"loraplus_lr_embedding": args.learning_rate}
        return create_loraplus_optimizer(model, kind, loraplus_lr_ratio=loraplus_lr_ratio, **arguments)
    if muon:
        decays = set(trainer.get_decay_parameter_names(model))
        return MuonWithAdamW(model, args.learning_rate, (args.adam_beta1, args.adam_beta2), args.weight_decay, decays)
    return None


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al., 2024) for matrices, and AdamW for embeddings, output head, norms, biases and fused experts.

    Muon's steps are scaled to the size of AdamW's (`match_rms_adamw`: Liu et al., 2025), so that both have one learning rate.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        decays: Iterable[str],
    ):
        """Args: decays: names of the parameters with weight decay; matrices have it in any case."""
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        embeddings = {parameter for layer in ends if layer is not None for parameter in layer.parameters()}
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        embeddings |= {parameter for name, parameter in trained.items() if REWARD_HEAD in name.split(".")}
        matrices = [parameter for parameter in trained.values() if parameter.dim() == 2 and parameter not in embeddings]
        others = {
            name: parameter
            for name, parameter in trained.items()
            if not any(parameter is matrix for matrix in matrices)
        }
        decayed, rest = (
            [parameter for name, parameter in others.items() if (name in decays) == chosen] for chosen in (True, False)
        )
        adamw = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        adamw = [group for group in adamw if group["params"]]
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"))
        if adamw:
            self.parts.append(AdamW(adamw, learning_rate, betas, fused=True))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give the parts the groups and states of this optimizer, which schedules change and checkpoints restore."""
        begin = 0
        for part in self.parts:
            end = begin + len(part.param_groups)
            part.param_groups, part.state, begin = self.param_groups[begin:end], self.state, end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def without_rate_zero(schedule: LRScheduler, warmup: int) -> LRScheduler:
    """One of transformers' schedules whose warm-up is one step ahead: its first step has a rate above zero, and two steps have
    the full one."""
    if not (warmup and isinstance(schedule, LambdaLR)):
        return schedule
    ahead = [lambda step, share=share: share(step + (step < warmup)) for share in schedule.lr_lambdas]
    return LambdaLR(schedule.optimizer, ahead)
