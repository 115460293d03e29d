"""Interleaved timing of both sides, and medians."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def in_turn(rounds: int, **sides: Callable[[], Any]) -> dict[str, list[float]]:
    """Time each side once per round, one after the other; return the seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - started)
            print(f"  round {number + 1}: {name} {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    return seconds


def compared(seconds: dict[str, list[float]], **facts: Any) -> dict[str, Any]:
    """Return medians and the speedup of our side over each other one."""
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    speedups = {name: medians[name] / medians["snaketune"] for name in medians if name != "snaketune"}
    return {"seconds": {n: round(s, 4) for n, s in medians.items()}, "speedup": speedups, "rounds": seconds, **facts}
