"""Whether a mesh changes the mathematics: an experiment on one device against the same on meshes.

The experiment is trained for a few steps on one device with its own batches, in float32. On each
mesh every step starts from the state that one device had, and its optimizer is given the gradient
that one device had. So each step is checked from end to end, by induction so is the run, and
rounding is compared where it arises: left to itself, Adam would blow the rounding noise of a
gradient that is zero (that of a key bias, which softmax does not see) up to the size of a whole
update.

The error of a leaf is ``|a - b| / |b|`` in the 2-norm. A leaf that is zero but for rounding has no
norm to speak of, so ``|b|`` counts as at least a hundredth of what the leaf would have if it shared
its tree's root mean square.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from jaxtrain.experiment import Experiment, compile_train, make_abstract_state, make_state
from jaxtrain.parallel.mesh import AXES, fill_sizes, make_mesh
from jaxtrain.parallel.pipeline import Stages
from jaxtrain.parallel.placement import Gather
from jaxtrain.parallel.sharding import Rule, Rules, as_rules, batch_sharding
from jaxtrain.precision import Policy
from jaxtrain.state import TrainState
from jaxtrain.tree import named_leaves, owner_of

PyTree = Any
TOLERANCE = 1e-5
DEVICES = 8

# Half of the time would be LLVM's; it knows nothing of meshes.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and what is split over its data axis.

    Args:
      axes: sizes of mesh axes, as :func:`jaxtrain.make_mesh` takes them.
      zero: 0 to 3, as in :func:`jaxtrain.init_state`.
    """

    axes: Mapping[str, int]
    zero: int = 0

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        named = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        return named + (f", zero {self.zero}" if self.zero else "")


LAYOUTS = (
    Layout({"data": 8}),
    Layout({"fsdp": 8}),
    Layout({"data": 2, "tensor": 4}),
    Layout({"data": 2, "fsdp": 2, "tensor": 2}),
    Layout({"data": 8}, zero=1),
    Layout({"data": 8}, zero=2),
    Layout({"data": 8}, zero=3),
    Layout({"pipe": 2, "data": 2, "tensor": 2}),
    Layout({"pipe": 4, "fsdp": 2}),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of one layout.

    Args:
      layout: the layout.
      worst: the largest error and the leaf that has it, by part of the step's result; empty where
        the layout does not fit.
      refusal: why the layout does not fit the experiment, or None.
    """

    layout: Layout
    worst: Mapping[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    refusal: str | None = None

    def agrees(self, tolerance: float) -> bool:
        """Whether no part is off by more than ``tolerance``."""
        return all(error <= tolerance for error, _ in self.worst.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the run on one device.

    Args:
      before: the state that it started from.
      batch: its batch, on the host.
      gradients: what the optimizer was given.
      parts: what is compared, on the host, by name.
    """

    before: TrainState
    batch: PyTree
    gradients: PyTree
    parts: Mapping[str, Mapping[str, np.ndarray]]


def parity(
    init_fn: Callable[[jax.Array], PyTree],
    loss_fn: Callable[..., Any],
    batch: PyTree,
    *,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | Sequence[Rule] | None = None,
    layouts: Iterable[Layout | str] | None = None,
    accumulate: int = 1,
    stages: Stages | None = None,
    pipeline: Mapping[str, Any] | None = None,
    has_model_state: bool = False,
    gather: Gather = "step",
    steps: int = 2,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> str:
    """Checks that a model of one's own trains on meshes as it does on one device, in float32.

    Args:
      init_fn, loss_fn, optimizer, rules, accumulate, has_model_state, gather: what
        :func:`jaxtrain.init_state` and :func:`jaxtrain.build_train_step` are given; AdamW by
        default.
      batch: a global batch of arrays; every step trains on it.
      layouts: meshes, such as ``"data=2,fsdp=2,tensor=2"`` or ``"data=8,zero=3"``; by default all
        of :data:`LAYOUTS` that the devices suffice for (those with ``pipe`` if there are stages).
      stages, pipeline: the model as :class:`jaxtrain.Stages` and the arguments of
        :func:`jaxtrain.pipeline`, for layouts with an axis ``pipe``.
      steps: how many steps are compared.
      seed: of parameters and of the steps' randomness.
      tolerance: the largest error of a leaf, relative in the 2-norm.

    Returns:
      A table of the worst leaf of loss, gradients, parameters and optimizer state on each mesh.

    Raises:
      AssertionError: where a mesh disagrees, with the leaf, the error and what to do about it.
      ValueError: where nothing can be compared.

    >>> init_fn = lambda rng: {"w": jax.random.normal(rng, (4,))}
    >>> loss_fn = lambda params, batch, rng: ((batch @ params["w"]) ** 2).mean()
    >>> print(parity(init_fn, loss_fn, np.ones((8, 4), "f"), layouts=["data=1"]).splitlines()[-1])
    1 of 1 meshes agree with one device to 1e-05
    """
    if layouts is None:
        fitting = [x for x in LAYOUTS if x.devices <= len(jax.devices())]
        layouts = [x for x in fitting if stages is not None or "pipe" not in x.axes]
        if not layouts:
            raise ValueError(
                f"JAX sees {len(jax.devices())} devices, too few for a mesh: simulate them with "
                f"jax.config.update('jax_num_cpu_devices', {DEVICES}) before anything uses JAX, or "
                "give layouts"
            )
    experiment = Experiment(
        name="parity",
        init_fn=init_fn,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3, eps=1e-6) if optimizer is None else optimizer,
        batch=jax.eval_shape(lambda batch: batch, batch),
        train_batches=lambda start, sharding: contextlib.nullcontext(itertools.repeat(batch)),
        steps=steps,
        rules=as_rules(rules),
        gather=gather,
        accumulate=accumulate,
        stages=stages,
        pipeline=pipeline or {"microbatches": 4},
        has_model_state=has_model_state,
        seed=seed,
    )
    layouts = [parse_layout(layout) if isinstance(layout, str) else layout for layout in layouts]
    comparisons = list(compare(experiment, layouts=layouts, steps=steps))
    console = Console(file=io.StringIO(), width=120)
    agree = report(comparisons, tolerance=tolerance, console=console)
    table = console.file.getvalue().rstrip()
    if not agree:
        off = next(c for c in comparisons if not c.agrees(tolerance))
        part, (error, leaf) = next(x for x in off.worst.items() if not x[1][0] <= tolerance)
        raise AssertionError(
            f"on mesh {off.layout} the {part} of {leaf!r} differ by {error:.1e} from one device's. "
            "If the model uses shard_map, collectives or sizes of the mesh, look there first. "
            "Otherwise pin its activations near that parameter with jaxtrain.constrain(x, 'batch', "
            "...), or leave one of the axes data, fsdp and tensor at 1.\n\n" + table
        )
    return table


def compare(
    experiment: Experiment, *, layouts: Iterable[Layout] = LAYOUTS, steps: int = 3
) -> Iterator[Comparison]:
    """Trains on one device, then on each layout, and compares; see the top of this module.

    A pipeline is compared with as many accumulated microbatches on one device as it has: the same
    rows, with the same randomness.

    Args:
      experiment: what to train; its mesh, ZeRO stage and dtypes are replaced. Where it accumulates,
        that is the number of a pipeline's microbatches too.
      layouts: the meshes to compare, each over the first devices that JAX sees.
      steps: how many batches.

    Yields:
      What came of each layout, in order.

    Raises:
      ValueError: where ``steps`` is less than 1, or the experiment cannot run on one device.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps have nothing to compare: use 1 or more")
    experiment = dataclasses.replace(experiment, policy=Policy.f32())
    run = functools.cache(
        lambda microbatches: run_one_device(
            dataclasses.replace(experiment, accumulate=microbatches), steps
        )
    )
    run(experiment.accumulate)  # what one device refuses is no layout's fault
    for layout in layouts:
        piped = layout.axes.get("pipe", 1) > 1
        microbatches, given = experiment.accumulate, experiment
        if piped:
            if microbatches == 1:
                microbatches = experiment.pipeline.get("microbatches", 1)
            options = dict(experiment.pipeline) | {"microbatches": microbatches}
            given = dataclasses.replace(experiment, accumulate=1, pipeline=options)
        try:
            errors = run_layout(given, layout, run(microbatches))
        except ValueError as error:
            yield Comparison(layout, refusal=str(error))
        else:
            yield Comparison(layout, worst=errors)


def run_one_device(experiment: Experiment, steps: int) -> list[Step]:
    """Trains on one device."""
    optimizer = optax.chain(record_gradients(), experiment.optimizer)
    experiment = dataclasses.replace(experiment, optimizer=optimizer, zero=0, mesh={})
    mesh = make_mesh(devices=jax.devices()[:1])
    state = make_state(experiment, mesh)
    train = compile_train(experiment, state, mesh, compiler_options=COMPILER_OPTIONS)
    run = []
    with experiment.train_batches(0, batch_sharding(mesh)) as stream:
        for batch in itertools.islice(stream, steps):
            before = place(state, state)
            state, metrics = train(state, batch)
            gradients, inner = state.opt_state
            parts = collect(experiment, state, metrics["loss"], gradients, inner)
            run.append(
                Step(
                    before=dataclasses.replace(before, opt_state=before.opt_state[1]),
                    batch=jax.device_get(batch),
                    gradients=gradients,
                    parts=parts,
                )
            )
    return run


def run_layout(
    experiment: Experiment, layout: Layout, reference: Sequence[Step]
) -> dict[str, tuple[float, str]]:
    """Repeats each step on a mesh; returns the largest error of each part, and its leaf."""
    if layout.devices > len(jax.devices()):
        raise ValueError(f"it takes {layout.devices} devices and there are {len(jax.devices())}")
    mesh = make_mesh(**layout.axes, devices=jax.devices()[: layout.devices])
    optimizer = optax.chain(record_gradients(), replay_gradients(), experiment.optimizer)
    experiment = dataclasses.replace(
        experiment, optimizer=optimizer, mesh=layout.axes, zero=layout.zero
    )
    shapes = make_abstract_state(experiment, mesh)
    train = compile_train(experiment, shapes, mesh, compiler_options=COMPILER_OPTIONS)
    errors: dict[str, tuple[float, str]] = {}
    for step in reference:
        given = (step.gradients, step.gradients, step.before.opt_state)
        state = dataclasses.replace(step.before, opt_state=given)
        state = place(state, shapes)
        state, metrics = train(state, step.batch)
        gradients, _, inner = state.opt_state
        found = collect(experiment, state, metrics["loss"], gradients, inner)
        for part, expected in step.parts.items():
            errors[part] = max(errors.get(part, (-1.0, "")), worst_by_group(found[part], expected))
    return errors


def place(state: TrainState, like: TrainState) -> TrainState:
    """Copies a state to where another (shapes with shardings suffice) lies."""
    placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, like))
    # The step donates what it is given, and device_put shares buffers with its argument (even with
    # may_alias=False, where it copies to more devices).
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(placed)


def record_gradients() -> optax.GradientTransformation:
    """Keeps the latest gradient in the optimizer's state, where it can be compared."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )


def replay_gradients() -> optax.GradientTransformation:
    """Passes on the gradient in its state in place of the one that it is given."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (state, state),
    )


def worst(found: PyTree, expected: PyTree) -> tuple[float, str]:
    """The largest relative error over the leaves of a tree, and the leaf that has it.

    Args:
      found, expected: trees of arrays with the same paths.

    Returns:
      The error as defined at the top of this module (infinite where something is not a number),
      and the leaf's path.

    >>> worst({"a": np.array([3, 5]), "b": np.ones(2)}, {"a": np.array([3, 4]), "b": np.ones(2)})
    (0.2, 'a')
    """
    found, expected = named_leaves(found), named_leaves(expected)
    total = math.sqrt(sum(float(np.square(np.float64(x)).sum()) for x in expected.values()))
    count = sum(x.size for x in expected.values())
    errors = []
    for name, b in expected.items():
        floor = 0.01 * total * math.sqrt(b.size / count)
        norm = max(float(np.linalg.norm(np.float64(b))), floor)
        distance = float(np.linalg.norm(np.float64(found[name]) - np.float64(b)))
        error = distance / norm if norm else distance
        errors.append((math.inf if math.isnan(error) else error, name))
    return max(errors)


def worst_by_group(found: Mapping[str, PyTree], expected: Mapping[str, PyTree]):
    """:func:`worst` over groups of leaves, each with a root mean square of its own."""
    return max((worst(found[group], expected[group]) for group in expected), default=(0.0, "none"))


def collect(
    experiment: Experiment, state: TrainState, loss: jax.Array, gradients: PyTree, opt_state: PyTree
) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """What is compared, on the host: leaves by name, in groups, by part.

    A stacked parameter is one leaf per layer. First and second moments differ by orders of
    magnitude, so each is a group of its own.
    """
    params = named_leaves(state.params)
    layers = {name: x.shape[: layer_axes(name, experiment)] for name, x in params.items()}
    parts = {
        "loss": {"": {"loss": np.asarray(jax.device_get(loss))}},
        "gradients": groups(gradients, layers),
        "parameters": groups(state.params, layers),
        "optimizer state": groups(opt_state, layers),
    }
    if jax.tree.leaves(state.model_state):
        parts["model state"] = groups(state.model_state, layers)
    return parts


def groups(tree: PyTree, layers: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, np.ndarray]]:
    """The leaves of a tree by what their path has in front of a parameter's path.

    Args:
      tree: of arrays.
      layers: for every parameter, the sizes of its leading axes that count layers.
    """
    result: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        value = np.asarray(jax.device_get(leaf))
        owner = owner_of(name, layers)
        # What follows no parameter (a counter) is a group by itself.
        group = result.setdefault(name if owner is None else name.removesuffix(owner), {})
        stacked = layers.get(owner, ())
        if stacked and value.shape[: len(stacked)] == stacked:
            each = value.reshape(-1, *value.shape[len(stacked) :])
            group |= {f"{name}, layer {i}": layer for i, layer in enumerate(each)}
        else:
            group[name] = value
    return result


def layer_axes(name: str, experiment: Experiment) -> int:
    """How many leading axes of a parameter count layers: as stages say, or the rule for it."""
    if experiment.stages and experiment.stack.holds(name):
        return experiment.stack.lead
    rules = as_rules(experiment.rules).params
    matching = (axes for pattern, axes in rules if re.search(pattern, name))
    return int(tuple(next(matching, ()))[:1] == ("layers",))


def usual_layouts(experiment: Experiment) -> tuple[Layout, ...]:
    """:data:`LAYOUTS`, and before them the experiment's own where it is another.

    Raises:
      ValueError: where the experiment's mesh does not fit on :data:`DEVICES` devices.
    """
    # Which network an axis crosses changes nothing on simulated devices.
    sizes = {axis: size for axis, size in experiment.mesh.items() if axis in AXES}
    if -1 in sizes.values():
        sizes = fill_sizes(sizes, DEVICES)
    own = Layout({axis: size for axis, size in sizes.items() if size != 1}, experiment.zero)
    return LAYOUTS if own.devices == 1 or own in LAYOUTS else (own, *LAYOUTS)


def parse_layout(text: str) -> Layout:
    """Reads a layout such as ``"data=2,tensor=4"`` or ``"data=8,zero=1"``.

    Raises:
      ValueError: for anything else.

    >>> str(parse_layout("data=8,zero=1"))
    'data 8, zero 1'
    """
    sizes = {}
    for entry in text.split(","):
        name, _, size = (word.strip() for word in entry.partition("="))
        if name not in (*AXES, "zero") or not size.isdecimal():
            raise ValueError(
                f"layout {text!r} is not known: write sizes of the mesh axes {', '.join(AXES)}, "
                "and zero, such as data=2,tensor=4 or data=8,zero=1"
            )
        sizes[name] = int(size)
    zero = sizes.pop("zero", 0)
    return Layout(sizes, zero)


def report(
    comparisons: Iterable[Comparison], *, tolerance: float, console: Console | None = None
) -> bool:
    """Prints a table of comparisons and says whether all of them agree.

    Raises:
      ValueError: where no layout fits, so that nothing was compared.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("mesh", "part"):
        table.add_column(column, no_wrap=True)
    table.add_column("worst error", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("in", overflow="fold")
    comparisons = list(comparisons)
    for comparison in comparisons:
        title = str(comparison.layout)
        for part, (error, leaf) in comparison.worst.items():
            verdict = "ok" if error <= tolerance else "[bold red]NOT[/bold red]"
            table.add_row(title, part, f"{error:.1e}", verdict, leaf)
            title = ""
        if comparison.refusal is not None:
            table.add_row(title, "", "", "", f"does not fit: {comparison.refusal}")
    console = console or Console()
    console.print(table, highlight=False)
    compared = [c for c in comparisons if c.refusal is None]
    off = [c for c in compared if not c.agrees(tolerance)]
    if not compared:
        reasons = "; ".join(f"{c.layout}: {c.refusal}" for c in comparisons)
        raise ValueError(f"no mesh fits, so nothing was compared: choose other layouts ({reasons})")
    console.print()
    console.print(
        f"{len(compared) - len(off)} of {len(compared)} meshes agree with one device to "
        f"{tolerance:g}",
        highlight=False,
    )
    return not off


def simulate_devices(count: int = DEVICES) -> None:
    """Makes JAX see ``count`` CPU devices.

    Raises:
      ValueError: where JAX has started already with fewer.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # It has started; what it sees decides.
        pass
    if len(jax.devices()) < count:
        raise ValueError(
            f"{count} devices are to be simulated and JAX has started with {len(jax.devices())}: "
            "do not use devices before"
        )
