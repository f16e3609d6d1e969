"""Running one step of a run again: what was lost, leaf by leaf.

Batches and randomness are functions of the seed and the step, so the newest checkpoint before a
step, and the steps between, give the very state that the step met; without a checkpoint, the seed
does. On the mesh and machine of the run it is the same in every bit.
"""

import functools
import math
from collections.abc import Sequence

from etils import epath
from jax.sharding import Mesh

from jaxtrain import build
from jaxtrain.experiment import Experiment
from jaxtrain.host.paths import as_path
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.checkpoints.reader import Reader
from jaxtrain.run.folder import CHECKPOINTS, CONFIG
from jaxtrain.run.loop import train_loop
from jaxtrain.run.main import experiment_module, parse
from jaxtrain.run.observe import terminal
from jaxtrain.run.provenance import from_plain, nested, read_record
from jaxtrain.run.survive.diagnosis import Diagnosis, diagnose
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import TrainState

# Leaves to list where all are finite.
LARGEST = 10


def load_run(
    run_dir: epath.PathLike,
    module: str | None,
    *,
    step: int | None = None,
    flags: Sequence[str] = (),
) -> Experiment:
    """Rebuilds the experiment of a run from the flags that are stored with it.

    Flags of the command line, such as another mesh's, come in their place. Raises FileNotFoundError
    where the folder holds no run, and ValueError where no module is given, there is no such
    experiment, or the flags do not fit it.

    Args:
      module: what holds its ``Config`` and ``build(config)``. The folder names it too, and does not
        decide: what is imported is for the caller to say.
      step: as the run came to this step; None for its last start.
    """
    stored = read_record(run_dir, before_step=step)
    if stored is None:
        raise FileNotFoundError(f"{run_dir} holds no run: there is no {CONFIG} in it")
    if not isinstance(stored.get("flags"), dict):
        raise ValueError(
            f"{run_dir} does not tell how to build its experiment: Metadata.config must hold "
            "'flags' (the fields of its Config)"
        )
    if module is None:
        raise ValueError(
            f"no code is run because a file names it: {run_dir} says it is of module "
            f"{stored.get('module')!r}; name the one you trust with `module`"
        )
    experiment = experiment_module(module)
    known = dict(stored["flags"])
    if isinstance(known.get("run"), dict):  # What the run keeps is read there, and not made anew.
        known["run"] = known["run"] | {"run_dir": str(run_dir), "resume": True}
    config = from_plain(experiment.Config, nested(experiment.Config, known))
    return experiment.build(parse(experiment.Config, flags, default=config))


def replay(run_dir: epath.PathLike, step: int, *, module: str | None) -> Diagnosis:
    """Runs a run up to a step, from 1, and examines that step; nothing in its folder changes. The
    module is its experiment's, as for :func:`load_run`. Raises ValueError for a step that the run
    does not have, and as :func:`load_run`, and FileNotFoundError where the folder holds no run."""
    experiment = load_run(run_dir, module, step=step)
    if not 1 <= step <= (last := experiment.steps):
        raise ValueError(f"`step` is {step}: the run has steps 1 to {last}")
    mesh = build.make_experiment_mesh(experiment)
    checkpoints = Checkpointer(as_path(run_dir) / CHECKPOINTS)
    from_step = max((s for s in checkpoints.steps() if s < step), default=None)
    state = state_of(experiment, mesh, checkpoints, from_step)
    start = int(state.step)
    origin = "the seed" if from_step is None else f"checkpoint {from_step}"
    terminal.print_lines([f"replaying steps {start + 1} to {step} of {run_dir} from {origin}"])
    with experiment.train_batches(start, batch_sharding(mesh)) as batches:
        if start < step - 1:
            train, _ = build.compile_loop(experiment, state, mesh, start, step - 1)
            calls = {"steps": step - 1, "steps_per_call": experiment.layout.steps_per_call}
            state = train_loop(train, state, batches, **calls)
        return diagnose(experiment, mesh, state, next(batches))


def state_of(
    experiment: Experiment, mesh: Mesh, checkpoints: Reader, step: int | None
) -> TrainState:
    """Returns the state that a run saved after a step, or for None the one that its seed makes."""
    if step is None:
        return build.make_state(experiment, mesh)
    abstract = build.make_abstract_state(experiment, mesh)
    read = functools.partial(checkpoints.restore, step=step)
    return build.restore_state(experiment, abstract, read)


def report(diagnosis: Diagnosis, step: int) -> list[str]:
    """Says in lines what was found."""
    lines = [
        f"step {step}, microbatch {j}: loss {loss!r}" for j, loss in enumerate(diagnosis.losses)
    ]
    kinds = {"parameters": diagnosis.params, "gradients": diagnosis.grads}
    kinds |= {"model state": diagnosis.model_state} if diagnosis.model_state else {}
    for kind, counts in kinds.items():
        bad = {name: count for name, count in counts.items() if count[0]}
        lines.append(f"{kind}: {len(counts) - len(bad)} of {len(counts)} leaves are finite")
        lines += [f"  {name}: {n:,} of {size:,} not finite" for name, (n, size) in bad.items()]
    if diagnosis.first_not_finite() is None:
        total = math.sqrt(sum(norm**2 for norm in diagnosis.norms.values()))
        ranked = sorted(diagnosis.norms.items(), key=lambda item: -item[1])[:LARGEST]
        lines.append(f"largest gradients, of norms (all together {total:.4g}):")
        lines += [f"  {name}: {norm:.4g}" for name, norm in ranked]
    return lines
