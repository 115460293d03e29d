"""Count of the floating-point operations of a training, from the model and the visible (query, key) pairs.

Matmuls: 6 per token and trained parameter that multiplies it, adapters included (2 forward, 4 backward), and 4 per frozen one,
2 in the layers below all that is trained, which have no backward pass.
An input embedding is a look-up and doesn't count, a tied one counts once, as the head; of the experts, those that a token is
routed to count. Attention: 4 per visible pair and element of a head, in every head of every attention layer; twice that in the
backward pass. As usual, other operations, recomputation by gradient checkpointing, and the loss are omitted. The head counts
for every token; where only positions that predict supervised tokens are projected, `computed` subtracts the rest.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.engine.model.compiling import layers_of
from snaketune.engine.model.parameters import parameter_count, parameter_numel
from snaketune.engine.model.text_part import other_parameters

# Config keys for the number of experts per layer, and for the number that a token is routed to.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
# Names of experts' parameters, in a list of modules or in one tensor for all experts; routers don't match.
EXPERT = re.compile(r"\bexperts\.(\d+\.|\w+$)")
ATTENTION_LAYER_TYPES = {"", "full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A kind of attention layer: number of query heads, head sizes of queries and of values, and in tokens the size of the
    sliding window, or of the chunks within which queries attend."""

    heads: int
    sizes: tuple[int, int]
    window: int | None = None
    chunk: int | None = None

    @property
    def per_pair(self) -> int:
        """FLOPs per visible (query, key) pair in the forward pass: dot product and weighted value."""
        return 2 * self.heads * sum(self.sizes)

    def pairs(self, prefixes_D: np.ndarray, lengths_D: np.ndarray) -> int:
        """Count the visible (query, key) pairs of documents of `lengths_D` tokens after shared prefixes of `prefixes_D` tokens.

        Eight tokens have 36 pairs; five tokens after a prefix of three have 6 fewer; in a window of four, five of the eight
        see four keys.

        >>> kinds = [Attention(heads=14, sizes=(64, 64), **seen) for seen in ({}, {"window": 4}, {"chunk": 4})]
        >>> [kind.pairs(np.array([0]), np.array([8])) for kind in kinds]
        [36, 26, 20]
        >>> [kind.pairs(np.array([3]), np.array([5])) for kind in kinds]
        [30, 20, 14]
        """
        return int((self._pairs_up_to(prefixes_D + lengths_D) - self._pairs_up_to(prefixes_D)).sum())

    def _pairs_up_to(self, queries_D: np.ndarray) -> np.ndarray:
        queries_D = queries_D.astype(np.int64)
        if self.chunk:
            whole_D, rest_D = np.divmod(queries_D, self.chunk)
            return whole_D * _triangle(self.chunk) + _triangle(rest_D)
        if self.window:
            growing_D = np.minimum(queries_D, self.window)
            return _triangle(growing_D) + (queries_D - growing_D) * self.window
        return _triangle(queries_D)


def _triangle(side):
    return side * (side + 1) // 2


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """FLOPs of the forward and backward passes, from the parameters that a token is multiplied with; the head's per token are
    included. `parameters` are all, as in the common 6N; `experts` those per token, and per layer. `forward_only` and
    `forward_layers` are the parameters and attention of the layers below all that is trained; `layers` includes these.

    Documents of 300 and 700 tokens in full training of Qwen2.5-0.5B, and the matmuls of these alone. 24 layers of 14 heads of
    64 see (300 x 301 + 700 x 701) / 2 = 290,500 pairs, x 4 x 14 x 64 x 24 x 3 = 0.0750e12:

    >>> full = FlopCount(trained=494_032_768, frozen=0, head_per_token=6 * 136_134_656, parameters=494_032_768,
    ...                  experts=None, layers=((Attention(heads=14, sizes=(64, 64)), 24),))
    >>> full.batch(np.array([0, 0]), np.array([300, 700])) / 1e12, 6 * 494_032_768 * 1000 / 1e12
    (3.039159552, 2.964196608)
    """

    trained: int
    frozen: int
    head_per_token: int
    parameters: int
    experts: tuple[int, int] | None
    layers: tuple[tuple[Attention, int], ...]
    forward_only: int = 0
    forward_layers: tuple[tuple[Attention, int], ...] = ()

    def batch(self, prefixes_D: np.ndarray, lengths_D: np.ndarray) -> int:
        """Return the FLOPs of documents of `lengths_D` tokens after shared prefixes of `prefixes_D` tokens."""
        forward, without_backward = (
            sum(number * kind.per_pair * kind.pairs(prefixes_D, lengths_D) for kind, number in layers)
            for layers in (self.layers, self.forward_layers)
        )
        # 1 x forward and 2 x backward.
        return self.per_token * int(lengths_D.sum()) + 3 * forward - 2 * without_backward

    def computed(self, flops: int, tokens: int, projected: int) -> int:
        """Return a batch's `flops` less those of the tokens that the head doesn't project."""
        return flops - self.head_per_token * (tokens - projected)

    @property
    def per_token(self) -> int:
        """FLOPs per token, without attention."""
        return 6 * self.trained + 4 * self.frozen + 2 * self.forward_only

    @property
    def per_parameter(self) -> int:
        """FLOPs per parameter and token: 6 (6N), or 4 where most parameters are frozen (4N)."""
        return 4 if self.frozen + self.forward_only > self.trained else 6

    def __str__(self) -> str:
        """
        >>> print(FlopCount(trained=80_740_352, frozen=7_070_619_136, head_per_token=4 * 544_997_376,
        ...                 parameters=7_696_356_864, experts=None, layers=()))
        4 x 7.07G frozen + 6 x 80.7M parameters + attention
        """
        kinds = ((2, self.forward_only, " frozen below"), (4, self.frozen, " frozen"), (6, self.trained, ""))
        terms = " + ".join(f"{k} x {_short(count)}{what}" for k, count, what in kinds if count)
        experts = " (with {} of {} experts)".format(*self.experts) if self.experts else ""
        return f"{terms} parameters{experts} + attention"

    def about(self) -> dict[str, Any]:
        """Return the count for run.json."""
        return {
            "counted": str(self),
            "trained": self.trained,
            "frozen": self.frozen,
            **({"forward_only": self.forward_only} if self.forward_only else {}),
            "head_flops_per_token": self.head_per_token,
            "all_parameters": self.parameters,
            "experts_per_token": self.experts and list(self.experts),
            "attention": [
                {"layers": number, "heads": kind.heads, "head_sizes": list(kind.sizes)}
                | {name: size for name in ("window", "chunk") if (size := getattr(kind, name))}
                for kind, number in self.layers
            ],
        }


def _short(count: int) -> str:
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= pair[0]), (1, ""))
    return f"{count / size:.3g}{unit}"


def count_flops(model: torch.nn.Module) -> FlopCount:
    """Count the FLOPs of a model that is ready for training: adapters added, other parameters frozen."""
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config = inner.config.get_text_config()
    experts = experts_of(config)
    share = experts[0] / experts[1] if experts else 1
    # By the FLOPs per token and parameter.
    counts = {6: 0.0, 4: 0.0, 2: 0.0}
    unused, below = other_parameters(inner), _layers_below_trained(inner)
    forward_only = {parameter for layer in below for parameter in layer.parameters()}
    for name, parameter in _multiplied(model):
        if parameter in unused:
            continue
        flops = 6 if parameter.requires_grad else 2 if parameter in forward_only else 4
        counts[flops] += parameter_numel(parameter) * (share if is_expert(config, name, parameter) else 1)
    head = inner.get_output_embeddings()
    return FlopCount(
        trained=round(counts[6]),
        frozen=round(counts[4]),
        forward_only=round(counts[2]),
        forward_layers=_layers(config, len(below)),
        head_per_token=sum(
            (6 if parameter.requires_grad else 4) * parameter_numel(parameter)
            for parameter in (head.parameters() if head is not None else ())
        ),
        parameters=parameter_count(model),
        experts=experts,
        layers=_layers(config),
    )


def experts_of(config: PretrainedConfig) -> tuple[int, int] | None:
    """Return the numbers of experts per token and per layer; None for a model without."""
    text = config.get_text_config()
    count, chosen = (_first_number(text, names) for names in (EXPERTS, EXPERTS_PER_TOKEN))
    return (chosen, count) if count and chosen else None


def is_expert(config: PretrainedConfig, name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to experts that tokens are routed to."""
    experts = experts_of(config)
    in_one = experts and parameter.dim() == 3 and len(parameter) == experts[1]
    return bool(experts and (in_one or EXPERT.search(name)))


def _layers_below_trained(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the layers of the text part before the first one with a trained parameter; none if the embedding is trained, or
    nothing."""

    def is_frozen(module: torch.nn.Module) -> bool:
        return not any(parameter.requires_grad for parameter in module.parameters())

    if is_frozen(model) or not is_frozen(model.get_input_embeddings()):
        return []
    decoder = model.get_decoder()
    return list(takewhile(is_frozen, layers_of(decoder if isinstance(decoder, torch.nn.Module) else model)))


def _multiplied(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the names and parameters that tokens are multiplied with, each once; embeddings are look-ups."""
    seen = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, torch.nn.Embedding) and parameter not in seen:
                seen.add(parameter)
                yield f"{path}.{name}", parameter


def _first_number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _layers(config: PretrainedConfig, first: int | None = None) -> tuple[tuple[Attention, int], ...]:
    """Return the kinds of attention and their numbers, of all layers or the `first` ones."""
    # Without this key (models whose parts have configs of their own), attention isn't counted.
    count = getattr(config, "num_hidden_layers", 0)
    # Heterogeneous configs raise an error for a value that differs between layers.
    configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * count
    kinds = getattr(config, "layer_types", None) or [""] * count
    layers = [_attention(layer, kind) for layer, kind in zip(configs, kinds)][:first]
    return tuple((layer, layers.count(layer)) for layer in dict.fromkeys(layers) if layer)


def _attention(config: PretrainedConfig, kind: str) -> Attention | None:
    """Return the attention of one layer, None if it has none; `kind` is empty where the config has no layer types."""
    heads = getattr(config, "num_attention_heads", 0)
    if not heads or kind not in ATTENTION_LAYER_TYPES:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return Attention(
        heads=heads,
        # In latent attention (DeepSeek), head sizes of queries and values differ.
        sizes=(getattr(config, "qk_head_dim", None) or size, getattr(config, "v_head_dim", None) or size),
        window=window if kind in ("", "sliding_attention") else None,
        chunk=getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None,
    )
