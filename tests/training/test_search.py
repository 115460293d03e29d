"""The search for the fastest batch plan finds the best one within the memory limit, without needless trials."""

import pytest

from snaketune.training.autotune.batch_plan import BatchPlan
from snaketune.training.autotune.search import best_of, halvings, search


class Device:
    """A device on which each row needs memory and gains ever less throughput; with checkpointing a tenth of the memory, and
    slower."""

    def __init__(self, memory: float, half: float = 2.0):
        self.memory, self.half = memory, half
        self.tried: list[tuple[int, bool]] = []

    def measure(self, plan: BatchPlan) -> dict:
        rows, recomputed = plan.micro_batch_rows, plan.gradient_checkpointing
        self.tried.append((rows, recomputed))
        trial = {"micro_batch_rows": rows, "gradient_checkpointing": recomputed}
        needed = 10 + rows * (0.1 if recomputed else 1)
        if needed > self.memory:
            return trial | {"fits": False}
        speed = 1000 * rows / (rows + self.half) * (0.75 if recomputed else 1)
        return trial | {"fits": True, "tokens_per_second": speed, "peak_bytes": needed}

    def best(self, batch_rows: int, checkpointing="auto") -> tuple[int, bool]:
        trials = search(halvings(batch_rows), checkpointing, self.measure)
        best = best_of([trial for trial in trials if trial["fits"]])
        return best["micro_batch_rows"], best["gradient_checkpointing"]


@pytest.mark.parametrize(
    ("memory", "batch_rows", "best"),
    [
        (1000, 64, (64, False)),
        (1000, 7, (7, False)),
        (26, 64, (16, False)),
        (22.5, 48, (12, False)),
        (10.5, 64, (4, True)),
        (11.5, 64, (8, True)),
        (10.1, 64, (1, True)),
    ],
)
def test_the_best_below_the_limit_is_found(memory, batch_rows, best):
    assert Device(memory).best(batch_rows) == best


def test_the_search_ends_where_more_rows_gain_nothing():
    device = Device(1000, half=0.001)
    assert device.best(1024) == (1, False)
    assert device.tried == [(1, False), (2, False), (4, False)]


def test_one_slow_trial_does_not_end_the_search():
    class Hiccup(Device):
        def measure(self, plan):
            trial = super().measure(plan)
            return trial | ({"tokens_per_second": 1.0} if plan.micro_batch_rows == 4 else {})

    assert Hiccup(1000).best(64) == (64, False)


def test_checkpointing_is_tried_only_if_memory_is_the_limit():
    roomy = Device(1000)
    roomy.best(64)
    assert not any(recomputed for _, recomputed in roomy.tried)
    # Memory runs out, but throughput stopped growing before.
    flat = Device(14.5, half=0.01)
    flat.best(64)
    assert not any(recomputed for _, recomputed in flat.tried)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_only_the_configured_checkpointing_is_tried(checkpointing):
    device = Device(12.5)
    device.best(8, checkpointing)
    assert {recomputed for _, recomputed in device.tried} == {checkpointing}


def test_if_nothing_fits_the_smallest_plans_are_tried():
    device = Device(5)
    assert not any(one["fits"] for one in search([1, 2, 4], "auto", device.measure))
    assert device.tried == [(1, False), (1, True)]


def test_no_trial_runs_that_is_not_worth_its_time():
    device = Device(1000)
    trials = search([1, 2, 4, 8], "auto", device.measure, lambda trials: len(trials) < 2)
    assert [trial["micro_batch_rows"] for trial in trials] == [1, 2]
    assert search([1, 2], "auto", device.measure, lambda trials: False) == []
