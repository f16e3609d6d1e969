"""Drift between two samples of documents: the population stability index, and what chance makes.

Chance is a permutation of documents, not of tokens: those of one document are alike, so that two
samples of one distribution are further apart than independent tokens would be.

Shapes: N documents, K bins.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Frequent tokens that have a bin each, bins of numbers, and permutations.
TOKENS, BINS, RESAMPLES = 99, 10, 500
# The part of the permutations that stays below the bound of chance.
LEVEL = 0.99


class Drift(NamedTuple):
    """How far new documents are from old ones.

    Attributes:
      psi: the population stability index: the sum over bins of (q - p) ln(q / p), where p and q are
        the shares of old and new. Below 0.1 is usually called stable, and 0.25 a large shift.
      chance: the index that 99 % of the divisions of the same documents at random stay below.
    """

    psi: float
    chance: float

    def exceeds(self, threshold: float) -> bool:
        """Whether the index is at least a threshold, and more than chance makes."""
        return self.psi >= threshold and self.psi > self.chance


def psi(old_K: np.ndarray, new_K: np.ndarray) -> float:
    """Returns the population stability index of two counts, to each of which half a one is added,
    so that it is finite.

    >>> round(psi(np.array([500, 500]), np.array([800, 200])), 3)
    0.415
    """
    p_K, q_K = ((counts + 0.5) / (counts + 0.5).sum() for counts in (old_K, new_K))
    return float(((q_K - p_K) * np.log(q_K / p_K)).sum())


def of_tokens(old: Sequence[np.ndarray], new: Sequence[np.ndarray], *, seed: int = 0) -> Drift:
    """Returns the drift of the frequencies of tokens, of which the 99 most frequent ones have a bin
    each. Arguments are the tokens of each document."""
    documents = [*old, *new]
    total_V = np.bincount(np.concatenate(documents))
    bin_V = np.full(len(total_V), TOKENS)
    bin_V[np.argsort(-total_V, kind="stable")[:TOKENS]] = np.arange(min(TOKENS, len(total_V)))
    counts_NK = np.stack([np.bincount(bin_V[each], minlength=TOKENS + 1) for each in documents])
    apart = lambda is_new_N: psi(*((s @ counts_NK) for s in (~is_new_N, is_new_N)))  # noqa: E731
    return _tested(apart, len(old), len(new), seed)


def of_numbers(old_N: np.ndarray, new_N: np.ndarray, *, seed: int = 0) -> Drift:
    """Returns the drift of a number of each document, such as its loss, by the deciles of old."""
    all_N = np.concatenate([old_N, new_N])

    def apart(is_new_N: np.ndarray) -> float:
        edges = np.quantile(all_N[~is_new_N], np.arange(1, BINS) / BINS)
        bin_N = np.searchsorted(edges, all_N, "right")
        return psi(*(np.bincount(bin_N[side], minlength=BINS) for side in (~is_new_N, is_new_N)))

    return _tested(apart, len(old_N), len(new_N), seed)


def _tested(apart: Callable[[np.ndarray], float], old: int, new: int, seed: int) -> Drift:
    is_new_N, rng = np.arange(old + new) >= old, np.random.default_rng(seed)
    drawn = [apart(rng.permutation(is_new_N)) for _ in range(RESAMPLES)]
    return Drift(apart(is_new_N), float(np.quantile(drawn, LEVEL)))
