"""What the loader could feed: batches read one after the other, against the default run's step."""

import dataclasses
import itertools

import jax

from experiments import gpt
from experiments.bench import Variant, experiment_work, interleave, print_row, step_facts
from jaxtrain.experiment import compile_train, make_experiment_mesh, make_state
from jaxtrain.parallel.sharding import batch_sharding


@dataclasses.dataclass(frozen=True)
class Config:
    """The default run's step on one batch, against its loader alone."""

    calls: int = 5
    """Steps, and batches, per round."""
    rounds: int = 15
    """Timed rounds."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    experiment = gpt.build(gpt.Config())
    mesh = make_experiment_mesh(experiment)
    state = make_state(experiment, mesh)
    train = compile_train(experiment, state, mesh)
    with experiment.train_batches(0, batch_sharding(mesh)) as batches:
        one = next(batches)

        def step() -> None:
            nonlocal state
            for _ in range(config.calls):
                state, metrics = train(state, one)
            jax.block_until_ready((state, metrics))

        def read() -> None:
            for batch in itertools.islice(batches, config.calls):
                jax.block_until_ready(batch)

        variants = {"step": Variant(step, step_facts(train)), "loader alone": Variant(read)}
        work = experiment_work(experiment, steps=config.calls, devices=mesh.size)
        results = interleave(variants, rounds=config.rounds, work=work)
    about = {"batch": jax.tree.leaves(experiment.batch)[0].shape, "calls_per_round": config.calls}
    print_row("reading", about, results, work=work)
