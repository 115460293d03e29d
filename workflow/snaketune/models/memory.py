"""How much memory a training takes on each of its devices, in bytes, before there is a training.

    peak = there already + weights + optimizer states + the most of
             while the head computes    gradients so far + what the forward pass kept + what the head works with
             in the last layer          gradients so far + what the forward pass kept + what the head leaves + a layer
             in the first layer         gradients + a layer, and as much again for the gradients of its activations

weights     trained ones 4 bytes (float32 masters), frozen ones those of the computation's data type; under QLoRA linear layers
            4.13 bits with double quantization and 4.5 without (Dettmers et al., 2023), the rest 4 bytes
gradients   4 bytes per trained number; so far: all where a step has several micro-batches, else none. DDP's buckets: as much
states      `config.optimizers.OPTIMIZERS`, 4 bytes each or 1; bitsandbytes keeps embeddings, and what has fewer than 4096
            numbers, in 32 bits; Adafactor has rows + columns of a matrix (Shazeer and Stern, 2018)
kept        `models.memory_trace`: what the model's own code would keep. The rule of thumb is 34 bytes per token and hidden
            size in every layer (Korthikanti et al., 2022). With gradient checkpointing: what goes into layers, and one of them
head        `models.chunked_head`: hidden states and their gradient, the weight's cast and gradient, the logits of a chunk

FSDP and ZeRO 3 divide weights, gradients and states among the processes and gather two layers at a time; ZeRO 2 divides
gradients and states. On a CPU a process holds a quarter more than its tensors (HELD).

A Llama of 22.9M parameters (hidden 384, 6 layers, vocabulary 32,000) on an H100: AdamW, bfloat16 products, micro-batches of
16 rows of 1024 tokens, two to a step. Weights, gradients and states are 4, 4 and 8 bytes x 22.9M. While it computes, there are
what 16,384 tokens keep in 6 layers, 2.17 GB, gradients of the micro-batch before, 0.09, in the head 2^26 logits at once of 8
bytes, 0.54, and 0.16 of hidden states and casts:

>>> from transformers import AutoConfig
>>> from snaketune.models.memory_trace import plan_model
>>> config = AutoConfig.for_model("llama", vocab_size=32000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
...                               num_attention_heads=6, tie_word_embeddings=True)
>>> h100 = Compute(device=torch.device("cuda"), dtype=torch.bfloat16, kernel="varlen")
>>> batch = Batch(rows=16, row_length=1024, longest=1024)
>>> planned = plan_model(config, h100, batch=batch)
>>> found = estimate(planned, h100, "adamw_torch_fused", batch=batch, accumulation=2)
>>> round(planned.parameters / 1e6, 1), round(planned.kept.whole / 1e9, 2), round(found.expected / 1e9, 2)
(22.9, 2.17, 3.24)
>>> print(found)
weights 0.09 GB, gradients 0.09 GB, optimizer states 0.18 GB

How near it comes: `docs/LOG.md`. Of compiled layers less is kept than it says.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from snaketune.config.optimizers import OPTIMIZERS
from snaketune.config.training_runs import Quantization
from snaketune.models.devices import Compute
from snaketune.models.fused_cross_entropy import AT_ONCE, FEWEST_ROWS, FREE
from snaketune.models.memory_trace import Batch, Head, Planned, Weight

# Of which tensors each process has a part, where the others' processes have all of them.
Sharing = Literal["ddp", "fsdp", "zero2", "zero3"]
SHARED: dict[Sharing, tuple[str, ...]] = {
    "ddp": (),
    "fsdp": ("weights", "gradients", "states"),
    "zero2": ("gradients", "states"),
    "zero3": ("weights", "gradients", "states"),
}
FLOAT32 = 4
# Bytes of a 4-bit number and its scales: one of 32 bits for 64 of them; or one of 8 bits, and of 256 of those one of 32.
FOUR_BITS = {False: 0.5 + 4 / 64, True: 0.5 + 1 / 64 + 4 / (64 * 256)}
# Of an 8-bit state: 256 have a scale of 32 bits.
EIGHT_BITS = 1 + 4 / 256
FEWEST_IN_8_BITS = 4096
# What a process holds of each byte of its tensors: malloc keeps what is freed, in pieces that the next tensor may not fit into.
# Measured, see docs/LOG.md.
HELD = {"cpu": 1.25}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one process.

    Attributes:
        there: before anything is loaded.
        paged: of the states, those that may move to the host's memory.
        computing: what a step adds to weights and states at its peak, gradients among it; None where the forward pass
            couldn't be followed.
        held: bytes of the process for each byte of a tensor.
    """

    there: int
    weights: int
    gradients: int
    states: int
    paged: int
    computing: int | None

    held: float = 1.0

    @property
    def least(self) -> int:
        """What there is at the end of every step, however small its micro-batches."""
        return self.there + self.weights + self.gradients + self.states - self.paged

    @property
    def expected(self) -> int | None:
        """The peak, as far as it can be told."""
        if self.computing is None:
            return None
        return self.there + round(self.held * (self.weights + self.states + self.computing))

    def __str__(self) -> str:
        """What the least is made of."""
        sizes = (self.there, self.weights, self.gradients, self.states - self.paged)
        names = ("there already", "weights", "gradients", "optimizer states")
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in zip(names, sizes) if size)


def estimate(
    planned: Planned,
    compute: Compute,
    optimizer: str,
    *,
    quantization: Quantization | None = None,
    batch: Batch | None = None,
    checkpointing: bool = False,
    summed: bool = True,
    accumulation: int = 1,
    processes: int = 1,
    sharing: Sharing = "ddp",
    there: int = 0,
) -> Estimate:
    """What a training is going to take.

    Args:
        optimizer: one of `config.optimizers.OPTIMIZERS`.
        batch: the micro-batch that was planned with.
        checkpointing: whether layers are recomputed in the backward pass.
        summed: whether the loss is one sum, as SFT's, or one of each token, as DPO's.
        accumulation: micro-batches of a step on one process.
        there: bytes that the process has already.
    """
    parts = {name: processes if name in SHARED[sharing] else 1 for name in ("weights", "gradients", "states")}
    whole = sum(_weight_bytes(weight, planned, compute, quantization) for weight in planned.weights)
    gradients = FLOAT32 * planned.trained // parts["gradients"]
    states = (
        round(sum(_state_bytes(weight, optimizer) for weight in planned.weights if weight.trained)) // parts["states"]
    )
    gathered = planned.largest_layer * 2 * compute.dtype.itemsize if parts["weights"] > 1 else 0
    buckets = gradients if processes > 1 and sharing == "ddp" else 0
    # What autocast makes of whole weights is kept for the backward pass, and what it makes of gathered ones isn't.
    dropped = _casts(planned, compute) if parts["weights"] > 1 else 0
    computing = _computing(planned, compute, batch, checkpointing, summed, gradients, accumulation > 1, dropped)
    return Estimate(
        there=there,
        weights=round(whole) // parts["weights"],
        gradients=gradients,
        states=states,
        paged=states if OPTIMIZERS[optimizer].paged and compute.device.type == "cuda" else 0,
        computing=None if computing is None else computing + gathered + buckets,
        held=HELD.get(compute.device.type, 1.0),
    )


def _weight_bytes(weight: Weight, planned: Planned, compute: Compute, quantization: Quantization | None) -> float:
    if weight.trained:
        return FLOAT32 * weight.numbers
    if quantization:
        return (FOUR_BITS[quantization.double] if weight.linear else FLOAT32) * weight.numbers
    return compute.dtype.itemsize * weight.numbers


def _state_bytes(weight: Weight, optimizer: str) -> float:
    """Of a trained weight.

    >>> matrix = Weight(shape=(64, 128), trained=True)
    >>> [_state_bytes(matrix, name) for name in ("adamw_torch", "adamw_8bit", "adafactor", "sgd")]
    [65536, 16640.0, 768, 0]
    """
    kept = OPTIMIZERS[optimizer]
    numbers = weight.numbers
    if kept.factored and len(weight.shape) > 1:
        *_, rows, columns = weight.shape
        numbers = numbers // (rows * columns) * (rows + columns)
    in_8_bits = kept.bits == 8 and numbers >= FEWEST_IN_8_BITS and not weight.embedding
    return kept.states * (EIGHT_BITS if in_8_bits else FLOAT32) * numbers


def _casts(planned: Planned, compute: Compute) -> int:
    """Bytes of the weights that autocast makes of float32 masters, and that the backward pass needs."""
    if compute.dtype == torch.float32:
        return 0
    return compute.dtype.itemsize * sum(w.numbers for w in planned.weights if w.trained and w.linear)


def _computing(
    planned: Planned,
    compute: Compute,
    batch: Batch | None,
    checkpointing: bool,
    summed: bool,
    gradients: int,
    again: bool,
    dropped: int,
) -> int | None:
    """The peak over weights and states.

    Args:
        gradients: bytes of them; `again`: whether those of earlier micro-batches are there.
        dropped: bytes that are kept by one process and not by several.
    """
    if planned.kept is None or planned.head is None or batch is None:
        return None
    kept, before = planned.kept, gradients if again else 0
    forward = kept.checkpointed if checkpointing else kept.whole - dropped
    in_head, after_head = _head_bytes(planned.head, compute, batch.rows * batch.row_length, kept.hidden, summed)
    return max(
        before + forward + in_head,
        before + forward + after_head + (2 * kept.layer if checkpointing else kept.layer),
        gradients + 2 * kept.layer,
    )


def _head_bytes(head: Head, compute: Compute, tokens: int, hidden_bytes: int, summed: bool) -> tuple[int, int]:
    """At its peak, and what is left until the decoder's backward pass; every token taken to be supervised."""
    size, wide = compute.dtype.itemsize, compute.dtype == torch.float32
    hidden = tokens * hidden_bytes
    if not head.product:
        # Logits, in float32 too, their log-softmax and the gradients of all these.
        held = min(tokens, max(FREE // head.vocabulary, FEWEST_ROWS)) * head.vocabulary
        return hidden + held * (3 * FLOAT32 if wide else 2 * size + 3 * FLOAT32), 2 * hidden
    gradient = FLOAT32 * head.vocabulary * head.hidden if head.trained else 0
    cast = 0 if wide else size * (head.vocabulary * head.hidden * (2 if head.trained else 1) + tokens * head.hidden)
    at_once = AT_ONCE.get(compute.device.type, AT_ONCE["other"])
    chunk = min(tokens, max(at_once // head.vocabulary, FEWEST_ROWS)) * head.vocabulary
    logits = chunk * (FLOAT32 if wide else FLOAT32 + 2 * size)
    if not summed:
        # Exponentials of what is kept.
        logits += min(tokens * head.vocabulary, max(FREE, chunk)) * size
    return 2 * hidden + gradient + cast + logits, 2 * hidden + gradient
