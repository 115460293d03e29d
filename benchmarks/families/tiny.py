"""A tiny random model of any causal language model class that transformers knows, made by shrinking its default config."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from snaketune.models.small_model import SPECIAL, STD, random_model, smaller

VOCABULARY = 128
POSITIONS = "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length"
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
FURTHER = {
    **TOKENS,
    **dict.fromkeys(POSITIONS.split(), 512),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "initializer_range": STD,
}

tiny_model = random_model


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    default = AutoConfig.for_model(family)
    return AutoConfig.for_model(family, **(smaller(default, FURTHER) | SPECIAL.get(family, {}) | changes))
