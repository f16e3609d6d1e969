"""Checkpoints: any pytree saved asynchronously, restored bit for bit into any mesh.

One step is one directory of three items: ``state`` (the arrays, by path), ``manifest`` (every
path's shape and dtype, the Python numbers, the metrics) and ``config``. Only array data and JSON
are written, so loading a checkpoint runs no code from it; and because leaves are stored by path and
shape alone, neither the devices nor the container types of the saving run matter when restoring.

Every method is called by all processes alike; Orbax lets each write its own shards and lets only
the finished step directory appear under its final name.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.tree import path_name

_ITEMS = ("state", "manifest", "config")
_JSON_FILE = "metadata"  # the name Orbax's JSON handler gives its file


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
        self.directory = _absolute(directory)
        self._save_every = save_every
        self._best_metric = best_metric
        self._retention = _Retention(keep, keep_best, best_mode)
        self._manager: ocp.CheckpointManager | None = None

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
        """
        step = int(step)
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        if not force and self._save_every and step % self._save_every:
            return False
        manager = self._writer()
        manager.wait_until_finished()
        whole = [s for s in manager.all_steps() if s in self._retention.scores]
        latest = max(whole, default=-1)
        if step == latest:
            return False
        if step < latest:
            raise ValueError(
                f"step {step} is behind the latest checkpoint {latest} in {self.directory}: call "
                f"drop_after({step}) first to continue from an older step, or use a new directory"
            )
        if step in manager.all_steps():
            raise ValueError(
                f"{self.directory / str(step)} exists but holds no whole checkpoint; remove it"
            )
        leaves = _named(state)
        manifest = {
            "leaves": {name: _describe(name, leaf) for name, leaf in leaves.items()},
            "metrics": {key: _encode(float(value)) for key, value in (metrics or {}).items()},
        }
        arrays = {name: _raw(leaf) for name, leaf in leaves.items() if _is_stored(leaf)}
        if not arrays:
            raise ValueError("the state has no array with elements: nothing to save")
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays),
            manifest=ocp.args.JsonSave(manifest),
            config=ocp.args.JsonSave(_plain_json(config or {})),
        )
        self._retention.scores[step] = self._score(manifest)
        manager.save(step, args=items, force=True)
        return True

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """Reads a checkpoint into the structure, shardings and dtypes of ``abstract_state``.

        Args:
          abstract_state: a pytree of ``jax.ShapeDtypeStruct`` with shardings, or a state whose
            values are ignored. A leaf without a sharding comes back uncommitted on the default
            device, a NumPy leaf stays on the host, a Python number comes back as one.
          step: which checkpoint; None means the latest.

        Returns:
          The state as it was saved, bit for bit; ``abstract_state`` is left alone.

        Raises:
          FileNotFoundError: there is no checkpoint, or not that one.
          ValueError: the checkpoint is of another model: the first path that differs is named.
        """
        step, saved = self._manifest(step)
        wanted = _named(abstract_state)
        self._check(step, saved, wanted)
        if extra := [name for name in saved if name not in wanted]:
            raise ValueError(
                f"{self._of_another_model(step)}: it holds {extra[0]!r} {_kind(saved[extra[0]])}, "
                f"which the state lacks ({len(extra)} such paths)"
            )
        return self._read(step, saved, abstract_state)

    def restore_part(self, abstract_state: Any, step: int | None = None) -> Any:
        """Like ``restore`` for a part of the saved tree: paths it does not name are not read.

        ``restore_part({"params": abstract_params})`` reads the parameters of a training state
        without its optimizer state.
        """
        step, saved = self._manifest(step)
        self._check(step, saved, _named(abstract_state))
        return self._read(step, saved, abstract_state)

    def steps(self) -> list[int]:
        """Returns the steps with a whole checkpoint, in order; waits for a save in progress."""
        self.wait()
        if not self.directory.exists():
            return []
        found = ocp.path.step.standard_name_format().find_all(self.directory)
        return sorted(
            entry.step for entry in found if all((entry.path / item).exists() for item in _ITEMS)
        )

    def latest_step(self) -> int | None:
        """Returns the last step saved, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step with the best ``best_metric``, the earliest among equals, or None."""
        scores = {step: self._score(self._json(step, "manifest")) for step in self.steps()}
        return next(iter(self._retention.ranked(scores)), None)

    def config(self, step: int | None = None) -> dict[str, Any]:
        """Returns the config saved with ``step`` (None: the latest)."""
        return self._json(self._resolve(step), "config")

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """Returns the metrics saved with ``step`` (None: the latest)."""
        metrics = self._json(self._resolve(step), "manifest")["metrics"]
        return {key: float(value) for key, value in metrics.items()}

    def drop_after(self, step: int) -> None:
        """Deletes every checkpoint later than ``step``, so that training may go on from there."""
        later = [other for other in self.steps() if other > step]
        # Every process must have listed them all before the first one is gone.
        multihost_utils.sync_global_devices("Checkpointer.drop_after")
        for other in later:
            self._writer().delete(other)
            self._retention.scores.pop(other, None)

    def wait(self) -> None:
        """Blocks until the save in progress, if any, is on disk; raises what went wrong there."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and releases the writer's threads; saving again would start new ones."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _writer(self) -> ocp.CheckpointManager:
        # Opened by the first save: only a writer may clear away what a killed save left behind, for
        # to a reader beside a running job that would be the save in progress.
        if self._manager is None:
            self._retention.scores = {
                step: self._score(self._json(step, "manifest")) for step in self.steps()
            }
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._retention, cleanup_tmp_directories=True
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager

    def _score(self, manifest: Mapping[str, Any]) -> float:
        return float(manifest["metrics"].get(self._best_metric, math.nan))

    def _resolve(self, step: int | None) -> int:
        steps = self.steps()
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

    def _json(self, step: int, item: str) -> dict[str, Any]:
        return json.loads((self.directory / str(step) / item / _JSON_FILE).read_text())

    def _manifest(self, step: int | None) -> tuple[int, dict[str, dict[str, Any]]]:
        step = self._resolve(step)
        return step, self._json(step, "manifest")["leaves"]

    def _of_another_model(self, step: int) -> str:
        return f"checkpoint {step} in {self.directory} is of another model"

    def _check(self, step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        for name, leaf in wanted.items():
            entry = _describe(name, leaf)
            if name not in saved:
                missing = sum(other not in saved for other in wanted)
                raise ValueError(
                    f"{self._of_another_model(step)}: it lacks {name!r} {_kind(entry)}, which the "
                    f"state has ({missing} such paths)"
                )
            if not _agree(saved[name], entry):
                raise ValueError(
                    f"{self._of_another_model(step)}: {name!r} is {_kind(saved[name])} there and "
                    f"{_kind(entry)} in the state"
                )

    def _read(self, step: int, saved: Mapping[str, Any], abstract_state: Any) -> Any:
        wanted = _named(abstract_state)
        stored = {n: leaf for n, leaf in wanted.items() if _in_file(saved[n])}
        arrays = {}
        if stored:
            # Shapes and placements come from the caller alone; the sharding that Orbax recorded
            # names devices which may not exist here.
            items = ocp.args.PyTreeRestore(
                item={name: 0 for name in stored},
                restore_args={n: _restore_args(saved[n], leaf) for n, leaf in stored.items()},
                partial_restore=True,
            )
            reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
            path = self.directory / str(step)
            arrays = reader.restore(path, args=ocp.args.Composite(state=items))["state"]
            reader.close()
        leaves = [_finish(saved[n], arrays.get(n), leaf) for n, leaf in wanted.items()]
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
    for name, leaf in sorted(_named(state).items()):
        sha.update(json.dumps([name, _describe(name, leaf)], sort_keys=True).encode())
        if not _is_number(leaf):
            sha.update(np.ascontiguousarray(_gather(_raw(leaf))).tobytes())
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
        present = sorted(c.step for c in checkpoints if c.step in self.scores)
        latest = present if self._keep is None else present[-self._keep :]
        best = self.ranked({step: self.scores[step] for step in present})[: self._keep_best]
        return [c.step not in self.scores or c.step in {*latest, *best} for c in checkpoints]


def _absolute(directory: epath.PathLike) -> epath.Path:
    # A remote path must not be resolved: that would turn gs://bucket into a local directory.
    path = epath.Path(directory)
    return path if "://" in str(path) else path.expanduser().resolve()


def _named(tree: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if not name:
            raise ValueError("the state is a bare leaf without a path; put it in a dict")
        if name in named:
            raise ValueError(f"two leaves of the state share the path {name!r}; rename one of them")
        named[name] = leaf
    return named


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, int, float)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_stored(leaf: Any) -> bool:
    """Whether the leaf has elements for the array file; numbers and empty arrays need none."""
    return not _is_number(leaf) and math.prod(leaf.shape) > 0


def _in_file(entry: Mapping[str, Any]) -> bool:
    """``_is_stored`` of a manifest entry."""
    return "value" not in entry and math.prod(entry["shape"]) > 0


def _describe(name: str, leaf: Any) -> dict[str, Any]:
    """Returns the manifest entry of a leaf, concrete or abstract."""
    if _is_number(leaf):
        return {"python": type(leaf).__name__, "value": _encode(leaf)}
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"leaf {name!r} of the state is a {type(leaf).__name__}: a checkpoint holds arrays, "
            "PRNG keys and Python numbers only"
        )
    entry = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if _is_key(leaf):
        if isinstance(leaf, jax.Array):
            entry["impl"] = str(jax.random.key_impl(leaf))
    elif not (jax.dtypes.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool):
        raise TypeError(f"leaf {name!r} of the state has dtype {leaf.dtype}, which is no number")
    return entry


def _kind(entry: Mapping[str, Any]) -> str:
    if "value" in entry:
        return f"the Python {entry['python']} {entry['value']}"
    return f"{entry['dtype']}{tuple(entry['shape'])}"


def _agree(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if "value" in saved and "value" in wanted:
        return saved["python"] == wanted["python"]
    if "value" in saved:  # a number may be wanted as a scalar array: eval_shape makes it one
        return wanted["shape"] == [] and _holds(wanted["dtype"], _decode(saved))
    return "value" not in wanted and all(saved[k] == wanted[k] for k in ("shape", "dtype"))


def _holds(dtype_name: str, value: bool | int | float) -> bool:
    """Whether a scalar array of this dtype is what JAX would make of the Python number."""
    if dtype_name == "bool" or isinstance(value, bool):
        return dtype_name == "bool" and isinstance(value, bool)
    if dtype_name.startswith("key<"):
        return False
    dtype = jax.numpy.dtype(dtype_name)
    if isinstance(value, float):
        return jax.dtypes.issubdtype(dtype, np.floating)
    if not jax.dtypes.issubdtype(dtype, np.integer):
        return False
    info = jax.numpy.iinfo(dtype)
    return int(info.min) <= value <= int(info.max)


def _encode(value: bool | int | float) -> bool | int | float | str:
    # JSON has no NaN and no infinity; float() reads these words back.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _decode(entry: Mapping[str, Any]) -> bool | int | float:
    return {"bool": bool, "int": int, "float": float}[entry["python"]](entry["value"])


def _plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``config`` as JSON reads it back, safe from later changes."""
    plain = {}
    for key, value in config.items():
        try:
            plain[str(key)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"config entry {key!r} cannot be written as JSON: {error}") from error
    return plain


def _raw(leaf: Any) -> Any:
    """Returns the array whose bytes stand for the leaf: a PRNG key's words, else the leaf."""
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return np.asarray(leaf)


def _gather(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where the leaf is to live; None for the host and for arrays bound to no device."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _restore_args(entry: Mapping[str, Any], leaf: Any) -> ocp.RestoreArgs:
    sharding = _sharding(leaf)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if _is_key(leaf):
        # A key's words are one more dimension, unsharded, which the leaf's sharding leaves out.
        return ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.dtype("uint32"))
    return ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=tuple(entry["shape"]), dtype=leaf.dtype
    )


def _finish(entry: Mapping[str, Any], restored: Any, leaf: Any) -> Any:
    """Turns what was read into a leaf of the kind that ``leaf`` is."""
    if _is_number(leaf):
        return _decode(entry)
    if restored is None:  # not in the array file: a number, or an array without elements
        restored = _from_manifest(entry, leaf)
    if isinstance(leaf, np.generic):
        return np.asarray(restored)[()]
    if isinstance(leaf, np.ndarray):
        return restored
    sharding = _sharding(leaf)
    if isinstance(restored, np.ndarray):
        restored = _place(restored, sharding if not _is_key(leaf) else None)
    if not _is_key(leaf):
        return restored
    keys = jax.random.wrap_key_data(restored, impl=entry["impl"])
    return keys if sharding is None else jax.device_put(keys, sharding)


def _from_manifest(entry: Mapping[str, Any], leaf: Any) -> np.ndarray:
    if "value" in entry:
        return np.full((), _decode(entry), leaf.dtype)
    if "impl" in entry:
        words = jax.random.key_data(jax.random.key(0, impl=entry["impl"]))
        return np.zeros((*leaf.shape, *words.shape), words.dtype)
    return np.zeros(leaf.shape, leaf.dtype)


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.numpy.array(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
