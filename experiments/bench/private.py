"""A private train step against the plain one of the same model, of `experiments.vision`."""

import dataclasses
import itertools
from typing import Literal

import jax

from experiments import vision
from experiments.bench import Rounds, Variant, row, stepping
from jaxtrain import build
from jaxtrain.engines.private import private
from jaxtrain.run import options


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Private gradients, as ratios to the plain step on the same rows, none of which is padding."""

    model: Literal["convnet", "vit"] = "convnet"
    """A ConvNet with GroupNorm, or a vision transformer."""
    global_batch: int = 128
    """Rows per step."""
    accumulate: tuple[int, ...] = (1, 4)
    """Microbatches of the private step, one variant for each."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    own = {"norm": "group"}
    if config.model == "vit":
        own = {"optimizer": options.OptimizerOptions(name="adamw")}
    flags = vision.Config(model=config.model, global_batch=config.global_batch, **own)
    made = vision.build(flags)
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    batch = next(iter(made.train_batches(0, build.stream_shardings(made, mesh))))

    def variant(engine: object = None, accumulate: int = 1) -> Variant:
        layout = made.layout.with_({"accumulate": accumulate})
        one = made.with_(layout=layout, **({"engine": engine} if engine else {}))
        state = build.make_state(one, mesh)
        return stepping(build.compile_train(one, state, mesh), state, itertools.repeat(batch))

    engine = private(1.0, 1.0, config.global_batch)
    variants = {"plain": variant()}
    variants |= {f"private, {n} microbatches": variant(engine, n) for n in config.accumulate}
    row("private", config, variants, {"rows": config.global_batch})
