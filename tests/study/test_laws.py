"""Scaling laws: constants come back, intervals cover, and what runs do not tell is said."""

import numpy as np
import pytest
import scipy.stats

from jaxtrain.study import laws
from jaxtrain.study.laws import Law, best_use, draws, fit, interval

CHINCHILLA = Law(1.69, 406.4, 0.34, 410.7, 0.28)
TRUTHS = (CHINCHILLA, Law(1.82, 482.0, 0.35, 2085.4, 0.37), Law(0.5, 30.0, 0.15, 5e4, 0.6))
N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(2e8, 2e10, 4)))


@pytest.mark.parametrize("truth", TRUTHS)
def test_constants_of_runs_without_noise_come_back(truth):
    law, left = fit(N, D, truth.loss(N, D))
    np.testing.assert_allclose(law, truth, rtol=1e-6)
    assert np.abs(left).max() < 1e-9


# Four sizes with three budgets, of which the next larger is to be told: what `jaxtrain ladder` has.
SIZES = np.array([24_704, 55_488, 98_560, 221_568.0])
RUNGS = np.tile(SIZES, 3), np.repeat([1e11, 2e11, 4e11], 4) / np.tile(6 * SIZES, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "runs", "far", "noise", "count"),
    [
        (CHINCHILLA, (N, D), (1e10, 2e11), 0.003, 10),
        (Law(1.0, 20.0, 0.35, 60.0, 0.4), RUNGS, (884_736, 3.8e5), 0.01, 40),
    ],
)
def test_nine_of_ten_intervals_hold_the_loss_of_a_run_far_ahead(truth, runs, far, noise, count):
    inside = 0
    for i in range(count):
        factors = np.exp(noise * np.random.default_rng(i).standard_normal(len(runs[0]) + 1))
        found, spreads = draws(*runs, truth.loss(*runs) * factors[:-1], count=40, seed=i)
        low, high = interval(found, lambda law: law.loss(*far), noise=spreads)
        inside += low <= truth.loss(*far) * factors[-1] <= high
        assert noise / 3 < np.median(spreads) < noise * 3
    assert inside >= round(0.85 * count) - (count < 20)


def test_where_the_law_is_known_the_interval_of_a_run_is_students(monkeypatch):
    left_R = 0.01 * np.tile([1, -1], 6)
    monkeypatch.setattr(laws, "fit", lambda *runs, quick=False: (CHINCHILLA, left_R))
    found, spreads = draws(*RUNGS, CHINCHILLA.loss(*RUNGS), count=30_000)
    low, high = interval(found, lambda law: 2.0, noise=spreads)
    # 12 runs and 5 constants: 7 degrees of freedom.
    wanted = 2 * scipy.stats.t.ppf(0.95, 7) * 0.01 * np.sqrt(12 / 7)
    np.testing.assert_allclose((2 - low, high - 2), wanted, rtol=0.03)


def test_a_budget_is_used_best_where_the_formula_says():
    _, A, a, B, b = CHINCHILLA
    budget, sizes = 1e21, np.geomspace(1e7, 1e10, 4)
    found = best_use(CHINCHILLA, budget, sizes, 6 * sizes)
    # Hoffmann et al. 2022, equation 4.
    factor = (a * A / (b * B)) ** (1 / (a + b))
    np.testing.assert_allclose(found.N, factor * (budget / 6) ** (b / (a + b)), rtol=0.01)
    np.testing.assert_allclose(found.N * found.D * 6, budget, rtol=1e-3)
    assert found.is_inside
    assert not best_use(CHINCHILLA, 1e26, sizes, 6 * sizes).is_inside


def test_what_runs_do_not_tell_is_said():
    flat = fit(N, D, 2 + 400 / N**0.4)[0]
    assert "B" in flat.absent or flat.B / D.min() ** flat.b < 1e-6
    with pytest.raises(ValueError, match=r"5 runs of 5 sizes and 1 lengths"):
        fit(N[:5], D[:5], N[:5])
