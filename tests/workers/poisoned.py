"""An experiment whose data turns to NaN at a stated step, for tests of skipping and of replay."""

import dataclasses

import numpy as np

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.run.options import LayoutFlags
from tests import problems


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """Trains on rows of which some are poisoned."""

    steps: int = 20
    """Train steps."""
    poison: tuple[int, ...] = ()
    """Steps (as logs count) with NaN in every target."""
    poison_half: tuple[int, ...] = ()
    """Steps with NaN in every other target: in one of two microbatches."""
    layout: LayoutFlags = dataclasses.field(default_factory=lambda: jt.Layout(accumulate=2))


def build(config: Config) -> jt.Experiment:
    """Builds it."""

    def make(step, sharding):
        del sharding  # compiled steps place NumPy arrays
        batch = problems.make_batch(step)
        if step + 1 in config.poison + config.poison_half:
            batch["mask"][:] = 1
            rows = slice(None) if step + 1 in config.poison else slice(1, None, 2)
            batch["y"][rows] = np.nan
        return batch

    return config.experiment(
        "poisoned",
        init_fn=problems.init,
        loss_fn=problems.noisy_loss,
        optimizer=jt.make_optimizer("adamw", 1e-2),
        batch=problems.make_batch(),
        train_batches=lambda start, sharding: data.BatchStream(
            lambda step: make(step, sharding), start
        ),
        items_per_step=problems.ROWS,
    )
