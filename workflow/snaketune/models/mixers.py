"""Token mixers with a state (linear attention, Mamba, short convolutions) over the documents of packed rows.

A state would go on from one document of a row to the next. So a mixer alone runs on the row's documents, padded on the right
(`models.padded_documents`); attention and everything that treats each token by itself stay packed. In trees of completions the
mixers compute a shared prompt again for each completion.
"""

import inspect
import re
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from snaketune.models.kernels import Segments

# By the names of their classes in transformers; the self-test finds those that are missing here.
MIXERS = re.compile(r".*(DeltaNet|DeltaAttention|LightningAttention|ShortConv|Mixer|MambaLayer)")


def run_mixers_by_document(model: PreTrainedModel) -> None:
    """Make the mixers of `model` run by document; before every forward they need `set_segments`."""
    if "mixers" in vars(model):
        return
    model.mixers = [module for module in model.modules() if MIXERS.fullmatch(type(module).__name__)]
    for mixer in model.mixers:
        mixer.own_forward = mixer.forward
        mixer.forward = MethodType(torch.compiler.disable(_forward), mixer)


def run_mixers_on_rows(model: PreTrainedModel) -> None:
    """Undo `run_mixers_by_document`."""
    for mixer in vars(model).pop("mixers", ()):
        del mixer.forward, mixer.own_forward


def set_segments(model: PreTrainedModel, segments: "Segments") -> None:
    """Hand the segments of the next forward to the mixers, since few families pass further arguments on to them.

    They are kept until the next call: gradient checkpointing runs the mixers again in the backward pass.
    """
    for mixer in vars(model).get("mixers", ()):
        mixer.segments = segments


def _forward(mixer: torch.nn.Module, hidden_states: torch.Tensor, *arguments: Any, **inputs: Any) -> Any:
    """Replace the forward of a mixer: the same arguments, hidden states [1, T, H], and outputs."""
    named = {name: value for name, value in inputs.items() if name in parameters_of(type(mixer))}
    padded = mixer.segments.padded()
    outputs = [mixer.own_forward(hidden_BLH, *arguments, **named) for hidden_BLH in padded.split(hidden_states[0])]
    if isinstance(outputs[0], tuple):
        return padded.merge(output[0] for output in outputs)[None], None
    return padded.merge(outputs)[None]


@cache
def parameters_of(mixer_class: type) -> set[str]:
    return set(inspect.signature(mixer_class.forward).parameters)
