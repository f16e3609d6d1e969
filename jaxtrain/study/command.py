"""The command ``jaxtrain study``: many runs of an experiment, whose flags a sampler chooses."""

import dataclasses
import json
import os
import pathlib
import secrets
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tyro

from jaxtrain.experiment import Experiment
from jaxtrain.host import exit_codes, output
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, check_on_disk, exists, listed, read_json, write_whole
from jaxtrain.host.signals import SignalWatch
from jaxtrain.planning.targets import stay_on_cpu
from jaxtrain.run.main import build_experiment, flag_word, load_config
from jaxtrain.run.provenance import OF_START
from jaxtrain.study import report
from jaxtrain.study import space as spaces
from jaxtrain.study.lease import FileLock, Lease
from jaxtrain.study.trials import (
    LEASES,
    LOCK,
    PRUNERS,
    SAMPLERS,
    Trials,
    check_installed,
    open_storage,
)
from jaxtrain.study.workers import Runs, check_devices, work

STUDY = "study.json"


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Searches flags of an experiment: each trial is a run in a folder of its own, with values that
    a sampler chooses by the runs before.

    All other flags go to the experiment, after -- those that have a name of one here. The same
    command goes on with a study that was interrupted, and joins it from another host that sees its
    folder.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    space: str
    """TOML file of the flags that vary: a list of values, or a range such as
    "optimizer.learning-rate" = {low = 1e-4, high = 1e-1, log = true}."""
    study_dir: str
    """Folder of the study, which is made: its trials' runs, its journal and its report."""
    trials: int | None = None
    """Number of trials in all; left out, the whole grid, with other samplers 40."""
    workers: int = 1
    """Number of trials at a time on this host, which share its cores and GPUs evenly."""
    processes: int = 1
    """Number of processes of each run, which jaxtrain launch starts on this host."""
    sampler: Literal[SAMPLERS] = "tpe"  # type: ignore[valid-type]
    """Rule that chooses values: TPE, at random, every point of a grid, CMA-ES (for numbers), or
    Gaussian processes, by expected improvement (gp) or a confidence bound (gp-ucb)."""
    pruner: Literal[PRUNERS] = "none"  # type: ignore[valid-type]
    """Rule that ends bad trials at an evaluation of --eval-every: successive halving, or Hyperband;
    none ends none."""
    repeats: int = 1
    """Runs of each trial, with --seed and the numbers after it; their mean counts, and the first
    decides whether the trial is pruned."""
    storage: str | None = None
    """Optuna's URL of a database, such as postgresql+psycopg://USER@HOST/NAME, which is used in
    place of a journal in the study's folder."""


def run_study(options: StudyOptions, rest: list[str]) -> int:
    """Does the study and writes its report."""
    check_least(options, trials=1, workers=1, processes=1, repeats=1)
    check_on_disk(options.study_dir, "--study-dir")
    stay_on_cpu()
    module, config = load_config(options.experiment, rest, command="study", own=type(options))
    _check(options, config)
    space = spaces.read_space(options.space, options.experiment, config, rest)
    if options.repeats > 1 and "seed" in {each.flag for each in space}:
        raise ValueError(f"`repeats` is {options.repeats} and the space has a seed: give one")
    if options.sampler == "grid":
        spaces.grid(space)  # refuses what cannot be counted
    environ = environ_of(options, config)
    experiment = build_experiment(module, config)
    check_installed(options.sampler)
    runs = runs_of(options, rest, config, experiment)
    record = {
        "module": options.experiment,
        "flags": shlex.join(rest),
        "space": [dataclasses.asdict(each) for each in space],
        "metric": runs.metric,
        "mode": runs.mode,
        "seeds": runs.seeds,
        "has_storage": options.storage is not None,  # whose URL may hold a password
    }
    if options.storage is not None:  # before the folder is this study's
        open_storage(runs.folder, options.storage)
    folder, name = runs.folder, join(runs.folder, json.loads(json.dumps(record)))
    trials = conduct(
        folder,
        space,
        runs,
        workers=options.workers,
        environ=environ,
        name=name,
        count=options.trials,
        sampler=options.sampler,
        pruner=options.pruner,
        resources=(config.run.eval_every, experiment.steps),
        storage=options.storage,
        seed=config.seed,
    )
    if trials is None:
        return exit_codes.PREEMPTED
    with FileLock(folder / LOCK):
        page = report.write(folder, trials.all(), runs)
    if (best := report.best_of(trials.all(), runs.mode)) is not None:
        print(f"best         trial {best.number}, {runs.metric} {best.value:.5g}")
        print(f"command      {shlex.join(report.command_of(runs, best))}")
    print(f"report       {page}")
    return 0


def conduct(
    folder: pathlib.Path,
    space: Sequence[spaces.Dimension],
    runs: Runs,
    *,
    workers: int,
    environ: Mapping[str, str],
    **how: Any,
) -> Trials | None:
    """Does the trials of a study, with all who have joined it, until they have ended; None where a
    signal has asked for an end before. ``how`` are arguments of :class:`Trials`."""
    asked = threading.Event()
    watch = SignalWatch(lambda number: asked.set())
    with output.lasting(), watch, Lease(folder / LEASES) as lease:
        trials = Trials(folder, space, mode=runs.mode, token=lease.token, **how)
        done = work(
            trials,
            runs,
            workers=workers,
            environ=environ,
            stop=asked.is_set,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if not done:
        print("interrupted: the same command goes on with the study", file=sys.stderr)
        return None
    spent = runs.seconds([trial.number for trial in trials.all()])
    share = spent["compile"] / (spent.total() or 1.0)
    print(f"time         {spent.total():,.0f} s of all runs, {share:.0%} of it for compiling")
    return trials


def conduct_points(
    runs: Runs,
    points: Sequence[Mapping[str, spaces.Value]],
    *,
    workers: int,
    environ: Mapping[str, str],
) -> Trials | None:
    """Does a trial with each of these values, in order, as :func:`conduct`, in the study of them
    that is in the folder or begins there."""
    _, _, module, *flags = runs.command
    record = {"module": module, "flags": shlex.join(flags), "metric": runs.metric}
    record |= {"seeds": runs.seeds, "points": [shlex.join(runs.words(each)) for each in points]}
    values = {flag: tuple(dict.fromkeys(each[flag] for each in points)) for flag in points[0]}
    return conduct(
        runs.folder,
        [spaces.Dimension(*pair) for pair in values.items()],
        runs,
        workers=workers,
        environ=environ,
        name=join(runs.folder, record),
        points=points,
        sampler="grid",
    )


def _check(options: StudyOptions, config: Any) -> None:
    """Refuses flags of the experiment that do not go with a study."""
    refuse_start(config)
    if options.pruner != "none" and not config.run.eval_every:
        raise ValueError(
            f"`pruner` is {options.pruner!r} and `eval_every` 0: give the steps between "
            "evaluations, after which a trial may end"
        )


def environ_of(options: Any, config: Any) -> Mapping[str, str]:
    """Returns the environment of a study's runs. Raises ValueError where this host's GPUs cannot be
    dealt to the ``workers`` of its options, and to the ``processes`` of each."""
    environ = os.environ | ({"JAX_PLATFORMS": "cpu"} if config.simulate_devices else {})
    check_devices(options.workers, options.processes, environ)
    return environ


def refuse_start(
    config: Any, why: str = "is of one run, and a study starts many in its --study-dir"
) -> None:
    """Raises ValueError where a flag says how one run starts."""
    if typed := [name for name in OF_START if getattr(config.run, name)]:
        raise ValueError(f"--{typed[0].replace('_', '-')} {why}")


def runs_of(options: Any, rest: Sequence[str], config: Any, experiment: Experiment) -> Runs:
    """Returns the runs of a study with these options, which have ``study_dir``, ``experiment``,
    ``processes`` and ``repeats``, and these flags of the experiment."""

    def words(values: Mapping[str, Any]) -> list[str]:
        given = values.items()
        return [flag_word(options.experiment, config, n, spaces.text_of(v)) for n, v in given]

    chosen = config.run if config.run.best_metric else experiment.metadata
    return Runs(
        folder=pathlib.Path(options.study_dir),
        command=[sys.executable, "-m", options.experiment, *rest],
        processes=options.processes,
        words=words,
        metric=f"eval/{chosen.best_metric}",
        mode=chosen.best_mode,
        takes_best=config.run.saves_best,
        seeds=[config.seed + i for i in range(options.repeats)],
    )


def join(folder: pathlib.Path, record: Mapping[str, Any]) -> str:
    """Begins a study in a folder, or joins the one that is there, and returns its name in storage.

    Raises:
      ValueError: another study is there, or something else.
    """
    (folder / LEASES).mkdir(parents=True, exist_ok=True)
    path = as_path(folder / STUDY)
    with FileLock(folder / LOCK):
        if not exists(path):
            if listed(folder, "trial-*"):
                raise ValueError(f"{folder} holds trials and no {STUDY}: choose another folder")
            name = f"{record['module']}-{secrets.token_hex(4)}"
            write_whole(path, json.dumps({"name": name, **record}, indent=2) + "\n")
            return name
    there = read_json(path)
    for key, now in record.items():
        if there.get(key) != now:
            raise ValueError(
                f"the study in {folder} has {key} {there.get(key)!r} and not {now!r}: give the "
                "same, or another --study-dir"
            )
    return there["name"]
