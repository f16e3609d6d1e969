"""Gradients that arrive late: asynchronous training by a table of events, which a run replays.

Workers read the parameters of a server, compute a gradient of one batch and send it; the server
makes an update of each as it comes. A row of the table is one update: whose gradient it takes, of
which batch, and how many updates ago that worker read. The table is made before training, by a
simulation of uneven workers or from the log of real ones, and no clock enters the program: equal
tables give equal bits.

Source: Recht et al. 2011, https://arxiv.org/abs/1106.5730; bounded staleness by Ho et al. 2013;
backup workers by Chen et al. 2016, https://arxiv.org/abs/1604.00981; rates by staleness by Zhang et
al. 2015, https://arxiv.org/abs/1511.05950.

Shapes: U updates, V versions of the parameters.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import heapq
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.engines.members import own_part, split_like
from jaxtrain.engines.plain import Engine, GradientEngine, run_engine
from jaxtrain.host.least import check_least, given
from jaxtrain.methods.method import Method, Step, within
from jaxtrain.optim import frozen
from jaxtrain.optim.averages import keeps_averages
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, combine, nodes_of


class Late(NamedTuple):
    """A late gradient: the parameters of which it is taken, its key, and by how many updates."""

    params: PyTree
    rng: jax.Array
    delay: jax.Array


_late: contextvars.ContextVar[Late | None] = contextvars.ContextVar("late", default=None)


@dataclasses.dataclass(frozen=True)
class Workers:
    """Uneven workers, simulated, each of whose gradients makes an update when it arrives."""

    seconds: tuple[float, ...] = ()
    """Seconds that each worker takes for the gradient of a batch, such as 1 1 1 4, in which a
    simulation counts; left out, there are no workers."""
    backup: int | None = None
    """Number of the slowest workers that each synchronous round does without (backup workers), 0 to
    wait for all; left out, workers are asynchronous."""
    bound: int | None = None
    """Gradients by which a worker may lead the slowest and still begin another (bounded staleness);
    left out, none waits."""
    late: int = 16
    """Updates by which a gradient may be late; one that is later is thrown away. The step keeps as
    many versions of the parameters, and one more."""
    jitter: float = 0.2
    """Standard deviation of the logarithm of a worker's time from one gradient to the next."""
    temper: float = 0.0
    """Power p of the factor (1 + delay)^-p on the update by a late gradient; 0 for none."""
    events: str | None = None
    """The log of real workers to replay, such as RUN/updates.jsonl of `jaxtrain asynchronous`; it
    takes the place of the simulation."""

    def __post_init__(self) -> None:
        check_least(self, backup=0, bound=0, late=0, jitter=0, temper=0)
        if max(self.jitter, self.temper) == math.inf:
            raise ValueError("`workers.jitter` and `workers.temper` are finite: give smaller ones")
        if bad := [s for s in self.seconds if not 0 < s < math.inf]:
            raise ValueError(f"`workers.seconds` has {bad[0]}: give numbers above 0")
        if self.seconds and self.events:
            raise ValueError(
                f"`workers.events` is {self.events!r} and `workers.seconds` is given too: give the "
                "log of real workers or the speeds of simulated ones"
            )
        if (typed := given(self)) and not self:
            name, value = next(iter(typed.items()))
            raise ValueError(
                f"`workers.{name}` is {value} and there are no workers: give `workers.seconds` too"
            )
        if self.events and (void := sorted(typed.keys() & {"backup", "bound", "jitter"})):
            raise ValueError(
                f"`workers.{void[0]}` is {typed[void[0]]} and `workers.events` is given, "
                "which says what real workers did: leave one of them out"
            )
        if self.backup is not None:
            if void := sorted(typed.keys() & {"bound", "late", "temper"}):
                raise ValueError(
                    f"`workers.{void[0]}` is {typed[void[0]]} and rounds are synchronous "
                    f"(`workers.backup` is {self.backup}), in which no worker is ahead and no "
                    "gradient late: leave one of them out"
                )
            if self.backup >= len(self.seconds):
                raise ValueError(
                    f"`workers.backup` is {self.backup} of {len(self.seconds)} workers: give fewer "
                    "of them, so that one is left"
                )

    def __bool__(self) -> bool:
        return bool(self.seconds or self.events)


class Events(NamedTuple):
    """A table of updates: its columns are arrays [U]."""

    worker_U: np.ndarray
    """The number of the worker whose gradient an update takes; of a round, of the last that it
    waits for."""
    batch_U: np.ndarray
    """The number of the batch, which a worker is given when it reads the parameters."""
    delay_U: np.ndarray
    """The number of updates since that worker read the parameters."""
    seconds_U: np.ndarray
    """When the update is made."""

    @property
    def facts(self) -> str:
        """A line that says how late the gradients are."""
        counts = np.bincount(self.worker_U)
        shares = ", ".join(f"{count / counts.sum():.0%}" for count in counts)
        return (
            f"{len(counts)}, which make {shares} of the updates, late by {self.delay_U.mean():.1f} "
            f"others, at most {self.delay_U.max()}; {self.seconds_U[-1]:.4g} s for all updates"
        )

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, float]]) -> Self:
        """Makes the table of its rows."""
        kinds = (np.int32, np.int32, np.int32, np.float64)
        return cls(
            *(kind(column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True))
        )


def simulate(workers: Workers, updates: int, *, seed: int = 0) -> Events:
    """Returns the table of simulated workers, the same for the same arguments on every machine.

    The table of fewer updates is the beginning of that of more.

    >>> simulate(Workers(seconds=(1.0, 3.0), jitter=0.0), 6).worker_U.tolist()
    [0, 0, 0, 1, 0, 0]
    """
    draws = [np.random.default_rng((seed, worker)) for worker in range(len(workers.seconds))]

    def takes(worker: int) -> float:
        noise = workers.jitter * draws[worker].standard_normal()
        return workers.seconds[worker] * math.exp(noise)

    return Events.of((_arrivals if workers.backup is None else _rounds)(workers, updates, takes))


def _arrivals(
    workers: Workers, updates: int, takes: Callable[[int], float]
) -> list[tuple[int, int, int, float]]:
    count = len(workers.seconds)
    queue = [(takes(worker), worker) for worker in range(count)]
    heapq.heapify(queue)
    read, sent, waiting, made = [0] * count, [0] * count, [], []
    batch = list(range(count))
    while len(made) < updates:
        now, worker = heapq.heappop(queue)
        if (delay := len(made) - read[worker]) <= workers.late:
            made.append((worker, batch[worker], delay, now))
        sent[worker] += 1
        waiting.append(worker)
        ahead = math.inf if workers.bound is None else min(sent) + workers.bound
        for free in [w for w in waiting if sent[w] <= ahead]:
            waiting.remove(free)
            read[free], batch[free] = len(made), max(batch) + 1
            heapq.heappush(queue, (now + takes(free), free))
    return made


def _rounds(
    workers: Workers, updates: int, takes: Callable[[int], float]
) -> list[tuple[int, int, int, float]]:
    wanted, now, made = len(workers.seconds) - workers.backup, 0.0, []
    for number in range(updates):
        # The rows of a batch are shared by those that a round waits for.
        done = sorted((takes(worker) / wanted, worker) for worker in range(len(workers.seconds)))
        last, worker = done[wanted - 1]
        now += last
        made.append((worker, number, 0, now))
    return made


def read_events(path: str, updates: int) -> Events:
    """Reads the log of real workers, JSON lines of numbers by the names of the columns.

    Raises:
      ValueError: it has fewer than so many updates, or a line that is none.
    """
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            worker, batch, delay = (int(row[name]) for name in ("worker", "batch", "delay"))
            rows.append((worker, batch, delay, float(row["seconds"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}, is {line[:60]!r}: an update has the numbers "
                "worker, batch, delay and seconds"
            ) from error
        if not 0 <= delay < number or worker < 0 or batch < 0:
            raise ValueError(
                f"{path}, line {number}, is {line[:60]!r}: its numbers are at least 0, and a delay "
                f"at most the {number - 1} updates before it"
            )
    if len(rows) < updates:
        raise ValueError(
            f"{path} has {len(rows)} updates and the run {updates} steps: give as many at most"
        )
    if len({batch for _, batch, *_ in rows}) < len(rows):
        raise ValueError(f"{path} has two updates of the same batch: it is no log of one run")
    return Events.of(rows[:updates])


def in_order(stream: Any, batch_U: np.ndarray) -> Any:
    """Returns a stream of batches (``jaxtrain.experiment.BatchStream``) whose batch of update u is
    number ``batch_U[u]`` of another; those that no update takes are left out."""

    @contextlib.contextmanager
    def opened(start: int, shardings: PyTree) -> Iterator[Iterator[PyTree]]:
        order = batch_U[start:].tolist()
        first, wanted = min(order, default=0), set(order)

        def batches(numbered: Iterator[tuple[int, PyTree]]) -> Iterator[PyTree]:
            held: dict[int, PyTree] = {}
            for number in order:
                while number not in held:
                    read, batch = next(numbered)
                    if read in wanted:
                        held[read] = batch
                yield held.pop(number)

        with stream(first, shardings) as inner:
            yield batches(zip(itertools.count(first), inner, strict=False))

    return opened


def asynchronous(experiment: Any, workers: Workers) -> Any:
    """Returns a :class:`jaxtrain.Experiment` whose updates take gradients as late as a table says.

    ``params`` of its state are the server's newest, which are evaluated, exported and sampled. A
    table without delays has the bits of the plain step. The rows of a batch are those of one
    update.

    Raises:
      ValueError: the experiment has a method already, or a pipeline; or a gradient of a log is
        later than ``workers.late``.
    """
    if not workers:
        return experiment
    if experiment.method != Method():
        raise ValueError(
            "`workers` are given and the experiment has a method of its own: leave one out"
        )
    if (pipe := experiment.layout.mesh.pipe) > 1:
        raise ValueError(
            f"mesh axis 'pipe' has size {pipe} and `workers` are given, whose late gradients a "
            "pipeline does not take: use other axes"
        )
    if workers.events:
        events = read_events(workers.events, experiment.steps)
    else:
        events = simulate(workers, experiment.steps, seed=experiment.seed)
    if (worst := events.delay_U.max()) > workers.late:
        raise ValueError(
            f"{workers.events} has a gradient that is late by {worst} updates and `workers.late` "
            f"is {workers.late}: give {worst}"
        )
    V = workers.late + 1 if workers.backup is None else 1
    # A gradient that is thrown away takes its batch with it, and so its key.
    in_turn = np.array_equal(events.batch_U, np.arange(len(events.batch_U)))
    is_plain = V == 1 and in_turn

    def start(state: TrainState) -> TrainState:
        if workers.temper and (kept := _of_what_it_made(state.opt_state)):
            raise ValueError(
                f"`workers.temper` is {workers.temper:g} and the optimizer {kept}, which knows "
                "nothing of updates that are made smaller: leave one of them out"
            )
        own = own_part(state.params, frozen(state.opt_state))
        alike = jax.tree.map(lambda x: jnp.broadcast_to(x, (V, *x.shape)), own)
        return dataclasses.replace(state, method=None if is_plain else {"versions": alike})

    def late_gradients(step: Step) -> Step:
        def update(state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
            delay = jnp.asarray(events.delay_U)[state.step]
            told = {"delay": delay.astype(jnp.float32)}
            told["seconds"] = jnp.float32(events.seconds_U)[state.step]
            if is_plain:
                state, metrics = step(state, batch)
                return state, metrics | told
            rng = jax.random.fold_in(state.rng, jnp.asarray(events.batch_U)[state.step])
            versions = state.method["versions"]
            own, rest = split_like(versions, state.params)
            versions = jax.tree.map(lambda v, x: v.at[state.step % V].set(x), versions, own)
            then = jax.tree.map(lambda v: v[(state.step - delay) % V], versions)
            with within(_late, Late(combine(then, rest), rng, delay)):
                state, metrics = step(state, batch)
            return dataclasses.replace(state, method={"versions": versions}), metrics | told

        return update

    method = Method(
        late_gradients,
        start=start,
        batches=lambda stream: in_order(stream, events.batch_U),
        facts={"workers": events.facts},
        fingerprints={"workers.events": _fingerprint(workers.events)} if workers.events else {},
    )
    own = {"method": method}
    if not is_plain:
        own["engine"] = _of_late_parameters(experiment.task.engine)
        if workers.temper:
            own["optimizer"] = _tempered(experiment.optimizer, workers.temper)
    return experiment.with_(**own)


def _fingerprint(path: str) -> str:
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def _of_what_it_made(opt_state: PyTree) -> str | None:
    """What an optimizer does with its own updates that a factor on them would miss, or None."""
    if keeps_averages(opt_state):
        return "keeps averages of the parameters"
    # Of jaxtrain.optim.accumulation, too.
    several = nodes_of(optax.MultiStepsState, opt_state)
    return "accumulates several gradients in one update" if several else None


def _of_late_parameters(engine: Engine) -> Engine:
    """An engine whose gradients are of the parameters that a worker read."""

    def late_gradients(*given: Any) -> GradientEngine:
        inner = engine.make(*given)

        def of_late(params, model_state, batch, rng, scale, frozen=frozenset(), memory=None):
            if (late := _late.get()) is not None:
                params, rng = late.params, late.rng
            given = (params, model_state, batch, rng, scale)
            return run_engine(inner, *given, frozen=frozen, memory=memory)

        return of_late

    return dataclasses.replace(engine, make=late_gradients, row_wise=False)


def _tempered(optimizer: Any, power: float) -> Any:
    """An optimizer whose updates by late gradients are smaller."""
    if not isinstance(optimizer, optax.GradientTransformation):
        return lambda stack: _tempered(optimizer(stack), power)
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        updates, state = inner.update(grads, state, params, **extra)
        factor = (1.0 + _late.get().delay) ** -power
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
