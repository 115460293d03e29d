"""Check, by a model's config alone and before weights are loaded, whether it computes each packed document as if it were alone.

Models that pass are still subject to the self-test (`engine.model.selftest`), which runs the model itself.
"""

import copy
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.engine.model.attention import Unpackable, usable_kernels, use_segment_attention
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import packed_inputs
from snaketune.engine.model.kernels import KERNELS, SEPARATE, AttentionOptions, refusal, segments_for
from snaketune.engine.model.mixers import set_segments
from snaketune.engine.model.padded_documents import batch_dependent_rope
from snaketune.engine.model.text_part import auto_class, freeze_non_text_modules, model_class
from snaketune.engine.packing.segments import SegmentLayout, layout
from snaketune.errors import SnaketuneError, first_line

INSTEAD = "So each document runs as a sequence of its own, padded on the right (kernel separate)"
KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}
# Layers with a mixer that may run by document, see `engine.model.mixers`.
LAYERS_WITH_STATE = {"linear_attention", "conv", "hybrid"}


def unloaded_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without values, on the meta device or within a FakeTensorMode.

    Raises errors of any type, as the families' own code does.
    """
    return freeze_non_text_modules(
        auto_class(config, config.name_or_path).from_config(copy.deepcopy(config), dtype=dtype)
    )


def forward_inputs(rows: SegmentLayout) -> dict[str, Any]:
    """Return the arguments of an unloaded model's forward pass over `rows`."""
    ids_1T = torch.zeros(1, rows.tokens, dtype=torch.int64)
    return packed_inputs({"input_ids": ids_1T, "segments": segments_for("sdpa", rows)})


def check_config(config: PretrainedConfig, longest: int, prefixes: bool, kernel: str) -> None:
    """Raise Unpackable, with the reason, if the model can't compute packed rows correctly: rows whose longest segment with its
    prefix has `longest` tokens, and that share prompts, as pairs do, if `prefixes`. SnaketuneError: not separately either."""
    _check_dynamic_rope(config, longest)
    dry_run = _dry_run(config) if model_class(config) else DryRun()
    reason = _config_reason(config, prefixes, kernel) or dry_run.error or dry_run.refused_by(kernel)
    if reason := reason or _too_long(config, longest, dry_run.windows):
        raise Unpackable(f"{config.model_type} doesn't support packed rows: {reason}")


def _config_reason(config: PretrainedConfig, prefixes: bool, kernel: str) -> str:
    text = config.get_text_config()
    softcap = getattr(text, "attn_logit_softcapping", None)
    if reason := refusal(kernel, 0, AttentionOptions(softcap=softcap)):
        return reason
    kinds = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(kinds - KNOWN_LAYERS - LAYERS_WITH_STATE):
        return f"its layers ({', '.join(unknown)}) ignore document boundaries"
    without_attention = kinds & LAYERS_WITH_STATE and not kinds & KNOWN_LAYERS
    known = model_class(config)
    if prefixes and known and not without_attention and not known._can_set_attn_implementation():
        # Positions alone can separate documents, but can't make another segment's prompt visible.
        return "its own attention code can't be replaced, and doesn't support shared prompts"
    return ""


def _check_dynamic_rope(config: PretrainedConfig, longest: int) -> None:
    original = batch_dependent_rope(config, {"dynamic"})
    if original and longest > original:
        raise SnaketuneError(
            f"{config.model_type}: a sequence of {longest} tokens is longer than the {original} that its dynamic rotary "
            "embeddings were made for; beyond that, results depend on which sequences were computed before. Lower "
            f"packing.length to {original}"
        )


def _too_long(config: PretrainedConfig, longest: int, reported: set[int]) -> str:
    # A window that a layer passes to its attention is applied by the kernel.
    unknown = min(windows_of(config.get_text_config()) - reported, default=None)
    if unknown and longest > unknown:
        return (
            f"a sequence of {longest} tokens is longer than the window of {unknown} that some layers have and don't pass to "
            "their attention"
        )
    original = batch_dependent_rope(config)
    if original and longest > original:
        return (
            f"a sequence of {longest} tokens is longer than the {original} that its rotary embeddings were made for, and "
            "beyond that, the length of one sequence changes the results of all others in its batch"
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

    def record(query, key, value, segments, options):
        if options.window:
            dry_run.windows.add(options.window)
        dry_run.needs.add((query.shape[-1], replace(options, scaling=None, window=None, sinks_H=None)))
        return KERNELS[segments.kernel](query, key, value, segments, AttentionOptions(scaling=options.scaling))

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            model = unloaded_model(config, torch.bfloat16).train(training)
        except Exception:
            return dry_run
        try:
            use_segment_attention(model)
            inputs = forward_inputs(layout([[3, 2]], [[0, 0]], row_lengths=[6]))
            # Longer than any window.
            inputs["segments"] = replace(inputs["segments"], longest=sys.maxsize, compute=record)
            set_segments(model, inputs["segments"])
            model(**inputs)
        except (Unpackable, TypeError, AttributeError) as error:
            dry_run.error = first_line(error)
        except Exception:
            pass
    return dry_run


def choose_kernel(
    compute: Compute, config: PretrainedConfig | None, longest: int, *, prefixes: bool, dropout: bool
) -> Compute:
    """Return `compute` with the fastest kernel that computes these rows correctly by the model's config. Prints why it isn't a
    faster one. The self-test may choose another one. For the arguments see `check_config` and `with_supported_kernel`."""
    compute = with_supported_kernel(compute, config, dropout=dropout)
    if config is None or compute.kernel == SEPARATE:
        return compute
    try:
        check_config(config, longest, prefixes, compute.kernel)
    except Unpackable as error:
        print(f"{error}. {INSTEAD}", flush=True)
        return replace(compute, kernel=SEPARATE)
    return compute


def with_supported_kernel(compute: Compute, config: PretrainedConfig | None, *, dropout: bool) -> Compute:
    """Return `compute` with the fastest kernel that supports this model's attention: its head sizes, and dropout of
    attention weights, if its dropout will be on. Prints why a faster kernel isn't used.

    Properties that the config doesn't show are left to the self-test; None if the model isn't one of transformers' own.
    """
    kernels = usable_kernels(compute.device, compute.dtype)
    if compute.kernel not in kernels[:-1] or not model_class(config):
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
