"""The price of exact bits: a step whose gradients are of grains, against the ordinary one."""

import dataclasses
import itertools

import jax

import jaxtrain as jt
from experiments.bench import Rounds, Variant, gpt_row, step_facts, stepping
from experiments.bench.step import make_batch
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.models import decoder


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """An exact step of 8 grains against the ordinary one, on 2 and on 8 simulated devices."""

    layers: int = 2
    """Depth of the GPT."""
    width: int = 192
    """Its width."""
    seq_len: int = 64
    """Tokens per row."""
    rows: int = 8
    """Rows of a grain."""
    rounds: int = 9


def main(config: Config) -> None:
    """Runs the row and prints it."""
    simulate_devices(8)
    model = decoder.DecoderConfig(
        vocab_size=257, seq_len=config.seq_len, layers=config.layers, width=config.width, heads=4
    )
    rows = 8 * config.rows
    batch, variants = make_batch(model, rows), {}

    def variant(devices: int, exact: int) -> Variant:
        mesh = jt.make_mesh(data=devices, devices=jax.devices()[:devices])
        optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=jt.Stack().axes)
        placed = {"mesh": mesh, "rules": decoder.RULES}
        init = lambda rng: decoder.init(model, rng)  # noqa: E731
        state = jt.init_state(init, optimizer, jax.random.key(0), **placed)
        step = jt.build_train_step(decoder.loss_fn(model), optimizer, exact=exact)
        train = jt.compile_step(step, state, batch, **placed)
        return stepping(train, state, itertools.repeat(train.place(batch)), facts=step_facts(train))

    for devices in (2, 8):
        variants |= {
            f"data {devices}, {name}": variant(devices, exact)
            for name, exact in (("ordinary", 0), ("exact", 8))
        }
    gpt_row("grains", config, variants, model, rows, steps=1, mesh="by variant")
