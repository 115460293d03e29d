"""Token mixers with a state (linear attention, Mamba, short convolutions) over the documents of packed rows.

A state would go on from one document of a row to the next. There are two ways to begin it anew:

    own kernels    CUDA, without shared prompts: the packed row, with the documents' boundaries as arguments for the mixer's
                   kernels (flash-linear-attention, causal-conv1d, mamba-ssm); transformers' reference code refuses them
    by document    everywhere: the mixer alone runs on the row's documents, padded on the right (`padded_documents`)

Attention and everything that treats each token by itself stay packed in both. Kernels can't begin a completion's state with a
prompt elsewhere in the row: in trees of completions, mixers compute a shared prompt again for each completion.
"""

import inspect
import re
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from snaketune.engine.model.padded_documents import to_device
from snaketune.engine.packing.segments import SegmentLayout

if TYPE_CHECKING:
    from snaketune.engine.model.kernels import Segments

# By the names of their classes in transformers; the self-test finds those that are missing here.
MIXERS = re.compile(r".*(DeltaNet|DeltaAttention|LightningAttention|ShortConv|Mixer|MambaLayer)")
OWN_KERNELS, BY_DOCUMENT = "own kernels", "by document"
# Devices for which the packages of mixers have kernels.
KERNEL_DEVICES = ("cuda",)


def offer_own_kernels(model: PreTrainedModel, offered: bool, device: torch.device) -> bool:
    """Make the mixers of `model` take the boundaries of documents from the next forward on, if `offered`, on a device that has
    kernels and if all their forwards have such an argument; else run by document. Return which; False without mixers."""
    mixers = _mixers_of(model)
    offered = offered and device.type in KERNEL_DEVICES and bool(mixers)
    model.own_mixer_kernels = offered and all(boundary_arguments(type(mixer)) for mixer in mixers)
    return model.own_mixer_kernels


def run_mixers_by_document(model: PreTrainedModel) -> None:
    """Make the mixers of `model` keep documents apart, before every forward by `set_segments`: by document, or by their own
    kernels after `offer_own_kernels`."""
    if "mixers" in vars(model):
        return
    model.mixers = _mixers_of(model)
    for mixer in model.mixers:
        mixer.own_forward = mixer.forward
        mixer.forward = MethodType(torch.compiler.disable(_forward), mixer)


def run_mixers_on_rows(model: PreTrainedModel) -> None:
    """Undo `run_mixers_by_document`."""
    for mixer in vars(model).pop("mixers", ()):
        del mixer.forward, mixer.own_forward


def way_of_mixers(model: PreTrainedModel) -> str:
    """Return how the mixers of `model` keep documents apart, OWN_KERNELS or BY_DOCUMENT; empty if there are none."""
    if not vars(model).get("mixers"):
        return ""
    return OWN_KERNELS if vars(model).get("own_mixer_kernels") else BY_DOCUMENT


def set_segments(model: PreTrainedModel, segments: "Segments") -> None:
    """Hand the segments of the next forward to the mixers, since few families pass further arguments on to them.

    They are kept until the next call: gradient checkpointing runs the mixers again in the backward pass.
    """
    own = way_of_mixers(model) == OWN_KERNELS and not segments.layout.prefixed
    # Made once for all mixers: flash-linear-attention reads them on the host, once per tensor.
    given = boundaries(segments.layout, segments.positions_T.device) if own else {}
    for mixer in vars(model).get("mixers", ()):
        mixer.segments, mixer.boundaries = segments, given


def boundaries(rows: SegmentLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the S documents of packed rows, padding included, by the names that mixers have for them: the segment of each
    token, int32[1, T], and cumulative lengths, int64[S + 1].

    >>> from snaketune.engine.packing.segments import layout
    >>> given = boundaries(layout([[2, 3]], [[0, 0]], row_lengths=[6]), torch.device("cpu"))
    >>> given["seq_idx"].tolist(), given["cu_seqlens"].tolist()
    ([[0, 0, 1, 1, 1, 2]], [0, 2, 5, 6])
    """
    seq_idx_1T = to_device(rows.segment_of[None].astype(np.int32), device)
    cu_seqlens = to_device(np.append(rows.starts, rows.tokens), device)
    return {"seq_idx": seq_idx_1T, "cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seqlens}


def _forward(mixer: torch.nn.Module, hidden_states: torch.Tensor, *arguments: Any, **inputs: Any) -> Any:
    """Replace the forward of a mixer: the same arguments, hidden states [1, T, H], and outputs."""
    named = {name: value for name, value in inputs.items() if name in parameters_of(type(mixer))}
    if mixer.boundaries:
        named |= {name: mixer.boundaries[name] for name in boundary_arguments(type(mixer))}
        return mixer.own_forward(hidden_states, *arguments, **named)
    padded = mixer.segments.padded()
    outputs = [mixer.own_forward(hidden_BLH, *arguments, **named) for hidden_BLH in padded.split(hidden_states[0])]
    if isinstance(outputs[0], tuple):
        return padded.merge(output[0] for output in outputs)[None], None
    return padded.merge(outputs)[None]


def _mixers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if MIXERS.fullmatch(type(module).__name__)]


@cache
def parameters_of(mixer_class: type) -> set[str]:
    return set(inspect.signature(mixer_class.forward).parameters)


@cache
def boundary_arguments(mixer_class: type) -> tuple[str, ...]:
    """Return the keys of `boundaries` that the forward of a mixer takes, or passes on to its kernels; empty if none."""
    forward = inspect.unwrap(mixer_class.forward)
    parameters = inspect.signature(forward).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    # Gated delta nets of Qwen and OLMo rename the first for their kernel, and would hand it the second twice.
    renamed = "cu_seq_lens_q" in (*parameters, *forward.__code__.co_consts)
    names = ("seq_idx", "cu_seq_lens_q" if renamed else "cu_seqlens")
    return tuple(name for name in names if passes_on or name in parameters)
