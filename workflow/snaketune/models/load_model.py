"""Models from scratch, from a folder or the Hub, and from an earlier stage. Safetensors only; remote code only if asked."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, cached_file

from snaketune.config.training_runs import Pretrained, Quantization, Scratch
from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer

OWN_SHARD = re.compile(r"[^/\\]+\.safetensors")
# Added tokens that a base has never been trained on, by what models call them.
RESERVED = re.compile(r"reserved|unused|extra|spare|placeholder", re.IGNORECASE)


def load_base(
    base: Pretrained | Scratch,
    chat: ChatTokenizer,
    *,
    weights_dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """The model that an SFT run starts from, with room for every token of its tokenizer."""
    if isinstance(base, Scratch):
        model = _from_scratch(base, chat).to(weights_dtype)
    else:
        _check_tokenizer(base, chat)
        model = load_folder(
            base.path,
            weights_dtype=weights_dtype,
            quantization=quantization,
            revision=base.revision,
            trust_remote_code=base.trust_remote_code,
        )
    grow_vocabulary(model, chat.vocab_size)
    set_special_tokens(model, chat)
    return model


def load_folder(
    path: Path | str,
    *,
    weights_dtype: torch.dtype,
    quantization: Quantization | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model from a local folder or the Hub.

    Raises:
        SnaketuneError: no such model, no safetensors, or weights that lack something or lie elsewhere.
    """
    _check_own_weights(path, revision)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            str(path),
            output_loading_info=True,
            # So that they are told below, by name.
            ignore_mismatched_sizes=True,
            revision=revision or "main",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **_as_asked(weights_dtype, quantization),
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = (str(error).strip().splitlines() or [repr(error)])[0]
        raise SnaketuneError(f"the model {str(path)!r} can't be loaded: {first_line}") from None
    _check_loaded(str(path), loaded)
    return _prepared(model, quantization)


def reload_model(
    model: PreTrainedModel, *, weights_dtype: torch.dtype, quantization: Quantization | None = None
) -> PreTrainedModel:
    """What `load_folder` would give of the folder that a model is written to."""
    loaded, found = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **_as_asked(weights_dtype, quantization),
    )
    _check_loaded("in memory", found)
    loaded.generation_config = model.generation_config
    return _prepared(loaded, quantization)


def _as_asked(weights_dtype: torch.dtype, quantization: Quantization | None) -> dict[str, Any]:
    """Arguments of `from_pretrained`."""
    if quantization is None:
        return {"dtype": weights_dtype}
    device = _device_for_4_bits()
    return {
        "dtype": weights_dtype,
        "quantization_config": _bitsandbytes(quantization, weights_dtype),
        "device_map": {"": device},
    }


def _prepared(model: PreTrainedModel, quantization: Quantization | None) -> PreTrainedModel:
    if quantization is None:
        return model
    from peft import prepare_model_for_kbit_training

    for module in model.modules():
        # On CPUs with bfloat16 products, bitsandbytes lays the weights out anew at the first evaluation, for a kernel that no
        # gradient comes back through; a training after it would learn next to nothing, without a word.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    # Here and not where adapters are added, so that a reference computes with the same norms and embeddings.
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _check_tokenizer(base: Pretrained, chat: ChatTokenizer) -> None:
    """Refuse tokens that the base has learned as other ones. New ones beside its own are fine, added ones may be left out, and
    reserved ones get another name."""
    if (own := own_tokenizer(base)) is None:
        return
    known, added = own.get_vocab(with_added_tokens=True), own.get_added_tokens_decoder()

    def may_differ(token: str) -> bool:
        if known[token] not in added or chat.has(token):
            return False
        name = chat.text_of(known[token])
        return name is None or (RESERVED.search(token) is not None and name not in known)

    if strangers := [token for token in chat.strangers(known) if not may_differ(token)]:
        raise SnaketuneError(
            f"the run's tokenizer isn't that of its base {base.path!r}: {len(strangers)} of {len(known)} tokens have another "
            f"id, for instance {strangers[0]!r}; adopt the base's own (tokenizers.NAME.adopt: {base.path})"
        )


def own_tokenizer(base: Pretrained) -> Tokenizer | None:
    """The tokenizer that comes with a model; None where it brings none in a file of this kind.

    Raises:
        SnaketuneError: there is no such model.
    """
    # It says what ails a model that can't be reached; a file that isn't there is no fault.
    read_config(base)
    file = _file_of(base.path, base.revision, "tokenizer.json")
    return file and Tokenizer.from_file(file)


def _file_of(path: Path | str, revision: str | None, name: str) -> str | None:
    """Where a file of a model lies; None where it has none of that name."""
    try:
        return cached_file(
            str(path),
            name,
            revision=revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise SnaketuneError(f"the model {str(path)!r} can't be loaded: {first_line}") from None


def _check_own_weights(path: Path | str, revision: str | None) -> None:
    """Refuse a model that leads to files which aren't its own safetensors: nobody asked for them, and no fingerprint has them.

    transformers lays an adapter that lies beside a model upon it, pickled ones too, or goes on to the model that it names; and
    it takes shards from wherever an index says.
    """
    if _file_of(path, revision, ADAPTER_CONFIG_NAME):
        raise SnaketuneError(
            f"the model {str(path)!r} comes with an adapter ({ADAPTER_CONFIG_NAME}), which would be added to its weights or "
            "lead to others; merge it into the weights, or take the file away"
        )
    if not (index := _file_of(path, revision, SAFE_WEIGHTS_INDEX_NAME)):
        return
    try:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
        strange = [name for name in shards if not OWN_SHARD.fullmatch(name)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SnaketuneError(f"the model {str(path)!r}: {SAFE_WEIGHTS_INDEX_NAME} can't be read: {error!r}") from None
    if strange:
        raise SnaketuneError(
            f"the model {str(path)!r}: {SAFE_WEIGHTS_INDEX_NAME} names {strange[0]!r}; expected *.safetensors beside it"
        )


def _check_loaded(path: str, loaded: dict[str, Any]) -> None:
    """transformers draws what it doesn't find at random, and leaves out what it can't use, with a warning that passes by."""
    mismatched = [entry[0] if isinstance(entry, tuple) else entry for entry in loaded["mismatched_keys"]]
    if lacking := sorted({*loaded["missing_keys"], *mismatched}):
        raise SnaketuneError(
            f"the model {path!r} lacks weights that its config.json asks for, or has them in another shape: "
            f"{', '.join(lacking[:3])} ({len(lacking)} in all). They would be random; get the folder again, or one whose "
            "weights are those of a causal language model"
        )
    if unused := sorted(loaded["unexpected_keys"]):
        print(f"{path} holds weights that this model has no place for: {', '.join(unused[:3])} ({len(unused)} in all)")


@torch.no_grad()
def grow_vocabulary(model: PreTrainedModel, tokens: int) -> None:
    """Room for `tokens` tokens. New rows depend on nothing but the shapes.

    So a base that is loaded again, to be evaluated or to take what its adapters learned, is the same base, on whatever device
    and in whatever data type.
    """
    known = model.get_input_embeddings().weight.shape[0]
    if known >= tokens:
        return
    model.resize_token_embeddings(tokens, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    drawn = set()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        # Tied ones are drawn once.
        if layer is None or layer.weight.data_ptr() in drawn:
            continue
        drawn.add(layer.weight.data_ptr())
        new = layer.weight[known:]
        scale = getattr(model.config.get_text_config(), "initializer_range", 0.02)
        new.copy_(torch.empty(new.shape).normal_(std=scale, generator=generator))
        if getattr(layer, "bias", None) is not None:
            layer.bias[known:].zero_()


def read_config(base: Pretrained | Scratch) -> PretrainedConfig | None:
    """The config of what `load_base` loads, read without its weights; None for a model from scratch."""
    if isinstance(base, Scratch):
        return None
    return read_folder_config(base.path, revision=base.revision, trust_remote_code=base.trust_remote_code)


def read_folder_config(
    path: Path | str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config of what `load_folder` loads. Raises SnaketuneError if there is none."""
    try:
        return AutoConfig.from_pretrained(str(path), revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip().splitlines() or [repr(error)])[0]
        raise SnaketuneError(f"the model {str(path)!r} can't be loaded: {first_line}") from None


def stored_dtype(config: PretrainedConfig | None) -> torch.dtype | None:
    """The data type that a model's weights came in, by its config; None where it doesn't say, or there is no model yet."""
    if config is None:
        return None
    return config.dtype or config.get_text_config().dtype


def scratch_config(shape: Scratch, chat: ChatTokenizer) -> PretrainedConfig:
    """The config of a model that `load_base` makes."""
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


def _from_scratch(shape: Scratch, chat: ChatTokenizer) -> PreTrainedModel:
    config = scratch_config(shape, chat)
    torch.manual_seed(shape.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _device_for_4_bits() -> int | str:
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _bitsandbytes(quantization: Quantization, compute: torch.dtype):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=compute,
    )


def set_special_tokens(model: PreTrainedModel, chat: ChatTokenizer) -> None:
    """Padding and stop tokens where generation looks for them."""
    model.config.pad_token_id = chat.pad_id
    model.generation_config.pad_token_id = chat.pad_id
    model.generation_config.eos_token_id = list(chat.stop_ids)
    # Some bases come with sampling settings that contradict each other, which transformers lets pass, but in a config that was
    # edited refuses to save: at the end of the training.
    model.generation_config._original_object_hash = hash(model.generation_config)


def parameter_count(model: torch.nn.Module) -> int:
    """Parameters, tied ones once; 4-bit ones by the numbers that they stand for."""
    return sum(map(parameter_numel, model.parameters()))


def parameter_numel(parameter: torch.nn.Parameter) -> int:
    """How many numbers a parameter stands for: 4-bit ones lie two to a byte."""
    return parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" and parameter.dtype == torch.uint8 else 1)
