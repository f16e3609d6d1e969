"""Reading checkpoints: which there are, what they say of themselves, and their arrays anywhere.

The first process says which steps there are and what their manifests hold, and all must have read
the same arrays, or none goes on with them. What was read is compared with the checksums, so a
checkpoint that was cut short or changed is an error, or passed over for the one before it, and
never a wrong state.
"""

import json
import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.host import storage
from jaxtrain.host.paths import absolute, check_for_checkpoints
from jaxtrain.host.storage import StorageError
from jaxtrain.run.checkpoints import leaves as places
from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.run.checkpoints import objects
from jaxtrain.run.checkpoints.leaves import leaves_by_path, ocp
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError
from jaxtrain.run.checkpoints.step_folders import StepFolders
from jaxtrain.sharding.stack import StackedLeaf
from jaxtrain.tree import map_named, named_leaves, owner_of

logger = logging.getLogger(__name__)

Base = Callable[[], Any]


class Reader:
    """Reads the checkpoints of one directory; all processes call every method alike.

    Args:
      directory: where step directories are, local or remote (``gs://bucket/run``).
      best_metric: the key of ``metrics`` that ranks checkpoints; those saved without it, or with a
        non-finite value, are never the best.
      best_mode: whether ``"min"`` or ``"max"`` of the metric is best.

    Raises:
      ValueError: ``best_mode`` is neither, or no checkpoint can be in such a directory.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        best_metric: str = "eval/loss",
        best_mode: Literal["min", "max"] = "min",
    ):
        if best_mode not in ("min", "max"):
            raise ValueError(f"`best_mode` is {best_mode!r}; use 'min' or 'max'")
        check_for_checkpoints(directory)
        self.directory = absolute(directory)
        self._best_metric, self._sign = best_metric, 1 if best_mode == "min" else -1
        self._folders = StepFolders(self.directory)
        self._damaged: set[int] = set()  # found so by restore, for the next save to move away

    def wait(self) -> None:
        """Blocks until what is being written is there; a reader alone has nothing to wait for."""

    def steps(self) -> list[int]:
        """Returns the steps with a whole checkpoint, in order; waits for a save in progress.

        Whole is one with all its items and a sound manifest; that its arrays are sound too is known
        when they have been read.
        """
        self.wait()
        return sorted(self._scores())

    def check_sound(self) -> None:
        """Refuses checkpoints that :meth:`latest_step` and :meth:`best_step` would pass over.

        Raises:
          DamagedCheckpointError: a manifest cannot be read, or the newest step lacks files.
        """
        if damages := self._folders.damages():
            step, fault = max(damages.items())
            sound = ", ".join(map(str, self.steps())) or "none"
            raise DamagedCheckpointError(
                f"{fault}; to use a sound checkpoint ({sound}), name its step, or move "
                f"{self.directory / str(step)} out of the folder"
            )

    def latest_step(self) -> int | None:
        """Returns the last step saved, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best ``best_metric``, the earliest among equals, or None."""
        return next(iter(self.best_steps()), None)

    def best_steps(self) -> list[int]:
        """Returns the steps with a finite ``best_metric``, the best first."""
        self.wait()
        return self._ranked(self._scores())

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
        metrics = self._folders.json(self._resolve(step), "manifest")["metrics"]
        return {key: float(value) for key, value in metrics.items()}

    def shapes(self, step: int | None = None) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each array saved with ``step`` (None: the latest), by its path."""
        saved = self._folders.json(self._resolve(step), "manifest")["leaves"]
        return {path: tuple(leaf["shape"]) for path, leaf in saved.items() if "shape" in leaf}

    def leaves(self, step: int) -> Iterator[tuple[str, Any]]:
        """Yields the arrays and numbers of a checkpoint by their paths, on the host, one at a time;
        those that were left out of it are passed over. Raises as :meth:`restore` does."""
        for path, entry in self._folders.json(step, "manifest")["leaves"].items():
            if not manifests.is_left_out(entry):
                yield path, self.restore_part({path: manifests.placeholder(entry)}, step)[path]

    def restore(self, abstract_state: Any, step: int | None = None, *, base: Base | None = None):
        """Reads a checkpoint into the structure, shardings and dtypes of ``abstract_state``.

        The devices hold what is returned and, where a leaf lies in another order in the file
        (:class:`jaxtrain.sharding.stack.StackedLeaf`), that leaf once more, one at a time.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` with shardings, or a state whose
            values are ignored. A leaf without a sharding comes back uncommitted on the default
            device, a NumPy leaf stays on the host, a Python number comes back as one; for a
            ``StackedLeaf`` the array that it is to stand for comes.
          step: which checkpoint; None means the latest that is not damaged: damaged ones are named
            in the log, and moved aside by the next save.
          base: called where leaves were left out of the checkpoint; returns a tree that has them
            under their paths (others are ignored), such as the state that the run began with. They
            are handed over: what is returned may share their buffers.

        Returns:
          The state as it was saved, bit for bit; ``abstract_state`` is left alone.

        Raises:
          FileNotFoundError: there is no checkpoint, or not that one.
          DamagedCheckpointError: that checkpoint, or every one, is not what was saved.
          ValueError: the checkpoint is of another model, and the first path that differs is named;
            or it leaves out leaves, and ``base`` is missing or has others under their paths.
        """
        return self._restore(abstract_state, step, base, whole=True)

    def restore_part(
        self, abstract_state: Any, step: int | None = None, *, base: Base | None = None
    ) -> Any:
        """Like ``restore`` for a part of the saved tree: paths it does not name are not read.

        ``restore_part({"params": abstract_params})`` reads the parameters of a training state
        without its optimizer state.
        """
        return self._restore(abstract_state, step, base, whole=False)

    def restore_params(
        self, abstract_params: Any, step: int | None = None, *, base: Base | None = None
    ) -> Any:
        """Reads the parameters of a train state, and what its model state has under other paths.
        Where the optimizer keeps an average of a parameter (:func:`jaxtrain.averaged`), the average
        is read, in float32 or wider.

        Args:
          abstract_params: as for ``restore``; where a parameter was kept in another floating-point
            dtype (``Policy.pure_bf16()``), it comes in that one.
          step: as there.
          base: as there, for the parameters alone.
        """
        damages = self._folders.damages() if step is None else {}
        step = self._resolve(step)
        for damaged, fault in damages.items():
            if damaged > step:
                logger.warning("%s; reading the parameters of checkpoint %d", fault, step)
        saved = self._folders.json(step, "manifest")["leaves"]
        params = {path.removeprefix("params/") for path in saved if path.startswith("params/")}
        owners = {path: owner_of(path, params) for path in saved}
        kept = {name: path for path, name in owners.items() if path.endswith(f"/ema/{name}")}

        def place(name: str, _: Any) -> str:
            of_state = name not in params and f"model_state/{name}" in saved
            return kept.get(name, f"{'model_state' if of_state else 'params'}/{name}")

        paths = map_named(place, abstract_params)
        parts = {
            path: manifests.in_saved_precision(saved.get(path, {}), leaf)
            for path, leaf in zip(*map(jax.tree.leaves, (paths, abstract_params)), strict=True)
        }
        whole = base and (lambda: {"params": base()})
        return jax.tree.map(self.restore_part(parts, step, base=whole).get, paths)

    def _ranked(self, scores: Mapping[int, float]) -> list[int]:
        """Steps with a finite score, best first, the earliest first among equals."""
        finite = [step for step, score in scores.items() if math.isfinite(score)]
        return sorted(finite, key=lambda step: (self._sign * scores[step], step))

    def _score(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics.get(self._best_metric, math.nan))

    def _scores(self, *, seconds: float | None = None) -> dict[int, float]:
        """The whole checkpoints, and what ``best_metric`` was for each."""
        whole = self._folders.whole(seconds=seconds)
        return {step: self._score(metrics) for step, metrics in whole.items()}

    def _resolve(self, step: int | None) -> int:
        """The step of a checkpoint that is there, or the latest whole one."""
        if step is None and (step := self.latest_step()) is not None:
            return step
        return self._candidates(step)[0]

    def _candidates(self, step: int | None) -> list[int]:
        """That step if there is a checkpoint of it; None for all, the latest first.

        Raises:
          FileNotFoundError: it is not there.
        """
        self.wait()
        steps = self._folders.found()
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}: it has {there}"
            )
        return steps[::-1] if step is None else [step]

    def _restore(self, abstract_state: Any, step: int | None, base: Base | None, *, whole: bool):
        wanted, structure = leaves_by_path(abstract_state), jax.tree.structure(abstract_state)
        steps, damages = self._candidates(step), []
        for candidate in steps:
            try:
                try:
                    leaves = self._read_sound(candidate, wanted, base, whole)
                except DamagedCheckpointError:  # A read that was torn once condemns nothing.
                    leaves = self._read_sound(candidate, wanted, base, whole)
            except DamagedCheckpointError as damage:
                damages.append(damage)
                continue
            if damages:
                self._damaged |= {other for other in steps if other > candidate}
            for damage in damages:
                logger.warning("%s; going on from checkpoint %d", damage, candidate)
            return jax.tree.unflatten(structure, leaves)
        others = f"; so are all {len(damages)} checkpoints" if damages[1:] else ""
        raise DamagedCheckpointError(f"{damages[0]}{others}")

    def _read_sound(
        self, step: int, wanted: Mapping[str, Any], base: Base | None, whole: bool
    ) -> list[Any]:
        """The wanted leaves of one checkpoint, having made sure that they are what was saved."""
        # The manifest of the first process is that of all: what each reads is held against it.
        saved = self._folders.json(step, "manifest")["leaves"]
        of = f"checkpoint {step} in {self.directory}"
        entries = {name: manifests.describe(name, leaf) for name, leaf in wanted.items()}
        if difference := manifests.difference(saved, entries, whole=whole):
            raise ValueError(f"{of} {difference}")
        raw = _left_out(of, {name: saved[name] for name in wanted}, wanted, base)
        given = frozenset(raw)
        error: Exception | None = None
        try:
            if jax.process_index() != 0:
                self._folders.wait_for(step)
            raw |= self._read_arrays(step, saved, wanted)
        except Exception as caught:
            error = caught
        # Checksums are computed by all processes together, or by none.
        self._agree(step, error)
        cuts = {n: leaf.order for n, leaf in wanted.items() if isinstance(leaf, StackedLeaf)}
        found = manifests.checksums(
            {n: StackedLeaf(x, cuts[n]) if n in cuts else x for n, x in raw.items()}
        )
        changed = [n for n, x in found.items() if x != saved[n].get("checksum", x)]
        if changed and changed[0] in given:
            error = ValueError(
                f"{of} leaves out {changed[0]!r}, and what was given in its place is not what the "
                "run began with (checksum): give that"
            )
        elif changed:
            what = f"{changed[0]!r} is not what was saved (checksum)"
            error = self._folders.damage(step, what)
        self._agree(step, error, zlib.crc32(json.dumps(found, sort_keys=True).encode()))
        try:
            return [places.finish_leaf(saved[n], raw.get(n), leaf) for n, leaf in wanted.items()]
        except (KeyError, TypeError, ValueError) as error:  # keys of no known kind
            raise self._folders.damage(
                step, f"a PRNG key in it is none ({storage.why(error)})"
            ) from error

    def _agree(self, step: int, error: Exception | None, read: int = 0) -> None:
        """Raises in all processes alike where one failed to read a step, or they read different
        bits."""
        kind = 0 if error is None else 1 if isinstance(error, DamagedCheckpointError) else 2
        kinds, reads = in_all_processes([kind, read])
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

    def _read_arrays(
        self, step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Reads the arrays of the wanted leaves, in their order; keys as their words."""
        read: dict[str, Any] = {}
        stored = {n: leaf for n, leaf in wanted.items() if manifests.in_file(saved[n])}
        for args in places.portions(saved, stored):
            arrays = self._read_file(step, args)
            for name in args:
                array, leaf = arrays.pop(name, None), stored[name]
                shape, key = places.shape_in_file(saved[name]), manifests.is_key(leaf)
                there = getattr(array, "shape", None)
                if there is None or (there[:-1] if key else there) != shape:  # a key is of words
                    raise self._folders.damage(
                        step, f"it lacks the array {name!r}, which its manifest has"
                    )
                if not key and str(array.dtype) != saved[name]["dtype"]:
                    raise self._folders.damage(step, f"{name!r} is {array.dtype} in its arrays")
                read[name] = places.laid_out(saved[name], array, leaf)
                del array  # before the next one is read
        return read

    def _read_file(self, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
        folder = self.directory / str(step) / "state"
        if objects.holds(self.directory):
            try:
                return objects.read(folder, args)
            except (FileNotFoundError, ValueError) as error:
                what = f"its arrays cannot be read ({storage.why(error)})"
                raise self._folders.damage(step, what) from error
        # The handler alone: around it Orbax's checkpointer has the processes wait for each other,
        # also for one that has failed.
        handler = ocp.PyTreeCheckpointHandler()
        items = ocp.args.PyTreeRestore(
            item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
        )
        try:
            return storage.retrying(
                lambda: handler.restore(folder, args=items),
                f"the arrays of checkpoint {step} in {self.directory}",
                passing=lambda error: not _too_large(error) and storage.passes(error),
            )
        except Exception as error:  # whatever a parser raises that meets nonsense
            _ignore_late_answers()
            if _too_large(error) or isinstance(error, StorageError):
                raise
            if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
                raise PermissionError(
                    f"checkpoint {step} in {self.directory} cannot be read: {storage.why(error)}"
                ) from error
            what = f"its arrays cannot be read ({storage.why(error)})"
            raise self._folders.damage(step, what) from error
        finally:
            handler.close()


def in_all_processes(values: list[int]) -> list[list[int]]:
    """Returns each of some numbers (32 bits), from every process in order; all call it alike."""
    if jax.process_count() == 1:
        return [[value] for value in values]
    return multihost_utils.process_allgather(np.array(values, np.uint32)).T.tolist()


def _left_out(
    of: str, saved: Mapping[str, Any], wanted: Mapping[str, Any], base: Base | None
) -> dict[str, Any]:
    """Returns the base's arrays for those that a checkpoint leaves out; not compared yet."""
    names = [name for name, entry in saved.items() if manifests.is_left_out(entry)]
    given = named_leaves(base()) if base and names else {}
    given = {name: places.bare(leaf) for name, leaf in given.items()}
    for name in names:
        like, leaf = places.bare(wanted[name]), given.get(name)
        if leaf is None or (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{of} leaves out {name!r} {manifests.kind(saved[name])} ({len(names)} such "
                "paths): give as `base` a function that returns what the run began with, such as "
                "jaxtrain.init_state(..., params=), or the parameters where they alone are restored"
            )
    return {name: places.placed_as(given[name], wanted[name]) for name in names}


def _too_large(error: BaseException) -> bool:
    """Whether there is no memory for a checkpoint here, which is then not damaged."""
    return isinstance(error, MemoryError | jax.errors.JaxRuntimeError)


def _ignore_late_answers() -> None:
    """Keeps answers that TensorStore gives after a failed read from being printed as tracebacks."""
    if getattr(sys.unraisablehook, "__name__", "") == "but_late_answers":
        return
    report = sys.unraisablehook

    def but_late_answers(event: Any) -> None:
        if str(event.exc_value) != "Event loop is closed":
            report(event)

    sys.unraisablehook = but_late_answers
