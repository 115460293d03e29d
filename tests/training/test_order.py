"""The order of rows depends on seed and epoch alone."""

from snaketune.training.order import EpochPermutation


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
