"""peft adapters: add them to a model, save, load and merge them.

Low-rank matrices are on the layers that `target_modules` names; `modules_to_save` are full copies of modules, trained in
float32 instead of the frozen originals. Saved adapters load with peft alone. Merging adds in float32 and rounds once.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora.layer import Embedding, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from snaketune.engine.model.adapter_targets import ALL_LINEAR, leave_out_routers, unadaptable
from snaketune.engine.model.parameters import matching_names
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.suggestions import unknown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Initial values that peft has for every kind of layer.
FOR_ALL_LAYERS = (True, "gaussian")
# Initial values that don't take the place of a part of the base weights.
KEEP_BASE = (True, False, "gaussian", "orthogonal", "eva")
# The names of an adapter's two matrices.
MATRIX = re.compile(r"lora_(A|B)\b")
# peft's prefix to the model's own parameter names.
PREFIX = "base_model.model."


class NamedModel(Protocol):
    """A model on the Hub, or in a folder."""

    path: str
    revision: str | None


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Wrap `model` so that only adapters and `modules_to_save` are trained.

    Routers of experts get no adapters with `all-linear`, and of tied embeddings both are trained. `target_modules` as a pattern
    of full names is limited in time.

    Raises:
        SnaketuneError: no module has a configured name, or an adapter or module can't be trained or merged.
    """
    config = copy.deepcopy(config)
    adapt = _adapt if config.init_lora_weights in FOR_ALL_LAYERS else _adapt_linear_layers
    all_linear = config.target_modules == ALL_LINEAR
    config.target_modules = _targets(model, config.target_modules)
    config.exclude_modules = unadaptable(model, all_linear=all_linear)
    config.modules_to_save = _whole_modules(model, tuple(config.modules_to_save or ())) or None
    config.task_type = "CAUSAL_LM" if model.can_generate() else "SEQ_CLS"
    if all_linear:
        leave_out_routers(config, model)
    adapted = adapt(model, config)
    if config.init_lora_weights not in KEEP_BASE:
        tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        adapted.initial_matrices = {name: tensor.clone() for name, tensor in tensors.items() if MATRIX.search(name)}
    return adapted


def leave_casts_to_autocast(model: PeftModel) -> None:
    """Turn off peft's cast of adapter inputs to float32, which autocast would cast back to 16 bits. DoRA keeps it, since it
    computes norms in the data type of the inputs."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and not any(getattr(layer, "use_dora", {}).values()):
            layer.cast_input_dtype_enabled = False


def _targets(model: PreTrainedModel, wanted: str | set[str]) -> str | set[str]:
    """Return peft's `target_modules`; a pattern is resolved to names here, since peft's own matching has no time limit."""
    if not isinstance(wanted, str) or wanted == ALL_LINEAR:
        return wanted
    names = [name for name, _ in model.named_modules() if name]
    examples = [name for name in names if name.count(".") > 2][:3]
    return set(matching_names(wanted, names, "lora.target_modules", "module name", examples))


def _has_suffix(name: str, suffix: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def _last_parts(names: Iterable[str]) -> set[str]:
    return {last for name in names if (last := name.rpartition(".")[2]) and not last.isdigit()}


def _whole_modules(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Return the full names of the modules to be trained in full. One of two tied embeddings selects both.

    Full names, since peft compares the ends of names as text: `norm` would match every `input_layernorm` too.
    """
    modules = {
        name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    }
    selected: set[str] = set()
    for suffix in wanted:
        matches = {name for name in modules if _has_suffix(name, suffix)}
        if not matches:
            known = _last_parts(modules)
            raise SnaketuneError(f"lora.modules_to_save: the model has no module {suffix!r}{unknown(suffix, known)}")
        selected |= matches
    tied_names = {name for name, module in modules.items() if module in _tied(model)}
    selected |= tied_names if selected & tied_names else set()
    for name in sorted(selected):
        if outer := next((other for other in sorted(selected) if name.startswith(f"{other}.")), None):
            raise SnaketuneError(f"lora.modules_to_save: {name} is a part of {outer}; name one of them")
        if any(type(parameter).__name__ == "Params4bit" for parameter in modules[name].parameters()):
            raise SnaketuneError(
                f"lora.modules_to_save: {name} is in 4 bits, which can't be trained; remove it, or add it to target_modules"
            )
    return sorted(selected)


def _tied(model: PreTrainedModel) -> tuple[torch.nn.Module, ...]:
    """Return input embedding and output head if they share their weight, else ()."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (embeddings, head) if head is not None and head.weight is embeddings.weight else ()


def _adapt(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    tied, names = _tied(model), [name for name, _ in model.named_modules()]
    try:
        with warnings.catch_warnings():
            # Tied embeddings are handled below.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            adapted = get_peft_model(model, config)
    except ValueError as error:
        _check_targets(config, names)
        message = " ".join(str(error).split())
        # The middle of peft's message prints whole modules.
        message = message if len(message) < 300 else f"{message[:100]} … {message[-200:]}"
        raise SnaketuneError(f"lora: {message}") from None
    _check_targets(config, names)
    if tied and any(getattr(layer, "base_layer", None) in tied for layer in adapted.modules()):
        raise SnaketuneError(
            "lora.target_modules: the output head of this model is tied to its embedding, so an adapter on one of the two "
            "can't be merged without changing the other; remove it, or train it in full (lora.modules_to_save)"
        )
    wrappers = [module for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper)]
    for wrapper in wrappers:
        wrapper.modules_to_save.float()
        wrapper.register_forward_hook(_cast_to_original)
    copies = [wrapper.modules_to_save["default"] for wrapper in wrappers if wrapper.original_module in tied]
    if copies:
        copies[1].weight = copies[0].weight
    return adapted


def _adapt_linear_layers(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Return the adapted model; its initial values need a linear layer's weight, so other layers are refused."""
    try:
        adapted = _adapt(model, config)
    except (AttributeError, TypeError) as error:
        # peft raises these for experts' weights.
        found = str(error)
    else:
        others = [layer for layer in adapted.modules() if isinstance(layer, Embedding | ParamWrapper)]
        if not others:
            return adapted
        found = type(others[0].get_base_layer()).__name__
    raise SnaketuneError(
        f"lora.init_lora_weights: {config.init_lora_weights} is for linear layers, and lora.target_modules has others, such as "
        f"experts or embeddings ({found}); name linear layers there, or remove it"
    )


def _check_targets(config: LoraConfig, names: list[str]) -> None:
    """Raise SnaketuneError if a target matches no module; peft only raises if none of the targets matches. For mixtures of
    experts, peft has already removed the names of former per-expert modules from the targets."""
    for target in () if isinstance(config.target_modules, str) else sorted(config.target_modules):
        if not any(_has_suffix(name, target) for name in names):
            known = _last_parts(names)
            raise SnaketuneError(f"lora.target_modules: the model has no module {target!r}{unknown(target, known)}")


def _cast_to_original(wrapper: ModulesToSaveWrapper, inputs: tuple, output):
    """Cast the output of a float32 copy to the original module's data type, so that later layers compute as before."""
    if not isinstance(output, torch.Tensor):
        return output
    return output.to(next(wrapper.original_module.parameters()).dtype)


def save_adapter(model: PeftModel, folder: Path, *, base: NamedModel | None, grown: bool) -> None:
    """Write adapters in peft's format. `base`: the base model as the config names it, None where it is a result of this
    workflow, which has no lasting name; `grown`: whether the vocabulary has rows that the base lacks, so that embeddings
    are saved too."""
    folder.mkdir(parents=True)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    if grown:
        tensors |= _embeddings(model.get_base_model())
    tensors = _relative_to_base(tensors, getattr(model, "initial_matrices", {}))
    # Cloned, since safetensors refuses tensors that share memory, as tied ones do.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    # peft stores these as sets, whose order differs from process to process.
    config |= {key: sorted(value) for key, value in config.items() if isinstance(value, list)}
    config |= {"base_model_name_or_path": base and base.path, "revision": base and base.revision}
    # Initial values are none of a trained adapter, and some would change the base that it is loaded onto.
    config |= {"init_lora_weights": True, "eva_config": None}
    if hasattr(model, "initial_matrices"):
        # At twice the rank, alpha / rank is to stay, or alpha / √rank.
        config |= {"r": 2 * config["r"], "lora_alpha": config["lora_alpha"] * (2**0.5 if config["use_rslora"] else 2)}
    write_json(folder / CONFIG, config | {"inference_mode": True})


def _relative_to_base(tensors: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return adapters that fit the base as it was before initial adapters took the place of a part of it: the difference of the
    trained and the initial product, of twice the rank. Args: initial: the initial matrices by name.

    >>> names = ("layer.lora_A.weight", "layer.lora_B.weight")
    >>> trained, initial = (dict(zip(names, (torch.randn(2, 3), torch.randn(4, 2)))) for _ in range(2))
    >>> related = _relative_to_base(trained, initial)
    >>> difference = trained[names[1]] @ trained[names[0]] - initial[names[1]] @ initial[names[0]]
    >>> torch.allclose(related[names[1]] @ related[names[0]], difference, atol=1e-6)
    True
    """
    related = dict(tensors)
    for name, start in initial.items():
        start = start.to(tensors[name].device)
        is_a = MATRIX.search(name)[1] == "A"
        related[name] = torch.cat([tensors[name], start], 0) if is_a else torch.cat([tensors[name], -start], 1)
    return related


def _embeddings(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return embedding and output head by peft's names for them, without those trained in full, which peft saves itself."""
    tensors = {}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None or isinstance(layer, ModulesToSaveWrapper):
            continue
        layer = getattr(layer, "base_layer", layer)
        name = next(name for name, module in model.named_modules() if module is layer)
        tensors |= {f"{PREFIX}{name}.{part}": tensor for part, tensor in layer.named_parameters()}
    return tensors


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Wrap `model` with the adapter that `save_adapter` wrote. Raises SnaketuneError if the adapters don't fit the model."""
    adapted = _adapt(model, LoraConfig.from_pretrained(str(folder)))
    load_adapter_weights(adapted, folder)
    return adapted


def load_adapter_weights(adapted: PeftModel, folder: Path) -> None:
    """Load the values that `save_adapter` wrote into existing adapters; raises as `load_adapter`."""
    tensors = load_file(folder / TENSORS)
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # peft would leave missing tensors at their random initial values.
    if missing := sorted(expected.keys() - tensors.keys()):
        raise SnaketuneError(f"{folder} does not fit its base model: it has no {missing[0]}")
    try:
        set_peft_model_state_dict(adapted, tensors)
    except RuntimeError as error:
        raise SnaketuneError(f"{folder} does not fit its base model: {str(error).splitlines()[-1].strip()}") from None


def merge(model: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """Merge adapters into the weights in float32, cast the merged layers to `dtype`, and return the plain model."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.float()
            layer.merge()
            layer.get_base_layer().to(dtype)
    return model.unload()


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype` in place; tied ones stay tied."""
    cast = parameter_cast(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = cast(name, parameter.data)


def parameter_cast(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function that casts a parameter, given its name and value, to `dtype`, except parameters that the model
    keeps in float32 (some routers)."""
    in_float32 = model._keep_in_fp32_modules_strict or ()

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        casts = tensor.is_floating_point() and not any(pattern in name for pattern in in_float32)
        return tensor.to(dtype) if casts else tensor

    return cast
