"""Losses of preferences: a model learns which of two answers is the better one.

A pair has a prompt x, a chosen answer c and a rejected answer r, of n tokens each. The policy p is
what trains, the reference q is what it began as. An answer y has the gain g = log p(y|x) - log
q(y|x), and the log-probability per token l = log p(y|x) / n. The losses are

==========  ========================================================================================
``dpo``     -log sigmoid(beta (g_c - g_r)); Rafailov et al. 2023, https://arxiv.org/abs/2305.18290
``ipo``     (g_c / n_c - g_r / n_r - 1 / (2 beta))^2; Azar et al. 2023,
            https://arxiv.org/abs/2310.12036, with gains per token as its authors advise
``kto``     1 - (sigmoid(beta (g_c - z_r)) + sigmoid(beta (z_c - g_r))) / 2; Ethayarajh et al. 2024,
            https://arxiv.org/abs/2402.01306. A reference point z is the mean gain of the answers of
            one side in a row, at least 0, without a gradient
``kto_``    1 - sigmoid(beta (g - z)) of an answer with the label true, and gamma times
``unpaired``  1 - sigmoid(beta (z - g)) of one with false. z is the mean gain of a row's prompts
            with the answers of other prompts, at least 0, without a gradient
``simpo``   -log sigmoid(beta (l_c - l_r) - gamma); Meng et al. 2024,
            https://arxiv.org/abs/2405.14734
``orpo``    -l_c - beta log sigmoid(o_c - o_r), of log odds o = l - log(1 - exp(l)); Hong et al.
            2024, https://arxiv.org/abs/2403.07691
``reward``  -log sigmoid(beta (s_c - s_r)); Bradley and Terry, as in Ouyang et al. 2022,
            https://arxiv.org/abs/2203.02155. The score s is that of a reward model, at the last
            token of an answer
==========  ========================================================================================

The last three have no reference. The weight of a batch is the number of its pairs, and a loss
depends on its row alone, so that accumulation is exact however many pairs a row holds. A batch is
one of :class:`jaxtrain.data.PairedTokens`: the arrays of packed text, [B, 2, T], chosen before
rejected.

Shapes: B rows, T positions, S = T + 1 segments of a row: pairs, and padding as number 0.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.finetune.change import STACKED, Change, apart, check_layers, without
from jaxtrain.loss import WeightedLoss
from jaxtrain.ops.linear import Dora, LowRank
from jaxtrain.ops.numerics import wide
from jaxtrain.optim import masks
from jaxtrain.sharding.rules import OptionalRules, Rule, Rules, as_rules
from jaxtrain.stages import Stages
from jaxtrain.tree import PyTree, map_kind

Batch = Mapping[str, jax.Array]

# Where the weights of the reference are: those of layers among the stacked ones, so that whatever
# cuts these cuts both, and the others beside the policy's.
REFERENCE = "reference"


class Answers(NamedTuple):
    """Sums over the tokens of each answer of a batch, [B, 2, S], and what its ``last`` token has;
    in ``there`` [B, S] are pairs."""

    log_p: jax.Array
    gain: jax.Array
    length: jax.Array
    last: jax.Array
    there: jax.Array


def _dpo(of: Answers, beta: float, gamma: float) -> tuple[jax.Array, jax.Array]:
    rewards_B2S = beta * of.gain
    return jax.nn.softplus(-_margin(rewards_B2S)), rewards_B2S


def _ipo(of: Answers, beta: float, gamma: float) -> tuple[jax.Array, jax.Array]:
    gain_B2S = of.gain / of.length
    return (_margin(gain_B2S) - 1 / (2 * beta)) ** 2, beta * gain_B2S


def _kto(of: Answers, beta: float, gamma: float) -> tuple[jax.Array, jax.Array]:
    there_B1S = of.there[:, None]
    mean_B21 = jnp.where(there_B1S, of.gain, 0).sum(-1, keepdims=True)
    mean_B21 /= jnp.maximum(there_B1S.sum(-1, keepdims=True), 1)
    others_B21 = jax.lax.stop_gradient(jnp.maximum(mean_B21, 0))[:, ::-1]
    value_B2S = jax.nn.sigmoid(beta * (of.gain - others_B21) * jnp.array([[1.0], [-1.0]]))
    return 1 - value_B2S.mean(axis=1), beta * of.gain


def _simpo(of: Answers, beta: float, gamma: float) -> tuple[jax.Array, jax.Array]:
    rewards_B2S = beta * of.log_p / of.length
    return jax.nn.softplus(gamma - _margin(rewards_B2S)), rewards_B2S


def _orpo(of: Answers, beta: float, gamma: float) -> tuple[jax.Array, jax.Array]:
    # Certainty, and what is no pair, have no odds.
    mean_B2S = jnp.minimum(of.log_p / of.length, -1e-6)
    odds_B2S = mean_B2S - jnp.log(-jnp.expm1(mean_B2S))
    return beta * jax.nn.softplus(-_margin(odds_B2S)) - mean_B2S[:, 0], beta * mean_B2S


def _reward(of: Answers, beta: float, gamma: float) -> tuple[jax.Array, jax.Array]:
    return jax.nn.softplus(-beta * _margin(of.last)), of.last


def _margin(x_B2S: jax.Array) -> jax.Array:
    return x_B2S[:, 0] - x_B2S[:, 1]


def _kto_unpaired(
    of: Answers, of_others: Answers, beta: float, gamma: float
) -> tuple[jax.Array, dict[str, Any]]:
    """The loss [B, S] of the one answer that each pair has, and metrics."""
    is_there_B2S, other_B2S = of.length > 0, (of_others.length > 0) & of.there[:, None]
    z_B = jnp.where(other_B2S, of_others.gain, 0).sum((1, 2)) / jnp.maximum(
        other_B2S.sum((1, 2)), 1
    )
    z_B11 = jax.lax.stop_gradient(jnp.maximum(z_B, 0))[:, None, None]
    over_B2S = (of.gain - z_B11) * jnp.array([[1.0], [-1.0]])
    losses_B2S = (1 - jax.nn.sigmoid(beta * over_B2S)) * jnp.array([[1.0], [gamma]])
    total = lambda x_B2S: jnp.where(is_there_B2S, x_B2S, 0).sum((0, 2))  # noqa: E731
    (chosen, rejected), counts_2 = total(beta * of.gain), total(1.0)
    return jnp.where(is_there_B2S, losses_B2S, 0).sum(1), {
        "accuracy": total(1.0 * (over_B2S > 0)).sum(),
        "reference_point": (z_B11.sum(), jnp.float32(len(z_B))),
        "reward_chosen": (chosen, counts_2[0]),
        "reward_rejected": (rejected, counts_2[1]),
    }


class _Loss(NamedTuple):
    """A loss of pairs, ``(answers, beta, gamma) -> (losses [B, S], rewards [B, 2, S])``."""

    of: Callable[[Answers, float, float], tuple[jax.Array, jax.Array]] | None
    beta: float = 0.1
    gamma: float | None = None
    has_reference: bool = True


LOSSES = {
    "dpo": _Loss(_dpo),
    "ipo": _Loss(_ipo),
    "kto": _Loss(_kto),
    "kto_unpaired": _Loss(None, gamma=1.0),
    "simpo": _Loss(_simpo, beta=2.0, gamma=1.0, has_reference=False),
    "orpo": _Loss(_orpo, has_reference=False),
    "reward": _Loss(_reward, beta=1.0, has_reference=False),
}


@dataclasses.dataclass(frozen=True)
class Preference:
    """A loss of preferences, for data of pairs."""

    loss: Literal[tuple(LOSSES)] = "dpo"  # type: ignore[valid-type]
    """The loss: of these simpo and orpo need no reference, which the others keep in memory; reward
    trains a reward model, whose head scores a conversation."""
    beta: float | None = None
    """The strength with which the policy is held to its reference; of simpo the scale of rewards,
    of orpo the weight of the odds, of reward that of the margin between two scores. Left out, 0.1,
    or 2 for simpo and 1 for reward."""
    gamma: float | None = None
    """The margin of simpo, by which a chosen answer is to be better; of kto_unpaired the weight of
    an answer with the label false. Left out, 1."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with what it began as."""
        return LOSSES[self.loss].has_reference

    def checked(self) -> tuple[_Loss, float, float]:
        """Returns the loss and its numbers; raises ValueError for those that it cannot have."""
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` is {self.loss!r}: use one of {', '.join(LOSSES)}")
        loss = LOSSES[self.loss]
        beta = loss.beta if self.beta is None else self.beta
        gamma = loss.gamma if self.gamma is None else self.gamma
        if not 0 < beta < math.inf:
            raise ValueError(f"`beta` is {beta}: give a number above 0")
        if self.gamma is not None and loss.gamma is None:
            raise ValueError(f"`gamma` is {gamma}, and {self.loss} has none: leave it out")
        return loss, beta, gamma or 0.0


def pair_loss(
    log_p_B2T: jax.Array,
    batch: Batch,
    how: Preference = Preference(),
    *,
    reference: jax.Array | None = None,
) -> WeightedLoss:
    """Returns the loss of a batch of pairs, summed over them.

    Args:
      log_p_B2T: log p of every target, in nats, read where the batch's mask is not 0; for the loss
        ``reward`` the score of every token, read at the last one of each answer.
      batch: ``mask`` and ``segments``, [B, 2, T].
      how: which loss.
      reference: log q of every target, [B, 2, T], without a gradient; None for a loss without it.

    Returns:
      The loss, whose weight is the number of pairs, with metrics per pair: ``accuracy`` (1 where
      the reward of the chosen side is larger), ``margin`` (of the rewards) and ``reward_chosen``
      and ``reward_rejected``: beta g, of ipo per token; without a reference beta l, or the score.

    >>> batch = {"mask": jnp.ones((1, 2, 3)), "segments": jnp.array([[[1, 1, 0], [1, 0, 0]]])}
    >>> log_p = jnp.array([[[-1.0, -2, 9], [-5, 9, 9]]])
    >>> means = pair_loss(log_p, batch, Preference(beta=0.5), reference=log_p * 2).means()
    >>> f"{means['margin']:.4f}, {means['loss']:.4f}"  # (3 - 5) / 2, and log(1 + exp(1))
    '-1.0000, 1.3133'
    """
    loss, beta, gamma = how.checked()
    mask_B2T = batch["mask"].astype(wide(log_p_B2T.dtype))
    segments_B2T = batch["segments"]
    T = segments_B2T.shape[-1]

    def by_answer(x_B2T: jax.Array, weight_B2T: jax.Array) -> jax.Array:
        add = lambda x_T, segments_T: jax.ops.segment_sum(x_T, segments_T, T + 1)  # noqa: E731
        x_B2T = jnp.where(weight_B2T > 0, x_B2T, 0.0) * weight_B2T
        return jax.vmap(jax.vmap(add))(x_B2T, segments_B2T)

    gains_B2T = log_p_B2T
    if reference is not None:
        gains_B2T = log_p_B2T - jax.lax.stop_gradient(reference)
    numbers_S = jnp.arange(T + 1)
    pairs_BS = (numbers_S > 0) & (numbers_S <= segments_B2T.max(axis=(1, 2))[:, None])
    ends_B2T = (jnp.diff(segments_B2T, append=0) != 0).astype(mask_B2T.dtype)

    def sums(weight_B2T: jax.Array) -> Answers:
        own = (by_answer(x, weight_B2T) for x in (log_p_B2T, gains_B2T, jnp.ones_like(mask_B2T)))
        return Answers(*own, by_answer(log_p_B2T, ends_B2T), pairs_BS)

    answers, weight = sums(mask_B2T), pairs_BS.sum().astype(mask_B2T.dtype)
    if loss.of is None:
        losses_BS, metrics = _kto_unpaired(answers, sums(-mask_B2T), beta, gamma)
        metrics = jax.lax.stop_gradient(metrics)
        return WeightedLoss(jnp.where(pairs_BS, losses_BS, 0.0).sum(), weight, metrics)
    length_B2S = jnp.where(answers.length > 0, answers.length, 1.0)
    losses_BS, rewards_B2S = loss.of(answers._replace(length=length_B2S), beta, gamma)

    def total(x_BS: jax.Array) -> jax.Array:
        return jnp.where(pairs_BS, x_BS, 0.0).sum()

    metrics = {
        "accuracy": total(_margin(rewards_B2S) > 0),
        "margin": total(_margin(rewards_B2S)),
        "reward_chosen": total(rewards_B2S[:, 0]),
        "reward_rejected": total(rewards_B2S[:, 1]),
    }
    metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
    return WeightedLoss(total(losses_BS), weight, metrics)


def preference_loss(
    log_probs: Callable[[PyTree, Batch, jax.Array | None], jax.Array],
    how: Preference = Preference(),
    *,
    reference: Callable[[PyTree, Batch], jax.Array] | None = None,
) -> Callable[[PyTree, Batch, jax.Array | None], WeightedLoss]:
    """Makes the loss for :func:`jaxtrain.build_train_step` of any model.

    Args:
      log_probs: ``(params, batch, rng) -> [2 B, T]``, the policy's log-probability of every target;
        the batch's arrays are [2 B, T] for it, so that a model of text needs no change.
      how: which loss.
      reference: the same of the reference, from frozen parameters among ``params`` or from those of
        an enclosing scope; None where the batch has ``reference`` [B, 2, T], computed before, or
        the loss has none.
    """

    def loss_fn(params: PyTree, batch: Batch, rng: jax.Array | None) -> WeightedLoss:
        rows, theirs = _rows(batch), None
        if how.has_reference:
            theirs = batch.get("reference") if reference is None else reference(params, rows)
            if theirs is None:
                raise ValueError(
                    "the batch has no array 'reference' of the reference's log-probabilities: add "
                    "it, or give preference_loss(reference=...)"
                )
        return _of_rows(log_probs(params, rows, rng), theirs, batch, how)

    return loss_fn


@dataclasses.dataclass(frozen=True)
class Preferences(Change):
    """The change that makes policy and reference one model, for every mesh and every pipeline.

    Parameters that are stacked by layer hold the reference's under ``blocks/reference``, the others
    under ``reference``; the residual stream has both. What is frozen costs a forward pass and its
    weights, and those that the policy does not train either, such as the kernels below LoRA's
    additions, are there once. A loss without a reference adds no parameters.

    Args:
      log_probs: ``(params, x, batch) -> [2 B, T]``, in place of the model's ``head_loss``: the
        log-probability of every target, such as :func:`jaxtrain.models.decoder.log_probs`; for a
        reward model its scores, :func:`jaxtrain.models.decoder.scores`.
      how: which loss.
      frozen: what does not train in the model as it is, as ``make_optimizer(freeze=)`` takes it;
        the reference has no copy of that. None is nothing.

    >>> change = Preferences(None)
    >>> change.params({"blocks": {"w": 1}, "head": 2})
    {'blocks': {'w': 1, 'reference': {'w': 1}}, 'head': 2, 'reference': {'head': 2}}
    >>> change.back(change.params({"blocks": {"w": 1}, "head": 2}))
    {'blocks': {'w': 1}, 'head': 2}
    >>> Preferences(None, frozen=("^blocks/",)).params({"blocks": {"w": 1}, "head": 2})
    {'blocks': {'w': 1}, 'head': 2, 'reference': {'head': 2}}
    """

    log_probs: Callable[[PyTree, PyTree, Batch], jax.Array]
    how: Preference = Preference()
    frozen: masks.Mask | None = None

    def __post_init__(self) -> None:
        self.how.checked()

    @property
    def flops(self) -> tuple[float, str]:
        """As of :class:`Change`: a third of a step, or half of one without gradients of weights."""
        if not self.how.has_reference:
            return 1, ""
        share, words = (1 / 3, "a third") if self.frozen is None else (1 / 2, "half")
        return 1 + share, f", and {words} of it for the reference"

    @property
    def freeze(self) -> masks.Mask:
        """As of :class:`Change`: the reference, and ``frozen``."""
        if not self.how.has_reference:
            return ()
        kept = (f"(^|/){REFERENCE}/",)
        if self.frozen is None:
            return kept
        return lambda params: jax.tree.map(
            operator.or_, masks.by_path(kept)(params), self._still(params)
        )

    def params(self, params: Mapping[str, Any], rng: Any = None, stacked: Any = None) -> dict:
        """Returns parameters that also hold themselves as the reference; no leaf is copied."""
        if not self.how.has_reference:
            return dict(params)
        kept = _trained(_without_additions(params), _without_additions(self._still(params)))
        layers = {REFERENCE: found} if (found := kept.pop(STACKED, {})) else {}
        layers = {STACKED: {**params[STACKED], **layers}}
        return {**params, **layers, **({REFERENCE: kept} if kept else {})}

    def back(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the policy's parameters alone."""
        return without(params, REFERENCE)

    def rules(self, rules: Rules | Sequence[Rule], shapes: Any = None) -> Rules:
        """Returns a model's sharding rules, whose patterns begin with ``^``, for the reference too.

        >>> Preferences(None).rules([("^blocks/w$", ("layers", None))]).params[0][0]
        '^blocks/(reference/)?w$'
        """
        rules, own = as_rules(rules), f"({REFERENCE}/)?"

        def both(rule: Rule) -> Rule:
            pattern, axes = rule
            begin = f"^{STACKED}/" if pattern.startswith(f"^{STACKED}/") else "^"
            return begin + own + pattern.removeprefix(begin), axes

        if not self.how.has_reference:
            return rules
        return dataclasses.replace(rules, params=OptionalRules(map(both, rules.params)))

    def stages(self, stages: Stages | None) -> Stages:
        """Returns the stages of both; raises ValueError as :func:`check_layers`."""
        check_layers(stages, instead="preference_loss")

        def stream(policy: PyTree, reference: Callable[[], PyTree]) -> dict[str, PyTree]:
            still = {REFERENCE: reference()} if self.how.has_reference else {}
            return {"policy": policy, **jax.lax.stop_gradient(still)}

        def embed(params: PyTree, batch: Batch, rng: jax.Array | None) -> PyTree:
            ours, theirs, rows = *both(params), self.rows(batch)
            still = functools.partial(stages.embed, theirs, rows, None)
            return stream(stages.embed(ours, rows, rng), still)

        def block(layer, shared, x: PyTree, batch: Batch, rng, index: jax.Array) -> PyTree:
            (ours, theirs), rows, key = both(layer), self.rows(batch), stages.stacked.key
            before = {key: theirs}, x.get(REFERENCE), rows, None, index
            still = functools.partial(stages.layer, 0, *before)
            return stream(stages.layer(0, {key: ours}, x["policy"], rows, rng, index), still)

        def head_loss(params: PyTree, x: PyTree, batch: Batch) -> WeightedLoss:
            ours, theirs, rows = *both(params), self.rows(batch)
            still = None
            if self.how.has_reference:
                still = self.log_probs(theirs, x[REFERENCE], rows)
            return self.loss(self.log_probs(ours, x["policy"], rows), still, batch)

        return dataclasses.replace(stages, embed=embed, block=block, head_loss=head_loss, shared=())

    def rows(self, batch: Batch) -> Batch:
        """Returns the batch as of a model of text."""
        return _rows(batch)

    def loss(self, ours: jax.Array, theirs: jax.Array | None, batch: Batch) -> WeightedLoss:
        """Returns the loss of a batch by what ``log_probs`` gives of policy and reference."""
        return _of_rows(ours, theirs, batch, self.how)

    def _still(self, params: PyTree) -> PyTree:
        """The mask of what does not train in the model as it is."""
        if self.frozen is None:
            return jax.tree.map(lambda x: False, params)
        return masks.resolve("frozen", self.frozen, params)


def _of_rows(
    ours: jax.Array, theirs: jax.Array | None, batch: Batch, how: Preference
) -> WeightedLoss:
    shape = batch["mask"].shape
    theirs = None if theirs is None else theirs.reshape(shape)
    return pair_loss(ours.reshape(shape), batch, how, reference=theirs)


def _rows(batch: Batch) -> dict[str, jax.Array]:
    """Returns the batch as of a model of text: both sides of every row are rows, [2 B, T]."""
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}


def both(params: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the policy's parameters, or those of its layer, and the reference's."""
    policy, kept = apart(params, REFERENCE)
    return policy, _over(_without_additions(policy), kept)


def policy_and_reference(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the policy's parameters and the reference's, of whole models."""
    ours, (layers, theirs) = without(params, REFERENCE), both(params[STACKED])
    return ours, both(params | {STACKED: layers})[1] | {STACKED: theirs}


def _without_additions(params: PyTree) -> PyTree:
    return map_kind(LowRank | Dora, lambda x: getattr(x, "low", x).base, params)


def _trained(params: Mapping[str, Any], still: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tree that train, at least in part, without empty branches."""
    both = {name: (value, still[name]) for name, value in params.items()}
    inner = {k: _trained(*pair) for k, pair in both.items() if isinstance(pair[0], Mapping)}
    outer = {k: pair for k, pair in both.items() if k not in inner}
    own = {k: v for k, (v, mask) in outer.items() if not all(jax.tree.leaves(mask))}
    return own | {name: found for name, found in inner.items() if found}


def _over(params: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """A tree with what is kept of it in the place of its own."""
    inner = {k: _over(v, kept.get(k, {})) for k, v in params.items() if isinstance(v, Mapping)}
    return {k: inner[k] if k in inner else kept.get(k, v) for k, v in params.items()}
