"""Which layouts of a mesh fit, and how long they would take: estimated, without a compiler."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxtrain.engines.reduction import kept_by_gathering
from jaxtrain.experiment import Experiment, why_not_once
from jaxtrain.planning.ahead_of_time import unknown_note
from jaxtrain.planning.candidates import (
    AXES,
    Candidate,
    make_placements,
    open_schedules,
    with_candidate,
    within_one_network,
)
from jaxtrain.planning.estimate import Estimate, abstract_state, estimate, placed, predict, trace
from jaxtrain.planning.ranking import Family, Row
from jaxtrain.planning.targets import Target
from jaxtrain.state import TrainState, gradient_shardings, local_bytes


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
        # Where a mesh crosses the slow network changes nothing but the price.
        self.build, self.config, self.target = build, within_one_network(config), target
        self.placements = functools.partial(make_placements, config, target=target)
        self.schedules = open_schedules(config, typed)
        self.where = {"devices": target.size, "kind": target.chip.kind}
        self.states: dict[str, TrainState] = {}
        self.traces: dict[str, Any] = {}
        self.least_compute = math.inf  # of what has no pipeline

    @functools.cached_property
    def alone(self) -> Experiment:
        """The experiment on one device."""
        return self.build(with_candidate(self.config, Candidate(dict.fromkeys(AXES, 1))))

    @property
    def stages(self) -> bool:
        """Whether its model is made of stages."""
        return self.alone.stages is not None and self.alone.loss_fn is None

    @property
    def gathers(self) -> tuple[str, ...]:
        """When weights may be gathered; none where the flags say it, or there is no choice."""
        if self.config.layout.gather is not None:
            return ()
        possible = self.alone.gather == "model" and why_not_once(self.alone) is None
        return ("layer", "step") if possible else ()

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
        """Bounds a step's seconds from below, by the time its pipeline waits; 0 where unknown."""
        stages, options = candidate.mesh.get("pipe", 1), self.config.layout.pipeline
        if stages == 1 or math.isinf(self.least_compute):
            return 0.0
        units = candidate.microbatches * (candidate.virtual or options.virtual)
        return self.least_compute * (units + stages - 1) / units

    def kept_bytes(self, candidate: Candidate) -> int:
        """Bytes of the state, and of what is kept of weights that are gathered once per step."""
        experiment, state = self.outline(candidate)
        shardings = gradient_shardings(state, zero=experiment.layout.zero)
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
        if self.config.layout.zero or not both or shards < 4 or shards % 2:
            return candidate
        mesh = dict(candidate.mesh) | {"data": shards // 2, "fsdp": 2}
        return dataclasses.replace(candidate, mesh=mesh)


class Rejections:
    """Counts rejected layouts by reason. ``#`` in a reason stands for a number that varies."""

    def __init__(self):
        self.found: dict[str, tuple[int, str, list[float]]] = {}

    @property
    def count(self) -> int:
        """Number of rejected layouts in all."""
        return sum(count for count, *_ in self.found.values())

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
    where = "slices" if target.chip.kind == "tpu" else "hosts"
    if tensor > island or (tensor > 1 and island % tensor):
        return f"the tensor axis would cross {where} (of {island} devices)"
    if not estimator.placements(mesh):
        return f"data, fsdp and pipe do not divide over {target.islands} {where}"
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1)
    rows = getattr(config, "global_batch", None)
    if rows is not None and rows % (shards * mesh.get("pipe", 1)):
        return "the global batch does not divide over data x fsdp (x pipe, for its microbatches)"
    stages = mesh.get("pipe", 1)
    first = Candidate(mesh)
    if stages > 1:
        schedule, virtual = estimator.schedules[0]
        first = Candidate(mesh, stages, stage_remat="full", schedule=schedule, virtual=virtual)
    try:
        state = local_bytes(estimator.outline(first)[1])
    except ValueError as error:
        return f"does not divide: {family_of(str(error))}"
    if target.chip.memory_bytes is not None and state > target.chip.memory_bytes:
        times = state / target.chip.memory_bytes
        rough = f"{times:.1f}" if times < 10 else f"{times:.0f}"
        return f"parameters and optimizer state alone are {rough} x the memory"
    return None


def walk_schedules(
    estimator: "Estimator",
    candidates: Sequence[Candidate],
    target: Target,
    rejections: Rejections,
    *,
    best: float = math.inf,
) -> list[Row]:
    """Estimates the layouts of one mesh (:func:`walk_mesh`), schedule by schedule of a pipeline.

    A schedule whose stages wait for so long that it takes more than ``best`` seconds is left out.
    Once something fits, other schedules are tried of what is fastest so far.
    """
    rows: list[Row] = []
    for schedule in dict.fromkeys((c.schedule, c.virtual) for c in candidates):
        ways = [c for c in candidates if (c.schedule, c.virtual) == schedule]
        tried = ways
        if (least := estimator.least_seconds(ways[-1])) > best:
            reason = "waits in its pipeline: takes at least # x the best's time"
            rejections.add(reason, ways[0].mesh_name, len(ways), least / best)
            continue
        try:
            estimator.outline(ways[0])
        except ValueError as error:  # more chunks than layers
            reason = f"does not divide: {family_of(str(error))}"
            rejections.add(reason, ways[0].mesh_name, len(ways))
            continue
        if rows:
            fastest = min(rows, key=lambda row: row.prediction.step_seconds).candidate
            tried = [c for c in ways if _but_for_schedule(c) == _but_for_schedule(fastest)]
        if others := len(ways) - len(tried):
            reason = "another schedule, of what is slower than the best of its mesh"
            rejections.add(reason, ways[0].mesh_name, others)
        rows += walk_mesh(estimator, tried, target, rejections)
    return rows


def _but_for_schedule(candidate: Candidate) -> tuple:
    return candidate.gather, candidate.remat, candidate.stage_remat, candidate.microbatches


def walk_mesh(
    estimator: "Estimator", candidates: Sequence[Candidate], target: Target, rejections: Rejections
) -> list[Row]:
    """Estimates the layouts of one mesh, and of a pipeline one schedule, as far as is needed.

    More microbatches than the fewest that fit only repeat the traffic of weights, so they are not
    walked (a pipeline has a smaller bubble with more: its largest number is). With as many
    microbatches, rematerialisation is only walked where less of it does not fit. All of that is
    done for each way to gather weights. The stream is whole over tensor only in what fits split.

    Returns:
      Those that fit.
    """
    limit = target.chip.memory_bytes or math.inf
    placements = estimator.placements(candidates[0].mesh)
    to_row = functools.partial(
        make_row, target=target, placements=placements, rejections=rejections
    )
    rows: list[Row] = []
    for gather in dict.fromkeys(c.gather for c in candidates):
        ways = [c for c in candidates if c.gather == gather]
        split = [c for c in ways if c.sequence_parallel is not False]
        if gather == "step" and (times := estimator.kept_bytes(split[0]) / limit) > 1:
            reason = "the state and weights gathered once per step are # x the memory"
            rejections.add(reason, split[0].mesh_name, len(ways), times)
            continue
        fitting = _walk_microbatches(estimator, split, limit, rejections, to_row)
        halves = [
            dataclasses.replace(row.candidate, mesh=ways[0].mesh, sequence_parallel=False)
            for row in fitting
        ]
        whole = [c for c in ways if c.sequence_parallel is False]
        rows += fitting
        for candidate in whole:
            if candidate not in halves:
                reason = "a whole residual stream, where a split one was not walked or does not fit"
                rejections.add(reason, candidate.mesh_name)
                continue
            experiment, estimated = estimator(candidate)
            if estimated.peak_bytes <= limit:
                rows.append(to_row(candidate, experiment, estimated))
            else:
                times = estimated.peak_bytes / limit
                reason = "needs # x the memory with activations"
                rejections.add(reason, candidate.mesh_name, 1, times)
    return rows


def _walk_microbatches(
    estimator: "Estimator",
    candidates: Sequence[Candidate],
    limit: float,
    rejections: Rejections,
    to_row: Callable[[Candidate, Experiment, Estimate], Row],
) -> list[Row]:
    """The part of :func:`walk_mesh` for one way to gather weights."""
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
                rows.append(to_row(candidate, experiment, estimated))
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
    candidate: Candidate,
    experiment: Experiment,
    estimated: Estimate,
    *,
    target: Target,
    placements: Sequence[Mapping[str, int]],
    rejections: Rejections,
) -> Row:
    """The row of a layout that fits, in the placement that crosses the slow network best; the
    others are counted among the rejections."""
    priced = [(predict(placed(estimated, parts), target), parts) for parts in placements]
    # Of equal ones the one that takes less if nothing is hidden.
    prediction, parts = min(priced, key=lambda x: (x[0].step_seconds, x[0].step_seconds_apart))
    for other, _ in (x for x in priced if x[1] is not parts):
        reason = "crosses the slow network along other axes, and takes # x the time of the best way"
        times = other.step_seconds / prediction.step_seconds
        rejections.add(reason, candidate.mesh_name, 1, times)
    rate = experiment.items_per_step / prediction.step_seconds
    peak = target.chip.peak_flops(experiment.policy.compute_dtype)
    mfu = None
    if experiment.flops_per_step and peak:
        mfu = experiment.flops_per_step / (prediction.step_seconds * target.size * peak)
    unknown = estimated.cost.unknown
    note = unknown_note(unknown) if unknown else None
    candidate = dataclasses.replace(candidate, mesh={**candidate.mesh, **parts})
    return Row(candidate, estimated.peak_bytes, prediction, estimated.bubble, mfu, rate, note=note)


def family_of(sentence: str) -> str:
    """A refusal's first clause, with the numbers that vary from layout to layout left out.

    >>> family_of("--mesh.tensor 64 does not divide 32 heads: use a divisor")
    '--mesh.tensor does not divide 32 heads'
    """
    clause = sentence.split(": use ")[0].split("; use ")[0]
    clause = re.sub(r"(--mesh\.\w+) \d+", r"\1", clause)
    clause = re.sub(r"(mesh ax[ei]s '[\w ]+') of size \d+", r"\1", clause)
    return re.sub(r"(of size|be cut into \w+=|over|into) \d+", r"\1 some", clause)
