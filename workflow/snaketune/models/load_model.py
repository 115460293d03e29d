"""Loading of models: from scratch, or from a folder or the Hub. Safetensors only; remote code only if the config allows it."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Quantization
from snaketune.config.model_files import check_index, check_model_files, texts
from snaketune.engine.model.text_part import auto_class, freeze_non_text_modules
from snaketune.errors import SnaketuneError, first_line
from snaketune.models.rope_scaling import check_scaled, scaled_config
from snaketune.tokenization.chat import ChatTokenizer

# As transformers takes it.
DeviceMap = str | dict[str, int | str]
# Names of reserved tokens, which base models aren't trained on.
RESERVED = re.compile(r"reserved|unused|extra|spare|placeholder", re.IGNORECASE)


def load_base(
    base: Pretrained | Scratch,
    chat: ChatTokenizer,
    *,
    weights_dtype: torch.dtype,
    quantization: Quantization | None = None,
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """Load an SFT run's base model, with an embedding for every token of its tokenizer."""
    if isinstance(base, Scratch):
        config = scratch_config(base, chat)
        torch.manual_seed(base.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(weights_dtype)
    else:
        _check_tokenizer(base, chat)
        model = load_pretrained(base, weights_dtype=weights_dtype, quantization=quantization, device_map=device_map)
    grow_vocabulary(model, chat.vocab_size)
    set_special_tokens(model, chat)
    return model


def load_pretrained(
    base: Pretrained,
    *,
    weights_dtype: torch.dtype,
    quantization: Quantization | None = None,
    device_map: DeviceMap | None = None,
) -> PreTrainedModel:
    """Load a causal language model from a local folder or the Hub, or the one in a vision-language model
    (`text_part`). SnaketuneError: there is no such model, it has no safetensors, weights are missing, or weights are in
    other folders."""
    _check_own_weights(base)
    config = read_config(base)
    replaced = {"config": config} if base.rope else {}
    arguments = _load_arguments(weights_dtype, quantization) | ({"device_map": device_map} if device_map else {})
    try:
        model, loaded = auto_class(config, base.path).from_pretrained(
            base.path, use_safetensors=True, **_source(base), **replaced, **arguments
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unloadable(base.path, error) from None
    _check_loaded(base.path, loaded)
    if base.rope:
        check_scaled(model, base.rope, base.path)
    return _prepared(model, quantization)


def load_reward_model(base: Pretrained, weights_dtype: torch.dtype) -> PreTrainedModel:
    """Load a model with one output for a whole sequence. SnaketuneError: as `load_pretrained`, or it has other outputs."""
    _check_own_weights(base)
    config = read_config(base)
    if config.num_labels != 1:
        raise SnaketuneError(
            f"the model {base.path!r} has {config.num_labels} outputs; expected a reward model, which has one "
            "(AutoModelForSequenceClassification with num_labels 1)"
        )
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            base.path, use_safetensors=True, **_source(base), **_load_arguments(weights_dtype, None)
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unloadable(base.path, error) from None
    _check_loaded(base.path, loaded)
    return model


def reload_model(
    model: PreTrainedModel, *, weights_dtype: torch.dtype, quantization: Quantization | None = None
) -> PreTrainedModel:
    """Return the model that `load_pretrained` would load from the folder that `model` is saved to."""
    arguments = _load_arguments(weights_dtype, quantization)
    loaded, report = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **arguments)
    _check_loaded("in memory", report)
    loaded.generation_config = model.generation_config
    return _prepared(loaded, quantization)


def _unloadable(path: str, error: Exception) -> SnaketuneError:
    return SnaketuneError(f"the model {path!r} can't be loaded: {first_line(error)}")


def _load_arguments(weights_dtype: torch.dtype, quantization: Quantization | None) -> dict[str, Any]:
    """Return arguments of `from_pretrained`."""
    # Mismatched sizes are reported by name, in `_check_loaded`.
    arguments = {"dtype": weights_dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if quantization is None:
        return arguments
    from transformers import BitsAndBytesConfig

    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=weights_dtype,
    )
    return arguments | {"quantization_config": in_4_bits, "device_map": {"": _device_for_4_bits()}}


def _device_for_4_bits() -> int | str:
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _prepared(model: PreTrainedModel, quantization: Quantization | None) -> PreTrainedModel:
    freeze_non_text_modules(model)
    if quantization is None:
        return model
    from peft import prepare_model_for_kbit_training

    for module in model.modules():
        # On CPUs with bfloat16 matmuls, bitsandbytes repacks the weights at the first evaluation, for a kernel without backward
        # pass; training after it would silently learn next to nothing.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    # Here rather than where adapters are added, so that a reference model computes with the same norms and embeddings.
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _check_tokenizer(base: Pretrained, chat: ChatTokenizer) -> None:
    """Raise SnaketuneError if the run's tokenizer gives tokens of the base other ids; it may have new tokens, lack added
    tokens of the base, and rename reserved ones."""
    if (tokenizer := own_tokenizer(base)) is None:
        return
    known, added = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_added_tokens_decoder()

    def may_differ(token: str) -> bool:
        if known[token] not in added or chat.has_token(token):
            return False
        name = chat.id_to_token(known[token])
        return name is None or (RESERVED.search(token) is not None and name not in known)

    if strangers := [token for token in chat.mismatched_tokens(known) if not may_differ(token)]:
        raise SnaketuneError(
            f"the run's tokenizer doesn't match its base {base.path!r}: {len(strangers)} of {len(known)} tokens have another "
            f"id, for instance {strangers[0]!r}; adopt the base's tokenizer (tokenizers.NAME.adopt: {base.path})"
        )


def own_tokenizer(base: Pretrained) -> Tokenizer | None:
    """Return a model's own tokenizer; None if it has no tokenizer.json. Raises SnaketuneError if there is no such model."""
    # Raises for a model that can't be reached; a missing tokenizer file alone is no error.
    read_config(base)
    file = file_of(base.path, base.revision, "tokenizer.json")
    return file and Tokenizer.from_file(file)


def file_of(path: str, revision: str | None, name: str) -> str | None:
    """Return the local path of a model's file; None if it has no file of that name."""
    try:
        return cached_file(
            path,
            name,
            revision=revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (OSError, ValueError) as error:
        raise _unloadable(path, error) from None


def _check_own_weights(base: Pretrained) -> None:
    """Raise SnaketuneError if a model would load files other than its own safetensors.

    transformers applies an adapter found beside a model, pickled ones too, or loads the base model that the adapter names; and
    it loads shards from any path that an index names.
    """
    if file_of(base.path, base.revision, ADAPTER_CONFIG_NAME):
        raise SnaketuneError(
            f"the model {base.path!r} comes with an adapter ({ADAPTER_CONFIG_NAME}), which would be added to its weights or "
            "replace them by another model's; merge it into the weights, or remove the file"
        )
    if index := file_of(base.path, base.revision, SAFE_WEIGHTS_INDEX_NAME):
        check_index(base.path, Path(index))


def _check_loaded(path: str, loaded: dict[str, Any]) -> None:
    """Raise SnaketuneError for missing weights and print unused ones: transformers only warns, and initializes at random."""
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in loaded["mismatched_keys"]]
    if missing := sorted({*loaded["missing_keys"], *mismatched}):
        raise SnaketuneError(
            f"the model {path!r} lacks weights that its config.json needs, or has them in another shape: "
            f"{', '.join(missing[:3])} ({len(missing)} in all). They would be random; download the folder again, or use one "
            "with all weights"
        )
    if unused := sorted(loaded["unexpected_keys"]):
        print(f"{path} has weights that this model doesn't use: {', '.join(unused[:3])} ({len(unused)} in all)")


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, tokens: int) -> None:
    """Extend the embeddings to `tokens` tokens. The new rows depend on the shapes alone, so a base that is loaded again,
    for evaluation or to merge adapters, has the same rows on any device and in any data type."""
    known = model.get_input_embeddings().weight.shape[0]
    if known >= tokens:
        return
    model.resize_token_embeddings(tokens, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    scale = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    initialized = set()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        # Tied weights are initialized once.
        if layer is None or layer.weight.data_ptr() in initialized:
            continue
        initialized.add(layer.weight.data_ptr())
        new = layer.weight[known:]
        new.copy_(torch.empty(new.shape).normal_(std=scale, generator=generator))
        if getattr(layer, "bias", None) is not None:
            layer.bias[known:].zero_()


def positions_of(config: PretrainedConfig) -> int | None:
    """The positions of a model; None if it has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def read_config(base: Pretrained | Scratch) -> PretrainedConfig | None:
    """Return the config of the model that `load_base` loads, without its weights; None for a model from scratch. Raises
    SnaketuneError if there is none."""
    if isinstance(base, Scratch):
        return None
    check_model_files(base.path)
    try:
        config = AutoConfig.from_pretrained(base.path, **_source(base))
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(base.path, error) from None
    for key, name in texts(config.to_dict()):
        if key.endswith("transformers_weights") and name not in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            raise SnaketuneError(
                f"the model {base.path!r}: {key} in its config names {name!r}; expected weights in {SAFE_WEIGHTS_NAME}, or "
                f"shards with {SAFE_WEIGHTS_INDEX_NAME}. Give them this name in a local folder, and remove the key"
            )
    return scaled_config(config, base.rope, base.path) if base.rope else config


def _source(base: Pretrained) -> dict[str, Any]:
    return {"revision": base.revision or "main", "trust_remote_code": base.trust_remote_code}


def stored_dtype(config: PretrainedConfig | None) -> torch.dtype | None:
    """Return the data type of a model's stored weights by its config; None if unknown, or for a model from scratch."""
    return config and (config.dtype or config.get_text_config().dtype)


def scratch_config(shape: Scratch, chat: ChatTokenizer) -> PretrainedConfig:
    """Return the config of a model from scratch, as `load_base` makes it."""
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=chat.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads or shape.heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        initializer_range=shape.init_std,
        pad_token_id=chat.pad_id,
        eos_token_id=chat.stop_ids[0],
        bos_token_id=None,
    )
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    return config


def set_special_tokens(model: PreTrainedModel, chat: ChatTokenizer) -> None:
    """Set padding and stop tokens in the model's config and generation_config."""
    model.config.pad_token_id = chat.pad_id
    model.generation_config.pad_token_id = chat.pad_id
    model.generation_config.eos_token_id = list(chat.stop_ids)
    # Some bases have contradictory sampling settings, which transformers loads, but refuses to save if the config was edited.
    # The hash marks it as unedited; otherwise saving would fail at the end of the training.
    model.generation_config._original_object_hash = hash(model.generation_config)
