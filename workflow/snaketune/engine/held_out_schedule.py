"""When held-out rows are measured during a training, and which of them.

The cost is counted in tokens of forward passes: a trained token costs about three of them (forward, and twice that backward),
or two if the base weights are frozen.
"""

import math
from dataclasses import dataclass

import numpy as np

from snaketune.config.held_out import Evaluate

# Share of a training's computation that measurements take at most with `every: auto`. Eager layers and batches made on the spot
# make it up to half as much again of its time, which is to be 3% at most.
MAX_SHARE = 0.02
# Measurements of `every: auto`, with that before the first step: the most, and the fewest before fewer rows are measured.
MOST, FEWEST = 11, 5


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The measurements of a training.

    Attributes:
        steps: optimizer steps after which held-out rows are measured, ascending; 0 is before the first step.
        rows: indices of the measured rows, ascending.
        samples: prompts that are answered at each measurement.
        share: expected share of the training's computation that all measurements take.
    """

    steps: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    samples: int = 0
    share: float = 0.0


def plan_measurements(
    settings: Evaluate,
    *,
    steps: int,
    trained_tokens: float,
    row_tokens_R: np.ndarray,
    sample_tokens: int,
    passes: float,
    limited: bool,
) -> Schedule:
    """Return the measurements of a training of so many optimizer steps; none if there are no rows or it is too short.

    Args:
        trained_tokens: tokens of all steps.
        row_tokens_R: int[R], the tokens of each held-out row.
        sample_tokens: tokens of the forward passes that answer the sample prompts once.
        passes: forward passes that a trained token costs.
        limited: whether `every: auto` is limited to MAX_SHARE; measurements that decide about the result aren't.

    >>> held_out = {"row_tokens_R": np.full(20, 500), "sample_tokens": 9000}
    >>> long = plan_measurements(Evaluate(), steps=1000, trained_tokens=8e6, **held_out, passes=3, limited=True)
    >>> long.steps[:3], len(long.rows), long.samples, round(long.share, 3)
    ((0, 100, 200), 20, 2, 0.009)
    >>> short = plan_measurements(Evaluate(), steps=100, trained_tokens=1e5, **held_out, passes=3, limited=True)
    >>> short.steps, len(short.rows), short.samples, round(short.share, 3)
    ((0, 25, 50, 75, 100), 2, 0, 0.017)
    """
    drawn = np.random.default_rng(0).permutation(len(row_tokens_R))[: settings.rows]
    if not len(drawn) or not steps:
        return Schedule()
    computed, mean = passes * trained_tokens, row_tokens_R[drawn].mean()
    if settings.every != "auto":
        interval = max(1, steps * settings.every if settings.every < 1 else settings.every)
        # A share of 1/3 isn't exact, so the last interval may end just before the last step.
        measured = (*(round(n * interval) for n in range(math.ceil(steps / interval - 1e-6))), steps)
        samples = settings.samples
    else:
        times, rows, samples = MOST, len(drawn), settings.samples
        if limited:
            affordable = MAX_SHARE * computed / mean
            times = min(MOST, max(FEWEST, int(affordable / rows)))
            rows = min(rows, int(affordable / times))
            if not rows:
                return Schedule()
            samples = samples if times * (rows * mean + sample_tokens) <= MAX_SHARE * computed else 0
        times, drawn = min(times, steps + 1), drawn[:rows]
        measured = tuple(dict.fromkeys(round(n * steps / (times - 1)) for n in range(times)))
    cost = row_tokens_R[drawn].sum() + (sample_tokens if samples else 0)
    share = float(len(measured) * cost / computed)
    return Schedule(steps=measured, rows=tuple(np.sort(drawn).tolist()), samples=samples, share=share)
