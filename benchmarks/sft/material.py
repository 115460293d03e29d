"""Input of all sides: one tokenizer, one model with weights, gsm8k as files and as rows packed by our stages."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.data_path.rows import ROW_LENGTH, chain, made_tokenizer

FILE = "gsm8k/train.jsonl"
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

    def save(self, path: Path) -> Path:
        """Write the paths for `read`."""
        path.write_text(json.dumps({name: str(value) for name, value in asdict(self).items()}), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "Material":
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{field.name: Path(found[field.name]) for field in fields(cls)})


def made(folder: Path, raw: Path, vocab_size: int = 8192) -> Material:
    """Train a tokenizer on the file, pack its conversations, and make a model with random weights."""
    tokenizer = made_tokenizer(folder, [raw], vocab_size)
    pack = chain(folder / "chain", [raw], tokenizer)
    return Material(raw=raw, tokenizer=tokenizer, pack=pack, base=made_model(folder / "base", tokenizer))


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


def numbered(raw: Path, path: Path, conversations: int) -> Path:
    """Repeat the rows of the file up to a count, each copy with another number in front, so that no row is a duplicate."""
    rows = [json.loads(line) for line in raw.open(encoding="utf-8")]
    with path.open("w", encoding="utf-8") as file:
        for at in range(conversations):
            time, index = divmod(at, len(rows))
            row = rows[index] | {"question": f"{time}. {rows[index]['question']}"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path
