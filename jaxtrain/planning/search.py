"""Which mesh: enumerates layouts of an experiment on a target, and says why the others lost.

A layout is a mesh (data, fsdp, tensor, pipe), a number of microbatches, a choice of
rematerialisation, when weights are gathered (layer by layer, or once per step), and whether the
residual stream is split over tensor. All that divide the target's devices are looked at:

1. what the library itself refuses, or would put a tensor axis across hosts, or holds more state
   than the memory, with weights that are gathered once, is rejected by shapes alone; so is a
   pipeline that waits so long for its stages that the best takes less;
2. the others are walked (:mod:`.estimate`): for either way to gather, with the fewest microbatches
   that fit, and with as little rematerialisation as fits; the stream is whole in those alone that
   fit where it is split;
3. those that fit are ranked by their predicted step time, and the best few are compiled by the
   target's own compiler, whose memory stands beside the estimate.

Meshes with little tensor and pipe come first, so that a search which runs out of its time (or is
interrupted) has seen those that are most often best. Of its time, a third is for walking and the
rest for compiling, if it compiles. Rejected layouts are told by family: how many, why, and one.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table as RichTable

from jaxtrain.experiment import Experiment
from jaxtrain.gradients import plain
from jaxtrain.host.signals import SignalWatch
from jaxtrain.parallel.reduction import kept_by_gathering, why_not
from jaxtrain.planning.ahead_of_time import plan_experiment, unknown_note
from jaxtrain.planning.candidates import (
    AXES,
    Candidate,
    make_candidates,
    make_meshes,
    with_candidate,
)
from jaxtrain.planning.estimate import Estimate, abstract_state, estimate, predict, trace
from jaxtrain.planning.report import Plan
from jaxtrain.planning.roofline import Prediction
from jaxtrain.planning.targets import Target
from jaxtrain.state import TrainState, gradient_shardings, local_bytes

WIDTH = 100
GIB = 2**30
# Where nobody says how many layouts to compile, none is begun after so many seconds of compiling.
COMPILE_SECONDS = 45.0
# The part of a search's time after which no further mesh is walked, if it compiles. The compiler of
# TPUs takes a minute for any decoder, however few its layers: most of it goes into machine code,
# fusion by fusion.
WALKING = 1 / 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout that fits, by its estimate; the best ones with what the compiler says.

    Args:
      candidate: the layout.
      estimated_bytes: of one device at its peak, by :mod:`jaxtrain.planning.estimate`.
      prediction: seconds, and what bounds them.
      bubble: of a pipeline.
      mfu: model FLOPs over peak FLOPs in the predicted time; None where either is unknown.
      tokens_per_s: what a step holds (``Experiment.item``) per second, over all devices.
      plan: by the compiler; None where it was not asked, or failed.
      compile_s: how long it took; None where it was not asked.
      problem: why it failed, in one sentence.
      note: how what was estimated or compiled differs from what would run.
    """

    candidate: Candidate
    estimated_bytes: int
    prediction: Prediction
    bubble: float
    mfu: float | None
    tokens_per_s: float = 0.0
    plan: Plan | None = None
    compile_s: float | None = None
    problem: str | None = None
    note: str | None = None

    @property
    def compiled_bytes(self) -> int | None:
        """Peak by the compiler; None where it was not asked or did not say."""
        return self.plan.memory.peak if self.plan and self.plan.memory else None

    @property
    def error(self) -> float | None:
        """Estimate over compiler, less 1; None where it was not compiled."""
        size = self.compiled_bytes
        return None if size is None else self.estimated_bytes / size - 1

    @property
    def fits(self) -> bool:
        """Whether nothing that the compiler has said is against it."""
        return self.problem is None and (self.plan is None or self.plan.fits)

    def to_json(self) -> dict[str, Any]:
        """The row as plain data: bytes and seconds."""
        predicted = self.prediction
        names = ("estimated_bytes", "compiled_bytes", "error", "bubble", "mfu", "tokens_per_s")
        names += ("compile_s", "problem", "note")
        return (
            dataclasses.asdict(dataclasses.replace(self.candidate, mesh=dict(self.candidate.mesh)))
            | {name: getattr(self, name) for name in names}
            | {
                "flags": self.candidate.flags,
                "step_s": predicted.step_seconds,
                "compute_s": predicted.compute,
                "hbm_s": predicted.hbm,
                "wire_s": dict(predicted.interconnect),
                "bound": predicted.bound,
            }
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """Layouts that lost for one reason.

    Args:
      reason: in words.
      count: how many.
      example: one of them.
    """

    reason: str
    count: int
    example: str


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Args:
      target: its name.
      devices: how many it has.
      assumed: bandwidths and efficiencies, in words.
      memory_bytes: of one device; None where nothing limits it.
      considered: layouts in all.
      rows: those that fit, fastest first; compiled ones that fit before the others.
      families: why the others lost, largest first.
      seconds: how long the search took, compiling included.
      complete: False where it was stopped before its end.
    """

    target: str
    devices: int
    assumed: str
    memory_bytes: int | None
    considered: int
    rows: tuple[Row, ...]
    families: tuple[Family, ...]
    seconds: float
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        """The result as plain data: bytes and seconds."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del plain["families"]
        plain["rows"] = [row.to_json() for row in self.rows]
        plain["rejected"] = [dataclasses.asdict(family) for family in self.families]
        return plain


def search(
    build: Callable[[Any], Experiment],
    config: Any,
    target: Target,
    *,
    compile_best: int | None = None,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
    watch: Callable[[Callable[[], SearchResult]], None] = lambda so_far: None,
) -> SearchResult:
    """Ranks the layouts of an experiment on a target.

    Args:
      build: ``config -> Experiment``, called once per layout: an outline that reads no data.
      config: the experiment's, a frozen dataclass. Varied are its ``mesh``, ``accumulate``,
        ``pipeline.microbatches``, ``pipeline.remat`` and ``remat``, as far as it has them, and
        ``gather`` and ``sequence_parallel`` where they are left to the framework; all else (global
        batch, precision, optimizer, zero, schedule) stays.
      target: what to run on. Its compiler is needed unless ``compile_best`` is 0.
      compile_best: how many layouts to compile, the fastest by prediction first; None compiles as
        many as :data:`COMPILE_SECONDS` hold, and at least one.
      seconds: of the whole search. After :data:`WALKING` of them, as soon as some layout fits, no
        further mesh is looked at; after all of them the compiler is no longer waited for.
      progress: called with a line of text now and then.
      watch: called once at the start with a function that any thread may ask for what was found so
        far.

    Raises:
      ValueError: for a config without a mesh, a chip without published peaks, or a compiler that is
        not installed.
    """
    if not dataclasses.is_dataclass(getattr(config, "mesh", None)):
        raise ValueError(
            "there is nothing to search: the experiment's Config has no field 'mesh' with the "
            "sizes data, fsdp, tensor and pipe"
        )
    if target.chip.hbm_bytes_per_s is None:
        raise ValueError(
            f"target {target} has no published peaks to rank layouts by: give a TPU or GPU target"
        )
    start = time.perf_counter()
    if compile_best != 0:
        # What is not installed is better known now than in a minute.
        target.devices()
    walking = seconds if compile_best == 0 else WALKING * seconds
    rejections, estimator = Rejections(), Estimator(build, config, target)
    rows, considered = [], 0

    def found(complete: bool) -> SearchResult:
        ranked, rejected = rank(rows), copy.deepcopy(rejections)
        shown = [row for row in ranked if row.compile_s is not None]
        shown = shown or ranked[: max(1, 5 if compile_best is None else compile_best)]
        for row in ranked:
            if row not in shown:
                slower = row.prediction.step_seconds / ranked[0].prediction.step_seconds
                reason = f"fits, and takes # x the best's time: bound by {row.prediction.bound}"
                rejected.add(reason, row.candidate.mesh_name, 1, slower)
        return SearchResult(
            target=str(target),
            devices=target.size,
            assumed=target.chip.assumed,
            memory_bytes=target.chip.memory_bytes,
            considered=considered,
            rows=tuple(shown),
            families=rejected.families(),
            seconds=time.perf_counter() - start,
            complete=complete,
        )

    watch(lambda: found(complete=False))
    meshes = list(make_meshes(config, target.size, slices=target.slices))
    meshes.sort(key=lambda mesh: mesh.get("tensor", 1) * mesh.get("pipe", 1) ** 2)
    gathers = estimator.gathers
    for i, mesh in enumerate(meshes):
        best = min((row.prediction.step_seconds for row in rows), default=0)
        progress(
            f"mesh {i + 1} of {len(meshes)}: {Candidate(mesh).mesh_name}"
            + (f"; {len(rows)} fit, the best takes {1000 * best:,.0f} ms" if rows else "")
        )
        candidates = list(make_candidates(config, mesh, gathers=gathers))
        considered += len(candidates)
        if rows and time.perf_counter() - start > walking:
            reason = f"not looked at: {walking:.0f} s were over (of --search-seconds)"
            rejections.add(reason, Candidate(mesh).mesh_name, len(candidates))
            continue
        if reason := refuse_mesh(estimator, mesh):
            rejections.add(reason, Candidate(mesh).mesh_name, len(candidates))
            continue
        if best and (least := estimator.least_seconds(candidates[-1])) > best:
            reason = "waits in its pipeline: takes at least # x the best's time"
            rejections.add(reason, Candidate(mesh).mesh_name, len(candidates), least / best)
            continue
        rows += walk_mesh(estimator, candidates, target, rejections)
    rows.sort(key=lambda row: row.prediction.step_seconds)
    in_time = compile_rows(estimator, rows, compile_best, progress, deadline=start + seconds)
    return found(complete=in_time)


class Estimator:
    """Estimates layouts of one experiment; a trace serves all meshes that it can stand for."""

    def __init__(self, build: Callable[[Any], Experiment], config: Any, target: Target):
        self.build, self.config, self.target = build, config, target
        self.where = {"devices": target.size, "kind": target.chip.kind}
        self.states: dict[str, TrainState] = {}
        self.traces: dict[str, Any] = {}
        self.least_compute = math.inf  # of what has no pipeline

    @property
    def gathers(self) -> tuple[str, ...]:
        """When weights may be gathered; none where the flags say it, or there is no choice."""
        if getattr(self.config, "gather", "") is not None:
            return ()
        alone = {axis: 1 for axis in AXES if hasattr(self.config.mesh, axis)}
        experiment = self.build(with_candidate(self.config, Candidate(alone)))
        obstacle = why_not(
            experiment.loss_fn,
            has_model_state=experiment.has_model_state,
            own_engine=experiment.engine is not plain,
        )
        return ("layer", "step") if experiment.gather == "model" and obstacle is None else ()

    def outline(self, candidate: Candidate) -> tuple[Experiment, TrainState]:
        """Builds a layout's experiment, and the shapes of its state, which no ``remat`` changes.

        Raises:
          ValueError: for one that cannot be trained.
        """
        experiment = self.build(with_candidate(self.config, candidate))
        key = repr(dataclasses.replace(candidate, remat=None, gather=None, sequence_parallel=None))
        if key not in self.states:
            self.states[key] = abstract_state(experiment, **self.where)
        return experiment, self.states[key]

    def __call__(self, candidate: Candidate) -> tuple[Experiment, Estimate]:
        """Builds and estimates a layout; raises as :meth:`outline`."""
        twin = self.twin(candidate)
        key = repr(twin)
        if key not in self.traces:
            experiment, state = self.outline(twin)
            alone = twin is candidate
            self.traces[key] = trace(experiment, **self.where, state=state, for_one_size=alone)
        experiment, state = self.outline(candidate)
        traced = self.traces[key]
        found = estimate(experiment, **self.where, state=state, traced=traced)
        if candidate.stage_remat is None:
            compute = predict(found, self.target).compute
            self.least_compute = min(self.least_compute, compute)
        return experiment, found

    def least_seconds(self, candidate: Candidate) -> float:
        """What a step takes at least, by the time in which its pipeline waits; 0 where unknown."""
        stages, options = candidate.mesh.get("pipe", 1), getattr(self.config, "pipeline", None)
        if stages == 1 or math.isinf(self.least_compute):
            return 0.0
        units = candidate.microbatches * getattr(options, "virtual", 1)
        return self.least_compute * (units + stages - 1) / units

    def kept_bytes(self, candidate: Candidate) -> int:
        """Bytes of the state, and of what is kept of weights that are gathered once per step."""
        experiment, state = self.outline(candidate)
        shardings = gradient_shardings(state, zero=experiment.zero)
        dtype = experiment.policy.compute_dtype
        return local_bytes(state) + kept_by_gathering(state.params, shardings, dtype)

    def twin(self, candidate: Candidate) -> Candidate:
        """The layout whose trace stands for this one, see :func:`.estimate.trace`.

        What reduces gradients or gathers weights once per step is traced for its own sizes.
        """
        if candidate.gather == "step" or candidate.microbatches > 1:
            return candidate
        shards = candidate.mesh.get("data", 1) * candidate.mesh.get("fsdp", 1)
        both = "data" in candidate.mesh and "fsdp" in candidate.mesh
        slices = candidate.mesh.get("dcn_data", 1)
        if getattr(self.config, "zero", 0) or not both or shards < 4 or shards % (2 * slices):
            return candidate
        mesh = dict(candidate.mesh) | {"data": shards // 2, "fsdp": 2}
        return dataclasses.replace(candidate, mesh=mesh)


class Rejections:
    """Counts rejected layouts by reason. ``#`` in a reason stands for a number that varies."""

    def __init__(self):
        self.found: dict[str, tuple[int, str, list[float]]] = {}

    def add(self, reason: str, example: str, count: int = 1, number: float | None = None) -> None:
        """Counts layouts."""
        before, first, numbers = self.found.get(reason, (0, example, []))
        numbers = numbers if number is None else [*numbers, number]
        self.found[reason] = before + count, first, numbers

    def families(self) -> tuple[Family, ...]:
        """The families, largest first."""
        listed = []
        for reason, (count, example, numbers) in self.found.items():
            if numbers:
                low, high = min(numbers), max(numbers)
                span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
                reason = reason.replace("#", span)
            listed.append(Family(reason, count, example))
        return tuple(sorted(listed, key=lambda family: -family.count))


def refuse_mesh(estimator: Estimator, mesh: Mapping[str, int]) -> str | None:
    """Says why no layout of a mesh can be trained, by shapes alone; None where some may be."""
    config, target = estimator.config, estimator.target
    tensor = mesh.get("tensor", 1)
    island = target.devices_per_island
    if tensor > island or (tensor > 1 and island % tensor):
        where = "slices" if target.chip.kind == "tpu" else "hosts"
        return f"the tensor axis would cross {where} (of {island} devices)"
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1)
    rows = getattr(config, "global_batch", None)
    if rows is not None and rows % (shards * mesh.get("pipe", 1)):
        return "the global batch does not divide over data x fsdp (x pipe, for its microbatches)"
    stages = mesh.get("pipe", 1)
    first = Candidate(mesh, stages, stage_remat="full") if stages > 1 else Candidate(mesh)
    try:
        state = local_bytes(estimator.outline(first)[1])
    except ValueError as error:
        return f"does not divide: {family_of(str(error))}"
    if target.chip.memory_bytes is not None and state > target.chip.memory_bytes:
        times = state / target.chip.memory_bytes
        return f"parameters and optimizer state alone are {_rough(times)} x the memory"
    return None


def walk_mesh(
    estimator: "Estimator",
    candidates: Sequence[Candidate],
    target: Target,
    rejections: Rejections,
) -> list[Row]:
    """Estimates the layouts of one mesh as far as is needed; returns those that fit.

    More microbatches than the fewest that fit only repeat the traffic of weights, so they are not
    walked (a pipeline has a smaller bubble with more: its largest number is). With as many
    microbatches, rematerialisation is only walked where less of it does not fit. All of that is
    done for each way to gather weights. The stream is whole over tensor only in what fits split.
    """
    limit = target.chip.memory_bytes or math.inf
    rows: list[Row] = []
    for gather in dict.fromkeys(c.gather for c in candidates):
        ways = [c for c in candidates if c.gather == gather]
        split = [c for c in ways if c.sequence_parallel is not False]
        if gather == "step" and (times := estimator.kept_bytes(split[0]) / limit) > 1:
            reason = "the state and weights gathered once per step are # x the memory"
            rejections.add(reason, split[0].mesh_name, len(ways), times)
            continue
        fitting = _walk_microbatches(estimator, split, target, rejections)
        halves = [dataclasses.replace(row.candidate, sequence_parallel=False) for row in fitting]
        whole = [c for c in ways if c.sequence_parallel is False]
        rows += fitting
        for candidate in whole:
            if candidate not in halves:
                reason = "a whole residual stream, where a split one was not walked or does not fit"
                rejections.add(reason, candidate.mesh_name)
                continue
            experiment, estimated = estimator(candidate)
            if estimated.peak_bytes <= limit:
                rows.append(make_row(candidate, experiment, estimated, target))
            else:
                times = estimated.peak_bytes / limit
                reason = "needs # x the memory with activations"
                rejections.add(reason, candidate.mesh_name, 1, times)
    return rows


def _walk_microbatches(
    estimator: "Estimator",
    candidates: Sequence[Candidate],
    target: Target,
    rejections: Rejections,
) -> list[Row]:
    """The part of :func:`walk_mesh` for one way to gather weights."""
    limit = target.chip.memory_bytes or math.inf
    rows: list[Row] = []
    fewest = math.inf
    for kind in dict.fromkeys((c.remat, c.stage_remat) for c in candidates):
        ladder = [c for c in candidates if (c.remat, c.stage_remat) == kind]
        pipelined = ladder[0].stage_remat is not None
        ladder = ladder[::-1] if pipelined else ladder
        while ladder:
            candidate, passed, over = ladder[0], len(ladder), None
            if candidate.microbatches >= fewest:
                reason = "recomputes, where less of that fits as well"
            else:
                try:
                    experiment, estimated = estimator(candidate)
                except ValueError as error:
                    reason = f"does not divide: {family_of(str(error))}"
                else:
                    over = estimated.peak_bytes / limit
            if over is not None and over <= 1:
                rows.append(make_row(candidate, experiment, estimated, target))
                fewest, passed, over = candidate.microbatches, passed - 1, None
                ladder = ladder[1:]
                what = "fewer" if pipelined else "more"
                reason = f"{what} microbatches than the best of its mesh"
            elif over is not None:
                reason = "needs # x the memory with activations"
                if not pipelined:
                    # Working memory falls at best with the microbatch: what cannot fit is passed.
                    room = max(1, limit - estimated.state_bytes - estimated.batch_bytes)
                    passed = max(1, int(math.log2(max(1.0, estimated.working_bytes / room))))
            if ladder:
                rejections.add(reason, candidate.mesh_name, len(ladder[:passed]), over)
            ladder = ladder[passed:]
    return rows


def make_row(
    candidate: Candidate, experiment: Experiment, estimated: Estimate, target: Target
) -> Row:
    """The row of a layout that fits."""
    prediction = predict(estimated, target)
    rate = experiment.items_per_step / prediction.step_seconds
    peak = target.chip.peak_flops(experiment.policy.compute_dtype)
    mfu = None
    if experiment.flops_per_step and peak:
        mfu = experiment.flops_per_step / (prediction.step_seconds * target.size * peak)
    unknown = estimated.cost.unknown
    note = unknown_note(unknown) if unknown else None
    return Row(candidate, estimated.peak_bytes, prediction, estimated.bubble, mfu, rate, note=note)


def compile_rows(
    estimator: Estimator,
    rows: list[Row],
    count: int | None,
    progress: Callable[[str], None],
    *,
    deadline: float = math.inf,
) -> bool:
    """Compiles the first rows, in their place, until ``count`` of them fit or time is over.

    Args:
      estimator: of these rows.
      rows: the fastest by prediction first.
      count: how many; with None, as many as :data:`COMPILE_SECONDS` hold, and at least one.
      progress: as for :func:`search`.
      deadline: by ``time.perf_counter()``. The compiler, which nothing can stop, runs on, and its
        row says that it has no answer.

    Returns:
      Whether that was before the deadline.
    """
    good = bad = 0
    start = time.perf_counter()
    for i, row in enumerate(rows):
        late = count is None and time.perf_counter() - start > COMPILE_SECONDS
        if good == count or (late and good) or bad > (count or 5):
            return True
        name = row.candidate.mesh_name
        progress(f"compiling {name}, the {i + 1}. of {len(rows)} that fit")
        try:
            rows[i] = within(deadline - time.perf_counter(), compile_row, estimator, row)
        except TimeoutError:
            note = f"{name} was not compiled: the search's time was over (--search-seconds)"
            rows[i] = dataclasses.replace(row, note="; ".join(filter(None, (note, row.note))))
            progress(note)
            return False
        good, bad = good + rows[i].fits, bad + (not rows[i].fits)
    return True


def within(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a thread, and leaves it to itself after so many seconds.

    Raises:
      TimeoutError: where it has not returned by then.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=None if math.isinf(seconds) else max(0.0, seconds))


def rank(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: compiled ones that fit, compiled ones that do not, others, each fastest first."""

    def group(row: Row) -> int:
        return 2 if row.compile_s is None else int(not row.fits)

    return sorted(rows, key=lambda row: (group(row), row.prediction.step_seconds))


def compile_row(estimator: Estimator, row: Row) -> Row:
    """Asks the compiler about a layout."""
    start = time.perf_counter()
    plan = problem = None
    try:
        plan = plan_experiment(estimator.outline(row.candidate)[0], estimator.target)
        if not plan.fits:
            problem = "does not fit, says the compiler"
    except jax.errors.JaxRuntimeError as error:
        problem = str(error).splitlines()[0]
    seconds = time.perf_counter() - start
    note = next(iter(plan.notes), row.note) if plan else row.note
    return dataclasses.replace(row, plan=plan, compile_s=seconds, problem=problem, note=note)


def family_of(sentence: str) -> str:
    """A refusal's first clause, with the numbers that vary from layout to layout left out.

    >>> family_of("--mesh.tensor 64 does not divide 32 heads: use a divisor")
    '--mesh.tensor does not divide 32 heads'
    """
    clause = sentence.split(": use ")[0].split("; use ")[0]
    clause = re.sub(r"(--mesh\.\w+) \d+", r"\1", clause)
    clause = re.sub(r"(mesh ax[ei]s '[\w ]+') of size \d+", r"\1", clause)
    return re.sub(r"(of size|be cut into \w+=|over|into) \d+", r"\1 some", clause)


def cost(
    result: SearchResult, *, tokens: float | None = None, price: float | None = None
) -> dict[str, float]:
    """What training with the first row costs; empty where nothing says how much a step holds.

    Args:
      result: of a search.
      tokens: to train on in all.
      price: of one chip (a device of the target) for an hour.

    Returns:
      ``tokens_per_s``, ``chip_hours_per_billion`` tokens, and where asked for ``days`` for all
      tokens, ``price_per_billion`` and ``price`` of all.
    """
    rate = result.rows[0].tokens_per_s if result.rows else 0
    if not rate:
        return {}
    hours = result.devices * 1e9 / rate / 3600
    found = {"tokens_per_s": rate, "chip_hours_per_billion": hours}
    if price is not None:
        found["price_per_billion"] = price * hours
    if tokens is not None:
        found["days"] = tokens / rate / 86400
        if price is not None:
            found["price"] = price * hours * tokens / 1e9
    return found


def _cost_line(costs: Mapping[str, float], tokens: float | None) -> str:
    line = (
        f"the first: {costs['tokens_per_s']:,.0f} tokens/s, "
        f"{costs['chip_hours_per_billion']:,.1f} chip-hours per billion tokens"
    )
    if "price_per_billion" in costs:
        line += f" (costs {costs['price_per_billion']:,.2f})"
    if "days" in costs:
        line += f"; {tokens / 1e9:,.1f} billion take {costs['days']:,.1f} days"
        line += f" and cost {costs['price']:,.0f}" if "price" in costs else ""
    return line


def print_search(
    result: SearchResult,
    console: Console | None = None,
    *,
    tokens: float | None = None,
    price: float | None = None,
) -> None:
    """Prints the ranked table, what the first costs, and the families that lost, 100 wide."""
    console = console or Console(width=WIDTH, highlight=False)
    memory = "" if result.memory_bytes is None else f", {result.memory_bytes / GIB:.2f} GiB each"
    console.print(
        f"{result.considered} layouts on {result.target}{memory}, searched in "
        f"{result.seconds:.0f} s" + ("" if result.complete else ", stopped before the end")
    )
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("mesh", no_wrap=True)
    # One unit for all rows, by the smallest: a small model is nothing in GiB.
    small = min((row.estimated_bytes for row in result.rows), default=GIB) < GIB / 10
    unit, name = (2**20, "MiB") if small else (GIB, "GiB")
    sizes = (f"estimated\n{name}", f"compiled\n{name}")
    for name in ("micro-\nbatches", "remat", "gather", *sizes, "error", "step ms"):
        table.add_column(name, justify="left" if name in ("remat", "gather") else "right")
    table.add_column("MFU", justify="right")
    table.add_column("bound by")
    rank = 0
    for row in result.rows:
        bad = not row.fits
        rank += not bad
        bound = row.prediction.bound + (f", bubble {row.bubble:.0%}" if row.bubble else "")
        table.add_row(
            "-" if bad else str(rank),
            row.candidate.mesh_name,
            str(row.candidate.microbatches),
            row.candidate.remat_name,
            row.candidate.gather or "-",
            f"{row.estimated_bytes / unit:.2f}",
            "-" if row.compiled_bytes is None else f"{row.compiled_bytes / unit:.2f}",
            "-" if row.error is None else f"{100 * row.error:+.1f} %",
            f"{1000 * row.prediction.step_seconds:,.1f}",
            "-" if row.mfu is None else f"{row.mfu:.0%}",
            row.problem or bound,
        )
    if not result.rows:
        console.print("no layout fits")
    else:
        console.print(table)
        console.print(f"train the first with: {' '.join(result.rows[0].candidate.flags)}")
        if costs := cost(result, tokens=tokens, price=price):
            console.print(_cost_line(costs, tokens))
        console.print(
            f"times are predictions, at {result.assumed}; the error is estimate / compiler"
        )
        for note in dict.fromkeys(row.note for row in result.rows if row.note):
            console.print(note)
    console.print("\nrejected:")
    rejections = RichTable(box=None, pad_edge=False, show_header=False)
    rejections.add_column("", justify="right")
    rejections.add_column("")
    rejections.add_column("", no_wrap=True)
    for family in result.families:
        rejections.add_row(str(family.count), family.reason, f"e.g. {family.example}")
    console.print(rejections)


def run_search(
    build: Callable[[Any], Experiment],
    config: Any,
    target: Target,
    *,
    compile_best: int | None = None,
    seconds: float = math.inf,
    tokens: float | None = None,
    price: float | None = None,
    as_json: bool = False,
) -> SearchResult:
    """Searches with progress on standard error, and prints the result.

    A SIGTERM or SIGINT prints what was found so far and ends the process with 128 + its number.

    Args:
      build, config, target, compile_best, seconds: as for :func:`search`.
      tokens, price: as for :func:`cost`.
      as_json: prints one JSON object instead of tables.
    """
    console = Console(width=WIDTH, highlight=False)
    errors = Console(stderr=True, highlight=False)
    so_far: list[Callable[[], SearchResult]] = []
    asked = {"tokens": tokens, "price": price}

    def show(result: SearchResult) -> None:
        if as_json:
            print(json.dumps(result.to_json() | {"cost": cost(result, **asked)}, default=str))
        else:
            print_search(result, console, **asked)

    def stop(number: int) -> None:
        try:
            status.stop()
            if so_far:
                show(so_far[0]())
            sys.stdout.flush()
        finally:
            # A compiler that is at work would not let the main thread end.
            os._exit(128 + number)

    if compile_best != 0:
        target.devices()  # libraries that are loaded later would take the signals
    status = errors.status("searching")
    live = errors.is_terminal
    with SignalWatch(stop), status if live else contextlib.nullcontext():
        result = search(
            build,
            config,
            target,
            compile_best=compile_best,
            seconds=seconds,
            progress=status.update if live else errors.print,
            watch=so_far.append,
        )
    show(result)
    if not result.complete:
        sys.stdout.flush()
        os._exit(0)  # the compiler that was not waited for would not let the process end
    return result


def _rough(times: float) -> str:
    return f"{times:.1f}" if times < 10 else f"{times:.0f}"
