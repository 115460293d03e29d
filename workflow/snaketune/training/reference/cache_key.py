"""Cache keys of reference log-probabilities. A result is reused by every run with the same key.

    in the key      content of weights and pairs; data type of the computation (`precision: auto` resolved on this machine) and
                    of the weights; quantization; family of the attention kernel; kind of device; whether an adapter stays
                    unmerged
    not in the key  names, paths, rows and their order, micro-batches, parts, settings of the runs that use it (loss, beta, …)
    equivalent      a result with log-probabilities per token serves a run that needs none; with `share_kernels`, so does a
                    result of another kernel or device

Keys are computed before any work, so torch is imported only if resolving the device needs it; a CPU doesn't.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snaketune.config.base_models import Pretrained
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.fingerprint import Key
from snaketune.stages.specs import FrozenSpec, RefPassSpec

if TYPE_CHECKING:
    from snaketune.stages.loaded_job import LoadedJob

WHOLE_STAGE, WHOLE_MODULE = "ref_logps", "snaketune.training.ref_logps"
# Of the pack, a whole reference counts the pairs, whatever rows they are in; a part counts its rows.
DIGESTED_BY = {"pack": "pairs"}
# Kernels of a family implement the same computation.
KERNEL_FAMILIES = {
    "sdpa": "sdpa",
    "dense": "dense",
    "varlen": "varlen",
    "flash_attention_2": "flash",
    "flash_attention_4": "flash",
}


def cache_keys(job: "LoadedJob") -> tuple[Key, ...]:
    """The cache keys of a reference or of a part of one: its own key first, then those of equivalent results."""
    spec, device = job.spec, job.device
    # As `engine.model.devices` resolves them.
    if device == "cpu" and sys.platform == "linux":
        dtype, kernel = "float32" if spec.precision == "auto" else spec.precision, "sdpa"
    else:
        from snaketune.engine.model.devices import resolve_compute

        about = resolve_compute(spec.precision).about()
        dtype, kernel = about["dtype"], about["kernel"]
    entries = computation(spec, dtype)
    computed = [(kernel_family(kernel), device)]
    if job.operation.share_kernels:
        computed += [(family, kind) for family in sorted({*KERNEL_FAMILIES.values()}) for kind in ("cuda", "cpu")]
    # A whole reference contains every part.
    whole_code = job.code if job.stage.name == WHOLE_STAGE else code_digest(WHOLE_MODULE)
    candidates: list[tuple[str, dict[str, int], str, dict[str, str]]] = [(WHOLE_STAGE, {}, whole_code, DIGESTED_BY)]
    if isinstance(spec, RefPassSpec):
        candidates.insert(0, (job.stage.name, {"part": spec.part, "parts": spec.parts}, job.code, {}))
    return tuple(
        Key(
            stage=name,
            spec=entries | part | {"kernel": family, "token_logps": with_tokens},
            code=digest,
            device=kind,
            by=by,
        )
        for family, kind in dict.fromkeys(computed)
        for with_tokens in dict.fromkeys((spec.token_logps, True))
        for name, part, digest, by in candidates
    )


def computation(spec: FrozenSpec, dtype: str) -> dict[str, Any]:
    """Return what the spec says of the computation, with the data type of its matmuls."""
    # A local base is an input with a content digest of its own.
    named = isinstance(spec.base, Pretrained) and not Path(spec.base.path).is_dir()
    return {
        "dtype": dtype,
        "weights_dtype": "bfloat16" if spec.frozen_weights and dtype == "bfloat16" else "float32",
        "quantization": spec.quantization and spec.quantization.model_dump(mode="json"),
        "base": identity(spec.base, named=named),
        "apart": spec.apart,
    }


def kernel_family(kernel: str | None) -> str | None:
    """The family of an attention kernel; an unknown kernel is its own family.

    >>> kernel_family("flash_attention_2") == kernel_family("flash_attention_4") != kernel_family("sdpa")
    True
    """
    return KERNEL_FAMILIES.get(kernel, kernel)


def identity(base: Any, *, named: bool) -> dict[str, Any] | None:
    """Return what identifies an external model, given as in a config or in a manifest: path and revision where it is `named` by
    them, and its rope scaling; None if there is nothing.

    >>> hub = {"path": "owner/model", "revision": None, "trust_remote_code": False}
    >>> identity(hub, named=True), identity(hub, named=False), identity(None, named=True)
    ({'path': 'owner/model', 'revision': None}, None, None)
    >>> identity(hub | {"rope": {"type": "yarn", "factor": 4.0}}, named=False)
    {'rope': {'type': 'yarn', 'factor': 4.0}}
    """
    values = base if base is None or isinstance(base, dict) else base.model_dump(mode="json")
    if values is None:
        return None
    name = {key: values[key] for key in ("path", "revision")} if named else {}
    return name | ({"rope": values["rope"]} if values.get("rope") else {}) or None
