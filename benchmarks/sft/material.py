"""Input of all sides: one tokenizer, one model with weights, gsm8k as files and as rows packed by our stages."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import chain, made_tokenizer
from benchmarks.jobs import ROW_LENGTH

# 6.82M parameters with a vocabulary of 8192.
MODEL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": ROW_LENGTH, "tie_word_embeddings": True,
}  # fmt: skip
LEARNING_RATE = 1e-4
ROWS, CONVERSATIONS = 2, 8


@dataclass(frozen=True, kw_only=True)
class Material:
    """Paths of the generated files, as a process reads them.

    Attributes:
        raw: JSON lines of questions and answers.
        tokenizer, pack: manifests.
        base: the folder of the model that all sides start from. Its tokenizer isn't in it: beside the config of a qwen2 model,
            transformers takes any tokenizer for Qwen's own, and splits texts otherwise.
    """

    raw: Path
    tokenizer: Path
    pack: Path
    base: Path
    precision: str = "float32"

    def save(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "Material":
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: value if name == "precision" else Path(value) for name, value in found.items()})

    def spec(self) -> dict[str, Any]:
        """Return a spec of the `sft` stage; keys that aren't given have their defaults."""
        training = {
            "batch_rows": ROWS, "learning_rate": LEARNING_RATE, "precision": self.precision,
            "schedule": "constant_with_warmup", "warmup_fraction": 0,
        }  # fmt: skip
        return {"base": {"path": str(self.base)}, "training": training, "lora": None, "quantization": None}


def made(folder: Path, raw: Path, vocab_size: int = 8192, precision: str = "float32") -> Material:
    """Train a tokenizer on the file, pack its conversations, and make a model with random weights."""
    tokenizer = made_tokenizer(folder, [raw], vocab_size)
    pack = chain(folder / "chain", [raw], tokenizer)
    base = made_model(folder / "base", tokenizer)
    return Material(raw=raw, tokenizer=tokenizer, pack=pack, base=base, precision=precision)


def made_model(folder: Path, tokenizer: Path, positions: int = ROW_LENGTH) -> Path:
    """Save a model with random weights for this tokenizer and sequence length; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    known = AutoTokenizer.from_pretrained(tokenizer.parent / "tokenizer")
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(known), pad_token_id=known.pad_token_id, eos_token_id=known.eos_token_id,
        bos_token_id=None, use_sliding_window=False, **MODEL | {"max_position_embeddings": positions},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
