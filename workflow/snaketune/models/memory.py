"""Estimate of the peak memory of each training process in bytes, from the config of a model alone, in a second or two.

    peak = already used + weights + optimizer states + the maximum over
             output head       accumulated gradients + saved activations + the head's working memory
             last layer        accumulated gradients + saved activations + what remains of the head + one layer
             first layer       gradients + one layer, and the same again for the gradients of its activations

weights       trained: 4 bytes; frozen: the size of the compute data type; under QLoRA, linear layers take 4.13 bits with double
              quantization and 4.5 without (Dettmers et al., 2023), everything else 4 bytes
gradients     4 bytes per trained parameter; accumulated: all of them where a step has several micro-batches, else none. DDP's
              buckets take the same again
states        `config.optimizers.OPTIMIZERS`, 4 bytes or 1 byte each; bitsandbytes keeps embeddings and tensors of fewer than
              4096 elements in 32 bits; Adafactor stores rows + columns per matrix (Shazeer and Stern, 2018)
activations   traced: a micro-batch runs through the decoder in `FakeTensorMode`, with adapters as in training, while autograd's
              saved tensors are counted. With gradient checkpointing: the inputs of the layers, and one layer
head          `chunked_head`: hidden states and their gradient, the weight's cast and gradient, the logits of a chunk

FSDP and ZeRO 3 shard weights, gradients and states and gather two layers at a time; ZeRO 2 shards gradients and states.
Measured accuracy: `docs/LOG.md`; compiled layers save fewer activations than estimated. A Llama of 22.9M parameters on an H100
with AdamW and two micro-batches of 16 x 1024 tokens per step:

>>> from transformers import AutoConfig
>>> config = AutoConfig.for_model("llama", vocab_size=32000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
...                               num_attention_heads=6, tie_word_embeddings=True)
>>> h100 = Compute(device=torch.device("cuda"), dtype=torch.bfloat16, kernel="varlen")
>>> model = trace_model(config, h100, batch=MicroBatch(rows=16, row_length=1024, longest=1024))
>>> estimated = estimate(model, h100, "adamw_torch_fused", accumulation=2)
>>> round(model.parameters / 1e6, 1), round(model.activations.total / 1e9, 2), round(estimated.expected / 1e9, 2)
(22.9, 2.17, 3.24)
>>> print(estimated)
weights 0.09 GB, gradients 0.09 GB, optimizer states 0.18 GB
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.lora import Lora, Quantization
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.engine.model.attention import use_segment_attention
from snaketune.engine.model.compiling import layers_of
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.flops import FlopCount, count_flops
from snaketune.engine.model.fused_cross_entropy import CHUNK_LOGITS, MIN_CHUNK_ROWS, SAVED_LOGITS
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.mixers import set_segments
from snaketune.engine.model.packing_support import forward_inputs, unloaded_model
from snaketune.engine.model.parameters import REWARD_HEAD, parameter_count, train_only
from snaketune.engine.model.text_part import model_class
from snaketune.engine.packing.segments import layout

# It logs tracebacks of errors that `_activations` catches.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

Sharing = Literal["ddp", "fsdp", "zero2", "zero3"]
# The tensors that are sharded among the processes; the rest are replicated.
SHARED: dict[Sharing, tuple[str, ...]] = {
    "ddp": (),
    "fsdp": ("weights", "gradients", "states"),
    "zero2": ("gradients", "states"),
    "zero3": ("weights", "gradients", "states"),
}
FLOAT32 = 4
# Bytes of a 4-bit number with its scales: 32 bits per 64 numbers; with double quantization (True) 8 bits per 64 numbers, and
# 32 bits per 256 of these scales.
FOUR_BITS = {False: 0.5 + 4 / 64, True: 0.5 + 1 / 64 + 4 / (64 * 256)}
# Bytes of an 8-bit optimizer state: each 256 share a scale of 32 bits.
EIGHT_BITS = 1 + 4 / 256
MIN_8_BIT_NUMEL = 4096
# Process memory per byte of tensors, by device: malloc keeps freed memory in fragments that the next tensor may not fit into.
ALLOCATOR_OVERHEAD = {"cpu": 1.25}


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


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of one process, in bytes: in use before anything is loaded; `paged`: optimizer states that may move to host
    memory; `step`: what a step adds to weights and states at its peak, gradients included (None where the forward pass
    couldn't be traced); `overhead`: bytes of the process per byte of its tensors."""

    already_used: int
    weights: int
    gradients: int
    states: int
    paged: int
    step: int | None
    overhead: float = 1.0

    @property
    def minimum(self) -> int:
        """Memory in use at the end of every step, however small the micro-batches."""
        return self.already_used + self.weights + self.gradients + self.states - self.paged

    @property
    def expected(self) -> int | None:
        """Expected peak; None if unknown."""
        if self.step is None:
            return None
        return self.already_used + round(self.overhead * (self.weights + self.states + self.step))

    def __str__(self) -> str:
        """Components of `minimum`."""
        sizes = (self.already_used, self.weights, self.gradients, self.states - self.paged)
        names = ("already used", "weights", "gradients", "optimizer states")
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in zip(names, sizes) if size)


def estimate(
    model: TracedModel,
    compute: Compute,
    optimizer: str,
    *,
    quantization: Quantization | None = None,
    checkpointing: bool = False,
    summed: bool = True,
    distilled: bool = False,
    accumulation: int = 1,
    averaged: bool = False,
    processes: int = 1,
    sharing: Sharing = "ddp",
    already_used: int = 0,
) -> Estimate:
    """Estimate the memory of one training process, in bytes.

    Args:
        summed: whether the loss is a sum over tokens, as in SFT, or one value per token, as in DPO.
        distilled: whether a teacher takes part in the loss.
        accumulation: micro-batches per step on one process.
        averaged: whether a copy of the trained weights averages them.
        already_used: bytes that the process uses before anything is loaded.
    """
    shards = {name: processes if name in SHARED[sharing] else 1 for name in ("weights", "gradients", "states")}
    trained = [weight for weight in model.weights if weight.trained]
    gradients = FLOAT32 * model.trained // shards["gradients"]
    states = round(sum(_state_bytes(weight, optimizer) for weight in trained)) // shards["states"]
    weights = round(sum(_weight_bytes(weight, compute, quantization) for weight in model.weights))
    weights += FLOAT32 * model.trained if averaged else 0
    step, saved = None, model.activations
    if saved and model.head and model.batch:
        tokens = model.batch.rows * model.batch.row_length
        accumulated = gradients if accumulation > 1 else 0
        forward, gathered = saved.checkpointed if checkpointing else saved.total, 0
        if shards["weights"] > 1:
            gathered = model.largest_layer * 2 * compute.dtype.itemsize
            if not checkpointing and compute.dtype != torch.float32:
                # Autocast's casts are saved for the backward pass with replicated weights, and not with gathered ones.
                forward -= compute.dtype.itemsize * sum(weight.numel for weight in trained if weight.linear)
        buckets = gradients if processes > 1 and sharing == "ddp" else 0
        in_head, after_head = _head_bytes(model.head, compute, tokens, saved.hidden, summed, distilled)
        step = gathered + buckets
        step += max(
            accumulated + forward + in_head,
            accumulated + forward + after_head + (2 * saved.layer if checkpointing else saved.layer),
            gradients + 2 * saved.layer,
        )
    return Estimate(
        already_used=already_used,
        weights=weights // shards["weights"],
        gradients=gradients,
        states=states,
        paged=states if OPTIMIZERS[optimizer].paged and compute.device.type == "cuda" else 0,
        step=step,
        overhead=ALLOCATOR_OVERHEAD.get(compute.device.type, 1.0),
    )


def _weight_bytes(weight: Weight, compute: Compute, quantization: Quantization | None) -> float:
    if weight.trained:
        return FLOAT32 * weight.numel
    if quantization:
        return (FOUR_BITS[quantization.double] if weight.linear else FLOAT32) * weight.numel
    # Frozen parts in a full training are loaded in float32.
    return (FLOAT32 if weight.parameter.dtype == torch.float32 else compute.dtype.itemsize) * weight.numel


def _state_bytes(weight: Weight, optimizer: str) -> float:
    """Return the bytes of the optimizer states of a trained weight.

    >>> matrix = torch.empty(64, 128, device="meta")
    >>> [_state_bytes(Weight(matrix), name) for name in ("adamw_torch", "adamw_8bit", "adafactor", "sgd")]
    [65536, 16640.0, 768, 0]
    >>> _state_bytes(Weight(matrix, linear=True), "muon")
    32768
    """
    kind, numel = OPTIMIZERS[optimizer], weight.numel
    if kind.factored and weight.parameter.dim() > 1:
        *_, rows, columns = weight.parameter.shape
        numel = numel // (rows * columns) * (rows + columns)
    in_8_bits = kind.bits == 8 and numel >= MIN_8_BIT_NUMEL and not weight.embedding
    states = kind.states if kind.matrix_states is None or not weight.linear else kind.matrix_states
    return states * (EIGHT_BITS if in_8_bits else FLOAT32) * numel


def _head_bytes(
    head: torch.nn.Module, compute: Compute, tokens: int, hidden_bytes: int, summed: bool, distilled: bool
) -> tuple[int, int]:
    """Return the head's bytes at its peak, and those that remain until the decoder's backward pass, if every token is
    supervised."""
    size, float32 = compute.dtype.itemsize, compute.dtype == torch.float32
    (vocabulary, width), numel, hidden = head.weight.shape, head.weight.numel(), tokens * hidden_bytes
    trained = head.weight.requires_grad
    gradient = FLOAT32 * numel if trained else 0
    if distilled or type(head) is not torch.nn.Linear or head.bias is not None:
        # Logits and their float32 copies, log-softmax, and the gradients of all these; with a teacher also those divided by the
        # temperature, those without its tokens, and their gradients.
        copies = (3 if float32 else 3 + 2 * size / FLOAT32) + (4 if distilled else 0)
        saved = min(tokens, max(SAVED_LOGITS // vocabulary, MIN_CHUNK_ROWS)) * vocabulary
        return hidden + round(saved * copies * FLOAT32), 2 * hidden
    cast = 0 if float32 else size * (numel * (2 if trained else 1) + tokens * width)
    chunk = min(tokens, max(CHUNK_LOGITS.get(compute.device.type, CHUNK_LOGITS["other"]) // vocabulary, MIN_CHUNK_ROWS))
    logits = chunk * vocabulary * (FLOAT32 if float32 else FLOAT32 + 2 * size)
    if not summed:
        # Exponentials that are saved for the backward pass.
        logits += min(tokens * vocabulary, max(SAVED_LOGITS, chunk * vocabulary)) * size
    return 2 * hidden + gradient + cast + logits, 2 * hidden + gradient
