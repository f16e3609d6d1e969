"""Train by PPO with actors in processes of their own, on Ray: ``python -m experiments.actors``.

    python -m experiments.actors --players 2 --run-dir RUN  # pip install -e '.[ray]'

Each process plays rollouts by the parameters that were newest when it began one, and the learner
takes the next that arrives, whoever played it, as late as it is (V-trace). A process that is lost
is replaced by one that begins new episodes. The flags are those of experiments.ppo, and so is the
step on a mesh; the order of arrival is not repeated, and a resumed run begins new episodes.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from experiments import ppo
from jaxtrain.host.least import check_least
from jaxtrain.methods.environments import ENVIRONMENTS
from jaxtrain.methods.on_policy import OnPolicy, begun, log_prob, off_policy, rollout
from jaxtrain.methods.population import Population
from jaxtrain.run.hook import Hook
from jaxtrain.run.parameter_server import answers, cluster
from jaxtrain.state import TrainState


@dataclasses.dataclass(frozen=True)
class Config(ppo.Config):
    """Trains an actor and a critic by what other processes play (PPO with V-trace)."""

    players: int = 2
    """Processes that play, each with as many actors as a step has rows."""
    late: int = 16
    """Steps by which a rollout may be late; one that is later is thrown away."""
    address: str | None = None
    """The Ray cluster to join, such as auto; left out, one is started on this host."""


def play(
    name: str, how: OnPolicy, params: Any, actors: Any, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Plays a rollout in an environment; returns the actors then, and a batch for the learner."""
    environment = ENVIRONMENTS[name]
    numbers_E = jnp.arange(actors["age"].shape[0])
    actors, played = rollout(environment, ppo.apply, how.steps, params, actors, key, numbers_E)
    head_ETH, _ = ppo.apply(params, played["observation"])
    logs_ET, _ = log_prob(environment, head_ETH, played["action"])
    return actors, played | {"actor": numbers_E, "log_prob": logs_ET}


class Player:
    """Plays in a process of its own."""

    def __init__(self, name: str, how: OnPolicy, count: int, seed: int, number: int) -> None:
        self._key = jax.random.fold_in(jax.random.key(seed), number)
        self._actors = begun(ENVIRONMENTS[name], count, self._key)
        self._play = jax.jit(functools.partial(play, name, how))

    def play(self, params: Any, step: int) -> dict[str, np.ndarray]:
        """Returns a rollout on the host, by the parameters after so many steps of the run."""
        self._key, key = jax.random.split(jax.random.fold_in(self._key, step))
        self._actors, played = self._play(params, self._actors, key)
        return jax.device_get(played)


class Learner(Hook):
    """The batches of a run that other processes play, and the hook that gives them parameters."""

    def build(self, config: Config) -> jt.Experiment:
        """Builds the experiment."""
        check_least(config, players=1, late=0)
        if config.population != Population():
            raise ValueError(
                "`population` is given, and other processes play by one policy: leave it out, or "
                "use experiments.ppo"
            )
        self._config, self._delays = config, {}
        name, how, key = config.environment, config.rollout, jax.random.key(0)
        draw = functools.partial(ppo.init, ENVIRONMENTS[name], config.hidden)
        params = jax.eval_shape(draw, key)
        actors = jax.eval_shape(lambda: begun(ENVIRONMENTS[name], config.global_batch, key))
        _, batch = jax.eval_shape(functools.partial(play, name, how), params, actors, key)
        own = {"batch": batch, "train_batches": self.batches}
        own["counts"] = lambda step: {"train/delay": self._delays.get(step, 0)}
        return ppo.built(config, off_policy, **own)

    def on_step(self, step: int, state: TrainState) -> None:
        """Gives the parameters out."""
        self._step, self._params = step, self._ray.put(jax.device_get(state.params))

    on_start = on_step

    @contextlib.contextmanager
    def batches(self, start: int, shardings: Any) -> Iterator[Iterator[Any]]:
        """Opens the stream of rollouts as they arrive."""
        config = self._config
        options = config.environment, config.rollout, config.global_batch, config.seed
        numbers = itertools.count()
        make = lambda: actor.remote(*options, next(numbers))  # noqa: E731
        give = lambda each: (each.play.remote(self._params, self._step), self._step)  # noqa: E731

        def arrivals() -> Iterator[Any]:
            step = start
            for _, read, played in answers(ray, make, give, config.players):
                if step - read <= config.late:
                    step, self._delays[step + 1] = step + 1, step - read
                    yield jax.device_put(played, shardings)

        with cluster("actors are processes on Ray", config.address, config.players) as ray:
            self._ray, actor = ray, ray.remote(Player).options(num_cpus=1)
            yield arrivals()


def build(config: Config) -> jt.Experiment:
    """Builds the experiment."""
    return Learner().build(config)


if __name__ == "__main__":
    learner = Learner()
    jt.main(Config, learner.build, hooks=[learner])
