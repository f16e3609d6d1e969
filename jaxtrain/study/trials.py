"""The trials of a study, in Optuna: claimed, reported and told by any number of processes.

A trial is one process's until that has died; then another goes on with it, in the same run's
folder. What is claimed or told is so under one lock, so that none is done twice or lost.
"""

import dataclasses
import logging
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxtrain.host import extras
from jaxtrain.host.paths import listed
from jaxtrain.study import gaussian
from jaxtrain.study import space as spaces
from jaxtrain.study.lease import FileLock, JournalLock, Leases
from jaxtrain.study.space import Dimension, Value

SAMPLERS = ("tpe", "random", "grid", "cmaes", "gp", "gp-ucb")
PRUNERS = ("none", "halving", "hyperband")
REDUCTION = 3
TRIALS = 40
LOCK, JOURNAL, LEASES = "lock", "journal.log", "workers"
# Told of a trial beside its parameters: who works on it, its values by seed, why it failed.
OWNER, VALUES, WHY = "owner", "values", "why"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A trial that this process is to do, or to go on with."""

    number: int
    values: Mapping[str, Value]


class Trials:
    """The trials of a study.

    Args:
      folder: of the study, which is there.
      name: of the study in its storage.
      mode: whether small or large values are better.
      count: of trials in all; None for the whole grid, or ``TRIALS``.
      resources: the steps of the first evaluation and of the whole run, for a pruner.
      token: of this process's lease.
      storage: an Optuna URL; None for a journal in the folder.
      seed: of the sampler; not of the runs.
      points: the values of every trial, in order, in place of what a sampler chooses.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        space: Sequence[Dimension],
        *,
        name: str,
        mode: Literal["min", "max"],
        count: int | None = None,
        token: str,
        sampler: str = "tpe",
        pruner: str = "none",
        resources: tuple[int, int] = (1, 1),
        storage: str | None = None,
        seed: int = 0,
        points: Sequence[Mapping[str, Value]] | None = None,
    ):
        optuna = _optuna()
        self.folder, self.space, self.mode, self.token = folder, space, mode, token
        self._optuna, self._lock, self._leases = optuna, FileLock(folder / LOCK), None
        points = points or (spaces.grid(space) if sampler == "grid" else [])
        self.count = count or (len(points) if points else TRIALS)
        if points:
            self.count = min(self.count, len(points))
        self._storage = open_storage(folder, storage)
        self._leases = Leases(folder / LEASES)
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's of what may change in it
            try:
                self._study = optuna.create_study(
                    study_name=name,
                    storage=self._storage,
                    direction={"min": "minimize", "max": "maximize"}[mode],
                    load_if_exists=True,
                    pruner=_pruner(pruner, resources),
                )
            except optuna.exceptions.StorageInternalError as error:
                why = str(error.__cause__ or error).partition("\n")[0]
                raise ValueError(f"the study's storage cannot be written: {why}") from None
            # Nobody draws what another has drawn, before the study was resumed or beside this.
            there = len(self._study.get_trials(deepcopy=False)), len(list(self._others()))
            mixed = (seed + 1_000_003 * there[0] + 7919 * there[1]) % 2**32
            self._study.sampler = _sampler(sampler, mixed)
            for point in points[: self.count]:
                self._study.enqueue_trial(point, skip_if_exists=True)

    def _others(self) -> Any:
        return listed(self.folder / LEASES, "*.json")

    def all(self) -> list[Any]:
        """Returns Optuna's frozen trials, in order."""
        return self._study.get_trials(deepcopy=False)

    def claim(self) -> Claim | None:
        """Returns a trial that nobody works on any more, or a new one; None where there is none."""
        states = self._optuna.trial.TrialState
        with self._lock:
            trials = self.all()
            for trial in trials:
                owner = trial.user_attrs.get(OWNER)
                left = owner != self.token and (owner is None or self._leases.is_dead(owner))
                if trial.state == states.RUNNING and left:
                    return self._own(self._trial(trial.number))
            if sum(trial.state != states.WAITING for trial in trials) >= self.count:
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._own(self._study.ask())

    def _own(self, trial: Any) -> Claim:
        trial.set_user_attr(OWNER, self.token)
        # Those of a trial that has them already, and new ones where its owner died before.
        return Claim(trial.number, {each.flag: each.suggest(trial) for each in self.space})

    def _trial(self, number: int) -> Any:
        study = self._storage.get_study_id_from_name(self._study.study_name)
        found = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        return self._optuna.Trial(self._study, found)

    def is_over(self) -> bool:
        """Whether all trials have ended, those of other processes too."""
        states = self._optuna.trial.TrialState
        trials = [trial for trial in self.all() if trial.state != states.WAITING]
        return len(trials) >= self.count and all(trial.state.is_finished() for trial in trials)

    def report(self, number: int, step: int, value: float) -> bool:
        """Notes the value after a step, and returns whether the trial is to end there."""
        trial = self._trial(number)
        if step not in self.all()[number].intermediate_values and not math.isnan(value):
            trial.report(value, step)
        return trial.should_prune()

    def tell(self, number: int, values: Sequence[float]) -> float | None:
        """Ends a trial with the values of its seeds; what is no number counts as infinitely bad.
        Returns their mean; None where the trial is another process's by now."""
        worst = math.inf if self.mode == "min" else -math.inf
        values = [worst if math.isnan(value) else float(value) for value in values]
        mean = sum(values) / len(values)
        told = self._end(number, {VALUES: values}, values=mean)
        return mean if told else None

    def prune(self, number: int) -> None:
        """Ends a trial with its last report."""
        self._end(number, {}, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, why: str) -> None:
        """Ends a trial without a value."""
        self._end(number, {WHY: why}, state=self._optuna.trial.TrialState.FAIL)

    def _end(self, number: int, attributes: Mapping[str, Any], **told: Any) -> bool:
        with self._lock:
            there = self.all()[number]
            if there.user_attrs.get(OWNER) != self.token or there.state.is_finished():
                return False
            trial = self._trial(number)
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            self._study.tell(number, **told)
            return True


def open_storage(folder: pathlib.Path, url: str | None) -> Any:
    """Opens Optuna's storage of a study: a journal in its folder, or what the URL names."""
    optuna = _optuna()
    if url is not None:
        errors = extras.load("a study needs Optuna", "study", "sqlalchemy.exc").exc
        try:
            return optuna.storages.get_storage(url)
        except (ImportError, ValueError, RuntimeError, errors.SQLAlchemyError) as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"the study's storage cannot be opened: {why}") from None
    journals, path = optuna.storages.journal, folder / JOURNAL
    backend = journals.JournalFileBackend(str(path), lock_obj=JournalLock(path))
    return optuna.storages.JournalStorage(backend)


def check_installed(sampler: str) -> None:
    """Raises ImportError where a package is missing that a study with this sampler needs."""
    _sampler(sampler, seed=0)


def _optuna() -> Any:
    optuna = extras.load("a study needs Optuna", "study", "optuna", "optuna.storages.journal")
    optuna.logging.set_verbosity(logging.ERROR)
    return optuna


def _sampler(name: str, seed: int) -> Any:
    samplers = _optuna().samplers
    if name == "cmaes":
        extras.load("the sampler cmaes needs the package of that name", "study", "cmaes")
        return samplers.CmaEsSampler(seed=seed)
    if name in ("gp", "gp-ucb"):
        return gaussian.make_sampler(_optuna(), "ucb" if name == "gp-ucb" else "ei", seed=seed)
    if name == "tpe":  # Trials that still run count as bad ones, so that workers spread.
        # By name, because the default is another since Optuna 5 and would change a study.
        return samplers.TPESampler(seed=seed, constant_liar=True, multivariate=False)
    return samplers.RandomSampler(seed=seed)  # of a grid all points wait already


def _pruner(name: str, resources: tuple[int, int]) -> Any:
    pruners, (least, most) = _optuna().pruners, resources
    if name == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=REDUCTION)
    if name == "hyperband":
        return pruners.HyperbandPruner(least, most, reduction_factor=REDUCTION)
    return pruners.NopPruner()
