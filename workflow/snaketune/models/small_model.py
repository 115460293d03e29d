"""Small random models of any family that transformers knows, with the layers of every kind that the family has."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Config keys of sizes, by the value that they get; only keys of the default config are set.
SIZES = {
    32: """hidden_size d_model n_embd dim embedding_size hidden_dim attention_hidden_size lru_width dim_model emb_dim
        input_embedding_size word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size expert_ffn_hidden_size moe_latent_size time_step_rank""",
    64: """intermediate_size ffn_dim ffn_hidden_size n_inner feed_forward_size shared_intermediate_size dff dim_ff d_inner
        decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp mamba_d_ssm""",
    16: "kv_lora_rank q_lora_rank mamba_d_state state_size chunk_size mamba_chunk_size",
    8: """head_dim d_kv dim_head attention_head_dim kv_channels v_head_dim qk_nope_head_dim swa_head_dim swa_v_head_dim
        global_head_dim d_head mamba_d_head mamba_head_dim mamba_n_heads mamba_num_heads n_mamba_heads linear_key_head_dim
        linear_value_head_dim mamba_dt_rank index_head_dim""",
    4: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers
        num_blocks num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts
        moe_num_experts num_moe_experts qk_rope_head_dim rotary_dim linear_num_key_heads linear_num_value_heads index_n_heads
        linear_num_heads""",
    2: """num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok top_k moe_topk moe_k num_experts_per_token
        top_k_experts swa_num_key_value_heads""",
    1: "n_group topk_group num_expert_group n_shared_experts",
}
# Left empty by some default configs, though their models need them.
NEEDED = (
    "head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
    "n_shared_experts",
)  # fmt: skip

LATENT = {"num_key_value_heads": 4, "head_dim": 4}
CONV, LINEAR, SLIDING = (
    {"layer_types": [kind, "full_attention"] * 2} for kind in ("conv", "linear_attention", "sliding_attention")
)
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "output_gate_type": "sigmoid",
}  # fmt: skip
ZAMBA = {
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"], "num_key_value_heads": 4,
    "attention_head_dim": 16, "attention_hidden_size": 64,
}  # fmt: skip
# Further settings that a family needs: values that depend on each other, and layers of every kind.
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "longcat_flash", "youtu"), LATENT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"), LATENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONV),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax", "olmo_hybrid"), LINEAR),
    "bailing_hybrid": {"linear_head_dim": 8, **LATENT, **LINEAR},
    "falcon_h1": {"mamba_expand": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": LINEAR,
    **dict.fromkeys(("gemma3_text", "kolibri1"), SLIDING),
    "gemma3n_text": SLIDING | {"num_kv_shared_layers": 1},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "kimi_linear": LINEAR | {"num_key_value_heads": 4, "linear_head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "qwen4_exp_text": INDEXER,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": ZAMBA,
    "zamba2": ZAMBA | {"mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}


STD = 0.2
# What a small model has in common with the model that it stands for.
KEPT = (
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def smaller(config: PretrainedConfig, further: Mapping[str, Any]) -> dict[str, Any]:
    """The values that make a family's default config small, and those of `further` whose keys it has."""
    small: dict[str, Any] = {}
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    for name, value in (sizes | dict(further)).items():
        if name in config.attribute_map or isinstance(getattr(type(config), name, None), property):
            continue
        there = vars(config).get(name)
        if there is not None or (name in NEEDED and name in vars(config)):
            small[name] = value
    if vars(config).get("is_decoder") is False and not vars(config).get("is_encoder_decoder"):
        small["is_decoder"] = True
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            small[name] = smaller(inner, further) | SPECIAL.get(inner.model_type, {})
    return small


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """A small config of the same family, with the vocabulary of a model. Other settings are the family's defaults, since those
    of a model may fit its own size only."""
    text = config.get_text_config()
    kept = {key: getattr(text, key) for key in KEPT if getattr(text, key, None) is not None}
    default = AutoConfig.for_model(config.model_type)
    return AutoConfig.for_model(config.model_type, **(smaller(default, kept) | SPECIAL.get(config.model_type, {})))


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with weights that are large enough for every token to matter, in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.std() < STD / 2:
                parameter.normal_(0, STD)
    return model.eval()
