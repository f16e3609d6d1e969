"""Balancing biases of routers (Wang et al. 2024, https://arxiv.org/abs/2408.15664), and shares.

A router of the form ``sigmoid`` adds a bias to each expert's score where it chooses, and nowhere
else. The bias has the expert's load for a gradient
(:func:`jaxtrain.ops.routing.balancing_loss`), so that accumulation, pipelines and skipped steps
treat it as any other; here it takes a step of one size towards the experts that are chosen less.
The shares of a step's choices, by which the next step is balanced, have the load for a gradient too
and become what it is of all.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.tree import map_named, named_leaves

# Paths of biases, and of shares [..., E].
BIAS, SHARES = r"(^|/)router/bias$", r"(^|/)experts/shares$"
# Loads are whole numbers before they are divided: what differs by less is rounding of equal ones.
EVEN = 1e-6


def balance_experts(
    tx: optax.GradientTransformationExtraArgs, rate: float
) -> optax.GradientTransformationExtraArgs:
    """Returns ``tx`` with another rule for balancing biases, ``rate * sign(mean load - load)``, and
    for shares, which become those of the load.

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

    def towards(load: jax.Array, shares: jax.Array) -> jax.Array:
        total = load.sum(-1, keepdims=True)
        return jnp.where(total > 0, load / jnp.where(total > 0, total, 1) - shares, 0)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        loads = named_leaves(grads)
        moved = {name: step(x) for name, x in loads.items() if re.search(BIAS, name)}
        if shares := [name for name in loads if re.search(SHARES, name)]:
            now = named_leaves(params)
            moved |= {name: towards(loads[name], now[name]) for name in shares}
        if not moved:
            return tx.update(grads, state, params, **extra)
        held = map_named(lambda name, x: jnp.zeros_like(x) if name in moved else x, grads)
        updates, state = tx.update(held, state, params, **extra)
        return map_named(lambda name, x: moved.get(name, x), updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)
