"""Metrics of scores, and of several labels per row, as SciPy and scikit-learn define them.

Shapes: N rows, K labels.
"""

import numpy as np


def correlations(labels_N: np.ndarray, scores_N: np.ndarray) -> dict[str, float]:
    """The Pearson correlation of scores with labels, and the Spearman one, that of their ranks; 0
    where one side is constant."""
    found, sides_2N = {}, np.array([labels_N, scores_N], np.float64)
    for name, x_2N in (("pearson", sides_2N), ("spearman", np.array([*map(_ranks, sides_2N)]))):
        x_2N = x_2N - x_2N.mean(1, keepdims=True)
        (a, both), (_, b) = x_2N @ x_2N.T
        found[name] = float(both / np.sqrt(a * b)) if a * b else 0.0
    return found


def label_f1(right_K: np.ndarray, told_K: np.ndarray, said_K: np.ndarray) -> dict[str, float]:
    """F1 of all labels counted together, and the mean of each one's, 0 where no row has it or is
    said to: of how many rows, or what share, have each label, are said to have it, and both
    (``right_K``)."""
    hits_K, all_K = 2 * np.float64(right_K), np.float64(told_K) + said_K
    f1 = lambda hits, of: float(np.mean(hits / np.where(of > 0, of, 1)))  # noqa: E731
    return {"micro_f1": f1(hits_K.sum(), all_K.sum()), "macro_f1": f1(hits_K, all_K)}


def _ranks(x_N: np.ndarray) -> np.ndarray:
    """The rank of each entry, equal ones at the mean of theirs."""
    _, place_N, counts = np.unique(x_N, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place_N]
