"""Interleaved training steps of each side."""

import statistics
import sys
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.flops import attention_flops, step_flops
from benchmarks.processes import measured, one_core
from benchmarks.sft.material import MODEL, Material
from benchmarks.sft.sides import SIDES


def speed(rounds: int, material: Material, warm_up: int = 5, steps: int = 30) -> dict[str, Any]:
    """Measure real tokens/s, the share of the core's matmul peak, and memory, in rounds of all sides."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    material_file = material.save(material.base.with_name("material.json"))
    with one_core():
        for number in range(rounds):
            for side in SIDES:
                one = measured("benchmarks.sft.sides", side, material_file, warm_up, steps)
                found[side].append(one)
                what = f"{one['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in one else one["gflops_per_s"]
                print(f"  round {number + 1}: {side} {what}", file=sys.stderr, flush=True)
    sides = [side for side in SIDES if side != "gemm"]
    rates = {side: statistics.median(one["tokens_per_s"] for one in found[side]) for side in sides}
    memory = {side: statistics.median(one["peak_rss_bytes"] for one in found[side]) for side in sides}
    parameters = parameters_of(material.base)
    flops = statistics.median(flops_per_s(one, parameters) for one in found["snaketune"])
    peak = max(rate for one in found["gemm"] for rate in one["gflops_per_s"].values()) * 1e9
    return {
        "cpu_speedup_vs_trl_packed": rates["snaketune"] / rates["trl packed"],
        "cpu_speedup_vs_trl_unpacked": rates["snaketune"] / rates["trl unpacked"],
        "cpu_share_of_gemm_peak": flops / peak,
        "cpu_peak_rss_ratio_vs_trl": memory["snaketune"] / memory["trl packed"],
        "tokens_per_s": rates,
        "peak_rss_gb": {side: bytes_ / 1e9 for side, bytes_ in memory.items()},
        "gflops_per_s": flops / 1e9,
        "gemm_peak_gflops_per_s": peak / 1e9,
        "flops": "6 per parameter and real token, and attention over visible pairs",
        "parameters": parameters,
        "rounds": found,
    }


def flops_per_s(one: dict[str, Any], parameters: int) -> float:
    """Return the FLOP/s of our timed steps."""
    heads = MODEL["num_attention_heads"]
    attention = attention_flops(
        one["pairs"], heads=heads, head_dim=MODEL["hidden_size"] // heads, layers=MODEL["num_hidden_layers"]
    )
    return step_flops(parameters, one["tokens"], attention) / one["seconds"]


def parameters_of(base: Path) -> int:
    """Count the parameters of the model in a folder, tied ones once."""
    from safetensors import safe_open

    with safe_open(base / "model.safetensors", framework="np") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
