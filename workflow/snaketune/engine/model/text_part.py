"""The text part of vision-language models: decoder, embeddings and head, all that a training on text computes and changes.

Where AutoModelForCausalLM loads the text part alone (qwen3_5, llama4), a result gets the other tensors from the base's files
(`training.non_text_modules`). Where the whole model is loaded (gemma3, qwen3_vl, mistral3), the other parts are frozen.
"""

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from snaketune.errors import SnaketuneError


def model_class(config: PretrainedConfig | None) -> type[PreTrainedModel] | None:
    """Return transformers' own class for the model; None if it has none, so that it can't be built from its config."""
    of_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None) if _has_text_part(config) else None
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or of_images


def auto_class(config: PretrainedConfig, path: str) -> type:
    """Return the Auto class that loads the model. SnaketuneError: it isn't a causal language model."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or AutoModelForCausalLM.__name__ in (
        getattr(config, "auto_map", None) or ()
    ):
        return AutoModelForCausalLM
    if model_class(config):
        return AutoModelForImageTextToText
    raise SnaketuneError(
        f"base.path: {path!r} is a model of type {config.model_type}, which transformers doesn't load as a causal language "
        "model; expected one that writes text from left to right, alone or with images"
    )


def _has_text_part(config: PretrainedConfig | None) -> bool:
    return hasattr(config, "text_config") and not getattr(config, "is_encoder_decoder", False)


def other_parameters(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """Return the parameters outside of the text part, such as those of a vision tower; none for a model of text alone."""
    if not _has_text_part(model.config):
        return set()
    modules = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return set(model.parameters()) - {parameter for module in modules if module for parameter in module.parameters()}


def freeze_non_text_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze `other_parameters` and return the model."""
    for parameter in other_parameters(model):
        parameter.requires_grad_(False)
    return model
