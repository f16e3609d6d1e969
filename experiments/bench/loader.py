"""The cost of the input pipeline: the default run's step fed by its loader, and by one batch.

The loader packs, shuffles and places batches in threads of its own while the device works; only
work that cannot be hidden adds to a step. Running it alone shows how many batches it could feed.
"""

import contextlib
import dataclasses
import itertools

import jax

from experiments import gpt
from experiments.bench import Rounds, Variant, experiment_work, row, step_facts
from jaxtrain.experiment import compile_train, make_experiment_mesh, make_state
from jaxtrain.sharding.mesh import describe_mesh
from jaxtrain.sharding.rules import batch_sharding


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """The default run's step with its loader, against the same step fed with one batch, and the
    loader without a step."""

    calls: int = 5
    """Steps per round."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    experiment = gpt.build(gpt.Config())
    mesh = make_experiment_mesh(experiment)
    train = compile_train(experiment, make_state(experiment, mesh), mesh)
    with contextlib.ExitStack() as stack:

        def stepping(batches) -> Variant:
            state = make_state(experiment, mesh)

            def run() -> None:
                nonlocal state
                for batch in itertools.islice(batches, config.calls):
                    state, metrics = train(state, batch)
                jax.block_until_ready((state, metrics))

            return Variant(run, step_facts(train))

        def read() -> None:
            for batch in itertools.islice(alone, config.calls):
                jax.block_until_ready(batch)

        def open_stream():
            return stack.enter_context(experiment.train_batches(0, batch_sharding(mesh)))

        one, alone = next(open_stream()), open_stream()
        variants = {
            "one batch": stepping(itertools.repeat(one)),
            "loader": stepping(open_stream()),
            "loader alone": Variant(read),
        }
        about = {
            "model": experiment.config["model"],
            "batch": jax.tree.leaves(experiment.batch)[0].shape,
            "mesh": describe_mesh(mesh),
        }
        work = experiment_work(experiment, steps=config.calls, devices=mesh.size)
        row("loader", config, variants, about, work=work)
