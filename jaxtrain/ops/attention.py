"""Softmax attention: one function, and an explicit choice of what computes it.

Shapes: B batch, T queries, S keys, H query heads, G key and value heads, R = H / G, K features.
"""

import functools
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.decisions import Kernel, Kind, Reason, Why
from jaxtrain.ops import per_device, splash
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.tiled import tiled_attention
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import report_finding

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")

# What "auto" takes where it can; elsewhere there is none.
FUSED = {"gpu": "cudnn", "tpu": "splash"}

# Entered with True where a step is traced for chips that are described and not here; a step that
# trains afterwards is traced again.
ahead_of_time = jax.make_user_context(False)

# Entered with what computes the attention of models that leave it open ("auto").
preferred = jax.make_user_context("auto")

# Entered with True where a gradient is differentiated again, which those of kernels cannot be.
differentiated_twice = jax.make_user_context(False)

# The scope, in the traced program, of what a chip's fused kernel computes without memory traffic
# (planning reads it).
KERNEL_SCOPE = "fused_attention"
# Begins the scopes of :func:`branch_shares`.
BRANCH_SHARES = "branch_shares_"

_log = logging.getLogger(__name__)
_say_once = functools.cache(_log.warning)


def in_fused_kernel(scopes: str) -> bool:
    """Whether a path of scopes, as JAX writes it, is within what a fused kernel computes.

    >>> in_fused_kernel("jvp(blocks)/fused_attention/exp"), in_fused_kernel("unfused_attention/exp")
    (True, False)
    """
    return re.search(rf"\b{KERNEL_SCOPE}\b", scopes) is not None


def branch_shares(*counts: int) -> Any:
    """Returns a named scope that records how often each side of a ``cond`` is taken (false, true).

    Planning weighs the sides by these counts instead of counting the larger one.
    """
    return jax.named_scope(BRANCH_SHARES + "_".join(map(str, counts)))


def shares_of(scope: str) -> list[float] | None:
    """The shares that :func:`branch_shares` has put into a scope's name, if any.

    >>> shares_of("jit(step)/branch_shares_1_3/cond")
    [0.25, 0.75]
    """
    found = re.search(rf"\b{BRANCH_SHARES}([\d_]+)", scope)
    counts = [int(count) for count in found[1].split("_")] if found else []
    return [count / sum(counts) for count in counts] or None


def attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    bias_HO: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
    implementation: str = "auto",
    block: int | None = None,
    windowed: jax.Array | None = None,
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(K) + bias) v`` per head; H / G query heads share a key head.

    Args:
      q_BTHK: queries.
      k_BSGK, v_BSGK: keys and values; G divides H, and they are never repeated in memory.
      causal: position t sees positions up to t; needs S = T.
      window: position t sees none before t - window + 1, nor, without ``causal``, after
        t + window - 1; needs S = T. None means all.
      segments_BT: int32 document numbers; a position sees only its own document. Padding, number 0,
        sees padding, so that no row is empty. Needs S = T, or ``key_segments_BS``.
      key_segments_BS: int32 document numbers of the keys, where they are not those of the queries;
        the xla form alone has them.
      bias_HO: a number per head for every distance, O = S + T - 1: query t sees key s with
        ``bias_HO[:, s - t + T - 1]`` added to its score. It has a gradient, and is never whole as
        [T, S] but within a tile. The xla form alone has it.
      scale: of the scores before the bias; None means ``1 / sqrt(K)``.
      softcap: scores are ``softcap * tanh(scores / softcap)`` before they are masked (Gemma 2,
        https://arxiv.org/abs/2408.00118), in the xla form and in splash; None leaves them.
      dropout: rate at which softmax weights are dropped, in the xla form alone. The masks of the
        forward pass are drawn again in the backward pass, tile by tile, from ``rng``.
      rng: key for dropout; None means none.
      implementation: ``"xla"``, ``"cudnn"`` (NVIDIA's fused kernel), ``"splash"`` (JAX's for TPUs)
        or ``"auto"``; see :func:`choose`.
      block: queries per tile of the xla form; None chooses. Rows of more than 4 tiles are tiled
        over keys too, so that temporaries grow linearly with T.
      windowed: bool scalar, where it is not known while tracing whether the window holds: both
        forms are compiled, and a branch takes one; there can be no bias.

    Returns:
      [B, T, H, K] in the dtype of ``q_BTHK``. Scores and softmax are float32.

    Raises:
      ValueError: for shapes that do not fit, or an implementation that cannot run here.
    """
    (_, T, H, _), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key heads evenly; use a divisor of {H}")
    if window is not None and (window < 1 or T != S):
        raise ValueError(f"window={window} must be at least 1, and needs as many keys as queries")
    own = segments_BT is not None and key_segments_BS is None
    if (causal or own) and T != S:
        raise ValueError(f"causal or segment masks need as many keys ({S}) as queries ({T})")
    if key_segments_BS is not None and segments_BT is None:
        raise ValueError("key_segments_BS needs segments_BT, the document numbers of the queries")
    if bias_HO is not None and bias_HO.shape != (H, S + T - 1):
        raise ValueError(
            f"bias_HO has shape {bias_HO.shape}: give ({H}, {S + T - 1}), a number per head and "
            "distance"
        )
    dropout = 0.0 if rng is None else dropout
    only_xla = {
        Why.NO_BIAS: bias_HO is not None,
        Why.OWN_KEYS: key_segments_BS is not None,
    }
    only_xla = next((need for need, is_asked in only_xla.items() if is_asked), None)
    packed = segments_BT is not None
    form = {"window": window, "softcap": softcap, "causal": causal}
    implementation = preferred.value if implementation == "auto" else implementation
    chosen = _choose_here(implementation, q_BTHK, k_BSGK, dropout, packed, form, only_xla)
    if scale is not None:
        # The factor itself, in bfloat16, would be off by the same part of a thousand everywhere.
        scaled = q_BTHK.astype(wide(q_BTHK.dtype)) * (scale * q_BTHK.shape[-1] ** 0.5)
        q_BTHK = scaled.astype(q_BTHK.dtype)
    if chosen != "xla":
        # XLA cannot partition these, and JAX's rule for cuDNN's wants queries and keys split alike,
        # and fails inside a pipeline; each device's own part needs no rule.
        kernel = functools.partial(
            KERNELS[chosen].compute, causal=causal, window=window, softcap=softcap
        )
        run = per_device.on_each_device
        if windowed is None:
            return run(kernel, q_BTHK, k_BSGK, v_BSGK, segments_BT)
        sides = (
            functools.partial(run, functools.partial(kernel, window=w)) for w in (window, None)
        )
        return jax.lax.cond(windowed, *sides, q_BTHK, k_BSGK, v_BSGK, segments_BT)
    segments = None if segments_BT is None else (segments_BT, key_segments_BS)
    if own:
        segments = segments_BT, segments_BT
    with jax.named_scope(KERNEL_SCOPE):
        return tiled_attention(
            q_BTHK,
            k_BSGK,
            v_BSGK,
            causal=causal,
            window=window,
            segments=segments,
            bias_HO=bias_HO,
            softcap=softcap,
            dropout=dropout,
            rng=rng,
            block=block,
            windowed=windowed,
        )


def choose(implementation: str, **shape: Any) -> str:
    """Returns the implementation that :func:`attention` will use: one of ``IMPLEMENTATIONS[1:]``.

    Args:
      implementation: ``"auto"`` takes cudnn on a GPU (bfloat16 or float16, heads up to 128 wide)
        and splash on a TPU (rows of a multiple of 128 positions), neither with dropout, else xla;
        any other name is returned if it can run. A mesh that splits rows over ``context``, or does
        not divide the batch or the heads, is only seen where the attention is traced.
      dtype: of the queries.
      head_dim: K.
      backend: ``"cpu"``, ``"gpu"`` or ``"tpu"``; None means that of :func:`platform`.
      length: T; left out, it is not checked.
      dropout: rate on the weights; left out, 0.
      window, causal: as for :func:`attention`; cudnn has no window to both sides.
      softcap: as for :func:`attention`; no kernel for GPUs has one.

    Raises:
      ValueError: for an unknown name, or a fused kernel where it cannot run.

    >>> choose("auto", dtype=jnp.float32, head_dim=64, backend="gpu")
    'xla'
    >>> choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="gpu")
    'cudnn'
    >>> choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="tpu", length=1024)
    'splash'
    """
    return _choose(implementation, **shape).used


def _choose(implementation: str, *, backend: str | None = None, **shape) -> Kernel:
    backend = backend or platform()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    wanted = FUSED.get(backend, "xla") if implementation == "auto" else implementation
    need = None if wanted == "xla" else _obstacle(wanted, backend=backend, **shape)
    if need is not None and implementation != "auto":
        raise ValueError(f"attention={wanted!r} needs {need}; use 'xla' or 'auto'")
    return Kernel(wanted if need is None else "xla", wanted, need)


def _obstacle(
    kernel: str,
    *,
    backend: str,
    dropout: float = 0.0,
    sizes: tuple[int, int, int] | None = None,
    length: int | None = None,
    only_xla: Why | None = None,
    **shape,
) -> Reason | None:
    """Returns a fused kernel's unmet need; None if it can run.

    Args:
      sizes: (rows, query heads, keys of a row), checked against the ambient mesh too.
      only_xla: a need that no fused kernel meets.
      shape: ``dtype`` and ``head_dim``, and ``packed`` where rows hold several documents.
      kernel, backend, dropout, length: as for :func:`choose`.
    """
    fused = KERNELS[kernel]
    if fused.platform != backend:
        chip = {"gpu": "an NVIDIA GPU", "tpu": "a TPU"}[fused.platform]
        return Why.CHIP(chip=chip, backend=backend)
    if only_xla is not None:
        return only_xla()
    if dropout:
        return Why.NO_DROPOUT(rate=dropout)
    need = fused.obstacle(length=length, **shape)
    if need is None and sizes is not None:
        rows, heads, keys = sizes
        if keys != length and kernel != "cudnn":
            return Why.KEYS(queries=length, keys=keys)
        need = per_device.obstacle(rows, heads)
    return need


def _cudnn_obstacle(
    *,
    dtype,
    head_dim: int,
    length: int | None,
    packed: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    **_,
) -> Reason | None:
    if softcap is not None:
        return Why.NO_SOFTCAP(softcap=softcap)
    if window is not None and not causal:
        return Why.CAUSAL_WINDOW(each=window - 1)
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return Why.DTYPE(dtype=jnp.dtype(dtype).name)
    if head_dim % 8 or head_dim > 128:
        return Why.HEAD_WIDTH(width=head_dim)
    odd = packed and length is not None and length % 2
    return Why.EVEN_ROWS(length=length) if odd else None


def _cudnn_attention(
    q_BTHK, k_BSGK, v_BSGK, segments_BT, *, causal: bool, window: int | None, softcap: None
) -> jax.Array:
    del softcap  # it has none
    mask = None
    if segments_BT is not None:
        mask = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BSGK,
        v_BSGK,
        mask=mask,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


class _Fused(NamedTuple):
    """A fused kernel: its platform, what of shapes and dtypes keeps it from running, if anything,
    and ``(q_BTHK, k_BSGK, v_BSGK, segments_BT, *, causal, window, softcap) -> out_BTHK`` on one
    device."""

    platform: str
    obstacle: Callable[..., Reason | None]
    compute: Callable[..., jax.Array]


KERNELS = {
    "cudnn": _Fused("gpu", _cudnn_obstacle, _cudnn_attention),
    "splash": _Fused("tpu", splash.obstacle, splash.splash_attention),
}


class AheadOfTimeWarning(UserWarning):
    """A program compiled for a chip that is not here differs from the one that would run there."""


def _choose_here(
    implementation: str,
    q_BTHK,
    k_BSGK,
    dropout: float,
    packed: bool,
    form: Mapping[str, Any],
    only_xla: Why | None,
) -> str:
    B, T, H, K = q_BTHK.shape
    choice = _choose(
        implementation,
        dtype=q_BTHK.dtype,
        head_dim=K,
        length=T,
        dropout=dropout,
        packed=packed,
        **form,
        sizes=(B, H, k_BSGK.shape[1]),
        only_xla=only_xla,
    )
    if choice.used != "xla" and differentiated_twice.value:
        choice = Kernel("xla", choice.used, Why.ONE_GRADIENT())
    report_finding(Kind.ATTENTION, choice)
    if choice.need is not None:
        _say_once(f"attention: xla, because {choice.wanted} needs {choice.need}")
    if choice.used == "cudnn" and (ahead_of_time.value or jax.default_backend() != "gpu"):
        # JAX asks the cuDNN library for its version while it traces, and XLA for a plan of
        # execution while it compiles: both need a GPU's own libraries.
        warnings.warn(
            "attention: cudnn cannot be compiled ahead of time; compiled with xla, which keeps as "
            "much for its backward pass and moves more through memory",
            AheadOfTimeWarning,
            stacklevel=3,
        )
        return "xla"
    return choice.used
