"""What reference log-probabilities are known by: weights, pairs, data types, the family of the attention kernel, and nothing
else.

    counts        weights and pairs by their content; data type of the computation (what `precision: auto` comes to here) and of
                  the weights; quantization; kernel family; kind of device; whether an adapter stays apart
    doesn't       names, paths, rows and their order, micro-batches, parts, what the runs do with it (loss, beta, learning rate)
    is the same   one with the values of single tokens for one without; with `share_kernels`, another kernel's or device's

Asked before anything is known to be computed, so torch is imported only where it is needed to tell: not for a CPU.
"""

import sys
from pathlib import Path
from typing import Any

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Pretrained
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.fingerprint import Key
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec
from snaketune.stages.table import STAGES

WHOLE = "ref_logps"
# Kernels of one family are one computation in several packages.
FAMILIES = {
    "sdpa": "sdpa",
    "dense": "dense",
    "varlen": "varlen",
    "flash_attention_2": "flash",
    "flash_attention_4": "flash",
}


def keys(stage: str, spec: RefLogpsSpec, operation: Execution, code: str, device: str) -> tuple[Key, ...]:
    """Of a whole reference or of a part of one: its own key, then those of results that are the same.

    Args:
        code: digest of the stage's code.
        device: kind of device.
    """
    own = _computed(spec, device) | {
        "quantization": spec.quantization and spec.quantization.model_dump(mode="json"),
        "base": _counted(spec.base),
        "apart": spec.apart,
        "token_logps": spec.token_logps,
    }
    part = {"part": spec.part, "parts": spec.parts} if isinstance(spec, RefPassSpec) else {}
    computed = [(own["kernel"], device)]
    if operation.share_kernels:
        computed += [(kernel, kind) for kernel in sorted({*FAMILIES.values()}) for kind in ("cuda", "cpu")]
    # What is there for the whole is there for a part.
    wholes = [(WHOLE, {}, code if stage == WHOLE else code_digest(STAGES[WHOLE].module))]
    found = [
        Key(
            stage=name,
            spec=own | several | {"kernel": kernel, "token_logps": kept},
            code=digest,
            device=kind,
            by=STAGES[name].digested_by,
        )
        for kernel, kind in dict.fromkeys(computed)
        for kept in dict.fromkeys((spec.token_logps, True))
        for name, several, digest in ([(stage, part, code)] if part else []) + wholes
    ]
    return tuple(found)


def _computed(spec: RefLogpsSpec, device: str) -> dict[str, str]:
    """In which data types and by which family of kernels, as `models.devices` resolves them."""
    if device == "cpu" and sys.platform == "linux":
        dtype, kernel = "bfloat16" if spec.precision == "bfloat16" else "float32", "sdpa"
    else:
        from snaketune.models.devices import resolve_compute

        about = resolve_compute(spec.precision).about()
        dtype, kernel = about["dtype"], about["kernel"]
    return {"dtype": dtype, "weights_dtype": dtype if spec.frozen_weights else "float32", "kernel": family(kernel)}


def _counted(base: Pretrained | None) -> dict[str, Any] | None:
    """A folder is known by what is in its files, wherever it lies; a Hub model by its name and revision."""
    return None if base is None or Path(base.path).is_dir() else named(base)


def family(kernel: str | None) -> str | None:
    """Of an attention kernel; one that isn't known is its own.

    >>> family("flash_attention_2") == family("flash_attention_4") != family("sdpa")
    True
    """
    return FAMILIES.get(kernel, kernel)


def named(base: Any) -> dict[str, Any] | None:
    """What of a model from outside names it, as a config has it or a manifest: its path and its revision."""
    told = base if base is None or isinstance(base, dict) else base.model_dump(mode="json")
    return told and {key: told[key] for key in ("path", "revision")}
