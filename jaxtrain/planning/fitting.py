"""Which layouts of a mesh fit, and how long they would take: estimated, without a compiler."""

import dataclasses
import functools
import itertools
import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from jaxtrain.build import why_not_once
from jaxtrain.engines.reduction import kept_by_gathering
from jaxtrain.experiment import Experiment
from jaxtrain.layout import Layout, MeshShape
from jaxtrain.planning.ahead_of_time import unknown_note
from jaxtrain.planning.candidates import (
    batch_parts,
    make_placements,
    name_of,
    open_schedules,
    parts_of,
)
from jaxtrain.planning.estimate import Estimate, abstract_state, estimate, placed, predict, trace
from jaxtrain.planning.ranking import Family, Row
from jaxtrain.planning.targets import Target
from jaxtrain.state import TrainState, gradient_shardings, local_bytes
from jaxtrain.tree import named_leaves


class Estimator:
    """Estimates layouts of one experiment; a trace serves all meshes that it can stand for."""

    def __init__(
        self,
        build: Callable[[Any], Experiment],
        config: Any,
        target: Target,
        *,
        typed: Collection[str] = (),
    ):
        self.build, self.asked, self.target = build, config.layout, target
        # Where a mesh crosses the slow network changes nothing but the price.
        alone = dict.fromkeys((f"mesh.{name}" for name in parts_of(self.asked.mesh)), 1)
        self.config = dataclasses.replace(config, layout=self.asked.with_(alone))
        self.placements = functools.partial(make_placements, self.asked.mesh, target=target)
        self.schedules = open_schedules(self.asked.pipeline, typed)
        self.where = {"devices": target.size, "kind": target.chip.kind}
        self.states: dict[Layout, TrainState] = {}
        self.traces: dict[Layout, Any] = {}
        self.least_compute = math.inf  # of what has no pipeline

    @functools.cached_property
    def alone(self) -> Experiment:
        """The experiment on one device."""
        return self._build(self.asked.with_({"mesh": MeshShape(data=1), "accumulate": 1}))

    @functools.cached_property
    def has_experts(self) -> bool:
        """Whether some parameter has a rule that splits it by experts."""
        laid = self.alone.laid
        names = named_leaves(jax.eval_shape(laid.init_fn, jax.random.key(0)))
        paths = [path for path, axes in laid.rules.params if "experts" in axes]
        return any(re.search(path, name) for path in paths for name in names)

    @property
    def gathers(self) -> tuple[str, ...]:
        """When weights may be gathered; none where the flags say it, or there is no choice, as in
        an exact step, whose devices have all of them."""
        if self.asked.gather is not None or self.asked.exact:
            return ()
        possible = self.alone.task.gathers_layers and why_not_once(self.alone) is None
        return ("layer", "step") if possible else ()

    def _build(self, layout: Layout) -> Experiment:
        return self.build(dataclasses.replace(self.config, layout=layout))

    def outline(self, layout: Layout) -> tuple[Experiment, TrainState]:
        """Builds a layout's experiment, and the shapes of its state, which no ``remat`` changes.
        Raises ValueError for one that cannot be trained."""
        experiment = self._build(layout)
        key = layout.with_({"remat": None, "gather": None, "sequence_parallel": True})
        if key not in self.states:
            self.states[key] = abstract_state(experiment, **self.where)
        return experiment, self.states[key]

    def __call__(self, layout: Layout) -> tuple[Experiment, Estimate]:
        """Builds and estimates a layout; raises as :meth:`outline`."""
        key = self.trace_key(layout)
        if key not in self.traces:
            experiment, state = self.outline(key)
            alone = key is layout
            self.traces[key] = trace(experiment, **self.where, state=state, final=alone)
        experiment, state = self.outline(layout)
        found = estimate(experiment, **self.where, state=state, traced=self.traces[key])
        if layout.mesh.pipe == 1:
            compute = predict(found, self.target).compute
            self.least_compute = min(self.least_compute, compute)
        return experiment, found

    def least_seconds(self, layout: Layout) -> float:
        """Bounds a step's seconds from below, by the time its pipeline waits; 0 where unknown."""
        stages = layout.mesh.pipe
        if stages == 1 or math.isinf(self.least_compute):
            return 0.0
        units = layout.pipeline.microbatches * layout.pipeline.virtual
        return self.least_compute * (units + stages - 1) / units

    def kept_bytes(self, layout: Layout) -> int:
        """Bytes of the state, and of what is kept of weights that are gathered once per step."""
        experiment, state = self.outline(layout)
        shardings = gradient_shardings(state, zero=experiment.layout.zero)
        dtype = experiment.policy.compute_dtype
        return local_bytes(state) + kept_by_gathering(state.params, shardings, dtype)

    def trace_key(self, layout: Layout) -> Layout:
        """The layout whose trace stands for this one, see :func:`.estimate.trace`.

        What reduces gradients or gathers weights once per step is traced for its own sizes.
        """
        shards = layout.mesh.data * layout.mesh.fsdp
        own = layout.gather == "step" or layout.microbatches(layout.mesh.pipe) > 1 or layout.zero
        if own or shards < 4 or shards % 2:
            return layout
        return layout.with_({"mesh.data": shards // 2, "mesh.fsdp": 2})


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a layout is rejected: words, then a number that varies from layout to layout and its
    unit. ``place`` is the line of code that raised the error whose sentence the words are."""

    words: str
    number: float | None = None
    unit: str = ""
    place: tuple[str, int | None] | None = None

    @classmethod
    def of(cls, error: ValueError) -> "Reason":
        """An error of what does not divide; its family is all that one line of code refuses."""
        raised = traceback.extract_tb(error.__traceback__)[-1]
        return cls(f"does not divide: {error}", place=(raised.filename, raised.lineno))


class Rejections:
    """Counts rejected layouts by family of reasons."""

    def __init__(self):
        self.found: dict[Any, list[tuple[Reason, str, int]]] = {}

    @property
    def count(self) -> int:
        """Number of rejected layouts in all."""
        return sum(count for members in self.found.values() for *_, count in members)

    def add(self, reason: Reason, layouts: Sequence[Layout]) -> None:
        """Counts layouts."""
        if layouts:
            family = reason.place or (reason.words, reason.unit)
            rejected = reason, name_of(layouts[0].mesh), len(layouts)
            self.found.setdefault(family, []).append(rejected)

    def families(self) -> tuple[Family, ...]:
        """The families, largest first."""
        listed = []
        for members in self.found.values():
            first, example, _ = members[0]
            words = first.words
            if numbers := [reason.number for reason, *_ in members if reason.number is not None]:
                low, high = min(numbers), max(numbers)
                span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
                words += f" {span} {first.unit}"
            listed.append(Family(words, sum(count for *_, count in members), example))
        return tuple(sorted(listed, key=lambda family: -family.count))


def refuse_mesh(estimator: Estimator, first: Layout) -> Reason | None:
    """Says why no layout of a mesh can be trained, by shapes alone; None where some may be."""
    config, target, mesh = estimator.config, estimator.target, first.mesh
    island, stages = target.devices_per_island, mesh.pipe
    where = "slices" if target.chip.kind == "tpu" else "hosts"
    for axis, inner in (("tensor", mesh.tensor), ("context", mesh.tensor * mesh.context)):
        if mesh.axes[axis] > 1 and island % inner:
            return Reason(f"the {axis} axis would cross {where} (of {island} devices)")
    if not estimator.placements(mesh):
        return Reason(f"data, fsdp and pipe do not divide over {target.islands} {where}")
    rows = getattr(config, "global_batch", None)
    if rows is not None and rows % (batch_parts(mesh) * stages):
        axes = "data x fsdp x expert" if mesh.expert > 1 else "data x fsdp"
        return Reason(f"the global batch does not divide over {axes} (x pipe for microbatches)")
    try:
        state = local_bytes(estimator.outline(first)[1])
    except ValueError as error:
        return Reason.of(error)
    if target.chip.memory_bytes is not None and state > target.chip.memory_bytes:
        words = "parameters and optimizer state alone are"
        return Reason(words, state / target.chip.memory_bytes, "x the memory")
    return None


def walk_schedules(
    estimator: Estimator,
    layouts: Sequence[Layout],
    rejections: Rejections,
    *,
    best: float = math.inf,
) -> list[Row]:
    """Estimates the layouts of one mesh (:func:`walk_mesh`), schedule by schedule of a pipeline.

    A schedule whose stages wait for so long that it takes more than ``best`` seconds is left out.
    Once something fits, other schedules are tried of what is fastest so far.
    """
    rows: list[Row] = []
    for ways in grouped(layouts, lambda x: (x.pipeline.schedule, x.pipeline.virtual)):
        tried = ways
        if (least := estimator.least_seconds(ways[-1])) > best:
            words, unit = "waits in its pipeline: takes at least", "x the best's time"
            rejections.add(Reason(words, least / best, unit), ways)
            continue
        try:
            estimator.outline(ways[0])
        except ValueError as error:  # more chunks than layers
            rejections.add(Reason.of(error), ways)
            continue
        if rows:
            fastest = min(rows, key=lambda row: row.prediction.step_seconds).layout
            tried = [x for x in ways if _but_for_schedule(x) == _but_for_schedule(fastest)]
        reason = Reason("another schedule, of what is slower than the best of its mesh")
        rejections.add(reason, [layout for layout in ways if layout not in tried])
        rows += walk_mesh(estimator, tried, rejections)
    return rows


def grouped(those: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Puts together what has the same key, in the order in which keys come first."""
    groups: dict[Any, list[Any]] = {}
    for each in those:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def _but_for_schedule(layout: Layout) -> tuple:
    pipeline = layout.pipeline
    return layout.gather, layout.remat, pipeline.remat, pipeline.microbatches


def walk_mesh(estimator: Estimator, layouts: Sequence[Layout], rejections: Rejections) -> list[Row]:
    """Estimates the layouts of one mesh, and of a pipeline one schedule, as far as is needed.

    More microbatches than the fewest that fit only repeat the traffic of weights, so they are not
    walked (a pipeline has a smaller bubble with more: its largest number is). With as many
    microbatches, rematerialisation is only walked where less of it does not fit. All of that is
    done for each way to gather weights. The stream is whole over tensor only in what fits split.
    Returns those that fit.
    """
    limit = estimator.target.chip.memory_bytes or math.inf
    rows: list[Row] = []
    for ways in grouped(layouts, lambda x: x.gather):
        split, *whole = grouped(ways, lambda x: x.sequence_parallel)
        if split[0].gather == "step" and (times := estimator.kept_bytes(split[0]) / limit) > 1:
            words = "the state and weights gathered once per step are"
            rejections.add(Reason(words, times, "x the memory"), ways)
            continue
        fitting = _walk_microbatches(estimator, split, limit, rejections)
        halves = [
            row.layout.with_({"mesh": split[0].mesh, "sequence_parallel": False}) for row in fitting
        ]
        rows += fitting
        for layout in itertools.chain(*whole):
            if layout not in halves:
                words = "a whole residual stream, where a split one was not walked or does not fit"
                rejections.add(Reason(words), [layout])
                continue
            experiment, estimated = estimator(layout)
            if estimated.peak_bytes <= limit:
                rows.append(make_row(estimator, layout, experiment, estimated, rejections))
            else:
                rejections.add(_needs(estimated.peak_bytes / limit), [layout])
    return rows


def _needs(times: float) -> Reason:
    return Reason("needs", times, "x the memory with activations")


def _walk_microbatches(
    estimator: Estimator, layouts: Sequence[Layout], limit: float, rejections: Rejections
) -> list[Row]:
    """The part of :func:`walk_mesh` for one way to gather weights."""
    rows: list[Row] = []
    fewest = math.inf
    pipelined = (pipe := layouts[0].mesh.pipe) > 1
    for ladder in grouped(layouts, lambda x: (x.remat, x.pipeline.remat)):
        ladder = ladder[::-1] if pipelined else ladder
        while ladder:
            layout, passed, over = ladder[0], len(ladder), None
            if layout.microbatches(pipe) >= fewest:
                reason = Reason("recomputes, where less of that fits as well")
            else:
                try:
                    experiment, estimated = estimator(layout)
                except ValueError as error:
                    reason = Reason.of(error)
                else:
                    over = estimated.peak_bytes / limit
            if over is not None and over <= 1:
                rows.append(make_row(estimator, layout, experiment, estimated, rejections))
                fewest, passed = layout.microbatches(pipe), passed - 1
                ladder = ladder[1:]
                what = "fewer" if pipelined else "more"
                reason = Reason(f"{what} microbatches than the best of its mesh")
            elif over is not None:
                reason = _needs(over)
                if not pipelined:
                    # Working memory falls at best with the microbatch: what cannot fit is passed.
                    room = max(1, limit - estimated.state_bytes - estimated.batch_bytes)
                    passed = max(1, int(math.log2(max(1.0, estimated.working_bytes / room))))
            rejections.add(reason, ladder[:passed])
            ladder = ladder[passed:]
    return rows


def make_row(
    estimator: Estimator,
    layout: Layout,
    experiment: Experiment,
    estimated: Estimate,
    rejections: Rejections,
) -> Row:
    """The row of a layout that fits, in the placement that crosses the slow network best; the
    others are counted among the rejections."""
    target = estimator.target
    ways = estimator.placements(layout.mesh)
    priced = [(predict(placed(estimated, mesh), target), mesh) for mesh in ways]
    # Of equal ones the one that takes less if nothing is hidden.
    prediction, mesh = min(priced, key=lambda x: (x[0].step_seconds, x[0].step_seconds_apart))
    for other, _ in (x for x in priced if x[1] is not mesh):
        words = "crosses the slow network along other axes, and takes"
        times = other.step_seconds / prediction.step_seconds
        rejections.add(Reason(words, times, "x the time of the best way"), [layout])
    rate = experiment.data.items_per_step / prediction.step_seconds
    peak = target.chip.peak_flops(experiment.policy.compute_dtype)
    mfu = None
    if experiment.task.flops_per_step and peak:
        mfu = experiment.task.flops_per_step / (prediction.step_seconds * target.size * peak)
    unknown = estimated.cost.unknown
    note = unknown_note(unknown) if unknown else None
    layout = dataclasses.replace(layout, mesh=mesh)
    flags, needed = layout.flags(estimator.asked), estimated.peak_bytes
    return Row(layout, flags, needed, prediction, estimated.bubble, mfu, rate, note=note)
