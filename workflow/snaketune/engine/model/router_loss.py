"""The load-balancing loss of mixtures of experts, if the model's own config asks for it (`output_router_logits: true`).

It keeps a router from sending most tokens to a few experts: per row, experts x sum over experts of (share of the tokens that
chose it) x (its mean router probability), by transformers' own function, over all tokens of the row without its padding; a
prompt that completions share is computed once and counts once. It is added with the config's own `router_aux_loss_coef`, as TRL
does.

A product of two means over tokens depends on which tokens they are over. TRL takes those of a micro-batch, so the number of
rows per device shapes its result. Here they are those of one row, and the rows of an optimizer step are averaged. It is TRL's
loss at one row per device, however many micro-batches and processes there are.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from snaketune.engine.model.kernels import SEPARATE
from snaketune.errors import SnaketuneError

ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """The load-balancing loss of a model, times its coefficient."""

    model: PreTrainedModel
    coefficient: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> "RouterLoss | None":
        """Return the loss that the model's config asks for; None if it asks for none. SnaketuneError: transformers has none for
        this model, though its config asks for it."""
        text = model.config.get_text_config()
        coefficient = getattr(text, "router_aux_loss_coef", None)
        if not (getattr(text, "output_router_logits", False) and coefficient):
            return None
        function, sizes = _function_of(model), ("num_experts", "num_experts_per_tok")
        if function is None or not all(hasattr(model, size) for size in sizes):
            raise SnaketuneError(
                f"config.json of the model: found output_router_logits: true, but transformers has no load-balancing loss for "
                f"{model.config.model_type} that packed rows support; set it to false"
            )
        return cls(model=model, coefficient=float(coefficient))

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[torch.Tensor, ...]]]:
        """Record the router logits of forward passes in the context. transformers collects them where the config asks for
        them; a hook takes them from the decoder's outputs, which the chunked head doesn't return."""
        logits: list[tuple[torch.Tensor, ...]] = []
        hook = self.model.get_decoder().register_forward_hook(
            lambda module, arguments, outputs: logits.append(getattr(outputs, "router_logits", None) or ())
        )
        try:
            yield logits
        finally:
            hook.remove()

    def summed(self, recorded: list[tuple[torch.Tensor, ...]], batch: dict[str, Any]) -> torch.Tensor:
        """Return the sum over a batch's rows of their losses, a scalar, with gradients. `recorded`: router logits, [T, E] by
        layer, of each pass of the decoder."""
        segments, tokens = batch["segments"], batch["input_ids"].numel()
        # A head that runs in chunks passes the decoder's outputs again; the first ones have the gradients.
        logits = recorded[0]
        if segments.kernel == SEPARATE:
            padded = segments.padded()
            of_layers = zip(*recorded[: len(padded.shapes)])
            logits = tuple(
                padded.merge(one.reshape(*shape, -1) for one, shape in zip(groups, padded.shapes))
                for groups in of_layers
            )
        if not logits or any(len(layer_TE) != tokens for layer_TE in logits):
            raise SnaketuneError(
                f"{self.model.config.model_type}: found router logits of {[tuple(one.shape) for one in logits]} for {tokens} "
                "tokens; set output_router_logits to false in its config.json"
            )
        # By layer and row, without padding.
        kept = [layer_TE.index_select(0, batch["router_tokens"]).split(batch["router_rows"]) for layer_TE in logits]
        function, model = _function_of(self.model), self.model
        losses = [function(row, model.num_experts, model.num_experts_per_tok) for row in zip(*kept)]
        return self.coefficient * torch.stack([torch.zeros((), device=batch["input_ids"].device), *losses]).sum()


def router_rows(rows: Sequence[dict[str, Any]], document_of: np.ndarray) -> dict[str, Any]:
    """Return which tokens of a batch are of which row, for `RouterLoss.summed`: `router_tokens`, int64, all tokens but padding;
    `router_rows`, how many are of each row, without rows of padding alone.

    Args:
        document_of: the document of each token of the batch, -1 for padding.
    """
    lengths = [int(row["segment_lengths"].sum()) for row in rows]
    return {
        "router_tokens": torch.from_numpy(np.flatnonzero(document_of >= 0)),
        "router_rows": [length for length in lengths if length],
    }


def _function_of(model: PreTrainedModel) -> Any:
    """Return the load-balancing loss in the module of the model's class; None if there is none with the usual arguments."""
    # FSDP replaces the class by a subclass of its own.
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    functions = (vars(module).get("load_balancing_loss_func") for module in modules if module)
    function = next(filter(None, functions), None)
    return function if function and [*inspect.signature(function).parameters] == ARGUMENTS else None
