"""Stages whose rule depends on a whole layer, made to act per layer on stacked parameters.

A trust ratio, a block norm or an orthogonalisation of a stack of L layers taken as one leaf is not
that of the L layers: training would depend on whether layers are stacked for ``lax.scan``. Here
every such rule sees one layer at a time. ``stacked`` is as in ``masks``.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.masks import Stacked, layer_rows, stacked_axes
from jaxtrain.optim.numerics import norm
from jaxtrain.tree import LayerGroup


def per_layer(
    tx: optax.GradientTransformation, stacked: Stacked
) -> optax.GradientTransformationExtraArgs:
    """Maps ``tx``, which treats each leaf alone, over the stacked layers, each a parameter of its
    own.

    Parameters are grouped by the sizes of their stacked axes and ``tx`` is vmapped over those of
    each group; the rest go through it as they are. The state of parameter ``a/b`` keeps a path that
    ends in ``a/b`` and gains the stacked axes in front, as do counters.

    >>> tx = per_layer(optax.scale_by_trust_ratio(), (r"^blocks/",))
    >>> params = {"blocks": {"w": jnp.array([[3.0, 4.0], [0.6, 0.8]])}}
    >>> updates, _ = tx.update({"blocks": {"w": jnp.eye(2)}}, tx.init(params), params)
    >>> updates["blocks"]["w"].tolist()
    [[5.0, 0.0], [0.0, 1.0]]
    """
    tx = optax.with_extra_args_support(tx)
    if not stacked:
        return tx

    def grouped(params):
        axes = stacked_axes(params, stacked)
        labels = _labels(axes, layer_rows(params, stacked), params)
        groups = dict(zip(jax.tree.leaves(labels), jax.tree.leaves(axes), strict=True))
        return optax.partition(
            {name: _vmapped(tx, groups[name]) for name in sorted(groups)}, labels
        )

    def init(params):
        return grouped(params).init(params)

    def update(updates, state, params=None, **extra):
        return grouped(updates).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def add_decayed_weights(strengths: Any) -> optax.GradientTransformation:
    """Adds to each update the parameter times its own strength: a tree of numbers, or of arrays
    that broadcast against the parameters; False for no decay."""

    def leaf(_, strength, u, x):
        return u if strength is False else u + strength * x

    return _stateless(leaf, (), strengths)


def scale_by_lamb_trust_ratio(trust: Any, *, stacked: Stacked = ()) -> optax.GradientTransformation:
    """Scales each layer's update ``u`` by ``|x| / |u|``, 1 where either norm is 0 or ``trust``
    False.

    The layerwise step of LAMB (You et al. 2019, https://arxiv.org/abs/1904.00962, with the identity
    for its phi); ``u`` already holds the decayed weights.
    """

    def leaf(n, scaled, u, x):
        if not scaled:
            return u
        return u * _ratio_or_one(_layer_norm(x, n), _layer_norm(u, n))

    return _stateless(leaf, stacked, trust)


def scale_by_lars_trust_ratio(
    trust: Any, strengths: Any, *, trust_coefficient: float | jax.Array, stacked: Stacked = ()
) -> optax.GradientTransformation:
    """Adds decayed weights and scales each layer by the local learning rate of LARS.

    ``r * (g + b * w)`` with ``r = trust_coefficient * |w| / (|g| + b * |w|)``, 1 where numerator or
    denominator is 0 (You et al. 2017, https://arxiv.org/abs/1708.03888, algorithm 1), and where
    ``trust`` is False. ``strengths`` has b of each parameter; False for none. ``optax.lars``
    divides by ``|g + b * w|`` instead, which is the same only without weight decay.
    """

    def leaf(n, scaled, strength, g, w):
        decayed = g if strength is False else g + strength * w
        if not scaled:
            return decayed
        w_norm, bottom = _layer_norm(w, n), _layer_norm(g, n)
        if strength is not False:
            bottom = bottom + strength * w_norm
        return decayed * _ratio_or_one(trust_coefficient * w_norm, bottom)

    return _stateless(leaf, stacked, trust, strengths)


def scale_by_muon(
    hidden: Any,
    *,
    momentum: float | jax.Array,
    nesterov: bool,
    ns_steps: int,
    muon_scale: str,
    moment_dtype: Any = None,
    stacked: Stacked = (),
) -> optax.GradientTransformationExtraArgs:
    """Orthogonalises the momentum of each layer's matrix and scales it by the matrix's shape.

    The last axis is the output and the others (beside the stacked ones) together the input, as
    Flax's Dense and Conv have it. ``muon_scale="rms"`` multiplies by ``0.2 * sqrt(max(in, out))``,
    so that the update has the size of AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982);
    ``"width"`` by ``sqrt(max(1, out / in))`` (Jordan 2024,
    https://kellerjordan.github.io/posts/muon).

    Where ``hidden``, a tree of bools that are True only at rank 2 or more per layer, is False, the
    update passes untouched. The other arguments are options of the rule.
    """

    def dimensions_of(n, u):
        return optax.contrib.MuonDimensionNumbers(tuple(range(n, u.ndim - 1)), u.ndim - 1)

    def dimensions(updates):
        return jax.tree.map(dimensions_of, stacked_axes(updates, stacked), updates)

    def shape_factor(n, u):
        fan_in, fan_out = math.prod(u.shape[n:-1]), u.shape[-1]
        if muon_scale == "rms":
            return u * (0.2 * math.sqrt(max(fan_in, fan_out)))
        return u * math.sqrt(max(1.0, fan_out / fan_in))

    orthogonal = optax.contrib.scale_by_muon(
        beta=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        mu_dtype=moment_dtype,
        weight_dimension_numbers=dimensions,
    )
    scale = _stateless(lambda n, u, _: shape_factor(n, u), stacked)
    return optax.masked(optax.chain(orthogonal, scale), hidden)


def _labels(axes: Any, rows: Any, params: Any) -> Any:
    """Names the group of each parameter, by its number of layers.

    That number is the same whether a pipeline keeps them as [L, ...] or as [V, L / V, ...], and
    beside padding, so a checkpoint of one goes into the other. Only where a model has several forms
    of one number do the names say more.
    """

    def sizes(n: int, places: Any, p: Any) -> tuple[tuple[int, ...], int]:
        return tuple(p.shape[:n]), len(places)

    trees = axes, rows, params
    stacks = {sizes(*each) for each in zip(*map(jax.tree.leaves, trees), strict=True) if each[0]}
    clear = len({count for _, count in stacks}) == len(stacks)

    def label(n: int, places: Any, p: Any) -> str:
        if n == 0:
            return "single"
        stack, count = sizes(n, places, p)
        return LayerGroup(count, () if clear else stack)

    return jax.tree.map(label, *trees)


def _vmapped(tx: optax.GradientTransformationExtraArgs, axes: int):
    if axes == 0:
        return tx
    inner = _vmapped(tx, axes - 1)

    def update(updates, state, params=None, **extra):
        # Extra arguments belong to the call, not to a layer, and so are not mapped.
        one = lambda u, s, p: inner.update(u, s, p, **extra)  # noqa: E731
        return jax.vmap(one)(updates, state, params)

    return optax.GradientTransformationExtraArgs(jax.vmap(inner.init), update)


def _stateless(leaf: Any, stacked: Stacked, *masks: Any) -> optax.GradientTransformation:
    """A stage that maps ``leaf(stacked axes, *masks, update, parameter)`` over the tree."""

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("this optimizer needs params: call update(grads, state, params)")
        axes = stacked_axes(updates, stacked)
        return jax.tree.map(leaf, axes, *masks, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _layer_norm(x: jax.Array, axes: int) -> jax.Array:
    """Euclidean norm over all but the first ``axes`` axes, which stay, with a gradient at 0."""
    return norm([x], axis=tuple(range(axes, x.ndim)), keepdims=True)


def _ratio_or_one(top: jax.Array, bottom: jax.Array) -> jax.Array:
    fine = (top > 0) & (bottom > 0)
    return jnp.where(fine, top / jnp.where(fine, bottom, 1), 1)
