"""A decoder-only transformer in the GPT-2 and the Llama form, as pure functions of plain dicts.

``init`` makes the parameters, ``loss_fn`` the loss that the step builders take, put together from
the :func:`stages` that a pipeline places on its devices.

A batch is a dict of [B, T] arrays: ``tokens`` and ``targets`` int32, ``mask`` float32, and
optionally ``segments`` (int32 document numbers from 1, 0 for padding: attention stays within a
document) and ``positions`` (int32, starting again at each document; without it 0 .. T - 1).

Parameters are float32 from ``init``; the model computes in whatever floating dtype it is given
them, with norms, softmax, rotary angles and losses in float32.

Shapes: B batch, T positions, N = B * T tokens, D width, L layers, H query heads, G key and value
heads, K features per head, V rows of the token table.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import layers
from jaxtrain.models.config import (
    PRESETS,
    DecoderConfig,
    gpt2_124m,
    keys_seen,
    llama_1b,
    llama_7b,
    tiny,
)
from jaxtrain.ops import losses
from jaxtrain.ops.linear import matmul_float32
from jaxtrain.ops.numerics import drop, soft_cap
from jaxtrain.sharding.placement import pin_residual
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages, loss_from_stages, run_layers

__all__ = [
    "PRESETS",
    "RULES",
    "DecoderConfig",
    "block",
    "embed",
    "flops_per_token",
    "gpt2_124m",
    "head_loss",
    "init",
    "llama_1b",
    "llama_7b",
    "log_probs",
    "logits",
    "loss_fn",
    "parameter_count",
    "stages",
    "tiny",
]

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

# Parameter path to logical axes; the first match decides. Not every configuration has all of them.
RULES = OptionalRules(
    (
        (r"^embed/tokens$", ("vocab", "embed")),
        (r"^embed/positions$", (None, "embed")),
        (r"^blocks/attn/q/kernel$", ("layers", "embed", "heads")),
        (r"^blocks/attn/q/bias$", ("layers", "heads")),
        (r"^blocks/attn/(k|v)/kernel$", ("layers", "embed", "kv_heads")),
        (r"^blocks/attn/(k|v)/bias$", ("layers", "kv_heads")),
        (r"^blocks/attn/out/kernel$", ("layers", "heads", "embed")),
        (r"^blocks/mlp/(up|gate)/kernel$", ("layers", "embed", "mlp")),
        (r"^blocks/mlp/(up|gate)/bias$", ("layers", "mlp")),
        (r"^blocks/mlp/down/kernel$", ("layers", "mlp", "embed")),
        (r"^blocks/attn/norm_(q|k)/(scale|bias)$", ("layers", None)),
        (r"^blocks/(attn/out|mlp/down)/bias$", ("layers", None)),
        (r"^blocks/norm_(attn|mlp)(_out)?/(scale|bias)$", ("layers", None)),
        (r"^final_norm/(scale|bias)$", (None,)),
        (r"^head/kernel$", ("embed", "vocab")),
    )
)


def init(config: DecoderConfig, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters: N(0, 0.02), residual projections divided by sqrt(2 L).

    The values depend on ``rng`` alone, not on the ``out_shardings`` under which it is jitted.

    Returns:
      A nested dict: ``embed``, ``blocks`` (leading axis L), ``final_norm`` and, untied, ``head``.

    >>> config = DecoderConfig(vocab_size=5, seq_len=4, layers=3, width=8, heads=2)
    >>> init(config, jax.random.key(0))["blocks"]["attn"]["q"]["kernel"].shape
    (3, 8, 8)
    """
    rng_embed, rng_blocks, rng_head = jax.random.split(rng, 3)
    params = {
        "embed": layers.pure(layers.Embed, config, rng_embed),
        "blocks": layers.stacked(layers.Block, config.block, config.layers, rng_blocks),
        "final_norm": layers.pure(layers.Norm, config.block, rng_head),
    }
    return params if config.tied else params | {"head": layers.pure(layers.Head, config, rng_head)}


def loss_fn(config: DecoderConfig) -> Callable[[Params, Batch, jax.Array | None], WeightedLoss]:
    """Returns ``loss(params, batch, rng)``: masked cross-entropy, summed over tokens.

    ``rng`` None means no dropout. The loss has ``total`` (nats, float32), ``weight`` (the sum of
    the mask) and the metric ``accuracy``.

    >>> config = DecoderConfig(vocab_size=5, seq_len=4, layers=1, width=8, heads=2)
    >>> from jax import numpy as jnp
    >>> batch = {"tokens": jnp.ones((2, 4), int), "targets": jnp.ones((2, 4), int)}
    >>> batch["mask"] = jnp.ones((2, 4))
    >>> loss = loss_fn(config)(init(config, jax.random.key(0)), batch, None)
    >>> float(loss.weight), bool(abs(loss.means()["loss"] - jnp.log(5)) < 0.2)
    (8.0, True)
    """
    return loss_from_stages(stages(config))


def stages(config: DecoderConfig, *, virtual: int = 1) -> Stages:
    """Returns the model as a pipeline takes it, its layers' parameters in ``virtual`` chunks
    (:class:`jaxtrain.Stack`)."""
    return layers.stages(config, embed=embed, head_loss=head_loss, stacked=Stack(virtual=virtual))


def logits(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Returns float32 logits [B, T, vocab_size] of the next token; arrays are [B, T] int32, as in a
    batch."""
    batch = {"tokens": tokens_BT, "segments": segments, "positions": positions}
    batch = {name: value for name, value in batch.items() if value is not None}
    x_BTD = run_layers(stages(config), params, embed(config, params, batch), batch, None)
    return head_logits(config, params, x_BTD)


def embed(
    config: DecoderConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """First stage: tokens (and learned positions) to the residual stream [B, T, D].

    ``params`` is the whole model's, or any dict with ``embed``; ``rng`` is the step's key, and None
    means no dropout.

    Raises:
      ValueError: for rows longer than a table of learned positions.
    """
    module = layers.apply(layers.Embed, config, params["embed"])
    x_BTD = module(batch["tokens"], layers.positions(config, batch))
    # Layers fold in 0 .. L - 1.
    return pin_residual(drop(x_BTD, config.dropout, layers.fold(rng, config.layers)))


def block(
    config: DecoderConfig,
    layer_params: Params,
    x_BTD: jax.Array,
    batch: Batch,
    rng: jax.Array | None = None,
    *,
    index: int | jax.Array = 0,
) -> jax.Array:
    """One layer, [B, T, D] to [B, T, D], without rematerialisation.

    Args:
      layer_params: one layer's, without the leading axis L.
      batch: ``segments`` and ``positions`` are read, where present.
      rng: ``jax.random.fold_in(rng, l)`` of the step's key for layer l, so that any split of the
        layers into stages drops the same features; None means no dropout.
      index: l; where some layers have a window and others none, it says which this is.
    """
    packing = {"segments_BT": batch.get("segments"), "positions_BT": batch.get("positions")}
    return layers.block(config.block, layer_params, x_BTD, **packing, rng=rng, index=index)


def head_loss(
    config: DecoderConfig, params: Params, x_BTD: jax.Array, batch: Batch
) -> WeightedLoss:
    """Last stage: final norm, output projection and masked cross-entropy.

    With ``config.z_loss`` its part of the loss is a metric of its own. ``params`` is the whole
    model's, or any dict with ``final_norm`` and ``head`` (tied: ``embed``).
    """
    x_BTD, kernel_DV = _final_norm(config, params, x_BTD), _head_kernel(config, params)
    options = {"z_loss": config.z_loss, "softcap": config.logit_softcap}
    return layers.token_loss(config, x_BTD, kernel_DV, batch, **options)


def log_probs(config: DecoderConfig, params: Params, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Last stage of losses that are no sum over tokens: the log-probability of each of the batch's
    ``targets``, [B, T]; other arguments are those of :func:`head_loss`."""
    return losses.log_probs(
        _final_norm(config, params, x_BTD),
        _head_kernel(config, params),
        batch["targets"],
        vocab_size=config.vocab_size,
        softcap=config.logit_softcap,
        chunk=config.loss_chunk,
    )


def head_logits(config: DecoderConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """Final norm and output projection: float32 [B, T, vocab_size]."""
    x_ND = _final_norm(config, params, x_BTD).reshape(-1, config.width)
    logits_NV = soft_cap(matmul_float32(x_ND, _head_kernel(config, params)), config.logit_softcap)
    return logits_NV.reshape(*x_BTD.shape[:-1], -1)[..., : config.vocab_size]


parameter_count = functools.partial(layers.parameter_count, init)


# Of :func:`flops_per_token`.
FLOPS_FORMULA = "6 N + 12 L H K T (PaLM, appendix B)"


def flops_per_token(config: DecoderConfig) -> int:
    """Floating-point operations per token of a forward and backward pass: ``6 N + 12 L H K T``.

    The model FLOPs of PaLM, appendix B (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311),
    to be divided by a device's peak for its utilisation. N counts the parameters that a token is
    multiplied by: a table that is only looked up (learned positions, untied token embedding) is
    not in it. The attention term is that of full rows of ``seq_len`` tokens, not halved for
    causality, where T is the window if that is shorter, in the layers that have it; recomputation
    is not counted.

    >>> flops_per_token(gpt2_124m())
    855166464
    """
    lookups = config.seq_len * config.width if config.positions == "learned" else 0
    lookups += 0 if config.tied else config.vocab_size * config.width
    attend = 12 * config.heads * config.block.head_dim * keys_seen(config, config.seq_len)
    return 6 * (parameter_count(config) - lookups) + attend


def _final_norm(config: DecoderConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    return pin_residual(layers.apply(layers.Norm, config.block, params["final_norm"])(x_BTD))


def _head_kernel(config: DecoderConfig, params: Params) -> jax.Array:
    return params["embed"]["tokens"].T if config.tied else params["head"]["kernel"]
