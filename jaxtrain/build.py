"""Builds what an experiment describes: its mesh, its state, its train step and its evaluation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.decisions import Gathered, Kind, Reason, Why
from jaxtrain.engines.exact import by_grains, evaluated_in_grains, on_pieces
from jaxtrain.engines.pipeline import pipeline, pipeline_eval_step
from jaxtrain.engines.plain import plain, trainable
from jaxtrain.engines.reduction import kept_by_gathering, why_not
from jaxtrain.experiment import Experiment, Repeated
from jaxtrain.host.chips import chip_of
from jaxtrain.loss import WeightedLoss
from jaxtrain.methods.method import Method, Step
from jaxtrain.ops.scaled import uncounted
from jaxtrain.optim import averaged, frozen
from jaxtrain.sharding.mesh import BATCH_AXES, GATHERED_AXES, make_mesh
from jaxtrain.sharding.offload import on_devices
from jaxtrain.sharding.placement import Gather, constrain_tree, report_finding
from jaxtrain.sharding.row_keys import draws_otherwise, row_count
from jaxtrain.sharding.rules import batch_sharding, batch_shardings
from jaxtrain.stages import loss_from_stages
from jaxtrain.state import (
    TrainState,
    abstract_state,
    gradient_shardings,
    host_bytes,
    init_state,
    local_bytes,
    shapes_on,
    train_state_shardings,
)
from jaxtrain.step import (
    build_eval_step,
    build_train_step,
    build_update,
    check_exact,
    scan_steps,
)
from jaxtrain.tree import PyTree, name_of


def make_experiment_mesh(experiment: Experiment, devices: Any = None) -> Mesh:
    """Makes the experiment's mesh over ``devices`` (all by default)."""
    return make_mesh(**experiment.layout.mesh.sizes, devices=devices)


def all_on_devices(experiment: Experiment) -> Experiment:
    """Returns the experiment with no state in the memory of the host."""
    layout = experiment.layout
    return experiment.with_(layout=layout.with_(dict.fromkeys(layout.offloads, False)))


def make_abstract_state(experiment: Experiment, mesh: Mesh) -> TrainState:
    """Returns the state's shapes, dtypes and shardings."""
    laid, options = experiment.laid, _state_options(experiment, mesh)
    state = abstract_state(laid.init_fn, laid.optimizer, **options)
    if (start := experiment.method.start) is None:
        return state
    shapes = jax.eval_shape(start, state)
    return shapes_on(shapes, train_state_shardings(shapes, mesh, **_placing(experiment)))


def make_state(experiment: Experiment, mesh: Mesh) -> TrainState:
    """Creates the initial state on the mesh."""
    laid, options = experiment.laid, _state_options(experiment, mesh)
    rng, params = jax.random.key(experiment.seed), laid.params and laid.params()
    options["whole"] = experiment.layout.exact > 0
    state = init_state(laid.init_fn, laid.optimizer, rng, params=params, **options)
    if (start := experiment.method.start) is None:
        return state
    places = jax.tree.map(lambda x: x.sharding, make_abstract_state(experiment, mesh))
    return jax.jit(start, out_shardings=places)(state)


def depends_on_microbatches(experiment: Experiment, state: TrainState) -> bool:
    """Whether another number of microbatches changes more than rounding.

    So it is where the loss is a scalar, whose mean is one of means, where it has model state, which
    each of them changes, and where it draws numbers and not row by row; and where a method makes
    several updates of a step, of other batches than the data's.
    """
    if experiment.task.has_model_state or experiment.method.updates > 1:
        return True
    params = jax.eval_shape(experiment.policy.cast_to_compute, state.params)
    given = params, jax.eval_shape(experiment.policy.cast_inputs, experiment.data.batch)
    trace = jax.make_jaxpr(experiment.laid.loss_fn, return_shape=True)
    traced, loss = trace(*given, jax.random.key(0))
    return not isinstance(loss, WeightedLoss) or draws_otherwise(traced.jaxpr, row_count(given[1]))


def on_hosts(
    experiment: Experiment, state: TrainState, mesh: Mesh, hosts: int, most: int
) -> Experiment:
    """Returns the experiment on ``hosts`` of ``most`` hosts, whose devices hold as many rows of a
    microbatch as on all of them: the global batch comes in more microbatches.

    Where the number of microbatches changes more than rounding, it stays, and devices hold more.

    Raises:
      ValueError: the mesh is one of a fixed number of devices or hosts.
    """
    layout, pipe = experiment.layout, mesh.shape["pipe"]
    if layout.mesh.devices != -1 or layout.mesh.islands > 1:
        sizes = {name: size for name, size in layout.mesh.sizes.items() if size != 1}
        raise ValueError(
            f"`mesh` is {sizes} and hosts come and go: let one axis take what there is, such as "
            "`mesh.data` -1, and leave the dcn axes out"
        )
    of_grains = layout.exact and pipe > 1  # whose microbatches are parts of a grain
    if hosts == most or of_grains or depends_on_microbatches(experiment, state):
        return experiment
    rows = row_count(experiment.data.batch)
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    least = math.ceil(layout.microbatches(pipe) * most / hosts)
    fitting = (count for count in range(least, rows + 1) if rows % (count * parts) == 0)
    name = "pipeline.microbatches" if pipe > 1 else "accumulate"
    count = next(fitting, layout.microbatches(pipe))
    return experiment.with_(layout=layout.with_({name: count}))


def to_checkpoint(experiment: Experiment, state: TrainState) -> TrainState:
    """Returns the state as checkpoints hold it: layers in natural order, on any mesh."""
    return experiment.stack.in_order(state)


def natural(experiment: Experiment, state: TrainState) -> TrainState:
    """Returns the state with the parameters of the plain model (``Task.back``), in natural order
    and on the devices.

    All processes call it, where layers are cut for a pipeline, or parameters are merged or lie in
    the memory of the host.
    """
    stack, stages, back = experiment.stack, experiment.task.stages, experiment.task.back
    cut = stages is not None and stack != stages.stacked
    hosted = host_bytes(state.params) > 0
    if not cut and back is None and not experiment.policy.count_rounding and not hosted:
        return state

    def plain_model(params: PyTree) -> PyTree:
        params = uncounted(on_devices(params))
        params = stack.natural(params) if cut else params
        return params if back is None else back(params)

    return dataclasses.replace(state, params=jax.jit(plain_model)(state.params))


def restore_state(
    experiment: Experiment,
    abstract: TrainState,
    restore: Callable[..., PyTree],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> TrainState:
    """Reads a state that has been saved as :func:`to_checkpoint` returns it.

    What was left out of the checkpoint is made as the run has begun with it. ``restore`` reads into
    the shapes and shardings of :func:`make_abstract_state` (``Checkpointer.restore``), and
    ``shapes`` are those of the checkpoint, where a method may have to regroup it.
    """
    mesh, change = abstract.step.sharding.mesh, None
    places = jax.tree.map(lambda x: x.sharding, abstract)
    if shapes is not None and (found := experiment.method.regroup(abstract, shapes)):
        abstract, change = found
    state = restore(
        to_checkpoint(experiment, abstract),
        base=lambda: to_checkpoint(experiment, make_state(experiment, mesh)),
    )
    return state if change is None else jax.jit(change, out_shardings=places)(state)


def restore_evaluated(
    experiment: Experiment, abstract: TrainState, reader: Any, step: int
) -> TrainState:
    """Reads what an evaluation takes of a checkpoint and no more: parameters (averages where the
    optimizer keeps any) and model state. Arguments are as for :func:`restore_state`, and a
    :class:`jaxtrain.run.checkpoints.reader.Reader`."""
    wanted, mesh = to_checkpoint(experiment, abstract), abstract.step.sharding.mesh
    base = lambda: to_checkpoint(experiment, make_state(experiment, mesh)).params  # noqa: E731
    params = reader.restore_params(wanted.params, step, base=base)
    kept = {name: getattr(wanted, name) for name in ("model_state", "method")}
    if experiment.method.regroup(abstract, reader.shapes(step)):
        kept["method"] = None  # of other replicas, whose mean the parameters are
    there = {name: part for name, part in kept.items() if part is not None}
    kept |= reader.restore_part(there, step) if there else {}
    return TrainState(None, params, (), kept["model_state"], None, None, None, None, kept["method"])


def compile_train(
    experiment: Experiment,
    state: TrainState,
    mesh: Mesh,
    *,
    steps: int | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compiles the train step for a state on the mesh (shapes with shardings suffice); with
    ``steps``, a call of so many, which takes a list of batches."""
    step, batch = build_step(experiment, state, mesh), experiment.data.batch
    if steps is not None:
        step, batch = scan_steps(step), [batch] * steps
    how = {"mesh": mesh, "compiler_options": compiler_options} | experiment.compiled_with
    return compile_step(step, state, batch, **how)


def build_step(experiment: Experiment, state: TrainState, mesh: Mesh) -> Step:
    """Builds the train step: pipelined where the mesh has an axis ``pipe`` above 1.

    Raises:
      ValueError: for a pipeline of an experiment without stages, with model state or an engine of
        its own, or with ``accumulate`` (a pipeline's microbatches are that).
    """
    if experiment.layout.exact and experiment.method != Method():
        raise ValueError(
            f"`exact` is {experiment.layout.exact} and experiment {experiment.name!r} has a method "
            f"around its steps, {name_of(experiment.method.step)!r}, whose sums the mesh decides: "
            "leave one of them out"
        )
    shardings = gradient_shardings(state, zero=experiment.layout.zero)
    chosen = choose_gather(experiment, state, mesh, shardings)
    plain_step = _step_that_gathers(experiment, mesh, chosen.gather, shardings)

    @functools.wraps(plain_step)
    def reported(state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        if chosen.reason is not None:
            report_finding(Kind.GATHER, chosen)
        if experiment.method != Method():
            report_finding(Kind.METHOD, name_of(experiment.method.step))
        return plain_step(state, batch)

    step = experiment.method.step(reported)
    if not callable(step):
        raise ValueError(
            f"the method's step returned {step!r}: return a step (state, batch) -> ..."
        )
    return step


def choose_gather(
    experiment: Experiment, state: TrainState, mesh: Mesh, shardings: PyTree
) -> Gathered:
    """Decides when a train step gathers its weights.

    Unless the experiment says so, it is once per step where several microbatches share them, the
    model could do it layer by layer as well, and the state with all that is then kept takes at most
    half of a device's memory, by its kind. The other half is for activations. Of the state, shapes
    with shardings suffice; ``shardings`` are those of its gradients (:func:`gradient_shardings`).

    Raises:
      ValueError: the layout asks for what the loss or the model cannot.
    """
    if experiment.task.engine.by_row:  # which takes whole weights in any case
        return Gathered("step")
    if experiment.layout.exact:  # which gathers them once for all grains
        return Gathered(experiment.task.gather)
    pipe = 1 if experiment.task.stages is None else mesh.shape.get("pipe", 1)
    obstacle = why_not_once(experiment, piped=pipe > 1)
    own, asked = experiment.task.gather, experiment.layout.gather
    if asked == "layer" and own != "model":
        raise ValueError(
            f"`gather` is 'layer' and the model of experiment {experiment.name!r} does not gather "
            "its weights layer by layer (gathers_layers): leave it out"
        )
    if asked == "step" and obstacle is not None:
        raise ValueError(
            f"weights cannot be gathered once per step in experiment {experiment.name!r}, "
            f"{obstacle}: leave `gather` out"
        )
    if asked is not None:
        return Gathered("step" if asked == "step" else own, Why.ASKED())
    more = 0
    if own == "model" and isinstance(mesh, Mesh):
        more = kept_by_gathering(state.params, shardings, experiment.policy.compute_dtype)
    if more == 0:
        return Gathered(own)
    if obstacle is not None:
        return Gathered("model", obstacle)
    if experiment.layout.microbatches(pipe) == 1:
        return Gathered("model", Why.ONE_MICROBATCH())
    kind = mesh.devices.flat[0].device_kind
    memory = (chip := chip_of(kind)) and chip.memory_bytes
    if memory is None:
        return Gathered("model", Why.UNKNOWN_MEMORY(kind=kind))
    sizes = {"kept_bytes": local_bytes(state) + more, "memory_bytes": memory}
    if 2 * sizes["kept_bytes"] <= memory:
        return Gathered("step", Why.ROOM(**sizes))
    return Gathered("model", Why.NO_ROOM(**sizes))


def why_not_once(experiment: Experiment, *, piped: bool = False) -> Reason | None:
    """Why gradients cannot be reduced, and weights gathered, once per step, in a pipeline of the
    stages (``piped``, if there are any) or outside; None where they can."""
    if experiment.layout.offload_parameters:  # no device has all weights before the update
        return Why.OFFLOADED()
    stages = experiment.laid.stages if piped else None
    return why_not(
        experiment.laid.loss_fn if stages is None else loss_from_stages(stages),
        has_model_state=experiment.task.has_model_state,
        engine=experiment.task.engine,
    )


def _step_that_gathers(
    experiment: Experiment, mesh: Mesh, gather: Gather | None, shardings: PyTree
) -> Step:
    layout, laid = experiment.layout, experiment.laid
    if mesh.shape.get("pipe", 1) == 1:
        return build_train_step(
            laid.loss_fn,
            laid.optimizer,
            policy=experiment.policy,
            accumulate=layout.accumulate,
            has_model_state=laid.has_model_state,
            gradient_shardings=shardings,
            gather=gather,
            engine=laid.engine,
            norms=True,
            exact=layout.exact,
        )
    if laid.engine is not plain:
        raise ValueError(
            f"mesh axis 'pipe' has size {mesh.shape['pipe']} and experiment {experiment.name!r} "
            "has an engine of its own, which takes the gradients of a whole loss, where a pipeline "
            "takes them stage by stage: use a mesh without 'pipe'"
        )
    if laid.stages is None or laid.has_model_state:
        raise ValueError(
            f"mesh axis 'pipe' has size {mesh.shape['pipe']} and experiment {experiment.name!r} "
            "cannot be pipelined: it needs stages and no model state"
        )
    if layout.accumulate != 1:
        raise ValueError(
            f"`accumulate` is {layout.accumulate} in a pipeline: its microbatches accumulate "
            "already; raise those, or accumulate in the optimizer chain"
        )
    engine = pipeline(
        laid.stages,
        mesh=mesh,
        policy=experiment.policy,
        gradient_shardings=shardings,
        gather=gather,
        remat=layout.pipeline.remat,
        **_of_pipeline(experiment),
    )
    own = {"policy": experiment.policy, "norms": True, "constrain": constrain_tree(shardings)}
    if layout.exact:
        whole = loss_from_stages(laid.stages)
        check_exact(layout.exact, whole, experiment.policy)
        rows, count = row_count(experiment.data.batch), layout.pipeline.microbatches
        if rows % (layout.exact * count):
            raise ValueError(
                f"`exact` is {layout.exact} and `pipeline.microbatches` {count}, into which each "
                f"grain is cut, and a batch has {rows} rows: use fewer of either, or a global "
                f"batch that is a multiple of {layout.exact * count}"
            )
        given = {"cast": experiment.policy.cast_to_compute, "draws": whole}
        engine, own["within"] = by_grains(engine, layout.exact, **given), on_pieces
    return build_update(engine, laid.optimizer, **own)


def call_end(done: int, steps: int, steps_per_call: int) -> int:
    """Returns the last step of the call that follows ``done`` steps of ``steps``.

    Calls end at multiples of ``steps_per_call``, wherever a run begins, so a resumed run makes the
    calls that an uninterrupted one would have made. One that begins or ends between two multiples
    makes a shorter call there, which is a program of its own.

    >>> [call_end(done, 20, 8) for done in (0, 5, 8, 16)]
    [8, 8, 16, 20]
    """
    return min(steps, (done // steps_per_call + 1) * steps_per_call)


def call_lengths(start: int, steps: int, steps_per_call: int) -> list[int]:
    """Returns how many steps the calls of a run have: each length once, the longest first.

    >>> call_lengths(0, 16, 8), call_lengths(5, 20, 8), call_lengths(20, 20, 8)
    ([8], [8, 4, 3], [])
    """
    first = call_end(start, steps, steps_per_call)
    last = steps - steps % steps_per_call
    begins = {start, first, last}
    lengths = {call_end(done, steps, steps_per_call) - done for done in begins if done >= start}
    return sorted((length for length in lengths if length > 0), reverse=True)


def compile_loop(
    experiment: Experiment, state: TrainState, mesh: Mesh, start: int, steps: int
) -> tuple[Callable[..., Any], Mapping[int, CompiledStep]]:
    """Compiles what :func:`jaxtrain.train_loop` calls on the way from ``start`` to ``steps``.

    Returns:
      The function, for one batch where ``steps_per_call`` is 1 and else for a list of them; and its
      programs by the number of their steps, the longest first.
    """
    steps_per_call = experiment.layout.steps_per_call
    if steps_per_call == 1:
        train = compile_train(experiment, state, mesh)
        return train, {1: train}
    lengths = call_lengths(start, steps, steps_per_call) or [steps_per_call]
    programs = {n: compile_train(experiment, state, mesh, steps=n) for n in lengths}
    return lambda state, batches: programs[len(batches)](state, batches), programs


def stream_shardings(experiment: Experiment, mesh: Mesh) -> Any:
    """Where batches, of training or held out, are to be placed: by rows, or, where more than rows
    is split, each leaf as the step has it, so that a process reads no more than its part."""
    batch, rows = experiment.data.batch, batch_sharding(mesh)
    shardings = batch_shardings(batch, mesh, experiment.laid.rules)
    return rows if set(jax.tree.leaves(shardings)) <= {rows} else shardings


def build_evaluation(
    experiment: Experiment, batch: PyTree, mesh: Mesh
) -> Callable[[TrainState, PyTree], WeightedLoss]:
    """Builds the evaluation ``(state, batch) -> WeightedLoss`` of batches like ``batch``.

    It is pipelined where the train step is, unless the experiment has an ``eval_loss_fn``: in as
    many microbatches as the batch's rows allow, up to the train step's.
    """
    laid, around = experiment.laid, experiment.method.evaluation
    given = {"policy": experiment.policy, "gather": laid.gather}
    if mesh.shape.get("pipe", 1) > 1 and laid.stages and laid.eval_loss_fn is None:
        options = _of_pipeline(experiment)
        rows = row_count(batch) or 1
        exact, split = experiment.layout.exact, BATCH_AXES
        if exact:  # A grain's rows are split by what does not split grains.
            rows, split = rows // math.gcd(rows, exact), set(BATCH_AXES) - set(GATHERED_AXES)
        shared = max(1, rows // math.prod(mesh.shape.get(axis, 1) for axis in split))
        options["microbatches"] = math.gcd(shared, options["microbatches"])
        evaluate = pipeline_eval_step(laid.stages, mesh=mesh, **options, **given)
        return around(evaluated_in_grains(evaluate, exact) if exact else evaluate)
    given |= {"has_model_state": laid.has_model_state, "exact": experiment.layout.exact}
    return around(build_eval_step(laid.eval_loss_fn or laid.loss_fn, **given))


def compile_eval(
    experiment: Experiment,
    state: TrainState,
    batch: PyTree,
    mesh: Mesh,
    *,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compiles the evaluation for batches like ``batch``; it returns a ``WeightedLoss``.

    It is :func:`build_evaluation`, of the averages of parameters where the optimizer keeps any
    (:func:`jaxtrain.averaged`).
    """
    step = build_evaluation(experiment, batch, mesh)

    def evaluation(state: TrainState, batch: PyTree) -> WeightedLoss:
        return step(averaged(state), batch)

    how = {"mesh": mesh, "compiler_options": compiler_options} | experiment.compiled_with
    return compile_step(evaluation, state, batch, donate=False, **how)


def rows_of(batch: PyTree | Repeated) -> PyTree:
    """The rows of a held-out batch."""
    return batch.batch if isinstance(batch, Repeated) else batch


def evaluate(
    step: CompiledStep, state: TrainState, batches: Iterable[PyTree | Repeated]
) -> dict[str, jax.Array]:
    """Runs the evaluation over all batches and returns means weighted over all of them."""
    total: WeightedLoss | None = None
    for batch in batches:
        part = step(state, rows_of(batch))
        if isinstance(batch, Repeated):
            part = part.times(batch.share)
        # Never far ahead of the devices: who is asked to stop has little to wait for.
        jax.block_until_ready(total)
        total = part if total is None else total + part
    if total is None:
        raise ValueError("there is no held-out batch to evaluate on: turn the evaluation off")
    return jax.device_get(total).means()


def _of_pipeline(experiment: Experiment) -> dict[str, Any]:
    chosen = experiment.layout.pipeline
    sizes = {"microbatches": chosen.microbatches, "virtual": experiment.stack.virtual}
    return {"schedule": chosen.schedule} | sizes


def _placing(experiment: Experiment) -> dict[str, Any]:
    layout, rules = experiment.layout, experiment.laid.rules
    names = ("zero", "offload_optimizer", "offload_parameters")
    return {"rules": rules} | {name: getattr(layout, name) for name in names}


def _state_options(experiment: Experiment, mesh: Mesh) -> dict[str, Any]:
    return _placing(experiment) | {
        "mesh": mesh,
        "policy": experiment.policy,
        "has_model_state": experiment.task.has_model_state,
        "memory": _memory_of(experiment),
    }


def _memory_of(experiment: Experiment) -> Callable[[PyTree], PyTree] | None:
    """Makes the engine's memory of the parameters that train."""
    optimizer, init = experiment.laid.optimizer, experiment.task.engine.init

    def memory(params: PyTree) -> PyTree:
        return init(trainable(params, frozen(jax.eval_shape(optimizer.init, params)))[0])

    return memory if init is not None else None
