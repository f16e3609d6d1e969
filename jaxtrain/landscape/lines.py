"""The loss along directions through a state.

A direction is a tree like ``{"params": params, "model_state": model_state}``, in which None stands
for what stays as it is.

Shape legend: P points, K directions.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.engines.plain import trainable
from jaxtrain.loss import WeightedLoss
from jaxtrain.optim.masks import Stacked, decay_mask, is_table, stacked_axes
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, map_named, named_leaves, to_accum_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Subspace:
    """A state, which needs no optimizer state, and the K directions in which to leave it."""

    state: TrainState
    directions: tuple[PyTree, ...]

    @property
    def params(self) -> PyTree:
        """The parameters at the centre."""
        return self.state.params


def random_direction(
    state: TrainState, rng: jax.Array, *, stacked: Stacked = (), frozen: Collection[str] = ()
) -> PyTree:
    """Draws a direction in which every filter is as long as the one that it is added to.

    Entries are normal; then each filter is scaled, ``d <- d |theta_f| / |d_f|`` (Li et al. 2018,
    "Visualizing the Loss Landscape of Neural Nets", section 4). Networks that differ in the scale
    of their layers alone have the same landscape then. A filter is what makes one output: a column
    of a kernel ``[..., in, out]``, and a row of a table. Biases and norms stay where they are, as
    in the paper, and so does what does not train.

    Args:
      state: whose parameters, with layers in natural order.
      stacked: which leading axes index layers (:mod:`jaxtrain.optim.masks`).
      frozen: paths of parameters that do not train.

    Returns:
      A direction, in float32 or wider.

    >>> params = {"w": jnp.array([[3.0, 0], [4.0, 0]]), "bias": jnp.ones(2)}
    >>> state = TrainState(0, params, (), None, None, None, 0)
    >>> d = random_direction(state, jax.random.key(0))["params"]
    >>> jnp.linalg.norm(d["w"], axis=0).round(4).tolist(), d["bias"]
    ([5.0, 0.0], None)
    """
    moves = named_leaves(trainable(state.params, frozen)[0])
    names = named_leaves(state.params)
    keys = dict(zip(names, jax.random.split(rng, len(names)), strict=True))

    def draw(name: str, p: jax.Array, decays: bool, layers: int) -> jax.Array | None:
        if not decays or name not in moves:
            return None
        own = (p.ndim - 1,) if is_table(name) else tuple(range(layers, p.ndim - 1))
        norm = lambda x: jnp.sqrt(jnp.square(x).sum(own, keepdims=True))  # noqa: E731
        p = to_accum_dtype(p)
        d = jax.random.normal(keys[name], p.shape, p.dtype)
        return d * (norm(p) / norm(d))

    given = decay_mask(state.params, stacked=stacked), stacked_axes(state.params, stacked)
    return {
        "params": map_named(draw, state.params, *given),
        "model_state": jax.tree.map(lambda _: None, state.model_state),
    }


def direction_to(start: TrainState, end: TrainState) -> PyTree:
    """Returns the direction that leads from one state to another, 1 of it all the way.

    Model state (the statistics of a BatchNorm) goes along; integers stay those of ``start``.
    """

    def difference(a: jax.Array, b: jax.Array) -> jax.Array | None:
        moves = jnp.issubdtype(jnp.result_type(a), jnp.inexact)
        return to_accum_dtype(b) - to_accum_dtype(a) if moves else None

    return jax.tree.map(difference, _moving(start), _moving(end))


def moved(state: TrainState, directions: tuple[PyTree, ...], coordinates_K: Any) -> TrainState:
    """Returns the state moved by so much of each direction."""
    there = _moving(state)
    for direction, much in zip(directions, coordinates_K, strict=True):
        there = jax.tree.map(
            lambda x, d, much=much: (
                x if d is None else (to_accum_dtype(x) + much * d).astype(x.dtype)
            ),
            there,
            direction,
        )
    return dataclasses.replace(state, **there)


def build_losses(
    evaluation: Callable[[TrainState, PyTree], WeightedLoss],
    points_PK: np.ndarray,
    *,
    at_once: int = 1,
) -> Callable[[Subspace, PyTree], WeightedLoss]:
    """Builds ``losses(subspace, batch) -> WeightedLoss`` whose sums are arrays [P].

    Args:
      evaluation: ``(state, batch) -> WeightedLoss``, such as :func:`jaxtrain.build_eval_step`.
      points_PK: coordinates of the points.
      at_once: how many points are evaluated together (``jax.vmap``), which takes as many copies of
        the parameters and activations; the others follow in a loop of the same program.
    """
    points_PK = np.asarray(points_PK, np.float32)

    def losses(around: Subspace, batch: PyTree) -> WeightedLoss:
        return jax.lax.map(
            lambda point_K: evaluation(moved(around.state, around.directions, point_K), batch),
            points_PK,
            batch_size=None if at_once == 1 else min(at_once, len(points_PK)),
        )

    return losses


def barrier(losses_P: np.ndarray, coordinates_P: np.ndarray) -> float:
    """Returns how far the loss on a line rises above the straight one between its ends, at most
    (Frankle et al. 2020, "Linear Mode Connectivity and the Lottery Ticket Hypothesis").

    >>> barrier(np.array([1.0, 3.5, 2.0]), np.array([0.0, 0.5, 1.0]))
    2.0
    """
    straight_P = np.interp(coordinates_P, coordinates_P[[0, -1]], losses_P[[0, -1]])
    return float(np.max(losses_P - straight_P))


def _moving(state: TrainState) -> dict[str, PyTree]:
    return {"params": state.params, "model_state": state.model_state}
