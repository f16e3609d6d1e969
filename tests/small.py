"""An experiment of a few small products, for tests of commands: ``tests.small``."""

import dataclasses

import jaxtrain as jt
from tests import problems


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """The regression of :mod:`tests.problems`, on 32 rows."""

    global_batch: int = 8
    held_out: bool = True
    """Evaluate on 32 others."""
    fault: bool = False
    """Refuse to be built."""


def build(config):
    if config.fault:
        raise ValueError("global_batch is too odd")
    batch = problems.make_batch(rows=64)
    rows = [{name: x[i] for name, x in batch.items()} for i in range(64)]
    data = config.batches_of(rows[:32], rows[32:] if config.held_out else None)
    return config.experiment("small", init_fn=problems.init, loss_fn=problems.loss_fn, **data)
