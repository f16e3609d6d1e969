"""Asynchronous training by real processes: a parameter server and its workers, on Ray.

The server is an ordinary run, whose batches are gradients: a step makes an update of the next one
that arrives from a worker, whatever parameters that has read. So logs, evaluation, checkpoints and
resuming are those of every run. A worker that is lost is replaced, and its batch given out again.
``updates.jsonl`` in the run's folder has a line for each update, by which one process replays the
run (:class:`jaxtrain.methods.asynchrony.Workers`).
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from jaxtrain import build
from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, run_engine
from jaxtrain.experiment import Experiment
from jaxtrain.host.extras import load
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, check_on_disk, exists, json_object, write_whole
from jaxtrain.methods.method import Method
from jaxtrain.optim import frozen
from jaxtrain.run.folder import UPDATES
from jaxtrain.run.hook import Hook
from jaxtrain.run.main import build_experiment, load_config, main
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import TrainState
from jaxtrain.step import build_engine
from jaxtrain.tree import PyTree

# So many workers may be lost in a row without a gradient from any.
LOSSES = 3


@dataclasses.dataclass(frozen=True)
class AsynchronousOptions:
    """Trains asynchronously: this process keeps the parameters, and makes an update of each
    gradient as it arrives from workers, which are processes on Ray.

    All other flags go to the experiment: see `python -m EXPERIMENT --help`; --run-dir is needed. A
    worker that is lost is replaced; where this process is lost, --resume continues. The run's
    updates.jsonl says which gradient made which update, and --workers.events replays it.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    workers: int = 2
    """Number of workers."""
    late: int = 16
    """Updates by which a gradient may be late; one that is later is thrown away."""
    address: str | None = None
    """The Ray cluster to join, such as auto; left out, one is started on this host."""


def run_asynchronous(options: AsynchronousOptions, rest: Sequence[str]) -> int:
    """Serves the parameters until the run is over."""
    check_least(options, workers=1, late=0)
    module, config = load_config(
        options.experiment, rest, command="asynchronous", own=type(options)
    )
    if (folder := config.run.run_dir) is None:
        raise ValueError("`run_dir` is left out: give the folder of the run, which has its events")
    check_on_disk(Path(folder), "--run-dir")
    with cluster("workers are processes on Ray", options.address, options.workers) as ray:
        server = Server(ray, options, rest, Path(folder))
        main(module.Config, lambda c: server.served(module.build(c)), rest, hooks=[server])
    return 0


@contextlib.contextmanager
def cluster(purpose: str, address: str | None, workers: int) -> Iterator[Any]:
    """Joins a Ray cluster, or starts one on this host, for the ``with`` body; yields the package.

    Ray's ports are open to the network, and whoever is let in may run any program. A cluster that
    is started here asks for a random token, which only its processes know (from Ray 2.52 on).

    Args:
      purpose: a sentence for the error without Ray (:func:`jaxtrain.host.extras.load`).
      address: of the cluster to join; None starts one, unless ``RAY_ADDRESS`` names one.
      workers: number of processes besides this one, of one core each.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # Before Ray is imported. In a file of its own Ray would need a home that can be written.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = load(purpose, "ray", "ray")
    cores = {} if address else {"num_cpus": workers + 1}
    ray.init(address, include_dashboard=False, log_to_driver=False, **cores)
    try:
        yield ray
    finally:
        ray.shutdown()


class Worker:
    """Computes the gradients of batches, in a process of its own."""

    def __init__(self, module: str, flags: Sequence[str]) -> None:
        given = load_config(module, flags, command="asynchronous")
        self._gradient = gradient_of(build_experiment(*given, outline=True))

    def gradient(self, read: "Read", batch: PyTree, number: int) -> tuple[PyTree, Any]:
        """Returns the gradient's sums and the loss, on the host, of batch ``number``."""
        rng = jax.random.fold_in(jax.random.wrap_key_data(read.rng), number)
        sums = self._gradient(read.params, batch, rng, frozen=read.frozen)
        return jax.device_get((sums.grads, sums.loss))


@dataclasses.dataclass(frozen=True)
class Read:
    """What a worker reads of the server: the state after ``step`` updates, on the host."""

    step: int
    params: PyTree
    rng: np.ndarray
    frozen: frozenset[str]


def gradient_of(experiment: Experiment) -> Any:
    """Returns ``(params, batch, rng, frozen=) -> GradientSums``, compiled, of an experiment."""
    if (check := experiment.task.engine.check) is not None:
        check(experiment)
    engine = build_engine(
        experiment.laid.loss_fn,
        policy=experiment.policy,
        accumulate=experiment.layout.accumulate,
        has_model_state=False,
        gather=None,
        engine=experiment.task.engine,
    )

    @functools.partial(jax.jit, static_argnames="frozen")
    def gradient(params: PyTree, batch: PyTree, rng: Any, frozen: frozenset[str]) -> GradientSums:
        return run_engine(engine, params, None, batch, rng, None, frozen=frozen)

    return gradient


def received(loss_fn: Any, microbatches: int) -> GradientEngine:
    """Makes an engine whose batches are gradients, with their loss."""
    del loss_fn

    def engine(params, model_state, batch, rng, scale, frozen=frozenset()):
        del params, rng, scale, frozen
        grads, loss = batch
        return GradientSums(grads, loss, model_state, microbatches)

    return engine


class Server(Hook):
    """The batches of a run whose batches are gradients, and the hook that gives its parameters out.

    Args:
      options: of the command.
      flags: of the experiment.
      folder: of the run.
    """

    def __init__(
        self, ray: Any, options: AsynchronousOptions, flags: Sequence[str], folder: Path
    ) -> None:
        self._ray, self._options, self._flags = ray, options, list(flags)
        self._log = folder / UPDATES
        self._read: Any = None

    def served(self, experiment: Experiment) -> Experiment:
        """Returns the experiment whose step makes an update of a gradient that has arrived.

        Raises:
          ValueError: it has a method, model state, a loss scale, an engine with a memory, or
            several devices, which gradients from elsewhere do not go with.
        """
        mesh = build.make_experiment_mesh(experiment)
        for has, what, mend in (
            (experiment.method != Method(), "a method of its own", "leave --local and such out"),
            (experiment.task.has_model_state, "model state", "take a model without it"),
            (experiment.policy.loss_scale is not None, "a loss scale", "take --precision bf16"),
            (experiment.task.engine.init is not None, "an engine with a memory", "leave it out"),
            (experiment.task.engine.finish is not None, "noise of its own", "leave --private out"),
            (experiment.layout.steps_per_call > 1, "several steps per call", "take one"),
            (mesh.size > 1, f"a mesh of {mesh.size} devices", "show this process one device"),
        ):
            if has:
                raise ValueError(
                    f"the run has {what}, and its gradients are those of other processes: {mend}"
                )
        abstract = build.make_abstract_state(experiment, mesh)
        still = frozen(abstract.opt_state)
        gradient = functools.partial(gradient_of(experiment), frozen=still)
        sums = jax.eval_shape(gradient, abstract.params, experiment.data.batch, abstract.rng)
        self._stream = lambda start: experiment.train_batches(start, batch_sharding(mesh))
        facts = {"workers": f"{self._options.workers} processes on Ray; {self._log} says which"}
        return experiment.with_(
            engine=Engine(received, accumulates=True),
            train_batches=self.batches,
            batch=(sums.grads, sums.loss),
            facts=dict(experiment.metadata.facts) | facts,
            # Neither goes on as the other: batches come in another order.
            fingerprints=dict(experiment.metadata.fingerprints) | {"gradients": "of workers"},
        )

    def on_step(self, step: int, state: TrainState) -> None:
        """Gives the parameters out, for workers to read."""
        rng, params = jax.device_get((jax.random.key_data(state.rng), state.params))
        self._read = self._ray.put(Read(step, params, rng, frozen(state.opt_state)))
        self._step = step

    on_start = on_step

    @contextlib.contextmanager
    def batches(self, start: int, shardings: PyTree) -> Iterator[Iterator[PyTree]]:
        """Opens the stream of gradients as they arrive, from update ``start`` on."""
        events = self._log.read_text().splitlines()[:start] if exists(self._log) else []
        if len(events) < start:
            raise ValueError(
                f"{self._log} has {len(events)} updates and the checkpoint is of {start}: which "
                "batches they took is not known; begin a new run"
            )
        rows = [json_object(line) for line in events]
        for number, row in enumerate(rows, 1):
            if not all(isinstance(row.get(name), int | float) for name in ("batch", "seconds")):
                raise ValueError(
                    f"line {number} of {self._log} is damaged: the batch that its update took is "
                    "not known; begin a new run"
                )
        write_whole(as_path(self._log), "".join(line + "\n" for line in events))
        used = {row["batch"] for row in rows}
        first = next(n for n in range(start + 1) if n not in used)
        began = time.monotonic() - (rows[-1]["seconds"] if rows else 0.0)
        with self._stream(first) as inner, open(self._log, "a") as log:
            fresh = ((n, b) for n, b in enumerate(inner, first) if n not in used)
            yield self._arrivals(start, fresh, log, began, shardings)

    def _arrivals(
        self,
        step: int,
        fresh: Iterator[tuple[int, PyTree]],
        log: Any,
        began: float,
        shardings: PyTree,
    ) -> Iterator[PyTree]:
        ray, returned = self._ray, collections.deque()
        actor = ray.remote(Worker).options(num_cpus=1)
        make = functools.partial(actor.remote, self._options.experiment, self._flags)

        def give(worker: Any) -> tuple[Any, tuple[int, tuple[int, PyTree]]]:
            batch = returned.popleft() if returned else next(fresh)
            given = (self._read, jax.device_get(batch[1]), batch[0])
            return worker.gradient.remote(*given), (self._step, batch)

        again = lambda about: returned.append(about[1])  # noqa: E731
        for number, (read, batch), arrived in answers(
            ray, make, give, self._options.workers, lost=again
        ):
            if (delay := step - read) <= self._options.late:
                row = {"worker": number, "batch": batch[0], "delay": delay}
                row["seconds"] = round(time.monotonic() - began, 3)
                log.write(json.dumps(row) + "\n")
                log.flush()
                yield jax.device_put(arrived, shardings)
                step += 1
            else:
                returned.append(batch)


def answers(
    ray: Any,
    make: Callable[[], Any],
    give: Callable[[Any], tuple[Any, Any]],
    count: int,
    *,
    lost: Callable[[Any], None] = lambda about: None,
) -> Iterator[tuple[int, Any, Any]]:
    """Yields what workers on Ray answer, as it arrives; one that is lost is replaced.

    Args:
      make: starts a worker.
      give: gives a worker something to do; returns the reference of the answer, and what it is
        about. A worker is given the next when its answer has been dealt with.
      count: number of workers.
      lost: called with what a lost worker's answer would have been about.

    Yields:
      The number of the worker, what its answer is about, and the answer.

    Raises:
      RuntimeError: so many workers are lost in a row without any answer (:data:`LOSSES`).
    """
    workers, losses = {number: make() for number in range(count)}, 0
    first = ((number, *give(worker)) for number, worker in workers.items())
    busy = {answer: (number, about) for number, answer, about in first}
    while True:
        (done, *_), _ = ray.wait(list(busy))
        number, about = busy.pop(done)
        try:
            arrived, losses = ray.get(done), 0
        except ray.exceptions.RayActorError as error:
            if (losses := losses + 1) > LOSSES:
                raise RuntimeError(
                    f"{losses} workers were lost one after another without an answer from any: "
                    f"{error}"
                ) from error
            print(f"worker {number} is lost, and another takes its place", flush=True)
            lost(about)
            workers[number] = make()
        else:
            yield number, about, arrived
        answer, about = give(workers[number])
        busy[answer] = number, about
