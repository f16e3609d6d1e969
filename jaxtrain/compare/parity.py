"""Whether a mesh changes the mathematics: an experiment on one device against the same on meshes.

The experiment is trained for a few steps on one device with its own batches, in float32 unless
asked otherwise. On each mesh every step starts from the state that one device had, and its
optimizer is given the gradient that one device had. So each step is checked from end to end, by
induction so is the run, and rounding is compared where it arises: left to itself, Adam would blow
the rounding noise of a gradient that is zero (that of a key bias, which softmax does not see) up to
the size of a whole update. Where the experiment has an evaluation, that of every state is compared
as well.

In bfloat16 both sides round, and a mesh rounds each device's part of a sum before the parts are
added: gradients differ by some 3e-3, and by up to 1e-2 where a tensor axis cuts activations' sums
too. XLA's CPU compiler would leave values in float32 within whatever it fuses, so that two programs
round at different places; it is told not to. Then a pipeline has the gradients of an accumulation
bit for bit but for what a table of tokens tied to the head gets, whose two parts are rounded one by
one and not in their sum.

Where part of an axis crosses a slow network, equal runs of the devices count as hosts, so that what
is compiled has the form that it has there: gradients are summed inside of each first. The library
does that where it reduces once per step; such a layout does, if the experiment leaves it open.

The error of a leaf is ``|a - b| / |b|`` in the 2-norm. A leaf that is zero but for rounding has no
norm to speak of, so ``|b|`` counts as at least a hundredth of what the leaf would have if it shared
its tree's root mean square. A gradient may be larger than that and yet rounding alone, for example
that of a bias in front of BatchNorm. Therefore each step on one device runs once more, with
parameters off by a unit in the last place: a leaf that changes as much as its own size is zero but
for rounding, and may differ from another device's by some multiple of the change.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from jaxtrain.build import (
    compile_eval,
    compile_train,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    rows_of,
    why_not_once,
)
from jaxtrain.compare.difference import Difference, difference_of, perturbed
from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import Experiment, optimizer_for
from jaxtrain.layout import Layout, PipelineLayout
from jaxtrain.ops.scaled import RECIPES
from jaxtrain.optim.chains import freezing
from jaxtrain.precision import Policy
from jaxtrain.sharding.mesh import simulated_hosts
from jaxtrain.sharding.placement import Gather
from jaxtrain.sharding.rules import Rule, Rules, as_rules, batch_sharding
from jaxtrain.sharding.stack import Stack, StackedLeaf
from jaxtrain.stages import Stages
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, is_a, key_data, map_kind, named_leaves, nodes_of, owner_of

TOLERANCES = {"f32": 1e-5, "bf16": 2e-2, "pure_bf16": 5e-2, "fp16": 5e-3}  # by policy
TOLERANCES |= dict.fromkeys(RECIPES, 5e-2)
TOLERANCE = TOLERANCES["f32"]
STEPS = 2  # the second has moments that are not zero
# A leaf is zero but for rounding if it is at most so many times its change, and then differs by
# rounding alone if the distance is at most so many times the change.
UNDETERMINED, NOISE = 4, 30
DEVICES = 8

# Half of the time would be LLVM's; it knows nothing of meshes. XLA's CPU compiler keeps one core
# busy, so several programs are compiled at once.
COMPILERS, AHEAD = 2, 8
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # XLA refuses an option that it does not know
    QUICK |= {"xla_cpu_use_fusion_emitters": False, "xla_llvm_disable_expensive_passes": True}
    QUICK |= {"xla_cpu_parallel_codegen_split_count": 1}
COMPILER_OPTIONS = QUICK | {"xla_allow_excess_precision": False}  # see the top of this module

REPLAYED = (
    "Each step's optimizer is given the gradient of one device, so that parameters and optimizer "
    "state are compared for the same gradient: 0 there says that the update is the same."
)
ROUNDING_ALONE = (
    "Zero but for rounding, because parameters that are off in the last place change the gradient "
    f"by its own size (a bias in front of BatchNorm is an example; up to {NOISE} times that change "
    "is no difference):"
)


def set_flags(options: Mapping[str, Any]) -> None:
    """Has this process compile all programs with options of XLA, unless XLA_FLAGS says so; to be
    called before JAX finds its devices."""
    # On a busy machine simulated devices may be late for a collective by more than 40 s, upon which
    # XLA would abort the process.
    options = options | {"xla_cpu_collective_call_terminate_timeout_seconds": 600}
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
    if jax.__version_info__ < (0, 11):  # XLA ends a process for a flag that it does not know.
        os.environ.setdefault("XLA_FLAGS", flags)


LAYOUTS = (
    "data=8",
    "fsdp=8",
    "data=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
    "data=8,zero=1",
    "data=8,zero=2",
    "data=8,zero=3",
    "data=2,tensor=2,pipe=2",
    "fsdp=2,tensor=2,pipe=2",
    "fsdp=2,pipe=4",
    "data=4,fsdp=2,dcn_data=2",
    "data=2,fsdp=4,dcn_fsdp=2",
    "data=2,tensor=2,pipe=2,dcn_pipe=2",
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The errors of one layout against a single device, or the reason why it does not fit.

    Args:
      layout: the layout, as :meth:`jaxtrain.Layout.parse` reads it.
      worst: the largest error and the leaf that has it, by part of the step's result; empty where
        the layout does not fit.
      refusal: why the layout does not fit the experiment, or None.
      difference: where the layout begins to differ, if that was looked for and found.
      rounding: leaves whose gradient on one device is zero but for rounding, and large enough that
        another order of sums could look like a fault.
      replays: whether the optimizer was given one device's gradient.
    """

    layout: str
    worst: Mapping[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    refusal: str | None = None
    difference: Difference | None = None
    rounding: Sequence[str] = ()
    replays: bool = False

    def agrees(self, tolerance: float) -> bool:
        """Whether no part is off by more than ``tolerance``."""
        return all(error <= tolerance for error, _ in self.worst.values())


class Step(NamedTuple):
    """A step on one device: its state and batch, the gradients that were found, the results, and
    the distance that rounding may make in leaves of the gradient that are nothing else."""

    before: TrainState
    batch: PyTree
    gradients: list[PyTree]
    parts: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    rounding: Mapping[str, float]


def parity(
    init_fn: Callable[[jax.Array], PyTree],
    loss_fn: Callable[..., Any],
    batch: PyTree,
    *,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | Sequence[Rule] | None = None,
    layouts: Iterable[str] | None = None,
    accumulate: int = 1,
    stages: Stages | None = None,
    pipeline: Mapping[str, Any] | None = None,
    has_model_state: bool = False,
    gather: Gather | None = None,
    steps: int = STEPS,
    seed: int = 0,
    policy: str = "f32",
    tolerance: float | None = None,
    explain: bool = False,
) -> str:
    """Checks that a model of one's own trains on meshes as it does on one device.

    Args:
      init_fn, loss_fn, optimizer, rules, accumulate, has_model_state, gather: what
        :func:`jaxtrain.init_state` and :func:`jaxtrain.build_train_step` are given; AdamW by
        default.
      batch: a global batch of arrays; every step trains on it.
      layouts: layouts, such as ``"data=2,fsdp=2,tensor=2"``, ``"data=8,zero=3"`` or, over a slow
        network, ``"data=8,dcn_data=2"``, as :meth:`jaxtrain.Layout.parse` reads them; by default
        all of :data:`LAYOUTS` that the devices suffice for (those with ``pipe`` if there are
        stages).
      stages, pipeline: the model as :class:`jaxtrain.Stages` and the arguments of
        :func:`jaxtrain.pipeline`, for layouts with an axis ``pipe``.
      steps: how many steps are compared.
      seed: of parameters and of the steps' randomness.
      policy: dtypes of both sides.
      tolerance: the largest error of a leaf, relative in the 2-norm; by default, that which
        :data:`TOLERANCES` has for the policy.
      explain: whether the error names the equation at which the first mesh that disagrees begins to
        differ (:func:`jaxtrain.first_difference`).

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
    own = Layout(accumulate=accumulate, pipeline=PipelineLayout(microbatches=4))
    own = own.with_({f"pipeline.{name}": value for name, value in (pipeline or {}).items()})
    if layouts is None:
        fitting = [x for x in LAYOUTS if Layout.parse(x).mesh.devices <= len(jax.devices())]
        layouts = [x for x in fitting if stages is not None or "pipe" not in x]
        if not layouts:
            raise ValueError(
                f"JAX sees {len(jax.devices())} devices, too few for a mesh: simulate them with "
                f"jax.config.update('jax_num_cpu_devices', {DEVICES}) before anything uses JAX, or "
                "give layouts"
            )
    experiment = Experiment.of(
        name="parity",
        init_fn=init_fn,
        loss_fn=loss_fn,
        optimizer=freezing(optax.adamw(1e-3, eps=1e-6), None) if optimizer is None else optimizer,
        batch=jax.eval_shape(lambda batch: batch, batch),
        train_batches=lambda start, sharding: contextlib.nullcontext(itertools.repeat(batch)),
        steps=steps,
        rules=as_rules(rules),
        gather=None if gather == "step" else gather,
        layout=own,
        stages=stages,
        has_model_state=has_model_state,
        seed=seed,
    )
    kinds = {False, stages is not None}
    if gather == "step" and not any(why_not_once(experiment, piped=x) for x in kinds):
        experiment = experiment.with_(layout=dataclasses.replace(own, gather="step"))
    if policy not in TOLERANCES:
        raise ValueError(f"policy {policy!r} is not compared: use one of {', '.join(TOLERANCES)}")
    tolerance = TOLERANCES[policy] if tolerance is None else tolerance
    given = {"steps": steps, "policy": policy, "explain": tolerance if explain else None}
    comparisons = list(compare(experiment, layouts=layouts, **given))
    console = Console(file=io.StringIO(), width=120)
    agree = report(comparisons, tolerance=tolerance, console=console)
    table = console.file.getvalue().rstrip()
    if not agree:
        off = next(c for c in comparisons if not c.agrees(tolerance))
        part, (error, leaf) = next(x for x in off.worst.items() if not x[1][0] <= tolerance)
        begins = "" if off.difference is None else f"The step {off.difference}. "
        raise AssertionError(
            f"on {off.layout} the {part} of {leaf!r} differ by {error:.1e} from one device's. "
            f"{begins}If the model uses shard_map, collectives or sizes of the mesh, look there "
            "first. "
            "Otherwise pin its activations near that parameter with jaxtrain.constrain(x, 'batch', "
            "...), or leave one of the axes data, fsdp and tensor at 1.\n\n" + table
        )
    return table


def compare(
    experiment: Experiment,
    *,
    layouts: Iterable[str] = LAYOUTS,
    steps: int = STEPS,
    policy: Policy | str = "f32",
    explain: float | None = None,
) -> Iterator[Comparison]:
    """Trains on one device, then on each layout, and compares; see the top of this module.

    A pipeline is compared with as many accumulated microbatches on one device as it has: the same
    rows, with the same randomness.

    Args:
      experiment: what to train; its mesh, ZeRO stage and dtypes are replaced, and what else a
        layout names. Where it accumulates, that is the number of a pipeline's microbatches too.
      layouts: what to compare, each over the first devices that JAX sees.
      steps: how many batches.
      policy: dtypes of both sides.
      explain: the error of a layout above which is looked for where it begins to differ.

    Yields:
      What came of each layout, in order.

    Raises:
      ValueError: where ``steps`` is less than 1, or the experiment cannot run on one device.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps have nothing to compare: use 1 or more")
    if isinstance(policy, str):
        cast = experiment.policy.cast_batch
        policy = dataclasses.replace(Policy.named(policy), cast_batch=cast)
    experiment = experiment.with_(policy=policy)
    read = functools.partial(type(experiment.layout).parse, base=experiment.layout)
    layouts = {text: read(text) for text in layouts}
    reference = reference_of(experiment, steps)
    each = compiled(experiment, list(layouts.values()))
    for layout, (number, program) in zip(layouts, each, strict=True):
        if number == experiment.layout.accumulate:
            reference(number)  # what one device refuses is no layout's fault
        try:
            comparison = Comparison(
                layout,
                run_layout(program.result(), reference(number)),
                replays=experiment.method.updates == 1,
                rounding=sorted({name for step in reference(number) for name in step.rounding}),
            )
        except ValueError as error:
            comparison = Comparison(layout, refusal=str(error))
        if explain is not None and not comparison.agrees(explain):
            alone = compile_on(experiment, read(""), number, replays=True)
            difference = difference_on(alone, program.result(), reference(number))
            comparison = dataclasses.replace(comparison, difference=difference)
        yield comparison


def reference_of(experiment: Experiment, steps: int) -> Callable[[int], list[Step]]:
    """Returns what trains on one device with so many microbatches, once for each number."""
    alone = Layout.parse("exact=0", experiment.layout)  # one device is never exact
    compiled_with = functools.partial(compile_on, experiment, alone)
    return functools.cache(lambda number: run_one_device(compiled_with(number), steps))


def compiled(
    experiment: Experiment, layouts: Sequence[Layout]
) -> Iterator[tuple[int, "Future[Program]"]]:
    """Compiles for layouts, a few of them ahead of the one that is run.

    Yields:
      The number of microbatches on one device, and the program that is being compiled.
    """
    pool = ThreadPoolExecutor(COMPILERS)
    try:
        for start in range(0, len(layouts), AHEAD):
            some = []
            for layout in layouts[start : start + AHEAD]:
                # An accumulation has its number everywhere; else a pipeline alone has microbatches.
                number = layout.accumulate
                number = number if number > 1 else layout.microbatches(layout.mesh.pipe)
                program = pool.submit(compile_on, experiment, layout, number, replays=True)
                some.append((number, program))
            yield from some
    finally:
        pool.shutdown(cancel_futures=True)


class Program(NamedTuple):
    """The compiled programs of a mesh: the train step and, if there is one, the evaluation."""

    experiment: Experiment
    shapes: TrainState
    train: CompiledStep
    evaluate: Callable[[TrainState], Mapping[str, Any]]


def compile_on(
    experiment: Experiment, layout: Layout, microbatches: int, *, replays: bool = False
) -> Program:
    """Compiles for a layout; its optimizer's gradients are compared, and perhaps replayed."""
    devices, islands = layout.mesh.devices, layout.mesh.islands
    if devices > len(jax.devices()):
        raise ValueError(f"it takes {devices} devices and there are {len(jax.devices())}")
    piped = layout.mesh.pipe > 1
    asked = experiment.with_(layout=layout)
    if islands > 1 and layout.gather is None and why_not_once(asked, piped=piped) is None:
        layout = dataclasses.replace(layout, gather="step")
    parts = {"accumulate": 1, "pipeline.microbatches": microbatches}
    layout = layout.with_(parts if piped else {"accumulate": microbatches})
    chain = functools.partial(optimizer_for, experiment)
    replays &= experiment.method.updates == 1
    experiment = experiment.with_(
        optimizer=lambda stack: optax.chain(_compared(replays), chain(stack)),
        freeze=None,  # which the chain does
        layout=layout,
    )
    with simulated_hosts(max(1, devices // islands)):
        return _compile(experiment, jax.devices()[:devices])


def _compile(experiment: Experiment, devices: Sequence[jax.Device]) -> Program:
    mesh = make_experiment_mesh(experiment, devices)
    shapes = make_abstract_state(experiment, mesh)
    options = {"compiler_options": COMPILER_OPTIONS}
    train = compile_train(experiment, shapes, mesh, **options)
    batches = next(iter(experiment.data.eval_sets.values()), None)
    if batches is None:
        return Program(experiment, shapes, train, lambda state: {})
    held_out = jax.device_get(rows_of(next(iter(batches(batch_sharding(mesh))))))
    step = compile_eval(experiment, shapes, held_out, mesh, **options)
    means = lambda state: jax.device_get(step(state, held_out)).means()  # noqa: E731
    return Program(experiment, shapes, train, means)


def run_one_device(program: Program, steps: int) -> list[Step]:
    """Trains on one device."""
    mesh, run = program.shapes.step.sharding.mesh, []
    state = make_state(program.experiment, mesh)
    with program.experiment.train_batches(0, batch_sharding(mesh)) as stream:
        for batch in itertools.islice(stream, steps):
            before = place(state, program)
            state, parts = run_step(program, state, batch)
            rounding = rounding_alone(program, before, batch, parts)
            # A copy, for the next step is given the state to write over.
            gradients = _copy([node.found for node in nodes_of(Compared, state)])
            run.append(Step(before, jax.device_get(batch), gradients, parts, rounding))
    return run


def rounding_alone(
    program: Program, state: TrainState, batch: PyTree, parts: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the distance that rounding may make in leaves of the gradient that are nothing else,
    for those that :func:`worst` would then call different.

    Args:
      program: of one device.
      state, batch: of the step.
      parts: the results of the step.
    """
    unit = float(jnp.finfo(program.experiment.policy.compute_dtype).eps)
    shift = functools.partial(perturbed, relative=unit, random=np.random.default_rng(0))
    state = place(state, program)
    state = dataclasses.replace(state, params=jax.tree.map(shift, state.params))
    _, shifted = run_step(program, state, batch)
    distances = {}
    for group, leaves in parts.get("gradients", {}).items():
        for name, leaf in leaves.items():
            change = np.float64(shifted["gradients"][group][name]) - np.float64(leaf)
            if not 0 < _norm(leaf) <= UNDETERMINED * _norm(change):
                continue
            if worst(leaves | {name: leaf + NOISE * change}, leaves)[0] > TOLERANCE:
                distances[name] = NOISE * _norm(change)
    return distances


def run_layout(program: Program, reference: Sequence[Step]) -> dict[str, tuple[float, str]]:
    """Repeats each step on a mesh; returns the largest error of each part, and its leaf."""
    groups = errors_by_group(program, reference)
    return {part: max(errors.values()) for part, errors in groups.items()}


def errors_by_group(
    program: Program, reference: Sequence[Step]
) -> dict[str, dict[str, tuple[float, str]]]:
    """Repeats each step on a mesh; returns the largest error of each group of leaves of each part,
    and its leaf."""
    errors: dict[str, dict[str, tuple[float, str]]] = {}
    for step in reference:
        state = place(_replaying(step), program)
        _, found = run_step(program, state, step.batch)
        for part, expected in step.parts.items():
            so_far = errors.setdefault(part, {})
            for group, leaves in expected.items():
                rounding = step.rounding if part == "gradients" else None
                error = worst(found[part][group], leaves, rounding)
                so_far[group] = max(so_far.get(group, error), error)
    return errors


def rounding_of(
    experiment: Experiment, reference: Callable[[int], list[Step]], number: int
) -> dict[str, float]:
    """The largest error of each part of the first step that the precision itself makes on one
    device with so many microbatches, against float32."""
    exact = dataclasses.replace(Policy.f32(), cast_batch=experiment.policy.cast_batch)
    (step,) = reference_of(experiment.with_(policy=exact), 1)(number)
    found = reference(number)[0].parts
    return {
        part: max(worst(found[part][group], leaves)[0] for group, leaves in expected.items())
        for part, expected in step.parts.items()
        if found[part].keys() == expected.keys()
    }


def difference_on(alone: Program, program: Program, reference: Sequence[Step]) -> Difference | None:
    """Finds where the first step that differs begins to; both optimizers replay gradients."""
    for step in reference:
        sides = []
        for side in (alone, program):
            state = place(_replaying(step), side)
            batch = jax.tree.map(jax.device_put, step.batch, side.train.batch_shardings)
            context = functools.partial(jax.set_mesh, side.shapes.step.sharding.mesh)
            sides.append((side.train.jaxpr, jax.tree.leaves((state, batch)), context))
        if found := difference_of(*sides, compiler_options=COMPILER_OPTIONS):
            return found
    return None


def _replaying(step: Step) -> TrainState:
    gradients = iter(step.gradients)
    return map_kind(Compared, lambda node: node._replace(given=next(gradients)), step.before)


def run_step(
    program: Program, state: TrainState, batch: PyTree
) -> tuple[TrainState, dict[str, dict[str, dict[str, np.ndarray]]]]:
    """Runs the evaluation and a step; returns the state, and what is compared.

    That is on the host: leaves by name, in groups, by part. First and second moments differ by
    orders of magnitude, so each is a group of its own.
    """
    means = program.evaluate(state)
    state, metrics = program.train(state, batch)
    stack = program.experiment.stack
    joined = lambda leaf: leaf.order.join(np.asarray(leaf.array))  # noqa: E731
    order = map_kind(StackedLeaf, joined, stack.in_order(state))
    stack = Stack(stack.key)
    gradients = [node.found for node in nodes_of(Compared, order)]
    order = map_kind(Compared, lambda node: None, order)
    parts = {
        "evaluation": {name: {name: np.asarray(mean)} for name, mean in means.items()},
        "loss": {"": {"loss": np.asarray(jax.device_get(metrics["loss"]))}},
    }
    trees = {
        "gradients": gradients[0] if len(gradients) == 1 else gradients,
        "parameters": order.params,
        "optimizer state": order.opt_state[1] if order.opt_state else (),
        "model state": order.model_state,
        "engine's memory": order.memory,
        "method's state": order.method,
    }
    shared = {"params": named_leaves(order.params), "stack": stack}
    parts |= {name: groups(tree, **shared) for name, tree in trees.items()}
    return state, {name: part for name, part in parts.items() if part}


def place(state: TrainState, like: Program) -> TrainState:
    """Copies a state to where a program wants it, its layers cut as they are there."""
    order = like.experiment.stack.in_order(like.shapes)

    def moved(wanted: Any, leaf: Any) -> Any:
        if isinstance(wanted, StackedLeaf) and leaf.shape != wanted.array.shape:
            return jax.device_put(wanted.order.split(np.asarray(leaf)), wanted.array.sharding)
        return jax.device_put(leaf, getattr(wanted, "array", wanted).sharding)

    # The step donates what it is given, and device_put shares buffers with its argument (even with
    # may_alias=False, where it copies to more devices).
    return _copy(jax.tree.map(moved, order, state, is_leaf=is_a(StackedLeaf)))


@jax.jit
def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


class Compared(NamedTuple):
    """State of what comes first in an optimizer: the gradient that was found, and one to replay."""

    by_rows = True  # of a table, it has a row for each row

    found: PyTree
    given: PyTree


def _compared(replays: bool) -> optax.GradientTransformation:
    """Keeps the latest gradient, and with ``replays`` passes on the one that it has been given. It
    has none where a method takes several steps and keeps no state of the optimizer."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)

    def update(grads: PyTree, state: Compared, params: PyTree = None) -> tuple[PyTree, Compared]:
        has = jnp.array([jnp.any(g != 0) for g in jax.tree.leaves(state.given)]).any()
        kept = jax.tree.map(functools.partial(jnp.where, has), state.given, grads)
        return kept if replays else grads, Compared(grads, state.given)

    return optax.GradientTransformation(lambda p: Compared(zeros(p), zeros(p)), update)


def worst(
    results: PyTree, expected: PyTree, rounding: Mapping[str, float] | None = None
) -> tuple[float, str]:
    """The largest error over the leaves of trees with the same paths, as defined at the top of this
    module (infinite where something is not a number), and the path of the leaf that has it. A
    distance of up to a leaf's ``rounding`` is no error.

    >>> worst({"a": np.array([3, 5]), "b": np.ones(2)}, {"a": np.array([3, 4]), "b": np.ones(2)})
    (0.2, 'a')
    >>> worst({"best": np.array(np.inf)}, {"best": np.array(np.inf)})
    (0.0, 'best')
    """
    results, expected = named_leaves(results), named_leaves(expected)
    # An infinity that both have, as the best loss before the first, is no difference and no size.
    shared = {n: np.isinf(b) & (np.asarray(results[n]) == b) for n, b in expected.items()}
    results = {n: np.where(shared[n], 0, results[n]) for n in expected}
    expected = {n: np.where(shared[n], 0, b) for n, b in expected.items()}
    total = math.sqrt(sum(float(np.square(np.float64(x)).sum()) for x in expected.values()))
    count = sum(x.size for x in expected.values())
    errors = []
    for name, b in expected.items():
        floor = 0.01 * total * math.sqrt(b.size / count)
        norm = max(_norm(b), floor)
        distance = _norm(np.float64(results[name]) - np.float64(b))
        distance = 0.0 if rounding and distance <= rounding.get(name, 0.0) else distance
        error = distance / norm if norm else distance
        errors.append((math.inf if math.isnan(error) else error, name))
    return max(errors)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(np.float64(x)))


def groups(
    tree: PyTree, *, params: Mapping[str, Any], stack: Stack
) -> dict[str, dict[str, np.ndarray]]:
    """The leaves of a tree by what their path has in front of a parameter's path.

    A stacked parameter, and what an optimizer keeps of it, is one leaf per layer, unless what lies
    under the stack's key is no stack (:meth:`jaxtrain.Stack.fits`). ``params`` are the parameters
    by path.
    """
    result: dict[str, dict[str, np.ndarray]] = {}
    fits = stack.fits(params)
    for name, leaf in named_leaves(tree).items():
        value = np.asarray(jax.device_get(key_data(leaf)))
        owner = owner_of(name, params)
        # What follows no parameter (a counter) is a group by itself.
        group = result.setdefault(name if owner is None else name.removesuffix(owner), {})
        layers = params[owner].shape[: stack.lead] if fits and stack.holds(owner) else ()
        if layers and value.shape[: len(layers)] == layers:
            each = value.reshape(-1, *value.shape[len(layers) :])
            group |= {f"{name}, layer {i}": layer for i, layer in enumerate(each)}
        else:
            group[name] = value
    return result


def usual_layouts(experiment: Experiment) -> tuple[str, ...]:
    """:data:`LAYOUTS`, and before them the experiment's own where it is another."""
    own = experiment.layout
    if own.mesh.devices == -1:
        own = dataclasses.replace(own, mesh=own.mesh.filled(DEVICES))
    text = own.text(experiment.layout)
    return LAYOUTS if own.mesh.devices == 1 or text in LAYOUTS else (text, *LAYOUTS)


def report(
    comparisons: Iterable[Comparison], *, tolerance: float, console: Console | None = None
) -> bool:
    """Prints a table of comparisons and says whether all of them agree."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layout", max_width=len("data=2,tensor=2,pipe=2,dcn_pipe=2"))
    table.add_column("part", no_wrap=True)
    table.add_column("worst error", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("in", overflow="fold")
    comparisons, notes = list(comparisons), []
    for comparison in comparisons:
        title = str(comparison.layout)
        for part, (error, leaf) in comparison.worst.items():
            verdict = "ok" if error <= tolerance else "[bold red]NOT[/bold red]"
            if part == "gradients" and comparison.rounding:
                count = len(comparison.rounding)
                leaves = f"{count} leaves" if count > 1 else comparison.rounding[0]
                leaf += f" (zero but for rounding: {leaves})"
            table.add_row(title, part, f"{error:.1e}", verdict, leaf)
            title = ""
        if comparison.difference is not None:
            notes.append(f"on {comparison.layout} the step {comparison.difference}")
        if comparison.refusal is not None:
            table.add_row(title, "", "", "", f"does not fit: {comparison.refusal}")
    console = console or Console()
    console.print(table, highlight=False)
    compared = [c for c in comparisons if c.refusal is None]
    off = [c for c in compared if not c.agrees(tolerance)]
    if not compared:
        reasons = "; ".join(f"{c.layout}: {c.refusal}" for c in comparisons)
        raise ValueError(f"no mesh fits, so nothing was compared: choose other layouts ({reasons})")
    if any(c.replays for c in compared):
        notes.append(REPLAYED)
    if rounding := sorted({name for c in compared for name in c.rounding}):
        notes.append(f"{ROUNDING_ALONE} {'; '.join(rounding)}")
    for line in notes:
        console.print(f"\n{line}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(
        f"{len(compared) - len(off)} of {len(compared)} meshes agree with one device to "
        f"{tolerance:g}",
        highlight=False,
    )
    return not off
