"""Sharpness: the largest eigenvalue of a loss's Hessian, by Lanczos' method.

The Hessian is never formed: what is needed of it are products with vectors, derivatives of the
gradient (Pearlmutter 1994). Vectors lie on the devices as parameters do.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax

from jaxtrain.loss import WeightedLoss
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, combine, named_leaves, partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Curvature:
    """A state, which needs no optimizer state, a vector, and the Hessian's product with it, summed
    over batches: both like the parameters that train, with None in place of the others."""

    state: TrainState
    vector: PyTree
    product: PyTree

    @property
    def params(self) -> PyTree:
        """The parameters at which the Hessian is taken."""
        return self.state.params

    def scaled(self, by: float) -> "Curvature":
        """Returns it with the product times a number."""
        return dataclasses.replace(self, product=optax.tree.scale(by, self.product))


class Eigenvalue(NamedTuple):
    """An eigenvalue, how far it may be off at most, and the products that it took."""

    value: float
    error: float
    products: int


def build_product(
    evaluation: Callable[[TrainState, PyTree], WeightedLoss],
) -> Callable[[Curvature, PyTree], tuple[Curvature, jax.Array]]:
    """Builds ``add(curvature, batch) -> (curvature, weight)``, which adds a batch's product.

    Products are of the loss's sum. Those of several batches, divided by the sum of their weights,
    are of the mean loss over all of them, however many tokens each has.
    """

    def add(at: Curvature, batch: PyTree) -> tuple[Curvature, jax.Array]:
        moves = named_leaves(at.vector)
        moving, rest = partition(lambda name, _: name in moves, at.params)

        def total(moving: PyTree) -> tuple[jax.Array, jax.Array]:
            state = dataclasses.replace(at.state, params=combine(moving, rest))
            loss = evaluation(state, batch)
            return loss.total, loss.weight

        gradient = jax.grad(total, has_aux=True)
        # Backward through the gradient: what has a rule of its own (jax.custom_vjp) mostly calls
        # itself in its forward rule, and has no derivative forward.
        _, pull, weight = jax.vjp(gradient, moving, has_aux=True)
        return dataclasses.replace(at, product=optax.tree.add(at.product, *pull(at.vector))), weight

    return add


def largest_eigenvalue(
    product: Callable[[PyTree], PyTree],
    start: PyTree,
    *,
    iterations: int = 30,
    tolerance: float = 1e-3,
) -> Eigenvalue:
    """Finds the largest eigenvalue of a symmetric operator by Lanczos' method.

    Every new vector is made orthogonal to all before it, twice, so no eigenvalue comes up again by
    rounding. The devices hold as many vectors as there are iterations.

    Args:
      product: takes a tree of float32 arrays to the operator's product with it.
      start: such a tree, at random.
      iterations: products at most.
      tolerance: it ends where the eigenvalue is known to this part of itself.

    Returns:
      The eigenvalue. Its ``error`` is the norm of the residual of its vector: so near lies an
      eigenvalue of the operator. NaN where a product is not finite.

    >>> product = lambda x: jax.numpy.array([5.0, -7.0, 1.0]) * x
    >>> found = largest_eigenvalue(product, jax.numpy.array([1.0, 2.0, 3.0]))
    >>> round(found.value, 4), found.products
    (5.0, 3)
    """
    basis, alphas, betas = [optax.tree.scale(1 / optax.tree.norm(start), start)], [], []
    for number in range(1, iterations + 1):
        w, along = product(basis[-1]), 0.0
        for q in basis * 2:
            w, much = _without(w, q)
            along += float(much) if q is basis[-1] else 0.0
        norm = float(optax.tree.norm(w))
        if not np.isfinite(along + norm):
            return Eigenvalue(np.nan, np.nan, number)
        alphas.append(along)
        values, vectors = np.linalg.eigh(np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1))
        found = Eigenvalue(float(values[-1]), norm * abs(float(vectors[-1, -1])), number)
        # What is left is rounding: the vectors so far span all that the start has a part in.
        whole = norm <= np.finfo(np.float32).eps * np.abs(values).max() * len(basis)
        if found.error <= tolerance * abs(found.value) or whole:
            break
        betas.append(norm)
        basis.append(optax.tree.scale(1 / norm, w))
    return found


@jax.jit
def _without(w: PyTree, q: PyTree) -> tuple[PyTree, jax.Array]:
    much = optax.tree.vdot(q, w)
    return jax.tree.map(lambda a, b: a - much * b, w, q), much
