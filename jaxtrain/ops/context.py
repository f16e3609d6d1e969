"""Attention where mesh axes split the positions of rows (``context``), around any kernel.

Queries, keys and values come and go split by position. Where the axes divide the heads, positions
are exchanged for heads, so that each device has whole rows of its own heads (Jacobs et al. 2023,
Ulysses, https://arxiv.org/abs/2309.14509): an all-to-all before and one after, and the mask stays
what it is. Elsewhere queries stay where they are, and each device gathers all keys and values.

Shapes: B batch, C devices along the axes, T queries, S keys, H query heads, G key and value heads,
K features, P = T / C positions.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.decisions import Kind, Positions, Why
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.per_device import repeated, split_over
from jaxtrain.sharding.placement import constrain, report_finding

Kernel = Callable[[jax.Array, jax.Array, jax.Array, Mask], jax.Array]


def around(
    kernel: Kernel,
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: Mask,
    *,
    draws: bool,
) -> jax.Array:
    """Returns ``kernel(q_BTHK, k_BSGK, v_BSGK, mask)``, split by position where the inputs are.

    Raises:
      ValueError: keys are gathered, and the mask has a bias or the kernel ``draws`` numbers.
    """
    (_, T, H, _), S = q_BTHK.shape, k_BSGK.shape[1]
    (axes, parts), (over, of_heads) = split_over("sequence"), split_over("attend_heads")
    if parts == 1 or T % parts or S % parts:
        return kernel(q_BTHK, k_BSGK, v_BSGK, mask)
    facts = {"heads": H, "parts": of_heads, "axes": " x ".join(over)}
    if H % of_heads == 0:
        report_finding(Kind.CONTEXT, Positions("heads", Why.HEADS_DIVIDE(**facts)))
        return _by_heads(kernel, of_heads, q_BTHK, k_BSGK, v_BSGK, mask)
    if mask.bias is not None or draws:
        what = "dropout on its weights" if draws else "a bias"
        raise ValueError(
            f"{H} query heads are not divisible by mesh axes {facts['axes']} of size {of_heads}, "
            f"and attention with {what} cannot gather keys instead: use a divisor of {H}"
        )
    report_finding(Kind.CONTEXT, Positions("keys", Why.FEW_HEADS(**facts)))
    return _by_keys(kernel, axes, parts, q_BTHK, k_BSGK, v_BSGK, mask)


def _by_heads(kernel: Kernel, parts: int, q_BTHK, k_BSGK, v_BSGK, mask: Mask) -> jax.Array:
    def exchange(x: jax.Array, heads: str) -> jax.Array:
        # Pinned on both sides, so that what stands before (and its gradient) is computed where
        # positions are split: else angles are gathered for it, and heads split to be repeated.
        x = repeated(constrain(x, "batch", "sequence", heads, None), parts)
        x = constrain(x, "batch", "sequence", "heads", None)
        return constrain(x, "batch", None, "attend_heads", None)

    q_BTHK = exchange(q_BTHK, "heads")
    k_BSGK, v_BSGK = (exchange(x, "kv_heads") for x in (k_BSGK, v_BSGK))
    axes = {"segments": "batch", "key_segments": "batch"}
    axes |= dict.fromkeys(("bias", "sinks"), "attend_heads")
    parts_of_mask = ((name, getattr(mask, name)) for name in axes)
    whole = {
        n: constrain(x, axes[n], *[None] * (x.ndim - 1)) for n, x in parts_of_mask if x is not None
    }
    out_BTHK = kernel(q_BTHK, k_BSGK, v_BSGK, dataclasses.replace(mask, **whole))
    out_BTHK = constrain(out_BTHK, "batch", None, "attend_heads", None)
    return constrain(out_BTHK, "batch", "sequence", "heads", None)


def _by_keys(kernel: Kernel, axes, parts: int, q_BTHK, k_BSGK, v_BSGK, mask: Mask) -> jax.Array:
    def cut(x_BT: jax.Array, *rest: str | None) -> jax.Array:
        B, T = x_BT.shape[:2]
        x_CBP = jnp.moveaxis(x_BT.reshape(B, parts, T // parts, *x_BT.shape[2:]), 1, 0)
        return constrain(x_CBP, *of_parts, *rest)

    def gather(x_BSGK: jax.Array) -> jax.Array:
        x_BSGK = constrain(x_BSGK, "batch", "sequence", "kv_heads", None)
        return constrain(x_BSGK, "batch", None, "kv_heads", None)

    of_parts = "sequence", "batch", None
    split = {"positions": jnp.arange(q_BTHK.shape[1]).reshape(parts, -1)}
    whole = {}
    if mask.documents is not None:
        split["segments"] = cut(mask.documents[0])
        whole["key_segments"] = constrain(mask.documents[1], "batch", None)
    in_axes = Mask(mask.causal, mask.window, **dict.fromkeys(split, 0))
    each = jax.vmap(kernel, in_axes=(0, None, None, in_axes), spmd_axis_name=axes)
    q_CBPHK = cut(constrain(q_BTHK, "batch", "sequence", "heads", None), "heads", None)
    mask = dataclasses.replace(mask, **split, **whole)
    out_CBPHK = each(q_CBPHK, gather(k_BSGK), gather(v_BSGK), mask)
    out_CBPHK = constrain(out_CBPHK, *of_parts, "heads", None)
    out_BTHK = jnp.moveaxis(out_CBPHK, 0, 1).reshape(q_BTHK.shape)
    return constrain(out_BTHK, "batch", "sequence", "heads", None)
