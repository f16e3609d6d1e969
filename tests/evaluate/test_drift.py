"""The population stability index against its definition, and its chance against known laws."""

import math

import numpy as np
from scipy import stats

from jaxtrain.evaluate import drift


def test_the_index_is_its_definition():
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=40_000), 0.5 + rng.normal(size=30_000)
    edges = np.quantile(old, np.arange(1, 10) / 10)
    p, q = (np.bincount(np.searchsorted(edges, x), minlength=10) / len(x) for x in (old, new))
    expected = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
    counts = [np.bincount(np.searchsorted(edges, x), minlength=10) for x in (old, new)]
    np.testing.assert_allclose(drift.psi(*counts), expected, rtol=1e-3)
    assert drift.psi(counts[0], counts[0]) == 0 < drift.psi(np.array([9, 0]), np.array([0, 9]))


def test_chance_of_independent_numbers_is_that_of_chi_squared():
    """PSI / (1 / n + 1 / m) is chi-squared with K - 1 degrees of freedom (Yurdakul 2018)."""
    rng = np.random.default_rng(4)
    found = drift.of_numbers(rng.normal(size=500), rng.normal(size=300))
    expected = stats.chi2.ppf(drift.LEVEL, drift.BINS - 1) * (1 / 500 + 1 / 300)
    np.testing.assert_allclose(found.chance, expected, rtol=0.25)
    moved = drift.of_numbers(rng.normal(size=500), rng.normal(size=300) + 0.7)
    assert moved.exceeds(0.25)
    assert not found.exceeds(0.0)


def test_documents_alike_within_are_no_drift():
    """Of texts that each have words of their own, indices above 0.25 are chance, and said to be."""
    rng, count = np.random.default_rng(2), 40

    def sample(shift=0):
        topics = rng.integers(0, 8, 10)
        return [
            np.concatenate(
                [50 + 5 * t + rng.integers(0, 5, 200), rng.integers(shift, shift + 50, 200)]
            )
            for t in topics
        ]

    found = [drift.of_tokens(sample(), sample(), seed=n) for n in range(count)]
    assert sum(each.psi > 0.25 for each in found) > count / 2
    # 0.01 of them in the mean: at most 3 of 40 with a probability of 0.9995
    assert sum(each.exceeds(0.0) for each in found) <= 3
    assert all(drift.of_tokens(sample(), sample(60), seed=n).exceeds(0.25) for n in range(5))
