"""One part of the measurements in its own process, so that a device error ends only that part.

    python -m benchmarks.gpu.worker measure 23m [--rehearse]

Every result is one line on standard output, so that results survive a stopped process.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MARK = "RESULT "
# Packages that the demo part needs.
NEEDED_BY_DEMO = ("pydantic", "orjson", "regex", "rensa", "sentencepiece", "google.protobuf", "accelerate", "xxhash")
NEEDED_BY_TRL = ("trl", "datasets", "peft")
NEEDED_BY_ADAPTERS = ("peft",)
# Initial pairs per forward pass of a DPO peer.
PAIRS_AT_ONCE = 16
# Packages of each kernel; torch's own kernels run on the CPU too.
KERNELS: dict[str, tuple[str, ...]] = {
    "sdpa": (),
    "dense": (),
    "varlen": ("torch.nn.attention.varlen",),
    "flash_attention_2": ("flash_attn.flash_attn_interface",),
    "flash_attention_4": ("flash_attn.cute",),
}
VERSIONS = ("torch", "transformers", "peft", "trl", "bitsandbytes", "triton", "flash-attn", "flash-attn-4")


def facts(_: str, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Yield the device and the installed versions."""
    import torch

    about = {"device": platform.processor() or platform.machine()}
    if not rehearse:
        if not torch.cuda.is_available():
            yield {"status": "failed", "why": "no CUDA device; --rehearse runs tiny models on the CPU"}
            return
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        about = {"device": card.name, "memory_gb": card.total_memory / 1e9, "capability": [card.major, card.minor]}
    versions = {name: found for name in VERSIONS if (found := _version(name))}
    yield {"status": "known", **about, "python": platform.python_version(), "versions": versions}


def kernel(name: str, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Test each case of one kernel."""
    from benchmarks.gpu.kernels import check

    if lacking := _lacking(KERNELS[name]):
        yield {"status": "skipped", "why": lacking}
        return
    if rehearse and KERNELS[name]:
        yield {"status": "skipped", "why": "runs on CUDA alone"}
        return
    yield from check(name, _compute(rehearse).device, ("float32",) if rehearse else ("float32", "bfloat16"))


def measure(name: str, rehearse: bool, *, variants: bool = False) -> Iterator[dict[str, Any]]:
    """Measure a shape with default settings, or all other variants of it."""
    from benchmarks.gpu.measure import BASE, VARIANTS, free_memory, measure
    from benchmarks.gpu.shapes import SHAPES, rehearsed

    from snaketune.models.device_speed import peak_of

    shape, compute = SHAPES[name], _compute(rehearse)
    if shape.quantized and (lacking := _lacking(("bitsandbytes",))):
        yield {"status": "skipped", "why": lacking}
        return
    if shape.quantized and rehearse:
        yield {"status": "skipped", "why": "4-bit weights are trained on CUDA alone"}
        return
    peak = peak_of(compute)
    for variant, switched in VARIANTS.items():
        if (variant == BASE) == variants:
            continue
        try:
            found = measure(rehearsed(shape) if rehearse else shape, switched, compute, peak, **_steps(rehearse))
        except Exception as error:
            found = _failed(error)
        yield {"variant": variant} | found
        free_memory()


def peer(name: str, rehearse: bool, *, rows: int) -> Iterator[dict[str, Any]]:
    """Measure TRL on the same shape with our number of rows."""
    if lacking := _lacking(NEEDED_BY_TRL):
        yield {"status": "skipped", "why": lacking}
        return
    from benchmarks.gpu.peers import trl
    from benchmarks.gpu.shapes import SHAPES, rehearsed

    shape = rehearsed(SHAPES[name]) if rehearse else SHAPES[name]
    yield trl(shape, _compute(rehearse), rows or shape.micro_rows, **_steps(rehearse))


def preferences(name: str, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Measure DPO with adapters on a shape, for each proportion of prompt to completion."""
    from benchmarks.gpu.measure import free_memory
    from benchmarks.gpu.pairs import PROPORTIONS
    from benchmarks.gpu.preferences import preferences
    from benchmarks.gpu.shapes import PREFERENCES, rehearsed

    if lacking := _lacking(NEEDED_BY_ADAPTERS):
        yield {"status": "skipped", "why": lacking}
        return
    shape = rehearsed(PREFERENCES[name]) if rehearse else PREFERENCES[name]
    for proportion in PROPORTIONS:
        try:
            found = preferences(shape, proportion, _compute(rehearse), **_steps(rehearse))
        except Exception as error:
            found = _failed(error)
        yield {"prompt_to_completion": proportion} | found
        free_memory()


def preference_peer(name: str, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Measure DPO with TRL, or with a plain loop that computes as TRL does."""
    from benchmarks.gpu.measure import free_memory
    from benchmarks.gpu.pairs import PROPORTIONS
    from benchmarks.gpu.preference_peers import preference_peer
    from benchmarks.gpu.shapes import PREFERENCES, rehearsed

    if lacking := _lacking(NEEDED_BY_ADAPTERS):
        yield {"status": "skipped", "why": lacking}
        return
    shape = rehearsed(PREFERENCES[name]) if rehearse else PREFERENCES[name]
    with_trl, batch_size = not _lacking(NEEDED_BY_TRL), 2 if rehearse else PAIRS_AT_ONCE
    for proportion in PROPORTIONS:
        try:
            found = preference_peer(
                shape, proportion, _compute(rehearse), batch_size, **_steps(rehearse), with_trl=with_trl
            )
        except Exception as error:
            found = _failed(error)
        yield {"prompt_to_completion": proportion} | found
        free_memory()


def demo(_: str, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Test the demo's stages: killed and resumed, evaluated, calibrated."""
    if lacking := _lacking(NEEDED_BY_DEMO):
        yield {"status": "skipped", "why": lacking}
        return
    from benchmarks.gpu.demo import demo

    size = (
        {"conversations": 400, "checkpoint_steps": 3} if rehearse else {"conversations": 2000, "checkpoint_steps": 20}
    )
    with tempfile.TemporaryDirectory() as folder:
        yield from demo(Path(folder), **size)


def _compute(rehearse: bool):
    import torch

    from snaketune.models.devices import Compute, resolve_compute

    if rehearse:
        return Compute(device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa")
    return resolve_compute("auto")


def _steps(rehearse: bool) -> dict[str, int]:
    return {"warm_up": 1, "steps": 2} if rehearse else {"warm_up": 3, "steps": 10}


def _lacking(modules: tuple[str, ...]) -> str:
    missing = [name for name in modules if not _there(name)]
    return f"not installed: {', '.join(missing)}" if missing else ""


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _failed(error: Exception) -> dict[str, Any]:
    return {"status": "failed", "why": f"{type(error).__name__}: {str(error).strip()[:2000]}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("facts", "kernel", "measure", "variants", "peer", "dpo", "dpopeer", "demo"))
    parser.add_argument("name")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--rows", type=int, default=0)
    options = parser.parse_args()
    name, rehearse = options.name, options.rehearse
    if options.part == "variants":
        found = measure(name, rehearse, variants=True)
    elif options.part == "peer":
        found = peer(name, rehearse, rows=options.rows)
    else:
        parts = {"facts": facts, "kernel": kernel, "measure": measure, "demo": demo}
        parts |= {"dpo": preferences, "dpopeer": preference_peer}
        found = parts[options.part](name, rehearse)
    try:
        for entry in found:
            print(MARK + json.dumps(entry), flush=True)
    except Exception as error:
        print(MARK + json.dumps(_failed(error)), flush=True)
        raise


if __name__ == "__main__":
    main()
