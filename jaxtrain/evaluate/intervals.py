"""Confidence intervals by the bootstrap: rows are drawn again, with replacement.

Shapes: N rows, R resamples.
"""

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000


def interval(
    statistic: Callable[..., float],
    *columns_N: np.ndarray,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns the bounds of the percentile bootstrap's interval (Efron 1979) of a statistic.

    Args:
      statistic: of columns of rows, as many as are given; NaN where it has no value, and such
        resamples are left out.
      columns_N: arrays [N, ...], whose rows belong together.
      level: share of resamples within the bounds.
      resamples: R.
      seed: of what is drawn: the same rows have the same interval.

    >>> low, high = interval(np.mean, np.arange(100) % 2)
    >>> low < 0.42 and 0.58 < high and high - low < 0.25
    True
    """
    rng, N = np.random.default_rng(seed), len(columns_N[0])
    found = []
    for _ in range(resamples):
        chosen = rng.integers(0, N, N)
        found.append(statistic(*(column[chosen] for column in columns_N)))
    found = [value for value in found if not np.isnan(value)]
    ends = (1 - level) / 2, (1 + level) / 2
    return tuple(map(float, np.quantile(found, ends))) if found else (float("nan"),) * 2
