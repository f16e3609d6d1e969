"""Policy gradients by groups of samples: of several answers to one prompt, what got a higher reward
than their mean becomes more probable.

A prompt has a group of S answers with rewards r. The advantage of an answer is A = r - mean(r), and
p(t) is the probability of its token t; the loss of a batch is -sum_i A_i sum_t w_t log p(t) / W, by

============  ======================================================================================
``sequence``  w = 1 / length of the answer, W = answers; GRPO, Shao et al. 2024,
              https://arxiv.org/abs/2402.03300
``token``     w = 1, W = tokens of all answers; DAPO, Yu et al. 2025,
              https://arxiv.org/abs/2503.14476
``constant``  w = 1, W = answers x the longest that one may be; Dr. GRPO, Liu et al. 2025,
              https://arxiv.org/abs/2503.20783
============  ======================================================================================

The first two also divide A by the deviation of the group's rewards. Each batch is sampled from the
parameters that it changes, so that no ratio of two policies is clipped. Every loss is a sum over a
weight: accumulation and meshes change nothing but rounding.

A sampler whose numbers are rounded differently draws from another policy q than the one that
trains; ``cap`` weighs a token by min(p / q, cap) without a gradient (truncated importance sampling,
Ionides 2008, https://doi.org/10.1198/106186008X320456).

Shapes: B answers, S of them in a group, P positions of a prompt, N new tokens, T = P + N.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.finetune.preferences import Preferences
from jaxtrain.loss import WeightedLoss

WEIGHTS = ("sequence", "token", "constant")


@dataclasses.dataclass(frozen=True)
class GroupPolicy:
    """A loss of answers that were sampled in groups, by their rewards."""

    size: int = 8
    """Answers that are sampled of each prompt, whose rewards are compared."""
    weight: Literal[WEIGHTS] = "token"  # type: ignore[valid-type]
    """The weight of a token: all alike (DAPO), those of each answer together alike (sequence,
    GRPO), or over a constant length and without the deviation of rewards (constant, Dr. GRPO)."""
    kl: float = 0.0
    """The coefficient of the divergence from what the policy began as, which is kept in memory
    where it is above 0."""
    cap: float | None = None
    """The most that a token counts by the ratio of its probability in training to that in the
    sampler; left out, all count 1."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with what it began as."""
        return self.kl > 0

    def checked(self) -> None:
        """Raises ValueError for numbers that the loss cannot have."""
        if self.weight not in WEIGHTS:
            raise ValueError(f"`weight` is {self.weight!r}: use one of {', '.join(WEIGHTS)}")
        if self.size < 2:
            raise ValueError(
                f"`size` is {self.size}: a reward is compared with others of its prompt; give 2 or "
                "more"
            )
        if not 0 <= self.kl < math.inf:
            raise ValueError(f"`kl` is {self.kl}: give 0 or more")
        if self.cap is not None and not 0 < self.cap < math.inf:
            raise ValueError(f"`cap` is {self.cap}: give a number above 0, or leave it out")

    def advantages(self, rewards_B: jax.Array) -> jax.Array:
        """Returns the advantage [B] of each answer; those of a group stand side by side.

        >>> GroupPolicy(2, "constant").advantages(jnp.array([1.0, 0, 3, 3]))
        Array([ 0.5, -0.5,  0. ,  0. ], dtype=float32)
        """
        rewards_QS = rewards_B.reshape(-1, self.size)
        found_QS = rewards_QS - rewards_QS.mean(axis=1, keepdims=True)
        if self.weight != "constant":
            # An epsilon as the papers' code has it: of equal rewards nothing is learned.
            found_QS /= rewards_QS.std(axis=1, keepdims=True) + 1e-4
        return found_QS.reshape(-1)


def answer_rows(
    tokens_BP: jax.Array, lengths_B: jax.Array, new_BN: jax.Array, log_p_BN: jax.Array, end: int
) -> dict[str, jax.Array]:
    """Returns prompts and what was written behind them as rows of a model of text.

    Args:
      tokens_BP, lengths_B: prompts, padded on the right.
      new_BN, log_p_BN: new tokens, and log q of each.
      end: the token that ends an answer, and is its last.

    Returns:
      ``tokens`` and ``targets`` [B, T], ``mask`` (1 where the target is a token of the answer) and
      ``sampled`` (log q of such targets, 0 elsewhere).

    >>> rows = answer_rows(jnp.array([[5]]), jnp.array([1]), jnp.array([[7, 9]]),
    ...                    jnp.array([[-1.0, -2]]), end=9)
    >>> {name: x.tolist()[0] for name, x in rows.items() if name != "sampled"}
    {'tokens': [5, 7, 9], 'targets': [7, 9, 9], 'mask': [1.0, 1.0, 0.0]}
    """
    P, N = tokens_BP.shape[1], new_BN.shape[1]
    # Of new token n of a row the position is length + n, and that where it is the target is before.
    at_BT = jnp.arange(P + N) - lengths_B[:, None]
    take = lambda x_BN, at_BT: jnp.take_along_axis(x_BN, jnp.clip(at_BT, 0, N - 1), 1)  # noqa: E731
    padded_BT = jnp.pad(tokens_BP, ((0, 0), (0, N)))
    rows_BT = jnp.where(at_BT < 0, padded_BT, take(new_BN, at_BT))
    ended_BN = jnp.cumsum(new_BN == end, axis=1)
    counts_B = jnp.minimum((ended_BN == 0).sum(1) + 1, N)
    mask_BT = (at_BT >= -1) & (at_BT < counts_B[:, None] - 1)
    return {
        "tokens": rows_BT,
        "targets": jnp.concatenate([rows_BT[:, 1:], rows_BT[:, -1:]], axis=1),
        "mask": mask_BT.astype(jnp.float32),
        "sampled": jnp.where(mask_BT, take(log_p_BN, at_BT + 1), 0.0),
    }


def policy_loss(
    log_p_BT: jax.Array,
    batch: Mapping[str, jax.Array],
    how: GroupPolicy = GroupPolicy(),
    *,
    longest: int | None = None,
    reference: jax.Array | None = None,
) -> WeightedLoss:
    """Returns the loss of sampled answers.

    Args:
      log_p_BT: log p of every target, in nats.
      batch: ``mask`` and ``sampled`` [B, T], and ``advantage`` [B].
      how: which loss.
      longest: the tokens that an answer may have, for the weight ``constant``; default T.
      reference: log p of every target by what the policy began as, [B, T]; needed with ``kl``.

    Returns:
      The loss, with metrics per token: ``sampler_gap``, the mean of \\|log p - log q\\|,
      ``sampler_ratio``, the mean of p / q, and with a reference ``kl``, Schulman's estimate
      exp(d) - d - 1 of d = log p_reference - log p, whose gradient that of the loss has.

    >>> batch = {"mask": jnp.ones((1, 2)), "sampled": jnp.zeros((1, 2)), "advantage": jnp.ones(1)}
    >>> jax.grad(lambda x: policy_loss(x, batch).means()["loss"])(jnp.zeros((1, 2)))
    Array([[-0.5, -0.5]], dtype=float32)
    """
    how.checked()
    if "advantage" not in batch:
        raise ValueError(
            f"the batch has {', '.join(batch)} and no advantage of rewarded answers, which the "
            "method jaxtrain.methods.rollouts.rollouts gives a step: use that"
        )
    mask_BT, advantage_B1 = batch["mask"], batch["advantage"][:, None]
    # What lies behind an answer may be anything, and has no gradient.
    log_p_BT = jnp.where(mask_BT > 0, log_p_BT, 0.0)
    still_BT = jax.lax.stop_gradient(log_p_BT)
    gap_BT = still_BT - batch["sampled"]
    ratio_BT = jnp.exp(gap_BT)
    # p / p without a gradient below: 1 to the bit, whose derivative is that of log p.
    gain_BT = jnp.exp(log_p_BT - still_BT) * advantage_B1
    if how.cap is not None:
        gain_BT *= jnp.minimum(ratio_BT, how.cap)
    metrics = {"sampler_gap": jnp.abs(gap_BT), "sampler_ratio": ratio_BT}
    if how.has_reference:
        if reference is None:
            raise ValueError(f"`kl` is {how.kl}: give reference= what it is the divergence from")
        d_BT = jnp.where(mask_BT > 0, jax.lax.stop_gradient(reference), 0.0) - log_p_BT
        metrics["kl"] = jnp.expm1(d_BT) - d_BT  # of small d, exp(d) - 1 would be its rounding
        gain_BT -= how.kl * metrics["kl"]
    tokens, lengths_B1 = mask_BT.sum(), mask_BT.sum(axis=1, keepdims=True)
    answers = (lengths_B1 > 0).sum().astype(jnp.float32)
    share_BT, weight = {
        "sequence": (mask_BT / jnp.maximum(lengths_B1, 1), answers),
        "token": (mask_BT, tokens),
        "constant": (mask_BT, answers * (longest or mask_BT.shape[1])),
    }[how.weight]
    told = {name: ((x_BT * mask_BT).sum(), tokens) for name, x_BT in metrics.items()}
    return WeightedLoss(-(gain_BT * share_BT).sum(), weight, jax.lax.stop_gradient(told))


@dataclasses.dataclass(frozen=True)
class Rewarded(Preferences):
    """The change by which a model learns from rewards of its own answers; the reference, which a
    divergence needs, lies in it as that of :class:`Preferences` does.

    Args:
      how: which loss.
      longest: the tokens that an answer may have.
    """

    how: GroupPolicy = GroupPolicy()
    longest: int | None = None

    def rows(self, batch):
        return batch

    def loss(self, ours, theirs, batch):
        return policy_loss(ours, batch, self.how, longest=self.longest, reference=theirs)
