"""Rollouts: before each step the model answers prompts, and the step learns from the rewards of its
own answers.

A batch is prompts. Within the compiled step the present parameters write several answers to each, a
function on the host gives every answer a reward, and the train step is given rows of both. So a
batch of rows is a function of (seed, step, parameters), and a run is resumed to the bit.

Shapes: Q prompts, S answers of each, B = Q x S, P positions of a prompt, N new tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.finetune.change import without
from jaxtrain.finetune.group_policy import GroupPolicy, answer_rows
from jaxtrain.finetune.preferences import REFERENCE
from jaxtrain.jaxprs import SAMPLED
from jaxtrain.loss import WeightedLoss
from jaxtrain.methods.method import Method, Step
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.generate import Prompts, Scored, Weights, scored_step
from jaxtrain.models.sampling import make_sampling
from jaxtrain.ops.per_device import not_taken_over, split_over
from jaxtrain.precision import Policy
from jaxtrain.state import TrainState

Reward = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
SAMPLERS = ("same", "exact", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """How prompts are answered.

    Args:
      model: the decoder that answers, and trains.
      reward: a pure function on the host, ``(prompts [B, P], lengths [B], answers [B, N]) -> [B]``
        float32; behind its end an answer is filled with that.
      end: the token that ends an answer.
      longest: N, the tokens that an answer may have.
      sampler: ``same``, the model as it trains; ``exact``, one token at a time in one order of
        sums, with the bits of :func:`jaxtrain.models.exact.log_probs`; ``bfloat16``, of parameters
        that are rounded to that.
      policy: dtypes of the step, by which parameters are cast.
    """

    model: DecoderConfig
    reward: Reward
    end: int
    longest: int
    sampler: Literal[SAMPLERS] = "same"  # type: ignore[valid-type]
    policy: Policy = dataclasses.field(default_factory=Policy)

    def __post_init__(self) -> None:
        for name in ("dropout", "attention_dropout"):
            if rate := getattr(self.model, name):
                raise ValueError(
                    f"`{name}` is {rate}, and answers to be rewarded are sampled without any, so "
                    "that another policy would train: give a model that has 0"
                )

    @jax.named_scope(SAMPLED)
    def answer(self, params: Any, prompts: Mapping[str, jax.Array], rng: jax.Array) -> Scored:
        """Returns what is written for ``tokens`` [B, P] and ``lengths`` [B]. Each row has a key of
        its own, so that no mesh changes what it draws."""
        params = self.policy.cast_to_compute(without(params, REFERENCE))
        if self.sampler == "bfloat16":
            wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if wide(x) else x, params)
        given = {"max_new_tokens": self.longest, "exact": self.sampler == "exact"}
        step = scored_step(self.model, **given)
        sampling = make_sampling(self.model.vocab_size, eod=self.end)

        def write(params, tokens_BP, lengths_B, keys_B):
            return step(Weights(params), Prompts(tokens_BP, lengths_B, keys_B, sampling))

        keys_B = jax.random.split(rng, len(prompts["lengths"]))
        rows = prompts["tokens"], prompts["lengths"], keys_B
        if self.sampler == "exact":
            return _by_device(write, params, *rows)
        return write(params, *rows)

    def judge(self, tokens_BP: jax.Array, lengths_B: jax.Array, new_BN: jax.Array) -> jax.Array:
        """Returns the reward of each answer, float32 [B]: each device's rows on its own host."""

        def on_host(*rows):
            return np.asarray(self.reward(*map(np.asarray, rows)), np.float32)

        def of_rows(nothing, *rows):
            kind = jax.ShapeDtypeStruct(rows[1].shape, jnp.float32)
            return jax.pure_callback(on_host, kind, *rows)

        return _by_device(of_rows, (), tokens_BP, lengths_B, new_BN)


def rollouts(how: Rollouts, policy: GroupPolicy) -> Method:
    """Returns the method of a step whose loss is :func:`jaxtrain.finetune.group_policy.policy_loss`
    and whose batches are prompts: ``tokens`` [Q, P] and ``lengths`` [Q].

    Metrics: ``reward`` and ``length`` (tokens), means of answers. An evaluation gives the mean
    ``reward`` of one answer to each prompt, drawn alike each time, and the loss 1 - reward.
    """

    def rollouts_step(step: Step) -> Step:
        def with_answers(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            prompts = jax.tree.map(lambda x: jnp.repeat(x, policy.size, axis=0), batch)
            rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), 1)
            new_BN, log_p_BN, routes_BLRJ = how.answer(state.params, prompts, rng)
            asked = prompts["tokens"], prompts["lengths"], new_BN
            rewards_B = how.judge(*asked)
            rows = answer_rows(*asked, log_p_BN, how.end)
            if routes_BLRJ is not None:  # of all positions but the last, where nothing is trained
                rows["routes"] = jnp.pad(routes_BLRJ, ((0, 0), (0, 0), (0, 1), (0, 0)), "edge")
            rows["advantage"] = policy.advantages(rewards_B)
            state, metrics = step(state, rows)
            found = {"reward": rewards_B.mean(), "length": rows["mask"].sum(1).mean()}
            return state, metrics | found

        return with_answers

    def evaluation(step: Callable) -> Callable:
        del step  # which has no rows to learn from

        def rewarded(state: TrainState, batch: Any) -> WeightedLoss:
            new_BN = how.answer(state.params, batch, jax.random.key(0)).tokens
            total = how.judge(batch["tokens"], batch["lengths"], new_BN).sum()
            count = jnp.float32(len(batch["lengths"]))
            return WeightedLoss(count - total, count, {"reward": total})

        return rewarded

    return Method(rollouts_step, evaluation=evaluation, check=_check)


def _check(experiment: Any) -> None:
    for axis in ("pipe", "context"):
        if (size := getattr(experiment.layout.mesh, axis)) != 1:
            raise ValueError(
                f"mesh axis '{axis}' has size {size}, and answers to be rewarded are written a "
                "token at a time, each through all layers: leave it out"
            )


def _by_device(function: Callable, whole: Any, *rows: jax.Array) -> Any:
    """Applies a function of something whole and of rows to each device's rows."""
    if not (free := not_taken_over()):
        return function(whole, *rows)
    batch = PartitionSpec(split_over("batch")[0] or None)
    specs = (PartitionSpec(), *[batch] * len(rows))
    run = functools.partial(jax.shard_map, axis_names=free, check_vma=False)
    return run(function, in_specs=specs, out_specs=batch)(whole, *rows)
