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

from jaxtrain.decisions import Kernel, Kind, Positions, Reason, Why
from jaxtrain.ops import context, per_device, splash
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.stand_in import stand_in
from jaxtrain.ops.tiled import tiled_attention
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import report_finding

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")

# What is compiled in the place of "cudnn" for GPUs that are not here.
STAND_IN = "stand-in"

# What "auto" takes where it can; elsewhere there is none.
FUSED = {"gpu": "cudnn", "tpu": "splash"}

# Entered with "traced" or "compiled" where a step is that for chips that are described and not
# here; a step that trains afterwards is traced again.
ahead_of_time = jax.make_user_context(None)

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
    mask: Mask = Mask(),  # noqa: B008
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(K) + bias) v`` per head; H / G query heads share a key head.

    Args:
      q_BTHK: queries.
      k_BSGK, v_BSGK: keys and values; G divides H, and they are never repeated in memory. Values
        may have fewer features than keys: kernels are given zeros for the others.
      mask: what a query sees, and the bias; by default positions up to its own.
      scale: of the scores before the bias; None means ``1 / sqrt(K)``.
      softcap: scores are ``softcap * tanh(scores / softcap)`` before they are masked (Gemma 2,
        https://arxiv.org/abs/2408.00118), in the xla form and in splash; None leaves them.
      dropout: rate at which softmax weights are dropped, in the xla form alone. The masks of the
        forward pass are drawn again in the backward pass, tile by tile, from ``rng``.
      rng: key for dropout; None means none.
      implementation: ``"xla"``, ``"cudnn"`` (NVIDIA's fused kernel), ``"splash"`` (JAX's for TPUs)
        or ``"auto"``; see :func:`choose`.

    Returns:
      [B, T, H, K] in the dtype of ``q_BTHK``, with the features of the values. Scores and softmax
      are float32.

    Raises:
      ValueError: for shapes that do not fit, or an implementation that cannot run here.
    """
    (_, T, H, _), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key heads evenly; use a divisor of {H}")
    mask.check(T, S, H)
    if (lacks := k_BSGK.shape[3] - v_BSGK.shape[3]) > 0:
        v_BSGK = jnp.pad(v_BSGK, ((0, 0), (0, 0), (0, 0), (0, lacks)))
        how = {"scale": scale, "softcap": softcap, "dropout": dropout, "rng": rng}
        out = attention(q_BTHK, k_BSGK, v_BSGK, mask, **how, implementation=implementation)
        return out[..., :-lacks]
    dropout = 0.0 if rng is None else dropout
    implementation = preferred.value if implementation == "auto" else implementation
    form = {"mask": mask, "softcap": softcap, "dropout": dropout}
    found = context.exchanged(q_BTHK, k_BSGK, mask, draws=dropout > 0)
    chosen = _choose_here(implementation, q_BTHK, S, form, found)
    split = {"found": found, "softcap": softcap}
    if scale is not None:
        # The factor itself, in bfloat16, would be off by the same part of a thousand everywhere.
        scaled = q_BTHK.astype(wide(q_BTHK.dtype)) * (scale * q_BTHK.shape[-1] ** 0.5)
        q_BTHK = scaled.astype(q_BTHK.dtype)
    if chosen != "xla":
        # XLA cannot partition these, and JAX's rule for cuDNN's wants queries and keys split alike,
        # and fails inside a pipeline; each device's own part needs no rule.
        kernel = functools.partial(KERNELS[chosen].compute, softcap=softcap)
        run = functools.partial(per_device.on_each_device, kernel)
        kernel = lambda *qkv_mask: qkv_mask[-1].either(run, *qkv_mask[:-1])  # noqa: E731
        return context.around(kernel, q_BTHK, k_BSGK, v_BSGK, mask, **split)
    kernel = functools.partial(tiled_attention, softcap=softcap, dropout=dropout, rng=rng)
    with jax.named_scope(KERNEL_SCOPE):
        return context.around(kernel, q_BTHK, k_BSGK, v_BSGK, mask, **split)


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
      mask: as for :func:`attention`; cudnn has no window to both sides.
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
    mask: Mask = Mask(),  # noqa: B008
    **shape,
) -> Reason | None:
    """Returns a fused kernel's unmet need; None if it can run.

    Args:
      sizes: (rows, query heads, keys of a row), checked against the ambient mesh too.
      shape: ``dtype``, ``head_dim`` and ``softcap``.
      kernel, backend, dropout, length, mask: as for :func:`choose`.
    """
    fused = KERNELS[kernel]
    if fused.platform != backend:
        chip = {"gpu": "an NVIDIA GPU", "tpu": "a TPU"}[fused.platform]
        return Why.CHIP(chip=chip, backend=backend)
    if mask.only_xla is not None:
        return mask.only_xla
    if dropout:
        return Why.NO_DROPOUT(rate=dropout)
    need = fused.obstacle(mask, length=length, **shape)
    if need is None and sizes is not None:
        rows, heads, keys = sizes
        if keys != length and kernel != "cudnn":
            return Why.KEYS(queries=length, keys=keys)
        need = per_device.obstacle(rows, heads)
    return need


def _cudnn_obstacle(
    mask: Mask, *, dtype, head_dim: int, length: int | None, softcap: float | None = None
) -> Reason | None:
    if softcap is not None:
        return Why.NO_SOFTCAP(softcap=softcap)
    if mask.window is not None and not mask.causal:
        return Why.CAUSAL_WINDOW(each=mask.window - 1)
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return Why.DTYPE(dtype=jnp.dtype(dtype).name)
    if head_dim % 8 or head_dim > 128:
        return Why.HEAD_WIDTH(width=head_dim)
    odd = mask.segments is not None and length is not None and length % 2
    return Why.EVEN_ROWS(length=length) if odd else None


def _cudnn_attention(q_BTHK, k_BSGK, v_BSGK, mask: Mask, *, softcap: None) -> jax.Array:
    del softcap  # it has none
    same_document = None
    if (segments_BT := mask.segments) is not None:
        same_document = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BSGK,
        v_BSGK,
        mask=same_document,
        is_causal=mask.causal,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )


class _Fused(NamedTuple):
    """A fused kernel: its platform, what of a mask, shapes and dtypes keeps it from running, if
    anything, and ``(q_BTHK, k_BSGK, v_BSGK, mask, *, softcap) -> out_BTHK`` on one device."""

    platform: str
    obstacle: Callable[..., Reason | None]
    compute: Callable[..., jax.Array]


KERNELS = {
    "cudnn": _Fused("gpu", _cudnn_obstacle, _cudnn_attention),
    "splash": _Fused("tpu", splash.obstacle, splash.splash_attention),
    STAND_IN: _Fused("gpu", _cudnn_obstacle, stand_in),
}


class AheadOfTimeWarning(UserWarning):
    """A program compiled for a chip that is not here differs from the one that would run there."""


def _choose_here(
    implementation: str, q_BTHK, keys: int, form: Mapping[str, Any], found: Positions | None
) -> str:
    B, T, H, K = q_BTHK.shape
    shape = {"dtype": q_BTHK.dtype, "head_dim": K, "length": T, "sizes": (B, H, keys)}
    choice = _choose(implementation, **shape, **form)
    if choice.used != "xla" and differentiated_twice.value:
        choice = Kernel("xla", choice.used, Why.ONE_GRADIENT())
    if choice.used != "xla" and found is not None and found.exchanged != "heads":
        need = Why.WHOLE_ROWS(axes=" x ".join(per_device.split_over("sequence")[0]))
        if implementation != "auto":
            raise ValueError(f"attention={implementation!r} needs {need}; use 'xla' or 'auto'")
        choice = Kernel("xla", choice.used, need)
    report_finding(Kind.ATTENTION, choice)
    if choice.need is not None:
        _say_once(f"attention: xla, because {choice.wanted} needs {choice.need}")
    if choice.used == "cudnn" and (ahead_of_time.value or jax.default_backend() != "gpu"):
        # JAX asks the cuDNN library for its version while it traces, and XLA for a plan of
        # execution while it compiles: both need a GPU's own libraries.
        warnings.warn(
            "attention: cudnn cannot be compiled ahead of time; arrays of its sizes stand for it",
            AheadOfTimeWarning,
            stacklevel=3,
        )
        return STAND_IN if ahead_of_time.value == "compiled" else "xla"
    return choice.used
