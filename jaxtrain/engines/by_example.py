"""Gradients of single examples, without the products that are slow or needless for one of them.

Under ``jax.vmap`` the gradient of a convolution's kernel is a grouped convolution, which a CPU does
slowly, and that of a kernel that multiplies one vector an outer product, as large as the kernel.
Here the first is a product of the input's patches and the output's gradient, and the second stays
the two vectors: its norm is the product of theirs (Goodfellow 2015,
https://arxiv.org/abs/1510.01799), and a sum over examples is one matrix product.

Shapes: K inputs and F outputs of a kernel, T places that it is applied to, N examples.
"""

import collections
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun

from jaxtrain.loss import CONSTANT_WEIGHT
from jaxtrain.tree import PyTree


class Outer(NamedTuple):
    """The gradient of a kernel [K, F] as the two vectors of which it is the outer product; with a
    leading axis of examples after ``jax.vmap``."""

    x_K: jax.Array
    d_F: jax.Array


def is_outer(leaf: Any) -> bool:
    """Whether a leaf is an :class:`Outer`."""
    return isinstance(leaf, Outer)


def squared_norm(grad: jax.Array | Outer) -> jax.Array:
    """Returns the sum of squares of the gradient of one example."""
    if not is_outer(grad):
        return jnp.vdot(grad, grad)
    # The squares of one vector may underflow where the gradient is large: no clip would see it.
    largest = jnp.abs(grad.x_K).max()
    x, d = grad.x_K / jnp.where(largest > 0, largest, 1.0), largest * grad.d_F
    return jnp.vdot(x, x) * jnp.vdot(d, d)


def weighted_sum(grad: jax.Array | Outer, factor_N: jax.Array) -> jax.Array:
    """Returns the sum over examples of a leaf's gradients times a factor of each."""
    # As products: XLA's CPU compiler fuses a reduction with the product before it, which is slow.
    how = {"precision": jax.lax.Precision.HIGHEST}
    if is_outer(grad):
        return jnp.einsum("nk,nf->kf", factor_N[:, None] * grad.x_K, grad.d_F, **how)
    return jnp.tensordot(factor_N, grad, 1, **how)


def gradients(loss: Callable[..., tuple[jax.Array, Any]], params: PyTree, *args: PyTree) -> Any:
    """Returns what ``jax.grad(loss, has_aux=True)`` does, with an :class:`Outer` for some leaves.

    Those are the kernels whose one use is a product with one vector. Kernels whose one use is a
    convolution have their gradients by patches. Uses in loops and rematerialised parts are left to
    JAX, as all others are.

    Args:
      loss: ``(params, *args) -> (loss, aux)`` of one example.
      params: arrays that train.
      *args: what else the loss takes.
    """
    (flat, tree), given = jax.tree.flatten(params), jax.tree.leaves(args)
    closed, shapes = jax.make_jaxpr(loss, return_shape=True)(params, *args)
    sites = _sites(closed.jaxpr, len(flat))
    if not sites:
        return jax.grad(loss, has_aux=True)(params, *args)

    def apart(others: dict[int, jax.Array], zeros: dict[Any, jax.Array]) -> Any:
        leaves = [others.get(i, jax.lax.stop_gradient(x)) for i, x in enumerate(flat)]
        variables, inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars], {}
        known = dict(zip(variables, [*closed.consts, *leaves, *given], strict=True))
        read = lambda v: v.val if isinstance(v, Literal) else known[v]  # noqa: E731
        for eqn in closed.jaxpr.eqns:
            taken = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
            made = [v for v in eqn.outvars if not isinstance(v, DropVar)]
            one = closed.jaxpr.replace(constvars=[], invars=taken, outvars=made, eqns=[eqn])
            known |= zip(made, jaxpr_as_fun(ClosedJaxpr(one, []))(*map(read, taken)), strict=True)
            if (leaf := sites.get(eqn.outvars[0], (None,))[0]) is not None:
                inputs[leaf] = read(eqn.invars[0])
                known[eqn.outvars[0]] += zeros[leaf]  # whose gradient is the output's
        outs = jax.tree.unflatten(jax.tree.structure(shapes), map(read, closed.jaxpr.outvars))
        return outs[0], (outs[1], inputs)

    zeros = {leaf: jnp.zeros(v.aval.shape, v.aval.dtype) for v, (leaf, _) in sites.items()}
    others = {i: x for i, x in enumerate(flat) if i not in zeros}
    (found, outputs), (aux, inputs) = jax.grad(apart, (0, 1), has_aux=True)(others, zeros)
    for leaf, eqn in sites.values():
        x, d = inputs[leaf], outputs[leaf]
        is_product = eqn.primitive.name == "dot_general"
        found[leaf] = Outer(x.reshape(-1), d.reshape(-1)) if is_product else _by_patches(eqn, x, d)
    return jax.tree.unflatten(tree, [found[i] for i in range(len(flat))]), aux


def _sites(jaxpr: Any, count: int) -> dict[Any, tuple[int, Any]]:
    """Finds the one use of each of the first ``count`` inputs, where it is one of those above;
    returns the input and the equation by the equation's output."""
    uses = collections.Counter(v for v in jaxpr.outvars if not isinstance(v, Literal))
    used = (v for eqn in jaxpr.eqns for v in eqn.invars[: 1 if _keeps_a_weight(eqn) else None])
    uses.update(v for v in used if not isinstance(v, Literal))
    kernels, found = {v: i for i, v in enumerate(jaxpr.invars[:count])}, {}
    for eqn in jaxpr.eqns:
        once = [v for v in eqn.invars if not isinstance(v, Literal) and uses[v] == 1]
        held = [v for v in once if v in kernels]
        if eqn.primitive.name == "convert_element_type" and held:
            kernels[eqn.outvars[0]] = kernels[held[0]]
        elif held and held == eqn.invars[1:2] and _is_simple(eqn):
            found[eqn.outvars[0]] = kernels[held[0]], eqn
    return found


def _keeps_a_weight(eqn: Any) -> bool:
    """Whether an equation is that of :func:`jaxtrain.loss.of_constant_weight`, which is given all
    parameters and uses none of them."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    inside = eqn.params["call_jaxpr"].jaxpr.eqns
    return [each.params.get("name") for each in inside] == [CONSTANT_WEIGHT]


def _is_simple(eqn: Any) -> bool:
    x, kernel = (v.aval for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        is_vector = kernel.ndim == 2 and x.size == kernel.shape[0]
        return is_vector and eqn.params["dimension_numbers"] == numbers
    if eqn.primitive.name != "conv_general_dilated":
        return False
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    images = x.shape[eqn.params["dimension_numbers"].lhs_spec[0]]  # several: frames of an example
    return groups == images == 1 and set(eqn.params["lhs_dilation"]) <= {1}


def _by_patches(eqn: Any, x: jax.Array, d: jax.Array) -> jax.Array:
    """The gradient of a convolution's kernel, in its layout, of one example."""
    lhs, rhs, out = eqn.params["dimension_numbers"]
    x, d = x.transpose(lhs), d.transpose(out)  # [1, channels, *places]
    pads = [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in eqn.params["padding"]]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), pads)
    taps, patches = [eqn.invars[1].aval.shape[axis] for axis in rhs[2:]], []
    strides = eqn.params["window_strides"]
    for tap in itertools.product(*map(range, taps)):
        first = [t * step for t, step in zip(tap, eqn.params["rhs_dilation"], strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, d.shape[2:], strides, strict=True)]
        part = jax.lax.slice(x, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *strides))
        patches.append(part.reshape(x.shape[1], -1))
    d_FT, x_KT = d.reshape(d.shape[1], -1), jnp.concatenate(patches)
    grad = jnp.einsum("kt,ft->kf", x_KT, d_FT).reshape(*taps, x.shape[1], d.shape[1])
    axes = dict(zip(rhs, (grad.ndim - 1, grad.ndim - 2, *range(len(taps))), strict=True))
    return grad.transpose([axes[i] for i in range(grad.ndim)])
