"""The command ``jaxtrain landscape``: the loss around what a run has learned.

What it finds is printed, and kept in ``landscape.json`` in the run's folder: the newest of each
kind (line, plane, between, sharpness).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from etils import epath

from jaxtrain.build import (
    all_on_devices,
    build_evaluation,
    evaluate,
    make_abstract_state,
    make_experiment_mesh,
    restore_evaluated,
    rows_of,
)
from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.engines.plain import trainable
from jaxtrain.experiment import Experiment, Repeated
from jaxtrain.host import distributed, quiet
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, json_object, json_text, read_if_there, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.landscape.lines import Subspace, barrier, build_losses, direction_to, random_direction
from jaxtrain.landscape.sharpness import Curvature, Eigenvalue, build_product, largest_eigenvalue
from jaxtrain.ops.attention import differentiated_twice
from jaxtrain.optim import frozen_of
from jaxtrain.run.checkpoints.reader import Reader
from jaxtrain.run.folder import CHECKPOINTS, LANDSCAPE
from jaxtrain.run.observe import terminal
from jaxtrain.run.replay import load_run
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import TrainState
from jaxtrain.step import build_eval_step
from jaxtrain.tree import PyTree

_BAR = 40
_SHADES = " .:-=+*#%@"


@dataclasses.dataclass(frozen=True)
class LandscapeOptions:
    """Draws the held-out loss along a random direction through a checkpoint of a run, on a plane of
    two, or on the line to another checkpoint; or finds how sharp the loss is at every checkpoint.

    Random directions are as long as the parameters, filter by filter (Li et al. 2018). Results are
    printed, and kept in landscape.json in the run's folder. All other flags go to the experiment,
    in place of those of the run, such as --mesh.data 1 on a smaller machine.
    """

    run: tyro.conf.Positional[str]
    """The run's folder."""
    module: str | None = None
    """The run's experiment, such as experiments.gpt. The run's folder names it too, but no code is
    run because a file says so."""
    step: int | None = None
    """Which checkpoint; left out, the newest, and with --sharpness all."""
    between: str | None = None
    """Go to this checkpoint of the run, by its step, or to the newest one of another run, by its
    folder; 0 is --step and 1 is there."""
    two_d: bool = False
    """Draw a plane of two random directions."""
    points: int = 21
    """Points on a line, or along each side of a plane."""
    span: float = 1.0
    """Distance along random directions, to both sides; 1 moves each filter by its own norm."""
    at_once: int = 1
    """Points to evaluate together, which takes as many times the memory; the others follow in the
    same program."""
    batches: int = 4
    """Held-out batches to take the loss of; of several sets, of the one that decides which
    checkpoint is best."""
    direction_seed: int = 0
    """Seed of the random directions."""
    png: str | None = None
    """Also draw it in this PNG file."""
    sharpness: bool = False
    """Instead find the largest eigenvalue of the loss's Hessian, in float32, without dropout."""
    iterations: int = 30
    """Most iterations of Lanczos' method; each stores a copy of the parameters."""
    tolerance: float = 1e-3
    """Relative error of the eigenvalue at which Lanczos' method stops."""


def run_landscape(options: LandscapeOptions, rest: list[str]) -> int:
    """Prints what is found, and writes it down."""
    _check(options)
    if options.png is not None:  # Where that cannot be, nothing is computed.
        new_figure(1, 1)
    distributed.initialize()
    experiment = load_run(options.run, options.module, flags=rest)
    quiet.start()
    view = View(experiment, options.batches)
    if options.sharpness:
        kind, record = "sharpness", find_sharpness(view, options)
    elif options.between is not None:
        kind, record = "between", find_between(view, options)
    else:
        kind, record = "plane" if options.two_d else "line", find_around(view, options)
    keep(options.run, kind, record, describe(kind, record))
    if options.png is not None and jax.process_index() == 0:
        save_png(kind, record, options.png)
        terminal.print_lines([options.png])
    return 0


def keep(run: str, kind: str, record: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Writes what was found of one kind into landscape.json in a run's folder, and prints lines."""
    if jax.process_index() == 0:
        path = as_path(run) / LANDSCAPE
        kept = json_object(read_if_there(path))  # what is damaged can be found again
        write_whole(path, json_text(kept | {kind: record}))
        terminal.print_lines([*lines, str(path)])


class View:
    """An experiment on its mesh, and ``count`` held-out batches that its loss is taken of."""

    def __init__(self, experiment: Experiment, count: int):
        experiment = all_on_devices(experiment)  # where directions are added to parameters
        self.experiment, self.mesh = experiment, make_experiment_mesh(experiment)
        self.abstract = make_abstract_state(experiment, self.mesh)
        self.frozen = frozen_of(self.abstract)
        opened = experiment.data.eval_sets.get(experiment.deciding_set) or (lambda _: ())
        self.batches = list(itertools.islice(opened(batch_sharding(self.mesh)), count))
        if not self.batches:
            raise ValueError(
                f"experiment {experiment.name!r} has no held-out batch: give it eval_batches"
            )

    def restore(self, run: str, step: int) -> TrainState:
        """Reads parameters (averages where the optimizer keeps any) and model state, no more."""
        return restore_evaluated(self.experiment, self.abstract, reader_of(run), step)

    def draw(self, state: TrainState, rng: jax.Array) -> PyTree:
        """Draws a random direction, the same on every mesh, which lies as the parameters do."""
        stack = self.experiment.stack
        reordered = stack.virtual > 1 or stack.padded
        natural = dataclasses.replace(stack, virtual=1, counts=None)

        def draw(state: TrainState) -> PyTree:
            if reordered:
                state = dataclasses.replace(state, params=stack.natural(state.params))
            found = random_direction(state, rng, stacked=natural.axes, frozen=self.frozen)
            return found | {"params": stack.cut(found["params"])} if reordered else found

        moving = {"params": state.params, "model_state": state.model_state}
        places = jax.tree.map(
            lambda x, d: None if d is None else x.sharding, moving, jax.eval_shape(draw, state)
        )
        return jax.jit(draw, out_shardings=places)(state)

    def losses(
        self,
        state: TrainState,
        directions: Sequence[PyTree],
        points_PK: np.ndarray,
        *,
        at_once: int,
    ) -> np.ndarray:
        """Returns the loss at every point, [P], in the precision of the run."""
        around, first = Subspace(state, tuple(directions)), rows_of(self.batches[0])
        evaluation = build_evaluation(self.experiment, first, self.mesh)
        losses = build_losses(evaluation, points_PK, at_once=at_once)
        options = {"mesh": self.mesh, "donate": False} | self.experiment.compiled_with
        step = compile_step(losses, around, first, **options)
        return np.asarray(evaluate(step, around, self.batches)["loss"], np.float64)

    def compile_product(self, state: TrainState) -> CompiledStep:
        """Compiles products with the Hessian of a batch's loss, in float32."""
        experiment, vector = self.experiment, self.start(state)
        evaluation = build_eval_step(
            experiment.laid.eval_loss_fn or experiment.laid.loss_fn,
            policy="f32",
            has_model_state=experiment.task.has_model_state,
            gather=experiment.task.gather,
        )
        at = Curvature(state, vector, vector)
        options = {"mesh": self.mesh} | experiment.compiled_with
        with differentiated_twice(True):
            return compile_step(build_product(evaluation), at, rows_of(self.batches[0]), **options)

    def start(self, state: TrainState) -> PyTree:
        """Draws a vector like the parameters that train."""
        moving, _ = trainable(state.params, self.frozen)
        draw = lambda: optax.tree.random_like(jax.random.key(0), moving)  # noqa: E731
        return jax.jit(draw, out_shardings=jax.tree.map(lambda x: x.sharding, moving))()

    def sharpness(self, step: CompiledStep, state: TrainState, **limits: Any) -> Eigenvalue:
        """Returns the largest eigenvalue of the Hessian of the mean loss over the batches."""

        def product(vector: PyTree) -> PyTree:
            nonlocal state
            # The step's arguments are donated.
            copy = jax.tree.map(jnp.copy, vector)
            at, weights = Curvature(state, copy, jax.tree.map(jnp.zeros_like, vector)), []
            for batch in self.batches:
                share = batch.share if isinstance(batch, Repeated) else 1.0
                # The step adds a whole batch to the product.
                at, weight = step(at.scaled(1 / share), rows_of(batch))
                at = at.scaled(share)
                weights.append(weight * share)
            state, total = at.state, sum(map(float, weights))
            return jax.tree.map(lambda x: x / total, at.product)

        return largest_eigenvalue(product, self.start(state), **limits)


def find_around(view: View, options: LandscapeOptions) -> dict[str, Any]:
    """Finds the losses along a random direction, or on a plane of two."""
    step = step_of(options.run, options.step)
    state = view.restore(options.run, step)
    key, count = jax.random.key(options.direction_seed), 2 if options.two_d else 1
    directions = [view.draw(state, jax.random.fold_in(key, k)) for k in range(count)]
    line_P = np.linspace(-options.span, options.span, options.points)
    points_PK = np.stack(np.meshgrid(*[line_P] * count), -1).reshape(-1, count)
    losses = view.losses(state, directions, points_PK, at_once=options.at_once)
    return {
        "step": step,
        "batches": len(view.batches),
        "seed": options.direction_seed,
        "coordinates": line_P,
        "losses": losses.reshape([options.points] * count),  # a row has one place in the second
    }


def find_between(view: View, options: LandscapeOptions) -> dict[str, Any]:
    """Finds the losses on the line to another checkpoint."""
    to, step = options.between, step_of(options.run, options.step)
    run, there = (options.run, int(to)) if to.isdecimal() else (to, None)
    there = step_of(run, there)
    state = view.restore(options.run, step)
    direction = jax.jit(direction_to)(state, view.restore(run, there))
    line_P = np.linspace(0, 1, options.points)
    losses_P = view.losses(state, [direction], line_P[:, None], at_once=options.at_once)
    return {
        "step": step,
        "to": {"run": run, "step": there},
        "batches": len(view.batches),
        "coordinates": line_P,
        "losses": losses_P,
        "barrier": barrier(losses_P, line_P),
    }


def find_sharpness(view: View, options: LandscapeOptions) -> dict[str, Any]:
    """Finds the largest eigenvalue of the Hessian at one checkpoint, or at all."""
    steps = sound_steps(options.run) if options.step is None else [options.step]
    limits = {"iterations": options.iterations, "tolerance": options.tolerance}
    found, product = [], None
    for step in steps or [step_of(options.run, None)]:
        state = view.restore(options.run, step)
        product = product or view.compile_product(state)
        value = view.sharpness(product, state, **limits)
        found.append({"step": step, **value._asdict()})
    return {"batches": len(view.batches), "checkpoints": found}


def describe(kind: str, record: Mapping[str, Any]) -> list[str]:
    """Says in lines what was found."""
    batches = f"{record['batches']} held-out batches"
    if kind == "sharpness":
        lines = [f"the largest eigenvalue of the Hessian, of {batches}:"]
        for found in record["checkpoints"]:
            value, error = found["value"], found["error"]
            much = f"{value:10.4g} +- {error:.1g}, after {found['products']} products"
            lines.append(f"  checkpoint {found['step']:>8}  {much}")
        return lines
    line, losses = record["coordinates"], record["losses"]
    lines = [f"the loss around checkpoint {record['step']}, of {batches}:"]
    if kind == "between":
        to = record["to"]
        lines[0] = f"the loss from checkpoint {record['step']} to {to['run']}, checkpoint "
        lines[0] += f"{to['step']}, of {batches}:"
    known = losses[np.isfinite(losses)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    height = np.where(np.isfinite(losses), losses, high) - low  # what is no number is a cliff
    parts = height / max(high - low, np.finfo(float).tiny)
    if kind == "plane":
        shades = np.minimum((parts * len(_SHADES)).astype(int), len(_SHADES) - 1)
        lines += ["  " + "".join(2 * _SHADES[i] for i in row) for row in shades[::-1]]
        middle = losses[len(line) // 2, len(line) // 2]
        lines.append(f"  from {low:.4f} to {high:.4f}, {middle:.4f} in the middle")
        return lines
    for t, loss, part in zip(line, losses, parts, strict=True):
        lines.append(f"  {t:6.2f}  {loss:10.4f}  {'#' * round(_BAR * part)}".rstrip())
    if kind == "between":
        lines.append(f"barrier: {record['barrier']:.4f} above the straight line between the ends")
    return lines


def save_png(kind: str, record: Mapping[str, Any], path: epath.PathLike) -> None:
    """Draws what was found."""
    figure = new_figure(7, 5.5 if kind == "plane" else 4)
    axes = figure.subplots()
    if kind == "sharpness":
        steps, values, errors = (
            [found[name] for found in record["checkpoints"]] for name in ("step", "value", "error")
        )
        axes.errorbar(steps, values, errors, marker="o", capsize=3)
        finish_axes(axes, "largest eigenvalue of the Hessian", x="step")
    elif kind == "plane":
        line, losses = record["coordinates"], np.ma.masked_invalid(record["losses"])
        lines = axes.contour(line, line, losses, levels=20, linewidths=0.8)
        axes.clabel(lines, fontsize=7)
        axes.plot(0, 0, "k+")
        axes.set_aspect("equal")
        title = f"held-out loss around checkpoint {record['step']}"
        finish_axes(axes, title, x="first direction", y="second direction")
    else:
        axes.plot(record["coordinates"], record["losses"], marker=".")
        title, x = f"held-out loss around checkpoint {record['step']}", "random direction"
        if kind == "between":
            ends = [record["coordinates"][[0, -1]], record["losses"][[0, -1]]]
            axes.plot(*ends, color="gray", linestyle="--", linewidth=1)
            title = f"held-out loss between checkpoints, barrier {record['barrier']:.3g}"
            x = f"from checkpoint {record['step']} to {record['to']['step']}"
        finish_axes(axes, title, x=x)
    save_figure(figure, path)


def _check(options: LandscapeOptions) -> None:
    check_least(options, points=3, at_once=1, batches=1, iterations=1, tolerance=0, span=0)
    if sum([options.two_d, options.sharpness, options.between is not None]) > 1:
        raise ValueError("`two_d`, `between` and `sharpness` are three things: give one of them")
    if options.between is None and options.points % 2 == 0:
        raise ValueError(f"`points` is {options.points}: give an odd number, as the run is one")


def reader_of(run: str) -> Reader:
    """Opens the checkpoints of a run's folder."""
    return Reader(as_path(run) / CHECKPOINTS)


def sound_steps(run: str) -> list[int]:
    """Returns the steps of a run's checkpoints; raises DamagedCheckpointError if one is damaged."""
    checkpoints = reader_of(run)
    checkpoints.check_sound()
    return checkpoints.steps()


def step_of(run: str, step: int | None) -> int:
    """Returns the checkpoint that is meant, the newest for None. Raises FileNotFoundError if the
    run lacks it, and for None as :func:`sound_steps` does."""
    steps = sound_steps(run) if step is None else reader_of(run).steps()
    if not steps or (step is not None and step not in steps):
        has = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise FileNotFoundError(
            f"no checkpoint{f' of step {step}' if step else ''} in {run}: {has}"
        )
    return steps[-1] if step is None else step
