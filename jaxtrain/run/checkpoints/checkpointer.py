"""Checkpoints: any pytree saved asynchronously, restored bit for bit into any mesh.

One step is one directory of three items: ``state`` (the arrays, by path), ``manifest`` (every
path's shape, dtype and checksum, the Python numbers, the metrics) and ``config``. Only array data
and JSON are written, so loading a checkpoint runs no code from it; and because leaves are stored by
path and shape alone, neither the devices nor the container types of the saving run matter when
restoring (:mod:`jaxtrain.run.checkpoints.reader`).

Every method is called by all processes alike; Orbax lets each write its own shards and lets only
the finished step directory appear under its final name.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.host import storage
from jaxtrain.host.paths import file_system, is_remote, listed, look, make_folder
from jaxtrain.host.storage import StorageError
from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.run.checkpoints import objects
from jaxtrain.run.checkpoints.leaves import bare, leaves_by_path, ocp, raw_array
from jaxtrain.run.checkpoints.reader import Reader, in_all_processes
from jaxtrain.run.checkpoints.step_folders import files_below
from jaxtrain.sharding.stack import StackedLeaf

logger = logging.getLogger(__name__)

# How long a save tries to list what is there: it is made again by whoever asked for it.
_LIST_SECONDS = 5.0
# A checkpoint is some dozens of files and folders beside its arrays.
_SPARE_FILES = 100
_SPARE_BYTES = 1 << 16
# Bytes of a leaf that are gathered at a time to be hashed.
_PART_BYTES = 1 << 28


class SaveError(StorageError):
    """A checkpoint could not be written; those saved before are as they were.

    Attributes:
      lasts: whether the cause, in any process, is none that passes by itself.
    """

    def __init__(self, *args: Any, lasts: bool = False):
        super().__init__(*args)
        self.lasts = lasts


class Checkpointer(Reader, contextlib.AbstractContextManager):
    """Saves and restores states in one directory, keeping the latest and the best.

    Args:
      directory: where step directories go, local or remote (``gs://bucket/run``); it is created by
        the first save, never by reading.
      keep: how many of the latest checkpoints to keep; None keeps all.
      keep_best: how many of the best by ``best_metric`` to keep besides.
      best_metric, best_mode: what ranks checkpoints, as for :class:`Reader`.
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
        super().__init__(directory, best_metric=best_metric, best_mode=best_mode)
        if (keep is not None and keep < 1) or keep_best < 0:
            raise ValueError(f"`keep` is {keep} and `keep_best` {keep_best}: give at least 1 and 0")
        if save_every is not None and save_every < 1:
            raise ValueError(f"`save_every` is {save_every}; use a number of steps above 0 or None")
        self._keep, self._keep_best, self._save_every = keep, keep_best, save_every
        self._scored: dict[int, float] = {}  # step -> best_metric, for Orbax to ask about
        self._manager: ocp.CheckpointManager | None = None
        self._in_progress = -1
        self._whole: set[int] = set()  # as seen by the last save
        self._remains: set[int] = set()  # of deletions that were interrupted
        self._failed = False  # some save has

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        force: bool = False,
        leave_out: Collection[str] = (),
    ) -> bool:
        """Starts saving ``state`` as ``step`` and returns once the devices have been copied from.

        The buffers of ``state`` may be donated or overwritten as soon as this returns; writing goes
        on in the background. A failure there is raised by the next save, ``wait`` or ``close``.

        The devices hold nothing but ``state`` and a number per leaf: checksums are computed in
        place, arrays are written in the order in which they lie, and of equal shards on several
        devices one is copied whole. Each host holds what its devices write, once, until it is
        written: a share of the state, and all of it where no two processes share. (On a CPU it is
        the buffers of ``state`` that are held, so that the next step makes new ones; and a checksum
        needs the room of its one array.)

        Args:
          step: the number of the step, from 0 and not below the latest one saved.
          state: a pytree of arrays, typed PRNG keys, Python numbers, and leaves that are
            :class:`jaxtrain.sharding.stack.StackedLeaf`, which are saved as what they stand for.
          metrics: numbers kept with the checkpoint; ``best_metric`` is looked up among them.
          config: anything JSON can hold, kept with the checkpoint; tuples come back as lists.
          force: save even where ``save_every`` does not divide ``step``.
          leave_out: paths of arrays of which no more than the shape, dtype and checksum is written.
            Whoever restores them gives them (``base``), such as the frozen weights of a run.

        Returns:
          Whether a save was started: False off the ``save_every`` beat, and where ``step`` is
          already the latest checkpoint.

        Raises:
          ValueError: ``step`` is negative or behind the latest checkpoint, two leaves share a path,
            there is no array to write, or ``leave_out`` has a path that the state lacks.
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
        if unknown := [name for name in leave_out if name not in leaves]:
            raise ValueError(f"leave_out names {unknown[0]!r}, which is no path of the state")
        stored = {name: leaf for name, leaf in leaves.items() if manifests.is_stored(leaf)}
        raw = {n: x if isinstance(x, StackedLeaf) else raw_array(x) for n, x in stored.items()}
        left_out = {n for n in leave_out if n in stored and not manifests.is_key(stored[n])}
        arrays = {name: bare(x) for name, x in raw.items() if name not in left_out}
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
        for name, checksum in manifests.checksums(raw).items():
            entries[name]["checksum"] = checksum
            if isinstance(raw[name], StackedLeaf):
                entries[name] |= manifests.layout(raw[name].order, raw[name].array)
            if name in left_out:
                entries[name]["left_out"] = True
        manifest = {
            "leaves": entries,
            "metrics": {key: manifests.encode(float(x)) for key, x in (metrics or {}).items()},
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays),
            manifest=ocp.args.JsonSave(manifests.seal(manifest)),
            config=ocp.args.JsonSave(manifests.seal({"config": config})),
        )
        self._scored = {**scores, step: self._score(manifest["metrics"])}
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

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps metrics with a checkpoint that was saved without any, so that they rank it.

        Args:
          step: of a checkpoint that is on disk.
          metrics: as for :meth:`save`.

        Raises:
          SaveError: its manifest could not be replaced; the checkpoint is as it was.
        """
        content = self._folders.json(step, "manifest")
        if content["metrics"] or not metrics:
            return
        content["metrics"] = {key: manifests.encode(float(x)) for key, x in metrics.items()}
        with self._failing_as_one(f"the evaluation of checkpoint {step}"):
            if jax.process_index() == 0:
                self._folders.replace_manifest(step, content)

    def drop_after(self, step: int) -> None:
        """Deletes every checkpoint later than ``step``, so that training may go on from there."""
        later = [other for other in self.steps() if other > step]
        # Every process must have listed them all before the first one is gone.
        multihost_utils.sync_global_devices("Checkpointer.drop_after")
        for other in later:
            self._writer().delete(other)

    def is_saved(self, step: int) -> bool | None:
        """Returns whether ``step`` has been saved, None while something is still being written, or
        storage does not tell.

        It never waits, and asks no other process.
        """
        with contextlib.suppress(OSError):
            return None if self.is_saving() else self._folders.is_there(step)
        return None

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

    def size(self, step: int) -> int:
        """Returns the bytes of a checkpoint's files; 0 where they cannot be listed."""
        try:
            return sum(_sizes(self.directory / str(step)))
        except OSError:
            return 0

    def written(self) -> tuple[int, int]:
        """Returns how many files the directory holds and their bytes, which a save makes grow."""
        try:
            sizes = _sizes(self.directory)
        except OSError:  # a file has gone in the meantime, or storage fails
            return (-1, -1)
        return len(sizes), sum(sizes)

    def close(self) -> None:
        """Waits and releases the writer's threads; saving again would start new ones."""
        try:
            self.wait()
        finally:
            self._abandon()
        # A thread of a save that failed may have written on after the next writer's clearing.
        if self._failed and jax.process_index() == 0 and not is_remote(self.directory):
            with contextlib.suppress(OSError):
                for path in listed(self.directory):
                    if path.name.endswith(ocp.path.atomicity.TMP_DIR_SUFFIX):
                        path.rmtree()

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
                preservation_policy=self,
                cleanup_tmp_directories=True,
                # Made in the background, a directory that cannot be made (full disk) leaves the
                # other items' threads waiting five minutes for it, and the process with them.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                # One step may be saved in two directories at a time, whose barriers must differ.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    barrier_sync_key_prefix=self.directory.name
                ),
            )
            # Written together by all that have the same shard, each part of it would be sliced off
            # on its device first: of all leaves at once, half a state where two have it.
            kinds = ocp.type_handlers
            registry = kinds.create_type_handler_registry(
                (np.ndarray, kinds.NumpyHandler()),
                (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
            )
            handlers = {item: ocp.JsonCheckpointHandler() for item in ("manifest", "config")}
            if as_objects := objects.holds(self.directory):
                pairs = [(kind, objects.ObjectHandler(kind)) for kind in (np.ndarray, jax.Array)]
                registry = kinds.create_type_handler_registry(*pairs)
                # Such a bucket has no rename: what is whole holds a file that is written last.
                options.temporary_path_class = ocp.path.atomicity.CommitFileTemporaryPath
            handlers["state"] = ocp.PyTreeCheckpointHandler(
                type_handler_registry=registry, use_ocdbt=not as_objects
            )
            self._manager = ocp.CheckpointManager(
                self.directory, options=options, item_handlers=handlers
            )
        return self._manager

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's PreservationPolicy protocol: which to keep; those not scored here are kept, but
        for remains that are older than the latest."""
        del context
        kept = self._kept({c.step for c in checkpoints} & self._scored.keys())
        old = sorted(self._scored)[-(self._keep or len(self._scored)) :][0]
        unwanted = (self._scored.keys() - kept) | {step for step in self._remains if step < old}
        return [c.step not in unwanted for c in checkpoints]

    def _kept(self, steps: Iterable[int]) -> set[int]:
        """Which of these steps, all with a score, are among the latest or the best."""
        present = sorted(steps)
        latest = present if self._keep is None else present[-self._keep :]
        best = self._ranked({step: self._scored[step] for step in present})[: self._keep_best]
        return {*latest, *best}

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
        kinds = in_all_processes([(error is not None) + storage.lasts(error)])[0]
        if any(kinds):
            self._abandon()
            self._failed = True
            reason = (
                "another process failed to write its part" if error is None else storage.why(error)
            )
            text = f"{what} could not be saved in {self.directory}: {reason}"
            raise SaveError(text, lasts=max(kinds) == 2) from error

    def _check_room(self, step: int, size: int) -> None:
        """Raises before anything is written where it cannot be; remote stores say so themselves."""
        if "://" in str(self.directory):
            return
        with self._failing_as_one(f"checkpoint {step}"):
            if jax.process_index() == 0:
                make_folder(self.directory)
                if not os.access(self.directory, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                disk = os.statvfs(self.directory)
                free = disk.f_bavail * disk.f_frsize
                if free < size + _SPARE_BYTES:
                    raise OSError(
                        errno.ENOSPC,
                        f"it takes up to {size + _SPARE_BYTES:,} bytes and {free:,} are free",
                    )
                if disk.f_files and disk.f_favail < _SPARE_FILES:
                    raise OSError(errno.ENOSPC, "the file system has no room for more files")

    def _look_around(self, step: int) -> dict[int, float]:
        """The scores of the whole checkpoints; moves away what is in the way of saving ``step``."""
        with self._failing_as_one(f"checkpoint {step}"):
            found = self._folders.found(seconds=_LIST_SECONDS)
            scores = self._scores(seconds=_LIST_SECONDS)
            # What the save before was to delete and storage did not: a new manager will.
            surplus = (self._scored.keys() - self._kept(self._scored)).intersection(found)
            if surplus:
                self._abandon()
            if self._manager is None:
                self._remains = set(self._folders.remains(seconds=_LIST_SECONDS))
        lost = self._whole.intersection(found) - scores.keys() - surplus
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
        scores = self._scored
        there = scores.keys() - {step}
        surplus = there - self._kept(scores) - {max(there, default=None)}
        self._abandon()
        if jax.process_index() == 0 and full:
            for other in surplus:
                with contextlib.suppress(OSError):
                    (self.directory / str(other)).rmtree()
        in_all_processes([0])  # all wait until they are gone


def _sizes(folder: epath.Path) -> list[int]:
    if is_remote(folder):  # where a listing is one request, and a look at each file two
        system, name = file_system(folder)
        return [each["size"] or 0 for each in system.find(name, detail=True).values()]
    return [entry.size for entry in map(look, files_below(folder)) if entry is not None]


def digest(state: Any) -> str:
    """Returns the SHA-256 of a state's paths, dtypes, shapes and bytes.

    Two states have the same digest when they are equal bit for bit, wherever their shards live; it
    is that of :func:`leaf_digests`, whose conditions hold.

    >>> digest({"a": np.zeros(2), "b": 1}) == digest({"b": 1, "a": np.zeros(2)})
    True
    >>> digest({"a": np.zeros(2)}) == digest({"a": -np.zeros(2)})
    False
    """
    return manifests.digest_of(leaf_digests(state))


def leaf_digests(state: Any) -> dict[str, str]:
    """Returns the SHA-256 of each leaf by its path: of its dtype, its shape and its bytes, which
    are row-major and those of layers in natural order, whatever the devices and processes.

    Threads hash several leaves at a time. In a run of several processes all must call it: a leaf
    that no process has whole is gathered, in parts of 256 MiB where its layers lie in order.
    """
    leaves = sorted(leaves_by_path(state).items())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashed = [(name, pool.submit(_hash, name, leaf)) for name, leaf in leaves if _is_here(leaf)]
        found = {name: _hash(name, leaf) for name, leaf in leaves if not _is_here(leaf)}
        return found | {name: each.result() for name, each in hashed}


def _is_here(leaf: Any) -> bool:
    return getattr(bare(leaf), "is_fully_addressable", True)


def _hash(name: str, leaf: Any) -> str:
    sha = hashlib.sha256(json.dumps(manifests.describe(name, leaf), sort_keys=True).encode())
    if manifests.is_number(leaf):
        return sha.hexdigest()
    array, whole = raw_array(leaf), isinstance(leaf, StackedLeaf)
    parts = -(-array.nbytes // _PART_BYTES) if array.ndim and not (whole or _is_here(leaf)) else 1
    for rows in (
        np.array_split(np.arange(len(array)), min(parts, len(array))) if parts > 1 else [None]
    ):
        part = array if rows is None else array[rows[0] : rows[-1] + 1]
        if not _is_here(leaf):
            part = multihost_utils.process_allgather(part, tiled=True)
        part = leaf.order.join(np.asarray(part)) if whole else np.asarray(part)
        sha.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return sha.hexdigest()


# What Orbax says of arrays that are plain objects.
_NOT_OCDBT = ("Skipping merge of OCDBT", "No ArrayMetadata Store defined")


def _quieten_orbax() -> None:
    """Keeps Orbax from printing the traceback of what it raises as well, and asyncio those of its
    other tasks that fail with it."""
    for name in ("absl", "asyncio"):
        if _is_no_echo not in logging.getLogger(name).filters:
            logging.getLogger(name).addFilter(_is_no_echo)


def _is_no_echo(record: logging.LogRecord) -> bool:
    if not record.exc_info:
        return not any(text in str(record.msg) for text in _NOT_OCDBT)
    frames = traceback.extract_tb(record.exc_info[2]) if record.name == "asyncio" else ()
    return not any(
        f"{os.sep}orbax{os.sep}" in path
        for path in (record.pathname, *(f.filename for f in frames))
    )
