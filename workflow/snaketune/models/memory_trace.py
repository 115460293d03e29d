"""A model that is going to be trained, before there is one: its tensors, and what its forward pass keeps for the backward.

From the config alone, in a second or two: transformers makes the model of tensors that have shapes and data types and hold
nothing; adapters are put in as the training puts them in; and a micro-batch is pushed through the decoder (`FakeTensorMode`)
while autograd tells what it would keep. So what is counted is what the model's own code does, whatever the family.

Shapes: B rows of L tokens, T = B x L.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from snaketune.config.training_runs import Lora
from snaketune.models.attention import attend, use_attention
from snaketune.models.compiling import layers_of
from snaketune.models.devices import Compute
from snaketune.models.flops import FlopCount, count_flops
from snaketune.models.kernels import segments_for
from snaketune.packing.segments import layout


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter.

    Attributes:
        trained: else it is frozen.
        linear: a linear layer's matrix, not the head's, which is what 4-bit quantization takes.
        embedding: looked up by token.
    """

    shape: tuple[int, ...]
    trained: bool
    linear: bool = False
    embedding: bool = False

    @property
    def numbers(self) -> int:
        """How many it holds."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class Head:
    """The output head, V words by H.

    Attributes:
        product: whether logits are a plain product with its weight, as far as its kind tells.
    """

    vocabulary: int
    hidden: int
    trained: bool
    product: bool


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that a micro-batch's forward pass keeps for its backward pass, the head left out.

    Attributes:
        whole: everything; casts of weights that autocast makes are in it.
        checkpointed: where layers are recomputed: what goes into each.
        layer: what the layer that keeps most keeps, in either case.
        hidden: of a token's hidden state.
    """

    whole: int
    checkpointed: int
    layer: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is known of a model before its weights are read.

    Attributes:
        weights: each once, tied ones too.
        head: None where transformers can't tell which it is.
        largest_layer: parameters of that layer.
        kept: None where the forward pass can't be followed without values, or isn't over packed rows.
    """

    weights: tuple[Weight, ...]
    head: Head | None
    flops: FlopCount
    largest_layer: int
    kept: Kept | None

    @property
    def parameters(self) -> int:
        """Without adapters these are what `loading.parameter_count` counts."""
        return sum(weight.numbers for weight in self.weights)

    @property
    def trained(self) -> int:
        """Those that learn."""
        return sum(weight.numbers for weight in self.weights if weight.trained)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch: rows of so many tokens, and the longest document in them."""

    rows: int
    row_length: int
    longest: int


def plan_model(
    config: PretrainedConfig,
    compute: Compute,
    *,
    lora: Lora | None = None,
    batch: Batch | None = None,
    dropout: bool = True,
) -> Planned | None:
    """What a training's model is going to be.

    Args:
        batch: that is pushed through it; None where nobody knows.
        dropout: whether the model's own works in training.
    Returns:
        None where transformers can't make such a model: its code comes with it, or its config is at odds with itself.
    Raises:
        SnaketuneError: the adapters don't fit the model.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with warnings.catch_warnings():
        # They come again, of the model itself.
        warnings.simplefilter("ignore")
        return _planned(config, compute, lora, batch, dropout)


def _planned(
    config: PretrainedConfig, compute: Compute, lora: Lora | None, batch: Batch | None, dropout: bool
) -> Planned | None:
    try:
        model = _made(config, compute.weights_dtype(frozen=lora is not None))
    except Exception:
        # Every family has its own ways to fail.
        return None
    adapted = _adapted(model, lora) if lora else model
    found = Planned(
        weights=tuple(_weights(adapted)),
        head=_head(model),
        flops=count_flops(adapted),
        largest_layer=max((sum(map(torch.Tensor.numel, layer.parameters())) for layer in layers_of(model)), default=0),
        kept=None,
    )
    return replace(found, kept=_kept(config, compute, lora, batch, dropout)) if batch else found


def _adapted(model: PreTrainedModel, lora: Lora) -> torch.nn.Module:
    # It imports peft.
    from snaketune.models.adapters import add_lora

    return add_lora(model, lora)


def _made(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)


def _weights(model: torch.nn.Module) -> Iterator[Weight]:
    head = _inner(model).get_output_embeddings()
    seen = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            yield Weight(
                shape=tuple(parameter.shape),
                trained=parameter.requires_grad,
                linear=isinstance(module, torch.nn.Linear) and parameter.dim() == 2 and module is not head,
                embedding=isinstance(module, torch.nn.Embedding),
            )


def _inner(model: torch.nn.Module) -> PreTrainedModel:
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _head(model: PreTrainedModel) -> Head | None:
    """Its weight is asked for, adapters around it or not."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        return None
    return Head(
        vocabulary=weight.shape[0],
        hidden=weight.shape[1],
        trained=weight.requires_grad,
        product=type(head) is torch.nn.Linear and head.bias is None,
    )


def _kept(config: PretrainedConfig, compute: Compute, lora: Lora | None, batch: Batch, dropout: bool) -> Kept | None:
    """Of the whole model, else of its text part; in the data type of the computation, else in bfloat16, doubled."""
    half = Compute(device=compute.device, dtype=torch.bfloat16, kernel=compute.kernel)
    for tried in (config, config.get_text_config()):
        for computed, frozen in ((compute, lora is not None), (half, True)):
            try:
                found = _followed(tried, computed, computed.weights_dtype(frozen=frozen), lora, batch, dropout)
            except Exception:
                # What depends on values that aren't there, and operations that know only one data type, fail in many ways.
                continue
            wider = 2 if compute.dtype == torch.float32 != computed.dtype else 1
            return Kept(**{name: size * wider for name, size in vars(found).items()})
    return None


class _Ledger:
    """Storages that autograd keeps, each once, weights left out."""

    def __init__(self, model: torch.nn.Module):
        self.weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        # Held, so that no other storage gets the name of one that is gone.
        self.kept: dict[int, torch.Tensor] = {}
        self.total = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        name = tensor.untyped_storage()._cdata
        if name not in self.weights and name not in self.kept:
            self.kept[name] = tensor
            self.total += tensor.untyped_storage().nbytes()
        return tensor


def _followed(
    config: PretrainedConfig, compute: Compute, dtype: torch.dtype, lora: Lora | None, batch: Batch, dropout: bool
) -> Kept:
    documents = [*[batch.longest] * (batch.row_length // batch.longest), batch.row_length % batch.longest]
    lengths = [[length for length in documents if length]] * batch.rows
    placed = layout(lengths, [[0] * len(row) for row in lengths], row_lengths=[batch.row_length] * batch.rows)

    model = _made(config, dtype)
    use_attention(model, attend if compute.kernel == "sdpa" else _flash_attention)
    decoder = model.get_decoder()
    if lora:
        _adapted(model, lora)
        model.enable_input_require_grads()
    model.train(dropout)
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _on_fake_cpu(model, mode)
        ledger, entries, layers = _Ledger(model), [], []

        def enter(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = arguments[0] if arguments else named["hidden_states"]
            entries.append(hidden.untyped_storage().nbytes())
            layers.append(-ledger.total)

        def leave(*_: Any) -> None:
            layers[-1] += ledger.total

        for layer in layers_of(decoder):
            layer.register_forward_pre_hook(enter, with_kwargs=True)
            layer.register_forward_hook(leave)
        cast = torch.autocast("cpu", dtype=compute.dtype, enabled=compute.dtype != torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(ledger.note, lambda tensor: tensor), cast:
            given = decoder(
                input_ids=torch.zeros(1, placed.tokens, dtype=torch.int64),
                position_ids=torch.from_numpy(placed.positions)[None],
                segments=segments_for("sdpa", placed),
                use_cache=False,
            )[0]
        outside = ledger.total - sum(layers)
        return Kept(
            whole=ledger.total,
            checkpointed=outside + sum(entries) if layers else ledger.total,
            layer=max(layers, default=0),
            hidden=given.shape[-1] * given.element_size(),
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracebacks of what is caught here."""
    talker = logging.getLogger("torch._subclasses.fake_tensor")
    before = talker.level
    talker.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        talker.setLevel(before)


def _on_fake_cpu(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Tensors of the meta device become fake ones of a CPU, where autocast does what it does; tied ones stay tied."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    fake = mode.fake_tensor_converter.from_meta_and_device(mode, tensor.detach(), torch.device("cpu"))
                    learns = isinstance(tensor, torch.nn.Parameter)
                    moved[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if learns else fake
                own[name] = moved[tensor]


class _Flash(torch.autograd.Function):
    """What kernels of the flash family keep: what goes in, what comes out, and a number for each query and head."""

    @staticmethod
    def forward(ctx, query_THD, key_TKD, value_TKD):
        tokens, heads, _ = query_THD.shape
        out_THD = value_TKD.new_empty(tokens, heads, value_TKD.shape[-1])
        sums_HT = query_THD.new_empty(heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, out_THD, sums_HT)
        return out_THD


def _flash_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """In the place of `attention.attend` on a GPU: heads laid end to end, in the values' data type."""
    ends = (tensor[0].transpose(0, 1).to(value.dtype).contiguous() for tensor in (query, key, value))
    return _Flash.apply(*ends)[None], None
