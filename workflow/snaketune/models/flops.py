"""How many floating-point operations a training needs, counted from the model and from who sees whom.

Matrix products: a token costs 2 per parameter that it is multiplied with in the forward pass. Backward, a parameter that is
trained costs 4 (gradients of its input and of itself), a frozen one 2 (of its input alone, on the way to the adapters below).
So 6 for trained and 4 for frozen parameters; adapters are trained ones and count as such.

N is what a token is multiplied with: an input embedding is a look-up and doesn't count, a tied one counts once, as the head;
of experts count those that a token goes to. The field's plain 6N takes all parameters and leaves attention out.

Attention: a query that sees a key costs 2 per element of both for their product and 2 for the weighted value, in every head of
every layer that attends; twice that backward, since queries, keys and values all need gradients, whether or not the weights
that made them are frozen. What no one sees (other documents, beyond a window, free tokens) isn't counted.

Left out, as usual: everything that is no product, what gradient checkpointing computes again, and the loss. The head counts
for every token, as it does for everyone; where only those that predict a supervised one are projected, `computed` leaves the
others out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.models.load_model import parameter_numel

# As configs call the experts of a layer, and those of them that a token goes to.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
# In a list of experts, or in one tensor for all; what chooses among them is no expert.
EXPERT = re.compile(r"\bexperts\.(\d+\.|\w+$)")
ATTENTION_LAYER_TYPES = {"", "full_attention", "sliding_attention", "chunked_attention", "attention"}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A kind of layer that attends.

    Attributes:
        heads: of queries.
        sizes: elements of a query and of a value in each.
        window, chunk: queries see that many tokens back, or from the beginning of a chunk of that many on; None: everything.
    """

    heads: int
    sizes: tuple[int, int]
    window: int | None = None
    chunk: int | None = None

    @property
    def per_pair(self) -> int:
        """FLOPs of a query that sees a key, forward: their product, and the value's weight."""
        return 2 * self.heads * sum(self.sizes)

    def pairs(self, prefixes_D: np.ndarray, lengths_D: np.ndarray) -> int:
        """Visible (query, key) pairs of documents whose queries come after a prefix that they see.

        Eight tokens see 36 pairs, and five of them after a prefix of three 6 fewer; in a window of four, five of the eight
        see four keys:

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
    """What a batch costs, forward and backward.

    Attributes:
        trained, frozen: parameters that a token is multiplied with.
        head_per_token: FLOPs of the output head, which are part of the above.
        parameters: all there are, as the field's plain 6N counts them.
        experts: how many a token goes to, of how many; None without.
        layers: each kind of layer that attends, and how many there are.

    A batch of Qwen2.5-0.5B's shape in full training, documents of 300 and 700 tokens. Its 494M parameters are tied, so all
    count; 24 layers of 14 heads of 64:

    >>> full = FlopCount(trained=494_032_768, frozen=0, head_per_token=6 * 136_134_656, parameters=494_032_768,
    ...                  experts=None, layers=((Attention(heads=14, sizes=(64, 64)), 24),))
    >>> full.batch(np.array([0, 0]), np.array([300, 700])) / 1e12, 6 * 494_032_768 * 1000 / 1e12
    (3.039159552, 2.964196608)

    The second is the matrix products alone. Attention: (300 x 301 + 700 x 701) / 2 = 290,500 pairs, x 4 x 14 x 64 x 24 layers
    x 3 = 0.0750e12. As one document of 1000 tokens it would be 0.1292e12.
    """

    trained: int
    frozen: int
    head_per_token: int
    parameters: int
    experts: tuple[int, int] | None
    layers: tuple[tuple[Attention, int], ...]

    def batch(self, prefixes_D: np.ndarray, lengths_D: np.ndarray) -> int:
        """FLOPs of documents with so many tokens each, after shared prefixes of so many."""
        attention = sum(number * kind.per_pair * kind.pairs(prefixes_D, lengths_D) for kind, number in self.layers)
        # Forward and twice backward.
        return self.per_token * int(lengths_D.sum()) + 3 * attention

    def computed(self, flops: int, tokens: int, projected: int) -> int:
        """Of a batch's FLOPs those that are left where only so many of its tokens reach the head."""
        return flops - self.head_per_token * (tokens - projected)

    @property
    def per_token(self) -> int:
        """Without attention."""
        return 6 * self.trained + 4 * self.frozen

    @property
    def per_parameter(self) -> int:
        """The count's name: 6N, or 4N where most parameters are frozen."""
        return 4 if self.frozen > self.trained else 6

    def __str__(self) -> str:
        """
        >>> print(FlopCount(trained=80_740_352, frozen=7_070_619_136, head_per_token=4 * 544_997_376,
        ...                 parameters=7_696_356_864, experts=None, layers=()))
        4 x 7.07G frozen + 6 x 80.7M parameters + attention
        """
        kinds = ((4, self.frozen, " frozen"), (6, self.trained, ""))
        products = " + ".join(f"{k} x {_short(count)}{what}" for k, count, what in kinds if count)
        experts = " (with {} of {} experts)".format(*self.experts) if self.experts else ""
        return f"{products} parameters{experts} + attention"

    def about(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "counted": str(self),
            "trained": self.trained,
            "frozen": self.frozen,
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
    """Count for a model as it is about to be trained: adapters added, frozen what stays as it is."""
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config = inner.config.get_text_config()
    experts = _experts(config)
    counts = {True: 0.0, False: 0.0}
    for name, parameter in _multiplied(model):
        share = experts[0] / experts[1] if experts and _is_expert(name, parameter, experts[1]) else 1
        counts[parameter.requires_grad] += parameter_numel(parameter) * share
    return FlopCount(
        trained=round(counts[True]),
        frozen=round(counts[False]),
        head_per_token=_head(inner),
        parameters=sum(map(parameter_numel, model.parameters())),
        experts=experts,
        layers=_layers(config),
    )


def _multiplied(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters that aren't merely looked up, each once."""
    seen = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield f"{path}.{name}", parameter


def _head(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return sum((6 if p.requires_grad else 4) * parameter_numel(p) for p in head.parameters()) if head is not None else 0


def _experts(config: PretrainedConfig) -> tuple[int, int] | None:
    count, chosen = (_first_number(config, names) for names in (EXPERTS, EXPERTS_PER_TOKEN))
    return (chosen, count) if count and chosen else None


def _first_number(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _is_expert(name: str, parameter: torch.nn.Parameter, count: int) -> bool:
    return (parameter.dim() == 3 and len(parameter) == count) or bool(EXPERT.search(name))


def _layers(config: PretrainedConfig) -> tuple[tuple[Attention, int], ...]:
    # Of the rest, a model whose parts have configs of their own, attention isn't counted.
    count = getattr(config, "num_hidden_layers", 0)
    # Where layers differ, a value of all is refused.
    configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * count
    kinds = getattr(config, "layer_types", None) or [""] * count
    found = [_attention(one, kind) for one, kind in zip(configs, kinds)]
    return tuple((kind, found.count(kind)) for kind in dict.fromkeys(found) if kind)


def _attention(config: PretrainedConfig, kind: str) -> Attention | None:
    """Of one layer; `kind` is empty where the config says nothing of it. None if it doesn't attend."""
    heads = getattr(config, "num_attention_heads", 0)
    if not heads or kind not in ATTENTION_LAYER_TYPES:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return Attention(
        heads=heads,
        # Latent attention has heads of two sizes.
        sizes=(getattr(config, "qk_head_dim", None) or size, getattr(config, "v_head_dim", None) or size),
        window=window if kind in ("", "sliding_attention") else None,
        chunk=getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None,
    )
