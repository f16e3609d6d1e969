"""Output logits and the cross-entropy of tokens, without keeping the logits.

Shapes: B batch, T positions, N tokens (of a tile), D width, E width of a teacher, V columns of the
projection (vocabulary and padding), S shards of the tokens, M = N / S, K tokens that are stored.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.ops.linear import Kernel, copies, matmul, matmul_float32
from jaxtrain.ops.numerics import MASKED, soft_cap, soft_cap_slope, wide
from jaxtrain.ops.per_device import split_over
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import constrain, scatter_sequence, splits_residual, splits_rows

# Logits that one tile may have on one device, in float32 256 MiB. On a GPU the gradient of the
# kernel is read and written once for every tile, and tiles of few tokens leave processors idle.
TILE, GPU_TILE = 2**26, 2**28


def cross_entropy(
    x_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    vocab_size: int,
    bias_V: jax.Array | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums ``mask * (-log softmax(logits)[target] + z_loss * log(Z)**2)``.

    The logits are ``x @ kernel + bias``, capped if asked, and Z is the softmax's normaliser
    ``sum(exp(logits))``, whose log the second term keeps near 0 (PaLM, Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, section 5).

    Products are in the dtype of the operands with float32 accumulation, all else is float32. Logits
    exist for one tile of tokens at a time: where the result is differentiated, both gradients are
    formed along with the loss, tile by tile, so that nothing is computed twice and what is kept for
    the backward pass has the size of ``x_BTD`` and ``kernel_DV``.

    Args:
      x_BTD: final hidden states.
      kernel_DV: output projection; columns from ``vocab_size`` on are padding and left out. A tied
        token table is given transposed. Of a :class:`jaxtrain.ops.linear.Kernel` that is no array,
        the logits of a tile are computed again for gradients, which are JAX's own: a frozen part
        of it has none.
      targets_BT: int32, below ``vocab_size``.
      mask_BT: weight of each token; 0 leaves it out.
      vocab_size: columns that are tokens.
      bias_V: added to the logits; None adds nothing.
      softcap: logits are ``softcap * tanh(logits / softcap)``; None leaves them.
      chunk: positions of every row per tile, a divisor of T; None takes the fewest tiles with at
        most ``TILE`` logits per device.
      z_loss: coefficient of the second term.

    Returns:
      The total; ``sum(mask)`` over tokens whose target has the largest logit (ties count); and the
      second term's part of the total. Float32 scalars; the last two have no gradient.

    Raises:
      ValueError: if ``chunk`` does not divide T.

    >>> x_BTD = jnp.zeros((1, 2, 3))
    >>> total, *_ = cross_entropy(
    ...     x_BTD, jnp.ones((3, 64)), jnp.array([[0, 1]]), jnp.ones((1, 2)), vocab_size=2
    ... )
    >>> (total / 2).round(4)  # log 2
    Array(0.6931, dtype=float32)
    """
    tiles = _count_tiles(x_BTD, kernel_DV, chunk)
    mask_BT = mask_BT.astype(wide(x_BTD.dtype))
    compute = _plain_cross_entropy if isinstance(kernel_DV, Kernel) else _cross_entropy
    form = _Form(vocab_size, tiles, z_loss, softcap)
    return compute(form, x_BTD, kernel_DV, bias_V, targets_BT, mask_BT)


def scores(
    x_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    vocab_size: int,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns ``log softmax(x @ kernel)[target]`` of every token, float32 [B, T], and whether the
    target is the most probable one, bool.

    For losses that are no sum over tokens, and for evaluation. Logits exist for one tile of tokens
    at a time, and for gradients they are computed again. Arguments and errors are those of
    :func:`cross_entropy`.
    """
    tiles = _count_tiles(x_BTD, kernel_DV, chunk)
    form = _Form(vocab_size, tiles, 0.0, softcap)
    nll_BT, hit_BT, _ = _checkpointed_losses(form, x_BTD, kernel_DV, None, targets_BT)
    return -nll_BT, hit_BT > 0


def of_logits(
    function: Callable[..., tuple[jax.Array, ...]],
    x_BTD: jax.Array,
    kernel_DV: jax.Array,
    *per_target_BT: jax.Array,
    chunk: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns what a function makes of the logits ``x @ kernel`` of each token, [B, T] each.

    ``function(logits_NV, *per_target_N)`` is called for one tile of tokens at a time, in float32,
    and for gradients the logits are computed again. Other arguments and errors are those of
    :func:`cross_entropy`.
    """
    form = _Form(kernel_DV.shape[1], _count_tiles(x_BTD, kernel_DV, chunk), 0.0, None)
    return _of_logits(form, function, x_BTD, kernel_DV, *per_target_BT)


def divergence(
    x_BTD: jax.Array,
    kernel_DV: jax.Array,
    teacher_x_BTE: jax.Array,
    teacher_kernel_EV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    biases: tuple[jax.Array | None, jax.Array | None] = (None, None),
    softcaps: tuple[float | None, float | None] = (None, None),
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums a student's ``-log softmax(logits)[target]``, and its divergence from a teacher.

    The divergence of a token is ``KL(p || q)`` in nats, of ``p = softmax(teacher / temperature)``
    and ``q = softmax(student / temperature)``. The teacher has no gradient. Logits of both exist
    for one tile of tokens at a time, and for gradients they are computed again.

    Args:
      teacher_x_BTE, teacher_kernel_EV: the teacher's hidden states and projection, to as many
        columns.
      biases, softcaps: the student's and the teacher's.

    Other arguments and errors are those of :func:`cross_entropy`.

    Returns:
      The sums, weighted by the mask, of the cross-entropy, of tokens whose target has the student's
      largest logit, and of the divergence; float32 scalars.

    >>> one, logits = jnp.ones((1, 1, 1)), jnp.log(jnp.array([[0.2, 0.8], [0.5, 0.5]]))
    >>> token = jnp.zeros((1, 1), int), jnp.ones((1, 1))
    >>> total, _, kl = divergence(one, logits[:1], one, logits[1:], *token, vocab_size=2)
    >>> f"{total:.4f}, {kl:.4f}"  # -log 0.2, and log(0.5 / 0.4)
    '1.6094, 0.2231'
    """
    tiles = _count_tiles(x_BTD, kernel_DV, chunk)
    shards, form = _count_shards(x_BTD, tiles), _Form(vocab_size, 1, 0.0, softcaps[1])
    of_teacher = teacher_x_BTE, teacher_kernel_EV, biases[1]
    teacher_x_BTE, teacher_kernel_EV, teacher_bias_V = jax.lax.stop_gradient(of_teacher)
    teacher_kernel_SEV = copies(teacher_kernel_EV, shards, axes=(None, "vocab"))

    def kl(log_q_NV, known_V, teacher_x_BTE):
        (teacher_x_NE,) = _gathered((teacher_x_BTE,))
        teacher_NV = _tile_logits(form, teacher_x_NE, teacher_kernel_SEV, teacher_bias_V)
        log_p_NV = jax.nn.log_softmax(jnp.where(known_V, teacher_NV / temperature, MASKED))
        return jnp.where(known_V, jnp.exp(log_p_NV) * (log_p_NV - log_q_NV), 0.0).sum(axis=1)

    how = {"vocab_size": vocab_size, "temperature": temperature, "chunk": chunk}
    how |= {"softcap": softcaps[0], "bias_V": biases[0]}
    return _diverging(kl, (x_BTD, kernel_DV, targets_BT, mask_BT), teacher_x_BTE, **how)


def stored_divergence(
    x_BTD: jax.Array,
    kernel_DV: jax.Array,
    ids_BTK: jax.Array,
    log_probs_BTK1: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums as :func:`divergence` does, of a teacher's stored log-probabilities.

    A teacher has probabilities of K tokens and one of all others together, and so has the student:
    their divergence is at most that of all tokens, and the same where K is ``vocab_size``.

    Args:
      ids_BTK: tokens, different ones, in any order.
      log_probs_BTK1: their log-probabilities at the ``temperature``, and that of all others.

    Other arguments and errors, and results, are those of :func:`divergence`.
    """

    def kl(log_q_NV, known_V, *stored):
        ids_NK, log_p_NK1 = map(_flat, stored)
        log_p_NK1 = log_p_NK1.astype(jnp.float32)
        # Comparisons and sums, not a gather: the vocabulary may be sharded.
        same_NKV = ids_NK[:, :, None] == jnp.arange(len(known_V))
        stored_NV = same_NKV.any(1)
        log_p_NV = jnp.where(same_NKV, log_p_NK1[:, :-1, None], 0.0).sum(1)
        kl_NV = jnp.where(stored_NV, jnp.exp(log_p_NV) * (log_p_NV - log_q_NV), 0.0)
        has_rest_N = jnp.exp(rest_N := log_p_NK1[:, -1]) > 0
        log_q_N = jax.nn.logsumexp(jnp.where(stored_NV, MASKED, log_q_NV), axis=1)
        rest_N = jnp.where(has_rest_N, rest_N, 0.0)
        return kl_NV.sum(1) + jnp.where(has_rest_N, jnp.exp(rest_N) * (rest_N - log_q_N), 0.0)

    how = {"vocab_size": vocab_size, "temperature": temperature, "chunk": chunk}
    given, stored = (x_BTD, kernel_DV, targets_BT, mask_BT), jax.lax.stop_gradient(log_probs_BTK1)
    return _diverging(kl, given, ids_BTK, stored, softcap=softcap, **how)


def relations(
    x_BTD: jax.Array,
    teacher_x_BTE: jax.Array,
    mask_BT: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Sums how differently a student and its teacher see the tokens of a document.

    A token's part is the mean, over the tokens of its document, of the squared difference of two
    cosines: that of both tokens' hidden states in the student, and in the teacher. Their widths may
    differ (similarity-preserving distillation, Tung and Mori 2019,
    https://arxiv.org/abs/1907.09682). The teacher has no gradient. Cosines exist for one tile of
    tokens at a time.

    Args:
      teacher_x_BTE: the teacher's hidden states.
      mask_BT: weights of tokens, both as one of a pair and in the sum.
      segments_BT: numbers of documents; left out, a row is one.

    Other arguments and errors are those of :func:`cross_entropy`.

    Returns:
      The sum, weighted by the mask; a float32 scalar.

    >>> apart, alike = jnp.eye(2)[None], jnp.ones((1, 2, 3))
    >>> f"{relations(apart, alike, jnp.ones((1, 2))):.4f}"  # of each, (0 + 1) / 2
    '1.0000'
    """
    of_pairs = jax.ShapeDtypeStruct((x_BTD.shape[-1], x_BTD.shape[1]), x_BTD.dtype)
    tiles = _count_tiles(x_BTD, of_pairs, chunk)
    mask_BT = mask_BT.astype(wide(x_BTD.dtype))
    segments_BT = jnp.zeros(mask_BT.shape, int) if segments_BT is None else segments_BT

    def directions(x):
        x = x.astype(mask_BT.dtype)
        return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-12)

    both = directions(x_BTD), directions(jax.lax.stop_gradient(teacher_x_BTE))
    whole = [constrain(x, "batch", None, None) for x in both]

    @functools.partial(jax.checkpoint, prevent_cse=tiles == 1)
    def tile(_, parts):
        *some, segments_BN = parts
        some = [constrain(x, "batch", "sequence", None) for x in some]
        student_BNT, teacher_BNT = (
            jnp.einsum("BND,BTD->BNT", *each) for each in zip(some, whole, strict=True)
        )
        among_BNT = (segments_BN[:, :, None] == segments_BT[:, None]) * mask_BT[:, None]
        sum_BN = (among_BNT * jnp.square(student_BNT - teacher_BNT)).sum(-1)
        return None, (sum_BN / jnp.maximum(among_BNT.sum(-1), 1e-6),)

    _, (per_token_BT,) = _over_tiles(tile, None, tiles, *both, segments_BT)
    return (per_token_BT * mask_BT).sum()


def outcome_divergence(
    logits: jax.Array, teacher_logits: jax.Array, temperature: float = 1.0
) -> jax.Array:
    """Returns ``KL(p || q)`` over the last axis, in nats, as :func:`divergence` has it of tokens;
    for few outcomes, such as classes. The teacher has no gradient.

    >>> round(float(outcome_divergence(jnp.log(jnp.array([0.2, 0.8])), jnp.zeros(2))), 4)
    0.2231
    """
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits) / temperature)
    log_q = jax.nn.log_softmax(logits / temperature)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def _diverging(kl, given, *of_teacher, vocab_size, temperature, softcap, chunk, bias_V=None):
    """The sums of :func:`divergence`, by a tile's ``kl(log_q_NV, known_V, *of_teacher) -> [N]``."""
    x_BTD, kernel_DV, targets_BT, mask_BT = given
    tiles = _count_tiles(x_BTD, kernel_DV, chunk)
    form = _Form(vocab_size, tiles, 0.0, softcap)
    kernel_SDV = copies(kernel_DV, _count_shards(x_BTD, tiles), axes=(None, "vocab"))
    mask_BT = mask_BT.astype(wide(x_BTD.dtype))

    @functools.partial(jax.checkpoint, prevent_cse=tiles == 1)
    def tile(_, parts):
        x_BTD, targets_BT, *of_teacher = parts
        x_ND, targets_N = _gathered((x_BTD, targets_BT))
        logits_NV = _tile_logits(form, x_ND, kernel_SDV, bias_V)
        nll_N, hit_N, _ = _token_losses(vocab_size, logits_NV, targets_N)[0]
        known_V = jnp.arange(logits_NV.shape[1]) < vocab_size
        log_q_NV = jax.nn.log_softmax(jnp.where(known_V, logits_NV / temperature, MASKED))
        return None, _in_rows((nll_N, hit_N, kl(log_q_NV, known_V, *of_teacher)), parts)

    _, per_token = _over_tiles(tile, None, tiles, x_BTD, targets_BT, *of_teacher)
    return tuple((each_BT * mask_BT).sum() for each_BT in per_token)


class _Form(NamedTuple):
    """Static arguments of the tiled loss."""

    vocab_size: int
    tiles: int
    z_loss: float
    softcap: float | None


def _checkpointed_losses(form, x_BTD, kernel_DV, bias_V, targets_BT):
    losses = lambda *of_tile: _token_losses(form.vocab_size, *of_tile)[0]  # noqa: E731
    return _of_logits(form, losses, x_BTD, kernel_DV, targets_BT, bias_V=bias_V)


def _of_logits(form, function, x_BTD, kernel_DV, *per_target, bias_V=None):
    shards = _count_shards(x_BTD, form.tiles)
    # One copy per shard of the tokens: what fsdp splits is gathered before the tiles, and a copy's
    # gradient is summed over the tiles before it is reduced over devices.
    kernel_SDV = copies(kernel_DV, shards, axes=(None, "vocab"))

    @functools.partial(jax.checkpoint, prevent_cse=form.tiles == 1)
    def tile(_, parts):
        x_ND, *per_target_N = _gathered(parts)
        logits_NV = _tile_logits(form, x_ND, kernel_SDV, bias_V)
        return None, _in_rows(function(logits_NV, *per_target_N), parts)

    return _over_tiles(tile, None, form.tiles, x_BTD, *per_target)[1]


def _plain_cross_entropy(form, x_BTD, kernel_DV, bias_V, targets_BT, mask_BT):
    per_token = _checkpointed_losses(form, x_BTD, kernel_DV, bias_V, targets_BT)
    total, hits, z_total = _sums(form.z_loss, mask_BT, *per_token)[0]
    return total, hits, jax.lax.stop_gradient(z_total)


_cross_entropy = jax.custom_vjp(_plain_cross_entropy, nondiff_argnums=(0,))


def _forward(form, x_BTD, kernel_DV, bias_V, targets_BT, mask_BT):
    dtype, sums_in = x_BTD.dtype, wide(x_BTD.dtype)
    scale = _fixed_scale(dtype, mask_BT)
    (D, V), shards = kernel_DV.shape, _count_shards(x_BTD, form.tiles)
    kernel_DV = constrain(kernel_DV, None, "vocab")
    whole = platform() == "gpu" and split_over("vocab")[1] == 1
    in_passes = _one_pass if whole else _three_passes

    def tile(sums, parts):
        d_kernel_SDV, d_bias_SV = sums
        x_ND, targets_N, mask_N = _gathered(parts)
        product_NV = jnp.matmul(x_ND, kernel_DV, preferred_element_type=sums_in)
        logits_NV = _logits(form, product_NV, bias_V)
        per_token, weights_NV, total_N = _token_losses(
            form.vocab_size, logits_NV, targets_N, in_passes
        )
        # Of softmax and of the target; a division for each logit would cost more than the rest.
        by_target_N = scale * mask_N
        by_weight_N = by_target_N / total_N
        if form.z_loss:
            by_weight_N *= 1 + 2 * form.z_loss * per_token[2]
        target_NV = jnp.where(targets_N[:, None] == jnp.arange(V), by_target_N[:, None], 0.0)
        d_logits_NV = weights_NV * by_weight_N[:, None] - target_NV
        if form.softcap is not None:
            d_logits_NV = d_logits_NV * soft_cap_slope(logits_NV, form.softcap)
        d_logits_NV = d_logits_NV.astype(dtype)
        d_logits_BTV = _unflat(d_logits_NV, parts[0])
        d_x_BTD = jnp.matmul(d_logits_BTV, kernel_DV.T, preferred_element_type=sums_in)
        d_x_BTD = scatter_sequence(d_x_BTD).astype(dtype)
        # One sum per shard of the tokens, added up after the last tile: a single sum would make
        # the partitioner reduce over all devices in every tile.
        x_SDM = x_ND.reshape(shards, -1, D).transpose(0, 2, 1)
        d_logits_SMV = d_logits_NV.reshape(shards, -1, V)
        part_SDV = jnp.matmul(x_SDM, d_logits_SMV, preferred_element_type=sums_in)
        d_kernel_SDV = constrain(d_kernel_SDV + part_SDV, "tokens", None, "vocab")
        if bias_V is not None:
            d_bias_SV += d_logits_SMV.sum(axis=1, dtype=sums_in)
        return (d_kernel_SDV, d_bias_SV), (d_x_BTD, *_in_rows(per_token, parts))

    start = constrain(jnp.zeros((shards, D, V), sums_in), "tokens", None, "vocab")
    start = start, None if bias_V is None else jnp.zeros((shards, V), sums_in)
    sums, per_token = _over_tiles(tile, start, form.tiles, x_BTD, targets_BT, mask_BT)
    d_kernel_DV, d_bias_V = jax.tree.map(lambda x: x.sum(axis=0), sums)
    d_x_BTD, *per_token = per_token
    sums, loss_BT = _sums(form.z_loss, mask_BT, *per_token)
    like = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), (kernel_DV, bias_V))
    saved = (d_x_BTD, (d_kernel_DV, d_bias_V), loss_BT, like, scale)
    return sums, saved


def _backward(form, saved, cotangents):
    d_x_BTD, d_weights, loss_BT, like, scale = saved
    d_total = cotangents[0]
    factor = d_total / scale
    d_x = (d_x_BTD * factor).astype(d_x_BTD.dtype)
    d_weights = jax.tree.map(lambda d, x: (d * factor).astype(x.dtype), d_weights, like)
    return d_x, *d_weights, None, loss_BT * d_total


_cross_entropy.defvjp(_forward, _backward)


def _tile_logits(form, x_ND, kernel_SDV, bias_V=None):
    shards = jax.tree.leaves(kernel_SDV)[0].shape[0]
    x_SMD = x_ND.reshape(shards, -1, x_ND.shape[1])
    product_SMV = jax.vmap(matmul_float32)(x_SMD, kernel_SDV)
    return _logits(form, product_SMV.reshape(len(x_ND), -1), bias_V)


def _logits(form, product_NV, bias_V):
    biased_NV = product_NV if bias_V is None else product_NV + bias_V.astype(product_NV.dtype)
    return soft_cap(biased_NV, form.softcap)


def _sums(z_loss, mask_BT, nll_BT, hit_BT, log_z_BT):
    """Returns the three results, and each token's loss."""
    z_BT = z_loss * log_z_BT**2
    loss_BT = nll_BT + z_BT if z_loss else nll_BT
    return tuple((a * mask_BT).sum() for a in (loss_BT, hit_BT, z_BT)), loss_BT


def _three_passes(logits_NV, target_NV):
    """The largest logit, the sum of the weights ``exp(logit - largest)``, that of ``target_NV``,
    [N] each, and the weights."""
    peak = logits_NV.max(axis=1)
    weights = jnp.exp(logits_NV - peak[:, None])
    return peak, weights.sum(axis=1), target_NV.sum(axis=1), weights


def _token_losses(vocab_size, logits, targets_N, in_passes=_three_passes):
    """Returns per token the loss, whether the target is on top and log Z, [N]; softmax times its
    total [N, V], and that total [N]."""
    column = jnp.arange(logits.shape[1])
    if vocab_size < logits.shape[1]:
        logits = jnp.where(column < vocab_size, logits, MASKED)
    # A comparison and a sum, not a gather: the vocabulary may be sharded.
    target_NV = jnp.where(column == targets_N[:, None], logits, 0.0)
    peak, total, target, weights = in_passes(logits, target_NV)
    log_z = peak + jnp.log(total)
    return (log_z - target, target >= peak, log_z), weights, total


def _one_pass(logits_NV, target_NV):
    """Does as :func:`_three_passes`, has no derivative and does not take split columns: a GPU reads
    the logits once for all (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867)."""

    def join(a, b):
        # One exponential: that of the larger one is 1.
        less, first = jnp.exp(-jnp.abs(a[0] - b[0])), a[0] >= b[0]
        total = jnp.where(first, a[1] + b[1] * less, a[1] * less + b[1])
        return jnp.maximum(a[0], b[0]), total, a[2] + b[2]

    given = logits_NV, jnp.ones_like(logits_NV), target_NV
    start = (jnp.asarray(x, logits_NV.dtype) for x in (MASKED, 0, 0))
    peak, *sums = jax.lax.reduce(given, tuple(start), join, (1,))
    return peak, *sums, jnp.exp(logits_NV - peak[:, None])


def _gathered(parts):
    """Hidden states of a tile's tokens, [N, D], and what its targets have, [N] each."""
    x_BTD, *per_target = parts
    return _flat(constrain(x_BTD, "batch", "sequence", None)), *map(_flat, per_target)


def _in_rows(per_token, parts):
    """Reshapes the per-token values [N] of a tile to the shape of its targets."""
    return tuple(_unflat(a, parts[1]) for a in per_token)


def _flat(x_BT: jax.Array) -> jax.Array:
    """[B, T, ...] to [N, ...], the tokens of each device one after another: in the order of B and T
    they would be gathered where both are split."""
    (B, T, *rest), (rows, parts) = x_BT.shape, _shards(*x_BT.shape[:2])
    if parts > 1:
        x_BT = x_BT.reshape(rows, B // rows, parts, T // parts, *rest).swapaxes(1, 2)
    return x_BT.reshape(-1, *rest)


def _unflat(x_N: jax.Array, like_BT: jax.Array) -> jax.Array:
    """The inverse of :func:`_flat`: [N, ...] to [B, T, ...]."""
    (B, T), rest = like_BT.shape[:2], x_N.shape[1:]
    rows, parts = _shards(B, T)
    if parts > 1:
        x_N = x_N.reshape(rows, parts, B // rows, T // parts, *rest).swapaxes(1, 2)
    return x_N.reshape(B, T, *rest)


def _over_tiles(tile, start, tiles, x_BTD, *per_target):
    """Folds ``tile(sums, (x_BTD, *per_target)) -> (sums, per_token_BT)`` over tiles of tokens.

    Tile j holds positions j, j + tiles, ... of every row. A contiguous cut would put a whole tile
    on one device where the sequence is sharded, a cut of the flattened tokens where the batch is.
    """
    B, T, _ = x_BTD.shape
    batch = (x_BTD, *per_target)
    if tiles == 1:
        return tile(start, batch)

    def cut(a):
        return jnp.moveaxis(a.reshape(B, T // tiles, tiles, *a.shape[2:]), 2, 0)

    sums, per_token = jax.lax.scan(tile, start, tuple(cut(a) for a in batch))
    return sums, jax.tree.map(
        lambda a: jnp.moveaxis(a, 0, 2).reshape(B, T, *a.shape[3:]), per_token
    )


def _count_tiles(x_BTD: jax.Array, kernel_DV: jax.Array, chunk: int | None) -> int:
    """Into how many tiles the positions are cut; see :func:`cross_entropy`."""
    B, T, D = x_BTD.shape
    columns = jax.eval_shape(matmul, jax.ShapeDtypeStruct((1, D), x_BTD.dtype), kernel_DV).shape[1]
    tiles = _tiles(B, T, columns) if chunk is None else T // chunk
    if T % tiles or (chunk is not None and tiles * chunk != T):
        raise ValueError(f"chunk={chunk} does not divide the {T} positions of a row")
    return tiles


def _tiles(B: int, T: int, V: int) -> int:
    """The fewest tiles, a divisor of T, with at most as many logits per device as a tile may have.

    Where devices split rows that are not cut, they are to split those of a tile too.
    """
    most = GPU_TILE if platform() == "gpu" else TILE
    needed = -(-B * T * V // (most * split_over()[1]))
    divisors = [n for n in range(min(needed, T), T + 1) if T % n == 0]
    splits = splits_residual if splits_residual(T) else splits_rows
    even = [n for n in divisors if splits(T // n)] if splits(T) else []
    return (even or divisors)[0]


def _count_shards(x_BTD: jax.Array, tiles: int) -> int:
    """Into how many parts the ambient mesh cuts the tokens of a tile."""
    return math.prod(_shards(x_BTD.shape[0], x_BTD.shape[1] // tiles))


def _shards(B: int, T: int) -> tuple[int, int]:
    """Into how many parts the ambient mesh cuts a batch, and rows of T positions."""
    rows, parts = split_over("batch")[1], split_over("sequence")[1]
    return (rows, parts if T % parts == 0 else 1) if B % rows == 0 else (1, 1)


def _fixed_scale(dtype, mask_BT) -> jax.Array | float:
    # The gradient is formed before the loss scale is known. In float16 a softmax over a large
    # vocabulary lies below the normal range, and a token's weight may lie above it or below: here
    # the largest one becomes 1024, or up to twice that, as a power of two rounds nothing.
    if dtype != jnp.float16:
        return 1.0
    _, exponent = jnp.frexp(jnp.abs(mask_BT).max())
    return jnp.ldexp(jnp.float32(2048.0), -jnp.maximum(exponent, -100))
