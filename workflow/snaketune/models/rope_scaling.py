"""Scaling of rotary position embeddings to longer sequences, by a model's config and before its weights are loaded.

The scaled config is the model's from then on: it is loaded, trained and saved with it, so transformers computes the result as
it was trained. Only the rotary frequencies change, and for YaRN the scale of queries and keys; no weight does.

    linear    every frequency divided by the factor (position interpolation, Chen et al., 2023)
    yarn      high frequencies kept, low ones divided, a ramp between them (Peng et al., 2023)
    llama3    the same with the bounds of Llama 3.1

None of them depends on the sequences of a batch, as `dynamic` and `longrope` do.
"""

import copy
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.base_models import RopeScaling
from snaketune.errors import SnaketuneError, first_line

# Values of `rope_parameters` that belong to one type of scaling; the others, such as rope_theta, to the model.
OF_SCALING = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "rope_type", "short_factor", "truncate", "type",
}  # fmt: skip
KNOWN_TYPES = {"default", "dynamic", "linear", "llama3", "longrope", "yarn"}
# Llama 3.1's own, for models without values of theirs.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled_config(config: PretrainedConfig, rope: RopeScaling, name: str) -> PretrainedConfig:
    """Return the config with scaled positions: `rope_parameters` and `max_position_embeddings` are replaced.

    >>> from transformers import LlamaConfig
    >>> scaled = scaled_config(LlamaConfig(max_position_embeddings=2048), RopeScaling(type="linear", factor=4), "tiny")
    >>> scaled.max_position_embeddings, sorted(scaled.rope_parameters.items())
    (8192, [('factor', 4.0), ('rope_theta', 10000.0), ('rope_type', 'linear')])

    Args:
        name: the model's, for errors.
    Raises:
        SnaketuneError: the model has no rotary embeddings, has several kinds of them, or can't be scaled like this.
    """
    scaled = copy.deepcopy(config)
    text = scaled.get_text_config()
    found = _own_parameters(text, name)
    original = rope.original_max_position_embeddings or _original_length(text, found, name)
    longest, limit = int(original * rope.factor), getattr(text, "max_position_embeddings", None) or 0
    if longest < limit:
        raise _refused(
            name,
            f"factor {rope.factor:g} makes {longest} positions of the original {original}, but the model has {limit} already",
            f"set a factor above {limit / original:g}, or remove the key",
        )
    of_type = rope.type == found["rope_type"]
    # An attention factor is made for one factor; without it, transformers computes that of the new one.
    kept = {
        key: value for key, value in found.items() if key not in OF_SCALING or (of_type and key != "attention_factor")
    }
    new = kept | {"rope_type": rope.type, "factor": rope.factor}
    if rope.type == "llama3":
        new = LLAMA3 | new
    if rope.type != "linear":
        new["original_max_position_embeddings"] = original
    text.rope_parameters, text.max_position_embeddings = new, longest
    _check_loads_again(scaled, rope, name)
    return scaled


def check_scaled(model: PreTrainedModel, rope: RopeScaling, name: str) -> None:
    """Raise SnaketuneError unless the model computes its rotary embeddings by the type of its scaled config."""
    if not any(getattr(module, "rope_type", None) == rope.type for module in model.modules()):
        raise _refused(
            name, f"{model.config.model_type} computes no rotary embeddings of type {rope.type}", "remove the key"
        )


def _own_parameters(text: PretrainedConfig, name: str) -> dict[str, Any]:
    """Return a copy of the model's own `rope_parameters`, with a type that is known."""
    found = dict(getattr(text, "rope_parameters", None) or {})
    if not found or getattr(text, "alibi", False):
        raise _refused(name, f"{text.model_type} has no rotary position embeddings to scale", "remove the key")
    if kinds := [key for key, value in found.items() if isinstance(value, dict)]:
        raise _refused(
            name,
            f"{text.model_type} has different rotary embeddings for {' and '.join(sorted(kinds))} layers, and one scaling for "
            "all of them would be wrong",
            "remove the key, and set them in the model's own config.json (rope_parameters)",
        )
    kind = found.setdefault("rope_type", "default")
    if kind not in KNOWN_TYPES:
        raise _refused(name, f"its rotary embeddings are of type {kind}, which can't be scaled", "remove the key")
    return found


def _original_length(text: PretrainedConfig, found: dict[str, Any], name: str) -> int:
    """Return the length that the unscaled model was made for, by its config."""
    original = found.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if not original and found["rope_type"] != "default":
        raise _refused(
            name,
            f"its config scales positions already ({found['rope_type']}, factor {found.get('factor')}), and doesn't say from "
            "which length",
            "set original_max_position_embeddings, the length that it was pretrained on",
        )
    if not (original := original or getattr(text, "max_position_embeddings", None)):
        raise _refused(name, "its config has no max_position_embeddings", "set original_max_position_embeddings")
    return int(original)


def _check_loads_again(scaled: PretrainedConfig, rope: RopeScaling, name: str) -> None:
    """Raise SnaketuneError unless the config that is saved with a result would be loaded as it is."""
    wanted = scaled.get_text_config()
    try:
        loaded = type(scaled).from_dict(scaled.to_dict()).get_text_config()
        problem = "" if loaded.rope_parameters == wanted.rope_parameters else f"it would read {loaded.rope_parameters}"
    except Exception as error:  # Validation errors of families have various types.
        problem = first_line(error)
    if problem:
        raise _refused(
            name,
            f"{wanted.model_type} can't be scaled by {rope.type}: {problem}",
            "choose another type, or remove the key",
        )


def _refused(name: str, problem: str, do: str) -> SnaketuneError:
    return SnaketuneError(f"base.rope (or reference.rope) of the model {name!r}: {problem}; {do}")
