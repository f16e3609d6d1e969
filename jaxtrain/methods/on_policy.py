"""On-policy reinforcement learning: a step plays episodes and passes over them several times (PPO).

A row of a batch is an actor: its number, by which its randomness is drawn. A step of the run lets
every actor act for so many steps, estimates advantages (Schulman et al. 2016,
https://arxiv.org/abs/1506.02438), and takes the train step for each minibatch of each epoch, whose
loss is that of proximal policy optimisation (Schulman et al. 2017,
https://arxiv.org/abs/1707.06347). States of episodes are part of the state of the run, so that it
is resumed in the midst of them.

An episode that terminates has no value beyond its end; one that is truncated by its limit would
have gone on, and is worth what the critic says of the state that it led to, before it is reset.
A minibatch has so many steps of each actor, drawn for each by itself: on a mesh rows stay where
they are.

Shapes: E actors, T steps of a rollout, K of them in a minibatch, O numbers of an observation, H of
the policy's head: logits of discrete actions, or the mean and the logarithm of the standard
deviation of one real action.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.host.least import check_least
from jaxtrain.loss import WeightedLoss, row_wise
from jaxtrain.methods.environments import Environment
from jaxtrain.methods.meeting import joined
from jaxtrain.methods.method import Method, Step
from jaxtrain.sharding.placement import constrain, gather_for_loss
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, named_leaves

# ``(params, observations [..., O]) -> (head [..., H], value [...])``.
Policy = Callable[[PyTree, jax.Array], tuple[jax.Array, jax.Array]]
# The key of evaluations, so that all have the same episodes to play.
_EVALUATED = 2**31


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """Rollouts of actors, and the passes over them of proximal policy optimisation (PPO)."""

    steps: int = 128
    """Steps of each actor in a rollout."""
    epochs: int = 4
    """Passes over a rollout."""
    minibatches: int = 4
    """Optimizer updates in a pass; each has an equal share of the steps of every actor."""
    discount: float = 0.99
    """Factor on the reward of each later step (gamma)."""
    trace: float = 0.95
    """Factor on each later error of the critic in an advantage (lambda): 0 trusts the critic after
    one step, 1 not at all."""
    clip: float = 0.2
    """Change of an action's probability beyond which it is not rewarded, as a share."""
    critic: float = 0.5
    """Weight of the critic's squared error in the loss."""
    entropy: float = 0.005
    """Weight of the policy's entropy in the loss, which rewards exploration."""

    def __post_init__(self) -> None:
        check_least(self, steps=1, epochs=1, minibatches=1, clip=0, critic=0, entropy=0)
        for name in ("discount", "trace"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"`rollout.{name}` is {value}: give a number from 0 to 1")
        if self.steps % self.minibatches:
            raise ValueError(
                f"`rollout.steps` is {self.steps} and `rollout.minibatches` {self.minibatches}: "
                "give a divisor of the steps, so that minibatches are alike"
            )

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step of the run."""
        return self.epochs * self.minibatches


def v_trace(
    played: Mapping[str, jax.Array],
    ratio_ET: jax.Array,
    value_ET: jax.Array,
    after_ET: jax.Array,
    *,
    discount: float,
    trace: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns advantages [E, T], and V-trace targets of the critic (Espeholt et al. 2018,
    https://arxiv.org/abs/1802.01561, equation 1 with both ceilings 1, and remark 2).

    Where all ratios are 1 the advantages are generalised advantage estimates (Schulman et al. 2016,
    equation 16), and the targets those and the values.

    Args:
      played: ``reward``, ``terminated`` and ``over`` [E, T]; over is terminated or truncated.
      ratio_ET: the probability of each action by the policy that learns, over that by which it was
        drawn.
      value_ET: the critic's value of the state of each step.
      after_ET: its value of the state that the step led to, before any reset.
      discount: gamma.
      trace: lambda.

    >>> played = {"reward": jnp.ones((1, 2)), "over": jnp.array([[False, True]])}
    >>> played["terminated"] = jnp.zeros((1, 2), bool)  # truncated, and worth 4 beyond
    >>> given = played, jnp.ones((1, 2)), jnp.zeros((1, 2)), 4 * jnp.ones((1, 2))
    >>> v_trace(*given, discount=0.5, trace=1.0)[0]
    Array([[4.5, 3. ]], dtype=float32)
    """
    beyond_ET = jnp.where(played["terminated"], 0.0, after_ET)
    error_ET = played["reward"] + discount * beyond_ET - value_ET
    later_ET = discount * trace * ~played["over"]

    def back(total_E: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        error_E, later_E, weight_E = now
        gain_E = error_E + later_E * total_E
        return (total_E := weight_E * gain_E), (gain_E, total_E)

    given = jax.tree.map(jnp.transpose, (error_ET, later_ET, jnp.minimum(ratio_ET, 1.0)))
    _, found = jax.lax.scan(back, jnp.zeros_like(error_ET[:, 0]), given, reverse=True)
    gain_ET, total_ET = jax.tree.map(jnp.transpose, found)
    return gain_ET, value_ET + total_ET


def sample(environment: Environment, rng: jax.Array, head: jax.Array) -> jax.Array:
    """Draws one action by a policy's head [H]."""
    if environment.actions:
        return jax.random.categorical(rng, head)
    return head[0] + jnp.exp(head[1]) * jax.random.normal(rng)


def likeliest(environment: Environment, head: jax.Array) -> jax.Array:
    """Returns the most probable action by a policy's head [..., H]."""
    return head.argmax(-1) if environment.actions else head[..., 0]


def log_prob(
    environment: Environment, head: jax.Array, action: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability or density of actions [...] by heads [..., H], and entropies."""
    if environment.actions:
        logs = jax.nn.log_softmax(head)
        taken = jnp.take_along_axis(logs, action[..., None], -1)[..., 0]
        return taken, -(jnp.exp(logs) * logs).sum(-1)
    mean, log_std = head[..., 0], head[..., 1]
    normal = 0.5 * np.log(2 * np.pi) + log_std
    return -0.5 * ((action - mean) / jnp.exp(log_std)) ** 2 - normal, normal + 0.5


def clipped_loss(environment: Environment, policy: Policy, how: OnPolicy) -> Callable[..., Any]:
    """Makes the loss of PPO, ``(params, batch, rng) -> WeightedLoss``, a sum over steps of actors.

    Its batches [E, K, ...] have what was seen (``observation``) and done (``action``), the
    ``log_prob`` that it had then, the ``advantage``, and ``target``, what the critic should have
    said. It is minus equation 9 of the paper.
    """

    @row_wise
    def loss(params: PyTree, batch: Mapping[str, jax.Array], rng: Any) -> WeightedLoss:
        del rng
        if "advantage" not in batch:
            raise ValueError(
                f"the batch has {', '.join(batch)} and no advantages, which on_policy and "
                "off_policy find: leave the experiment its method, and take no other around "
                "rollouts"
            )
        head, value = policy(params, batch["observation"])
        logs, entropy = log_prob(environment, head, batch["action"])
        change = logs - batch["log_prob"]
        ratio, gain = jnp.exp(change), batch["advantage"]
        near = jnp.clip(ratio, 1 - how.clip, 1 + how.clip)
        gains = jnp.minimum(ratio * gain, near * gain)
        errors = (value - batch["target"]) ** 2
        told = {
            "critic_error": errors.sum(),
            "entropy": entropy.sum(),
            "clipped": (near != ratio).sum(dtype=jnp.float32),
            "divergence": (ratio - 1 - change).sum(),
        }
        total = (how.critic * errors - gains - how.entropy * entropy).sum()
        return WeightedLoss(total, jnp.float32(gains.size), told)

    return loss


def episodes(environment: Environment, policy: Policy) -> Callable[..., Any]:
    """Makes the evaluation of a policy: each row of a batch plays one episode, by the most probable
    actions. Its loss is minus the mean return, and ``return`` a metric."""

    @row_wise
    def loss(params: PyTree, batch: Mapping[str, jax.Array], rng: Any) -> WeightedLoss:
        del rng
        fold = lambda number: jax.random.fold_in(jax.random.key(_EVALUATED), number)  # noqa: E731
        states = jax.vmap(lambda number: environment.reset(fold(number)))(batch["actor"])

        def one(carry: Any, _: None) -> tuple[Any, None]:
            states, alive_E, sum_E, length_E = carry
            head_EH, _ = policy(params, _on_rows(jax.vmap(environment.observe)(states)))
            action_E = likeliest(environment, head_EH)
            states, reward_E, terminated_E = jax.vmap(environment.step)(states, action_E)
            sum_E, length_E = sum_E + jnp.where(alive_E, reward_E, 0), length_E + alive_E
            return (states, alive_E & ~terminated_E, sum_E, length_E), None

        zeros_E = jnp.zeros(batch["actor"].shape)
        carry = states, zeros_E == 0, zeros_E, zeros_E
        (*_, sum_E, length_E), _ = jax.lax.scan(one, carry, length=environment.limit)
        told = {"return": sum_E.sum(), "length": length_E.sum()}
        return WeightedLoss(-sum_E.sum(), jnp.float32(len(zeros_E)), told)

    return loss


def begun(environment: Environment, count: int, rng: jax.Array) -> dict[str, Any]:
    """Begins an episode of each of so many actors, and the account of their returns."""
    zeros_E = jnp.zeros(count)
    return {
        "state": jax.vmap(environment.reset)(jax.random.split(rng, count)),
        "age": jnp.zeros(count, jnp.int32),
        "return": zeros_E,
        "last": zeros_E,
        "ended": zeros_E > 0,
    }


def rollout(
    environment: Environment,
    policy: Policy,
    steps: int,
    params: PyTree,
    actors: PyTree,
    rng: jax.Array,
    numbers_E: jax.Array,
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Lets every actor act for so many steps, and those begin anew whose episodes end.

    Args:
      actors: of :func:`begun`.
      rng: with which, and their numbers, they draw.

    Returns:
      The actors then, and what was played, [E, T, ...]: ``observation``, ``action``, ``reward``,
      ``next`` (what was seen then, before any reset), ``terminated`` and ``over``; and ``return``
      [E] of the last episode that each has ended, or of what it has got so far.
    """

    def act(actors: PyTree, step: jax.Array) -> tuple[PyTree, dict[str, jax.Array]]:
        key = jax.random.fold_in(rng, step)
        keys_E2 = jax.vmap(lambda n: jax.random.split(jax.random.fold_in(key, n)))(numbers_E)
        seen_EO = _on_rows(jax.vmap(environment.observe)(actors["state"]))
        head_EH, _ = policy(params, seen_EO)
        action_E = jax.vmap(functools.partial(sample, environment))(keys_E2[:, 0], head_EH)
        states, reward_E, terminated_E = jax.vmap(environment.step)(actors["state"], action_E)
        age_E, return_E = actors["age"] + 1, actors["return"] + reward_E
        over_E = terminated_E | (age_E >= environment.limit)
        fresh = jax.vmap(environment.reset)(keys_E2[:, 1])
        either = lambda a, b: jnp.where(over_E.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        told = {"observation": seen_EO, "action": action_E, "reward": reward_E}
        told |= {"next": jax.vmap(environment.observe)(states)}
        told |= {"terminated": terminated_E, "over": over_E}
        actors = {
            "state": jax.tree.map(either, fresh, states),
            "age": jnp.where(over_E, 0, age_E),
            "return": jnp.where(over_E, 0, return_E),
            "last": jnp.where(over_E, return_E, actors["last"]),
            "ended": actors["ended"] | over_E,
        }
        return _on_rows(actors), told

    actors, told = jax.lax.scan(act, actors, jnp.arange(steps))
    told = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), told)
    told["return"] = jnp.where(actors["ended"], actors["last"], actors["return"])
    return actors, _on_rows(told)


def on_policy(
    experiment: Any, environment: Environment, policy: Policy, how: OnPolicy = OnPolicy()
) -> Any:
    """Returns an :class:`jaxtrain.Experiment` of which a step is a rollout, and epochs over it.

    Its optimizer makes ``how.updates`` updates in a step of the run, which its schedules count.
    ``return`` among the metrics is the mean over actors of the last episode that each has ended,
    undiscounted; of an actor that has ended none, of what it has got so far. ``loss`` is minus
    that, by which members of a population are compared, and ``objective`` what is differentiated.

    Args:
      experiment: whose loss is :func:`clipped_loss`, and whose batches are ``{"actor": [E]}``, the
        numbers of the actors.
      environment: what they act in.
      policy: the model that acts, and its critic.
      how: the numbers of PPO.

    Raises:
      ValueError: the experiment has a method already, or a minibatch is one step of one actor.
    """
    E = _checked(experiment, how)

    def start(state: TrainState) -> TrainState:
        rng = jax.random.fold_in(state.rng, jnp.uint32(2**32 - 1))  # which no step has
        return dataclasses.replace(state, method={"actors": begun(environment, E, rng)})

    def on_policy(step: Step) -> Step:
        def update(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
            key, rng = jax.random.split(jax.random.fold_in(state.rng, state.step))
            params = gather_for_loss(experiment.policy.cast_to_compute(state.params))
            actors = _on_rows(state.method["actors"])
            given = params, actors, key, batch["actor"]
            actors, played = rollout(environment, policy, how.steps, *given)
            played |= {"actor": batch["actor"]}
            after, told = _passes(step, environment, policy, how, state, params, played, rng)
            return dataclasses.replace(after, method={"actors": actors}), told

        return update

    rows = jax.eval_shape(functools.partial(begun, environment, E), jax.random.key(0))
    lies = [
        (f"^method/actors/{name}$", ("batch", *[None] * (x.ndim - 1)))
        for name, x in named_leaves(rows).items()
    ]
    rules = experiment.task.rules
    rules = dataclasses.replace(rules, state=OptionalRules((*rules.state, *lies)))
    method = Method(on_policy, start=start, updates=how.updates, of_members=True)
    return experiment.with_(method=method, rules=rules)


def off_policy(
    experiment: Any, environment: Environment, policy: Policy, how: OnPolicy = OnPolicy()
) -> Any:
    """Returns an :class:`jaxtrain.Experiment` of which a step is epochs over what others have
    played, perhaps by older parameters.

    Arguments and metrics are those of :func:`on_policy`, but for the batches: results of
    :func:`rollout` with ``actor`` [E] and ``log_prob`` [E, T], that of the actions when they were
    drawn. :func:`v_trace` says what they were worth; where nothing is old, it is the same step.
    """
    _checked(experiment, how)

    def off_policy(step: Step) -> Step:
        def update(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
            _, rng = jax.random.split(jax.random.fold_in(state.rng, state.step))
            params = gather_for_loss(experiment.policy.cast_to_compute(state.params))
            return _passes(step, environment, policy, how, state, params, batch, rng)

        return update

    return experiment.with_(method=Method(off_policy, updates=how.updates))


def _checked(experiment: Any, how: OnPolicy) -> int:
    """Returns the number of actors."""
    if experiment.method != Method():
        raise ValueError(
            f"experiment {experiment.name!r} has a method of its own, such as replicas of local "
            "updates, and its actors are one: leave it out"
        )
    (E,) = experiment.data.batch["actor"].shape
    if E * how.steps == how.minibatches:
        raise ValueError(
            f"`rollout.minibatches` is {how.minibatches}: each has one step of one actor, whose "
            "advantage is compared with no other; give fewer, or more actors"
        )
    return E


def _passes(
    step: Step,
    environment: Environment,
    policy: Policy,
    how: OnPolicy,
    state: TrainState,
    params: PyTree,
    played: Mapping[str, jax.Array],
    rng: jax.Array,
) -> tuple[TrainState, dict[str, Any]]:
    """Takes the train step for each minibatch of each epoch over what was played."""
    head_ETH, value_ET = policy(params, played["observation"])
    _, after_ET = policy(params, played["next"])
    rows = {name: played[name] for name in ("observation", "action")}
    logs_ET, _ = log_prob(environment, head_ETH, played["action"])
    rows["log_prob"] = played.get("log_prob", logs_ET)
    scaled = {**played, "reward": played["reward"] * environment.scale}
    given = scaled, jnp.exp(logs_ET - rows["log_prob"]), value_ET, after_ET
    found = v_trace(*given, discount=how.discount, trace=how.trace)
    rows["advantage"], rows["target"] = found
    order_key, key = jax.random.split(rng)

    def order(number: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(order_key, number), how.epochs)
        draw = lambda key: jax.random.permutation(key, how.steps)  # noqa: E731
        return jax.vmap(draw)(keys).reshape(how.updates, -1)

    def minibatch(state: TrainState, places_EK: jax.Array) -> tuple[TrainState, Any]:
        take = lambda row, places: jax.tree.map(lambda x: x[places], row)  # noqa: E731
        some = _on_rows(jax.vmap(take)(rows, places_EK))
        gain_EK = some["advantage"]
        gain_EK = (gain_EK - gain_EK.mean()) / (gain_EK.std() + 1e-8)
        return step(state, some | {"advantage": gain_EK})

    places_UEK = jnp.swapaxes(jax.vmap(order)(played["actor"]), 0, 1)
    inner = dataclasses.replace(state, step=jnp.zeros_like(state.step), rng=key, method=None)
    after, metrics_U = jax.lax.scan(minibatch, inner, places_UEK)
    told, got = joined(metrics_U), played["return"].mean()
    told |= {"objective": told["loss"], "loss": -got, "return": got}
    return dataclasses.replace(after, step=state.step + 1, rng=state.rng, method=state.method), told


def _on_rows(tree: PyTree) -> PyTree:
    """Leaves [E, ...] on the devices that have these rows of a batch."""
    return jax.tree.map(lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)), tree)
