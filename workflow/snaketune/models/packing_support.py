"""Check, by a model's config alone and before weights are loaded, whether it computes each packed document as if it were alone.

Models that pass are still subject to the self-test (`models.selftest`), which runs the model itself.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from snaketune.errors import first_line
from snaketune.models.attention import Unpackable, attend, usable_kernels, use_segment_attention
from snaketune.models.devices import Compute
from snaketune.models.kernels import AttentionOptions, refusal, segments_for
from snaketune.packing.segments import SegmentLayout, layout

ALTERNATIVES = "sft with packing.strategy: none trains it unpacked on TRL's trainer; dpo needs packed pairs"
# Types of rotary embeddings whose factors depend on the longest position in the batch.
BATCH_DEPENDENT_ROPE = {"longrope", "dynamic"}
KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}


def is_known(config: PretrainedConfig | None) -> bool:
    """Whether the model is one of transformers' own, so that it can be built from its config."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is not None


def unloaded_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without values, on the meta device or within a FakeTensorMode.

    Raises errors of any type, as the families' own code does.
    """
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)


def forward_inputs(rows: SegmentLayout) -> dict[str, Any]:
    """Return the arguments of an unloaded model's forward pass over `rows`."""
    return {
        "input_ids": torch.zeros(1, rows.tokens, dtype=torch.int64),
        "position_ids": torch.from_numpy(rows.positions)[None],
        "segments": segments_for("sdpa", rows),
        "use_cache": False,
    }


def check_config(config: PretrainedConfig, longest: int, prefixes: bool, kernel: str) -> None:
    """Raise Unpackable, with the reason and the alternatives, if the model can't compute packed rows correctly: rows whose
    longest segment with its prefix has `longest` tokens, and that share prompts, as pairs do, if `prefixes`."""
    dry_run = _dry_run(config) if is_known(config) else DryRun()
    if reason := _config_reason(config, prefixes, kernel) or dry_run.error or dry_run.refused_by(kernel):
        raise Unpackable(f"{config.model_type} doesn't support packed rows: {reason}. {ALTERNATIVES}")
    if reason := _too_long(config.get_text_config(), longest, dry_run.windows):
        raise Unpackable(f"{config.model_type}: {reason}")


def _config_reason(config: PretrainedConfig, prefixes: bool, kernel: str) -> str:
    text = config.get_text_config()
    softcap = getattr(text, "attn_logit_softcapping", None)
    if reason := refusal(kernel, 0, AttentionOptions(softcap=softcap)):
        return reason
    if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS):
        return f"its layers ({', '.join(unknown)}) ignore document boundaries"
    if not is_known(config):
        return ""
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class._is_stateful:
        return "its layers carry a state from one document to the next"
    if not model_class._can_set_attn_implementation():
        # Positions alone can separate documents, but can't make another segment's prompt visible.
        return "its own attention code can't be replaced, and doesn't support shared prompts" if prefixes else ""
    if not model_class._supports_sdpa and not (softcap and model_class._supports_flash_attn):
        return "its attention does more than scaled_dot_product_attention (attention sinks, for instance)"
    return ""


def _too_long(text: PretrainedConfig, longest: int, reported: set[int]) -> str:
    # A window that a layer passes to its attention is applied by the kernel.
    unknown = min(windows_of(text) - reported, default=None)
    if unknown and longest > unknown:
        return (
            f"a sequence of {longest} tokens is longer than the window of {unknown} that some layers have and don't pass to "
            f"their attention; lower packing.length to {unknown}"
        )
    original = batch_dependent_rope(text)
    if original and longest > original:
        return (
            f"a sequence of {longest} tokens is longer than the {original} that its rotary embeddings were made for, and "
            "beyond that, the length of one sequence changes the results of all others in its batch; lower packing.length to "
            f"{original}"
        )
    return ""


@dataclass
class DryRun:
    """Attention options of a model's layers: why it can't run over segments (empty if it can, or if that is unknown); the
    window sizes that layers pass to their attention; and head sizes and options, the arguments of `kernels.refusal`."""

    error: str = ""
    windows: set[int] = field(default_factory=set)
    needs: set[tuple[int, AttentionOptions]] = field(default_factory=set)

    def refused_by(self, kernel: str) -> str:
        """Return why a kernel can't compute this attention; empty if it can."""
        return min(filter(None, (refusal(kernel, *need) for need in self.needs)), default="")


# Cache by config class, config and mode, since a training needs the result several times.
_DRY_RUNS: dict[tuple[type, str, bool], DryRun] = {}


def _dry_run(config: PretrainedConfig, *, training: bool = False) -> DryRun:
    """Run two documents through a model without values, and record the options of its attention. Errors that may be due to
    missing values are ignored."""
    key = (type(config), config.to_json_string(), training)
    if key in _DRY_RUNS:
        return _DRY_RUNS[key]
    dry_run = _DRY_RUNS[key] = DryRun()

    def record(module, query, key, value, mask, *, sliding_window=None, softcap=None, dropout=0.0, **others):
        if sliding_window:
            dry_run.windows.add(sliding_window)
        dry_run.needs.add((query.shape[-1], AttentionOptions(dropout=dropout, softcap=softcap)))
        return attend(module, query, key, value, mask, dropout=dropout, **others)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            model = unloaded_model(config, torch.bfloat16).train(training)
        except Exception:
            return dry_run
        try:
            use_segment_attention(model, record)
            model(**forward_inputs(layout([[3, 2]], [[0, 0]], row_lengths=[6])))
        except (Unpackable, TypeError, AttributeError) as error:
            dry_run.error = first_line(error)
        except Exception:
            pass
    return dry_run


def with_supported_kernel(compute: Compute, config: PretrainedConfig | None, *, dropout: bool) -> Compute:
    """Return `compute` with the fastest kernel that supports this model's attention: its head sizes, and dropout of
    attention weights, if its dropout will be on. Prints why a faster kernel isn't used.

    Properties that the config doesn't show are left to the self-test; None if the model isn't one of transformers' own.
    """
    kernels = usable_kernels(compute.device, compute.dtype)
    if compute.kernel not in kernels[:-1] or not is_known(config):
        return compute
    dry_run = _dry_run(config, training=dropout)
    slower = kernels[kernels.index(compute.kernel) :]
    kernel = next((kernel for kernel in slower if not dry_run.refused_by(kernel)), compute.kernel)
    if kernel != compute.kernel:
        print(f"attention: {dry_run.refused_by(compute.kernel)}; using kernel {kernel}", flush=True)
    return replace(compute, kernel=kernel)


def windows_of(text: PretrainedConfig) -> set[int]:
    """Return the sizes of sliding windows and attention chunks of a config's layers, in tokens."""
    kinds = getattr(text, "layer_types", None)
    windows = []
    if getattr(text, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds):
        windows.append(getattr(text, "sliding_window", None))
    if kinds is None or "chunked_attention" in kinds:
        windows.append(getattr(text, "attention_chunk_size", None))
    return {int(window) for window in windows if window}


def batch_dependent_rope(text: PretrainedConfig) -> int | None:
    """Return the length beyond which rotary factors depend on the batch; None if they never do."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    own = getattr(text, "original_max_position_embeddings", None)
    lengths = [
        rope.get("original_max_position_embeddings") or own or text.max_position_embeddings
        for rope in (parameters, *nested)
        if rope.get("rope_type") in BATCH_DEPENDENT_ROPE
    ]
    return min(map(int, lengths), default=None)
