"""Expected seconds of a training step by arithmetic, for comparison with measurements.

    python -m benchmarks.gpu.expected    for an H100

The sum of times that can't overlap: matmuls at the share of the peak that large ones reach, and memory traffic between them
at the bandwidth of the card. Host, launches and faults aren't included, so a card is slower; if it is much slower, look for a
cost that the arithmetic leaves out.
"""

from dataclasses import dataclass

import numpy as np
from benchmarks.flops import attention_flops, visible_pairs
from benchmarks.gpu.rows import make_documents
from benchmarks.gpu.shapes import SHAPES, Shape

# Bytes per second of a copy, read and written (measured: 3.0 and 4.3 TB/s), and dense 16-bit FLOP/s of the data sheet.
CARDS = {"H100": (2.9e12, 989.4e12), "H200": (4.2e12, 989.4e12)}
# The share of the peak that matmuls reach, with a hidden size below a thousand and above.
SMALL, LARGE = 0.55, 0.7
# FLOP/s of attention kernels over short documents, forward and backward.
ATTENTION = (250e12, 200e12)
# The share of a compiled layer's memory traffic that matmuls move as well; it overlaps with them.
OVERLAP = 0.35
# Bytes of a trained parameter: AdamW reads 16 and writes 12, its gradient is measured, clipped and set to zero (16).
OPTIMIZER = 44
# Bytes per logit besides its matmuls, and per number of the head's float32 gradient for every chunk of logits.
LOGIT, HEAD_GRADIENT, LOGITS_AT_ONCE = 6, 8, 2**28


@dataclass(frozen=True, kw_only=True)
class Step:
    seconds: dict[str, float]
    flops: float
    tokens: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def expected(shape: Shape, micro_rows: int, card: str) -> Step:
    """Return the expected seconds of a step of `shape.batch_rows` rows, half of their tokens supervised."""
    bandwidth, peak = CARDS[card]
    model, frozen = shape.model, shape.rank is not None
    hidden, layers, vocabulary = model["hidden_size"], model["num_hidden_layers"], shape.vocabulary
    qkv = hidden * (hidden + 2 * shape.attention["head_dim"] * model["num_key_value_heads"])
    body = layers * (qkv + hidden**2 + 3 * hidden * model["intermediate_size"])
    head = vocabulary * hidden
    lengths = np.array([len(document) for document in make_documents(shape.batch_rows, shape.length, vocabulary)])
    tokens, supervised = int(lengths.sum()), int((lengths - lengths // 2).sum())
    pairs = attention_flops(visible_pairs(lengths), **shape.attention)
    per_parameter = 4 if frozen else 6
    matmuls = per_parameter * (body * tokens + head * supervised)
    micro_batches = -(-shape.batch_rows // micro_rows)
    chunks = micro_batches * max(1, -(-supervised * vocabulary // (micro_batches * LOGITS_AT_ONCE)))
    seconds = {
        "matrix products": matmuls / (peak * (SMALL if hidden < 1000 else LARGE)),
        "attention": pairs / 3 * (1 / ATTENTION[0] + 2 / ATTENTION[1]),
        "layers between products": layers * tokens * shape.layer_bytes[0] * (1 - OVERLAP) / bandwidth,
        "weights of layers": layers * micro_batches * shape.layer_bytes[1] / bandwidth,
        "logits": supervised * vocabulary * LOGIT / bandwidth,
    }
    if not frozen:
        seconds["gradient of the head"] = chunks * head * HEAD_GRADIENT / bandwidth
        seconds["optimizer"] = (body + head) * (OPTIMIZER + 8 * (micro_batches - 1)) / bandwidth
    return Step(seconds=seconds, flops=per_parameter * (body + head) * tokens + pairs, tokens=tokens)


def main() -> None:
    for name, shape in SHAPES.items():
        if not shape.quantized:
            step = expected(shape, shape.micro_rows, "H100")
            mfu = step.flops / step.total / CARDS["H100"][1]
            print(f"{name}: {step.total * 1e3:.1f} ms a step, {step.tokens / step.total:,.0f} tokens/s, MFU {mfu:.0%}")
            for part, seconds in step.seconds.items():
                print(f"    {seconds * 1e3:8.2f} ms  {part}")


if __name__ == "__main__":
    main()
