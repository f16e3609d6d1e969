"""The loop, and the run around it: state, compiled step, checkpoints, logs, evaluation.

:func:`train_loop` is the bare loop for people with a program of their own. :func:`fit` takes an
:class:`~jaxtrain.experiment.Experiment` and does what a run needs around that loop.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from jaxtrain import build
from jaxtrain.experiment import Experiment, Metadata
from jaxtrain.host import distributed, hosts_memory, output, readings, storage
from jaxtrain.host.chips import chip_of
from jaxtrain.host.exit_codes import ALERTED, DIVERGED, DONE, PREEMPTED
from jaxtrain.host.paths import check_shared, exists
from jaxtrain.optim import averaged
from jaxtrain.optim.accumulation import calls_waiting
from jaxtrain.planning.comparison import compare_with_run, predict_run
from jaxtrain.run import folder, provenance
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.context import Run
from jaxtrain.run.hook import Ending, Hook, Value, as_value
from jaxtrain.run.hooks.early_stopping import EarlyStopping
from jaxtrain.run.hooks.evaluation import Evaluation, Interrupted, check_best_metric
from jaxtrain.run.hooks.logging import Logging
from jaxtrain.run.hooks.profiling import Profiling
from jaxtrain.run.hooks.saving import LAST_SAVE_SECONDS, STOPPED_SAVE_SECONDS, Saving
from jaxtrain.run.hooks.skips import ConsecutiveSkips
from jaxtrain.run.hooks.snapshots import Snapshots, newest_snapshot
from jaxtrain.run.hooks.stopping import ending, stopped_before
from jaxtrain.run.observe import terminal, throughput, trackers
from jaxtrain.run.observe.alerts import Alerts, webhook
from jaxtrain.run.observe.journal import FORECAST, Journal
from jaxtrain.run.observe.metric import Metric
from jaxtrain.run.observe.owned_log import OwnedLog
from jaxtrain.run.observe.sampling import Sampling
from jaxtrain.run.observe.summary import header_facts, print_conclusion
from jaxtrain.run.observe.writers import Fanout, Writer, make_writers
from jaxtrain.run.options import RunOptions
from jaxtrain.run.receipts import Receipts
from jaxtrain.run.survive.diagnosis import make_diverged
from jaxtrain.run.survive.peer_group import PeerGroup, open_peer_group
from jaxtrain.run.survive.preemption import Preempted, ending_at_sigterm, stopping_at_signals
from jaxtrain.run.survive.stragglers import Stragglers
from jaxtrain.run.survive.watchdog import Watchdog
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree


def train_loop(
    train: Callable[[TrainState, PyTree], tuple[TrainState, Mapping[str, jax.Array]]],
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int,
    steps_per_call: int = 1,
    hooks: Sequence[Hook] = (),
    ends: Callable[[int], Any] | None = None,
) -> TrainState:
    """Runs ``train`` until ``steps`` steps are done, counted from the state's own step, or a hook
    stops it.

    Call n is dispatched before the metrics of call n-1 are read, so that the devices never wait for
    the host, and the host is never more than one call ahead.

    Args:
      train: a compiled train step; with ``steps_per_call`` above 1, one that takes a list of
        batches and returns metrics with a leading axis (:func:`jaxtrain.scan_steps`).
      state: the state to start from; donated.
      batches: the batches of the remaining steps, in order.
      steps: the step to stop at.
      steps_per_call: steps in one call of ``train``. Calls end at its multiples and at ``steps``,
        so the first and the last of them may be shorter.
      hooks: called in order, around every step.
      ends: asked after every hook's ``on_step``; the loop ends with a step of which it says
        something true. By default what any hook's ``stops`` says.

    Returns:
      The last state.

    Raises:
      ValueError: where the batches end before ``steps``, when the hooks have had all metrics.
    """
    pending: tuple[range, Mapping[str, jax.Array]] | None = None

    def read() -> None:
        if pending is None:
            return
        numbers, metrics = pending
        metrics = jax.device_get(metrics)
        for i, number in enumerate(numbers):
            values = {
                name: as_value(value if steps_per_call == 1 else value[i])
                for name, value in metrics.items()
            }
            for hook in hooks:
                hook.on_metrics(number, values)

    ends = ends or (lambda step: any([hook.stops(step) for hook in hooks]))
    done, batches = int(state.step), iter(batches)
    while done < steps:
        numbers = range(done + 1, build.call_end(done, steps, steps_per_call) + 1)
        given = list(itertools.islice(batches, len(numbers)))
        if len(given) < len(numbers):
            read()
            raise ValueError(
                f"the batches ended after {done + len(given)} steps and `steps` is {steps}: give a "
                "batch for every step, or fewer steps"
            )
        with jax.profiler.StepTraceAnnotation("train", step_num=numbers[-1]):
            state, metrics = train(state, given[0] if steps_per_call == 1 else given)
        read()
        pending = (numbers, metrics)
        done = numbers[-1]
        for hook in hooks:
            hook.on_step(done, state)
        if ends(done):
            break
    read()
    return state


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint of a run: its step, the numbers of its evaluation, and its state.

    ``restore()`` reads the state onto the run's mesh, beside the last one; all processes call it.
    """

    step: int
    evaluation: dict[str, float]
    restore: Callable[[], TrainState] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Results of a run: the last state, its evaluation, and the folder with everything else.

    ``stopped`` is the reason if a hook or an alert stopped the run before its last step, ``best``
    the best of the kept checkpoints, if any has an evaluation, and ``code`` the exit code of a
    program: ``ALERTED`` if an alert stopped the run, else 0.
    """

    state: TrainState
    evaluation: dict[str, Value]
    run_dir: str
    stopped: str | None = None
    best: Best | None = None
    code: int = DONE

    def __repr__(self) -> str:
        numbers = {name: x for name, x in self.evaluation.items() if not np.ndim(x)}
        parts = [f"run_dir={self.run_dir!r}", repr(self.state), f"evaluation={numbers}"]
        parts += [f"stopped={self.stopped!r}"] if self.stopped else []
        parts += [repr(self.best)] if self.best else []
        return f"FitResult({', '.join(parts)})"


def fit(
    experiment: Experiment,
    options: RunOptions | None = None,
    *,
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
    began: float | None = None,
) -> FitResult:
    """Trains an experiment, with a header, a progress line, logs, checkpoints and evaluation.

    Where a hook's ``stops`` says so, the run ends on purpose: it is evaluated, saved and concluded
    as a complete one is. Resuming it trains no further, unless ``options.accept_changes`` has
    ``"stopped"``.

    Args:
      experiment: what to train.
      options: where, and how often to report.
      hooks: of your own (:class:`jaxtrain.Hook`); each is called in every process, after the
        built-in ones. What a hook raises ends the run, in all processes.
      writers: of your own, with ``write(step, values)`` and ``close()``
        (:class:`jaxtrain.run.observe.writers.Writer`). The first process alone writes; all close
        theirs, however the run ends.
      began: when this attempt began, in seconds since 1970, for the account of its time; None for
        now.

    Raises:
      ValueError: for a mesh, batch or checkpoint that does not fit, and a run to resume that had
        other flags or data, before anything is compiled.
      FileExistsError: where ``run_dir`` holds another run, or something else.
      Superseded: another start has taken over the run's folder; uncaught, it is the exit code.
      FileNotFoundError: where there is nothing to resume.
      Preempted: after a signal, with the state saved; uncaught, it is the process's exit code.
      Diverged: after too many skipped steps in a row, with the state saved.
      StorageError: a disk or bucket went on failing; the same command may go on later.

    A lost process and a hang end the process from another thread, with the codes of
    :mod:`jaxtrain.host.exit_codes`.
    """
    options = options or RunOptions()
    _check_plugs(hooks, writers)
    calls = experiment.layout.steps_per_call
    if options.eval_epochs:
        if (epoch := experiment.data.steps_per_epoch) is None:
            raise ValueError(
                f"`eval_epochs` is {options.eval_epochs}, and how many rows an epoch has is not "
                "known: give `eval_every`"
            )
        every = calls * math.ceil(options.eval_epochs * float(epoch) / calls)
        options = dataclasses.replace(options, eval_every=every, eval_epochs=0.0)
    for name in ("eval_every", "save_every", "memory_every"):
        if (every := getattr(options, name)) % calls:
            raise ValueError(
                f"`{name}` is {every} and `steps_per_call` {calls}: a state is there between calls "
                f"only, so give a multiple of {calls}"
            )
    if (metric := options.best_metric) is not None:
        experiment = experiment.with_(best_metric=metric, best_mode=options.best_mode)
    if options.profiled and options.profiled[0] > (steps := experiment.steps):
        profiled = f"`profile_steps` is {options.profile_steps!r}"
        raise ValueError(f"{profiled}, the run has {steps} steps: give some of those")
    webhook()
    trackers.check_installed(trackers.parse(options.trackers))
    for name in ("early_stop_patience", "best_metric"):
        if (value := getattr(options, name)) and not experiment.data.eval_sets:
            raise ValueError(
                f"`{name}` is {value} and experiment {experiment.name!r} has no eval_batches: "
                "there is nothing to go by"
            )
    with output.lasting(), Journal(began) as journal:
        return _fit(experiment, options, hooks, writers, journal)


def _fit(
    experiment: Experiment,
    options: RunOptions,
    hooks: Sequence[Hook],
    writers: Sequence[Writer],
    journal: Journal,
) -> FitResult:
    """:func:`fit`, with a journal that is closed however it ends."""
    # A process that stopped without the others would leave them waiting.
    handle_signals = options.handle_signals and (options.watch_peers or jax.process_count() == 1)
    ledger = journal.ledger
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.close)
        # Before anything that takes long, as what comes before the loop does for a large model.
        stack.enter_context(ending_at_sigterm(handle_signals=handle_signals))
        peers = stack.enter_context(open_peer_group(connect=options.watch_peers))
        if options.memory_every:
            hosts_memory.connect()
        mesh = build.make_experiment_mesh(experiment)
        journal.costs |= _costs(mesh, peers, options.price)
        abstract = build.make_abstract_state(experiment, mesh)
        if (hosts := distributed.elastic_hosts()) is not None:
            experiment = build.on_hosts(experiment, abstract, mesh, *hosts)
            journal.costs["hosts"] = hosts[0]
        if options.best_metric is not None:
            check_best_metric(experiment, abstract, mesh)
        record = json.loads(json.dumps(provenance.make_record(experiment, mesh)))
        experiment = experiment.with_(config=record)
        name, metadata = experiment.name, experiment.metadata
        run_dir, resume = folder.find_run_dir(
            name,
            options.run_dir,
            resume=options.resume,
            auto_resume=options.auto_resume,
            overwrite=options.overwrite,
        )
        if not resume:
            connect = functools.partial(trackers.connect, trackers.parse(options.trackers))
            distributed.from_first_process(connect)
        claim = functools.partial(
            folder.lock_run_dir,
            run_dir,
            name=name if options.run_dir is None else None,
            resumes=resume,
            overwrite=options.overwrite,
            files=metadata.files,
        )
        checkpoints = _open_checkpoints(metadata, options, run_dir)
        # Once, for the check of what has changed and for the restoration.
        saved = resume and folder.has_checkpoint(run_dir / folder.CHECKPOINTS)
        changes, owner, state = [], None, None
        if resume:
            changes = _changes(experiment, abstract, checkpoints, run_dir, options, saved)
            # Before it is read: an earlier attempt that still runs must not save in between.
            owner = claim()
            journal.open(owner)
            if options.memory_every:
                newest = checkpoints.latest_step() if saved else None
                read = functools.partial(_restored, experiment, abstract)
                state = newest_snapshot(journal, read, newer_than=newest)
        if resume and not saved and state is None:
            _check_unsaved(run_dir, journal)
        if saved and state is None:
            with ledger.phase("restore"):
                state = _restored(experiment, abstract, checkpoints)
        elif state is None:
            state = build.make_state(experiment, mesh)
        start = int(state.step)
        go_on = bool({"stopped", "all"} & set(options.accept_changes))
        stopped = stopped_before(run_dir, start, go_on=go_on) if resume else None
        if stopped is not None:
            experiment = experiment.with_(steps=start)
        compiling = terminal.waiting("compiling the train step", expected=journal.compile_seconds)
        with ledger.phase("compile"), compiling:
            train, programs = build.compile_loop(experiment, state, mesh, start, experiment.steps)
        if owner is None:  # Only now: whatever has been refused so far has left an older run alone.
            owner = claim()
            journal.open(owner)
        if owner.path != run_dir:  # Another start has taken the number that was free.
            run_dir = owner.path
            checkpoints = _open_checkpoints(metadata, options, run_dir)
        stack.enter_context(checkpoints)
        header = header_facts(experiment, mesh, state, programs)
        terminal.print_header(f"jaxtrain: {name}", header)
        predicted = predict_run(programs, experiment)
        journal.ready(start, header, predicted.memory, name)
        texts = {folder.CONFIG: json.dumps(metadata.config, indent=2) + "\n"}
        for file, text in (texts | dict(metadata.files)).items():
            write = functools.partial(_write_file, run_dir / file, text, keep=resume)
            storage.retrying(write, f"the file {run_dir / file}")
        check_shared(run_dir / folder.CONFIG)
        provenance.note_changes(run_dir, changes, metadata.config, from_step=start)
        if (marks := experiment.data.watermarks) is not None:
            marks.keep(run_dir / folder.WATERMARKS, owner.taken_by)
        run = stack.enter_context(
            _opened(experiment, options, mesh, owner, peers, writers, journal, start, resume)
        )
        for hook in hooks:  # It may be a frozen dataclass.
            object.__setattr__(hook, "_log_of_run", run.log)
            stack.callback(object.__setattr__, hook, "_log_of_run", None)
        stack.enter_context(storage.restartable())
        stack.enter_context(stopping_at_signals(peers, handle_signals=handle_signals))
        noted = (owner.path, experiment.stack, metadata.config, run.progress.note)
        receipts = Receipts(*noted) if options.receipt else None
        saving, early = Saving(run, checkpoints, receipts), EarlyStopping(run)
        snapshots = [stack.enter_context(Snapshots(run, start))] if options.memory_every else []
        evaluation, end = Evaluation(run, experiment, [saving, early, *hooks]), None
        if resume:
            is_there = start in checkpoints.steps()
            evaluation.recall(start, ranked=not is_there or bool(checkpoints.metrics(start)))
        if start < run.steps:
            if receipts is not None:
                receipts.begin(start, state)
            early.recall(start)
            # What was read two calls ago may have been the reason of an end that never came.
            awaited = start + 1 - 2 * run.steps_per_call
            run.alerts.recall(start, acts_from=math.inf if go_on else awaited)
            if evaluation.awaits(start):
                evaluation.on_step(start, state)
                if start == evaluation.latest[0] > 0:
                    saving.save(start, state)
            end = None if go_on else early.ending(start)  # It was killed before it could say so.
            if evaluation.awaits(start):  # A signal came again: it is for the next attempt.
                end = Ending(PREEMPTED, start)
        if start < run.steps and end is None:
            lies = build.stream_shardings(experiment, mesh)
            batches = stack.enter_context(experiment.train_batches(start, lies))
            built_in = [evaluation, saving, *snapshots]
            if receipts is not None:
                batches, built_in = receipts.watched(batches), [receipts, *built_in]
            state, end = _train(run, train, state, batches, built_in, hooks, early)
        means = _finish(run, state, end, evaluation, saving)
        end = end or stopped or Ending(DONE, int(state.step))
        stopped, lines = end.reason, []
        concluded, best = (averaged(state), means), _best(experiment, abstract, checkpoints)
        if stopped:
            lines.append(f"stopped      after step {int(state.step)}: {stopped}")
        if best and (stopped or options.saves_best):
            value = best.evaluation[metadata.best_metric]
            path = checkpoints.directory / str(best.step)
            lines.append(f"best saved   {path}, eval/{metadata.best_metric} {value:.4f}")
            if options.saves_best and best.step != int(state.step):
                run.progress.note(f"what is concluded is of checkpoint {best.step}, the best")
                with ledger.phase("restore"):
                    found = build.restore_evaluated(experiment, abstract, checkpoints, best.step)
                concluded = dataclasses.replace(found, step=best.step), best.evaluation
    if int(state.step) == experiment.steps and (waiting := calls_waiting(state.opt_state)):
        lines.append(f"accumulated  the last {waiting:,} steps are part of no update")
    if compared := compare_with_run(predicted, mesh, run.rate.seconds_per_step):
        terminal.print_lines(compared)
        journal.event(FORECAST, lines=compared)
    print_conclusion(experiment, *concluded, str(run_dir), journal)
    terminal.print_lines(lines)
    return FitResult(state, means, str(run_dir), stopped, best, end.code)


@contextlib.contextmanager
def _opened(
    experiment: Experiment,
    options: RunOptions,
    mesh: Mesh,
    owner: folder.RunLock,
    peers: PeerGroup,
    writers: Sequence[Writer],
    journal: Journal,
    start: int,
    resume: bool,
) -> Iterator[Run]:
    """Opens the logs, the line of progress and the watchdog of a run."""
    owner.check()  # Another start may have begun its logs while this one compiled.
    # Resumed before its first checkpoint, a run evaluates its step 0 again.
    resume_step = (start or -1) if resume else None
    folder_logs = make_writers(owner.path, resume_step=resume_step, stamp=journal.stamp)
    data, config, steps = experiment.data, experiment.metadata.config, experiment.steps
    flops, dtype = experiment.task.flops_per_step, experiment.policy.compute_dtype
    rate = throughput.Throughput(data.items_per_step)
    journal.step_times = rate.times
    process = jax.process_index()
    about = trackers.About(
        experiment=experiment.name,
        name=owner.path.name,
        identity=journal.identity,
        config=provenance.flatten(config.get("flags", config)),
        run_dir=owner.path,
        resume_step=resume_step,
    )
    asked = trackers.parse(options.trackers) if process == 0 else {}
    with (
        trackers.opened(asked, about, journal) as tracking,
        contextlib.closing(OwnedLog(folder_logs, owner, peers)) as owned_log,
        Watchdog(60 * options.hang_minutes, run_dir=owner.path, process=process) as watchdog,
        terminal.Progress(
            steps, start=start, item=data.item, steps_per_epoch=data.steps_per_epoch
        ) as progress,
        Alerts(
            options.alert_rules if process == 0 else {},
            journal=journal,
            note=progress.note,
            stop=peers.want_stop,
            idle=watchdog.idle,
            run_dir=owner.path,
            webhook=webhook(),
        ) as alerts,
        Sampling(
            lambda: readings.sources(jax.local_devices(), disk_before=journal.disk_before),
            seconds=options.sample_seconds,
            peers=peers,
        ) as sampling,
    ):
        yield Run(
            data=data,
            metadata=experiment.metadata,
            steps=steps,
            steps_per_call=experiment.layout.steps_per_call,
            stack=experiment.stack,
            mfu=lambda seconds: throughput.mfu(flops, seconds, mesh.devices.flat, dtype=dtype),
            options=options,
            mesh=mesh,
            owner=owner,
            peers=peers,
            watchdog=watchdog,
            log=Fanout([owned_log, alerts, *tracking, *(writers if process == 0 else ())]),
            journal=journal,
            alerts=alerts,
            progress=progress,
            rate=rate,
            sampling=sampling,
        )


def _train(
    run: Run,
    train: Callable[..., Any],
    state: TrainState,
    batches: Iterable[PyTree],
    built_in: Sequence[Hook],
    hooks: Sequence[Hook],
    stopping: EarlyStopping,
) -> tuple[TrainState, Ending | None]:
    """Trains to the last step or an early end; returns the state, and how it has ended early."""
    stragglers, skips = Stragglers(run.peers), ConsecutiveSkips(run.options.max_consecutive_skips)
    early: Ending | None = None

    def ends(step: int) -> Ending | None:
        nonlocal early
        early = skips.ending or stopping.ending(step) or ending(step, hooks, run.peers, run.alerts)
        return early

    ledger = run.journal.ledger
    with ledger.phase("step"), Profiling(run) as profiling:
        profiling.on_step(int(state.step), state)
        for hook in hooks:
            hook.on_start(int(state.step), state)
        state = train_loop(
            train,
            state,
            ledger.timed("data", stragglers.timed(batches)),
            steps=run.steps,
            steps_per_call=run.steps_per_call,
            hooks=[
                *(run.watchdog, Logging(run, stragglers), profiling.ending),
                *(*built_in, *hooks, skips, profiling),
            ],
            ends=ends,
        )
    ledger.begin("finish")
    return state, skips.ending or (early if int(state.step) < run.steps else None)


def _finish(
    run: Run, state: TrainState, end: Ending | None, evaluation: Evaluation, saving: Saving
) -> dict[str, Value]:
    """Evaluates and saves the last state; returns its means. ``end`` is how the run ends before its
    last step, None where it has come to that. Raises Preempted or Diverged where the run was
    interrupted."""
    run_dir, last = run.owner.path, int(state.step)
    end, means = end or Ending(DONE, last), {}
    if end.reason is not None:
        run.owner.check()
        stop = {"step": last, "reason": end.reason, "code": end.code}
        folder.write_text(run_dir / folder.STOPPED, json.dumps(stop) + "\n")
        early = f"stopped on purpose after step {last} of {run.steps}: {end.reason}"
        run.progress.note(early)
    on_purpose = end.code in (DONE, ALERTED)
    if on_purpose:
        try:
            means = evaluation.at(last, state, after=last)
        except Interrupted:
            end = Ending(PREEMPTED, last)
    seconds = LAST_SAVE_SECONDS if on_purpose else STOPPED_SAVE_SECONDS
    with run.journal.ledger.phase("save"):
        saving.finish(last, state, seconds=seconds)
    if end.code == DIVERGED:
        skips = run.options.max_consecutive_skips
        given = {"step": end.step, "skips": skips, "run_dir": str(run_dir)}
        raise make_diverged(evaluation.experiment, run.mesh, state, **given)
    if end.code == PREEMPTED:
        preempted = Preempted(last, str(run_dir))
        run.progress.note(str(preempted))
        raise preempted
    return means


def _best(experiment: Experiment, abstract: TrainState, checkpoints: Checkpointer) -> Best | None:
    """The best checkpoint that there is."""
    step = checkpoints.best_step()
    if step is None:
        return None
    means = {Metric.of(name).name: x for name, x in checkpoints.metrics(step).items()}
    return Best(step, means, functools.partial(_restored, experiment, abstract, checkpoints, step))


def _restored(
    experiment: Experiment, abstract: TrainState, checkpoints: Checkpointer, step: int | None = None
) -> TrainState:
    read = functools.partial(checkpoints.restore, step=step)
    return build.restore_state(experiment, abstract, read, checkpoints.shapes(step))


def _open_checkpoints(metadata: Metadata, options: RunOptions, run_dir: epath.Path) -> Checkpointer:
    return Checkpointer(
        run_dir / folder.CHECKPOINTS,
        keep=options.keep,
        keep_best=options.keep_best,
        best_metric=f"eval/{metadata.best_metric}",
        best_mode=metadata.best_mode,
    )


def _write_file(path: epath.Path, text: str, *, keep: bool) -> None:
    if not (keep and exists(path)):
        folder.write_text(path, text)


def _costs(mesh: Mesh, peers: PeerGroup, price: float | None) -> dict[str, float]:
    """What an attempt takes, for its account (``goodput.COSTS``)."""
    device, found = mesh.devices.flat[0], {}
    if device.platform != "cpu":
        chip = chip_of(device.device_kind)
        found = {"chips": mesh.size / (chip.cores_per_chip if chip else 1)}
        found |= {"watts": chip.watts} if chip and chip.watts else {}
    elif peers.processes == jax.process_count():  # simulated devices share their machine
        found = {"machines": len({socket.gethostname(), *peers.hosts.values()})}
    return found | ({} if price is None else {"price": price})


def _check_unsaved(run_dir: epath.Path, journal: Journal) -> None:
    """Raises StorageError where a claimed run that had no checkpoint has one by now, or its journal
    tells of some, which are not seen."""
    told = distributed.from_first_process(lambda: "run/checkpoint_age_seconds" in journal.counts())
    if told or folder.has_checkpoint(run_dir / folder.CHECKPOINTS):
        raise storage.StorageError(
            f"the checkpoints of {run_dir} are not seen, though it has saved some: start it again "
            "or, where they are lost, begin anew with `overwrite`"
        )


def _changes(
    experiment: Experiment,
    state: TrainState,
    checkpoints: Checkpointer,
    run_dir: epath.Path,
    options: RunOptions,
    saved: bool,
) -> list[provenance.Change]:
    """Prints and returns the settings of a resumed run that have changed. Raises ValueError where a
    change makes it a different run, and is not accepted."""
    read = functools.partial(provenance.read_record, run_dir)
    what = f"the record of {run_dir}"
    then = distributed.from_first_process(lambda: storage.retrying(read, what)) or {}
    if not then and saved:
        then = checkpoints.config()  # of all processes together
    metadata = experiment.metadata
    provenance.check_accepted(options.accept_changes, then, metadata.config)
    step = checkpoints.latest_step() or 0
    may_change, both = dict(metadata.may_change), (then, metadata.config)
    before, now = (record.get("provenance", {}).get("microbatches") for record in both)
    if before not in (None, now) and build.depends_on_microbatches(experiment, state):
        may_change |= dict.fromkeys(("microbatches", *provenance.MICROBATCHES))
    changes = provenance.compare(*both, may_change, step=step)
    if saved:
        provenance.check(changes, options.accept_changes, run_dir=str(run_dir))
    else:
        changes = [dataclasses.replace(c, meaning=provenance.Effect.UNSAVED) for c in changes]
    if changes:
        title = f"changed since {run_dir} was started last:"
        terminal.print_lines(provenance.table(changes, title=title))
    return changes


def _check_plugs(hooks: Sequence[Hook], writers: Sequence[Writer]) -> None:
    for name, plugs, kind, wanted in (
        ("hooks", hooks, Hook, "an instance of a subclass of jaxtrain.Hook"),
        ("writers", writers, Writer, "an object with write(step, values) and close()"),
    ):
        for i, plug in enumerate(plugs):
            if not isinstance(plug, kind):
                raise ValueError(f"{name}[{i}] is {plug!r}: give {wanted}")
