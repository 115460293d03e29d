"""A trained model as the folder that people load: adapters merged, in a data type that is chosen, in shards of at most 5 GB;
or, where that is asked for, adapters alone.

Training keeps float32 masters, or 16-bit weights under float32 adapters. What is written is rounded once, after everything was
added up in float32, one layer at a time, so that a GPU that could train the model can also merge it.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from snaketune.config.training_runs import Pretrained, SaveDtype
from snaketune.models.adapter_stack import ADAPTER
from snaketune.models.adapters import add_lora, merge, round_weights, rounding, save_adapter
from snaketune.models.devices import Compute
from snaketune.models.forward import inner_model
from snaketune.models.load_model import stored_dtype
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.training.checkpoint.checkpoints import copy_trained
from snaketune.training.parallel.fsdp import gather

SHARD_SIZE = "5GB"
# Where tokenizers differ: words, digits, runs of blanks, letters beyond ASCII.
PROBE = "The cats of 1987 sat on 12 mats; naïve, they didn't move.\n\n    def f(x): return x"


def choose_dtype(asked: SaveDtype, config: PretrainedConfig | None, compute: Compute) -> torch.dtype:
    """The data type that a result's weights are saved in.

    `auto` is bfloat16 for what was computed in it, or came in it. A float16 model that was computed in float32 is saved in
    float32: bfloat16 would drop three bits that it came with, and float16 may overflow.

    Args:
        config: of the model before it was trained; None where it is made from scratch.
    """
    if asked != "auto":
        return getattr(torch, asked)
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
    """Write a model folder: complete, or without weights where the adapters beside them are all that is asked for. The model
    is of no use for training afterwards.

    Args:
        reload: gives the base as it is without quantization, for what was trained on 4-bit weights to be merged into.
        base: what lies beneath adapters, as the config names it; None where it doesn't.
        known_tokens: rows of the vocabulary there.
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
    round_weights(model, dtype)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def _save_configs(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Those that the merged model's folder would have."""
    config = copy.deepcopy(model.config)
    # Its adapters were learned on 4-bit weights; they are added to the weights as they came.
    config.__dict__.pop("quantization_config", None)
    config.architectures = [type(model).__name__]
    for one in {id(config): config, id(text := config.get_text_config()): text}.values():
        one.dtype = dtype
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
    """Make a model that is shared out whole in the host's memory of one process, as `save_trained` takes it; called by all.

    What isn't merged with adapters is rounded at once, so that no more than the result is ever held.

    Args:
        full_tensor_of: as of `sharded.gather`.
        keep: whether this is the process.
    """
    rounded = rounding(inner_model(model), dtype)
    gather(
        model,
        full_tensor_of,
        keep=keep,
        only_trained=spec.quantization is not None,
        finish=lambda name, tensor: tensor if spec.lora else rounded(name, tensor),
    )


def warn_if_tokenizer_differs(folder: Path) -> None:
    """Say so if plain transformers makes other tokens of a text than the model learned.

    For some architectures, Qwen2 among them, AutoTokenizer takes the family's own class whatever the folder says, and that
    class cuts texts by its own rules: right for the family's models, wrong for a vocabulary that was trained here.
    """
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    try:
        plain = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        # It comes with code of its own, which isn't run for a look.
        return
    if plain(PROBE, add_special_tokens=False)["input_ids"] != own:
        print(
            f"note: AutoTokenizer reads this folder as {type(plain).__name__}, which makes other tokens of a text than the "
            "model learned; outside of snaketune load its tokenizer with transformers.PreTrainedTokenizerFast",
            flush=True,
        )
