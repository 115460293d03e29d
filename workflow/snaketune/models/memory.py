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
activations   of one traced micro-batch (`traced_model`). With gradient checkpointing: the inputs of the layers, and one layer
head          `chunked_head`: hidden states and their gradient, the weight's cast and gradient, the logits of a chunk

FSDP and ZeRO 3 shard weights, gradients and states and gather two layers at a time; ZeRO 2 shards gradients and states.
Measured accuracy: `docs/LOG.md`; compiled layers save fewer activations than estimated. A Llama of 22.9M parameters on an H100
with AdamW and two micro-batches of 16 x 1024 tokens per step:

>>> from transformers import AutoConfig
>>> from snaketune.models.traced_model import MicroBatch, trace_model
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

from dataclasses import dataclass
from typing import Literal

import torch

from snaketune.config.lora import Quantization
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.fused_cross_entropy import CHUNK_LOGITS, MIN_CHUNK_ROWS, SAVED_LOGITS
from snaketune.models.traced_model import TracedModel, Weight

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
