"""The layers of a model that adapters may be on: which `all-linear` leaves out, and which it can't reach."""

import re

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snaketune.engine.model.flops import is_expert
from snaketune.engine.model.text_part import other_parameters

ALL_LINEAR = "all-linear"
# Mamba's fused CUDA kernels read the weights of these layers without calling them, so adapters there would have no effect.
MAMBA_MIXER = re.compile(r".*(Mamba2?(Mixer|Layer)|BambaMixer|FalconH1Mixer)")
MAMBA_FUSED = {"conv1d", "x_proj", "dt_proj", "out_proj"}
# Linear layers with a weight for each group, which aren't called as such.
GROUPED = re.compile(r".*GroupedLinear")
# Classes or names of routers of experts. Adapters there would send tokens to experts that weren't trained on them. A test
# compares them with the modules of each family whose router logits transformers records.
ROUTER = re.compile(r"\w*(Router\w*|TopKGating|MoE\w*Gate)|router(_gate)?")


def unadaptable(model: PreTrainedModel, *, all_linear: bool) -> str | None:
    """Return a pattern of the names of layers that get no adapters, whether named or not; None if there are none.

    Those outside of the text part; with `all-linear` also routers, those within Mamba's mixers that fused kernels read, and
    linear layers of groups.
    """
    patterns, others, routers = set(), other_parameters(model), router_prefixes(model)
    for name, module in model.named_modules():
        in_router = isinstance(module, torch.nn.Linear) and f"{name}.".startswith(routers)
        own_kind = in_router or GROUPED.fullmatch(type(module).__name__)
        is_other = not others.isdisjoint(module.parameters(recurse=False))
        fused = MAMBA_FUSED if MAMBA_MIXER.fullmatch(type(module).__name__) and all_linear else ()
        names = ([name] if is_other or (own_kind and all_linear) else []) + [
            f"{name}.{child}" for child, _ in module.named_children() if child in fused
        ]
        patterns |= {re.sub(r"(?<=\\.)\d+", r"\\d+", re.escape(one)) for one in names}
    return "|".join(sorted(patterns)) or None


def router_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of a model's routers, each with a dot."""
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if ROUTER.fullmatch(type(module).__name__) or ROUTER.fullmatch(name.rpartition(".")[2])
    )


def leave_out_routers(config: LoraConfig, model: PreTrainedModel) -> None:
    """Resolve `all-linear` for a mixture of experts as peft does, but for the routers, which peft adds to the experts."""
    convert_peft_config_for_transformers(config, model, None)
    routers = router_prefixes(model)
    of_routers = [f".{name}" for name, _ in model.named_parameters() if name.startswith(routers)]
    # Suffixes of names, such as gate.weight.
    for suffix in sorted(config.target_parameters or ()):
        if any(name.endswith(f".{suffix}") for name in of_routers):
            config.target_parameters.remove(suffix)


def without_adapters(model: PeftModel) -> list[str]:
    """Return the last parts of the names of experts and linear layers that `all-linear` doesn't reach, since peft adds no
    adapters to them."""
    inner, left_out = model.get_base_model(), model.peft_config["default"].exclude_modules
    skipped, head = router_prefixes(inner), inner.get_output_embeddings()
    reached = other_parameters(inner) | set(head.parameters() if head is not None else ())
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            reached.add(layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight)
        elif isinstance(layer, ModulesToSaveWrapper):
            reached |= set(layer.parameters())
    missed = set()
    for path, module in inner.named_modules():
        if (left_out and re.fullmatch(left_out, path)) or f"{path}.".startswith(skipped):
            continue
        is_linear = isinstance(module, torch.nn.Linear | Conv1D)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in reached or parameter.requires_grad or parameter.dim() < 2:
                continue
            if is_linear or is_expert(inner.config, f"{path}.{name}", parameter):
                # Several tensors of experts may be wrapped one by one.
                missed.add(path.replace(".base_layer", "").rpartition(".")[2])
    return sorted(missed)
