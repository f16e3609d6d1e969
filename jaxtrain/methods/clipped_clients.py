"""Means of clients' updates that are private to a client: each clipped, and noise on their sum.

The mean of a round is (sum_c min(1, S / |u_c|) u_c + S w) / E over the clients c that it has drawn,
where u_c is what client c has moved the parameters by, S the clip, w normal noise, and E the number
of clients that a round draws on average, which depends on no data (DP-FedAvg, McMahan et al. 2018,
https://arxiv.org/abs/1710.06963). All clients weigh the same, however many rows they have. The
noise is added once, behind the sum over devices, by a key of the round.

Shapes: C clients of a round, drawn or not.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.engines.by_example import squared_norm, weighted_sum
from jaxtrain.engines.private import check_numbers, white_noise
from jaxtrain.tree import PyTree


@dataclasses.dataclass(frozen=True)
class ClippedClients:
    """What becomes of clients' updates: ``(u_C, drawn_C, key of the round) -> (mean, metrics)``.

    A client that is not drawn counts nothing, whatever its update holds, and neither does one whose
    update is not finite.

    Args:
      clip: S, the largest norm of a client's update; ``math.inf`` clips none.
      noise: standard deviation of the noise in units of ``clip``.
      clients: E, the number of clients that a round draws on average.
      rounds: those that are accounted for; an experiment of more is refused.

    Raises:
      ValueError: a number is out of range.
    """

    clip: float
    noise: float
    clients: float
    rounds: float = math.inf

    def __post_init__(self) -> None:
        check_numbers(self.clip, self.noise, clients=self.clients, rounds=self.rounds)

    def __call__(
        self, moved_C: PyTree, drawn_C: jax.Array, key: jax.Array
    ) -> tuple[PyTree, dict[str, Any]]:
        norm_C = jnp.sqrt(sum(map(jax.vmap(squared_norm), jax.tree.leaves(moved_C))))
        usable_C = drawn_C & jnp.isfinite(norm_C)
        factor_C = jnp.minimum(1.0, self.clip / jnp.where(norm_C > 0, norm_C, 1.0))
        factor_C = jnp.where(usable_C, factor_C, 0)

        def total(x_C: jax.Array) -> jax.Array:
            counts_C = usable_C.reshape(-1, *[1] * (x_C.ndim - 1))
            return weighted_sum(jnp.where(counts_C, x_C, 0), factor_C)  # 0 times NaN is NaN

        sums = jax.tree.map(total, moved_C)
        if self.noise:
            noise = white_noise(key, sums, self.clip * self.noise)
            sums = jax.tree.map(jnp.add, sums, noise)
        usable, clipped = usable_C.sum(), (usable_C & (norm_C > self.clip)).sum()
        told = {"clients": drawn_C.sum(), "not_finite": drawn_C.sum() - usable}
        told["clipped"] = clipped / jnp.maximum(usable, 1)
        return jax.tree.map(lambda x: x / self.clients, sums), told

    def check(self, experiment: Any) -> None:
        """Raises ValueError where an experiment has more rounds than are accounted for."""
        if experiment.steps > self.rounds:
            raise ValueError(
                f"training is private and experiment {experiment.name!r} has {experiment.steps:,} "
                f"rounds, of which {self.rounds:,} are accounted for; make its data and it by one "
                "config, of those rounds"
            )
