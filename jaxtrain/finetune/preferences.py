"""Direct preference optimization: a model learns which of two answers is the better one.

Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7. Of a pair with the prompt x, the
chosen answer c and the rejected answer r, with policy p and reference q,

    loss = -log sigmoid(beta (log p(c|x) - log q(c|x) - log p(r|x) + log q(r|x)))

The policy is what trains, the reference is what it began as. The weight of a batch is the number
of its pairs, so that accumulation is exact however many of them a row holds. A batch is one of
:class:`jaxtrain.data.PairedTokens`: the arrays of packed text, [B, 2, T], chosen before rejected.

Shapes: B rows, T positions, S = T + 1 segments of a row: pairs, and padding as number 0.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.finetune.change import Change
from jaxtrain.loss import WeightedLoss
from jaxtrain.ops.numerics import wide
from jaxtrain.sharding.rules import OptionalRules, Rule, Rules, as_rules
from jaxtrain.stages import Stages
from jaxtrain.tree import PyTree

Batch = Mapping[str, jax.Array]

# Where the weights of the reference are: those of layers among the stacked ones, so that whatever
# cuts these cuts both, and the others beside the policy's.
REFERENCE = "reference"
STACKED = "blocks"


def dpo(gains_B2T: jax.Array, batch: Batch, *, beta: float = 0.1) -> WeightedLoss:
    """Returns the loss of a batch of pairs, summed over them.

    Args:
      gains_B2T: log p - log q of every target, in nats; read where the batch's mask is not 0.
      batch: ``mask`` and ``segments``, [B, 2, T].
      beta: how dear it is to leave the reference.

    Returns:
      The loss, whose weight is the number of pairs, with metrics per pair: ``accuracy`` (1 where
      the policy has moved to the chosen side more than to the rejected one), ``margin`` (of the
      rewards) and ``reward_chosen`` and ``reward_rejected``, beta (log p - log q) of a side.

    >>> batch = {"mask": jnp.ones((1, 2, 3)), "segments": jnp.array([[[1, 1, 0], [1, 0, 0]]])}
    >>> means = dpo(jnp.array([[[1.0, 2, 9], [1, 9, 9]]]), batch, beta=0.5).means()
    >>> f"{means['margin']:.4f}, {means['loss']:.4f}"  # (3 - 1) / 2, and log(1 + exp(-1))
    '1.0000, 0.3133'
    """
    mask_B2T = batch["mask"].astype(wide(gains_B2T.dtype))
    segments_B2T = batch["segments"]
    counted_B2T = jnp.where(mask_B2T > 0, gains_B2T, 0.0) * mask_B2T
    T = segments_B2T.shape[-1]

    def by_segment(x_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x_T, segments_T, T + 1)

    rewards_B2S = beta * jax.vmap(jax.vmap(by_segment))(counted_B2T, segments_B2T)
    margin_BS = rewards_B2S[:, 0] - rewards_B2S[:, 1]
    numbers_S = jnp.arange(T + 1)
    pairs_BS = (numbers_S > 0) & (numbers_S <= segments_B2T.max(axis=(1, 2))[:, None])

    def total(x_BS: jax.Array) -> jax.Array:
        return jnp.where(pairs_BS, x_BS, 0.0).sum()

    metrics = {
        "accuracy": total(margin_BS > 0),
        "margin": total(margin_BS),
        "reward_chosen": total(rewards_B2S[:, 0]),
        "reward_rejected": total(rewards_B2S[:, 1]),
    }
    metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
    weight = pairs_BS.sum().astype(margin_BS.dtype)
    return WeightedLoss(total(jax.nn.softplus(-margin_BS)), weight, metrics)


def dpo_loss(
    log_probs: Callable[[PyTree, Batch, jax.Array | None], jax.Array],
    *,
    reference: Callable[[PyTree, Batch], jax.Array] | None = None,
    beta: float = 0.1,
) -> Callable[[PyTree, Batch, jax.Array | None], WeightedLoss]:
    """Makes the loss for :func:`jaxtrain.build_train_step` of any model.

    Args:
      log_probs: ``(params, batch, rng) -> [2 B, T]``, the policy's log-probability of every target;
        the batch's arrays are [2 B, T] for it, so that a model of text needs no change.
      reference: the same of the reference, from frozen parameters among ``params`` or from those of
        an enclosing scope; None where the batch has ``reference`` [B, 2, T], computed before.
      beta: as for :func:`dpo`.

    >>> log_probs = lambda params, batch, rng: params["log_p"][batch["targets"]]
    >>> params = {"log_p": jnp.log(jnp.array([0.2, 0.8])), "reference": jnp.log(jnp.full(2, 0.5))}
    >>> loss_fn = dpo_loss(
    ...     log_probs, reference=lambda params, batch: params["reference"][batch["targets"]], beta=1
    ... )
    >>> batch = {"targets": jnp.array([[[1], [0]]]), "segments": jnp.ones((1, 2, 1), int)}
    >>> loss = loss_fn(params, batch | {"mask": jnp.ones((1, 2, 1))}, None)
    >>> f"{loss.total:.4f}", float(loss.weight)  # -log sigmoid(log 4)
    ('0.2231', 1.0)
    """

    def loss_fn(params: PyTree, batch: Batch, rng: jax.Array | None) -> WeightedLoss:
        rows = _rows(batch)
        theirs = batch.get("reference") if reference is None else reference(params, rows)
        if theirs is None:
            raise ValueError(
                "the batch has no array 'reference' of the reference's log-probabilities: add it, "
                "or give dpo_loss(reference=...)"
            )
        return _dpo(log_probs(params, rows, rng), theirs, batch, beta)

    return loss_fn


@dataclasses.dataclass(frozen=True)
class DPO(Change):
    """The change that makes policy and reference one model, for every mesh and every pipeline.

    Parameters that are stacked by layer hold the reference's under ``blocks/reference``, the others
    under ``reference``; the residual stream has both. What is frozen costs a forward pass and its
    weights.

    Args:
      log_probs: ``(params, x, batch) -> [2 B, T]``, in place of the model's ``head_loss``: the
        log-probability of every target, such as :func:`jaxtrain.models.decoder.log_probs`.
      beta: as for :func:`dpo`.

    >>> DPO(None).params({"blocks": {"w": 1}, "head": 2})
    {'blocks': {'w': 1, 'reference': {'w': 1}}, 'head': 2, 'reference': {'head': 2}}
    >>> DPO(None).back(DPO(None).params({"blocks": {"w": 1}, "head": 2}))
    {'blocks': {'w': 1}, 'head': 2}
    """

    log_probs: Callable[[PyTree, PyTree, Batch], jax.Array]
    beta: float = 0.1
    freeze: ClassVar = (f"(^|/){REFERENCE}/",)
    flops: ClassVar = (4 / 3, ", and a third of it for the reference")

    def params(self, params: Mapping[str, Any], rng: Any = None, stacked: Any = None) -> dict:
        """Returns parameters that also hold themselves as the reference; no leaf is copied."""
        outer = {name: value for name, value in params.items() if name != STACKED}
        layers = {**params[STACKED], REFERENCE: params[STACKED]}
        return {**params, STACKED: layers, REFERENCE: outer}

    def back(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the policy's parameters alone."""
        policy, _ = _both(params)
        return policy | {STACKED: _both(policy[STACKED])[0]}

    def rules(self, rules: Rules | Sequence[Rule], shapes: Any = None) -> Rules:
        """Returns a model's sharding rules, whose patterns begin with ``^``, for the reference too.

        >>> DPO(None).rules([("^blocks/w$", ("layers", None))]).params[0][0]
        '^blocks/(reference/)?w$'
        """
        rules, own = as_rules(rules), f"({REFERENCE}/)?"

        def both(rule: Rule) -> Rule:
            pattern, axes = rule
            begin = f"^{STACKED}/" if pattern.startswith(f"^{STACKED}/") else "^"
            return begin + own + pattern.removeprefix(begin), axes

        return dataclasses.replace(rules, params=OptionalRules(map(both, rules.params)))

    def stages(self, stages: Stages | None) -> Stages:
        """Returns the stages of both; raises ValueError for a model without stages, of several
        stacks, or of layers that share parameters."""
        if stages is None or len(stages.blocks) > 1 or stages.shared:
            raise ValueError(
                "DPO takes a model of stages, in one stack of layers that share no parameters: use "
                "dpo_loss"
            )

        def embed(params: PyTree, batch: Batch, rng: jax.Array | None) -> PyTree:
            ours, theirs, rows = *_both(params), _rows(batch)
            still = jax.lax.stop_gradient(stages.embed(theirs, rows, None))
            return {"policy": stages.embed(ours, rows, rng), REFERENCE: still}

        def block(layer, shared, x: PyTree, batch: Batch, rng, index: jax.Array) -> PyTree:
            (ours, theirs), rows, key = _both(layer), _rows(batch), stages.stacked.key
            still = stages.layer(0, {key: theirs}, x[REFERENCE], rows, None, index)
            policy = stages.layer(0, {key: ours}, x["policy"], rows, rng, index)
            return {"policy": policy, REFERENCE: jax.lax.stop_gradient(still)}

        def head_loss(params: PyTree, x: PyTree, batch: Batch) -> WeightedLoss:
            ours, theirs, rows = *_both(params), _rows(batch)
            still = self.log_probs(theirs, x[REFERENCE], rows)
            return _dpo(self.log_probs(ours, x["policy"], rows), still, batch, self.beta)

        return dataclasses.replace(stages, embed=embed, block=block, head_loss=head_loss, shared=())


def _dpo(ours: jax.Array, theirs: jax.Array, batch: Batch, beta: float) -> WeightedLoss:
    shape = batch["mask"].shape
    theirs = jax.lax.stop_gradient(theirs).reshape(shape)
    return dpo(ours.reshape(shape) - theirs, batch, beta=beta)


def _rows(batch: Batch) -> dict[str, jax.Array]:
    """Returns the batch as of a model of text: both sides of every row are rows, [2 B, T]."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}


def _both(params: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    policy = dict(params)
    return policy, policy.pop(REFERENCE)
