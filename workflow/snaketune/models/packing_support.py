"""What a model's config alone tells: whether it can see packed rows as it sees each document alone.

Asked before weights are loaded, so that a refusal costs seconds. What it lets through is still up to the self-test, which
asks the model itself.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from snaketune.models.attention import Unpackable, attend, usable_kernels, use_attention
from snaketune.models.devices import Compute
from snaketune.models.kernels import SOFTCAP_KERNELS, AttentionOptions, refusal, segments_for
from snaketune.packing.segments import layout

ALTERNATIVES = "sft with packing.strategy: none trains it unpacked on TRL's trainer; dpo needs packed pairs"
# Rotary factors of these types depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = {"longrope", "dynamic"}
KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}


def check_config(config: PretrainedConfig, longest: int, prefixes: bool, kernel: str) -> None:
    """Refuse what can't be right in packed rows.

    Args:
        longest: tokens of the longest segment with its prefix.
        prefixes: whether segments share prompts, as pairs do.
        kernel: of attention, one of `models.kernels.KERNELS`.
    Raises:
        Unpackable: with the model's name, the reason, and what can be done.
    """
    text = config.get_text_config()
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    heard = _dry_run(config) if known else DryRun()
    if reason := _reason(text, known, prefixes, kernel) or heard.trouble or heard.refused_by(kernel):
        raise Unpackable(f"{config.model_type} can't see packed rows as single documents: {reason}. {ALTERNATIVES}")
    if reason := _too_long(text, longest, heard.windows):
        raise Unpackable(f"{config.model_type}: {reason}")


def _reason(text: PretrainedConfig, model_class: type[PreTrainedModel] | None, prefixes: bool, kernel: str) -> str:
    if (softcap := getattr(text, "attn_logit_softcapping", None)) and kernel not in SOFTCAP_KERNELS:
        return refusal(kernel, 0, AttentionOptions(softcap=softcap))
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS)
    if strange:
        return f"its layers ({', '.join(strange)}) know nothing of where a document ends"
    if model_class is None:
        return ""
    if model_class._is_stateful:
        return "its layers carry a state from one document to the next"
    if not model_class._can_set_attn_implementation():
        # By positions alone, documents can be told apart, but nobody can see another's prompt.
        return "its attention is code of its own, which knows no shared prompts" if prefixes else ""
    only_capped = getattr(text, "attn_logit_softcapping", None) and model_class._supports_flash_attn
    if not model_class._supports_sdpa and not only_capped:
        return "its attention does more than scaled_dot_product_attention (attention sinks, for instance)"
    return ""


@dataclass
class DryRun:
    """What a model's layers asked of their attention in a dry run.

    Attributes:
        trouble: why it failed for good.
        windows: of sliding attention.
        needs: head sizes and attention options, the arguments of `kernels.refusal`.
    """

    trouble: str = ""
    windows: set[int] = field(default_factory=set)
    needs: set[tuple[int, AttentionOptions]] = field(default_factory=set)

    def refused_by(self, kernel: str) -> str:
        """Why a kernel can't compute it; empty if it can."""
        return min(filter(None, (refusal(kernel, *need) for need in self.needs)), default="")


# By config and mode: trainings ask several times.
_DRY_RUNS: dict[tuple[type, str, bool], DryRun] = {}


def _dry_run(config: PretrainedConfig, *, training: bool = False) -> DryRun:
    """Push two documents through a model of this config without weights, to hear what its attention asks for.

    The tensors are fake: they have shapes and hold nothing. Failures that only come from that (values that aren't there) say
    nothing about the model.
    """
    key = (type(config), config.to_json_string(), training)
    if key in _DRY_RUNS:
        return _DRY_RUNS[key]
    placed = layout([[3, 2]], [[0, 0]], row_lengths=[6])
    found = _DRY_RUNS[key] = DryRun()

    def listen(module, query, key, value, mask, *, sliding_window=None, softcap=None, dropout=0.0, **others):
        if sliding_window:
            found.windows.add(sliding_window)
        found.needs.add((query.shape[-1], AttentionOptions(dropout=dropout, softcap=softcap)))
        return attend(module, query, key, value, mask, dropout=dropout, **others)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16).train(training)
        except Exception:
            return found
        try:
            use_attention(model, listen)
            model(
                input_ids=torch.zeros(1, 6, dtype=torch.int64),
                position_ids=torch.from_numpy(placed.positions)[None],
                segments=segments_for("sdpa", placed),
                use_cache=False,
            )
        except (Unpackable, TypeError, AttributeError) as error:
            found.trouble = (str(error).splitlines() or [type(error).__name__])[0]
        except Exception:
            pass
    return found


def with_supported_kernel(compute: Compute, config: PretrainedConfig | None, *, dropout: bool) -> Compute:
    """With the fastest kernel that can compute this model's attention: its head sizes, and its dropout of attention weights.

    The log says why a faster one isn't taken. What a config doesn't tell is left to the self-test.

    Args:
        config: None where there is no model of transformers' own.
        dropout: whether the model's dropout will be on.
    """
    kernels = usable_kernels(compute.device, compute.dtype)
    if compute.kernel not in kernels[:-1] or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None:
        return compute
    heard = _dry_run(config, training=dropout)
    for kernel in kernels[kernels.index(compute.kernel) :]:
        if not heard.refused_by(kernel):
            break
    else:
        return compute
    if kernel != compute.kernel:
        print(f"attention: {heard.refused_by(compute.kernel)}; taking kernel {kernel}", flush=True)
    return replace(compute, kernel=kernel)


def _too_long(text: PretrainedConfig, longest: int, handed_on: set[int]) -> str:
    windows = windows_of(text)
    # What a layer hands to its attention is cut off there.
    unknown = min((window for window in windows if window not in handed_on), default=None)
    if unknown and longest > unknown:
        return (
            f"a sequence of {longest} tokens is longer than the {unknown} that some layers see, which they don't hand to "
            "their attention; lower packing.length to that"
        )
    original = batch_dependent_rope(text)
    if original and longest > original:
        return (
            f"a sequence of {longest} tokens is longer than the {original} that its rotary positions were made for, and "
            "beyond that, one sequence's length would change all others of its batch; lower packing.length to that"
        )
    return ""


def windows_of(text: PretrainedConfig) -> set[int]:
    """How far back layers see, where that is less than everything: sliding windows, and chunks."""
    kinds = getattr(text, "layer_types", None)
    windows = []
    if getattr(text, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds):
        windows.append(getattr(text, "sliding_window", None))
    if kinds is None or "chunked_attention" in kinds:
        windows.append(getattr(text, "attention_chunk_size", None))
    return {int(window) for window in windows if window}


def batch_dependent_rope(text: PretrainedConfig) -> int | None:
    """Up to which length rotary factors don't depend on the batch, where they do beyond it."""
    ropes: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    found = [rope for rope in [ropes, *nested] if rope.get("rope_type") in BATCH_DEPENDENT_ROPE]
    if not found:
        return None
    return min(
        int(
            rope.get("original_max_position_embeddings")
            or getattr(text, "original_max_position_embeddings", None)
            or text.max_position_embeddings
        )
        for rope in found
    )
