"""After a run: how what was predicted compares with what was measured."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import Experiment
from jaxtrain.host import memory
from jaxtrain.host.chips import Chip, chip_of
from jaxtrain.host.memory import human_bytes
from jaxtrain.planning import estimate
from jaxtrain.planning.ahead_of_time import read_compiled, wires
from jaxtrain.planning.by_layer import Part, parts_of
from jaxtrain.planning.estimate import Estimate
from jaxtrain.planning.roofline import Prediction
from jaxtrain.planning.targets import Target
from jaxtrain.sharding.mesh import describe_mesh


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A prediction for a run's compiled step.

    Attributes:
      programs: the compiled train steps by the number of steps in a call; the first is predicted.
      estimated: its work and memory, by the trace that was compiled; None where the estimate cannot
        follow that.
      parts: what each part of the model takes of its memory.
    """

    programs: Mapping[int, CompiledStep]
    estimated: Estimate | None
    parts: tuple[Part, ...]

    @property
    def memory(self) -> dict[str, Any]:
        """The bytes of one device at the peak, and those of each part."""
        peak = next(iter(self.programs.values())).memory_bytes
        return {"peak": peak, "parts": [dataclasses.asdict(part) for part in self.parts]}


def predict_run(programs: Mapping[int, CompiledStep], experiment: Experiment) -> Predicted:
    """Predicts a run's step, as a plan does."""
    steps, train = next(iter(programs.items()))
    state, estimated = train.arguments[0], None
    with contextlib.suppress(Exception):  # It is for a report alone, which must stop no run.
        estimated = estimate.estimate_compiled(train, steps=steps)
        estimated = estimate.on_critical_path(estimated, experiment, state.params)
    kept = estimated and estimated.kept
    return Predicted(programs, estimated, parts_of(state, kept, experiment))


def compare_with_run(predicted: Predicted, mesh: Mesh, seconds: float | None) -> list[str]:
    """Says how the compiled step's own prediction compares with the run, as :func:`compare` does;
    nothing on a CPU, which counts no memory and has no published peaks."""
    if mesh.devices.flat[0].platform == "cpu":
        return []
    return compare(predicted.programs, mesh, predicted.estimated, seconds)


def compare(
    programs: Mapping[int, CompiledStep],
    mesh: Mesh,
    estimated: Estimate | None,
    seconds: float | None,
) -> list[str]:
    """Returns lines for the log: the memory and the time of a step, predicted and measured.

    Of ``programs``, by the number of steps in a call, the first is compared, with what
    :func:`predict_run` estimated. ``seconds`` leaves evaluation and checkpoints out; None
    where nothing was timed.
    """
    device = mesh.devices.flat[0]
    steps, train = next(iter(programs.items()))
    try:
        chip = chip_of(device.device_kind)
        return [
            _memory_line(train.memory_bytes, device.platform),
            _time_line(train, steps, mesh, estimated, seconds, chip),
        ]
    except Exception as error:  # the run is done and saved: nothing said about it may end it
        return [f"predicted memory and step time: not compared, {type(error).__name__}: {error}"]


def _memory_line(predicted: int, platform: str) -> str:
    measured = memory.device_memory().get("peak")
    text = f"predicted memory {human_bytes(predicted)} per device"
    if not measured:
        return f"{text}; measured: the {platform} backend keeps no count"
    return f"{text}; measured peak {human_bytes(measured)} ({measured / predicted - 1:+.1%})"


def _time_line(train, steps: int, mesh, estimated, seconds: float | None, chip: Chip | None) -> str:
    if chip is None or chip.hbm_bytes_per_s is None:
        kind = mesh.devices.flat[0].device_kind
        return f"predicted step time: none, the peaks of {kind!r} are not known"
    if estimated is None:
        return "predicted step time: none, the step's trace was not understood"
    if seconds is None:
        return "predicted step time: not compared, too few steps were timed"
    predicted = predict(train, mesh, estimated, chip, steps=steps)
    least, most = predicted.step_seconds, predicted.step_seconds_apart
    return (
        f"predicted step time {1e3 * least:.1f} to {1e3 * most:.1f} ms on {describe_mesh(mesh)} "
        f"(bound by {predicted.bound}); measured {1e3 * seconds:.1f} ms, "
        f"{seconds / least:.2f} times"
    )


def predict(
    train: CompiledStep, mesh: Mesh, estimated: Estimate, chip: Chip, *, steps: int = 1
) -> Prediction:
    """Predicts the time of a train step that was compiled as a call of so many steps."""
    hosts = len({device.process_index for device in mesh.devices.flat})
    target = Target(chip.name, chip, (hosts, max(1, mesh.size // hosts)))
    program, _, unread = read_compiled(train.compiled, mesh)
    moved = None if unread else wires(program.per_step(steps).collectives)
    return estimate.predict(estimated, target, moved)
