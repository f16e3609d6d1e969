"""The loss of a student that learns from a teacher, for every model's head.

Hinton et al. 2015, https://arxiv.org/abs/1503.02531: at the temperature T,

    (1 - mix) loss + mix T^2 KL(teacher || student).

Shapes: B batch, T positions, D width, V rows of the token table.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxtrain.loss import WeightedLoss
from jaxtrain.ops import losses


class Output(NamedTuple):
    """The end of a model of tokens: its last hidden states, what a head makes of them, and how that
    becomes logits (:func:`jaxtrain.ops.losses.cross_entropy`)."""

    hidden_BTD: jax.Array
    x_BTD: jax.Array
    kernel_DV: Any
    bias_V: jax.Array | None = None
    softcap: float | None = None


def check_tokens(config: Any, teacher: Any) -> None:
    """Raises ValueError for models of different tokens."""
    ours, theirs = ((each.vocab_size, each.padded_vocab) for each in (config, teacher))
    if ours != theirs:
        raise ValueError(
            "the teacher has {} tokens in tables of {} rows, and the student {} in {}: give a "
            "teacher of the same tokens".format(*theirs, *ours)
        )


def token_loss(
    config: Any,
    ours: Output,
    theirs: Output,
    batch: Mapping[str, jax.Array],
    *,
    temperature: float,
    mix: float,
    hidden: float = 0.0,
) -> WeightedLoss:
    """The loss of a batch's ``targets``, which may be of some ``places`` alone: of each the
    cross-entropy and the divergence (:func:`jaxtrain.ops.losses.divergence`), which are metrics in
    nats, and ``hidden`` times the :func:`jaxtrain.ops.losses.relations` of the last hidden states,
    among tokens of one number in the batch's ``segments``."""
    nll, correct, kl = losses.divergence(
        ours.x_BTD,
        ours.kernel_DV,
        theirs.x_BTD,
        theirs.kernel_DV,
        batch["targets"],
        batch["mask"],
        vocab_size=config.vocab_size,
        temperature=temperature,
        biases=(ours.bias_V, theirs.bias_V),
        softcaps=(ours.softcap, theirs.softcap),
        chunk=config.loss_chunk,
    )
    plain = WeightedLoss(nll, batch["mask"].astype(nll.dtype).sum(), {"accuracy": correct})
    found = joined(plain, kl, temperature=temperature, mix=mix)
    if not hidden:
        return found
    how = {"segments_BT": batch.get("segments"), "chunk": config.loss_chunk}
    apart = losses.relations(ours.hidden_BTD, theirs.hidden_BTD, batch["mask"], **how)
    metrics = {**found.metrics, "relations": jax.lax.stop_gradient(apart)}
    return dataclasses.replace(found, total=found.total + hidden * apart, metrics=metrics)


def joined(
    plain: WeightedLoss,
    divergence: jax.Array,
    *,
    temperature: float,
    mix: float,
    name: str = "cross_entropy",
) -> WeightedLoss:
    """Returns the loss of both, of a student's own loss and the sum of its divergence from its
    teacher, weighted alike; both are metrics, the former under ``name``."""
    total = (1 - mix) * plain.total + mix * temperature**2 * divergence
    metrics = {**plain.metrics, name: plain.total, "divergence": divergence}
    return WeightedLoss(total, plain.weight, jax.lax.stop_gradient(metrics))
