"""Trace of a model without its weights: its tensors, and the activations that its forward pass saves for the backward pass.

It needs the config alone and takes a second or two: a micro-batch runs through the decoder in `FakeTensorMode`, with adapters
as in training, while autograd's saved tensors are counted. So the figures follow the model's own code, for any family.
"""

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.lora import Lora
from snaketune.models.attention import use_segment_attention
from snaketune.models.compiling import layers_of
from snaketune.models.cpu_attention import attend_by_blocks
from snaketune.models.devices import Compute
from snaketune.models.flops import FlopCount, count_flops
from snaketune.models.kernels import SEPARATE
from snaketune.models.load_model import parameter_count
from snaketune.models.mixers import set_segments
from snaketune.models.packing_support import forward_inputs, unloaded_model
from snaketune.models.text_part import model_class
from snaketune.models.trainable import train_only
from snaketune.packing.segments import layout

FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter; `linear`: whether it is the matrix of a linear layer other than the head, which 4-bit quantization
    covers; `in_float32`: whether it is loaded in float32, as the frozen parts in a full training are."""

    shape: tuple[int, ...]
    trained: bool
    linear: bool = False
    embedding: bool = False
    in_float32: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Head:
    """The output head. `plain_linear`: a linear layer without bias; the forward may still scale or cap its logits."""

    vocabulary: int
    hidden: int
    trained: bool
    plain_linear: bool


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
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
    the head, None where transformers doesn't know it; parameters of the largest layer; activations, None where the
    forward pass depends on values and can't be traced, or no batch was given.

    And the last parts of names of modules: those that `all-linear` doesn't reach (`models.adapter_targets`), and embedding
    and head, where nothing of them is trained."""

    weights: tuple[Weight, ...]
    head: Head | None
    flops: FlopCount
    largest_layer: int
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


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Shape of a micro-batch: rows, tokens per row, and tokens of the longest document."""

    rows: int
    row_length: int
    longest: int


def trace_model(
    config: PretrainedConfig,
    compute: Compute,
    *,
    lora: Lora | None = None,
    trainable: str | None = None,
    batch: MicroBatch | None = None,
    dropout: bool = True,
) -> TracedModel | None:
    """Trace the model that a training would load, and its activations with `batch`, the model's own dropout on or off.

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
        if trainable:
            train_only(model, trainable)
        names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        # One of two tied modules trains both.
        named_head = embedding if getattr(head, "weight", None) is getattr(embedding, "weight", head) else head
        adapted = _adapted(model, lora)
        return TracedModel(
            weights=tuple(_weights(adapted, head)),
            head=_head(head),
            flops=count_flops(adapted),
            without_adapters=_without_adapters(adapted, lora),
            frozen_embedding="" if _is_trained(model.get_input_embeddings()) else names[embedding],
            frozen_head="" if head is None or _is_trained(model.get_output_embeddings()) else names[named_head],
            largest_layer=max((parameter_count(layer) for layer in layers_of(model)), default=0),
            activations=batch and _activations(config, compute, lora, trainable, batch, dropout),
        )


def _meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return unloaded_model(config, dtype)


def _adapted(model: PreTrainedModel, lora: Lora | None) -> torch.nn.Module:
    if not lora:
        return model
    # Imported here, since it imports peft.
    from snaketune.models.adapters import add_lora

    # Tensors without values have no main directions.
    return add_lora(model, lora.model_copy(update={"init_lora_weights": True}))


def _without_adapters(model: torch.nn.Module, lora: Lora | None) -> tuple[str, ...]:
    if not lora or lora.target_modules != "all-linear":
        return ()
    from snaketune.models.adapter_targets import without_adapters

    return tuple(without_adapters(model))


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _weights(model: torch.nn.Module, head: torch.nn.Module | None) -> Iterator[Weight]:
    seen = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield Weight(
                    shape=tuple(parameter.shape),
                    trained=parameter.requires_grad,
                    linear=isinstance(module, torch.nn.Linear) and parameter.dim() == 2 and module is not head,
                    embedding=isinstance(module, torch.nn.Embedding),
                    in_float32=parameter.dtype == torch.float32,
                )


def _head(head: torch.nn.Module | None) -> Head | None:
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        return None
    plain_linear = type(head) is torch.nn.Linear and head.bias is None
    return Head(*weight.shape, trained=weight.requires_grad, plain_linear=plain_linear)


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
                # The log holds tracebacks of errors that are caught here.
                with patch.object(FAKE_TENSOR_LOG, "disabled", True), FakeTensorMode(allow_non_fake_inputs=True):
                    saved = _trace(model, attempt, batch, dropout)
            except Exception:
                # Code that depends on values, and operations for one data type only, raise errors of any type.
                continue
            factor = 2 if compute.dtype == torch.float32 != attempt.dtype else 1
            return SavedActivations(**{name: size * factor for name, size in vars(saved).items()})
    return None


class _SavedTensors:
    """Storages that autograd saves, each once, without weights."""

    def __init__(self, model: torch.nn.Module):
        self.weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        # Holds references, so that the address of a freed storage isn't reused by another.
        self.activations: dict[int, torch.Tensor] = {}
        self.total = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in self.weights and address not in self.activations:
            self.activations[address] = tensor
            self.total += tensor.untyped_storage().nbytes()
        return tensor


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
    decoder = model.get_decoder()
    # On the CPU, whatever the device; autocast doesn't apply to meta tensors.
    model.to_empty(device="cpu").train(dropout)
    saved, layer_inputs, layer_sizes = _SavedTensors(model), [], []

    def enter(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        layer_inputs.append(hidden.untyped_storage().nbytes())
        layer_sizes.append(-saved.total)

    def leave(*_: Any) -> None:
        layer_sizes[-1] += saved.total

    for layer in layers_of(decoder):
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)
    cast = torch.autocast("cpu", dtype=compute.dtype, enabled=compute.dtype != torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor), cast:
        hidden = decoder(**inputs)[0]
    outside = saved.total - sum(layer_sizes)
    return SavedActivations(
        total=saved.total,
        checkpointed=outside + sum(layer_inputs) if layer_sizes else saved.total,
        layer=max(layer_sizes, default=0),
        hidden=hidden.shape[-1] * hidden.element_size(),
    )


def _flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Replace the kernel of a GPU. Flash kernels save what blocks on a CPU save: their inputs (contiguous by token, in
    the values' data type), their output, and a sum per query and head."""
    inputs = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    return attend_by_blocks(*inputs, (), None)
