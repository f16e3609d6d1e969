"""Train an actor and a critic by PPO: ``python -m experiments.ppo``.

By default CartPole-v1, whose 32 actors are rows of a batch and act inside of the step: 409,600
frames in 8 to 11 seconds on 2 busy CPU cores, after which the most probable actions hold the pole
for all 500 steps with each of five seeds. Acrobot has -80 to -85, Pendulum -164 to -221.

    python -m experiments.ppo --environment acrobot
    python -m experiments.ppo --environment pendulum --rollout.discount 0.95
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from experiments.members import of_members
from jaxtrain.host.least import check_least
from jaxtrain.methods.environments import ENVIRONMENTS, Environment
from jaxtrain.methods.on_policy import OnPolicy, clipped_loss, episodes, on_policy
from jaxtrain.methods.population import Population
from jaxtrain.run import options
from jaxtrain.sharding.placement import constrain
from jaxtrain.sharding.rules import OptionalRules, Rules
from jaxtrain.state import TrainState

ADAM = {"name": "adam", "learning_rate": 2.5e-3, "schedule": "linear", "warmup_steps": 0}
ADAM |= {"weight_decay": 0.0, "clip_norm": 0.5, "eps": 1e-5}
# Every second layer is split by what it takes, the others by what they make.
RULES = OptionalRules(
    [
        ("/hidden_0/kernel$", (None, "mlp")),
        (r"/hidden_\d*[13579]/kernel$", ("mlp", "embed")),
        (r"/hidden_\d*[02468]/kernel$", ("embed", "mlp")),
        ("bias$|log_std$", (None,)),
    ]
)


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains an actor and a critic in an environment that is part of the step (PPO)."""

    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=lambda: options.OptimizerOptions(**ADAM)
    )
    rollout: OnPolicy = dataclasses.field(default_factory=OnPolicy)
    population: Population = dataclasses.field(default_factory=Population)
    environment: Literal[tuple(ENVIRONMENTS)] = "cartpole"  # type: ignore[valid-type]
    """CartPole-v1, Acrobot-v1 or Pendulum-v1 of Gymnasium."""
    steps: int = 100
    """Rollouts, and passes over them."""
    global_batch: int = 32
    """Actors: environments that are played at once, over all devices."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of the actor, and of the critic."""
    episodes: int = 64
    """Episodes of an evaluation, with the most probable actions."""


def build(config: Config) -> jt.Experiment:
    """Builds the experiment, or that of its population."""
    return of_members(config, built)


def built(config: Config, method: Any = on_policy, **given: Any) -> jt.Experiment:
    """Builds the experiment of one member, by a method; ``given`` are other fields of it."""
    check_least(config, global_batch=1, episodes=1)
    if min(config.hidden, default=1) < 1:
        raise ValueError(f"`hidden` is {config.hidden}: a layer has at least 1 unit")
    environment, how, E = ENVIRONMENTS[config.environment], config.rollout, config.global_batch

    def optimizer(stack: Any, **numbers: Any) -> Any:
        chosen = dataclasses.replace(config.optimizer, **numbers)
        return options.make_optimizer(chosen, steps=config.steps * how.updates, global_batch=E)

    own = {
        "batch": {"actor": jax.ShapeDtypeStruct((E,), np.int32)},
        "train_batches": functools.partial(actors, E),
    }
    made = config.experiment(
        "ppo",
        init_fn=functools.partial(init, environment, config.hidden),
        loss_fn=clipped_loss(environment, apply, how),
        eval_loss_fn=episodes(environment, apply),
        rules=Rules(RULES),
        optimizer=optimizer,
        eval_batches=lambda shardings: [numbered(config.episodes, shardings)],
        items_per_step=E * how.steps,
        item="frames",
        facts={
            "environment": f"{environment.name}, {E} actors of {how.steps} steps",
            "model": f"two networks of {' '.join(map(str, config.hidden))}",
        },
        conclude=conclude,
        best_metric="return",
        best_mode="max",
        **own | given,
    )
    return method(made, environment, apply, how)


def numbered(count: int, shardings: Any) -> dict[str, jax.Array]:
    """Returns the batch of so many actors: their numbers."""
    return jax.device_put({"actor": np.arange(count, dtype=np.int32)}, shardings)


@contextlib.contextmanager
def actors(count: int, start: int, shardings: Any) -> Iterator[Iterator[Any]]:
    """Opens the stream of batches, which are the same at every step."""
    del start
    yield itertools.repeat(numbered(count, shardings))


def init(environment: Environment, hidden: tuple[int, ...], rng: jax.Array) -> dict[str, Any]:
    """Draws an actor and a critic: orthogonal kernels, and an actor that at first hardly prefers
    any action."""
    actor, critic = jax.random.split(rng)
    sizes = (environment.observations, *hidden)
    params = {
        "actor": dense(actor, (*sizes, environment.actions or 1), 0.01),
        "critic": dense(critic, (*sizes, 1), 1.0),
    }
    return params if environment.actions else params | {"log_std": jnp.zeros(1)}


def dense(rng: jax.Array, sizes: tuple[int, ...], last: float) -> dict[str, Any]:
    """Draws dense layers of these widths."""
    keys, pairs, made = jax.random.split(rng, len(sizes) - 1), itertools.pairwise(sizes), {}
    for i, (key, pair) in enumerate(zip(keys, pairs, strict=True)):
        is_last = i == len(keys) - 1
        draw = jax.nn.initializers.orthogonal(last if is_last else math.sqrt(2))
        layer = {"kernel": draw(key, pair), "bias": jnp.zeros(pair[1])}
        made["head" if is_last else f"hidden_{i}"] = layer
    return made


def apply(params: Mapping[str, Any], observation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The policy's head [..., H] and the critic's value [...] of observations [..., O]."""

    def through(layers: Mapping[str, Any]) -> jax.Array:
        x = observation.astype(layers["head"]["kernel"].dtype)
        for i in range(len(layers) - 1):
            x = jnp.tanh(x @ layers[f"hidden_{i}"]["kernel"] + layers[f"hidden_{i}"]["bias"])
            x = constrain(x, "batch", *[None] * (x.ndim - 2), None if i % 2 else "mlp")
        return (x @ layers["head"]["kernel"] + layers["head"]["bias"]).astype(jnp.float32)

    head = through(params["actor"])
    if "log_std" in params:
        std = jnp.broadcast_to(params["log_std"].astype(jnp.float32), head.shape)
        head = jnp.concatenate([head, std], -1)
    return head, through(params["critic"])[..., 0]


def conclude(state: TrainState, means: Mapping[str, float]) -> list[str]:
    """Says what the policy reaches."""
    del state
    return [f"return {means['return']:.1f} in episodes of {means['length']:.1f} steps"]


if __name__ == "__main__":
    jt.main(Config, build)
