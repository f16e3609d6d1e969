"""Environments of reinforcement learning as pure functions, which a train step contains.

They have the equations and constants of Gymnasium's classic control
(https://github.com/Farama-Foundation/Gymnasium), in float32: CartPole-v1 (Barto, Sutton and
Anderson 1983), Acrobot-v1 (Sutton 1996, "book" equations) and Pendulum-v1.

Shapes: S numbers of a state, O of an observation.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Environment:
    """A task for an agent: three pure functions of the state of one episode.

    Args:
      name: for people, such as Gymnasium's.
      reset: ``rng -> state``, any pytree of arrays, in which an episode begins.
      observe: ``state -> observation``, an array [O].
      step: ``(state, action) -> (state, reward, terminated)``; an episode that terminates has no
        further reward.
      limit: steps after which an episode is truncated: it ends, and would have gone on.
      actions: number of discrete actions, which are 0 to ``actions`` - 1; 0 where an action is one
        real number.
      scale: factor on rewards for training alone.
    """

    name: str
    reset: Callable[[jax.Array], PyTree]
    observe: Callable[[PyTree], jax.Array]
    step: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array, jax.Array]]
    limit: int
    actions: int
    scale: float = 1.0

    @property
    def observations(self) -> int:
        """O, the numbers of an observation.

        >>> ENVIRONMENTS["acrobot"].observations
        6
        """
        first = lambda: self.observe(self.reset(jax.random.key(0)))  # noqa: E731
        return jax.eval_shape(first).shape[0]


def _uniform(bounds: tuple[float, ...], rng: jax.Array) -> jax.Array:
    most_S = jnp.array(bounds)
    return jax.random.uniform(rng, most_S.shape, minval=-most_S, maxval=most_S)


def _wrapped(angle: jax.Array) -> jax.Array:
    return (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi


def _cartpole(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A cart of 1 kg and a pole of 0.1 kg and 1 m, pushed by 10 N for 0.02 s (Euler's method)."""
    _, speed, angle, turn = state
    push = jnp.where(action == 1, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    pull = (push + 0.05 * turn**2 * sin) / 1.1
    turns = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    change = jnp.stack([speed, pull - 0.05 * turns * cos / 1.1, turn, turns])
    state = state + 0.02 * change
    fallen = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * jnp.pi / 180)
    return state, jnp.float32(1), fallen


def _pendulum(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A rod of 1 kg and 1 m, upright at 0, turned by at most 2 Nm for 0.05 s."""
    angle, turn = state
    torque = jnp.clip(action, -2, 2)
    cost = _wrapped(angle) ** 2 + 0.1 * turn**2 + 0.001 * torque**2
    turn = jnp.clip(turn + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * turn, turn]), -cost, jnp.array(False)


def _acrobot(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two links of 1 kg and 1 m, turned at the joint between by -1, 0 or 1 Nm for 0.2 s."""
    torque = action.astype(jnp.float32) - 1

    def slope(state: jax.Array) -> jax.Array:
        first, second, turn1, turn2 = state
        d1, d2 = 3.5 + jnp.cos(second), 1.25 + 0.5 * jnp.cos(second)
        weight2 = 4.9 * jnp.sin(first + second)
        weight1 = 14.7 * jnp.sin(first) + weight2
        weight1 -= (0.5 * turn2**2 + turn1 * turn2) * jnp.sin(second)
        swing = 0.5 * turn1**2 * jnp.sin(second)
        turns2 = (torque + d2 / d1 * weight1 - swing - weight2) / (1.25 - d2**2 / d1)
        return jnp.stack([turn1, turn2, -(d2 * turns2 + weight1) / d1, turns2])

    k1 = slope(state)
    k2 = slope(state + 0.1 * k1)
    k3 = slope(state + 0.1 * k2)
    k4 = slope(state + 0.2 * k3)
    state = state + 0.2 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    most = jnp.pi * jnp.array([4.0, 9.0])
    state = jnp.concatenate([_wrapped(state[:2]), jnp.clip(state[2:], -most, most)])
    up = -jnp.cos(state[0]) - jnp.cos(state[0] + state[1]) > 1
    return state, jnp.where(up, 0.0, -1.0), up


def _sees_pendulum(state: jax.Array) -> jax.Array:
    return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1]])


def _sees_acrobot(state: jax.Array) -> jax.Array:
    angles = jnp.stack([jnp.cos(state[:2]), jnp.sin(state[:2])], axis=1)
    return jnp.concatenate([angles.reshape(-1), state[2:]])


def _made(
    name: str, bounds: tuple[float, ...], observe: Any, step: Any, **more: Any
) -> Environment:
    return Environment(name, functools.partial(_uniform, bounds), observe, step, **more)


ENVIRONMENTS = {
    "cartpole": _made(
        "CartPole-v1", (0.05,) * 4, lambda state: state, _cartpole, limit=500, actions=2
    ),
    "acrobot": _made("Acrobot-v1", (0.1,) * 4, _sees_acrobot, _acrobot, limit=500, actions=3),
    "pendulum": _made(
        "Pendulum-v1", (jnp.pi, 1.0), _sees_pendulum, _pendulum, limit=200, actions=0, scale=0.1
    ),
}
