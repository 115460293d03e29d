"""The reward head: a linear layer with one output, without bias, on the last hidden state of a completion's last token.

The model is transformers' own class for sequence classification, around the decoder of a causal language model, so what is
trained is what `AutoModelForSequenceClassification` loads. That class reads one token per sequence; a packed row has many
completions, so its forward is replaced here by one that reads the tokens where completions end:

    a b C D E F     segments [4, 2], completions [0, 1]     ends_C [3, 5], the tokens D and F
"""

from types import MethodType
from typing import Any

import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from snaketune.engine.model.forward import inner_model, packed_inputs
from snaketune.engine.model.kernels import SEPARATE, Segments
from snaketune.engine.model.mixers import set_segments
from snaketune.engine.model.padded_documents import batch_dependent_rope
from snaketune.engine.model.parameters import REWARD_HEAD as HEAD
from snaketune.errors import SnaketuneError


def reward_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for sequence classification; SnaketuneError if it has none for this kind of model."""
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if found is None:
        raise SnaketuneError(
            f"a reward model of type {config.model_type}: transformers has no sequence-classification class for it, so the "
            "result couldn't be loaded; start the `reward` run from another kind of model"
        )
    return found


def with_reward_head(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a reward model with the decoder of a causal language model, which it shares, and a new head.

    Args:
        seed: of the head's initial values, which are the same on any device.
    Raises:
        SnaketuneError: transformers has no such class for this kind of model, or one with another decoder or head.
    """
    kind, config = reward_class(model.config), model.config
    config.num_labels = 1
    with torch.device("meta"):
        made = kind(config)
    prefix, head, decoder = made.base_model_prefix, getattr(made, HEAD, None), model.base_model
    if type(made.base_model) is not type(decoder) or type(head) is not torch.nn.Linear or head.bias is not None:
        raise SnaketuneError(
            f"a reward model of type {config.model_type}: {kind.__name__} of transformers isn't this model's decoder with a "
            f"linear `{HEAD}` on top; start the `reward` run from another kind of model"
        )
    made.set_submodule(prefix, decoder)
    std, generator = getattr(config.get_text_config(), "initializer_range", 0.02), torch.Generator().manual_seed(seed)
    device = next(decoder.parameters()).device
    # In float32, as all that is trained, whatever the decoder's data type is.
    made.set_submodule(HEAD, torch.nn.Linear(head.in_features, 1, bias=False, device=device, dtype=torch.float32))
    with torch.no_grad():
        made.get_submodule(HEAD).weight.copy_(torch.empty(head.weight.shape).normal_(std=std, generator=generator))
    made.train(model.training)
    return with_rewards(made)


def with_rewards(model: PreTrainedModel) -> PreTrainedModel:
    """Give the forward of a model for sequence classification the argument `ends_C`, and return the model."""
    # As `chunked_head` does it. A bound method, so that a deep copy of the model binds it to the copy.
    model.original_forward = model.forward
    # Not in the data type of frozen weights: see `_forward`.
    model.get_submodule(HEAD).float()
    model.forward = MethodType(_forward, model)
    return model


def _forward(
    model: PreTrainedModel, input_ids: torch.Tensor, ends_C: torch.Tensor | None = None, **inputs: Any
) -> torch.Tensor | SequenceClassifierOutputWithPast:
    """Return the rewards of completions that end at these tokens of a packed row, float32[C]; without `ends_C` the last hidden
    states [B, L, H] as `logits`, by which the self-test compares packed forwards with separate ones."""
    read = {name: inputs[name] for name in ("position_ids", "segments") if inputs.get(name) is not None}
    segments: Segments | None = inputs.get("segments")
    if ends_C is None or segments is None:
        return SequenceClassifierOutputWithPast(
            logits=model.base_model(input_ids=input_ids, use_cache=False, **read)[0]
        )
    if segments.kernel == SEPARATE:
        padded = segments.padded(batch_dependent_rope(model.config))
        groups = [model.base_model(input_ids=ids_BL, use_cache=False)[0] for ids_BL in padded.split(input_ids[0])]
        hidden_CH = padded.merge(groups, ends_C)
    else:
        hidden_CH = model.base_model(input_ids=input_ids, use_cache=False, **read)[0][0].index_select(0, ends_C)
    # A reward in 16 bits would have three digits, and the loss is of differences of rewards.
    with torch.autocast(hidden_CH.device.type, enabled=False):
        return model.get_submodule(HEAD)(hidden_CH.float())[:, 0].float()


def packed_rewards(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the rewards of the pairs of a packed batch, float32[P, 2], chosen first. RuntimeError: the model hasn't passed
    `engine.model.selftest.self_test` with the batch's kernel."""
    segments, inner = batch["segments"], inner_model(model)
    if (segments.kernel, segments.layout.prefixed) not in getattr(inner, "allowed_packed", ()):
        raise RuntimeError(f"packed rewards by kernel {segments.kernel} before the self-test; call self_test first")
    set_segments(inner, segments)
    return model(**packed_inputs(batch), ends_C=batch["ends"]).reshape(-1, 2)


def completion_ends(layout: Any) -> torch.Tensor:
    """Return the last token of each completion of packed pairs, int64[C]: chosen, rejected, chosen, ...

    >>> import numpy as np
    >>> from snaketune.engine.packing.segments import layout_of
    >>> columns = {"segment_lengths": [4, 2], "prefix_lengths": [0, 2], "prefix_segments": [0, 0], "completions": [0, 1]}
    >>> row = {"input_ids": np.arange(6)} | {name: np.array(values, np.int32) for name, values in columns.items()}
    >>> completion_ends(layout_of([row])).tolist()
    [3, 5]
    """
    segments_C = layout.completions
    return torch.from_numpy(layout.starts[segments_C] + layout.lengths[segments_C] - 1).long()
