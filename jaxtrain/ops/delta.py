"""Linear attention by the gated delta rule, and the short convolution that stands before it.

A head has a state S [K, V]. Each position decays it by a factor a, and corrects by a share beta
what it holds of the position's key (Yang et al. 2024, https://arxiv.org/abs/2412.06464):

    u_t = beta_t (v_t - a_t S_{t-1}^T k_t),   S_t = a_t S_{t-1} + k_t u_t^T,   y_t = S_t^T q_t

Within a chunk the corrections are the solution of a triangular system, which one inverse gives for
every state that the chunk may begin with (https://arxiv.org/abs/2406.06484): chunks are products of
matrices, and only their states follow each other. A run of positions maps the state that it begins
with to A S + b, so devices that split a row each compute their own A and b, gather those of all,
and know the state that they begin with. No position is moved: rows stay in their order.

A document of a packed row begins with an empty state: what is before it is masked, not decayed.

Shapes: B batch, T positions, H heads, K features of keys and V of values, C positions of a chunk, N
chunks, P parts of a row, F features and W taps of a convolution.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.jaxprs import WIDE
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.per_device import split_over
from jaxtrain.sharding.placement import constrain

# Decays are sums of logarithms, whose terms no product may round to bfloat16.
EXACT = jax.lax.Precision.HIGHEST


@jax.named_scope(WIDE)
def gated_delta_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    beta_BTH: jax.Array,
    log_decay_BTH: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    state_BHKV: jax.Array | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Computes linear attention of rows by the gated delta rule.

    Results are float32 (float64 for such inputs); sums of decays and the inverse are so exactly,
    and products as the device multiplies float32. Memory is linear in T: the backward
    pass keeps the state before each chunk, and computes the chunk again. A mesh axis of
    ``sequence`` that divides T splits the positions of rows.

    Args:
      q_BTHK, k_BTHK: queries and keys; the rule is stable where keys have a length of at most 1.
      v_BTHV: values.
      beta_BTH: share of a correction, between 0 and 1.
      log_decay_BTH: logarithms of the decays, at most 0; below -1e30 counts as that.
      segments_BT: int32 document numbers; each change begins with an empty state. None means one.
      state_BHKV: state before the first position, whose document that continues; None means empty.
      chunk: C, a power of two; shorter rows take a shorter one.

    Returns:
      The result [B, T, H, V] in the dtype of the values, and the state behind the last position,
      [B, H, K, V] float32. Positions with beta 0 and log decay 0 leave the state as it is.

    Raises:
      ValueError: ``chunk`` is not a power of two.

    >>> q = k = jnp.ones((1, 5, 1, 1))
    >>> v, one = jnp.arange(5.0).reshape(1, 5, 1, 1), jnp.ones((1, 5, 1))
    >>> gated_delta_rule(q, k, v, 0.5 * one, 0 * one)[0].ravel().tolist()
    [0.0, 0.5, 1.25, 2.125, 3.0625]
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk is {chunk}: its system is halved again and again; use 64")
    (B, T, H, K), V = q_BTHK.shape, v_BTHV.shape[-1]
    axes, parts = split_over("sequence")
    parts = 1 if parts > 1 and T % parts else parts
    # A product with -inf would be NaN where it is to be left out.
    log_decay_BTH = jnp.maximum(log_decay_BTH, -1e30)
    rows = (q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH)
    rows = [x.astype(wide(x.dtype)) for x in rows]
    starts_BT1 = jnp.zeros((B, T, 1), bool)
    if segments_BT is not None:
        segments_BT = constrain(segments_BT, "batch", None)  # numbers alone: whole rows are small
        changes = segments_BT[:, 1:] != segments_BT[:, :-1]
        starts_BT1 = jnp.pad(changes, ((0, 0), (1, 0)))[..., None]
        starts_BT1 = constrain(starts_BT1, "batch", None, None)
    if state_BHKV is None:
        state_BHKV = jnp.zeros((B, H, K, V))
    state_BHKV = constrain(state_BHKV.astype(rows[2].dtype), "batch", "heads", None, None)
    size = min(chunk, 1 << (T // parts - 1).bit_length()) if isinstance(T, int) else chunk
    run = functools.partial(_run, size=size)
    if parts == 1:
        y_BTHV, state_BHKV = run(*rows, starts_BT1, state_BHKV)
        return y_BTHV.astype(v_BTHV.dtype), state_BHKV
    # The state's columns are those of b, beginning at 0, and of A, beginning at 1.
    rows[2] = jnp.pad(rows[2], ((0, 0), (0, 0), (0, 0), (0, K)))
    empty = jnp.concatenate([jnp.zeros((K, V)), jnp.eye(K)], -1).astype(rows[2].dtype)
    empty = constrain(jnp.broadcast_to(empty, (B, H, K, V + K)), "batch", "heads", None, None)
    each = jax.vmap(run, in_axes=(0,) * 6 + (None,), spmd_axis_name=axes)
    cut = [parted(x, parts, *("heads", None)[: x.ndim - 2]) for x in rows]
    y_PBTHV, found = each(*cut, parted(starts_BT1, parts, None), empty)
    found = constrain(found, None, "batch", "heads", None, None)

    def enter(state_BHKV, found_BHKV):
        b, A = found_BHKV[..., :V], found_BHKV[..., V:]
        return b + jnp.matmul(A, state_BHKV, precision=EXACT), state_BHKV

    state_BHKV, entered = jax.lax.scan(enter, state_BHKV, found)
    entered = constrain(entered, "sequence", "batch", "heads", None, None)
    y = y_PBTHV[..., :V] + jnp.einsum("pbthk,pbhkv->pbthv", y_PBTHV[..., V:], entered)
    return joined(y, "heads", None).astype(v_BTHV.dtype), state_BHKV


def causal_convolution(
    x_BTF: jax.Array,
    kernel_WF: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    before_BWF: jax.Array | None = None,
) -> jax.Array:
    """Convolves each feature with the W - 1 positions before, of the same document.

    Args:
      x_BTF: features.
      kernel_WF: factors of the positions, that of the position itself last.
      segments_BT: int32 document numbers; None means one.
      before_BWF: the W - 1 positions before the first, [B, W - 1, F]; None means zeros.

    Returns:
      [B, T, F]. Where rows are split, each device receives what it lacks of the one before.

    >>> x, kernel = jnp.arange(1.0, 5).reshape(1, 4, 1), jnp.array([[10.0], [1.0]])
    >>> causal_convolution(x, kernel).ravel().tolist()
    [1.0, 12.0, 23.0, 34.0]
    """
    (B, T, F), reach = x_BTF.shape, len(kernel_WF) - 1
    axes, parts = split_over("sequence")
    parts = parts if parts > 1 and T % parts == 0 and T // parts >= reach else 1
    if before_BWF is None:
        before_BWF = jnp.zeros((B, reach, F), x_BTF.dtype)

    def convolve(x_BTF, before_BWF, seen_BTW):
        x_BTF = jnp.concatenate([before_BWF, x_BTF], 1)
        length = x_BTF.shape[1] - reach
        taps = (x_BTF[:, i : i + length] * kernel_WF[i] for i in range(reach + 1))
        return sum(jnp.where(seen_BTW[..., i : i + 1], x, 0) for i, x in enumerate(taps))

    numbers = jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT
    numbers = constrain(numbers, "batch", None)
    padded = jnp.pad(numbers, ((0, 0), (reach, 0)), mode="edge")  # of what is before
    seen = [padded[:, i : i + T] == numbers for i in range(reach + 1)]
    seen_BTW = constrain(jnp.stack(seen, -1), "batch", None, None)
    if parts == 1:  # rows that are whole, or too short to be split
        y_BTF = convolve(constrain(x_BTF, "batch", None, "heads"), before_BWF, seen_BTW)
        return constrain(y_BTF, "batch", "sequence", "heads")
    x_PBTF, whole = parted(x_BTF, parts, "heads"), (None, "batch", None, "heads")
    # Ends of parts are few: gathered by all, since a permutation in a pipeline's branch would
    # wait for devices that take the other.
    ends = constrain(x_PBTF[:, :, T // parts - reach :], *whole)
    ends = constrain(jnp.concatenate([before_BWF[None].astype(ends.dtype), ends[:-1]]), *whole)
    ends = constrain(ends, "sequence", *whole[1:])
    each = jax.vmap(convolve, spmd_axis_name=axes)
    return joined(each(x_PBTF, ends, parted(seen_BTW, parts, None)), "heads")


def parted(x_BT: jax.Array, parts: int, *rest: str | None) -> jax.Array:
    """Positions [B, T, ...] as parts of rows, [P, B, T / P, ...], each on its own devices."""
    B, T = x_BT.shape[:2]
    x_BT = constrain(x_BT, "batch", "sequence", *rest)
    x = jnp.moveaxis(x_BT.reshape(B, parts, T // parts, *x_BT.shape[2:]), 1, 0)
    return constrain(x, "sequence", "batch", None, *rest)


def joined(x_PBT: jax.Array, *rest: str | None) -> jax.Array:
    """Parts of rows [P, B, T / P, ...] as positions [B, T, ...]."""
    P, B, T = x_PBT.shape[:3]
    x_PBT = constrain(x_PBT, "sequence", "batch", None, *rest)
    x = jnp.moveaxis(x_PBT, 0, 1).reshape(B, P * T, *x_PBT.shape[3:])
    return constrain(x, "batch", "sequence", *rest)


def _run(q, k, v, beta, log_decay, starts, state_BHKV, *, size: int) -> tuple[jax.Array, jax.Array]:
    """The rule for [B, T, H, ...], in chunks of ``size`` positions; ``starts`` [B, T, 1]."""
    B, T, H, V = v.shape
    N = -(-T // size)

    def cut(x_BTH: jax.Array) -> jax.Array:  # [N, B, H, C, ...]; what is added changes no state
        x = jnp.pad(x_BTH, ((0, 0), (0, N * size - T), *((0, 0),) * (x_BTH.ndim - 2)))
        x = x.reshape(B, N, size, *x.shape[2:])
        return x.transpose(1, 0, 3, 2, *range(4, x.ndim))

    chunks = [cut(x) for x in (q, k, v, beta, log_decay, starts)]

    def step(state_BHKV, chunk):
        eq_CK, scores_CC, bk_CK, bv_CV, lk_CK, whole = _within(*chunk)
        u_CV = bv_CV - bk_CK @ state_BHKV
        y_CV = eq_CK @ state_BHKV + scores_CC @ u_CV
        state_BHKV = whole[..., None, None] * state_BHKV + jnp.swapaxes(lk_CK, -1, -2) @ u_CV
        return state_BHKV, y_CV

    step = jax.checkpoint(step, prevent_cse=False)
    state_BHKV, y_NBHCV = jax.lax.scan(step, state_BHKV, chunks)
    y_BTHV = y_NBHCV.transpose(1, 0, 3, 2, 4).reshape(B, N * size, H, V)
    return y_BTHV[:, :T], state_BHKV


def _within(q_CK, k_CK, v_CV, beta_C, log_decay_C, starts_C) -> tuple[jax.Array, ...]:
    """What a chunk does to any state that it begins with; leading axes [..., B, H]."""
    C = log_decay_C.shape[-1]
    after = jnp.tri(C, dtype=log_decay_C.dtype)
    earlier = jnp.tri(C, k=-1, dtype=log_decay_C.dtype)
    # Sums over j < l <= i of their own terms: a difference of sums would be rounded as they are.
    sums_CC = jnp.matmul(after * log_decay_C[..., None, :], earlier, precision=EXACT)
    document_C = jnp.cumsum(starts_C, -1)
    same_CC = document_C[..., :, None] == document_C[..., None, :]
    decay_CC = jnp.where(same_CC, after * jnp.exp(sums_CC), 0)
    entry_C = jnp.exp(sums_CC[..., 0] + log_decay_C[..., :1])
    entry_C1 = jnp.where(document_C == 0, entry_C, 0)[..., None]
    beta_C1, keys_KC = beta_C[..., None], jnp.swapaxes(k_CK, -1, -2)
    solve_CC = unit_lower_inverse(beta_C1 * earlier * decay_CC * (k_CK @ keys_KC))
    bk_CK, bv_CV = solve_CC @ (beta_C1 * entry_C1 * k_CK), solve_CC @ (beta_C1 * v_CV)
    scores_CC = decay_CC * (q_CK @ keys_KC)
    lk_CK = decay_CC[..., -1, :, None] * k_CK
    return entry_C1 * q_CK, scores_CC, bk_CK, bv_CV, lk_CK, entry_C1[..., -1, 0]


@jax.custom_jvp
def unit_lower_inverse(x_CC: jax.Array) -> jax.Array:
    """The inverse of the identity plus what of [..., C, C] is below its diagonal, C a power of two.

    Halves are inverted together, which is forward substitution by blocks in log2 C products; a
    library's triangular solve is no product, and a partitioner would gather its operands.

    >>> unit_lower_inverse(jnp.array([[0.0, 0.0], [3.0, 0.0]])).tolist()
    [[1.0, 0.0], [-3.0, 1.0]]
    """
    if (half := x_CC.shape[-1] // 2) == 0:
        return jnp.ones_like(x_CC)
    a, b = unit_lower_inverse(jnp.stack([x_CC[..., :half, :half], x_CC[..., half:, half:]]))
    low = -jnp.matmul(jnp.matmul(b, x_CC[..., half:, :half], precision=EXACT), a, precision=EXACT)
    above = jnp.concatenate([a, jnp.zeros_like(a)], -1)
    return jnp.concatenate([above, jnp.concatenate([low, b], -1)], -2)


@unit_lower_inverse.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(*primals)
    change = jnp.tril(tangents[0], -1)
    return inverse, -jnp.matmul(
        jnp.matmul(inverse, change, precision=EXACT), inverse, precision=EXACT
    )
