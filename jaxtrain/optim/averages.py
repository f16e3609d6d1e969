"""The exponential moving average of parameters: kept by the optimizer, read by evaluation."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.numerics import check_number
from jaxtrain.optim.reports import nodes
from jaxtrain.sharding.offload import on_devices
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, map_named, named_leaves, to_accum_dtype


class AverageState(NamedTuple):
    """State of ``ema``.

    Attributes:
      inner_state: of the optimizer inside.
      ema: the average, like the parameters, float32 or wider.
      count: int32 scalar, updates so far.
    """

    inner_state: Any
    ema: Any
    count: jax.Array


def ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Runs ``tx`` and averages the parameters that its updates make.

    After n updates the average is ``sum_i decay^(n-i) p_i / sum_i decay^(n-i)`` over the parameters
    ``p_1 ... p_n`` after each: the initial ones are not in it (Kingma & Ba 2015, section 7.2).
    :func:`averaged` reads it. It belongs around the rule and inside of what leaves updates out
    (:func:`jaxtrain.optim.accumulate`, ``skip_spikes``), as ``make_optimizer(ema=)`` puts it: then
    each update that is made counts once, and one that is left out does not.

    Args:
      tx: the optimizer.
      decay: above 0 and below 1, such as 0.999.

    Returns:
      The transformation; call ``update(grads, state, params)``, with the parameters.

    Raises:
      ValueError: for a decay out of range, and for an update without parameters.

    >>> tx = ema(optax.sgd(1.0), 0.5)
    >>> w = jnp.float32(3)
    >>> state = tx.init(w)
    >>> for _ in range(2):
    ...     updates, state = tx.update(jnp.float32(1), state, w)
    ...     w = w + updates
    >>> round(float(state.ema), 4)  # (0.5 * 2 + 1) / 1.5
    1.3333
    """
    check_number("ema", decay, low=0.0, high=1.0, open_low=True)
    log = np.log(decay)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        return AverageState(tx.init(params), to_accum_dtype(params), jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("ema averages the parameters: update(grads, state, params)")
        updates, inner = tx.update(updates, state.inner_state, params, **extra)
        count = optax.safe_increment(state.count)
        rate = np.expm1(log) / jnp.expm1(log * count.astype(jnp.float32))
        made = to_accum_dtype(optax.apply_updates(params, updates))
        moved = jax.tree.map(lambda old, new: old + rate * (new - old), state.ema, made)
        return updates, AverageState(inner, moved, count)

    return optax.GradientTransformationExtraArgs(init, update)


def keeps_averages(opt_state: PyTree) -> bool:
    """Returns whether :func:`ema` is in use."""
    return bool(nodes(opt_state, _averages))


def averaged(state: TrainState) -> TrainState:
    """Returns the state, which may be traced, with the averages that :func:`ema` keeps in place of
    its parameters.

    A parameter without one (a frozen one), and a state without any, stays as it is. The averages
    come in the dtypes of the parameters, and lie as the optimizer state does.
    """
    kept = nodes(state.opt_state, _averages)
    average = {name: x for node in kept for name, x in named_leaves(on_devices(node.ema)).items()}
    params = map_named(
        lambda name, p: average[name].astype(p.dtype) if name in average else p, state.params
    )
    return dataclasses.replace(state, params=params)


def _averages(node: Any) -> bool:
    return isinstance(node, AverageState)
