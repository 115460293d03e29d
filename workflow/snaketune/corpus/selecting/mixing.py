"""How much of each source is taken: a cap on its rows, and a weight on its train rows.

Both are drawn by hashes of the rows, so that the same rows are taken whatever else is in the corpus, a higher cap keeps
what a lower one kept, and a larger weight what a smaller one did.
"""

import math

import numpy as np

from snaketune.corpus.selecting.words import mix

# Apart from what caps go by, or a weight would choose among the rows that a cap has chosen already.
WEIGHT_SALT = np.uint64(0x5851F42D4C957F2D)


def over_cap(hashes: np.ndarray, max_rows: int) -> np.ndarray:
    """Places of the rows that are too many: all but those with the smallest hashes.

    >>> over_cap(np.array([5, 3, 9], np.uint64), 2).tolist()
    [2]
    """
    return np.sort(np.argsort(hashes, kind="stable")[max_rows:])


def copies_by_weight(hashes: np.ndarray, weight: float) -> np.ndarray:
    """How often each row is used: as often as the weight's whole part says, and once more for its fraction of the rows.

    >>> copies_by_weight(np.arange(1000, dtype=np.uint64), 2.5).mean().round(1)
    np.float64(2.5)
    """
    whole = math.floor(weight)
    limit = np.uint64((weight - whole) * 2**64)
    return (whole + (mix(hashes ^ WEIGHT_SALT) < limit)).astype(np.uint8)
