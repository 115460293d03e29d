"""The measured models, with random weights made on the device, and rows of generated documents."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snaketune.models.devices import Compute
from snaketune.packing.best_fit import plan_best_fit_decreasing
from snaketune.packing.reader import SEGMENTS, PackedRows
from snaketune.packing.shards import IGNORED


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and how it is trained.

    Attributes:
        model: arguments of its config; `model_type` among them.
        rank: of adapters on all linear layers but the head; None where all weights train.
        quantized: whether the weights under the adapters are of 4 bits.
        length: tokens of a row.
        batch_rows: rows of an optimizer step.
        micro_rows: of these, rows of a forward pass to begin with; halved as long as they don't fit.
        layer_bytes: that a compiled layer moves for each token, and for each micro-batch, by `benchmarks.gpu.expected --count`.
    """

    model: dict[str, Any]
    rank: int | None = None
    quantized: bool = False
    length: int = 1024
    batch_rows: int = 8
    micro_rows: int = 8
    layer_bytes: tuple[int, int] = (0, 0)

    @property
    def attention(self) -> dict[str, int]:
        """Return the arguments of `benchmarks.flops.attention_flops`."""
        heads = self.model["num_attention_heads"]
        layers = self.model["num_hidden_layers"]
        return {"heads": heads, "head_dim": self.model["hidden_size"] // heads, "layers": layers}


def _qwen(hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 28,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": 32768, "use_sliding_window": False,
    }  # fmt: skip


# Qwen2.5-7B.
SEVEN = _qwen(3584, 18944, 28, 4, 152064, tied=False)
# Qwen2.5-1.5B.
ONE_AND_A_HALF = _qwen(1536, 8960, 12, 2, 151936, tied=True)
SHAPES = {
    "23m": Shape(
        model={
            "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
            "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 32000, "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
        },
        batch_rows=32, micro_rows=32, layer_bytes=(117_320, 31_859_744),
    ),
    "1_5b_full": Shape(model=ONE_AND_A_HALF, batch_rows=32, micro_rows=16, layer_bytes=(584_824, 842_330_144)),
    "7b_lora": Shape(model=SEVEN, rank=32, batch_rows=16, micro_rows=16, layer_bytes=(1_887_088, 984_126_496)),
    "7b_qlora": Shape(model=SEVEN, rank=32, quantized=True, batch_rows=16, micro_rows=16),
}  # fmt: skip
# Shapes of the DPO measurements.
PREFERENCES = {
    "1_5b": Shape(model=ONE_AND_A_HALF, rank=32, length=2048, batch_rows=8, micro_rows=8),
    "7b": Shape(model=SEVEN, rank=32, length=2048, batch_rows=8, micro_rows=4),
}


def rehearsed(shape: Shape) -> Shape:
    """Return the shape reduced to what a CPU can run."""
    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    rank = shape.rank and 4
    return Shape(
        model=shape.model | small, rank=rank, quantized=shape.quantized, length=128, batch_rows=4, micro_rows=2
    )


def make_model(shape: Shape, compute: Compute) -> PreTrainedModel:
    """Return the model with random weights drawn on the device, without adapters."""
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = AutoConfig.for_model(**shape.model, **special)
    torch.manual_seed(0)
    with torch.device(compute.device):
        model = AutoModelForCausalLM.from_config(config, dtype=compute.weights_dtype(frozen=shape.rank is not None))
    return quantize(model, compute.dtype) if shape.quantized else model


def quantize(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Quantize every linear layer except the head to nf4 with double quantization, as transformers loads them."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import prepare_model_for_kbit_training

    for module in list(model.modules()):
        for name, layer in module.named_children():
            if type(layer) is not torch.nn.Linear or layer is model.get_output_embeddings():
                continue
            small = Linear4bit(
                layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=dtype,
                compress_statistics=True, quant_type="nf4", device="meta",
            )  # fmt: skip
            device = layer.weight.device
            weight = layer.weight.detach().to("cpu" if device.type == "cpu" else device)
            small.weight = Params4bit(
                weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=small
            )
            small.bias = layer.bias
            # Quantizes on the way.
            setattr(module, name, small.to(device))
    model.is_loaded_in_4bit = True
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def add_adapters(model: PreTrainedModel, rank: int) -> torch.nn.Module:
    """Add adapters as `models.adapters.add_lora` does."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, settings)


@dataclass(frozen=True, kw_only=True)
class Made:
    """Documents and the rows that our planner makes of them."""

    documents: list[np.ndarray]
    rows: "MadeRows" = field(repr=False)


class MadeRows(PackedRows):
    """Rows in memory with the interface of the shard reader."""

    def __init__(self, ids: np.ndarray, labels: np.ndarray, lengths: list[list[int]]):
        self.row_length, self.lists = ids.shape[1], SEGMENTS
        values = np.concatenate([np.array(some, np.int32) for some in lengths])
        offsets = np.concatenate([[0], np.cumsum([len(some) for some in lengths])])
        segments = {"segment_lengths": (offsets, values), "prefix_lengths": (offsets, np.zeros_like(values))}
        self.batches = [{"input_ids": ids, "labels": labels, **segments}]
        self.offsets = np.array([0, len(ids)])


def make_rows(rows: int, length: int, vocabulary: int) -> Made:
    """Generate lognormal documents (median 120) that fill about this many rows; the second half of each is supervised."""
    generator = np.random.default_rng(0)
    documents: list[np.ndarray] = []
    tokens = 0
    while tokens < rows * length:
        drawn = int(np.clip(generator.lognormal(np.log(min(120, length / 4)), 1.0), 4, length))
        documents.append(generator.integers(2, vocabulary, drawn).astype(np.int32))
        tokens += drawn
    plan = plan_best_fit_decreasing(np.array([len(document) for document in documents]), [length])
    ids = np.zeros((plan.rows, length), np.int32)
    labels = np.full((plan.rows, length), IGNORED, np.int32)
    lengths = []
    for row in range(plan.rows):
        chosen = [documents[i] for i in plan.row(row)]
        lengths.append([len(document) for document in chosen])
        at = 0
        for document in chosen:
            half, end = at + len(document) // 2, at + len(document)
            ids[row, at:end] = document
            labels[row, half:end] = document[len(document) // 2 :]
            at = end
    return Made(documents=documents, rows=MadeRows(ids, labels, lengths))
