"""The measured models, with random weights made on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snaketune.engine.model.devices import Compute


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
    """

    model: dict[str, Any]
    rank: int | None = None
    quantized: bool = False
    length: int = 1024
    batch_rows: int = 8
    micro_rows: int = 8

    @property
    def vocabulary(self) -> int:
        return self.model["vocab_size"]


def _model(
    model_type: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more
):
    return more | {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip


QWEN = {"max_position_embeddings": 32768, "use_sliding_window": False}
# Qwen2.5-7B and Qwen2.5-1.5B.
SEVEN = _model("qwen2", 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False, **QWEN)
ONE_AND_A_HALF = _model("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True, **QWEN)
TINY = _model("llama", 384, 1024, 6, 6, 6, 32000, tie_word_embeddings=True, max_position_embeddings=1024)
SHAPES = {
    "23m": Shape(model=TINY, batch_rows=32, micro_rows=32),
    "1_5b_full": Shape(model=ONE_AND_A_HALF, batch_rows=32, micro_rows=16),
    "7b_lora": Shape(model=SEVEN, rank=32, batch_rows=16, micro_rows=16),
    "7b_qlora": Shape(model=SEVEN, rank=32, quantized=True, batch_rows=16, micro_rows=16),
}
# Shapes of the DPO measurements.
PREFERENCES = {
    "1_5b": Shape(model=ONE_AND_A_HALF, rank=32, length=2048, batch_rows=8, micro_rows=8),
    "7b": Shape(model=SEVEN, rank=32, length=2048, batch_rows=8, micro_rows=4),
}


def rehearsed(shape: Shape) -> Shape:
    model = shape.model | _model(shape.model["model_type"], 64, 128, 2, 4, 2, 512)
    rank = shape.rank and 4
    return Shape(model=model, rank=rank, quantized=shape.quantized, length=128, batch_rows=4, micro_rows=2)


def make_model(shape: Shape, compute: Compute) -> PreTrainedModel:
    """Return the model with random weights drawn on the device, without adapters."""
    config = AutoConfig.for_model(**shape.model, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(compute.device):
        model = AutoModelForCausalLM.from_config(config, dtype=compute.weights_dtype(frozen=shape.rank is not None))
    return quantize(model, compute.dtype) if shape.quantized else model


def quantize(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Quantize every linear layer except the head to nf4 with double quantization, as transformers loads them."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import prepare_model_for_kbit_training

    settings = {"compress_statistics": True, "quant_type": "nf4"}
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if type(layer) is not torch.nn.Linear or layer is model.get_output_embeddings():
                continue
            size, bias = (layer.in_features, layer.out_features), layer.bias is not None
            small = Linear4bit(*size, bias=bias, compute_dtype=dtype, device="meta", **settings)
            small.weight = Params4bit(layer.weight.detach(), requires_grad=False, module=small, **settings)
            small.bias = layer.bias
            # Quantizes on the way.
            setattr(module, name, small.to(layer.weight.device))
    model.is_loaded_in_4bit = True
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def lora_config(rank: int):
    """Return adapters on all linear layers, as `engine.model.adapters.add_lora` adds them."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def add_adapters(model: PreTrainedModel, rank: int) -> torch.nn.Module:
    from peft import get_peft_model

    return get_peft_model(model, lora_config(rank))
