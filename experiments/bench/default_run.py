"""Rows on the default run (``python -m experiments.gpt``: its model, batch and optimizer): what its
loader and its checkpoints cost, how long it takes to start, and to import what it needs."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

import jaxtrain as jt
from experiments import gpt
from experiments.bench import (
    Rounds,
    Variant,
    Work,
    interleave,
    print_row,
    row,
    step_facts,
    stepping,
)
from jaxtrain.build import compile_train, make_abstract_state, make_experiment_mesh, make_state
from jaxtrain.host.paths import read_if_there
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.sharding.mesh import describe_mesh
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import local_bytes

RUN = [sys.executable, "-m", "experiments.gpt", "--log-every", "1"]
IMPORTS = {
    "jax, flax.nnx, optax": "import jax, flax.nnx, optax",
    "jaxtrain": "import jaxtrain",
}


@dataclasses.dataclass(frozen=True)
class Loader(Rounds):
    """The default run's step with its loader, against the same step fed with one batch, and the
    loader without a step."""

    calls: int = 5
    """Steps per round."""


def loader(config: Loader) -> None:
    """Measures what loading costs a step. The loader packs, shuffles and places batches in threads
    of its own while the device works; only work that cannot be hidden adds to a step."""
    experiment = gpt.build(gpt.Config())
    mesh = make_experiment_mesh(experiment)
    train = compile_train(experiment, make_state(experiment, mesh), mesh)
    with contextlib.ExitStack() as stack:

        def open_stream():
            return stack.enter_context(experiment.train_batches(0, batch_sharding(mesh)))

        def fed_by(batches) -> Variant:
            state, facts = make_state(experiment, mesh), step_facts(train)
            return stepping(train, state, batches, calls=config.calls, facts=facts)

        def read() -> None:
            for batch in itertools.islice(alone, config.calls):
                jax.block_until_ready(batch)

        one, alone = next(open_stream()), open_stream()
        variants = {
            "one batch": fed_by(itertools.repeat(one)),
            "loader": fed_by(open_stream()),
            "loader alone": Variant(read),
        }
        work = work_of(experiment, mesh, steps=config.calls)
        row("loader", config, variants, about_of(experiment, mesh), work=work)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Rounds):
    """Steps with a save among them against steps without, on the default run."""

    steps: int = 12
    """Train steps in each variant and round; the save comes after the second."""
    rounds: int = 7
    directory: str | None = None
    """Folder to save in; default: the system's temporary folder."""


def checkpoint(config: Checkpoint) -> None:
    """Measures what a save costs the loop, in steps: ``blocked_steps``, how long ``save`` itself
    keeps the loop when no step is in flight, and ``lost_steps``, how much longer the steps take in
    all for each save, which is what a run feels: writing goes on behind the next steps."""
    if config.steps < 4 or config.rounds < 2:
        raise SystemExit("the row needs at least 4 steps and 2 rounds")
    flags = gpt.Config()
    experiment = gpt.build(flags)
    mesh = make_experiment_mesh(experiment)
    blocked: list[float] = []
    with tempfile.TemporaryDirectory(dir=config.directory) as folder:
        checkpoints = Checkpointer(folder, keep=2)

        def save(state: jt.TrainState) -> None:
            checkpoints.wait()  # the last of the save before, outside of what is measured
            start = time.perf_counter()
            checkpoints.save(int(state.step), state)
            blocked.append(time.perf_counter() - start)

        variants = {
            "no save": as_the_loop(experiment, mesh, config.steps),
            "one save": as_the_loop(experiment, mesh, config.steps, save=save),
        }
        work = work_of(experiment, mesh, steps=config.steps)
        results = interleave(variants, rounds=config.rounds, work=work)
        checkpoints.close()
    step_ms, blocked_ms = results["no save"]["ms"] / config.steps, 1e3 * statistics.median(blocked)
    about = about_of(experiment, mesh) | {
        "optimizer": flags.optimizer.name,
        "state_bytes": local_bytes(make_abstract_state(experiment, mesh)),
        "step_ms": round(step_ms, 2),
        "blocked_ms": round(blocked_ms, 2),
        "blocked_steps": round(blocked_ms / step_ms, 3),
        "lost_steps": round((results["one save"]["ratio"] - 1) * config.steps, 3),
    }
    print_row("checkpoint", config, about, results, work=work)


@dataclasses.dataclass(frozen=True)
class Start(Rounds):
    """A first start of the default run, up to the metrics of step 1, against a later one."""

    rounds: int = 5


def start(config: Start) -> None:
    """Times processes from nothing to their first metrics, one with an empty cache of compiled
    programs, one with a cache that the row has filled before."""

    def run(cache: str | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder, "run", "log.jsonl")
            process = subprocess.Popen(
                [*RUN, "--run-dir", str(log.parent)],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache or f"{folder}/cache"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while b"train/loss" not in read_if_there(log):
                if process.poll() is not None:
                    raise SystemExit(f"the run ended with {process.returncode}: {RUN}")
                time.sleep(0.005)
            process.kill()
            process.wait()

    with tempfile.TemporaryDirectory() as filled:
        caches = {"empty cache": None, "filled cache": filled}
        variants = {name: Variant(functools.partial(run, cache)) for name, cache in caches.items()}
        row("start", config, variants, {"run": " ".join(RUN[1:])}, children=True)


@dataclasses.dataclass(frozen=True)
class Imports(Rounds):
    """Importing jaxtrain, against importing jax, flax.nnx and optax."""


def imports(config: Imports) -> None:
    """Times the imports, each in a process of its own."""
    variants = {
        name: Variant(functools.partial(subprocess.run, [sys.executable, "-c", code], check=True))
        for name, code in IMPORTS.items()
    }
    row("imports", config, variants, {"code": IMPORTS}, children=True)


def as_the_loop(
    experiment: jt.Experiment,
    mesh: Mesh,
    steps: int,
    *,
    save: Callable[[jt.TrainState], None] | None = None,
) -> Variant:
    """Steps on from its own state, and ``save`` after the second, when it is done."""
    state = make_state(experiment, mesh)
    train = compile_train(experiment, state, mesh)
    with experiment.train_batches(0, batch_sharding(mesh)) as batches:
        batch = next(batches)

    def run() -> None:
        nonlocal state
        metrics = None
        for number in range(steps):
            before = metrics
            state, metrics = train(state, batch)
            jax.device_get(before)  # as the loop does: the metrics of the step before
            if number == 1 and save is not None:
                save(jax.block_until_ready(state))
        jax.block_until_ready((state, metrics))

    return Variant(run, step_facts(train))


def work_of(experiment: jt.Experiment, mesh: Mesh, *, steps: int) -> Work:
    """The work of ``steps`` train steps, in float32."""
    return Work(
        steps=steps,
        tokens=experiment.data.items_per_step,
        flops=experiment.task.flops_per_step,
        formula=experiment.task.flops_formula,
        devices=mesh.size,
    )


def about_of(experiment: jt.Experiment, mesh: Mesh) -> dict[str, Any]:
    """The model, the batch and the mesh."""
    return {
        "model": experiment.metadata.config["model"],
        "batch": list(experiment.data.batch["tokens"].shape),
        "mesh": describe_mesh(mesh),
    }
