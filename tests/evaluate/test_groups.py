"""Metrics by group against scikit-learn's, and their intervals against the normal law."""

import numpy as np
import pytest

from jaxtrain.evaluate.groups import by_group, table_lines


def test_groups_have_the_metrics_of_their_rows():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 3, 600), rng.choice(3, 600, p=(0.7, 0.25, 0.05))
    wrong = rng.random(600) < np.array([0.1, 0.3, 0.6])[groups]
    guesses = np.where(wrong, rng.integers(0, 3, 600), labels)
    found = by_group(labels, guesses, groups, ("a", "b", "c", "none"))
    assert set(found) == {"a", "b", "c", "gap"}
    scores = []
    for number, name in enumerate("abc"):
        mine = groups == number
        assert found[name]["rows"] == mine.sum()
        accuracy = metrics.accuracy_score(labels[mine], guesses[mine])
        f1 = metrics.f1_score(labels[mine], guesses[mine], average="macro")
        assert found[name]["accuracy"][0] == pytest.approx(accuracy)
        assert found[name]["f1"][0] == pytest.approx(f1)
        half = 1.96 * np.sqrt(accuracy * (1 - accuracy) / mine.sum())
        _, low, high = found[name]["accuracy"]
        assert (high - low) / 2 == pytest.approx(half, rel=0.15)
        scores.append(accuracy)
    value, low, high = found["gap"]["accuracy"]
    assert value == pytest.approx(max(scores) - min(scores))
    assert low < value < high
    assert len(table_lines(found)) == 5
