"""Scaling laws: constants come back, intervals cover, and what runs do not tell is said."""

import numpy as np
import pytest

from jaxtrain.study.laws import Law, best_use, draws, fit, interval

CHINCHILLA = Law(1.69, 406.4, 0.34, 410.7, 0.28)
TRUTHS = (CHINCHILLA, Law(1.82, 482.0, 0.35, 2085.4, 0.37), Law(0.5, 30.0, 0.15, 5e4, 0.6))
N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(2e8, 2e10, 4)))


@pytest.mark.parametrize("truth", TRUTHS)
def test_constants_of_runs_without_noise_come_back(truth):
    law, left = fit(N, D, truth.loss(N, D))
    np.testing.assert_allclose(law, truth, rtol=1e-6)
    assert np.abs(left).max() < 1e-9


@pytest.mark.slow
def test_nine_of_ten_intervals_hold_the_loss_of_a_run_far_ahead():
    far, inside = (1e10, 2e11), 0
    for i in range(10):
        noise = np.exp(0.003 * np.random.default_rng(i).standard_normal(len(N) + 1))
        laws, spread = draws(N, D, CHINCHILLA.loss(N, D) * noise[:-1], count=40, seed=i)
        low, high = interval(laws, lambda law: law.loss(*far), noise=spread)
        inside += low <= CHINCHILLA.loss(*far) * noise[-1] <= high
        assert 0.001 < spread < 0.01
    assert inside >= 8


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
