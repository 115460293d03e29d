"""`all-linear` leaves out routers in every mixture of experts of transformers, and the layers that it can't reach are named."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snaketune.config.lora import Lora
from snaketune.engine.model.adapter_targets import without_adapters
from snaketune.engine.model.adapters import merge
from snaketune.models.lora import add_lora

# Blocks whose router logits are recorded, with experts or attention beside their router.
WITH_ROUTERS = {"DogeCDMoE", "JetMoeAttention"}
IDS = torch.arange(5, 29)[None]


def unloaded(family: str, **settings) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(tiny_config(family, **settings)))


def recorded_routers(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules whose outputs transformers returns as `router_logits`."""
    recorders = [
        recorder
        for module in model.modules()
        for recorder in [(getattr(module, "_can_record_outputs", None) or {}).get("router_logits")]
        if recorder
    ]
    flat = [one for recorder in recorders for one in (recorder if isinstance(recorder, list) else [recorder])]
    kinds = {one.target_class for one in flat}
    return {name for name, module in model.named_modules() if type(module) in kinds}


def mixtures() -> dict[str, PreTrainedModel]:
    """Return a model without weights of every family with router logits, of which a tiny one can be made."""
    models = {}
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = Path(inspect.getfile(CONFIG_MAPPING[family])).parent
        if any("router_logits" in code.read_text(encoding="utf-8") for code in folder.glob("modeling_*.py")):
            try:
                models[family] = unloaded(family, **({"is_moe": True} if family == "doge" else {}))
            except Exception:
                continue
    return {family: model for family, model in models.items() if recorded_routers(model)}


@pytest.mark.slow
def test_no_family_has_adapters_on_its_routers():
    found = mixtures()
    assert len(found) > 50
    wrong = {}
    for family, model in found.items():
        kinds = {name: type(model.get_submodule(name)).__name__ for name in recorded_routers(model)}
        routers = [f"{name}.router" if kind in WITH_ROUTERS else f"{name}." for name, kind in kinds.items()]
        adapted = add_lora(model, Lora(rank=2))
        trained = {
            name.removeprefix("base_model.model.") for name, one in adapted.named_parameters() if one.requires_grad
        }
        assert trained, family
        if on_routers := [name for name in trained if name.startswith(tuple(routers))]:
            wrong[family] = on_routers[0]
    assert not wrong


@pytest.mark.parametrize(
    ("family", "missed"),
    [
        ("mixtral", []),
        ("gpt_oss", ["experts"]),
        ("granitemoe", ["experts"]),
        ("phimoe", ["experts"]),
        ("qwen2_moe", ["experts"]),
        ("jetmoe", ["input_linear", "output_linear"]),
        # peft takes the names of shared experts for those of experts.
        ("deepseek_v3", ["down_proj", "gate_proj", "up_proj"]),
        ("llama", []),
        ("mamba", []),
    ],
)
def test_layers_without_adapters_are_named_and_trained_by_the_named_key(family, missed):
    model = tiny_model(tiny_config(family))
    before = model(IDS, use_cache=False).logits
    assert without_adapters(add_lora(model, Lora(rank=2))) == missed
    whole = add_lora(tiny_model(tiny_config(family)), Lora(rank=2, modules_to_save=tuple(missed))).eval()
    torch.testing.assert_close(whole(input_ids=IDS, use_cache=False).logits, before)
    whole(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    copies = {name: one for name, one in whole.named_parameters() if "modules_to_save" in name and one.dim() > 1}
    assert [name for name in missed if not any(f".{name}." in copy for copy in copies)] == []
    with torch.no_grad():
        for one in copies.values():
            assert one.grad is not None
            one.add_(0.05)
        expected = whole(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(
            merge(whole, torch.float32)(IDS, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3
        )
