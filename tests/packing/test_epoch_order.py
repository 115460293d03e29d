"""The order of an epoch: every item once; with weights, steps and their parts are of nearly equal weight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaketune.engine.packing.epoch_order import epoch_order
from snaketune.engine.packing.rows import EqualTokens
from snaketune.packing.reader import open_rows
from tests.packing.made_pairs import MadePair, packed

made_weights = st.lists(st.integers(0, 40), max_size=80).map(lambda some: np.array(some, np.int64))


def ordered(weights: np.ndarray, batch: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return epoch_order(len(weights), seed, epoch, weights=weights, batch=batch)


@given(made_weights, st.integers(1, 12), st.integers(0, 5))
def test_every_item_occurs_once(weights, batch, epoch):
    assert sorted(ordered(weights, batch, epoch=epoch)) == list(range(len(weights)))


@given(made_weights, st.sampled_from([2, 4, 8, 16]))
def test_steps_and_their_parts_differ_by_no_more_than_items_do(weights, batch):
    order = ordered(weights, batch)
    full = weights[order[: len(order) // batch * batch]].reshape(-1, batch)
    if not len(full):
        return
    assert np.ptp(full.sum(1)) <= np.ptp(weights)
    for step in full:
        for part in (batch // 2, batch // 4):
            assert not part or np.ptp(step.reshape(-1, part).sum(1)) <= np.ptp(step)


def test_parts_of_other_sizes_are_balanced():
    # Three rows of many pairs and nine of few, as micro-batches of two, four and six, and as three processes have them.
    weights = np.array([9] * 3 + [1] * 9)
    for part, sums in ((4, {12}), (6, {14, 22}), (2, {2, 10})):
        assert set(weights[ordered(weights, 12)].reshape(-1, part).sum(1).tolist()) == sums


def test_real_weights_are_spread_far_less_than_by_chance():
    weights = np.random.default_rng(0).poisson(5, 400) + 1
    by_chance = weights[epoch_order(400, 0, 0)].reshape(-1, 8).sum(1)
    assert np.ptp(weights[ordered(weights, 8)].reshape(-1, 8).sum(1)) <= 2 < 20 < np.ptp(by_chance)


def test_the_last_step_has_the_same_weight_per_item_as_the_others():
    weights = np.repeat([1, 3], 50)
    for epoch in range(9):
        assert weights[ordered(weights, 32, epoch=epoch)[96:]].sum() == 8


def test_seed_and_epoch_shuffle_the_steps_and_the_items_within_them():
    weights = np.tile([1, 2, 3, 4], 25)
    orders = [ordered(weights, 4, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3
    together = [{frozenset(step) for step in order.reshape(-1, 4).tolist()} for order in orders]
    assert not together[0] & together[1] and not together[0] & together[2]
    assert ordered(weights, 4, 0, 1).tolist() == orders[1].tolist()


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_equal_items_are_in_random_order(batch):
    order = ordered(np.ones(50, int), batch)
    assert order.tolist() != sorted(order)


def test_the_weight_of_an_item_is_its_number_of_pairs(tmp_path):
    """With two lengths, an item is two of the shorter rows."""
    answers = [tuple((n, True) for n in range(2 * k, 2 * k + 2)) for k in range(18)]
    # Two prompts occur twice, and their trees need longer rows.
    pairs = [MadePair((100 + k % 7, 101), answers[k], answers[17 - k]) for k in range(9)]
    made = packed(tmp_path, pairs, length=(8, 32))
    items = EqualTokens(open_rows(made, "train"))
    counts = [sum(len(row["completions"]) // 2 for row in items[item]) for item in range(len(items))]
    assert items.pairs.tolist() == counts
    assert counts == [3, 6]
