"""The total work of a pipeline: a pipelined step against the unpipelined one.

On simulated devices the same few cores run everything and idle devices cost nothing, so CPU time is
the sum of all devices' work: its ratio shows recomputation and the pipeline's own overhead, not its
bubble. With remat "full" a stage runs twice forward and once backward: at a backward that costs two
forwards, 4/3 of the unpipelined work. Wall time also depends on how well the devices' threads fill
the cores.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

import jaxtrain as jt
from experiments.bench import Rounds, Variant, gpt_row, step_facts, stepping
from experiments.bench.step import make_batch
from jaxtrain.models import decoder
from jaxtrain.run.main import simulate_devices
from jaxtrain.step import build_update


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """A pipelined step against the unpipelined one, on 8 simulated devices."""

    layers: int = 8
    """Depth of the GPT."""
    width: int = 128
    """Its width."""
    seq_len: int = 128
    """Tokens per row."""
    microbatches: int = 16
    """Microbatches per step, of 2 rows per device of the data axis."""
    rounds: int = 9


# Name: schedule, virtual stages, remat.
PIPELINES = {
    "1f1b, remat full": ("1f1b", 1, "full"),
    "1f1b, remat none": ("1f1b", 1, "none"),
    "interleaved 2, remat full": ("interleaved", 2, "full"),
    "gpipe, remat full": ("gpipe", 1, "full"),
}


def main(config: Config) -> None:
    """Runs the row and prints it."""
    simulate_devices(8)
    model = decoder.DecoderConfig(
        vocab_size=257, seq_len=config.seq_len, layers=config.layers, width=config.width, heads=4
    )
    rows = 4 * config.microbatches
    batch = make_batch(model, rows)

    def variant(mesh: Mesh, stack: jt.Stack, build: Callable[[Any], Any]) -> Variant:
        optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=stack.axes)
        state = jt.init_state(
            lambda rng: stack.cut(decoder.init(model, rng)),
            optimizer,
            jax.random.key(0),
            mesh=mesh,
            rules=jt.Rules(decoder.RULES, stacked=stack),
        )
        train = jt.compile_step(build(optimizer), state, batch, mesh=mesh)
        placed = itertools.repeat(train.place(batch))
        return stepping(train, state, placed, facts=step_facts(train))

    # With as many microbatches, over the same data axis.
    mesh = jt.make_mesh(data=2, devices=jax.devices()[:2])
    loss = decoder.loss_fn(model)
    plain = functools.partial(jt.build_train_step, loss, accumulate=config.microbatches)
    variants = {"data 2, accumulate": variant(mesh, jt.Stack(), plain)}
    mesh = jt.make_mesh(pipe=4, data=2)
    for name, (schedule, virtual, remat) in PIPELINES.items():
        form = {"schedule": schedule, "virtual": virtual, "remat": remat}
        form["microbatches"] = config.microbatches
        engine = jt.pipeline(decoder.stages(model), mesh=mesh, **form)
        piped = variant(mesh, jt.Stack(virtual=virtual), functools.partial(build_update, engine))
        variants[f"pipe 4 x data 2, {name}"] = piped
    # Eight devices are one CPU here, whose rate of products one of them can have to itself.
    gpt_row("pipeline", config, variants, model, rows, steps=1, mesh="by variant")
