"""Save a trained model as a folder for transformers: adapters merged, in the chosen data type, in files of at most 5 GB; or, if
configured, adapters alone.

Training has float32 master weights, or 16-bit weights with float32 adapters. Saved weights are rounded once, after merging in
float32, one layer at a time, so that a GPU that could train the model can also merge it.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from snaketune.config.training_runs import Pretrained, SaveDtype
from snaketune.models.adapter_stack import ADAPTER
from snaketune.models.adapters import add_lora, cast_parameters, merge, parameter_cast, save_adapter
from snaketune.models.devices import Compute
from snaketune.models.forward import inner_model
from snaketune.models.load_model import stored_dtype
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.training.checkpoint.checkpoints import copy_trained
from snaketune.training.parallel.fsdp import gather

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


def save_trained(
    model: torch.nn.Module,
    folder: Path,
    spec: SftSpec | DpoSpec,
    dtype: torch.dtype,
    reload: Callable[[], PreTrainedModel],
    *,
    base: Pretrained | None = None,
    known_tokens: int | None = None,
) -> None:
    """Write a model folder: complete, or configs and adapters only if the spec doesn't merge them.

    The model can't be trained afterwards.

    Args:
        reload: loads the base without quantization; adapters trained on 4-bit weights are merged into that.
        base: the base of the adapters, if the config names one.
        known_tokens: the vocabulary size of the base.
    """
    if spec.lora:
        rows = model.get_input_embeddings().weight.shape[0]
        save_adapter(model, folder / ADAPTER, base=base, grown=known_tokens is not None and rows > known_tokens)
        if not spec.lora.merge:
            _save_configs(model.get_base_model(), folder, dtype)
            return
        if spec.quantization:
            model = copy_trained(model, add_lora(reload(), spec.lora))
        model = merge(model, dtype)
    cast_parameters(model, dtype)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def _save_configs(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the configs that the merged model's folder would have."""
    config = copy.deepcopy(model.config)
    # Adapters that were trained on 4-bit weights are applied to the unquantized base.
    config.__dict__.pop("quantization_config", None)
    config.architectures = [type(model).__name__]
    for part in {id(config): config, id(text := config.get_text_config()): text}.values():
        part.dtype = dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def gather_trained(
    model: torch.nn.Module,
    spec: SftSpec | DpoSpec,
    dtype: torch.dtype,
    *,
    full_tensor_of: Callable[[torch.nn.Parameter], torch.Tensor],
    keep: bool,
) -> None:
    """Gather a sharded model in the host memory of one process, for `save_trained`; called by all processes.

    Without adapters each tensor is rounded as it is gathered, so that no more than the result is held in memory.

    Args:
        full_tensor_of: see `training.parallel.fsdp.gather`.
        keep: whether this process receives the model.
    """
    rounded = parameter_cast(inner_model(model), dtype)
    gather(
        model,
        full_tensor_of,
        keep=keep,
        only_trained=spec.quantization is not None,
        finish=lambda name, tensor: tensor if spec.lora else rounded(name, tensor),
    )


def warn_if_tokenizer_differs(folder: Path) -> None:
    """Print a note if AutoTokenizer would tokenize differently from the tokenizer that the model was trained with.

    For some architectures, Qwen2 among them, AutoTokenizer uses the family's tokenizer class whatever the folder names.
    That class splits text by its own rules: right for the family's models, wrong for a vocabulary that was trained here.
    """
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    try:
        plain = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        # The tokenizer has remote code, which isn't run for a check.
        return
    if plain(PROBE, add_special_tokens=False)["input_ids"] != own:
        print(
            f"note: AutoTokenizer loads this model's tokenizer as {type(plain).__name__}, which tokenizes text differently "
            "from training; outside of snaketune load it with transformers.PreTrainedTokenizerFast",
            flush=True,
        )
