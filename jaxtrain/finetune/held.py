"""What does not train, held in the dtype that it is computed with."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.optim import masks
from jaxtrain.tree import map_named, named_leaves


def hold_in_compute(experiment: Any) -> Any:
    """Returns an :class:`jaxtrain.Experiment` whose frozen parameters are stored as its policy
    casts them for every step: half the memory under bf16, and the same bits in every step.

    Raises:
      ValueError: nothing is frozen.
    """
    task, policy = experiment.task, experiment.policy
    shapes = jax.eval_shape(task.init_fn, jax.random.key(0))
    still = masks.resolve("freeze", task.freeze or (), shapes)
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    held = {n for n, x in named_leaves(shapes).items() if named_leaves(still)[n] and floating(x)}
    if not held:
        raise ValueError(
            f"experiment {experiment.name!r} has no frozen parameters to hold in another dtype: "
            "freeze some, as low-rank additions do"
        )
    cast = lambda n, x: x.astype(policy.compute_dtype) if n in held else x  # noqa: E731
    kept = [f"^{re.escape(name)}$" for name in sorted(held)]
    return experiment.with_(
        init_fn=lambda rng: map_named(cast, task.init_fn(rng)),
        policy=dataclasses.replace(policy, keep="|".join([*filter(None, [policy.keep]), *kept])),
    )
