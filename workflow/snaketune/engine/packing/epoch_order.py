"""The order of the items of an epoch: every item once, determined by seed and epoch.

Rows of preferences hold different numbers of pairs, and the loss of a step is a mean over its pairs. So rows are assigned to
steps such that the steps hold nearly equally many pairs, and are ordered within a step such that equal parts of it (its
micro-batches, or the shares of the processes) do so too:

    pairs of 12 rows   7 6 6 5 | 5 4 4 4 | 3 3 2 1    three steps of four rows: each step gets a row of every stratum, the
                                                     step with the fewest pairs so far gets the row with the most
    a step             7 1 | 5 3                     rows with many pairs are grouped with rows with few, then the groups
"""

import numpy as np


def epoch_order(items: int, seed: int, epoch: int, *, weights: np.ndarray | None = None, batch: int = 1) -> np.ndarray:
    """int64[items], every item once, in an order that depends only on seed and epoch.

    Args:
        weights: int[items]; if given, batches of `batch` items have nearly equal weight, and so have equal parts of a batch.
            A smaller last batch has about the same weight per item as the others.

    >>> epoch_order(5, seed=0, epoch=1).tolist()
    [1, 4, 3, 0, 2]
    >>> epoch_order(6, seed=0, epoch=1, weights=np.array([9, 1, 1, 9, 5, 5]), batch=2).tolist()
    [0, 2, 4, 5, 3, 1]
    """
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(items)
    if weights is None:
        return shuffled
    # The sort is stable, so items of equal weight stay in random order.
    ranked = shuffled[np.argsort(-weights[shuffled], kind="stable")]
    steps, rest = divmod(items, batch)
    last = np.empty(0, np.int64)
    if rest:
        # The last, smaller batch takes items at equal distances in the ranking.
        at = ((np.arange(rest) + random.random()) * items / rest).astype(np.int64)
        last, ranked = ranked[at], np.delete(ranked, at)
    dealt = _deal(ranked.reshape(batch, steps), weights)[random.permutation(steps)]
    return np.concatenate([_balance_parts(steps, weights).reshape(-1) for steps in (dealt, last[None])])


def _deal(strata: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Deal one item of each stratum (int64[batch, steps], from heavy to light) to each step; return int64[steps, batch]."""
    dealt = np.empty_like(strata)
    total = np.zeros(strata.shape[1], np.int64)
    for items, dealt_step in zip(strata, dealt):
        # The step with the least weight so far gets the heaviest item.
        dealt_step[np.argsort(total, kind="stable")] = items
        total += weights[dealt_step]
    return dealt.T


def _balance_parts(steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Order the items of each step, int64[n, batch], such that equal parts of it weigh nearly the same."""
    n, batch = steps.shape
    # Groups of items that stay together, int64[n, groups, size]; each iteration merges `factor` groups into one.
    groups, factor = steps[:, :, None], 2
    while groups.shape[1] > 1:
        _, count, size = groups.shape
        # The prime factors of `batch`, ascending.
        if count % factor:
            factor += 1
            continue
        groups = np.take_along_axis(groups, np.argsort(-weights[groups].sum(2), 1, kind="stable")[:, :, None], 1)
        rounds = groups.reshape(n, factor, count // factor, size)
        # Alternate the direction: the group that is first in one round is last in the next.
        rounds[:, 1::2] = rounds[:, 1::2, ::-1].copy()
        groups = rounds.transpose(0, 2, 1, 3).reshape(n, count // factor, factor * size)
    return groups.reshape(n, batch)
