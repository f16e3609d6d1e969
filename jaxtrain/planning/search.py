"""Which mesh: enumerates layouts of an experiment on a target, and says why the others lost.

A layout is a mesh (data, fsdp, tensor, pipe, context, expert), a number of microbatches, which
rematerialisation, when weights are gathered (layer by layer, or once per step), whether the
residual stream is split over tensor, a pipeline's schedule and chunks, and which axes cross the
slow network between slices or hosts (``dcn_data``, ``dcn_fsdp``, ``dcn_pipe``). All that divide the
target's devices are looked at:

1. what the library itself refuses, or would put tensor or context across hosts, or holds more
   state than the memory, with weights that are gathered once, is rejected by shapes alone; so is a
   pipeline that waits so long for its stages that the best takes less;
2. the others are walked (:mod:`.estimate`): for either way to gather and each schedule, with the
   fewest microbatches that fit (a pipeline: the most), and with as little rematerialisation as
   fits; the stream is whole in those alone that fit where it is split. Of the ways to cross the
   slow network, which change nothing but the price of its traffic, the fastest is taken;
3. those that fit are ranked by their predicted step time, and the best few are compiled by the
   target's own compiler, whose memory stands beside the estimate.

Meshes with little tensor, context and pipe come first, so that a search which runs out of its time
(or is interrupted) has seen those that are most often best. Of its time, a third is for walking and
the rest for compiling, if it compiles. Rejected layouts are told by family: how many, why, and one.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
from rich.console import Console

from jaxtrain.experiment import Experiment
from jaxtrain.host.signals import SignalWatch
from jaxtrain.layout import Layout
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.candidates import make_candidates, make_meshes, name_of, parts_of
from jaxtrain.planning.fitting import Estimator, Reason, Rejections, refuse_mesh, walk_schedules
from jaxtrain.planning.ranking import Row, SearchResult, cost, print_search, rank
from jaxtrain.planning.targets import Target

# Where nobody says how many layouts to compile, none is begun after so many seconds of compiling.
COMPILE_SECONDS = 45.0
# The part of a search's time after which no further mesh is walked, if it compiles. The compiler of
# TPUs takes a minute for any decoder, however few its layers: most of it goes into machine code,
# fusion by fusion.
WALKING = 1 / 3


def search(
    build: Callable[[Any], Experiment],
    config: Any,
    target: Target,
    *,
    compile_best: int | None = None,
    seconds: float = math.inf,
    typed: Collection[str] = (),
    progress: Callable[[str], None] = lambda line: None,
    watch: Callable[[Callable[[], SearchResult]], None] = lambda so_far: None,
) -> SearchResult:
    """Ranks the layouts of an experiment on a target. Raises ValueError for a config without a
    mesh, a chip without published peaks, or a compiler that is not installed.

    Args:
      build: ``config -> Experiment``, called once per layout: an outline that reads no data.
      config: the experiment's, a kind of :class:`jaxtrain.Config`. Varied are its layout's mesh,
        ``accumulate``, ``pipeline.microbatches``, ``pipeline.remat`` and ``remat``, ``gather`` and
        ``sequence_parallel`` where they are left to the framework, and ``pipeline.schedule`` and
        ``pipeline.virtual`` where they have their defaults; all else (global batch, precision,
        optimizer, zero) stays.
      target: what to run on. Its compiler is needed unless ``compile_best`` is 0.
      compile_best: how many layouts to compile, the fastest by prediction first; None compiles as
        many as :data:`COMPILE_SECONDS` hold, and at least one.
      seconds: of the whole search. After :data:`WALKING` of them, as soon as some layout fits, no
        further mesh is looked at; after all of them the compiler is no longer waited for.
      typed: fields that flags have set: ``pipeline.schedule`` or ``pipeline.virtual`` stay.
      progress: called with a line of text now and then.
      watch: called once at the start with a function that any thread may ask for what was found so
        far.
    """
    if not isinstance(getattr(config, "layout", None), Layout):
        raise ValueError(
            "there is nothing to search: the experiment's Config has no layout, as a kind of "
            "jaxtrain.Config has"
        )
    if target.chip.hbm_bytes_per_s is None:
        raise ValueError(
            f"target {target} has no published peaks to rank layouts by: give a TPU or GPU target"
        )
    if (given := parts_of(config.layout.mesh)) and math.prod(given.values()) != target.islands:
        what = "slices" if target.chip.kind == "tpu" else "hosts"
        raise ValueError(
            f"{' x '.join(given)} is {math.prod(given.values())} and the target has "
            f"{target.islands} {what}: give parts that multiply to that, or leave them out, and "
            "the search chooses"
        )
    start = time.perf_counter()
    if compile_best != 0:
        # What is not installed is better known now than in a minute.
        target.devices()
    walking = seconds if compile_best == 0 else WALKING * seconds
    rejections, estimator = Rejections(), Estimator(build, config, target, typed=typed)
    rows: list[Row] = []

    def found(complete: bool) -> SearchResult:
        ranked, rejected = rank(rows), copy.deepcopy(rejections)
        considered = len(rows) + rejections.count
        shown = [row for row in ranked if row.compile_s is not None]
        shown = shown or ranked[: max(1, 5 if compile_best is None else compile_best)]
        # What is not compiled has no schedule: estimates are compared with estimates.
        best = min((row.prediction.step_seconds for row in ranked if row.fits), default=0.0)
        for row in ranked:
            if row not in shown:
                slower = row.prediction.step_seconds / best
                unit = f"x the best's time: bound by {row.prediction.bound}"
                rejected.add(Reason("fits, and takes", slower, unit), [row.layout])
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
    stages = estimator.alone.task.made_of_stages
    meshes = list(make_meshes(target.size, stages=stages, experts=estimator.has_experts))
    meshes.sort(key=lambda mesh: mesh.tensor * mesh.context * mesh.pipe**2)
    open_ways = {"gathers": estimator.gathers, "schedules": estimator.schedules, "stages": stages}
    for i, mesh in enumerate(meshes):
        best = min((row.prediction.step_seconds for row in rows), default=math.inf)
        progress(
            f"mesh {i + 1} of {len(meshes)}: {name_of(mesh)}"
            + (f"; {len(rows)} fit, the best takes {1000 * best:,.0f} ms" if rows else "")
        )
        layouts = list(make_candidates(config, mesh, **open_ways))
        if rows and time.perf_counter() - start > walking:
            reason = Reason(f"not looked at: {walking:.0f} s were over (of --search-seconds)")
            rejections.add(reason, layouts)
            continue
        if reason := refuse_mesh(estimator, layouts[0]):
            rejections.add(reason, layouts)
            continue
        rows += walk_schedules(estimator, layouts, rejections, best=best)
    rows.sort(key=lambda row: row.prediction.step_seconds)
    in_time = compile_rows(estimator, rows, compile_best, progress, deadline=start + seconds)
    return found(complete=in_time)


def compile_rows(
    estimator: Estimator,
    rows: list[Row],
    count: int | None,
    progress: Callable[[str], None],
    *,
    deadline: float = math.inf,
) -> bool:
    """Compiles the first rows, in their place, until ``count`` of them fit or time is over.

    The rows are sorted, the fastest by prediction first. A ``count`` of None compiles as many as
    :data:`COMPILE_SECONDS` hold, and at least one. The compiler, which nothing can stop, runs on
    after the ``deadline`` (by ``time.perf_counter()``), and its row says that it has no answer.
    Returns whether that was before the deadline.
    """
    good = bad = 0
    start = time.perf_counter()
    for i, row in enumerate(rows):
        late = count is None and time.perf_counter() - start > COMPILE_SECONDS
        if good == count or (late and good) or bad > (count or 5):
            return True
        name = name_of(row.layout.mesh)
        progress(f"compiling {name}, the {i + 1}. of {len(rows)} that fit")
        try:
            rows[i] = run_with_timeout(deadline - time.perf_counter(), compile_row, estimator, row)
        except TimeoutError:
            note = f"{name} was not compiled: the search's time was over (--search-seconds)"
            rows[i] = dataclasses.replace(row, note="; ".join(filter(None, (note, row.note))))
            progress(note)
            return False
        good, bad = good + rows[i].fits, bad + (not rows[i].fits)
    return True


def run_with_timeout(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a thread, and leaves it to itself after so many seconds. Raises
    TimeoutError where it has not returned by then."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout=None if math.isinf(seconds) else max(0.0, seconds))


def compile_row(estimator: Estimator, row: Row) -> Row:
    """Asks the compiler about a layout."""
    start = time.perf_counter()
    plan = problem = None
    try:
        plan = plan_experiment(estimator.outline(row.layout)[0], estimator.target)
        if not plan.fits:
            problem = "does not fit, says the compiler"
    except jax.errors.JaxRuntimeError as error:
        problem = str(error).splitlines()[0]
    seconds = time.perf_counter() - start
    note = next(iter(plan.notes), row.note) if plan else row.note
    found = dataclasses.replace(row, plan=plan, compile_s=seconds, problem=problem, note=note)
    rate = row.prediction.step_seconds / found.time.step_seconds
    mfu = row.mfu if row.mfu is None else rate * row.mfu
    return dataclasses.replace(found, mfu=mfu, tokens_per_s=rate * row.tokens_per_s)


def run_search(
    build: Callable[[Any], Experiment],
    config: Any,
    target: Target,
    *,
    compile_best: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    as_json: bool = False,
    **given: Any,
) -> SearchResult:
    """Searches with progress on standard error, and prints the result, ``as_json`` or as tables.

    A SIGTERM or SIGINT prints what was found so far and ends the process with 128 + its number. The
    other arguments are those of :func:`search` and :func:`cost`.
    """
    errors = Console(stderr=True, highlight=False)
    so_far: list[Callable[[], SearchResult]] = []
    asked = {"tokens": tokens, "price": price}

    def show(result: SearchResult) -> None:
        if as_json:
            print(json.dumps(result.to_json() | {"cost": cost(result, **asked)}, default=str))
        else:
            print_search(result, **asked)

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
            **given,
            progress=status.update if live else errors.print,
            watch=so_far.append,
        )
    show(result)
    if not result.complete:
        sys.stdout.flush()
        os._exit(0)  # the compiler that was not waited for would not let the process end
    return result
