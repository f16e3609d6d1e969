"""Attention where mesh axes split the positions of rows (``context``), around any kernel.

Queries, keys and values come and go split by position. Where the axes divide the heads, positions
are exchanged for heads, so that each device has whole rows of its own heads (Jacobs et al. 2023,
Ulysses, https://arxiv.org/abs/2309.14509): an all-to-all before and one after, and the mask stays
what it is. Elsewhere queries stay where they are, and each device gathers all keys and values, or,
where rows are long, has those of one device after the other (:mod:`jaxtrain.ops.ring`).

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
from jaxtrain.ops.ring import ring_attention
from jaxtrain.sharding.placement import constrain, report_finding

Kernel = Callable[[jax.Array, jax.Array, jax.Array, Mask], jax.Array]

EXCHANGES = ("heads", "keys", "ring")

# Entered with what attention is to exchange; None chooses.
exchange = jax.make_user_context(None)

# A device's queries that share a key, from which on a ring takes no time of its own: keys of 2 K
# numbers meet queries of 4 K operations each, so a chip of F operations in the time of a byte sent
# computes for as long as bfloat16 keys travel if F queries meet them (a v5p and an H100 have about
# 2,200), and causal queries see half of what goes around.
HIDES_A_RING = 4096


def exchanged(q_BTHK: jax.Array, k_BSGK: jax.Array, mask: Mask, *, draws: bool) -> Positions | None:
    """Returns what attention exchanges between devices that split rows, and why; None if they do
    not.

    Raises:
      ValueError: what is asked for, or all that is left, cannot be had with the mask, or by a
        kernel that ``draws`` numbers.
    """
    (B, T, H, _), (S, G) = q_BTHK.shape, k_BSGK.shape[1:3]
    (_, parts), (over, of_heads) = split_over("sequence"), split_over("attend_heads")
    if parts == 1 or T % parts or S % parts:
        return None
    (_, rows), asked = split_over("batch"), exchange.value
    facts = {"heads": H, "parts": of_heads, "axes": " x ".join(over)}
    if asked in (None, "heads") and H % of_heads == 0:
        reason = Why.HEADS_DIVIDE(**facts) if asked is None else Why.ASKED()
        return Positions("heads", reason)
    odd = f"{H} query heads are not divisible by mesh axes {facts['axes']} of size {of_heads}"
    if asked == "heads":
        raise ValueError(f"`exchange` is 'heads', and {odd}: use a divisor of {H}, or leave it out")
    if mask.bias is not None or draws:
        what = "dropout on its weights (`attention_dropout`)" if draws else "a bias, as T5's,"
        if asked is not None:
            raise ValueError(
                f"`exchange` is {asked!r}, and attention with {what} exchanges positions for heads "
                "alone: leave it out"
            )
        raise ValueError(
            f"{odd}, and attention with {what} cannot gather keys instead: use a divisor of {H}"
        )
    need = f"{mask.leading} positions are seen by all" if mask.leading else None
    need = "attention has sinks, which it lacks" if mask.sinks is not None else need
    need = f"the batch's {B} rows are not divisible over {rows} devices" if B % rows else need
    if asked is not None:
        if asked == "ring" and need:
            raise ValueError(f"`exchange` is 'ring', and {need}: leave it out, or use 'keys'")
        return Positions(asked, Why.ASKED())
    positions = T // parts
    if need is None and positions * (H // G) >= HIDES_A_RING:
        return Positions("ring", Why.LONG_ROWS(**facts, positions=positions))
    return Positions("keys", Why.FEW_HEADS(**facts))


def around(
    kernel: Kernel,
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: Mask,
    *,
    found: Positions | None,
    softcap: float | None,
) -> jax.Array:
    """Returns ``kernel(q_BTHK, k_BSGK, v_BSGK, mask)``, split by position where the inputs are.

    ``found`` is what :func:`exchanged` gives; a ring is by tiles, whatever the kernel.
    """
    if found is None:
        return kernel(q_BTHK, k_BSGK, v_BSGK, mask)
    report_finding(Kind.CONTEXT, found)
    if found.exchanged == "ring":
        return ring_attention(q_BTHK, k_BSGK, v_BSGK, mask, softcap=softcap)
    if found.exchanged == "heads":
        return _by_heads(kernel, split_over("attend_heads")[1], q_BTHK, k_BSGK, v_BSGK, mask)
    return _by_keys(kernel, *split_over("sequence"), q_BTHK, k_BSGK, v_BSGK, mask)


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
    in_axes = Mask(mask.causal, mask.window, leading=mask.leading, **dict.fromkeys(split, 0))
    each = jax.vmap(kernel, in_axes=(0, None, None, in_axes), spmd_axis_name=axes)
    q_CBPHK = cut(constrain(q_BTHK, "batch", "sequence", "heads", None), "heads", None)
    mask = dataclasses.replace(mask, **split, **whole)
    out_CBPHK = each(q_CBPHK, gather(k_BSGK), gather(v_BSGK), mask)
    out_CBPHK = constrain(out_CBPHK, *of_parts, "heads", None)
    out_BTHK = jnp.moveaxis(out_CBPHK, 0, 1).reshape(q_BTHK.shape)
    return constrain(out_BTHK, "batch", "sequence", "heads", None)
