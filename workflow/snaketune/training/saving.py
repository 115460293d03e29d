"""A trained model as the folder that people load: adapters merged, in a data type that is chosen, in shards of at most 5 GB.

Training keeps float32 masters, or 16-bit weights under float32 adapters. What is written is rounded once, after everything was
added up in float32, one layer at a time, so that a GPU that could train the model can also merge it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import write_json
from snaketune.config.runs import SaveDtype
from snaketune.models.devices import Compute
from snaketune.models.forward import inner_model
from snaketune.models.loading import add_lora, stored_dtype
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.training.checkpoints import copy_trained
from snaketune.training.sharded import gather

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
) -> None:
    """Write a complete model folder. The model is of no use for training afterwards.

    Args:
        reload: gives the base as it is without quantization, for what was trained on 4-bit weights to be merged into.
    """
    if spec.lora:
        adapter = folder / "adapter"
        model.save_pretrained(adapter)
        # Its README is a template with nothing filled in.
        (adapter / "README.md").unlink(missing_ok=True)
        _sort_target_modules(adapter / "adapter_config.json")
        if spec.quantization:
            model = copy_trained(model, add_lora(reload(), spec.lora))
        model = merge(model, dtype)
    round_weights(model, dtype)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def gather_trained(
    model: torch.nn.Module,
    spec: SftSpec | DpoSpec,
    dtype: torch.dtype,
    *,
    whole_of: Callable[[torch.nn.Parameter], torch.Tensor],
    keep: bool,
) -> None:
    """Make a model that is shared out whole in the host's memory of one process, as `save_trained` takes it; called by all.

    What isn't merged with adapters is rounded at once, so that no more than the result is ever held.

    Args:
        whole_of: as of `sharded.gather`.
        keep: whether this is the process.
    """
    rounded = _rounding(inner_model(model), dtype)
    gather(
        model,
        whole_of,
        keep=keep,
        only_trained=spec.quantization is not None,
        finish=lambda name, tensor: tensor if spec.lora else rounded(name, tensor),
    )


def tell_other_tokenizer(folder: Path) -> None:
    """Say so if plain transformers makes other tokens of a text than the model learned.

    For some architectures, Qwen2 among them, AutoTokenizer takes the family's own class whatever the folder says, and that
    class cuts texts by its own rules: right for the family's models, wrong for a vocabulary that was trained here.
    """
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    try:
        plain = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        # It comes with code of its own, which isn't run for a look.
        return
    if plain(PROBE, add_special_tokens=False)["input_ids"] != own:
        print(
            f"note: AutoTokenizer reads this folder as {type(plain).__name__}, which makes other tokens of a text than the "
            "model learned; outside of snaketune load its tokenizer with transformers.PreTrainedTokenizerFast",
            flush=True,
        )


def merge(model: torch.nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its adapters, which are added to its weights in float32; layers that had one are of `dtype` then."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.float()
            layer.merge()
            layer.get_base_layer().to(dtype)
    return model.unload()


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put parameters into a data type, in place; tied ones stay tied.

    Those that the model wants in float32 whatever it is loaded in, as some routers, are left as they are; so are buffers.
    """
    rounded = _rounding(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = rounded(name, parameter.data)


def _rounding(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    kept = model._keep_in_fp32_modules_strict or ()

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        rounds = tensor.is_floating_point() and not any(pattern in name for pattern in kept)
        return tensor.to(dtype) if rounds else tensor

    return rounded


def _sort_target_modules(path: Path) -> None:
    """peft keeps them in a set, which has another order in every process."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config.get("target_modules"), list):
        config["target_modules"] = sorted(config["target_modules"])
    write_json(path, config)
