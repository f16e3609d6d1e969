"""Balancing biases of routers (Wang et al. 2024, https://arxiv.org/abs/2408.15664).

A router of the form ``sigmoid`` adds a bias to each expert's score where it chooses, and nowhere
else. The bias has the expert's load for a gradient
(:func:`jaxtrain.ops.routing.balancing_loss`), so that accumulation, pipelines and skipped steps
treat it as any other; here it takes a step of one size towards the experts that are chosen less.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.tree import map_named, named_leaves

# Paths of biases [..., E].
BIAS = r"(^|/)router/bias$"
# Loads are whole numbers before they are divided: what differs by less is rounding of equal ones.
EVEN = 1e-6


def balance_experts(
    tx: optax.GradientTransformationExtraArgs, rate: float
) -> optax.GradientTransformationExtraArgs:
    """Returns ``tx`` with another rule for balancing biases: ``rate * sign(mean load - load)``.

    To ``tx`` their gradients are 0: they count in no clipped norm and have no moments.

    >>> params = {"router": {"bias": jnp.zeros(3)}}
    >>> tx = balance_experts(optax.with_extra_args_support(optax.sgd(1.0)), 0.5)
    >>> load = {"router": {"bias": jnp.array([4.0, 2.0, 3.0])}}
    >>> tx.update(load, tx.init(params), params)[0]["router"]["bias"].tolist()
    [-0.5, 0.5, 0.0]
    """

    def step(load: jax.Array) -> jax.Array:
        below = load.mean(-1, keepdims=True) - load
        uneven = jnp.abs(below) > EVEN * load.mean(-1, keepdims=True)
        return jnp.where(uneven, rate * jnp.sign(below), 0).astype(load.dtype)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        biases = {name: x for name, x in named_leaves(grads).items() if re.search(BIAS, name)}
        if not biases:
            return tx.update(grads, state, params, **extra)
        held = map_named(lambda name, x: jnp.zeros_like(x) if name in biases else x, grads)
        updates, state = tx.update(held, state, params, **extra)
        moved = lambda name, x: step(biases[name]) if name in biases else x  # noqa: E731
        return map_named(moved, updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)
