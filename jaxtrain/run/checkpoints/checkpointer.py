"""Checkpoints: any pytree saved asynchronously, restored bit for bit into any mesh.

One step is one directory of three items: ``state`` (the arrays, by path), ``manifest`` (every
path's shape, dtype and checksum, the Python numbers, the metrics) and ``config``. Only array data
and JSON are written, so loading a checkpoint runs no code from it; and because leaves are stored by
path and shape alone, neither the devices nor the container types of the saving run matter when
restoring. What was restored is compared with the checksums, so a checkpoint that was cut short or
changed is an error, or passed over for the one before it, and never a wrong state.

Every method is called by all processes alike; Orbax lets each write its own shards and lets only
the finished step directory appear under its final name. The first process says which steps there
are and what their manifests hold, and all must have read the same, or none goes on with it.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.host import storage
from jaxtrain.host.paths import absolute
from jaxtrain.host.storage import StorageError
from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.run.checkpoints.leaves import (
    finish_leaf,
    gather_array,
    leaves_by_path,
    ocp,
    raw_array,
    restore_args,
)
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError
from jaxtrain.run.checkpoints.step_folders import StepFolders, files_below
from jaxtrain.tree import map_named, owner_of

logger = logging.getLogger(__name__)

# How long a save tries to list what is there: it is made again by whoever asked for it.
_LIST_SECONDS = 5.0
# A checkpoint is some dozens of files and folders beside its arrays.
_SPARE_FILES = 100
_SPARE_BYTES = 1 << 16


class SaveError(StorageError):
    """A checkpoint could not be written; those saved before are as they were."""


class Checkpointer:
    """Saves and restores states in one directory, keeping the latest and the best.

    Args:
      directory: where step directories go, local or remote (``gs://bucket/run``); it is created by
        the first save, never by reading.
      keep: how many of the latest checkpoints to keep; None keeps all.
      keep_best: how many of the best by ``best_metric`` to keep besides.
      best_metric: the key of ``metrics`` that ranks checkpoints; those saved without it, or with a
        non-finite value, are never the best.
      best_mode: whether ``"min"`` or ``"max"`` of the metric is best.
      save_every: ``save`` acts on multiples of this many steps only; None acts on every call.

    Raises:
      ValueError: an option is out of range.

    >>> import tempfile, jax.numpy as jnp
    >>> directory = tempfile.mkdtemp()
    >>> with Checkpointer(directory) as checkpoints:
    ...     _ = checkpoints.save(10, {"w": jnp.arange(3.0)}, config={"width": 3})
    ...     state = checkpoints.restore({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    ...     print(checkpoints.latest_step(), checkpoints.config(), state["w"])
    10 {'width': 3} [0. 1. 2.]
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep: int | None = 3,
        keep_best: int = 1,
        best_metric: str = "eval/loss",
        best_mode: Literal["min", "max"] = "min",
        save_every: int | None = None,
    ):
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode is {best_mode!r}; use 'min' or 'max'")
        if (keep is not None and keep < 1) or keep_best < 0:
            raise ValueError(
                f"keep={keep} and keep_best={keep_best}: keep at least 1 and 0 of them"
            )
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every is {save_every}; use a positive number of steps or None")
        self.directory = absolute(directory)
        self._save_every = save_every
        self._best_metric = best_metric
        self._retention = _Retention(keep, keep_best, best_mode)
        self._manager: ocp.CheckpointManager | None = None
        self._folders = StepFolders(self.directory)
        self._in_progress = -1
        self._whole: set[int] = set()  # as seen by the last save
        self._damaged: set[int] = set()  # found so by restore, for the next save to move away

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Starts saving ``state`` as ``step`` and returns once the devices have been copied from.

        The buffers of ``state`` may be donated or overwritten as soon as this returns; writing goes
        on in the background. A failure there is raised by the next save, ``wait`` or ``close``.

        Args:
          step: the number of the step, from 0 and not below the latest one saved.
          state: a pytree of arrays, typed PRNG keys and Python numbers.
          metrics: numbers kept with the checkpoint; ``best_metric`` is looked up among them.
          config: anything JSON can hold, kept with the checkpoint; tuples come back as lists.
          force: save even where ``save_every`` does not divide ``step``.

        Returns:
          Whether a save was started: False off the ``save_every`` beat, and where ``step`` is
          already the latest checkpoint.

        Raises:
          ValueError: ``step`` is negative or behind the latest checkpoint, two leaves share a path,
            or there is no array.
          TypeError: a leaf or an entry of ``config`` is neither array data nor JSON.
          SaveError: the save before this one failed (then nothing has been started for this one),
            or the directory cannot be written to, or has too little room. Saving may be tried
            again, with the same or a later step.
        """
        step = int(step)
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        if not force and self._save_every and step % self._save_every:
            return False
        leaves = leaves_by_path(state)
        entries = {name: manifests.describe(name, leaf) for name, leaf in leaves.items()}
        arrays = {
            name: raw_array(leaf) for name, leaf in leaves.items() if manifests.is_stored(leaf)
        }
        if not arrays:
            raise ValueError("the state has no array with elements: nothing to save")
        config = manifests.plain_json(config or {})
        self.wait()
        scores = self._look_around(step)
        latest = max(scores, default=-1)
        if step == latest:
            return False
        if step < latest:
            raise ValueError(
                f"step {step} is behind the latest checkpoint {latest} in {self.directory}: call "
                f"drop_after({step}) first to continue from an older step, or use a new directory"
            )
        for name, checksum in manifests.checksums(arrays).items():
            entries[name]["checksum"] = checksum
        manifest = {
            "leaves": entries,
            "metrics": {key: manifests.encode(float(x)) for key, x in (metrics or {}).items()},
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays),
            manifest=ocp.args.JsonSave(manifests.seal(manifest)),
            config=ocp.args.JsonSave(manifests.seal({"config": config})),
        )
        self._retention.scores = {**scores, step: self._score(manifest["metrics"])}
        size = sum(array.nbytes for array in arrays.values())
        try:
            self._check_room(step, size)
        except SaveError as error:
            self._make_room(step, full=getattr(error.__cause__, "errno", None) == errno.ENOSPC)
            self._check_room(step, size)
        with self._failing_as_one(f"checkpoint {step}"):
            self._writer().save(step, args=items, force=True)
        self._in_progress = step
        self._whole = {*scores, step}
        return True

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """Reads a checkpoint into the structure, shardings and dtypes of ``abstract_state``.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` with shardings, or a state whose
            values are ignored. A leaf without a sharding comes back uncommitted on the default
            device, a NumPy leaf stays on the host, a Python number comes back as one.
          step: which checkpoint; None means the latest that is not damaged: damaged ones are named
            in the log, and moved aside by the next save.

        Returns:
          The state as it was saved, bit for bit; ``abstract_state`` is left alone.

        Raises:
          FileNotFoundError: there is no checkpoint, or not that one.
          DamagedCheckpointError: that checkpoint, or every one, is not what was saved.
          ValueError: the checkpoint is of another model: the first path that differs is named.
        """

        def check(step: int, saved: Mapping[str, Any]) -> None:
            wanted = leaves_by_path(abstract_state)
            self._check(step, saved, wanted)
            if extra := [name for name in saved if name not in wanted]:
                first = manifests.kind(saved[extra[0]])
                raise ValueError(
                    f"{self._of_another(step, saved, wanted)}: it holds {extra[0]!r} {first}, "
                    f"which the state lacks ({len(extra)} such paths)"
                )

        return self._restore(abstract_state, step, check)

    def restore_part(self, abstract_state: Any, step: int | None = None) -> Any:
        """Like ``restore`` for a part of the saved tree: paths it does not name are not read.

        ``restore_part({"params": abstract_params})`` reads the parameters of a training state
        without its optimizer state.
        """
        wanted = leaves_by_path(abstract_state)
        return self._restore(
            abstract_state, step, lambda step, saved: self._check(step, saved, wanted)
        )

    def restore_params(self, abstract_params: Any, step: int | None = None) -> Any:
        """Reads the parameters of a training state as they were evaluated: the averages of those of
        which its optimizer keeps one (:func:`jaxtrain.averaged`), in float32 or wider."""
        step = self._resolve(step)
        saved = self._folders.manifest(step)["leaves"]
        params = {path.removeprefix("params/") for path in saved if path.startswith("params/")}
        owners = {path: owner_of(path, params) for path in saved}
        kept = {name: path for path, name in owners.items() if path.endswith(f"/ema/{name}")}
        places = map_named(lambda name, _: kept.get(name, f"params/{name}"), abstract_params)
        parts = dict(zip(jax.tree.leaves(places), jax.tree.leaves(abstract_params), strict=True))
        restored = self.restore_part(parts, step)
        return jax.tree.map(restored.get, places)

    def steps(self) -> list[int]:
        """Returns the steps with a whole checkpoint, in order; waits for a save in progress.

        Whole is one with all its items and a sound manifest; that its arrays are sound too is known
        when they have been read.
        """
        self.wait()
        return sorted(self._scores())

    def latest_step(self) -> int | None:
        """Returns the last step saved, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best ``best_metric``, the earliest among equals, or None."""
        self.wait()
        return next(iter(self._retention.ranked(self._scores())), None)

    def config(self, step: int | None = None) -> dict[str, Any]:
        """Returns the config saved with ``step`` (None: the latest)."""
        step = self._resolve(step)
        content = self._folders.json(step, "config")
        config = content.get("config", content)  # older checkpoints hold it bare
        if not isinstance(config, dict):
            raise self._folders.damage(step, f"its config is a {type(config).__name__}")
        return config

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Returns the metrics saved with ``step`` (None: the latest)."""
        metrics = self._folders.manifest(self._resolve(step))["metrics"]
        return {key: float(value) for key, value in metrics.items()}

    def drop_after(self, step: int) -> None:
        """Deletes every checkpoint later than ``step``, so that training may go on from there."""
        later = [other for other in self.steps() if other > step]
        # Every process must have listed them all before the first one is gone.
        multihost_utils.sync_global_devices("Checkpointer.drop_after")
        for other in later:
            self._writer().delete(other)

    def is_saved(self, step: int) -> bool | None:
        """Returns whether ``step`` has been saved, None while something is still being written.

        It never waits, and asks no other process.
        """
        if self.is_saving():
            return None
        return (self.directory / str(step)).exists()

    def wait(self) -> None:
        """Blocks until the save in progress, if any, is on disk; raises what went wrong there.

        Raises:
          SaveError: it failed, in this process or in another one.
        """
        if self._manager is not None:
            with self._failing_as_one(f"checkpoint {self._in_progress}"):
                self._manager.wait_until_finished()

    def is_saving(self) -> bool:
        """Whether a save goes on in the background of this process."""
        return self._manager is not None and self._manager.is_saving_in_progress()

    def written(self) -> tuple[int, int]:
        """Returns how many files the directory holds and their bytes, which a save makes grow."""
        try:
            sizes = [path.stat().length for path in files_below(self.directory)]
        except OSError:  # a file has gone in the meantime, or storage fails
            return (-1, -1)
        return len(sizes), sum(sizes)

    def close(self) -> None:
        """Waits and releases the writer's threads; saving again would start new ones."""
        try:
            self.wait()
        finally:
            self._abandon()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:  # perhaps in this process alone: the others must not be asked how they fared
            self._abandon()

    def _writer(self) -> "ocp.CheckpointManager":
        # Opened by the first save: only a writer may clear away what a killed save left behind, for
        # to a reader beside a running job that would be the save in progress.
        if self._manager is None:
            _quieten_orbax()
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._retention,
                cleanup_tmp_directories=True,
                # Made in the background, a directory that cannot be made (full disk) leaves the
                # other items' threads waiting five minutes for it, and the process with them.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager

    def _abandon(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):  # has been raised by then
                manager.close()

    @contextlib.contextmanager
    def _failing_as_one(self, what: str):
        """Turns a failure in any process into a ``SaveError`` in all of them.

        The writer is given up then: the next save opens a new one, which clears away the remains.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if _in_any_process(error is not None):
            self._abandon()
            reason = (
                "another process failed to write its part" if error is None else storage.why(error)
            )
            raise SaveError(f"{what} could not be saved in {self.directory}: {reason}") from error

    def _check_room(self, step: int, size: int) -> None:
        """Raises before anything is written where it cannot be; remote stores say so themselves."""
        if "://" in str(self.directory):
            return
        with self._failing_as_one(f"checkpoint {step}"):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                if not os.access(self.directory, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                free = shutil.disk_usage(self.directory).free
                if free < size + _SPARE_BYTES:
                    raise OSError(
                        errno.ENOSPC,
                        f"it takes up to {size + _SPARE_BYTES:,} bytes and {free:,} are free",
                    )
                files = os.statvfs(self.directory)
                if files.f_files and files.f_favail < _SPARE_FILES:
                    raise OSError(errno.ENOSPC, "the file system has no room for more files")

    def _look_around(self, step: int) -> dict[int, float]:
        """The scores of the whole checkpoints; moves away what is in the way of saving ``step``."""
        with self._failing_as_one(f"checkpoint {step}"):
            found = self._folders.found(seconds=_LIST_SECONDS)
            scores = self._scores(seconds=_LIST_SECONDS)
        lost = self._whole.intersection(found) - scores.keys()
        for other in sorted(lost):
            logger.warning(
                "checkpoint %d in %s was whole and is no longer: something else has deleted or "
                "changed its files",
                other,
                self.directory,
            )
        damaged, self._damaged = self._damaged, set()
        scores = {other: score for other, score in scores.items() if other not in damaged}
        aside = (lost | damaged | ({step} - scores.keys())).intersection(found)
        if aside:
            self._abandon()  # the manager has listed them
            with self._failing_as_one(f"what comes after the damaged checkpoint {min(aside)}"):
                for other in sorted(aside) if jax.process_index() == 0 else ():
                    self._folders.set_aside(other)
        return scores

    def _make_room(self, step: int, *, full: bool) -> None:
        """Deletes what saving ``step`` would, but for the latest, which must outlive a failure."""
        scores = self._retention.scores
        there = scores.keys() - {step}
        surplus = there - self._retention.kept(scores) - {max(there, default=None)}
        self._abandon()
        if jax.process_index() == 0 and full:
            for other in surplus:
                with contextlib.suppress(OSError):
                    (self.directory / str(other)).rmtree()
        _in_any_process(False)  # all wait until they are gone

    def _score(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics.get(self._best_metric, math.nan))

    def _scores(self, *, seconds: float | None = None) -> dict[int, float]:
        """The whole checkpoints, and what ``best_metric`` was for each."""
        whole = self._folders.whole(seconds=seconds)
        return {step: self._score(metrics) for step, metrics in whole.items()}

    def _resolve(self, step: int | None) -> int:
        """Returns the step of a checkpoint that is there, or raises ``FileNotFoundError``."""
        self.wait()
        steps = sorted(self._scores()) if step is None else self._folders.found()
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        if step is None:
            return steps[-1]
        if step not in steps:
            there = ", ".join(map(str, steps))
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}: it has {there}"
            )
        return step

    def _restore(
        self,
        abstract_state: Any,
        step: int | None,
        check: Callable[[int, Mapping[str, Any]], None],
    ) -> Any:
        self.wait()
        steps = self._folders.found()[::-1] if step is None else [self._resolve(step)]
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        damages = []
        for candidate in steps:
            try:
                state = self._restore_one(abstract_state, candidate, check)
            except DamagedCheckpointError as damage:
                damages.append(damage)
                continue
            if damages:
                self._damaged |= {other for other in steps if other > candidate}
                for damage in damages:
                    logger.warning("%s; going on from checkpoint %d", damage, candidate)
            return state
        if len(damages) > 1:
            raise DamagedCheckpointError(f"{damages[0]}; so are all {len(damages)} checkpoints")
        raise damages[0]

    def _restore_one(
        self, abstract_state: Any, step: int, check: Callable[[int, Mapping[str, Any]], None]
    ) -> Any:
        # The manifest of the first process is that of all: what each reads is held against it.
        saved = self._folders.manifest(step)["leaves"]
        check(step, saved)
        raw: dict[str, Any] = {}
        error: Exception | None = None
        try:
            if jax.process_index() != 0:
                self._folders.wait_for(step)
            raw = self._read(step, saved, leaves_by_path(abstract_state))
        except Exception as caught:
            error = caught
        # Checksums are computed by all processes together, or by none.
        self._agree(step, error)
        found = manifests.checksums(raw)
        changed = [n for n, x in found.items() if x != saved[n].get("checksum", x)]
        if changed:
            what = f"{changed[0]!r} is not what was saved (checksum)"
            error = self._folders.damage(step, what)
        self._agree(step, error, zlib.crc32(json.dumps(found, sort_keys=True).encode()))
        return self._assemble(step, saved, raw, abstract_state)

    def _agree(self, step: int, error: Exception | None, read: int = 0) -> None:
        """Raises in all processes alike where one failed to read a step, or they read different
        bits."""
        kind = 0 if error is None else 1 if isinstance(error, DamagedCheckpointError) else 2
        kinds, reads = _in_all_processes([kind, read])
        if kind and kind == max(kinds):
            raise error
        others = ", ".join(str(process) for process in np.flatnonzero(kinds))
        if max(kinds) == 2:
            raise StorageError(
                f"checkpoint {step} in {self.directory} cannot be read by process {others}"
            )
        if max(kinds) == 1:
            raise self._folders.damage(step, f"process {others} cannot read what was saved")
        if len(set(reads)) > 1:
            raise self._folders.damage(step, "processes read different bits of it")

    def _of_another(self, step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
        def differs(name: str) -> bool:
            if name not in saved or name not in wanted:
                return True
            return not manifests.agree(saved[name], manifests.describe(name, wanted[name]))

        # A training state in which all but the optimizer's part is the same.
        differing = [name for name in {**saved, **wanted} if differs(name)]
        of_optimizer = all(name.startswith("opt_state/") for name in differing)
        kind = "optimizer" if of_optimizer else "model"
        return f"checkpoint {step} in {self.directory} is of another {kind}"

    def _check(self, step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        for name, leaf in wanted.items():
            entry = manifests.describe(name, leaf)
            if name not in saved:
                missing = sum(other not in saved for other in wanted)
                raise ValueError(
                    f"{self._of_another(step, saved, wanted)}: it lacks {name!r} "
                    f"{manifests.kind(entry)}, which the state has ({missing} such paths)"
                )
            if not manifests.agree(saved[name], entry):
                raise ValueError(
                    f"{self._of_another(step, saved, wanted)}: {name!r} is "
                    f"{manifests.kind(saved[name])} there and {manifests.kind(entry)} in the state"
                )

    def _read(
        self, step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Reads the arrays of the wanted leaves, keys as their words."""
        stored = {n: leaf for n, leaf in wanted.items() if manifests.in_file(saved[n])}
        if not stored:
            return {}
        # Shapes and placements come from the caller alone; the sharding that Orbax recorded names
        # devices which may not exist here.
        items = ocp.args.PyTreeRestore(
            item={name: 0 for name in stored},
            restore_args={n: restore_args(saved[n], leaf) for n, leaf in stored.items()},
            partial_restore=True,
        )
        # The handler alone: around it Orbax's checkpointer has the processes wait for each other,
        # also for one that has failed.
        handler = ocp.PyTreeCheckpointHandler()
        try:
            arrays = storage.retrying(
                lambda: handler.restore(self.directory / str(step) / "state", args=items),
                f"the arrays of checkpoint {step} in {self.directory}",
                passing=lambda error: not _too_large(error) and storage.passes(error),
            )
        except Exception as error:  # whatever a parser raises that meets nonsense
            _ignore_late_answers()
            if _too_large(error) or isinstance(error, StorageError):
                raise
            if _forbidden(error):
                raise PermissionError(
                    f"checkpoint {step} in {self.directory} cannot be read: {storage.why(error)}"
                ) from error
            what = f"its arrays cannot be read ({storage.why(error)})"
            raise self._folders.damage(step, what) from error
        finally:
            handler.close()
        for name, leaf in stored.items():
            array = arrays.get(name)
            shape = tuple(saved[name]["shape"])  # a key's words have one dimension more
            if not hasattr(array, "dtype") or array.shape[: len(shape)] != shape:
                raise self._folders.damage(
                    step, f"it lacks the array {name!r}, which its manifest has"
                )
            if not manifests.is_key(leaf) and str(array.dtype) != saved[name]["dtype"]:
                raise self._folders.damage(step, f"{name!r} is {array.dtype} in its arrays")
        return arrays

    def _assemble(
        self, step: int, saved: Mapping[str, Any], raw: Mapping[str, Any], abstract_state: Any
    ) -> Any:
        try:
            leaves = [
                finish_leaf(saved[name], raw.get(name), leaf)
                for name, leaf in leaves_by_path(abstract_state).items()
            ]
        except (KeyError, TypeError, ValueError) as error:  # keys of no known kind
            raise self._folders.damage(
                step, f"a PRNG key in it is none ({storage.why(error)})"
            ) from error
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def digest(state: Any) -> str:
    """Returns the SHA-256 of a state's paths, dtypes, shapes and bytes.

    Two states have the same digest when they are equal bit for bit, wherever their shards live.
    Leaves are gathered to the host one at a time; in a run of several processes all must call it.

    >>> digest({"a": np.zeros(2), "b": 1}) == digest({"b": 1, "a": np.zeros(2)})
    True
    >>> digest({"a": np.zeros(2)}) == digest({"a": -np.zeros(2)})
    False
    """
    sha = hashlib.sha256()
    for name, leaf in sorted(leaves_by_path(state).items()):
        sha.update(json.dumps([name, manifests.describe(name, leaf)], sort_keys=True).encode())
        if not manifests.is_number(leaf):
            sha.update(np.ascontiguousarray(gather_array(raw_array(leaf))).tobytes())
    return sha.hexdigest()


class _Retention:
    """Which checkpoints Orbax keeps: the latest, the best, and any step this class never saw."""

    def __init__(self, keep: int | None, keep_best: int, best_mode: str):
        self._keep, self._keep_best, self._sign = keep, keep_best, 1 if best_mode == "min" else -1
        self.scores: dict[int, float] = {}  # step -> best_metric, NaN where there is none

    def ranked(self, scores: Mapping[int, float]) -> list[int]:
        """Steps with a finite score, best first, the earliest first among equals."""
        finite = [step for step, score in scores.items() if math.isfinite(score)]
        return sorted(finite, key=lambda step: (self._sign * scores[step], step))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's PreservationPolicy protocol."""
        del context
        kept = self.kept({c.step for c in checkpoints} & self.scores.keys())
        return [c.step not in self.scores or c.step in kept for c in checkpoints]

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Which of these steps, all with a score, are among the latest or the best."""
        present = sorted(steps)
        latest = present if self._keep is None else present[-self._keep :]
        best = self.ranked({step: self.scores[step] for step in present})[: self._keep_best]
        return {*latest, *best}


def _in_any_process(flag: bool) -> bool:
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def _in_all_processes(values: list[int]) -> list[list[int]]:
    """Each of some numbers (32 bits), from every process in order."""
    if jax.process_count() == 1:
        return [[value] for value in values]
    return multihost_utils.process_allgather(np.array(values, np.uint32)).T.tolist()


def _too_large(error: BaseException) -> bool:
    """Whether there is no memory for a checkpoint here, which is then not damaged."""
    return isinstance(error, MemoryError | jax.errors.JaxRuntimeError)


def _forbidden(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error)


def _quieten_orbax() -> None:
    """Keeps Orbax from printing the traceback of what it raises as well, and asyncio those of its
    other tasks that fail with it."""
    for name in ("absl", "asyncio"):
        if _is_no_echo not in logging.getLogger(name).filters:
            logging.getLogger(name).addFilter(_is_no_echo)


def _is_no_echo(record: logging.LogRecord) -> bool:
    if not record.exc_info:
        return True
    frames = traceback.extract_tb(record.exc_info[2]) if record.name == "asyncio" else ()
    return not any(
        f"{os.sep}orbax{os.sep}" in path
        for path in (record.pathname, *(f.filename for f in frames))
    )


def _ignore_late_answers() -> None:
    """Keeps answers that TensorStore gives after a failed read from being printed as tracebacks."""
    if getattr(sys.unraisablehook, "__name__", "") == "but_late_answers":
        return
    report = sys.unraisablehook

    def but_late_answers(event: Any) -> None:
        if str(event.exc_value) != "Event loop is closed":
            report(event)

    sys.unraisablehook = but_late_answers
