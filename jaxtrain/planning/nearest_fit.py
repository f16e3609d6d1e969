"""The nearest change that makes a plan fit: tried on the compiler, nearest first."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator

import jax

from jaxtrain.experiment import Experiment, make_abstract_state, make_experiment_mesh
from jaxtrain.host.memory import human_bytes
from jaxtrain.parallel.mesh import fill_sizes
from jaxtrain.planning.ahead_of_time import Plan, plan_experiment
from jaxtrain.planning.targets import Target, grown, parse_target
from jaxtrain.state import local_bytes

# Compilations, each as long as the plan's own.
TRIES = 6


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of an experiment or its target, by the flags that make it."""

    flags: str
    experiment: Experiment
    target: Target


def nearest_fit(
    experiment: Experiment,
    target: Target,
    *,
    rematerialised: Callable[[Experiment], Experiment | None] = lambda _: None,
    has_flag: Callable[[str], bool] = lambda _: True,
    tries: int = TRIES,
) -> tuple[Change, Plan] | None:
    """Looks for the nearest change that fits.

    First what costs no time on the device (more microbatches), then what costs some (gathering
    parameters, recomputation), all of it together, and then more devices. A change under which the
    state and the gradients alone exceed the memory is passed over; any other is compiled.

    Args:
      experiment: what does not fit.
      target: where.
      rematerialised: makes an experiment that recomputes all it can, or None where it cannot.
      has_flag: whether the experiment's module has a flag, such as ``"mesh.fsdp"``; a change by
        another is passed over.
      tries: compilations at most.

    Returns:
      The change and its plan, or None where none of those tried fits.
    """
    for change in _changes(experiment, target, rematerialised):
        if tries == 0:
            return None
        flags = re.findall(r"--([\w.]+)", change.flags)
        if not all(flag == "target" or has_flag(flag) for flag in flags):
            continue
        try:
            if least_bytes(change.experiment, change.target) > change.target.chip.memory_bytes:
                continue
            tries -= 1
            plan = plan_experiment(change.experiment, change.target)
        except (ValueError, RuntimeError):
            continue  # that change does not go with this experiment
        if plan.fits:
            return change, plan
    return None


def describe(found: tuple[Change, Plan] | None) -> str:
    """Says it in a sentence."""
    if found is None:
        return "none was found; use more devices, or a smaller model or batch"
    change, plan = found
    return f"{change.flags} (compiled: {human_bytes(plan.memory.needed)} per device)"


def least_bytes(experiment: Experiment, target: Target) -> int:
    """Bytes that no schedule can do without: the state, and gradients in the parameters' shards."""
    mesh = make_experiment_mesh(experiment, target.devices())
    state = make_abstract_state(experiment, mesh)
    return local_bytes(state) + local_bytes(state.params)


def _changes(
    experiment: Experiment,
    target: Target,
    rematerialised: Callable[[Experiment], Experiment | None],
) -> Iterator[Change]:
    def change(flags: str, changed: Experiment | None, on: Target = target) -> Iterator[Change]:
        if changed is not None:
            yield Change(flags, changed, on)

    sizes = fill_sizes(dict(experiment.mesh), target.size)
    finest = _finer(experiment, sizes, 10**9)
    for factor in (2, 4):
        yield from change(*_finer(experiment, sizes, factor))
    if sizes.get("data", 1) > 1 and experiment.zero < 1:
        yield from change("--zero 1", dataclasses.replace(experiment, zero=1))
    yield from change("--remat full", rematerialised(experiment))
    wide, flags = experiment, ""
    if sizes.get("data", 1) > 1:
        flags = f"--mesh.fsdp {sizes['data'] * sizes.get('fsdp', 1)} --mesh.data 1"
        wide = _with_mesh(experiment, sizes, fsdp=sizes["data"] * sizes.get("fsdp", 1), data=1)
        yield from change(flags, wide)
    together = rematerialised(wide) or wide
    all_flags = [flags, "--remat full" if together is not wide else "", finest[0]]
    both = _finer(together, fill_sizes(dict(together.mesh), target.size), 10**9)[1]
    yield from change(" ".join(f for f in all_flags if f), both or together)
    for larger in _larger(target):
        sizes = fill_sizes(dict(wide.mesh), target.size)
        sizes["fsdp"] = sizes.get("fsdp", 1) * larger.size // target.size
        flags = f"--target {larger.name} --mesh.fsdp {sizes['fsdp']} --mesh.data {sizes['data']}"
        for form in (wide, together):
            more = " --remat full" if form is not wide else ""
            yield from change(flags + more, _with_mesh(form, sizes), larger)
            if together is wide:
                break


def _finer(
    experiment: Experiment, sizes: dict[str, int], factor: int
) -> tuple[str, Experiment | None]:
    """The experiment with up to ``factor`` times as many microbatches."""
    rows = jax.tree.leaves(experiment.batch)[0].shape[0]
    rows //= sizes.get("data", 1) * sizes.get("fsdp", 1)
    if sizes.get("pipe", 1) > 1:
        now = experiment.pipeline.get("microbatches", 1)
        more = _times(now, rows, factor)
        changed = dict(experiment.pipeline) | {"microbatches": more}
        flags = f"--pipeline.microbatches {more}"
        return flags, None if more == now else dataclasses.replace(experiment, pipeline=changed)
    more = _times(experiment.accumulate, rows, factor)
    changed = dataclasses.replace(experiment, accumulate=more)
    return f"--accumulate {more}", None if more == experiment.accumulate else changed


def _times(now: int, rows: int, factor: int) -> int:
    """The largest multiple of ``now`` by a power of two up to ``factor`` that divides ``rows``."""
    times = 1
    while times * 2 <= factor and rows % (now * times * 2) == 0:
        times *= 2
    return now * times


def _with_mesh(experiment: Experiment, sizes: dict[str, int], **changed: int) -> Experiment:
    return dataclasses.replace(experiment, mesh=sizes | changed)


def _larger(target: Target) -> Iterator[Target]:
    """Targets of the same chip of 2, 4, ... times as many devices, up to 64 times."""
    sizes = target.topology
    for _ in range(6):
        sizes = grown(sizes) if target.chip.kind == "tpu" else (2 * sizes[0], *sizes[1:])
        layout = "x".join(map(str, sizes))
        with contextlib.suppress(ValueError):  # larger than there are
            yield parse_target(f"{target.chip.name}:{layout}", slices=target.slices)
