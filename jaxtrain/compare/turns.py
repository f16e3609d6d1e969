"""Experiments that train in turn, and are timed.

All are compiled before anything is timed. Then they train in rounds, a few steps each, so that
whatever else the machine does falls on all of them alike. The batches of a block are on the devices
before its time begins. Where the memory of an accelerator cannot hold the states of all variants
beside the largest step, each lies there only while it trains.
"""

import contextlib
import dataclasses
import itertools
import operator
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.build import (
    compile_eval,
    compile_loop,
    evaluate,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    rows_of,
)
from jaxtrain.compare.rounding import measure
from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import Experiment
from jaxtrain.host import memory
from jaxtrain.host.memory import human_bytes
from jaxtrain.planning.ahead_of_time import read_compiled, summarize
from jaxtrain.run.hook import Hook
from jaxtrain.run.loop import train_loop
from jaxtrain.run.observe.throughput import mfu
from jaxtrain.run.refusal import called_back
from jaxtrain.sharding.mesh import describe_mesh
from jaxtrain.sharding.offload import is_on_host
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import local_bytes
from jaxtrain.tree import PyTree

# Of the memory of a device, what states and a step may take together.
SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of one variant.

    Args:
      step_seconds: mean of each timed round's steps.
      ratio: the median over rounds of the ratio to the first variant's ``step_seconds``.
      cpu_ratio: the same of this process's CPU time, which other processes disturb less.
      items_per_second: items per second at the median of ``step_seconds``.
      mfu: model FLOPs utilisation; None where the device's peak or the model's FLOPs are not known.
      compiled_bytes: memory of one device at the step's peak, by the compiler;
        ``temporary_bytes`` are those of its temporaries.
      measured_bytes: the same by the device's own count; None where it keeps none, and where an
        earlier variant needed more.
      sent_bytes: sent by one device in a step; None where the program cannot be read.
      losses: the loss of every step, including those of the round that is not timed.
      loss: mean over the steps of the last round.
      held_out: loss after the last step; None where it was not evaluated.
      rounding: numbers by layer that :func:`jaxtrain.compare.rounding.measure` gives.
    """

    name: str
    mesh: str
    step_seconds: tuple[float, ...]
    ratio: float
    cpu_ratio: float
    items_per_second: float
    mfu: float | None
    compiled_bytes: int
    temporary_bytes: int
    measured_bytes: float | None
    sent_bytes: float | None
    compile_seconds: float
    losses: tuple[float, ...]
    loss: float
    held_out: float | None
    rounding: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def milliseconds(self) -> tuple[float, float, float]:
        """The quartiles of a step's time, the median in the middle."""
        first, median, third = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return 1e3 * first, 1e3 * median, 1e3 * third


def compare(
    variants: Mapping[str, Experiment],
    *,
    rounds: int,
    block_steps: int,
    held_out_batches: int = 0,
    rounding: int = 0,
    devices: Mapping[str, Sequence[jax.Device]] = {},
) -> list[Result]:
    """Compiles all variants, trains them in turn and compares.

    Args:
      variants: experiments by name.
      rounds: timed ones, at least 2, after one that is not timed; of ``block_steps`` train steps
        each.
      held_out_batches: to evaluate in the end; 0 for none.
      rounding: training batches whose gradients are compared with float32's in the end; 0 for none.
      devices: those of a variant by its name; left out, all.

    Raises:
      ValueError: where one cannot be compiled or does not fit into memory, with its name.
    """
    runs = []
    for name, experiment in variants.items():  # What does not fit is refused before it takes long.
        with naming(name):
            _check_steps(experiment, rounds, block_steps)
            runs.append(_Run(name, experiment, devices.get(name)))
            if rounding and (size := runs[-1].mesh.size) > 1:
                raise ValueError(
                    f"`rounding` is {rounding} on {size} devices: gradients are compared with "
                    "those of float32 on one; give it one, or leave `rounding` out"
                )
    for run in runs:
        with naming(run.name):
            run.compile((rounds + 1) * block_steps)
        text = f"compiled in {run.program.compile_seconds:.1f} s"
        size = human_bytes(run.program.memory_bytes)
        print(f"{run.name}: {text}, {size}", file=sys.stderr, flush=True)
    _warm_up(runs, block_steps)
    stay = _fit_together(runs)
    for run in runs:
        run.stays |= stay
    for number in range(1, rounds + 1):
        for run in runs:
            run.train_block(block_steps)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    found = []
    for run in runs:  # What is taken of each in the end may need the memory of all.
        run.park()
    for run in runs:
        result = _result(run, runs[0], block_steps, held_out_batches)
        with naming(run.name):
            found.append(dataclasses.replace(result, rounding=run.rounding(rounding)))
    return found


def _warm_up(runs: Sequence["_Run"], block_steps: int) -> None:
    """Trains a block of each that is not timed, and notes how much memory it takes."""
    # The device counts its largest use since the process began: the smallest comes first.
    for run in sorted(runs, key=lambda run: run.program.memory_bytes):
        before = memory.device_memory().get("peak")
        with naming(run.name):
            run.train_block(block_steps)
        after = memory.device_memory().get("peak")
        run.measured_bytes = None if after == before else after


def _fit_together(runs: Sequence["_Run"]) -> bool:
    """Whether the devices hold the states of all variants beside the step that takes most."""
    limit = memory.device_limit()
    states = [local_bytes(run.shapes) for run in runs]
    steps = [run.program.memory_bytes - own for run, own in zip(runs, states, strict=True)]
    return limit is not None and sum(states) + max(steps) <= SHARE * limit


def _result(run: "_Run", first: "_Run", block_steps: int, held_out_batches: int) -> Result:
    """Returns the result of a variant from its step seconds and those of the first variant."""
    wall, cpu = zip(*run.times[1:], strict=True)
    first_wall, first_cpu = zip(*first.times[1:], strict=True)
    experiment, median = run.experiment, statistics.median(wall)
    devices, dtype = run.mesh.devices.flat, experiment.policy.compute_dtype
    with naming(run.name):
        held_out = run.evaluate(held_out_batches)
    program, _, unread = read_compiled(run.program.compiled, run.mesh)
    sent = program.per_step(experiment.layout.steps_per_call).collectives
    return Result(
        name=run.name,
        mesh=describe_mesh(run.mesh),
        step_seconds=wall,
        ratio=statistics.median(map(operator.truediv, wall, first_wall)),
        cpu_ratio=statistics.median(map(operator.truediv, cpu, first_cpu)),
        items_per_second=experiment.data.items_per_step / median,
        mfu=mfu(experiment.task.flops_per_step, median, devices, dtype=dtype),
        compiled_bytes=run.program.memory_bytes,
        temporary_bytes=run.program.compiled.memory_analysis().temp_size_in_bytes,
        measured_bytes=run.measured_bytes,
        sent_bytes=None if unread else sum(row.sent for row in summarize(sent)),
        compile_seconds=run.program.compile_seconds,
        losses=tuple(run.losses),
        loss=statistics.fmean(run.losses[-block_steps:]),
        held_out=held_out,
    )


class _Run(Hook):
    """A variant that is compiled, and trains on from its own state block by block."""

    program: CompiledStep
    measured_bytes: float | None = None

    def __init__(self, name: str, experiment: Experiment, devices: Any):
        self.name, self.experiment = name, experiment
        self.mesh = make_experiment_mesh(experiment, devices)
        self.shapes = make_abstract_state(experiment, self.mesh)
        # The round that is not timed counts a variant's own memory alone.
        self.stays = self._on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        self._places = jax.tree.map(lambda x: x.sharding, self.shapes)
        self._state: PyTree = None
        self.losses: list[float] = []
        self.times: list[tuple[float, float]] = []  # wall and CPU seconds of a step, by block

    def compile(self, steps: int) -> None:
        """Compiles for so many steps, in blocks of whole calls."""
        self._train, programs = compile_loop(self.experiment, self.shapes, self.mesh, 0, steps)
        (self.program,) = programs.values()

    def on_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.losses.append(metrics["loss"])

    def train_block(self, steps: int) -> None:
        """Trains so many steps on and notes the seconds of one."""
        if self._state is None:
            self._state = make_state(self.experiment, self.mesh)
        state, done = jax.device_put(self._state, self._places), len(self.losses)
        # Opened for every block, and closed before its time begins: no thread reads ahead in it.
        with self.experiment.train_batches(done, batch_sharding(self.mesh)) as stream:
            batches = jax.block_until_ready(list(itertools.islice(stream, steps)))
        self._state, calls = None, {"steps_per_call": self.experiment.layout.steps_per_call}
        jax.block_until_ready(state)
        start, cpu = time.perf_counter(), time.process_time()
        state = train_loop(self._train, state, batches, steps=done + steps, hooks=[self], **calls)
        jax.block_until_ready(state)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.times.append((wall / steps, cpu / steps))
        self._state = state if self.stays else park(state)

    def park(self) -> None:
        """Leaves the devices of an accelerator to the other variants."""
        if not self._on_cpu:
            self._state = park(self._state)

    def rounding(self, count: int) -> dict[str, tuple[float, ...]]:
        """The gradients of the next so many batches against those of float32."""
        if not count:
            return {}
        with self.experiment.train_batches(len(self.losses), batch_sharding(self.mesh)) as stream:
            batches = list(itertools.islice(stream, count))
        return measure(self.experiment, jax.device_put(self._state, self._places), batches)

    def evaluate(self, count: int) -> float | None:
        """The held-out loss over so many batches; of several sets, of the one that decides which
        checkpoint is best."""
        opened = self.experiment.data.eval_sets.get(self.experiment.deciding_set)
        if not count or opened is None:
            return None
        batches = list(itertools.islice(opened(batch_sharding(self.mesh)), count))
        if not batches:
            return None
        state = jax.device_put(self._state, self._places)
        step = compile_eval(self.experiment, state, rows_of(batches[0]), self.mesh)
        return float(evaluate(step, state, batches)["loss"])


def park(state: PyTree) -> PyTree:
    """Copies a state into the host's memory, and leaves on the devices what they need not hold.

    Keys stay, which are a few bytes, and so does what lies in the host's memory already.
    """

    def copy(x: jax.Array) -> Any:
        stays = is_on_host(x) or jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if stays else np.array(x)

    return jax.tree.map(copy, state)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Names the variant in what is refused."""
    try:
        yield
    except ValueError as error:
        if called_back(error):  # a mistake in the user's own code, which keeps its traceback
            raise
        raise ValueError(f"variant {name}: {error}") from None
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        raise ValueError(
            f"variant {name} does not fit into the memory of the devices: leave it out, or make "
            "all of them smaller; jaxtrain plan says what takes it"
        ) from None


def _check_steps(experiment: Experiment, rounds: int, block_steps: int) -> None:
    steps = (rounds + 1) * block_steps
    if steps > experiment.steps:
        raise ValueError(
            f"{rounds} rounds and one before them take {steps} steps and the experiment has "
            f"`steps` {experiment.steps}: give more, or fewer `rounds` or `block_steps`"
        )
    if block_steps % experiment.layout.steps_per_call:
        raise ValueError(
            f"`block_steps` is {block_steps} and `steps_per_call` "
            f"{experiment.layout.steps_per_call}: give a multiple of it"
        )
