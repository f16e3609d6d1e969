"""Records of a run's settings, data and versions, so that resuming it can say what has changed.

A record is the experiment's config and, under ``provenance``, facts that its flags do not tell:
fingerprints of its data, the mesh, the threads of XLA on a CPU, the versions of packages.
``config.json`` in the run's folder holds the one it began with, each line of ``changes.jsonl`` one
that it went on with, and every checkpoint its own. All of it is data: nothing that is named there
is imported or opened.
"""

import contextlib
import dataclasses
import datetime
import difflib
import fnmatch
import importlib.metadata
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import optax
from etils import epath
from jax.sharding import Mesh

from jaxtrain.engines.plain import accepted_kwargs
from jaxtrain.experiment import Experiment, optimizer_for
from jaxtrain.host import storage
from jaxtrain.host.paths import read_if_there
from jaxtrain.host.simulated import thread_count
from jaxtrain.jaxprs import digest
from jaxtrain.layout import Effect
from jaxtrain.run.folder import CHANGES, CONFIG, write_text
from jaxtrain.sharding.mesh import describe_mesh

PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "grain", "numpy")
# Another version of these may trace the same optimizer to another program.
TRACING = ("jaxtrain", "jax", "optax")

# The run options that are of one start and not of the run.
OF_START = ("run_dir", "resume", "auto_resume", "overwrite", "accept_changes")
# Versions change with an image or a machine, under runs that nobody watches: what they change is
# rounding, unless a package has a fault, so they are shown and refused nowhere.
_OF_ANY_RUN = {
    **{f"run.{name}": Effect.NONE for name in OF_START},
    "run.*": Effect.SAME,
    "mesh": Effect.ROUNDED,
    "microbatches": Effect.ROUNDED,
    "threads": Effect.ROUNDED,
    "versions.*": Effect.ROUNDED,
    "code.*": Effect.CODE,
    "best": Effect.SAME,
}
# Flags that decide in how many microbatches a step takes its batch.
MICROBATCHES = ("accumulate", "pipeline.microbatches", "mesh.pipe")
_ABSENT = "(none)"


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that a resumed run has otherwise: its name, as ``--accept-changes`` takes it, what
    the run had then and would go on with now, and what that means for the steps to come (None where
    they would be of neither run)."""

    name: str
    then: Any
    now: Any
    meaning: Effect | None


def make_record(experiment: Experiment, mesh: Mesh) -> dict[str, Any]:
    """Returns the experiment's config with its provenance.

    Where the config holds no flags, the seed and the shapes of a batch stand in for them.
    """
    metadata, batch = experiment.metadata, experiment.data.batch
    config = dict(metadata.config)
    own: dict[str, Any] = dict(metadata.fingerprints)
    if "flags" not in config:
        own["seed"] = experiment.seed
        own["batch"] = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(batch)]
    own["microbatches"] = experiment.layout.microbatches(mesh.shape.get("pipe", 1))
    own["mesh"] = f"{describe_mesh(mesh)}: {mesh.size} x {mesh.devices.flat[0].device_kind}"
    if mesh.devices.flat[0].platform == "cpu":
        own["threads"] = thread_count()
    own["versions"] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # Run from its folder.
            own["versions"][name] = importlib.metadata.version(name)
    module = sys.modules.get(config.get("module"), sys.modules["__main__"])
    files = {"jaxtrain": __file__, "module": getattr(module, "__file__", None) or os.devnull}
    if code := {name: found for name, path in files.items() if (found := commit(path))}:
        own["code"] = code
    own["best"] = f"eval/{metadata.best_metric} {metadata.best_mode}"
    if update := _optimizer_digest(experiment):
        own["optimizer"] = update
    return config | {"provenance": own}


def _optimizer_digest(experiment: Experiment) -> str | None:
    """Hashes the traced update of the optimizer, which is the same on every mesh; None for one that
    cannot be traced, because the train step then says why."""
    task = experiment.task
    stack = experiment.stack if task.stages is None else task.stages.stacked
    optimizer = optax.with_extra_args_support(optimizer_for(experiment, stack))
    extras = accepted_kwargs(optimizer.update, {"value": 1.0, "weight": 1.0})
    try:
        params = jax.eval_shape(task.init_fn, jax.random.key(0))
        params = params[0] if task.has_model_state else params
        state = jax.eval_shape(optimizer.init, params)
        update = lambda grads, state, params: optimizer.update(grads, state, params, **extras)  # noqa: E731
        return digest(jax.make_jaxpr(update)(params, state, params))
    except Exception:
        return None


def commit(path: str) -> str | None:
    """Returns the git commit of the clone that a file is of, with ``-dirty`` behind it where files
    there are changed; None where there is none, or no git."""
    folder, name = os.path.split(os.path.realpath(path))
    git = ("git", "--no-optional-locks", "-C", folder)
    quiet = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 5}
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        # What a clone only surrounds has no commit.
        subprocess.check_output([*git, "ls-files", "--error-unmatch", name], **quiet)
        return subprocess.check_output([*git, *describe], **quiet).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_record(run_dir: epath.PathLike, *, before_step: int | None = None) -> Any:
    """Reads what a run went on with last, or with which it came to a step: the last line of its
    changes, or else its config; None where there is neither. Raises ValueError where it is damaged.
    """
    folder = epath.Path(run_dir)
    try:
        record = json.loads((folder / CONFIG).read_text())
        text = read_if_there(folder / CHANGES).decode()
        for line in filter(None, text.split("\n")):
            change = json.loads(line)
            if before_step is None or change["from_step"] < before_step:
                record = change["record"]
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}")
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{CONFIG} or {CHANGES} in {run_dir} cannot be read ({error}): without {CHANGES} the "
            f"run goes by {CONFIG}, and without both by what is typed"
        ) from None
    return record


def compare(
    then: Any, now: Any, may_change: Mapping[str, Effect], *, step: int = 0
) -> list[Change]:
    """Lists what differs between the record of a run and that of its resumption at a step.

    Both are from :func:`make_record`, as JSON; ``may_change`` says what a change means
    (:attr:`jaxtrain.Metadata.may_change`).
    """
    meanings = _OF_ANY_RUN | dict(may_change)
    versions = (record.get("provenance", {}).get("versions", {}) for record in (then, now))
    then_traced, now_traced = ([packages.get(name) for name in TRACING] for packages in versions)
    if then_traced != now_traced:
        meanings["optimizer"] = Effect.UNCOMPARED
    changes = []
    for part in ("flags", "provenance"):
        before, after = (flatten(record.get(part, {})) for record in (then, now))
        # A flag that makes it another run may make another optimizer, and tells of it.
        is_told = part == "provenance" and any(c.meaning is None for c in changes)
        for name in before | after if before else ():
            old, new = (json.dumps(side.get(name, _ABSENT)) for side in (before, after))
            flagged = name == "microbatches" and any(c.name in MICROBATCHES for c in changes)
            flagged |= name == "optimizer" and is_told
            # A flag that one version lacks and that is left out in the other decides nothing.
            lacking = part == "flags" and (name not in before or name not in after)
            if old == new or flagged or (lacking and (before | after)[name] in (None, [], ())):
                continue
            meaning = _meaning(name, meanings)
            if name == "mesh" and meanings.get("mesh.data") is Effect.SAME:  # an exact run
                chips = (json.loads(text).rpartition(" x ")[2] for text in (old, new))
                meaning = Effect.SAME if len(set(chips)) == 1 else meaning
            group, _, key = name.rpartition(".")
            later = meanings.get(group) is Effect.LATER  # its keys are steps
            if later:
                meaning = Effect.LATER if int(key) >= step else None
            elif meaning is None and (lacking or name not in after):
                meaning = Effect.VERSION
            if meaning is not Effect.NONE and (later or name in before or part == "flags"):
                changes.append(Change(_short(name), json.loads(old), json.loads(new), meaning))
    return changes


def check(changes: Iterable[Change], accepted: Sequence[str], *, run_dir: str) -> None:
    """Raises ValueError for the changes that would break the run, unless they are accepted."""
    accepted = set(map(_typed, accepted))
    broken = [c for c in changes if c.meaning is None and not {c.name, "all"} & accepted]
    if broken:
        told = " and ".join(f"{c.name} {_shown(c.then)} (now {_shown(c.now)})" for c in broken)
        raise ValueError(
            f"the run in {run_dir} had {told}: leave it as it was, or accept a run that goes on as "
            f"another with `accept_changes` {' '.join(c.name for c in broken)}"
        )


def check_accepted(accepted: Iterable[str], *records: Any) -> None:
    """Raises ValueError for a name in ``accept_changes`` that neither a run nor its resumption
    has."""
    flat = (flatten(record.get(part, {})) for record in records for part in ("flags", "provenance"))
    names = {"stopped", "all"}.union(*(map(_short, each) for each in flat))
    for name in map(_typed, accepted):
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.0)
            raise ValueError(f"`accept_changes` has {name!r}, and no run has it: try {near[0]!r}")


def table(changes: Sequence[Change], *, title: str) -> list[str]:
    """Lays the changes out as lines."""
    rows = [("", "then", "now", "the steps to come")]
    for c in changes:
        effect = c.meaning.value if c.meaning else "accepted: those of another run"
        rows.append((c.name, _shown(c.then), _shown(c.now), effect))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)) for row in rows]
    return [title, *(f"  {line}".rstrip() for line in lines), ""]


def note_changes(
    run_dir: epath.Path, changes: Sequence[Change], record: Mapping[str, Any], *, from_step: int
) -> None:
    """Adds a line to the run's changes; what stood there stays. The first process does."""
    if not changes or jax.process_index() != 0:
        return
    path = run_dir / CHANGES
    line = {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "from_step": from_step,
        "changes": {c.name: [c.then, c.now] for c in changes},
        "record": record,
    }

    def add() -> None:
        # With what stood there: this file replaces the one before.
        write_text(path, read_if_there(path).decode() + json.dumps(line) + "\n")

    storage.retrying(add, f"the changes in {path}")


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Names the entries of nested mappings by their path; what is no mapping has none.

    >>> flatten({"mesh": {"data": 2}, "steps": 3})
    {'mesh.data': 2, 'steps': 3}
    """
    flat = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flags_of(config: Any) -> dict[str, Any]:
    """Returns a config as plain data, with the fields of its layout among its own, as flags are."""
    flags = dataclasses.asdict(config)
    return flags | flags.pop("layout", {})


def nested(kind: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what :func:`flags_of` has written with the fields of a layout in their own mapping,
    as ``dataclasses.asdict`` has them."""
    layout = typing.get_type_hints(kind).get("layout")
    own = known_fields(layout, flags) if dataclasses.is_dataclass(layout) else {}
    others = {name: value for name, value in flags.items() if name not in own}
    return others | ({"layout": own} if own else {})


def known_fields(kind: Any, value: Any) -> Any:
    """Returns the entries of nested mappings for which a dataclass has fields."""
    if not dataclasses.is_dataclass(kind) or not isinstance(value, Mapping):
        return value
    fields = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)} & value.keys()
    return {name: known_fields(fields[name], value[name]) for name in value if name in names}


def from_plain(kind: Any, value: Any) -> Any:
    """Turns what ``dataclasses.asdict`` and JSON made of a dataclass back into one. Raises
    ValueError where a field is missing there or here, or has a value of another type.

    >>> @dataclasses.dataclass
    ... class Pair:
    ...     sizes: tuple[int, ...]
    ...     name: str | None = None
    >>> from_plain(Pair, {"sizes": [1, 2]})
    Pair(sizes=(1, 2), name=None)
    """
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        types_of = typing.get_type_hints(kind)
        if unknown := value.keys() - {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(
                f"{kind.__name__} has no field {min(unknown)!r}: the run was started by another "
                "version of its module"
            )
        for name, item in value.items():
            if not _fits(types_of[name], item):
                raise ValueError(
                    f"{kind.__name__} takes no {name} {item!r}: the run was started by another "
                    "version of its module"
                )
        return kind(**{name: from_plain(types_of[name], item) for name, item in value.items()})
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and value is not None:
        arms = [arm for arm in typing.get_args(kind) if arm is not types.NoneType]
        return from_plain(arms[0], value) if len(arms) == 1 else value
    if isinstance(value, list) and (kind is tuple or typing.get_origin(kind) is tuple):
        return tuple(value)
    return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether JSON's value may stand for one of a type; types that JSON lacks take any."""
    origin, arms = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(arm, value) for arm in arms)
    if origin is typing.Literal:
        return value in arms
    if kind is tuple or origin is tuple:
        inner = arms[0] if len(arms) == 2 and arms[1] is ... else Any
        return isinstance(value, list | tuple) and all(_fits(inner, each) for each in value)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    if kind in (bool, str, types.NoneType):
        return isinstance(value, kind)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return True


def _meaning(name: str, meanings: Mapping[str, Effect]) -> Effect | None:
    if name in meanings:
        return meanings[name]
    return next((m for pattern, m in meanings.items() if fnmatch.fnmatch(name, pattern)), None)


def _short(name: str) -> str:
    return name.removeprefix("run.").removeprefix("versions.").replace("_", "-")


def _typed(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")


def _shown(value: Any) -> str:
    if value is None:
        return "left out"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
