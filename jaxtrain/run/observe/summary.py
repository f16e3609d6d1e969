"""Facts of a run, for its header and its report, and its conclusion."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain.build import natural
from jaxtrain.compile import CompiledStep
from jaxtrain.decisions import describe
from jaxtrain.experiment import Experiment
from jaxtrain.host import distributed, memory
from jaxtrain.host.paths import as_path
from jaxtrain.host.pictures import save_pixels
from jaxtrain.run.observe import terminal, throughput
from jaxtrain.run.observe.journal import CONCLUSION, Journal
from jaxtrain.run.observe.metric import Metric
from jaxtrain.run.observe.report.command import leave_report
from jaxtrain.run.observe.report.records import read_run
from jaxtrain.sharding.mesh import describe_mesh
from jaxtrain.state import TrainState, host_bytes, local_bytes


def header_facts(
    experiment: Experiment, mesh: Mesh, state: TrainState, programs: Mapping[int, CompiledStep]
) -> dict[str, str]:
    """Returns the facts of a run's header, name to text; ``programs`` are the compiled train steps
    by the number of steps in a call, that of most calls first."""
    train = next(iter(programs.values()))
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    left = experiment.steps - int(state.step)
    resumed = f", resumed at step {int(state.step):,}" if int(state.step) else ""
    devices = mesh.devices.flat
    layout, data = experiment.layout, experiment.data
    split = describe_mesh(mesh) + (f", zero {layout.zero}" if layout.zero else "")
    accumulate = f" in {layout.accumulate} microbatches" if layout.accumulate > 1 else ""
    epochs = data.steps_per_epoch and left / data.steps_per_epoch
    away = host_bytes(state)
    on_host = f"; {memory.human_bytes(away)} of its state on the host" if away else ""
    return {
        **experiment.metadata.facts,
        "optimizer": f"{_optimizer(experiment)}, seed {experiment.seed}",
        **({"privacy": data.guarantee} if data.guarantee else {}),
        "parameters": f"{parameters:,}",
        "step": f"{data.items_per_step:,} {data.item}{accumulate}",
        "steps": f"{left:,} ({left * data.items_per_step:,} {data.item}){resumed}"
        + (f", {float(epochs):.3g} epochs" if epochs else "")
        + _calls(experiment, programs),
        "devices": f"{mesh.size} x {devices[0].device_kind} ({devices[0].platform})",
        **distributed.facts(),
        "mesh": split,
        **({"layout": layout.choices} if layout.choices else {}),
        "dtypes": str(experiment.policy),
        **_flops(experiment, devices),
        "memory": f"{memory.human_bytes(train.memory_bytes)} per device (compiled: state "
        f"{memory.human_bytes(local_bytes(state))}, the rest for the step){on_host}",
        "compiled": f"in {sum(p.compile_seconds for p in programs.values()):.1f} s; " + train.held,
        **describe(train.findings),
    }


def _optimizer(experiment: Experiment) -> str:
    of_module = experiment.metadata.facts.get("optimizer", "of the experiment's own")
    return getattr(experiment.optimizer, "description", of_module)


def _calls(experiment: Experiment, programs: Mapping[int, CompiledStep]) -> str:
    if experiment.layout.steps_per_call == 1:
        return ""
    most, *shorter = programs
    also = f" (also compiled for {' and '.join(map(str, shorter))})" if shorter else ""
    return f", {most:,} per call{also}"


def _flops(experiment: Experiment, devices: Any) -> dict[str, str]:
    task, dtype = experiment.task, experiment.policy.compute_dtype
    if task.flops_per_step is None:
        return {}
    known = throughput.mfu(task.flops_per_step, 1.0, devices, dtype=dtype)
    kind = f"{dtype} on {devices[0].device_kind!r}"
    mfu = "" if known is not None else f"; no MFU: the peak of {kind} is not known"
    return {"FLOPs": f"{task.flops_per_step:.3g} per step, by {task.flops_formula}{mfu}"}


def since_start(run_dir: str, evaluation: Mapping[str, Any]) -> list[str]:
    """Says how held-out losses, and what is known of groups of rows, have changed since before the
    first step, where they were evaluated then."""
    found = []
    names = [n for n in evaluation if Metric("eval", n).is_held_out_loss or "group/" in n]
    with contextlib.suppress(OSError, ValueError):  # a log that cannot be read ends no run
        series = read_run(as_path(run_dir), "").series
        for name in names:
            first, now = series.get(f"eval/{name}"), evaluation[name]
            if first is not None and first.steps[0] == 0:
                found.append((name, first.values[0], now))
    if not found:
        return []
    wide = max(20, *(len(name) for name, *_ in found))
    lines = [
        f"  {name:{wide}} {then:9.4f} {now:9.4f} {now - then:+9.4f}" for name, then, now in found
    ]
    return [f"{'held-out':{wide + 2}} {'before':>9} {'after':>9} {'change':>9}", *lines, ""]


def print_conclusion(
    experiment: Experiment,
    state: TrainState,
    evaluation: dict[str, float],
    run_dir: str,
    journal: Journal,
) -> None:
    """Prints what an experiment concludes, and where everything lies; the first process does."""
    # In all processes: it may run the model, whose parameters lie on the devices of all.
    state, evaluation, lines = experiment.method.shown(state, evaluation)
    conclude, draw = experiment.metadata.conclude, experiment.metadata.pictures
    if conclude is not None or draw is not None:
        plain_model = natural(experiment, state)
    if conclude is not None:
        lines += [*conclude(plain_model, evaluation), ""]
        journal.event(CONCLUSION, lines=lines[:-1])
    for name, pixels in (draw(plain_model, evaluation) if draw is not None else {}).items():
        if jax.process_index() == 0:
            save_pixels(pixels, path := as_path(run_dir) / f"{name}.png")
            lines += [f"picture      {path}"]
    lines += [experiment.data.guarantee, ""] if experiment.data.guarantee else []
    journal.beat()
    if jax.process_index() == 0:
        lines += [*since_start(run_dir, evaluation), *leave_report(run_dir)]
    lines += [f"checkpoints  {run_dir}/checkpoints", f"TensorBoard  {run_dir}/tensorboard"]
    terminal.print_lines([*lines, f"JSONL log    {run_dir}/log.jsonl"])
