"""A model as a training would load it, built without weights from its config: its parameters, FLOPs and saved activations.

Activations: a micro-batch runs through the decoder in `FakeTensorMode`, with adapters as in training, while the tensors that
autograd saves are counted.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.lora import Lora
from snaketune.engine.model.attention import use_segment_attention
from snaketune.engine.model.compiling import layers_of
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.flops import FlopCount, count_flops
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.mixers import set_segments
from snaketune.engine.model.packing_support import forward_inputs, unloaded_model
from snaketune.engine.model.parameters import REWARD_HEAD, parameter_count, train_only
from snaketune.engine.model.text_part import model_class
from snaketune.engine.packing.segments import layout

# It logs tracebacks of errors that `_activations` catches.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Shape of a micro-batch: rows, tokens per row, and tokens of the longest document."""

    rows: int
    row_length: int
    longest: int


@dataclass(frozen=True)
class Weight:
    """A parameter on the meta device; `linear`: whether it is the matrix of a linear layer other than the head, which 4-bit
    quantization covers."""

    parameter: torch.Tensor
    linear: bool = False
    embedding: bool = False

    @property
    def numel(self) -> int:
        return self.parameter.numel()

    @property
    def trained(self) -> bool:
        return self.parameter.requires_grad


class SavedActivations(NamedTuple):
    """Bytes that a micro-batch's forward pass saves for its backward pass, without the head: without gradient
    checkpointing, autocast's copies of weights included; with it (the inputs of the layers, and what is saved outside
    them); the largest of the layers' shares of `total`; and one token's hidden state."""

    total: int
    checkpointed: int
    layer: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """Properties of a model that are known before its weights are read: all parameters, adapters included, tied ones once;
    the head, None where transformers doesn't know it; parameters of the largest layer; the batch, and its activations, None
    where the forward pass depends on values and can't be traced, or no batch was given.

    And the last parts of names of modules: those that `all-linear` doesn't reach (`adapter_targets`), and embedding
    and head, where nothing of them is trained."""

    weights: tuple[Weight, ...]
    head: torch.nn.Module | None
    flops: FlopCount
    largest_layer: int
    batch: MicroBatch | None
    activations: SavedActivations | None
    without_adapters: tuple[str, ...] = ()
    frozen_embedding: str = ""
    frozen_head: str = ""

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def trained(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trained)


def trace_model(
    config: PretrainedConfig,
    compute: Compute,
    *,
    lora: Lora | None = None,
    trainable: str | None = None,
    batch: MicroBatch | None = None,
    dropout: bool = True,
    trained_model: Callable[[PreTrainedModel, int], PreTrainedModel] | None = None,
) -> TracedModel | None:
    """Trace the model that a training would load, and its activations with `batch`, the model's own dropout on or off.
    `trained_model`: makes the model that is trained from the one that is loaded, with a seed.

    Returns None where transformers can't build the model: its code is remote, or its config is inconsistent.
    SnaketuneError: the adapters, or the pattern of the parameters to train, don't fit the model.
    """
    if not model_class(config):
        return None
    with warnings.catch_warnings():
        # Repeated when the real model is built.
        warnings.simplefilter("ignore")
        try:
            model = _meta_model(config, compute.weights_dtype(frozen=lora is not None))
        except Exception:
            return None
        model = trained_model(model, 0) if trained_model else model
        if trainable:
            train_only(model, trainable)
        names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        # One of two tied modules trains both.
        named_head = embedding if getattr(head, "weight", None) is getattr(embedding, "weight", head) else head
        # That of a reward model has one output.
        projecting = head if head is not None else getattr(model, REWARD_HEAD, None)
        adapted = _adapted(model, lora)
        return TracedModel(
            weights=tuple(_weights(adapted, projecting)),
            head=projecting
            if getattr(projecting, "weight", None) is not None and projecting.weight.dim() == 2
            else None,
            flops=count_flops(adapted),
            without_adapters=_without_adapters(adapted, lora),
            frozen_embedding="" if _is_trained(model.get_input_embeddings()) else names[embedding],
            frozen_head="" if head is None or _is_trained(model.get_output_embeddings()) else names[named_head],
            largest_layer=max((parameter_count(layer) for layer in layers_of(model)), default=0),
            batch=batch,
            activations=batch and _activations(config, compute, lora, trainable, batch, dropout),
        )


def _meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return unloaded_model(config, dtype)


def _adapted(model: PreTrainedModel, lora: Lora | None) -> torch.nn.Module:
    if not lora:
        return model
    # Imported here, since it imports peft.
    from snaketune.models.lora import add_lora

    # Tensors without values have no main directions.
    return add_lora(model, lora.model_copy(update={"init_lora_weights": True}))


def _without_adapters(model: torch.nn.Module, lora: Lora | None) -> tuple[str, ...]:
    if not lora or lora.target_modules != "all-linear":
        return ()
    from snaketune.engine.model.adapter_targets import without_adapters

    return tuple(without_adapters(model))


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _weights(model: torch.nn.Module, head: torch.nn.Module | None) -> Iterator[Weight]:
    seen = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                linear = isinstance(module, torch.nn.Linear) and parameter.dim() == 2 and module is not head
                yield Weight(parameter, linear, isinstance(module, torch.nn.Embedding))


def _activations(
    config: PretrainedConfig,
    compute: Compute,
    lora: Lora | None,
    trainable: str | None,
    batch: MicroBatch,
    dropout: bool,
) -> SavedActivations | None:
    """Trace the whole model, else its text part; in the compute data type, else in bfloat16 with the sizes doubled."""
    half = replace(compute, dtype=torch.bfloat16)
    for part in (config, config.get_text_config()):
        for attempt, frozen in ((compute, lora is not None), (half, True)):
            try:
                model = _meta_model(part, attempt.weights_dtype(frozen=frozen))
                if trainable:
                    train_only(model, trainable)
                if lora:
                    _adapted(model, lora)
                    model.enable_input_require_grads()
                with FakeTensorMode(allow_non_fake_inputs=True):
                    saved = _trace(model, attempt, batch, dropout)
            except Exception:
                # Code that depends on values, and operations for one data type only, raise errors of any type.
                continue
            factor = 2 if compute.dtype == torch.float32 != attempt.dtype else 1
            return SavedActivations(*(factor * size for size in saved))
    return None


def _trace(model: PreTrainedModel, compute: Compute, batch: MicroBatch, dropout: bool) -> SavedActivations:
    documents = [*[batch.longest] * (batch.row_length // batch.longest), batch.row_length % batch.longest]
    lengths = [[length for length in documents if length]] * batch.rows
    rows = layout(lengths, [[0] * len(row) for row in lengths], row_lengths=[batch.row_length] * batch.rows)
    if compute.kernel == SEPARATE:
        ids_BL = torch.zeros(-(-rows.tokens // batch.longest), batch.longest, dtype=torch.int64)
        inputs = {"input_ids": ids_BL, "use_cache": False}
    else:
        use_segment_attention(model)
        inputs = forward_inputs(rows)
        if compute.kernel != "sdpa":
            inputs["segments"] = replace(inputs["segments"], compute=_flash_attention)
        set_segments(model, inputs["segments"])
    # On the CPU, whatever the device; autocast doesn't apply to meta tensors.
    model.to_empty(device="cpu").train(dropout)
    weights = {parameter.untyped_storage() for parameter in model.parameters()}
    # In the order of the forward pass, each once.
    saved: dict[torch.UntypedStorage, int] = {}
    layers: list[list[int]] = []
    layer_inputs = 0

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage not in weights:
            saved[storage] = storage.nbytes()
        return tensor

    def enter(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal layer_inputs
        layer_inputs += (arguments[0] if arguments else named["hidden_states"]).untyped_storage().nbytes()
        layers.append([len(saved)])

    def leave(*_: Any) -> None:
        layers[-1].append(len(saved))

    decoder = model.get_decoder()
    for layer in layers_of(decoder):
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)
    cast = torch.autocast("cpu", dtype=compute.dtype, enabled=compute.dtype != torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), cast:
        hidden = decoder(**inputs)[0]
    sizes = list(saved.values())
    of_layers, total = [sum(sizes[slice(*layer)]) for layer in layers], sum(sizes)
    return SavedActivations(
        total=total,
        checkpointed=total - sum(of_layers) + layer_inputs,
        layer=max(of_layers, default=0),
        hidden=hidden.shape[-1] * hidden.element_size(),
    )


def _flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Replace the kernel of a GPU. Flash kernels save what torch's on a CPU saves: their inputs (contiguous by token, in the
    values' data type, with heads of one size), their output, and a sum per query and head."""
    padded = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
    tensors = (tensor.to(value.dtype) for tensor in (query, key, padded))
    inputs = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)[..., : value.shape[-1]]
