"""The total work of rows that are split: a step on context 8 against one on data 8.

On simulated devices the same few cores run everything, so CPU time is the sum of all devices' work:
its ratio shows what each exchange computes and copies more than devices that have whole rows, and
not how long it travels.
"""

import dataclasses
import itertools

import jax

import jaxtrain as jt
from experiments.bench import Rounds, gpt_row, step_facts, stepping
from experiments.bench.step import make_batch
from jaxtrain.models import decoder
from jaxtrain.ops.context import EXCHANGES, exchange
from jaxtrain.run.main import simulate_devices


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """A step whose rows 8 simulated devices split against one whose batch they split."""

    layers: int = 2
    """Depth of the GPT."""
    width: int = 128
    """Its width."""
    seq_len: int = 2048
    """Tokens per row, of 8 rows."""
    rounds: int = 5


def main(config: Config) -> None:
    """Runs the row and prints it."""
    simulate_devices(8)
    shape = {"layers": config.layers, "width": config.width, "seq_len": config.seq_len}
    model = decoder.DecoderConfig(vocab_size=257, heads=8, **shape, positions="rope")
    batch = make_batch(model, 8)
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=jt.Stack().axes)
    rules = jt.Rules(decoder.RULES, batch=decoder.BATCH)

    def variant(asked: str | None, **sizes: int):
        mesh, key = jt.make_mesh(**sizes), jax.random.key(0)
        how = {"mesh": mesh, "rules": rules}
        state = jt.init_state(lambda rng: decoder.init(model, rng), optimizer, key, **how)
        step = jt.build_train_step(decoder.loss_fn(model), optimizer)
        with exchange(asked):
            train = jt.compile_step(step, state, batch, **how)
        placed = itertools.repeat(train.place(batch))
        return stepping(train, state, placed, facts=step_facts(train))

    variants = {"data 8": variant(None, data=8)}
    variants |= {f"context 8, {by}": variant(by, context=8) for by in EXCHANGES}
    gpt_row("context", config, variants, model, 8, steps=1, mesh="by variant")
