"""Adapters as the config's `lora` asks for them."""

from peft import EvaConfig, LoraConfig, PeftModel
from transformers import PreTrainedModel

from snaketune.config.lora import Lora
from snaketune.engine.model.adapters import add_adapters
from snaketune.engine.model.parameters import REWARD_HEAD


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """Wrap `model` so that only adapters and `lora.modules_to_save` are trained; errors as those of `add_adapters`."""
    # The head of a reward model is new, so it is trained in full.
    new = () if model.can_generate() else (REWARD_HEAD,)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=lora.init_lora_weights,
        # peft's default gives some layers a higher rank at the cost of others, and needs the ranks to resume.
        eva_config=EvaConfig(rho=1.0) if lora.init_lora_weights == "eva" else None,
        modules_to_save=[*lora.modules_to_save, *new] or None,
    )
    return add_adapters(model, config)
