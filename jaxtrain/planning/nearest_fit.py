"""The nearest layout that makes a plan fit: tried on the compiler, nearest first."""

import contextlib
from collections.abc import Iterator

import jax

from jaxtrain.build import make_abstract_state, make_experiment_mesh
from jaxtrain.experiment import Experiment
from jaxtrain.host.memory import human_bytes
from jaxtrain.planning.ahead_of_time import Plan, plan_experiment
from jaxtrain.planning.targets import Target, grown, parse_target
from jaxtrain.state import local_bytes

# Compilations, each as long as the plan's own.
TRIES = 7


def nearest_fit(experiment: Experiment, target: Target) -> tuple[str, Plan] | None:
    """Looks for the nearest layout of an experiment that fits a target.

    First what costs no time on the device (more microbatches), then what costs some (gathering
    parameters, recomputation), all of it together, then rows that are split too, and then more
    devices. A layout under which the state and the gradients alone exceed the memory is passed
    over; any other is compiled. Returns the flags that change and the plan, or None where none of
    those tried fits.
    """
    tries = TRIES
    for changes, where in _changes(experiment, target):
        if tries == 0:
            return None
        layout = experiment.layout.with_(changes)
        if layout == experiment.layout:
            continue
        try:
            other = experiment.with_(layout=layout)
            state = make_abstract_state(other, make_experiment_mesh(other, where.devices()))
            # No schedule can do without the state, and gradients in the parameters' shards.
            if local_bytes(state) + local_bytes(state.params) > where.chip.memory_bytes:
                continue
            tries -= 1
            plan = plan_experiment(other, where)
        except (ValueError, RuntimeError):
            continue  # that layout does not go with this experiment
        if plan.fits:
            words = [flag.replace("=", " ") for flag in layout.flags(experiment.layout)]
            return " ".join(words if where is target else ["--target", where.name, *words]), plan
    return None


def describe(found: tuple[str, Plan] | None) -> str:
    """Says it in a sentence."""
    if found is None:
        return "none was found; use more devices, or a smaller model or batch"
    change, plan = found
    return f"{change} (compiled: {human_bytes(plan.memory.needed)} per device)"


def _changes(experiment: Experiment, target: Target) -> Iterator[tuple[dict[str, object], Target]]:
    """Fields of the layout and their values, and the target that they are for."""
    sizes = experiment.layout.mesh.filled(target.size).axes
    data, shards = sizes.get("data", 1), sizes.get("data", 1) * sizes.get("fsdp", 1)
    for most in (2, 4):
        yield _finer(experiment, shards, sizes, most), target
    if data > 1 and experiment.layout.zero < 1:
        yield {"zero": 1}, target
    full = {"remat": "full"} if experiment.task.made_of_stages else {}
    yield full, target
    wide = {"mesh.fsdp": shards, "mesh.data": 1} if data > 1 else {}
    yield wide, target
    yield wide | full | _finer(experiment, shards, sizes, 10**9), target
    if full and shards % 2 == 0:
        split = {"mesh.context": 2 * sizes.get("context", 1), "mesh.fsdp": shards // 2}
        finer = _finer(experiment, shards // 2, sizes, 10**9)
        yield split | {"mesh.data": 1} | full | finer, target
    for larger in _larger(target):
        wider = {"mesh.fsdp": shards * larger.size // target.size, "mesh.data": 1}
        for more in (wider, wider | full) if full else (wider,):
            yield more, larger


def _finer(experiment: Experiment, shards: int, sizes: dict[str, int], most: int) -> dict[str, int]:
    """The flag for up to ``most`` times as many microbatches; none where rows allow no more."""
    rows = jax.tree.leaves(experiment.data.batch)[0].shape[0] // shards
    name, now = "accumulate", experiment.layout.accumulate
    if sizes.get("pipe", 1) > 1:
        name, now = "pipeline.microbatches", experiment.layout.pipeline.microbatches
    times = 1
    while times * 2 <= most and rows % (now * times * 2) == 0:
        times *= 2
    return {name: now * times} if times > 1 else {}


def _larger(target: Target) -> Iterator[Target]:
    """Targets of the same chip of 2, 4, ... times as many devices, up to 64 times."""
    sizes = target.topology
    for _ in range(6):
        sizes = grown(sizes) if target.chip.kind == "tpu" else (2 * sizes[0], *sizes[1:])
        layout = "x".join(map(str, sizes))
        with contextlib.suppress(ValueError):  # larger than there are
            yield parse_target(f"{target.chip.name}:{layout}", slices=target.slices)
