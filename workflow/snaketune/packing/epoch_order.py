"""The order in which an epoch takes its items: every one once, by seed and epoch alone.

Rows of preferences hold different numbers of pairs, and the loss of a step is a mean over its pairs. So rows are dealt out to
the steps by their pairs, and laid out within a step so that equal parts of it hold nearly equally many as well, whatever the
parts (micro-batches, processes):

    pairs of 12 rows   7 6 6 5 | 5 4 4 4 | 3 3 2 1    three steps of four: each gets one of every stratum, the one that has
                                                     fewest so far gets the most
    a step             7 1 | 5 3                     the most with the fewest, and so on with what that gives
"""

import numpy as np


def epoch_order(items: int, seed: int, epoch: int, *, weights: np.ndarray | None = None, batch: int = 1) -> np.ndarray:
    """int64[items]: every item once, in an order that depends on seed and epoch alone.

    Args:
        weights: int[items]; where given, batches of `batch` items are of nearly equal weight, and so are equal parts of
            them. The last batch, if it is smaller, weighs as much an item as the others.

    >>> epoch_order(5, seed=0, epoch=1).tolist()
    [1, 4, 3, 0, 2]
    >>> epoch_order(6, seed=0, epoch=1, weights=np.array([9, 1, 1, 9, 5, 5]), batch=2).tolist()
    [0, 2, 4, 5, 3, 1]
    """
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(items)
    if weights is None:
        return shuffled
    # Among equals, the order stays random.
    ranked = shuffled[np.argsort(-weights[shuffled], kind="stable")]
    steps, rest = divmod(items, batch)
    last = np.empty(0, np.int64)
    if rest:
        # From all over the ranks.
        at = ((np.arange(rest) + random.random()) * items / rest).astype(np.int64)
        last, ranked = ranked[at], np.delete(ranked, at)
    dealt = _dealt(ranked.reshape(batch, steps), weights)
    ordered = _laid_out(dealt[random.permutation(steps)], weights)
    return np.concatenate([ordered.reshape(-1), _laid_out(last[None], weights).reshape(-1)])


def _dealt(strata: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """int64[steps, batch]: of each stratum, int64[batch, steps] from heavy to light, one item to each step."""
    made = np.empty_like(strata)
    total = np.zeros(strata.shape[1], np.int64)
    for items, taken in zip(strata, made):
        # What is lightest so far gets the heaviest.
        lightest = np.argsort(total, kind="stable")
        taken[lightest] = items
        total += weights[taken]
    return made.T


def _laid_out(steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Items of each step, int64[n, batch], in an order in which equal parts of it weigh nearly the same."""
    n, batch = steps.shape
    # Groups of items that stay together, int64[n, groups, size]; each time `factor` of them become one.
    groups = steps[:, :, None]
    for factor in _prime_factors(batch):
        weight = weights[groups].sum(2)
        groups = np.take_along_axis(groups, np.argsort(-weight, 1, kind="stable")[:, :, None], 1)
        rounds = groups.reshape(n, factor, groups.shape[1] // factor, groups.shape[2])
        # There and back again: who comes first in one round comes last in the next.
        rounds[:, 1::2] = rounds[:, 1::2, ::-1].copy()
        groups = rounds.transpose(0, 2, 1, 3).reshape(n, rounds.shape[2], factor * groups.shape[2])
    return groups.reshape(n, batch)


def _prime_factors(number: int) -> list[int]:
    """From small to large.

    >>> _prime_factors(12)
    [2, 2, 3]
    """
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors
