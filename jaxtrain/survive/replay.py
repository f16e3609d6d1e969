"""Running one step of a run again: what was lost, leaf by leaf.

Batches and randomness are functions of the seed and the step, so the newest checkpoint before a
step, and the steps between, give the very state that the step met; without a checkpoint, the seed
does. On the mesh and machine of the run it is the same in every bit.
"""

import dataclasses
import importlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from jaxtrain.calls import compile_loop
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.experiment import (
    Experiment,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    restore_state,
)
from jaxtrain.fit import train_loop
from jaxtrain.observe import terminal
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.survive.accidents import Examination, examine

# Leaves to list where all are finite.
LARGEST = 10


def load_run(run_dir: epath.PathLike) -> Experiment:
    """Rebuilds the experiment of a run from its ``config.json``.

    That file names the module under ``module`` and holds the flags under ``flags``; the module has
    ``Config`` and ``build(config)``. It is imported, so only modules that can be imported here are
    run, never anything that lies in the run's folder.

    Raises:
      FileNotFoundError: where the folder holds no run.
      ValueError: where the file does not tell the module or the flags, or they do not fit.
    """
    path = epath.Path(run_dir) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{run_dir} holds no run: there is no {path.name} in it")
    try:
        stored = json.loads(path.read_text())
        name, flags = stored["module"], stored["flags"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} does not tell how to build its experiment: Experiment.config must hold "
            "'module' (as `python -m` takes it) and 'flags' (the fields of its Config)"
        ) from None
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} is of module {name!r}, which cannot be imported here ({error}): go to the "
            "folder from which the run was started"
        ) from None
    for attribute in ("Config", "build"):
        if not hasattr(module, attribute):
            raise ValueError(f"{path} is of module {name!r}, which has no {attribute}")
    config = from_plain(module.Config, flags)
    if count := getattr(config, "simulate_devices", 0):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return module.build(config)


def from_plain(kind: Any, value: Any) -> Any:
    """Turns what ``dataclasses.asdict`` and JSON made of a dataclass back into one.

    Raises:
      ValueError: where a field is missing there or here.

    >>> @dataclasses.dataclass
    ... class Pair:
    ...     sizes: tuple[int, ...]
    ...     name: str | None = None
    >>> from_plain(Pair, {"sizes": [1, 2]})
    Pair(sizes=(1, 2), name=None)
    """
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        fields = typing.get_type_hints(kind)
        if unknown := value.keys() - {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(
                f"{kind.__name__} has no field {min(unknown)!r}: the run was started by another "
                "version of its module"
            )
        return kind(**{name: from_plain(fields[name], item) for name, item in value.items()})
    if typing.get_origin(kind) in (types.UnionType, typing.Union) and value is not None:
        arms = [arm for arm in typing.get_args(kind) if arm is not types.NoneType]
        return from_plain(arms[0], value) if len(arms) == 1 else value
    if isinstance(value, list) and (kind is tuple or typing.get_origin(kind) is tuple):
        return tuple(value)
    return value


def replay(run_dir: epath.PathLike, step: int) -> Examination:
    """Runs a run up to a step and examines that step; nothing in its folder changes.

    Args:
      run_dir: the run's folder.
      step: from 1, as the logs count.

    Raises:
      ValueError: for a step that the run does not have, and as :func:`load_run`.
      FileNotFoundError: where the folder holds no run.
    """
    experiment = load_run(run_dir)
    if not 1 <= step <= experiment.steps:
        raise ValueError(f"--step is {step}: the run has steps 1 to {experiment.steps}")
    mesh = make_experiment_mesh(experiment)
    checkpoints = Checkpointer(epath.Path(run_dir) / "checkpoints")
    from_step = max((s for s in checkpoints.steps() if s < step), default=None)
    if from_step is None:
        state = make_state(experiment, mesh)
    else:
        state = restore_state(
            experiment,
            make_abstract_state(experiment, mesh),
            lambda abstract: checkpoints.restore(abstract, from_step),
        )
    start = int(state.step)
    origin = "the seed" if from_step is None else f"checkpoint {from_step}"
    terminal.print_lines([f"replaying steps {start + 1} to {step} of {run_dir} from {origin}"])
    with experiment.train_batches(start, batch_sharding(mesh)) as batches:
        if start < step - 1:
            train, _ = compile_loop(experiment, state, mesh, start, step - 1)
            calls = {"steps": step - 1, "steps_per_call": experiment.steps_per_call}
            state = train_loop(train, state, batches, **calls)
        return examine(experiment, mesh, state, next(batches))


def report(examination: Examination, step: int) -> list[str]:
    """Says in lines what was found."""
    lines = [
        f"step {step}, microbatch {j}: loss {loss!r}" for j, loss in enumerate(examination.losses)
    ]
    kinds = {"parameters": examination.params, "gradients": examination.grads}
    kinds |= {"model state": examination.model_state} if examination.model_state else {}
    for kind, counts in kinds.items():
        bad = {name: count for name, count in counts.items() if count[0]}
        lines.append(f"{kind}: {len(counts) - len(bad)} of {len(counts)} leaves are finite")
        lines += [f"  {name}: {n:,} of {size:,} not finite" for name, (n, size) in bad.items()]
    if examination.first_not_finite() is None:
        total = math.sqrt(sum(norm**2 for norm in examination.norms.values()))
        ranked = sorted(examination.norms.items(), key=lambda item: -item[1])[:LARGEST]
        lines.append(f"largest gradients, of norms (all together {total:.4g}):")
        lines += [f"  {name}: {norm:.4g}" for name, norm in ranked]
    return lines
