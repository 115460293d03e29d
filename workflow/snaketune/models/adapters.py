"""Adapters by peft: put on a model, written beside it, read again, merged into its weights.

    low-rank matrices    on the layers that `target_modules` names
    modules_to_save      whole copies of modules, trained in float32 in the place of the frozen ones

What is written is read by peft alone: `PeftModel.from_pretrained(base, folder)`. What is merged is added up in float32 and
rounded once.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from snaketune.artifacts.manifest import write_json
from snaketune.config.suggestions import unknown
from snaketune.config.training_runs import Lora, Pretrained
from snaketune.errors import SnaketuneError
from snaketune.patterns import TooSlow, fullmatch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# What peft writes before each of the model's own names.
PREFIX = "base_model.model."


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """Wrap `model` so that only adapters train, and the modules that are asked for.

    Raises:
        SnaketuneError: a name that no module has, or an adapter or a module that can't be trained and merged.
    """
    return _adapt(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=_targets(model, lora.target_modules),
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            modules_to_save=_whole_modules(model, lora.modules_to_save) or None,
            task_type="CAUSAL_LM",
        ),
    )


def leave_casts_to_autocast(model: PeftModel) -> None:
    """Hand adapters their inputs as they are: peft casts them to the adapter's float32, and autocast back to 16 bits.

    DoRA is left alone, since it computes norms in the data type of the inputs.
    """
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and not any(getattr(layer, "use_dora", {}).values()):
            layer.cast_input_dtype_enabled = False


def _targets(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> str | list[str]:
    """What peft is told: a pattern as the names that it fits, since peft's own matching knows no limit of time."""
    if not isinstance(wanted, str):
        return list(wanted)
    if wanted == ALL_LINEAR:
        return wanted
    names = [name for name, _ in model.named_modules() if name]
    try:
        found = [name for name in names if fullmatch(wanted, name)]
    except TooSlow as error:
        raise SnaketuneError(f"lora.target_modules: {error}") from None
    if not found:
        raise SnaketuneError(
            f"lora.target_modules: the pattern {wanted!r} fits no whole name of a module; such are "
            f"{', '.join([name for name in names if name.count('.') > 2][:3])}"
        )
    return found


def _whole_modules(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """The full names of the modules that are trained whole. One of tied embeddings stands for both.

    peft goes by the ends of names, whatever stands before them: `norm` would be every `input_layernorm` too.
    """
    modules = {
        name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    }
    found: set[str] = set()
    for end in wanted:
        fits = {name for name in modules if f".{name}".endswith(f".{end}")}
        if not fits:
            ends = {name.rsplit(".", 1)[-1] for name in modules if not name.rsplit(".", 1)[-1].isdigit()}
            raise SnaketuneError(f"lora.modules_to_save: the model has no module {end!r}{unknown(end, ends)}")
        found |= fits
    if tied := _tied(model):
        ends = {name for name, module in modules.items() if module in tied}
        found |= ends if found & ends else set()
    for name in sorted(found):
        if outer := next((other for other in sorted(found) if name.startswith(f"{other}.")), None):
            raise SnaketuneError(f"lora.modules_to_save: {name} is a part of {outer}; name one of them")
        if any(type(parameter).__name__ == "Params4bit" for parameter in modules[name].parameters()):
            raise SnaketuneError(
                f"lora.modules_to_save: {name} is in 4 bits, which can't be trained; leave it out, or take an adapter on it"
            )
    return sorted(found)


def _tied(model: PreTrainedModel) -> tuple[torch.nn.Module, ...]:
    """Embedding and output head, where they are one tensor."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (embeddings, head) if head is not None and head.weight is embeddings.weight else ()


def _adapt(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    tied, names = _tied(model), [name for name, _ in model.named_modules()]
    try:
        with warnings.catch_warnings():
            # Of tied embeddings, which are seen to below.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            adapted = get_peft_model(model, config)
    except ValueError as error:
        _check_found(config, names)
        told = " ".join(str(error).split())
        # In its middle stand modules with all that they are made of.
        raise SnaketuneError(f"lora: {told if len(told) < 300 else f'{told[:100]} … {told[-200:]}'}") from None
    _check_found(config, names)
    if tied and any(getattr(layer, "base_layer", None) in tied for layer in adapted.modules()):
        raise SnaketuneError(
            "lora.target_modules: the output head of this model is its embedding, so an adapter on one of the two can't be "
            "merged without changing the other; leave it out, or train it whole (lora.modules_to_save)"
        )
    whole = [module for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper)]
    for wrapper in whole:
        wrapper.modules_to_save.float()
        wrapper.register_forward_hook(_as_it_was)
    copies = [wrapper.modules_to_save["default"] for wrapper in whole if wrapper.original_module in tied]
    if copies:
        copies[1].weight = copies[0].weight
    return adapted


def _check_found(config: LoraConfig, names: list[str]) -> None:
    """Raise SnaketuneError if a target fits no module, which peft passes over where another one does.

    Of mixtures of experts, peft has taken the names of the modules that experts once were out of the targets.
    """
    if isinstance(config.target_modules, str):
        return
    ends = {name.rsplit(".", 1)[-1] for name in names if name and not name.rsplit(".", 1)[-1].isdigit()}
    for target in sorted(config.target_modules):
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise SnaketuneError(f"lora.target_modules: the model has no module {target!r}{unknown(target, ends)}")


def _as_it_was(wrapper: ModulesToSaveWrapper, inputs: tuple, output):
    """A float32 copy of a module gives what the 16-bit one gave, so that what comes after computes as before."""
    if not isinstance(output, torch.Tensor):
        return output
    return output.to(next(wrapper.original_module.parameters()).dtype)


def save_adapter(model: PeftModel, folder: Path, *, base: Pretrained | None, grown: bool) -> None:
    """Write what peft reads.

    Args:
        base: the base model, as the config names it; None where that is a result of this workflow, which has no name that
            lasts.
        grown: whether the vocabulary has rows that the base lacks; they come along.
    """
    folder.mkdir(parents=True)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    if grown:
        tensors |= _embeddings(model.get_base_model())
    # Cloned, since tied ones are written twice.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    # peft keeps these in sets, which have another order in every process.
    config |= {key: sorted(value) for key, value in config.items() if isinstance(value, list)}
    config |= {"base_model_name_or_path": base and base.path, "revision": base and base.revision}
    write_json(folder / CONFIG, config | {"inference_mode": True})


def _embeddings(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Embedding and output head by the names that peft reads them by; those that are trained whole are there already."""
    found = {}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None or isinstance(layer, ModulesToSaveWrapper):
            continue
        layer = getattr(layer, "base_layer", layer)
        name = next(name for name, module in model.named_modules() if module is layer)
        found |= {f"{PREFIX}{name}.{part}": tensor for part, tensor in layer.named_parameters()}
    return found


def put_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Wrap `model` with the adapter that `save_adapter` wrote.

    Raises:
        SnaketuneError: it doesn't fit the model.
    """
    adapted = _adapt(model, LoraConfig.from_pretrained(str(folder)))
    fill_adapter(adapted, folder)
    return adapted


def fill_adapter(adapted: PeftModel, folder: Path) -> None:
    """Give adapters the values that `save_adapter` wrote; raises as `put_adapter`."""
    tensors = load_file(folder / TENSORS)
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # peft would leave what it doesn't find as it was drawn.
    if lacking := sorted(wanted.keys() - tensors.keys()):
        raise SnaketuneError(f"{folder} does not fit its base model: it has no {lacking[0]}")
    try:
        set_peft_model_state_dict(adapted, tensors)
    except RuntimeError as error:
        raise SnaketuneError(f"{folder} does not fit its base model: {str(error).splitlines()[-1].strip()}") from None


def merge(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its adapters, which are added to its weights in float32; layers that had one are of `dtype` then."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.float()
            layer.merge()
            layer.get_base_layer().to(dtype)
    return model.unload()


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put parameters into a data type, in place; tied ones stay tied."""
    rounded = rounding(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = rounded(name, parameter.data)


def rounding(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """What puts a parameter, of this name and value, into a data type.

    Those that the model wants in float32 whatever it is loaded in, as some routers, are left as they are; so are buffers.
    """
    kept = model._keep_in_fp32_modules_strict or ()

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        rounds = tensor.is_floating_point() and not any(pattern in name for pattern in kept)
        return tensor.to(dtype) if rounds else tensor

    return rounded
