"""What reference log-probabilities are known by: weights, pairs, data types, the family of the attention kernel, and nothing
else.

    counts        weights and pairs by their content; data type of the computation (what `precision: auto` comes to here) and of
                  the weights; quantization; kernel family; kind of device; whether an adapter stays apart
    doesn't       names, paths, rows and their order, micro-batches, parts, what the runs do with it (loss, beta, learning rate)
    is the same   one with the values of single tokens for one without; with `share_kernels`, another kernel's or device's
"""

from pathlib import Path
from typing import Any

from snaketune.config.operation import Execution
from snaketune.config.runs import Pretrained
from snaketune.models.devices import resolve_compute
from snaketune.models.kernels import KERNELS
from snaketune.stages.code import code_digest
from snaketune.stages.fingerprint import Key
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec
from snaketune.stages.table import STAGES
from snaketune.training.reference import family, named

WHOLE = "ref_logps"


def keys(stage: str, spec: RefLogpsSpec, operation: Execution, code: str, device: str) -> tuple[Key, ...]:
    """Of a whole reference or of a part of one: its own key, then those of results that are the same.

    Args:
        code: digest of the stage's code.
        device: kind of device.
    """
    compute = resolve_compute(spec.precision)
    own = {
        "dtype": compute.about()["dtype"],
        "weights_dtype": str(compute.weights_dtype(frozen=spec.frozen_weights)).removeprefix("torch."),
        "kernel": family(compute.kernel),
        "quantization": spec.quantization and spec.quantization.model_dump(mode="json"),
        "base": _counted(spec.base),
        "apart": spec.apart,
        "token_logps": spec.token_logps,
    }
    part = {"part": spec.part, "parts": spec.parts} if isinstance(spec, RefPassSpec) else {}
    computed = [(own["kernel"], device)]
    if operation.share_kernels:
        computed += [
            (kernel, kind) for kernel in sorted({family(kernel) for kernel in KERNELS}) for kind in ("cuda", "cpu")
        ]
    # What is there for the whole is there for a part.
    wholes = [(WHOLE, {}, code if stage == WHOLE else code_digest(STAGES[WHOLE].module))]
    found = [
        Key(
            stage=name,
            spec=own | several | {"kernel": kernel, "token_logps": kept},
            code=digest,
            device=kind,
            by=STAGES[name].by,
        )
        for kernel, kind in dict.fromkeys(computed)
        for kept in dict.fromkeys((spec.token_logps, True))
        for name, several, digest in ([(stage, part, code)] if part else []) + wholes
    ]
    return tuple(found)


def _counted(base: Pretrained | None) -> dict[str, Any] | None:
    """A folder is known by what is in its files, wherever it lies; a Hub model by its name and revision."""
    return None if base is None or Path(base.path).is_dir() else named(base)
