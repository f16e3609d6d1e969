"""The cost of a checkpoint to the training loop: steps with a save against steps without.

The default run (``python -m experiments.gpt``: its model, batch and optimizer) takes the same
number of steps in each variant. ``save`` returns when the devices have been copied from, having
waited for the step in flight, which the loop would have waited for anyway; writing goes on behind
the next steps. So there are two figures, both in steps: ``blocked_steps``, how long ``save`` itself
kept the loop when no step was in flight, and ``lost_steps``, how much longer the steps took in all
for each save, which is what a run feels.
"""

import dataclasses
import statistics
import tempfile
import time

import jax
from jax.sharding import Mesh

import jaxtrain as jt
from experiments import gpt
from experiments.bench import (
    Rounds,
    Variant,
    experiment_work,
    interleave,
    print_row,
    step_facts,
)
from jaxtrain.experiment import compile_train, make_experiment_mesh, make_state
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.sharding.mesh import describe_mesh
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import local_bytes


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Steps with a save among them against steps without, on the default run."""

    steps: int = 12
    """Train steps in each variant and round; the save comes after the second."""
    rounds: int = 7
    directory: str | None = None
    """Folder to save in; default: the system's temporary folder."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    if config.steps < 4 or config.rounds < 2:
        raise SystemExit("the row needs at least 4 steps and 2 rounds")
    flags = gpt.Config()
    experiment = gpt.build(flags)
    mesh = make_experiment_mesh(experiment)
    with tempfile.TemporaryDirectory(dir=config.directory) as folder:
        runs = [Steps(experiment, mesh, config.steps, None)]
        runs.append(Steps(experiment, mesh, config.steps, folder))
        names = ("no save", "one save")
        variants = {name: Variant(run, run.facts) for name, run in zip(names, runs, strict=True)}
        work = experiment_work(experiment, steps=config.steps, devices=mesh.size)
        results = interleave(variants, rounds=config.rounds, work=work)
        step = results["no save"]["ms"] / config.steps
        blocked = 1e3 * statistics.median(runs[1].blocked)
        about = {
            "model": experiment.config["model"],
            "batch": list(experiment.batch["tokens"].shape),
            "mesh": describe_mesh(mesh),
            "optimizer": flags.optimizer.name,
            "state_bytes": local_bytes(runs[1].state),
            "step_ms": round(step, 2),
            "blocked_ms": round(blocked, 2),
            "blocked_steps": round(blocked / step, 3),
            "lost_steps": round((results["one save"]["ratio"] - 1) * config.steps, 3),
        }
        print_row("checkpoint", config, about, results, work=work)
        runs[1].close()


class Steps:
    """Steps on from its own state, with a save after the second if there is a folder."""

    def __init__(self, experiment: jt.Experiment, mesh: Mesh, steps: int, folder: str | None):
        self.state = make_state(experiment, mesh)
        self.train = compile_train(experiment, self.state, mesh)
        with experiment.train_batches(0, batch_sharding(mesh)) as batches:
            self.batch = next(batches)
        self.steps = steps
        self.checkpoints = Checkpointer(folder, keep=2) if folder else None
        self.blocked: list[float] = []
        self.facts = step_facts(self.train)

    def __call__(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.wait()  # the last of the save before, outside of what is measured
        metrics = None
        for number in range(self.steps):
            before = metrics
            self.state, metrics = self.train(self.state, self.batch)
            jax.device_get(before)  # as the loop does: the metrics of the step before
            if number == 1 and self.checkpoints is not None:
                jax.block_until_ready(self.state)
                start = time.perf_counter()
                self.checkpoints.save(int(self.state.step), self.state)
                self.blocked.append(time.perf_counter() - start)
        jax.block_until_ready((self.state, metrics))

    def close(self) -> None:
        """Waits for what is being written."""
        self.checkpoints.close()
