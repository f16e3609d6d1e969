"""The cost of the norms of every layer, measured inside every k-th train step."""

import dataclasses
import functools
from typing import Literal

from experiments.bench import Rounds, gpt_work, row
from experiments.bench.step import SHAPES, initialised_variant, make_batch, model_and_rows
from jaxtrain.models import decoder


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """The step with ``make_optimizer(watch_every=)`` against the step without, on one device."""

    shape: Literal[tuple(SHAPES)] = "small"  # type: ignore[valid-type]
    """Which model."""
    optimizer: str = "adamw"
    """Which update rule."""
    every: int = 10
    """Steps between two measurements, and of a round."""
    rounds: int = 30


def main(config: Config) -> None:
    """Runs the row and prints it."""
    model, rows = model_and_rows(config.shape)
    batch, init = make_batch(model, rows), functools.partial(decoder.init, model)
    variants = {
        name: initialised_variant(
            model, init, batch, config.every, optimizer=config.optimizer, watch_every=every
        )
        for name, every in (("not watched", 0), ("watched", config.every))
    }
    about = {
        "model": dataclasses.asdict(model),
        "batch": (rows, model.seq_len),
        "dtypes": "float32",
    }
    row("watch", config, variants, about, work=gpt_work(model, rows, steps=config.every))
