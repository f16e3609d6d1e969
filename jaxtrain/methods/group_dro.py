"""Group DRO (Sagawa et al. 2020, https://arxiv.org/abs/1911.08731): groups with a larger loss weigh
more, so that the worst group's loss is what is learned.

Every row weighs ``q_g / p_g``, where p_g is its group's share of the training rows: the loss of
step t is ``sum_i (q_g(i) / p_g(i)) loss_i / sum_i q_g(i) / p_g(i)``. After the step

    q_g <- q_g exp(rate * l_g) * S / sum_h q_h exp(rate * l_h),

over the groups that the batch has rows of, whose weights sum to S before and after, where l_g is
the mean loss of the group's rows; the others keep theirs, so that a rare group is not forgotten by
batches without it. It begins with 1 / G. The paper's algorithm 1 weighs a step by the q that has
seen its own losses; here it is one step later, so that nothing has to know the losses of a whole
batch before its gradients: microbatches, meshes and pipelines change nothing.

Shapes: B rows, G groups.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.methods.method import Method, Step
from jaxtrain.state import TrainState

RATE = 0.01


def group_dro(shares: Sequence[float], *, rate: float = RATE) -> Method:
    """Returns group DRO, for batches with ``group`` [B, G], 1 in the column of a row's group, and
    ``mask`` [B], the rows' weights, whose loss has a metric ``group_loss`` [G], the mean of each.

    Args:
      shares: of the training rows that each group has, G numbers above 0.
      rate: the paper's eta_q.
    """
    shares_G = np.asarray(shares, np.float32)

    def start(state: TrainState) -> TrainState:
        weights_G = jnp.full(len(shares_G), 1 / len(shares_G), jnp.float32)
        return dataclasses.replace(state, method={"group_weights": weights_G})

    def group_dro_step(step: Step) -> Step:
        def weighted(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            weights_G = state.method["group_weights"]
            # A sum and no product, which a chip might round.
            of_rows_B = (batch["group"] * (weights_G / shares_G)).sum(-1)
            after, metrics = step(state, batch | {"mask": batch["mask"] * of_rows_B})
            losses_G = metrics["group_loss"]
            seen_G, log_q_G = jnp.isfinite(losses_G), jnp.log(weights_G)
            over = lambda x_G: jax.nn.logsumexp(jnp.where(seen_G, x_G, -jnp.inf))  # noqa: E731
            next_G = log_q_G + rate * losses_G
            next_G = jnp.where(seen_G, jnp.exp(next_G - over(next_G) + over(log_q_G)), weights_G)
            grown_G = jnp.where(metrics["skipped"] > 0, weights_G, next_G / next_G.sum())
            metrics = metrics | {"group_weight": weights_G}
            return dataclasses.replace(after, method={"group_weights": grown_G}), metrics

        return weighted

    return Method(group_dro_step, start=start)
