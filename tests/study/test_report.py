"""The report of a study, and the numbers in it against other ways to them."""

import math
import pathlib

import numpy as np
import pytest
from scipy import integrate, special

optuna = pytest.importorskip("optuna")
from jaxtrain.study import report  # noqa: E402
from jaxtrain.study.workers import Runs  # noqa: E402


def trials_of(count):
    rng, space = np.random.default_rng(0), {}
    for flag in ("rate", "layers", "none"):
        space[flag] = optuna.distributions.FloatDistribution(0.0, 1.0)
    found = []
    for _ in range(count):
        params = dict(zip(space, rng.uniform(size=3), strict=True))
        value = 3 * (params["rate"] - 0.5) ** 2 + 0.2 * params["layers"]
        found.append(optuna.trial.create_trial(params=params, distributions=space, value=value))
    for number, trial in enumerate(found):
        trial.number = number
    return found


def test_importance_is_of_what_matters():
    found = report.importance(trials_of(60), "min")
    assert sum(found.values()) == pytest.approx(1)
    assert list(found) == ["rate", "layers", "none"]
    assert found["rate"] > 0.7
    assert report.importance(trials_of(1), "min") == {}


def test_p_values_are_welchs():
    ours, theirs = [2.30, 2.34, 2.31], [2.41, 2.36, 2.45, 2.37]
    parts = [np.var(each, ddof=1) / len(each) for each in (ours, theirs)]
    t = abs(np.mean(ours) - np.mean(theirs)) / math.sqrt(sum(parts))
    v = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    norm = special.gamma((v + 1) / 2) / math.sqrt(v * math.pi) / special.gamma(v / 2)
    density = lambda x: norm * (1 + x * x / v) ** (-(v + 1) / 2)  # noqa: E731
    wanted = 2 * integrate.quad(density, t, math.inf)[0]
    assert report.p_value(ours, theirs) == pytest.approx(wanted, rel=1e-6)
    assert report.p_value([1.0], theirs) is None
    assert report.p_value([1.0, math.inf], theirs) is None


@pytest.mark.parametrize("count", [0, 1, 12])
def test_a_page_is_of_any_number_of_trials(count):
    words = lambda values: [f"--{name}={value}" for name, value in values.items()]  # noqa: E731
    line = ["python3", "-m", "m<b>"]
    runs = Runs(pathlib.Path("/nowhere"), line, words, "eval/loss", "max", False, (0,))
    trials = trials_of(count)
    for trial in trials[3:5]:
        trial.state = optuna.trial.TrialState.PRUNED
    if count > 5:
        trials[5].value = -math.inf  # it diverged
    page = report.make_page("a<b", trials, runs)
    assert page.count("<b") == page.count("<body>") == 1
    assert page.count("<tr>") == 1 + count
    best = report.best_of(trials, "max")
    assert (best is None) == (count == 0)
    if count:
        done = [t for t in trials if t.state.name == "COMPLETE"]
        assert best.value == max(t.value for t in done)
        assert report.command_of(runs, best)[:3] == ["python", "-m", "m<b>"]
