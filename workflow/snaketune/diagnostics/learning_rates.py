"""The test of learning rates: the losses of a trial in which the rate rises from step to step (Smith, 2017).

The losses are smoothed by an exponential moving average without its bias to the start. The rate to try is where the smoothed
loss falls fastest over the logarithm of the rate, before it is lowest (as in fastai's `steep`); the rate with the lowest loss
is nearly that at which a training diverges.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from snaketune.artifacts.manifest import write_json
from snaketune.diagnostics.attribution_picture import INK, LOSES, OFF, svg

SMOOTHING = 0.8
# A loss that is so many times the lowest one has diverged.
DIVERGED = 4.0
# The smallest relative fall of the smoothed loss that counts.
FALL = 0.01


def write_learning_rates(measured: dict[str, Any], folder: Path) -> None:
    """Write `learning_rates.json` and `learning_rates.svg`, and print what was found. Args: measured: of the trial."""
    if not measured["fits"]:
        result: dict[str, Any] = {"try": None, "why": f"the run doesn't fit: {measured['why']}", "tested": []}
    else:
        result = range_test(measured["learning_rates"])
        (folder / "learning_rates.svg").write_text(_svg(result), encoding="utf-8")
    write_json(folder / "learning_rates.json", result)
    print(f"learning rates: {result['why']}", flush=True)


def range_test(tested: list[dict[str, float | None]]) -> dict[str, Any]:
    """Return the rates with smoothed losses, the one to try (None if no rate lowers the loss), and why.

    Args:
        tested: learning_rate and loss by step; a loss is None where it wasn't finite.

    >>> rates = [10 ** (power / 10) for power in range(-60, 0)]
    >>> falling = [{"learning_rate": rate, "loss": 3 - 2 / (1 + (1e-3 / rate) ** 2) + 300 * rate**2} for rate in rates]
    >>> found = range_test(falling)
    >>> found["why"]
    'the loss falls fastest at 0.0016 and is lowest at 0.025, and diverges at 0.13; try training.learning_rate: 0.0016'
    >>> range_test([one | {"loss": 3.0} for one in falling])["try"] is None
    True
    """
    losses = []
    for one in tested:
        if one["loss"] is None or (losses and one["loss"] > DIVERGED * min(losses)):
            break
        losses.append(one["loss"])
    rates = [float(one["learning_rate"]) for one in tested[: len(losses)]]
    sums = accumulate(losses, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss, initial=0.0)
    smoothed = [mean / (1 - SMOOTHING**step) for step, mean in enumerate(sums) if step]
    result: dict[str, Any] = {"try": None, "tested": tested, "smoothed": smoothed}
    lowest = int(np.argmin(smoothed)) if smoothed else 0
    if lowest < 2 or smoothed[lowest] > (1 - FALL) * smoothed[0]:
        return result | {"why": "no learning rate of the range lowers the loss; try higher ones, or more steps"}
    slopes = np.gradient(smoothed[: lowest + 1], np.log(rates[: lowest + 1]))
    best = f"{rates[int(np.argmin(slopes))]:.2g}"
    why = f"the loss falls fastest at {best} and is lowest at {rates[lowest]:.2g}"
    if len(losses) < len(tested):
        why += f", and diverges at {tested[len(losses)]['learning_rate']:.2g}"
    return result | {"try": float(best), "why": f"{why}; try training.learning_rate: {best}"}


def _svg(result: dict[str, Any]) -> str:
    """Return the losses over the learning rate as SVG, with the rate to try."""

    def draw(axes: Axes) -> None:
        shown = result["tested"][: len(result["smoothed"])]
        rates = [one["learning_rate"] for one in shown]
        axes.semilogx(rates, [one["loss"] for one in shown], ".", color=OFF, label="loss of a step")
        axes.semilogx(rates, result["smoothed"], color=INK, label="smoothed")
        if result["try"]:
            axes.axvline(result["try"], color=LOSES, label=f"falls fastest: {result['try']:g}")
        axes.set(xlabel="learning rate", ylabel="loss")
        axes.legend(frameon=False)

    return svg(draw, height=3.2)
