"""The order of rows depends on seed and epoch alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

from snaketune.engine.data_order import EpochPermutation
from snaketune.engine.features import TrainingFeatures


def test_each_epoch_has_its_own_permutation_and_the_same_one_again():
    sampler, again = EpochPermutation(50, seed=3), EpochPermutation(50, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    again.set_epoch(1)
    assert list(again) == second
    assert list(EpochPermutation(50, seed=4)) != first


@pytest.mark.parametrize("items", [5, 8])
def test_rows_in_order_are_torchs_sequential_sampler(items):
    sampler = EpochPermutation(items, seed=3, multiple=4, shuffled=False, weights=np.arange(items), batch=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == [*SequentialSampler(range(items)), *[items] * (-items % 4)]


@pytest.mark.parametrize("weights", [None, np.arange(50) % 7])
def test_the_order_is_the_same_whatever_the_micro_batches_and_the_processes(weights):
    def order(micro_batch_rows: int, accumulation: int, processes: int) -> list[int]:
        args = SimpleNamespace(
            seed=3,
            world_size=processes,
            per_device_train_batch_size=micro_batch_rows,
            gradient_accumulation_steps=accumulation,
        )
        rows = SimpleNamespace(order="shuffled")
        trainer = SimpleNamespace(args=args, rows=rows, items_per_epoch=lambda: 50, item_weights=lambda: weights)
        sampler = TrainingFeatures._get_train_sampler(trainer)
        assert sampler is trainer.order
        sampler.set_epoch(2)
        return [item for item in sampler if item < 50]

    orders = [order(8, 1, 1), order(1, 8, 1), order(2, 2, 2), order(1, 2, 4)]
    assert orders[0] == orders[1] == orders[2] == orders[3]
    if weights is not None:
        assert np.ptp(weights[orders[0][:48]].reshape(-1, 8).sum(1)) <= 2


def test_an_epoch_sets_the_order_itself():
    """In a resumed epoch of several processes, a loader informs only the samplers that it wraps."""
    trainer = TrainingFeatures.__new__(TrainingFeatures)
    trainer.order = EpochPermutation(50, seed=3)
    trainer.on_epoch_begin(None, SimpleNamespace(epoch=2.0), None)
    assert trainer.order.epoch == 2
