"""One part of the measurements in its own process, so that a device error ends only that part.

    python -m benchmarks.gpu.worker measure 23m [--rehearse]

Every result is one line on standard output, so that results survive a stopped process.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MARK = "RESULT "
# Packages that parts need.
NEEDED_BY_DEMO = (
    "pydantic", "regex", "rensa", "sentencepiece", "google.protobuf", "accelerate", "xxhash",
    "httpx", "tenacity",
)  # fmt: skip
NEEDED_BY_TRL = ("trl", "datasets", "peft")
# Initial pairs per forward pass of a DPO peer.
PAIRS_AT_ONCE = 16
# Packages of each kernel; torch's own kernels run on the CPU too.
KERNELS: dict[str, tuple[str, ...]] = {
    "sdpa": (), "dense": (), "varlen": ("torch.nn.attention.varlen",),
    "flash_attention_2": ("flash_attn.flash_attn_interface",), "flash_attention_4": ("flash_attn.cute",),
}  # fmt: skip
VERSIONS = ("torch", "transformers", "peft", "trl", "bitsandbytes", "triton", "flash-attn", "flash-attn-4")


class Skipped(Exception):
    """A part that can't be measured here."""


class Task(argparse.Namespace):
    """The command line: `part`, `name` (of a kernel or shape), `rehearse`, and `rows` (of our side)."""

    @property
    def compute(self):
        import torch

        from snaketune.engine.model.devices import Compute, resolve_compute

        if self.rehearse:
            return Compute(device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa")
        return resolve_compute("auto")

    @property
    def steps(self) -> dict[str, int]:
        return {"warm_up": 1, "steps": 2} if self.rehearse else {"warm_up": 3, "steps": 10}

    def shape(self, shapes: dict[str, Any]):
        from benchmarks.gpu.shapes import rehearsed

        return rehearsed(shapes[self.name]) if self.rehearse else shapes[self.name]


def facts(task: Task) -> Iterator[dict[str, Any]]:
    import torch

    about = {"device": platform.processor() or platform.machine()}
    if not task.rehearse:
        if not torch.cuda.is_available():
            yield {"status": "failed", "why": "no CUDA device; --rehearse runs tiny models on the CPU"}
            return
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        about = {"device": card.name, "memory_gb": card.total_memory / 1e9, "capability": [card.major, card.minor]}
    versions = {}
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    yield {"status": "known", **about, "python": platform.python_version(), "versions": versions}


def kernel(task: Task) -> Iterator[dict[str, Any]]:
    _require(KERNELS[task.name])
    if task.rehearse and KERNELS[task.name]:
        raise Skipped("runs on CUDA alone")
    from benchmarks.gpu.kernels import check

    yield from check(task.name, task.compute.device, ("float32",) if task.rehearse else ("float32", "bfloat16"))


def measure(task: Task) -> Iterator[dict[str, Any]]:
    """Measure a shape with default settings, or with deterministic kernels."""
    from benchmarks.gpu.measure import measure
    from benchmarks.gpu.shapes import SHAPES

    if SHAPES[task.name].quantized:
        _require(("bitsandbytes",))
        if task.rehearse:
            raise Skipped("4-bit weights are trained on CUDA alone")
    yield measure(task.shape(SHAPES), task.compute, **task.steps, deterministic=task.part == "deterministic")


def peer(task: Task) -> Iterator[dict[str, Any]]:
    """Measure TRL on the same shape with our number of rows."""
    _require(NEEDED_BY_TRL)
    from benchmarks.gpu.peers import sft_peer
    from benchmarks.gpu.shapes import SHAPES

    shape = task.shape(SHAPES)
    yield sft_peer(shape, task.compute, task.rows or shape.micro_rows, **task.steps)


def preferences(task: Task) -> Iterator[dict[str, Any]]:
    """Measure DPO with adapters for each proportion of prompt to completion: ours, TRL's, or a loop that computes as TRL."""
    _require(("peft",))
    from benchmarks.gpu.measure import preferences
    from benchmarks.gpu.peers import preference_peer
    from benchmarks.gpu.rows import PROPORTIONS
    from benchmarks.gpu.shapes import PREFERENCES

    shape = task.shape(PREFERENCES)
    with_trl, batch_size = not _lacking(NEEDED_BY_TRL), 2 if task.rehearse else PAIRS_AT_ONCE

    def run(proportion: str) -> dict[str, Any]:
        if task.part == "dpo":
            return preferences(shape, proportion, task.compute, **task.steps)
        return preference_peer(shape, proportion, task.compute, batch_size, **task.steps, with_trl=with_trl)

    yield from _each("prompt_to_completion", PROPORTIONS, run)


def demo(task: Task) -> Iterator[dict[str, Any]]:
    _require(NEEDED_BY_DEMO)
    from benchmarks.gpu.demo import demo

    conversations, checkpoint_steps = (400, 3) if task.rehearse else (2000, 20)
    with tempfile.TemporaryDirectory() as folder:
        yield from demo(Path(folder), conversations, checkpoint_steps)


def _each(key: str, values: Iterable[str], run: Callable[[str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an entry for each value, also where one fails."""
    for value in values:
        try:
            found = run(value)
        except Exception as error:
            found = _failed(error)
        yield {key: value} | found


def _require(modules: tuple[str, ...]) -> None:
    if missing := _lacking(modules):
        raise Skipped(f"not installed: {', '.join(missing)}")


def _lacking(modules: tuple[str, ...]) -> list[str]:
    there = []
    for name in modules:
        # Raised where a module's package is missing.
        with suppress(ModuleNotFoundError):
            there += [name] if find_spec(name) else []
    return [name for name in modules if name not in there]


def _failed(error: Exception) -> dict[str, Any]:
    return {"status": "failed", "why": f"{type(error).__name__}: {str(error).strip()[:2000]}"}


PARTS = {
    "facts": facts, "kernel": kernel, "measure": measure, "deterministic": measure, "peer": peer, "dpo": preferences,
    "dpopeer": preferences, "demo": demo,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("name")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--rows", type=int, default=0)
    task = parser.parse_args(namespace=Task())
    try:
        for entry in PARTS[task.part](task):
            print(MARK + json.dumps(entry), flush=True)
    except Skipped as why:
        print(MARK + json.dumps({"status": "skipped", "why": str(why)}), flush=True)
    except Exception as error:
        print(MARK + json.dumps(_failed(error)), flush=True)
        raise


if __name__ == "__main__":
    main()
