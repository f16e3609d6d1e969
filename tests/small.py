"""An experiment of a few small products, for tests of commands: ``tests.small``."""

import dataclasses

import jax.numpy as jnp

import jaxtrain as jt
from tests import problems


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """The regression of :mod:`tests.problems`, on 32 rows."""

    global_batch: int = 8
    held_out: bool = True
    """Evaluate on 32 others."""
    centred: bool = False
    """Take from the inputs a running mean of them, which is model state."""
    fault: bool = False
    """Refuse to be built."""


def build(config):
    if config.fault:
        raise ValueError("`global_batch` is too odd")
    batch = problems.make_batch(rows=64)
    rows = [{name: x[i] for name, x in batch.items()} for i in range(64)]
    data = config.batches_of(rows[:32], rows[32:] if config.held_out else None)
    model = {"init_fn": problems.init, "loss_fn": problems.loss_fn}
    if config.centred:
        model = {"init_fn": centred_init, "loss_fn": centred_loss, "has_model_state": True}
    return config.experiment("small", **model, **data)


def centred_init(rng):
    return problems.init(rng), {"mean": jnp.zeros(problems.INPUTS)}


def centred_loss(params, model_state, batch, rng):
    mean = model_state["mean"]
    if rng is not None:
        mean = 0.5 * (mean + batch["x"].mean(0))
    return problems.loss_fn(params, batch | {"x": batch["x"] - mean}, rng), {"mean": mean}


if __name__ == "__main__":
    jt.main(Config, build)
