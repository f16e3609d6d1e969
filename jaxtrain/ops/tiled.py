"""Attention in plain XLA, tiled so that temporaries grow linearly with the length of rows.

Three forms of one computation, chosen by the length of rows and by where it runs: short rows are
written out tile by tile, and keep their softmax weights on a CPU; long ones are a loop.

Shapes: B batch, T queries, S keys, H query heads, G key and value heads, R = H / G, K features,
N = R * T rows of a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.ops.mask import Mask
from jaxtrain.ops.numerics import MASKED, drop, soft_cap, soft_cap_slope, wide
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import constrain

# Names of what the backward pass needs, for rematerialisation policies.
SAVED = ("attention_out", "attention_lse")

# Up to this many tiles of queries are written out, each against all the keys it sees; longer rows
# are a loop over tiles of queries and keys.
UNROLLED = 4

# On a CPU, tiles that are written out keep their softmax weights for the backward pass where these
# are at most so many times the size of the queries: there writing them costs less than the product
# and the exponential that make them again, and memory is the host's. Elsewhere nothing of size
# T x S is kept.
KEPT = 4


# Entered with the rows of a tile, in place of those that are chosen.
tile_rows = jax.make_user_context(None)


def tiled_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: Mask,
    *,
    softcap: float | None,
    dropout: float,
    rng: jax.Array | None,
) -> jax.Array:
    """Computes attention as :func:`jaxtrain.ops.attention.attention` defines it, of checked shapes.

    Returns:
      [B, T, H, K] in the dtype of ``q_BTHK``.
    """
    (_, T, H, K), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    # Products are fastest, on CPU and GPU alike, with the batch and heads in front.
    q = q_BTHK.reshape(*q_BTHK.shape[:2], G, H // G, K).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k_BSGK, v_BSGK))
    kind = (mask.causal, mask.window, softcap, dropout)
    ordered = mask.positions is None
    form, short = _tiling(*kind, T, S, ordered=ordered, leading=mask.leading)
    numbers, rng = mask.numbers, rng if dropout else None
    if mask.windowed is not None:
        found = _either(form, short, mask.windowed, q, k, v, numbers, rng)
    else:
        bias_GRO = mask.bias
        if bias_GRO is not None:
            bias_GRO = bias_GRO.astype(wide(q.dtype)).reshape(G, H // G, -1)
        found = (_tiled if short else _long)(form, q, k, v, numbers, bias_GRO, rng)
    out_BGRTK, lse_BGRT1 = found
    if mask.sinks is not None:
        sinks_GR11 = mask.sinks.astype(lse_BGRT1.dtype).reshape(G, H // G, 1, 1)
        share_BGRT1 = jax.nn.sigmoid(lse_BGRT1 - sinks_GR11)
        out_BGRTK = (share_BGRT1 * out_BGRTK).astype(q.dtype)
    return out_BGRTK.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape)


def _block(T: int) -> int:
    if export.is_symbolic_dim(T):
        return T  # in a program that is exported for rows of any length: one tile
    # A causal tile looks only at the keys up to its end: four tiles save 3/8 of the work, more
    # save little and cost launches; beyond 2,048 positions the size of a tile's scores decides.
    return min(max(64, -(-T // 4)), 512)


class Part(NamedTuple):
    """Attention of some queries to some of the keys that they see, to be put together with other
    parts; its arguments are those of a mask, and ``numbers`` as it has them. ``block`` is the rows
    of a tile, if they are not to be chosen."""

    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    block: int | None = None

    def forward(self, q_BGRTK, k_BGSK, v_BGSK, numbers) -> tuple[jax.Array, jax.Array]:
        """Returns the result [B, G, R, T, K], and the log-sum-exp of each row [B, G, R, T, 1]."""
        return _apart(*self._tiling(q_BGRTK, k_BGSK, numbers), q_BGRTK, k_BGSK, v_BGSK, numbers)

    def backward(self, q_BGRTK, k_BGSK, v_BGSK, numbers, out_BGRTK, lse_BGRT1, d_out_BGRTK):
        """Returns the gradients of queries, keys and values; the result, its log-sum-exp and its
        gradient are those of all parts together."""
        saved = (q_BGRTK, k_BGSK, v_BGSK, out_BGRTK, lse_BGRT1, d_out_BGRTK, 0.0)
        return _d_apart(*self._tiling(q_BGRTK, k_BGSK, numbers), *saved, numbers)

    def _tiling(self, q_BGRTK, k_BGSK, numbers) -> tuple["_Form", bool]:
        sizes, ordered = (q_BGRTK.shape[3], k_BGSK.shape[2]), numbers[1] is None
        with tile_rows(self.block):
            return _tiling(*self[:3], 0.0, *sizes, ordered=ordered)


class _Form(NamedTuple):
    """Static arguments of tiled attention."""

    causal: bool
    window: int | None
    softcap: float | None
    block: int
    dropout: float
    keys: int
    queries: int  # with those that fill up tiles
    ordered: bool = True  # query t stands where key t does
    leading: int = 0


def _tiling(
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
    T: int,
    S: int,
    *,
    ordered: bool,
    leading: int = 0,
) -> tuple[_Form, bool]:
    """The form for T queries and S keys, and whether its tiles are written out."""
    block = tile_rows.value or _block(T)
    short = -(-T // block) <= UNROLLED
    queries = T if short else -(-T // block) * block
    return _Form(causal, window, softcap, block, dropout, S, queries, ordered, leading), short


def _apart(form, short, q_BGRTK, k_BGSK, v_BGSK, numbers, rng=None):
    """Attention and its log-sum-exp, with no rule for its gradient."""
    inputs = (q_BGRTK, k_BGSK, v_BGSK, numbers, None, rng)
    if short:
        return _attend(form, *inputs)[:2]
    return _long_forward(form, *inputs)[1][2:]


def _d_apart(form, short, q, k, v, out, lse, d_out, d_lse, numbers, rng=None):
    """The gradients of queries, keys and values of :func:`_apart`."""
    d_found = d_out, d_lse
    if short:
        return _backward(form, ((q, k, v, None, rng), (numbers, out, lse), None), d_found)[:3]
    return _long_backward(form, ((q, k, v, numbers, None), rng, out, lse), d_found)[:3]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng):
    """Attention tiled over queries: the result, and the log-sum-exp of each query's scores.

    The backward pass computes the weights again from the saved log-sum-exp (Dao et al. 2022,
    https://arxiv.org/abs/2205.14135), so nothing of size T x S outlives a tile, but where the
    weights are kept (``KEPT``). Both passes multiply in the dtype they were given with float32
    accumulation.
    """
    return _forward(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng)[0]


def _forward(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng):
    out_BGRTK, lse_BGRT1, scores = _attend(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng)
    saved = (q_BGRTK, k_BGSK, v_BGSK, bias_GRO, rng)
    found = out_BGRTK, lse_BGRT1
    if not _keeps(form, q_BGRTK):
        return found, (saved, (numbers, *found), None)
    # From the log-sum-exp and not from what the result was made of: where a block is rematerialised
    # and its log-sum-exp saved, they cost one product and one exponential.
    weights = [
        jnp.exp(tile - _merge(lse_BGRT1[:, :, :, rows]))
        for tile, (rows, _) in zip(scores, _tiles(q_BGRTK.shape[3], form), strict=True)
    ]
    return found, (saved, None, weights)


def _keeps(form: _Form, q_BGRTK: jax.Array) -> bool:
    """Whether the weights of all tiles are kept for the backward pass; see ``KEPT``.

    Not under a soft cap, whose slope needs the scores.
    """
    if form.softcap is not None or export.is_symbolic_dim(q_BGRTK.shape[3]):
        return False
    (T, K), dtype = q_BGRTK.shape[3:], q_BGRTK.dtype
    sizes = [(rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in _tiles(T, form)]
    return platform() == "cpu" and dtype == wide(dtype) and sum(sizes) <= KEPT * T * K


def _attend(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng):
    """Returns the result, the log-sum-exp of each row, and the scores of each tile."""
    R, dtype = q_BGRTK.shape[2], q_BGRTK.dtype
    outs, lses, tiles = [], [], []
    for tile, (rows, keys) in enumerate(_tiles(q_BGRTK.shape[3], form)):
        q, k = q_BGRTK[:, :, :, rows], k_BGSK[:, :, keys]
        scores = _scores(form, q, k, (rows.start, keys.start), numbers, bias_GRO)
        peak = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=-1, keepdims=True)
        weights = _drop(weights, form, rng, tile).astype(dtype)
        out = wide_einsum("bgns,bgsk->bgnk", weights, v_BGSK[:, :, keys])
        outs.append(_split((out / total).astype(dtype), R))
        lses.append(_split(peak + jnp.log(total), R))
        tiles.append(scores)
    out_BGRTK = checkpoint_name(jnp.concatenate(outs, axis=3), SAVED[0])
    lse_BGRT1 = checkpoint_name(jnp.concatenate(lses, axis=3), SAVED[1])
    return out_BGRTK, lse_BGRT1, tiles


def _backward(form, saved, d_found):
    (q_BGRTK, k_BGSK, v_BGSK, bias_GRO, rng), results, weights = saved
    d_out_BGRTK, d_lse_BGRT1 = d_found
    whole_rows = (q_BGRTK, d_out_BGRTK)
    if weights is None:
        numbers, out_BGRTK, lse_BGRT1 = results
        whole_rows += (_delta(out_BGRTK, d_out_BGRTK) - d_lse_BGRT1, lse_BGRT1)
    else:
        whole_rows += (d_lse_BGRT1,)

    def d_tile(tile, rows, keys, before):
        of_rows = [x[:, :, :, rows] for x in whole_rows]
        of_keys = k_BGSK[:, :, keys], v_BGSK[:, :, keys]
        if weights is not None:
            return _d_weighted(form, weights[tile], None, *of_rows, of_keys, rng, tile, summed=True)
        if tile and platform() == "gpu":
            # Else XLA's scheduler has the scores of all tiles in memory at once, and those that a
            # rematerialised layer has computed for its forward pass as well.
            of_rows, of_keys, _ = jax.lax.optimization_barrier((of_rows, of_keys, before))
        places = rows.start, keys.start
        return _d_tile(form, of_rows, of_keys, places, numbers, bias_GRO, rng, tile)

    return _d_tiles(form, q_BGRTK, k_BGSK, bias_GRO, d_tile)


def _d_tiles(form, q_BGRTK, k_BGSK, bias_GRO, d_tile):
    """Puts the gradients together from ``d_tile(tile, rows, keys, before)``, those of each tile.

    ``before`` are the gradients of keys and values so far.
    """
    dtype = q_BGRTK.dtype
    d_q, d_bias = [], None if bias_GRO is None else jnp.zeros_like(bias_GRO)
    d_k, d_v = (jnp.zeros(k_BGSK.shape, wide(dtype)) for _ in range(2))

    def to_all_keys(part, keys):
        # Not .at[keys].add: XLA's partitioner gathers what a scatter adds on every device.
        return jnp.pad(part, ((0, 0), (0, 0), (keys.start, form.keys - keys.stop), (0, 0)))

    for tile, (rows, keys) in enumerate(_tiles(q_BGRTK.shape[3], form)):
        more_q, more_k, more_v, d_scores = d_tile(tile, rows, keys, (d_k, d_v))
        d_q.append(more_q.astype(dtype))
        d_k, d_v = d_k + to_all_keys(more_k, keys), d_v + to_all_keys(more_v, keys)
        d_bias = _add_to_bias(form, d_bias, d_scores, (rows.start, keys.start))
    d_k, d_v = d_k.astype(dtype), d_v.astype(dtype)
    return jnp.concatenate(d_q, axis=3), d_k, d_v, None, d_bias, None


_tiled.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _long(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng):
    """Attention tiled over queries and keys, by a loop over the tiles in which any key is seen.

    The softmax is put together from tiles (Rabe and Staats 2021, https://arxiv.org/abs/2112.05682):
    scores exist for one tile of ``block`` x ``block`` at a time.
    """
    return _long_forward(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng)[0]


def _long_forward(form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO, rng):
    (R, T), dtype = q_BGRTK.shape[2:4], q_BGRTK.dtype
    inputs = (q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO)
    q, k, v, numbers, bias = _padded(form, *inputs)

    def step(sums, place):
        rows, keys, tile = place
        out, total, peak = (_merge(_cut(form, rows, x)) for x in sums)
        k_tile, v_tile = _cut(form, keys, k), _cut(form, keys, v)
        scores = _scores(form, _cut(form, rows, q), k_tile, (rows, keys), numbers, bias)
        higher = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(peak - higher)
        total = shrink * total + weights.sum(axis=-1, keepdims=True)
        weights = _drop(weights, form, rng, tile).astype(dtype)
        out = shrink * out + wide_einsum("bgns,bgsk->bgnk", weights, v_tile)
        news = (_split(x, R) for x in (out, total, higher))
        return tuple(_put(rows, x, new) for x, new in zip(sums, news, strict=True)), None

    start = (
        jnp.zeros(q.shape, wide(dtype)),
        jnp.zeros((*q.shape[:4], 1), wide(dtype)),
        jnp.full((*q.shape[:4], 1), MASKED, wide(dtype)),
    )
    (out, total, peak), _ = jax.lax.scan(step, _pin(start), _places(form, T))
    out_BGRTK = checkpoint_name((out / total).astype(dtype)[:, :, :, :T], SAVED[0])
    lse_BGRT1 = checkpoint_name((peak + jnp.log(total))[:, :, :, :T], SAVED[1])
    return (out_BGRTK, lse_BGRT1), (inputs, rng, out_BGRTK, lse_BGRT1)


def _long_backward(form, saved, d_found):
    inputs, rng, out_BGRTK, lse_BGRT1 = saved
    d_out_BGRTK, d_lse_BGRT1 = d_found
    T, dtype = inputs[0].shape[3], inputs[0].dtype
    q, k, v, numbers, bias = _padded(form, *inputs)
    # Rows of padding have no gradient, so they add none, whatever their weights.
    others = (d_out_BGRTK, _delta(out_BGRTK, d_out_BGRTK) - d_lse_BGRT1, lse_BGRT1)
    whole_rows = (q, *(_pad(form, x, axis=3) for x in others))

    def step(sums, place):
        (d_q, d_k, d_v), d_bias = sums
        rows, keys, tile = place
        of_rows = [_cut(form, rows, x) for x in whole_rows]
        of_keys = _cut(form, keys, k), _cut(form, keys, v)
        more_q, more_k, more_v, d_scores = _d_tile(
            form, of_rows, of_keys, (rows, keys), numbers, bias, rng, tile
        )
        d_q = _put(rows, d_q, _cut(form, rows, d_q) + more_q)
        d_k = _put(keys, d_k, _cut(form, keys, d_k) + more_k)
        d_v = _put(keys, d_v, _cut(form, keys, d_v) + more_v)
        return ((d_q, d_k, d_v), _add_to_bias(form, d_bias, d_scores, (rows, keys))), None

    start = _pin(tuple(jnp.zeros(x.shape, wide(dtype)) for x in (q, k, v)))
    start = start, None if bias is None else jnp.zeros_like(bias)
    ((d_q, d_k, d_v), d_bias), _ = jax.lax.scan(step, start, _places(form, T))
    d_q, d_k, d_v = d_q[:, :, :, :T], d_k[:, :, : form.keys], d_v[:, :, : form.keys]
    if d_bias is not None:
        d_bias = d_bias[..., form.queries - T :][..., : T + form.keys - 1]
    return *(x.astype(dtype) for x in (d_q, d_k, d_v)), None, d_bias, None


_long.defvjp(_long_forward, _long_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _either(form, short, windowed, q_BGRTK, k_BGSK, v_BGSK, numbers, rng):
    """Attention with the window of ``form``, or without: a branch takes one of the two.

    The branches are within both passes, and not differentiated: what is kept is one form's, and is
    pinned behind them. JAX would keep what either side needs, and XLA's partitioner for GPUs
    gathers that on every device.
    """
    return _either_forward(form, short, windowed, q_BGRTK, k_BGSK, v_BGSK, numbers, rng)[0]


def _either_forward(form, short, windowed, q_BGRTK, k_BGSK, v_BGSK, numbers, rng):
    def side(form):
        return lambda q, k, v: _apart(form, short, q, k, v, numbers, rng)

    sides = side(form), side(form._replace(window=None))
    found = jax.lax.cond(windowed, *sides, q_BGRTK, k_BGSK, v_BGSK)
    out_BGRTK, lse_BGRT1 = map(checkpoint_name, _pin(found), SAVED)
    inputs = (windowed, q_BGRTK, k_BGSK, v_BGSK, numbers, rng)
    return (out_BGRTK, lse_BGRT1), (inputs, out_BGRTK, lse_BGRT1)


def _either_backward(form, short, saved, d_found):
    (windowed, q, k, v, numbers, rng), out, lse = saved

    def side(form):
        return lambda *kept: _d_apart(form, short, *kept, numbers, rng)

    sides = side(form), side(form._replace(window=None))
    d_qkv = _pin(jax.lax.cond(windowed, *sides, q, k, v, out, lse, *d_found))
    return None, *d_qkv, None, None


_either.defvjp(_either_forward, _either_backward)


def _delta(out_BGRTK: jax.Array, d_out_BGRTK: jax.Array) -> jax.Array:
    """sum_s weight * d_weight, which is out . d_out, dropped or not: no T x S pass is needed."""
    return (out_BGRTK.astype(wide(out_BGRTK.dtype)) * d_out_BGRTK).sum(axis=-1, keepdims=True)


def _d_tile(form: _Form, of_rows, of_keys, starts, numbers, bias_GRO, rng, tile):
    """One tile's part of the gradients of its rows of q, and of its keys and values, and the
    gradient of its scores."""
    q, d_out, delta, lse = of_rows
    scores = _scores(form, q, of_keys[0], starts, numbers, bias_GRO)
    weights = jnp.exp(scores - _merge(lse))
    slope = None if form.softcap is None else soft_cap_slope(scores, form.softcap)
    return _d_weighted(form, weights, slope, q, d_out, delta, of_keys, rng, tile)


def _d_weighted(
    form: _Form, weights, slope, q_BGRTK, d_out_BGRTK, delta_BGRT1, of_keys, rng, tile, summed=False
):
    """Computes the gradients of :func:`_d_tile` from the tile's weights and the slope of its soft
    cap, None without one; with ``summed`` delta is summed from the weights, and what is given for
    it is the cotangent of the log-sum-exp, which lessens it."""
    (k, v), dtype, scale = of_keys, q_BGRTK.dtype, q_BGRTK.shape[-1] ** -0.5
    q_BGNK, d_out_BGNK = _merge(q_BGRTK), _merge(d_out_BGRTK)
    d_weights = _drop(wide_einsum("bgnk,bgsk->bgns", d_out_BGNK, v), form, rng, tile)
    delta = _merge(delta_BGRT1)
    if summed:
        delta = (weights * d_weights).sum(axis=-1, keepdims=True) - delta
    of_scores = weights * (d_weights - delta)
    of_scores = of_scores if slope is None else of_scores * slope
    d_scores = (scale * of_scores).astype(dtype)
    weights = _drop(weights, form, rng, tile).astype(dtype)
    d_q = _split(wide_einsum("bgns,bgsk->bgnk", d_scores, k), q_BGRTK.shape[2])
    d_k = wide_einsum("bgns,bgnk->bgsk", d_scores, q_BGNK)
    return d_q, d_k, wide_einsum("bgns,bgnk->bgsk", weights, d_out_BGNK), of_scores


def _scores(form: _Form, q_BGRTK, k_BGSK, starts, numbers, bias_GRO) -> jax.Array:
    """Masked scores [B, G, N, S] of a tile's rows (N = R * T) and keys."""
    (R, T), S = q_BGRTK.shape[2:4], k_BGSK.shape[2]
    first_row, first_key = starts
    whole = isinstance(first_key, int)  # a tile that is written out sees all its keys

    # What is rematerialised, JAX does not compute ahead of loops. A mask is the same in every
    # layer: broadcast to the shape of the scores, one of each tile would be held through the step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def masked(scores_BGNS, first_row, first_key, numbers):
        def rows_N(of_row, axis):
            return jnp.tile(jax.lax.dynamic_slice_in_dim(of_row, first_row, T, axis), R)

        documents, positions_T = numbers
        ordered_T = first_row + jnp.arange(T)
        t_N = jnp.tile(ordered_T, R) if positions_T is None else rows_N(positions_T, 0)
        t_N1, s_S = t_N[:, None], first_key + jnp.arange(S)
        near = []
        if form.causal:
            near.append(t_N1 >= s_S)
        elif form.keys % form.block and not whole:
            near.append(s_S < form.keys)
        if form.window is not None:
            # Where attention is causal, what comes later is masked already.
            within = (t_N1 - s_S if form.causal else jnp.abs(t_N1 - s_S)) < form.window
            if form.leading:
                within |= s_S < form.leading
                within = within if form.causal else within | (t_N1 < form.leading)
            near.append(within)
        if near:
            seen = functools.reduce(jnp.logical_and, near)
            scores_BGNS = jnp.where(seen, scores_BGNS, MASKED)
        if documents is not None:
            row_BN = rows_N(documents[0], 1)
            key_BS = jax.lax.dynamic_slice_in_dim(documents[1], first_key, S, axis=1)
            same_BNS = row_BN[:, :, None] == key_BS[:, None, :]
            scores_BGNS = jnp.where(same_BNS[:, None], scores_BGNS, MASKED)
        return scores_BGNS

    scores = wide_einsum("bgnk,bgsk->bgns", _merge(q_BGRTK), k_BGSK) * q_BGRTK.shape[-1] ** -0.5
    if bias_GRO is not None:
        scores += _bias_of_tile(bias_GRO, starts, form.queries, (T, S))
    return masked(soft_cap(scores, form.softcap), first_row, first_key, numbers)


def _bias_of_tile(bias_GRO, starts, queries: int, shape: tuple[int, int]) -> jax.Array:
    """The bias [G, R * T, S] of a tile of T rows and S keys that begins at ``starts``."""
    (G, R, _), (T, S), (first_row, first_key) = bias_GRO.shape, shape, starts
    # Of row t and key s: entry s - t + T - 1 of those that the tile needs. Copies of them, each one
    # entry longer than what a row takes, are the rows, each moved by one: no gather, no scatter.
    n = T + S - 1
    if export.is_symbolic_dim(n):  # whose slices need sizes that are known
        places_TS = jnp.arange(S) - jnp.arange(T)[:, None] + T - 1
        return bias_GRO[..., places_TS].reshape(G, R * T, S)
    first = first_key - first_row - T + queries
    needed = jax.lax.dynamic_slice_in_dim(bias_GRO, first, n, axis=2)
    copies = jnp.tile(jnp.pad(needed, ((0, 0), (0, 0), (0, 1))), T)
    rows_GRTO = copies[..., : T * n].reshape(G, R, T, n)
    return rows_GRTO[..., T - 1 :].reshape(G, R * T, S)


def _add_to_bias(form: _Form, d_bias_GRO, d_scores_BGNS, starts):
    """Adds what a tile's scores give to the gradient of the bias; None stays None."""
    if d_bias_GRO is None:
        return None
    shape = d_scores_BGNS.shape[2] // d_bias_GRO.shape[1], d_scores_BGNS.shape[3]
    back = jax.linear_transpose(
        lambda bias: _bias_of_tile(bias, starts, form.queries, shape), d_bias_GRO
    )
    return d_bias_GRO + back(d_scores_BGNS.sum(axis=0))[0]


def _merge(x_BGRTK: jax.Array) -> jax.Array:
    """[B, G, R, T, K] to [B, G, R * T, K]: XLA:CPU is slow at products of rows with two axes."""
    B, G, R, T, K = x_BGRTK.shape
    return x_BGRTK.reshape(B, G, R * T, K)


def _split(x_BGNK: jax.Array, R: int) -> jax.Array:
    B, G, N, K = x_BGNK.shape
    return x_BGNK.reshape(B, G, R, N // R, K)


def _tiles(T: int, form: _Form) -> list[tuple[slice, slice]]:
    """Rows of each tile, and the keys that any of them may see."""
    if export.is_symbolic_dim(T):
        return [(slice(0, T), slice(0, form.keys))]
    ends = [min(start + form.block, T) for start in range(0, T, form.block)]
    return [
        (slice(start, end), slice(*_keys_of(form, start, end)))
        for start, end in zip(range(0, T, form.block), ends, strict=True)
    ]


def _keys_of(form: _Form, start: int, end: int) -> tuple[int, int]:
    """Where the keys that any row of a tile may see begin and end."""
    whole = form.leading > start and not form.causal
    first = 0 if form.leading else _first_key(form, start)
    return first, form.keys if whole else _end_of_keys(form, end)


def _first_key(form: _Form, row: int) -> int:
    """The first key that a row, or any after it, may see."""
    return 0 if form.window is None or not form.ordered else max(0, row - form.window + 1)


def _end_of_keys(form: _Form, end: int) -> int:
    """The first key that no row before ``end`` may see."""
    if not form.ordered:
        return form.keys
    if form.causal:
        return end
    return form.keys if form.window is None else min(form.keys, end + form.window - 1)


def _places(form: _Form, T: int) -> jax.Array:
    """First row, first key and number of every tile that has something to see, [tiles, 3]."""
    rows, keys = (range(0, size, form.block) for size in (T, form.keys))
    seen = [
        (row, key)
        for row in rows
        for key in keys
        if (key < _end_of_keys(form, row + form.block) or (row < form.leading and not form.causal))
        and (key + form.block > _first_key(form, row) or key < form.leading)
    ]
    return jnp.array([(*place, tile) for tile, place in enumerate(seen)], jnp.int32)


def _padded(form: _Form, q_BGRTK, k_BGSK, v_BGSK, numbers, bias_GRO):
    q = _pad(form, q_BGRTK, axis=3)
    k, v = (_pad(form, x, axis=2) for x in (k_BGSK, v_BGSK))
    numbers = jax.tree.map(lambda x: _pad(form, x, axis=x.ndim - 1), numbers)
    if bias_GRO is not None:
        more = (form.queries - q_BGRTK.shape[3], -form.keys % form.block)
        bias_GRO = jnp.pad(bias_GRO, ((0, 0), (0, 0), more))
    return q, k, v, numbers, bias_GRO


def _pad(form: _Form, x: jax.Array, *, axis: int) -> jax.Array:
    """Fills an axis up to whole tiles."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % form.block)
    return jnp.pad(x, widths)


def _cut(form: _Form, start: jax.Array, x: jax.Array) -> jax.Array:
    """A tile of rows or keys; they are the last axis but one."""
    return jax.lax.dynamic_slice_in_dim(x, start, form.block, axis=x.ndim - 2)


def _put(start: jax.Array, x: jax.Array, tile: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, tile, start, axis=x.ndim - 2)


def _pin(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # A loop's carry inherits the sharding of its initial value, and zeros have none.
    return tuple(constrain(x, "batch", "attend_heads", *[None] * (x.ndim - 2)) for x in sums)


def _drop(weights: jax.Array, form: _Form, rng: jax.Array | None, tile: int | jax.Array):
    """Inverted dropout of a tile; the same key and tile drop the same."""
    return weights if rng is None else drop(weights, form.dropout, jax.random.fold_in(rng, tile))


def wide_einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies in the operands' own dtype and accumulates in at least float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=wide(a.dtype))
