"""Input of all sides: one tokenizer, one model with weights, gsm8k as files and as rows packed by our stages."""

from pathlib import Path

from benchmarks.jobs import ROW_LENGTH, Project, conversations

# 6.82M parameters with a vocabulary of 8192.
MODEL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": ROW_LENGTH, "tie_word_embeddings": True,
}  # fmt: skip
LEARNING_RATE = 1e-4
ROWS, CONVERSATIONS = 2, 8


def made(folder: Path, raw: Path, vocab_size: int = 8192, precision: str = "float32") -> Project:
    """Train a tokenizer, and make a model with random weights, for the conversations of a file."""
    project = conversations(folder, [raw], vocab_size=vocab_size)
    # The tokenizer isn't in the model's folder: beside the config of a qwen2 model, transformers takes any tokenizer for Qwen's
    # own, and splits texts otherwise.
    project.config["sft"]["start"] |= {
        "base": {"path": str(made_model(folder / "base", project.tokenizer))},
        "training": {
            "batch_rows": ROWS, "micro_batch_rows": ROWS, "gradient_checkpointing": False, "learning_rate": LEARNING_RATE,
            "precision": precision, "schedule": "constant_with_warmup", "warmup_fraction": 0,
        },
        "operation": {"checkpoint_steps": 10**6},
    }  # fmt: skip
    return project


def raw_of(project: Project) -> Path:
    """Return the JSON lines of questions and answers."""
    return Path(project.config["corpora"]["chat"]["sources"][0]["files"][0])


def base_of(project: Project) -> Path:
    """Return the folder of the model that all sides start from."""
    return Path(project.config["sft"]["start"]["base"]["path"])


def made_model(folder: Path, tokenizer: Path, positions: int = ROW_LENGTH) -> Path:
    """Save a model with random weights for this tokenizer and sequence length; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    known = AutoTokenizer.from_pretrained(tokenizer)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(known), pad_token_id=known.pad_token_id, eos_token_id=known.eos_token_id,
        bos_token_id=None, use_sliding_window=False, **MODEL | {"max_position_embeddings": positions},
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
