"""Scaling laws: the loss of a model of N parameters after D tokens, L = E + A / N^a + B / D^b.

Given the exponents the rest is linear, with coefficients that are no less than 0, so the search is
over two numbers and needs no starting point (variable projection, Golub and Pereyra 1973). Errors
are relative to the loss. The form is that of Hoffmann et al. 2022
(https://arxiv.org/abs/2203.15556); what parabolas through each budget are biased by is in
https://arxiv.org/abs/2603.22339.

Shapes: R runs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls

# Bounds of exponents, and the grid of them that is tried first; of a bootstrap's draws a coarser.
EXPONENTS, GRID, COARSE = (0.005, 4.0), (0.03, 2.0, 25), (0.03, 2.0, 9)
DRAWS, LEVEL = 200, 0.9
# Constants, which so many runs at least must tell.
CONSTANTS = 5


class Law(NamedTuple):
    """The constants of a law; E is the loss that no model goes below."""

    E: float
    A: float
    a: float
    B: float
    b: float

    def loss(self, N: Any, D: Any) -> Any:
        """Returns the loss of N parameters after D tokens.

        >>> round(float(Law(1.69, 406.4, 0.34, 410.7, 0.28).loss(70e9, 1.4e12)), 3)
        1.937
        """
        return self.E + self.A / np.power(N, self.a) + self.B / np.power(D, self.b)

    @property
    def absent(self) -> list[str]:
        """The coefficients that are 0: the runs do not tell them."""
        return [name for name in "EAB" if getattr(self, name) == 0]


class Best(NamedTuple):
    """The best use of a budget: so many parameters and tokens, and their loss. ``is_inside`` says
    whether it lies between sizes that were looked at."""

    N: float
    D: float
    loss: float
    is_inside: bool


def fit(
    N_R: Sequence[float], D_R: Sequence[float], L_R: Sequence[float], *, quick: bool = False
) -> tuple[Law, np.ndarray]:
    """Fits a law to runs.

    Args:
      N_R: parameters of each.
      D_R: tokens of each.
      L_R: their losses, above 0.
      quick: to four digits, of a bootstrap's draws.

    Returns:
      The law, and each run's residual relative to its loss.

    Raises:
      ValueError: there are fewer runs, sizes or lengths than the constants need.

    >>> truth = Law(1.7, 400.0, 0.34, 410.0, 0.28)
    >>> N, D = (x.ravel() for x in np.meshgrid([1e6, 1e7, 1e8], [1e8, 1e9, 1e10]))
    >>> law, _ = fit(N, D, truth.loss(N, D))
    >>> bool(np.allclose(law, truth, rtol=1e-6))
    True
    """
    N, D, L = (np.asarray(x, np.float64) for x in (N_R, D_R, L_R))
    if len(L) <= CONSTANTS or min(len(set(N)), len(set(D))) < 3:
        raise ValueError(
            f"{len(L)} runs of {len(set(N))} sizes and {len(set(D))} lengths do not tell a law's "
            f"{CONSTANTS} constants: give {CONSTANTS + 1} or more of at least 3 each"
        )
    # Columns near 1 make a well-conditioned problem.
    n, d = (N / _middle(N), D / _middle(D))

    def project(exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best coefficients for exponents, and the residuals."""
        columns = np.stack([np.ones_like(L), n ** -exponents[0], d ** -exponents[1]], 1)
        X, ones = columns / L[:, None], np.ones_like(L)
        found, _ = nnls(X, ones)
        # That stops before the last digits: solve again on the columns that it leaves in.
        if (on := found > 0).any():
            free = np.linalg.lstsq(X[:, on], ones, rcond=None)[0]
            found[on] = free if (free >= 0).all() else found[on]
        return found, X @ found - 1

    def residuals(exponents: np.ndarray) -> np.ndarray:
        return project(exponents)[1]

    tried = np.geomspace(*(COARSE if quick else GRID))
    cells = sorted(
        ((a, b) for a in tried for b in tried), key=lambda ab: np.square(residuals(ab)).sum()
    )
    ends = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-8 if quick else 1e-15)
    # Several of the best cells, for the valley is long and flat.
    searches = [
        least_squares(residuals, x, bounds=EXPONENTS, diff_step=1e-6, **ends)
        for x in cells[: 1 if quick else 4]
    ]
    a, b = min(searches, key=lambda found: found.cost).x
    (E, A, B), left = project(np.array([a, b]))
    return Law(float(E), float(A * _middle(N) ** a), float(a), float(B * _middle(D) ** b), b), left


def draws(
    N_R: Sequence[float],
    D_R: Sequence[float],
    L_R: Sequence[float],
    *,
    count: int = DRAWS,
    seed: int = 0,
) -> tuple[list[Law], np.ndarray]:
    """Returns laws of resampled runs and, with each, a noise of one run relative to its loss.

    Residuals are resampled, and not runs: of a dozen runs a drawn dozen lacks a whole size. They
    are centred, and widened for the constants that were fitted to them. Their spread is itself
    known from few runs, so that each draw has one of its own, as Student's t has: with 12 runs the
    intervals are a tenth wider for that.
    """
    law, left_R = fit(N_R, D_R, L_R)
    rng, L = np.random.default_rng(seed), law.loss(np.asarray(N_R), np.asarray(D_R))
    free = len(left_R) - CONSTANTS
    around = math.sqrt(len(left_R) / free) * (left_R - left_R.mean())
    spreads = np.sqrt(free / rng.chisquare(free, count))
    drawn = [L / (1 + spread * rng.choice(around, len(L))) for spread in spreads]
    return [fit(N_R, D_R, x, quick=True)[0] for x in drawn], spreads * around.std()


def interval(
    laws: Sequence[Law], of: Callable[[Law], float], *, noise: Any = 0.0, seed: int = 0
) -> tuple[float, float]:
    """Returns the middle 90 % of a quantity over laws; with ``noise``, a number or one for each,
    that of a new run of it."""
    values = np.array([of(law) for law in laws])
    values = values * (1 + noise * np.random.default_rng(seed).standard_normal(len(values)))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def best_use(law: Law, budget: float, N_S: Sequence[float], flops_S: Sequence[float]) -> Best:
    """Finds the size for which a budget of FLOPs is used best, up to a hundred times beyond those
    that are known.

    Args:
      budget: FLOPs of the whole training.
      N_S: parameters of sizes, and ``flops_S`` what one token costs of each; see
        :func:`flops_per_token`.
    """
    N = np.geomspace(min(N_S) / 100, max(N_S) * 100, 4001)
    D = budget / flops_per_token(N, N_S, flops_S)
    losses = law.loss(N, D)
    i = int(np.argmin(losses))
    inside = bool(min(N_S) <= N[i] <= max(N_S))
    return Best(float(N[i]), float(D[i]), float(losses[i]), inside)


def flops_per_token(N: np.ndarray, N_S: Sequence[float], flops_S: Sequence[float]) -> np.ndarray:
    """Returns what a token costs of N parameters, by sizes whose cost is known: between them along
    straight lines of logarithms, and beyond them along the one that fits all."""
    x, sizes, cost = np.log(N), np.log(N_S), np.log(flops_S)
    slope, start = np.polyfit(sizes, cost, 1) if len(set(sizes)) > 1 else (1.0, cost[0] - sizes[0])
    order = np.argsort(sizes)
    between = np.interp(x, sizes[order], cost[order])
    outside = (x < sizes.min()) | (x > sizes.max())
    return np.exp(np.where(outside, slope * x + start, between))


def _middle(x: np.ndarray) -> float:
    return float(np.exp(np.log(x).mean()))
