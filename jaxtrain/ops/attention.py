"""Softmax attention: one function, and an explicit choice of what computes it.

Shapes: B batch, T queries, S keys, H query heads, G key and value heads, R = H / G, K features.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

IMPLEMENTATIONS = ("auto", "xla", "cudnn")

# Names of what the xla form's backward pass needs, for rematerialisation policies.
SAVED = ("attention_out", "attention_lse")

# Finite, so that no difference of two masked scores is a NaN.
MASKED = float(-0.7 * np.finfo(np.float32).max)


def attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    causal: bool = True,
    segments_BT: jax.Array | None = None,
    implementation: str = "auto",
    block: int | None = None,
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(K)) v`` per head; H / G query heads share each key head.

    Args:
      q_BTHK: queries.
      k_BSGK, v_BSGK: keys and values; G divides H, and they are never repeated in memory.
      causal: position t sees positions up to t; needs S = T.
      segments_BT: int32 document numbers; a position sees only its own document. Padding, number 0,
        sees padding, so that no row is empty. Needs S = T.
      implementation: ``"xla"``, ``"cudnn"`` (NVIDIA's fused kernel) or ``"auto"``; see
        :func:`choose`.
      block: queries per tile of the xla form; None chooses.

    Returns:
      [B, T, H, K] in the dtype of ``q_BTHK``. Scores and softmax are float32.

    Raises:
      ValueError: for shapes that do not fit, or an implementation that cannot run here.
    """
    (_, T, H, K), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key heads evenly; use a divisor of {H}")
    if (causal or segments_BT is not None) and T != S:
        raise ValueError(f"causal or segment masks need as many keys ({S}) as queries ({T})")
    if _choose_here(implementation, dtype=q_BTHK.dtype, head_dim=K) == "cudnn":
        mask = None
        if segments_BT is not None:
            mask = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
        return jax.nn.dot_product_attention(
            q_BTHK, k_BSGK, v_BSGK, mask=mask, is_causal=causal, implementation="cudnn"
        )
    # Products are fastest, on CPU and GPU alike, with the batch and heads in front.
    q = q_BTHK.reshape(*q_BTHK.shape[:2], G, H // G, K).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k_BSGK, v_BSGK))
    out_BGRTK = _tiled(causal, block or _block(T), q, k, v, segments_BT)
    return out_BGRTK.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape)


def choose(implementation: str, *, dtype, head_dim: int, backend: str | None = None) -> str:
    """Returns the implementation that :func:`attention` will use: ``"xla"`` or ``"cudnn"``.

    Args:
      implementation: ``"auto"`` takes cudnn on a GPU in bfloat16 or float16, else xla; any other
        name is returned if it can run.
      dtype: of the queries.
      head_dim: K.
      backend: ``"cpu"``, ``"gpu"`` or ``"tpu"``; None means that of :func:`platform`.

    Raises:
      ValueError: for an unknown name, or cudnn where it cannot run.

    >>> choose("auto", dtype=jnp.float32, head_dim=64, backend="gpu")
    'xla'
    >>> choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="gpu")
    'cudnn'
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    backend = backend or platform()
    obstacle = None
    if backend != "gpu":
        obstacle = f"an NVIDIA GPU, and the backend is {backend!r}"
    elif jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        obstacle = f"bfloat16 or float16, and the queries are {jnp.dtype(dtype).name}"
    elif head_dim % 8 or head_dim > 128:
        obstacle = f"a head width that is a multiple of 8 up to 128, and it is {head_dim}"
    if implementation == "cudnn" and obstacle:
        raise ValueError(f"attention='cudnn' needs {obstacle}; use 'xla' or 'auto'")
    return "xla" if implementation == "xla" or obstacle else "cudnn"


def platform() -> str:
    """The platform of the devices that are being traced for.

    That of the ambient mesh (``jax.set_mesh``, which ``compile_step`` enters), so that a step
    compiled for a chip that is not here takes the form that it would take there; without a mesh,
    JAX's default backend.

    >>> platform() == jax.default_backend()
    True
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


class AheadOfTimeWarning(UserWarning):
    """A program compiled for a chip that is not here differs from the one that would run there."""


def cached_attention(
    q_BHK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, *, positions_B: jax.Array
) -> jax.Array:
    """Attends from one new position per row to a cache of keys and values.

    Args:
      q_BHK: queries.
      k_BGSK, v_BGSK: caches, filled up to and including ``positions_B``; the rest is not looked at.
      positions_B: int32, each row's own position.

    Returns:
      [B, H, K] in the dtype of ``q_BHK``.
    """
    (B, H, K), (_, G, S, _) = q_BHK.shape, k_BGSK.shape
    q_BGRK = q_BHK.reshape(B, G, H // G, K)
    scores = _einsum("bgrk,bgsk->bgrs", q_BGRK, k_BGSK) * K**-0.5
    seen = jnp.arange(S) <= positions_B[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    return jnp.einsum("bgrs,bgsk->bgrk", weights.astype(v_BGSK.dtype), v_BGSK).reshape(B, H, K)


def _choose_here(implementation: str, *, dtype, head_dim: int) -> str:
    chosen = choose(implementation, dtype=dtype, head_dim=head_dim)
    if chosen == "cudnn" and jax.default_backend() != "gpu":
        # JAX asks the cuDNN library for its version while it traces, and XLA for a plan of
        # execution while it compiles: both need a GPU's own libraries.
        warnings.warn(
            "attention: cudnn cannot be compiled without a GPU; planned with xla, which keeps as "
            "much for its backward pass",
            AheadOfTimeWarning,
            stacklevel=3,
        )
        return "xla"
    return chosen


def _block(T: int) -> int:
    # A causal tile looks only at the keys up to its end: four tiles save 3/8 of the work, more
    # save little and cost launches; beyond 2,048 positions the size of a tile's scores decides.
    return min(max(64, -(-T // 4)), 512)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(causal, block, q_BGRTK, k_BGSK, v_BGSK, segments_BT):
    """Attention tiled over queries.

    The backward pass computes the weights again from the saved log-sum-exp (Dao et al. 2022,
    https://arxiv.org/abs/2205.14135), so nothing of size T x S outlives a tile, and both passes
    multiply in the dtype they were given with float32 accumulation.
    """
    return _forward(causal, block, q_BGRTK, k_BGSK, v_BGSK, segments_BT)[0]


def _forward(causal, block, q_BGRTK, k_BGSK, v_BGSK, segments_BT):
    outs, lses = [], []
    for rows, keys in _tiles(q_BGRTK.shape[3], k_BGSK.shape[2], causal, block):
        scores = _scores(q_BGRTK, k_BGSK, segments_BT, rows, keys, causal)
        peak = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        out = _einsum("bgrts,bgsk->bgrtk", weights.astype(q_BGRTK.dtype), v_BGSK[:, :, keys])
        outs.append((out / total).astype(q_BGRTK.dtype))
        lses.append(peak + jnp.log(total))
    out_BGRTK = checkpoint_name(jnp.concatenate(outs, axis=3), SAVED[0])
    lse_BGRT1 = checkpoint_name(jnp.concatenate(lses, axis=3), SAVED[1])
    return out_BGRTK, (q_BGRTK, k_BGSK, v_BGSK, segments_BT, out_BGRTK, lse_BGRT1)


def _backward(causal, block, saved, d_out_BGRTK):
    q_BGRTK, k_BGSK, v_BGSK, segments_BT, out_BGRTK, lse_BGRT1 = saved
    dtype, scale = q_BGRTK.dtype, q_BGRTK.shape[-1] ** -0.5
    # sum_s weight * d_weight = out . d_out: the softmax's own derivative without a T x S pass.
    wide = _wide(dtype)
    delta = (out_BGRTK.astype(wide) * d_out_BGRTK).sum(axis=-1, keepdims=True)
    d_q = []
    d_k, d_v = (jnp.zeros(x.shape, wide) for x in (k_BGSK, v_BGSK))

    def to_all_keys(tile, keys):
        # Not .at[keys].add: XLA's partitioner gathers what a scatter adds on every device.
        return jnp.pad(tile, ((0, 0), (0, 0), (0, k_BGSK.shape[2] - keys.stop), (0, 0)))

    for rows, keys in _tiles(q_BGRTK.shape[3], k_BGSK.shape[2], causal, block):
        scores = _scores(q_BGRTK, k_BGSK, segments_BT, rows, keys, causal)
        weights = jnp.exp(scores - lse_BGRT1[:, :, :, rows])
        d_out = d_out_BGRTK[:, :, :, rows]
        d_weights = _einsum("bgrtk,bgsk->bgrts", d_out, v_BGSK[:, :, keys])
        d_scores = (scale * weights * (d_weights - delta[:, :, :, rows])).astype(dtype)
        d_q.append(_einsum("bgrts,bgsk->bgrtk", d_scores, k_BGSK[:, :, keys]).astype(dtype))
        d_k_tile = _einsum("bgrts,bgrtk->bgsk", d_scores, q_BGRTK[:, :, :, rows])
        d_v_tile = _einsum("bgrts,bgrtk->bgsk", weights.astype(dtype), d_out)
        d_k, d_v = d_k + to_all_keys(d_k_tile, keys), d_v + to_all_keys(d_v_tile, keys)
    return jnp.concatenate(d_q, axis=3), d_k.astype(dtype), d_v.astype(dtype), None


_tiled.defvjp(_forward, _backward)


def _tiles(T: int, S: int, causal: bool, block: int) -> list[tuple[slice, slice]]:
    """Rows of each tile, and the keys that any of them may see."""
    ends = [min(start + block, T) for start in range(0, T, block)]
    return [(slice(i * block, end), slice(0, end if causal else S)) for i, end in enumerate(ends)]


def _scores(q_BGRTK, k_BGSK, segments_BT, rows: slice, keys: slice, causal: bool) -> jax.Array:
    scores = _einsum("bgrtk,bgsk->bgrts", q_BGRTK[:, :, :, rows], k_BGSK[:, :, keys])
    scores *= q_BGRTK.shape[-1] ** -0.5
    if causal:
        t = jnp.arange(rows.start, rows.stop)[:, None]
        scores = jnp.where(t >= jnp.arange(keys.stop), scores, MASKED)
    if segments_BT is not None:
        same = segments_BT[:, rows, None] == segments_BT[:, None, keys]
        scores = jnp.where(same[:, None, None], scores, MASKED)
    return scores


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=_wide(a.dtype))


def _wide(dtype) -> jnp.dtype:
    """At least float32 (float64 stays)."""
    return jnp.promote_types(dtype, jnp.float32)
