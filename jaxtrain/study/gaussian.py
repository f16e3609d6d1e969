"""Bayesian search by Gaussian processes: an Optuna sampler on scikit-learn's regressor.

Optuna's own needs PyTorch. Matérn kernels of smoothness 5/2 have a length for each flag; a value is
chosen by its expected improvement (Jones et al. 1998) or its lower confidence bound (Srinivas et
al. 2010, https://arxiv.org/abs/0912.3995).

Shapes: N trials, C candidates, F features.
"""

import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
from scipy.stats import norm

from jaxtrain.host import extras

# Trials that are drawn at random before the first fit; candidates of an acquisition, at random and
# near the best trials.
FIRST, DRAWN, NEAR = 8, 2048, 256
# What a confidence bound is from the mean, in standard deviations.
BOUND = 2.0

# Optuna's distributions by flag.
Distributions = Mapping[str, Any]


def make_sampler(optuna: ModuleType, acquisition: Literal["ei", "ucb"], *, seed: int) -> Any:
    """Returns an Optuna sampler that chooses all values of a trial together, by a Gaussian process
    of those that have ended.

    A trial that still runs counts as what the process expects of it, so that workers spread.

    Args:
      acquisition: ``"ei"``, the expected improvement, or ``"ucb"``, the confidence bound.
      seed: of what is drawn.

    Raises:
      ImportError: scikit-learn is not installed.
    """
    extras.load("the samplers gp and gp-ucb need scikit-learn", "study", "sklearn")
    rng, independent = np.random.default_rng(seed), optuna.samplers.RandomSampler(seed=seed)

    class GaussianProcessSampler(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            del trial
            there = study.get_trials(deepcopy=False)
            space = optuna.search_space.intersection_search_space(there)
            return {name: kind for name, kind in space.items() if not kind.single()}

        def sample_independent(self, study: Any, trial: Any, name: str, kind: Any) -> Any:
            return independent.sample_independent(study, trial, name, kind)

        def sample_relative(self, study: Any, trial: Any, space: Distributions) -> dict[str, Any]:
            others = [x for x in study.get_trials(deepcopy=False) if x.number != trial.number]
            others = [x for x in others if space.keys() <= x.params.keys()]
            done = [x for x in others if x.state.name == "COMPLETE"]
            if not space or np.isfinite([x.value for x in done]).sum() < FIRST:
                return {}
            sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
            losses = [sign * x.value for x in done]
            running = [x.params for x in others if x.state.name == "RUNNING"]
            return choose([x.params for x in done], losses, running, space, acquisition, rng)

    return GaussianProcessSampler()


def choose(
    done: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    running: Sequence[Mapping[str, Any]],
    space: Distributions,
    acquisition: str,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Returns the values that are worth a trial most, by the losses of others."""
    x_NF, y_N = _encode(done, space), np.array(losses)
    # Losses far above the rest, and runs that diverge, would stretch all others.
    low, high = np.quantile(y_N[np.isfinite(y_N)], [0, 0.75])
    y_N = np.minimum(y_N, high + 3 * (high - low))
    process = _fit(x_NF, y_N, int(rng.integers(2**31)))
    candidates = _candidates([done[i] for i in np.argsort(y_N)[:4]], space, rng)
    x_CF = _encode(candidates, space)
    if running:
        there = _encode(running, space)
        expected = np.concatenate([y_N, process.predict(there)])
        process = _fit(np.concatenate([x_NF, there]), expected, 0, kernel=process.kernel_)
    mean_C, spread_C = process.predict(x_CF, return_std=True)
    if acquisition == "ucb":
        score_C = BOUND * spread_C - mean_C
    else:
        z_C = (y_N.min() - mean_C) / np.maximum(spread_C, 1e-12)
        score_C = spread_C * (z_C * norm.cdf(z_C) + norm.pdf(z_C))
    return candidates[int(np.argmax(score_C))]


def _candidates(
    best: Sequence[Mapping[str, Any]], space: Distributions, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Values at random, and near the best trials in steps of several sizes."""
    found = [{name: _decode(rng.random(), d) for name, d in space.items()} for _ in range(DRAWN)]
    for given in best:
        for step in rng.choice([0.2, 0.05, 0.01], NEAR):
            moved = {}
            for name, kind in space.items():
                if hasattr(kind, "choices"):
                    other = _decode(rng.random(), kind)
                    moved[name] = other if rng.random() < step else given[name]
                else:
                    at = _place(given[name], kind) + step * rng.standard_normal()
                    moved[name] = _decode(float(np.clip(at, 0, 1)), kind)
            found.append(moved)
    return found


def _fit(x_NF: np.ndarray, y_N: np.ndarray, seed: int, *, kernel: Any = None) -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    again = kernel is not None
    if not again:
        lengths = Matern(np.full(x_NF.shape[1], 0.5), (0.05, 20.0), nu=2.5)
        kernel = ConstantKernel(1.0, (0.01, 100.0)) * lengths + WhiteKernel(1e-3, (1e-8, 1.0))
    process = GaussianProcessRegressor(
        kernel,
        normalize_y=True,
        optimizer=None if again else "fmin_l_bfgs_b",
        n_restarts_optimizer=0 if again else 1,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengths that end at their bounds
        return process.fit(x_NF, y_N)


def _encode(rows: Sequence[Mapping[str, Any]], space: Distributions) -> np.ndarray:
    """Features [N, F] of values: numbers at their place in their range, choices one-hot."""

    def features(kind: Any, value: Any) -> list[float]:
        if hasattr(kind, "choices"):
            return [float(value == choice) for choice in kind.choices]
        return [_place(value, kind)]

    return np.array([[x for n, d in space.items() for x in features(d, r[n])] for r in rows])


def _place(value: float, kind: Any) -> float:
    """Where a number lies in its range, 0 to 1."""
    to = np.log if kind.log else float
    return float((to(value) - to(kind.low)) / (to(kind.high) - to(kind.low)))


def _decode(place: float, kind: Any) -> Any:
    """The value at a place, 0 to 1."""
    if hasattr(kind, "choices"):
        return kind.choices[min(int(place * len(kind.choices)), len(kind.choices) - 1)]
    to, back = (np.log, np.exp) if kind.log else (float, float)
    value = float(back(to(kind.low) + place * (to(kind.high) - to(kind.low))))
    if kind.step is not None and not kind.log:
        value = kind.low + round((value - kind.low) / kind.step) * kind.step
    value = min(max(value, kind.low), kind.high)
    return round(value) if isinstance(kind.low, int) else value
