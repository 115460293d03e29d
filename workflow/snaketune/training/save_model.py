"""Save a trained model as a folder for transformers: adapters merged, in files of at most 5 GB; or, if configured, alone.

Weights are rounded to the chosen data type once, after merging in float32, one layer at a time, so that a GPU that could train
the model can also merge it.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact
from snaketune.config.training_runs import SaveDtype
from snaketune.engine.checkpoints import copy_trained
from snaketune.engine.fsdp import gather
from snaketune.engine.model.adapters import cast_parameters, merge, parameter_cast, save_adapter
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import inner_model
from snaketune.models.adapter_stack import ADAPTER
from snaketune.models.load_model import stored_dtype
from snaketune.models.lora import add_lora
from snaketune.training.non_text_modules import add_non_text_modules

SHARD_SIZE = "5GB"
# Text on which tokenizers differ: words, digits, runs of spaces, non-ASCII letters.
PROBE = "The cats of 1987 sat on 12 mats; naïve, they didn't move.\n\n    def f(x): return x"


def choose_dtype(requested: SaveDtype, config: PretrainedConfig | None, compute: Compute) -> torch.dtype:
    """Return the data type in which a result's weights are saved.

    `auto` is bfloat16 if the model was computed in it or was stored in it before training, else float32. So a float16 model
    computed in float32 is saved in float32: bfloat16 would lose three bits of its mantissa, and float16 may overflow.

    Args:
        config: the config of the model before training; None for a model from scratch.
    """
    if requested != "auto":
        return getattr(torch, requested)
    return torch.bfloat16 if torch.bfloat16 in (compute.dtype, stored_dtype(config)) else torch.float32


def save_trained(trainer: Any, training: Any) -> dict[str, str]:
    """Write the trained model to the work folder's payload. Called by all processes; it can't be trained afterwards.

    Args:
        trainer, training: TrainingFeatures and PreparedTraining of `training.prepared`.
    Returns:
        The data types of the saved weights, and of the base of adapters that stay unmerged, for the manifest.
    """
    spec, compute, config = training.run.spec, training.run.compute, training.config
    model, is_main = trainer.accelerator.unwrap_model(trainer.model), trainer.is_world_process_zero()
    dtype = choose_dtype(spec.training.save_dtype, config, compute)
    # Adapters are merged into the weights that they were trained on; for QLoRA, into the weights before quantization.
    trained_on = compute.weights_dtype(frozen=spec.lora is not None)
    base_dtype = stored_dtype(config) or torch.float32 if spec.quantization else trained_on
    if full_tensor_of := trainer.full_tensor_of():
        # Without adapters each tensor is rounded as it is gathered, so that no more than the result is held in memory.
        rounded = parameter_cast(inner_model(model), dtype)
        gather(
            model,
            full_tensor_of,
            keep=is_main,
            only_trained=spec.quantization is not None,
            finish=lambda name, tensor: tensor if spec.lora else rounded(name, tensor),
        )
    if is_main:
        _write(model, training, dtype, base_dtype)
    dtypes = {"saved_dtype": dtype} | ({"base_dtype": base_dtype} if spec.lora and not spec.lora.merge else {})
    return {name: str(value).removeprefix("torch.") for name, value in dtypes.items()}


def _write(model: torch.nn.Module, training: Any, dtype: torch.dtype, base_dtype: torch.dtype) -> None:
    """Write complete weights, or configs and adapters only if the spec doesn't merge them."""
    spec, folder, config = training.run.spec, training.run.work.payload, training.config
    # The Trainer turns it off, and the model would answer without a cache.
    model.config.use_cache = True
    if spec.lora:
        rows = model.get_input_embeddings().weight.shape[0]
        grown = config is not None and rows > config.get_text_config().vocab_size
        save_adapter(model, folder / ADAPTER, base=training.initial.named_base, grown=grown)
        if not spec.lora.merge:
            _save_configs(model.get_base_model(), folder, dtype)
            return
        if spec.quantization:
            model = copy_trained(model, add_lora(training.load(base_dtype, quantized=False), spec.lora))
        model = merge(model, dtype)
    cast_parameters(model, dtype)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    # A reward model is the text part alone.
    if training.initial.weights and model.can_generate():
        add_non_text_modules(folder, model, training.initial.weights)


def _save_configs(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the configs that the merged model's folder would have."""
    config = copy.deepcopy(model.config)
    # Adapters that were trained on 4-bit weights are applied to the unquantized base.
    config.__dict__.pop("quantization_config", None)
    # As `save_pretrained` does: torch has put the prefix before the class of a sharded model.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = config.get_text_config().dtype = dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def copy_other_files(result: Artifact, folder: Path) -> None:
    """Copy a model's tokenizer and other files that `folder` lacks: no weights, nor the index of their shards, nor adapters."""
    for name in result.manifest["payload"]:
        weights = name.endswith((".safetensors", ".index.json"))
        if "/" not in name and not weights and not (folder / name).exists():
            shutil.copyfile(result.folder / name, folder / name)


def warn_if_tokenizer_differs(folder: Path) -> None:
    """Print a note if AutoTokenizer would tokenize differently from the tokenizer that the model was trained with.

    For some architectures, Qwen2 among them, AutoTokenizer uses the family's tokenizer class whatever the folder names.
    That class splits text by its own rules: right for the family's models, wrong for a vocabulary that was trained here.
    """
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    try:
        plain = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        # The tokenizer has remote code, which isn't run for a check.
        return
    if plain(PROBE, add_special_tokens=False)["input_ids"] != ids:
        print(
            f"note: AutoTokenizer loads this model's tokenizer as {type(plain).__name__}, which tokenizes text differently "
            "from training; outside of snaketune load it with transformers.PreTrainedTokenizerFast",
            flush=True,
        )
