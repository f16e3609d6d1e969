"""Defines :class:`Experiment`: the data and pure functions that `fit`, `plan` and `parity` take.

An experiment module has ``build(config) -> Experiment``. Because everything takes this one object,
what was planned is what is trained.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import optax
from jax.sharding import Mesh

from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.engines.pipeline import pipeline, pipeline_eval_step
from jaxtrain.engines.pipeline.balance import stack_for
from jaxtrain.engines.plain import GradientEngine, plain
from jaxtrain.engines.reduction import kept_by_gathering, why_not
from jaxtrain.host.chips import chip_of
from jaxtrain.host.memory import human_bytes
from jaxtrain.layout import Layout
from jaxtrain.loss import LossFn, WeightedLoss
from jaxtrain.ops.attention import preferred
from jaxtrain.ops.remat import rematerialise
from jaxtrain.optim import averaged
from jaxtrain.precision import Policy, as_policy
from jaxtrain.sharding.mesh import BATCH_AXES, make_mesh
from jaxtrain.sharding.placement import Gather, constrain_tree, tell
from jaxtrain.sharding.row_keys import draws_otherwise
from jaxtrain.sharding.rules import Rules, as_rules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages, loss_from_stages
from jaxtrain.state import TrainState, abstract_state, gradient_shardings, init_state, local_bytes
from jaxtrain.step import build_eval_step, build_train_step, build_update, scan_steps
from jaxtrain.tree import PyTree


class BatchStream(Protocol):
    """A source of training batches; each batch is a function of its step and of nothing else."""

    def __call__(
        self, start_step: int, sharding: jax.sharding.NamedSharding
    ) -> AbstractContextManager[Iterator[PyTree]]:
        """Opens the endless stream of global batches from ``start_step`` on, placed on devices."""
        ...


class Repeated(NamedTuple):
    """A held-out batch in which every row is equally often, to be as large as the others.

    Args:
      batch: the rows.
      share: how many rows it stands for, as a share of those that it has.
    """

    batch: PyTree
    share: float


Step = Callable[[TrainState, PyTree], tuple[TrainState, Any]]
EvalBatches = Callable[[jax.sharding.NamedSharding], Iterable[PyTree | Repeated]]


def no_batches(start_step: int, sharding: jax.sharding.NamedSharding):
    """The batches of an experiment that was built without its data.

    Raises:
      ValueError: always.
    """
    raise ValueError("this experiment was built without its data: build(config) has it")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a training run is made of.

    Args:
      name: names the run's folder.
      init_fn: ``rng -> params`` (with ``has_model_state``: ``-> (params, model_state)``), layers in
        natural order.
      loss_fn: as for :func:`jaxtrain.build_train_step`; None for that of ``stages``.
      optimizer: an optax transformation, or a function of a :class:`jaxtrain.Stack` that makes one.
      batch: the shapes and dtypes of one global batch.
      train_batches: opens the stream of training batches.
      steps: train steps in all.
      eval_batches: ``sharding -> batches``, one pass over the held-out ones, placed on devices, of
        which some may be :class:`Repeated`; or several passes by name, whose metrics are
        ``NAME/loss``; None for no evaluation.
      eval_loss_fn: the loss of the evaluation, called with ``rng=None`` and never pipelined; by
        default ``loss_fn``, or ``stages`` where the train step is pipelined.
      params: returns weights to begin with, in natural order, such as a file's, which
        :func:`jaxtrain.init_state` is given as its ``params``; called where a run begins, and where
        it continues from checkpoints without the frozen ones (``RunOptions.save_frozen``).
      layout: how the step is laid out and scheduled. It cuts the layers of ``stages`` for a
        pipeline, sets what they keep, and changes no mathematics.
      rules: sharding rules.
      gather: as for :func:`jaxtrain.build_train_step`; ``"model"`` says that the model can gather
        its weights layer by layer, and ``layout.gather`` whether it does.
      policy: dtypes; a policy's name will do.
      stages: the model as :class:`jaxtrain.Stages`; a mesh axis ``pipe`` above 1 needs it. The
        layout cuts layers in natural order; those that are cut already stay as they are.
      engine: makes the gradient engine of a loss, as for :func:`jaxtrain.build_train_step`: what
        happens to gradients before they are summed, such as clipping those of every example. No
        mesh axis ``pipe`` goes with it.
      transform: ``step -> step``, applied to the train step before it is compiled; evaluation is
        not part of it.
      has_model_state: which form the losses and ``init_fn`` have.
      seed: of parameters and of the randomness of steps.
      items_per_step: how many tokens (or images) one global batch holds.
      item: what those are called.
      steps_per_epoch: how many steps a pass over the training rows takes, perhaps a fraction; then
        the logs and the line of progress have the epoch. None where unknown.
      flops_per_step: of one step over all devices, by ``flops_formula``; None where unknown.
      flops_formula: its name.
      config: the configuration, as JSON-able data, stored with every checkpoint.
      files: text files to keep in the run's folder (name to text), such as a tokenizer.
      fingerprints: of what the flags do not tell, such as the text behind a path (name to text):
        equal only where it is the same. A run is resumed with equal ones.
      may_change: which entries of ``config["flags"]`` and which fingerprints a resumed run may have
        otherwise: their dotted names, or patterns of them (``mesh.*``), to what that means for the
        steps to come. All others are refused unless ``RunOptions.accept_changes`` names them.
      facts: more lines for the header (name to text).
      counts: ``step -> numbers`` that are logged with the metrics of a step, such as the epochs of
        each source of its data.
      derived: ``means -> numbers`` that follow from the means of a step or an evaluation set, such
        as a perplexity; they are logged, and ``best_metric`` may be one.
      show: ``(state, evaluation means) -> texts and pictures``, by name, which TensorBoard shows of
        each evaluation where the optimizer makes histograms (``make_optimizer(watch_bins=)``). The
        state is as for ``conclude``; pictures are uint8 [height, width, 3].
      conclude: ``(state, evaluation means) -> lines`` printed when training is over; the state has
        what is evaluated in ``params`` (:func:`jaxtrain.averaged`). Of a run that was stopped early
        while it kept its best checkpoint, they are that one's, without optimizer state and metrics
        of several numbers.
      best_metric: the evaluation metric that decides which checkpoint is best; ``NAME/loss`` with
        ``eval_batches`` by name.
      best_mode: ``"min"`` or ``"max"``.
    """

    name: str
    init_fn: Callable[[jax.Array], PyTree]
    loss_fn: Callable[..., Any] | None
    optimizer: optax.GradientTransformation | Callable[[Stack], optax.GradientTransformation]
    batch: PyTree
    train_batches: BatchStream
    steps: int
    eval_batches: EvalBatches | Mapping[str, EvalBatches] | None = None
    eval_loss_fn: Callable[..., Any] | None = None
    params: Callable[[], PyTree] | None = None
    layout: Layout = dataclasses.field(default_factory=Layout)
    rules: Rules = dataclasses.field(default_factory=Rules)
    gather: Gather | None = None
    policy: Policy = dataclasses.field(default_factory=Policy)
    stages: Stages | None = None
    engine: Callable[[LossFn], GradientEngine] = plain
    transform: Callable[[Step], Step] = lambda step: step
    has_model_state: bool = False
    seed: int = 0
    items_per_step: int = 0
    item: str = "tokens"
    steps_per_epoch: float | None = None
    flops_per_step: float | None = None
    flops_formula: str = ""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    may_change: Mapping[str, str] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counts: Callable[[int], Mapping[str, float]] | None = None
    derived: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda means: {}
    show: Callable[[TrainState, Mapping[str, Any]], Mapping[str, Any]] | None = None
    conclude: Callable[[TrainState, Mapping[str, float]], list[str]] | None = None
    best_metric: str = "loss"
    best_mode: str = "min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", as_policy(self.policy))
        object.__setattr__(self, "rules", as_rules(self.rules))
        sets = self.eval_sets
        if sets and not self.best_metric.startswith(tuple(sets)):
            raise ValueError(
                f"best_metric is {self.best_metric!r} and eval_batches has sets by name: say of "
                f"which, as in {next(iter(sets))}loss"
            )
        self.laid  # noqa: B018  what a layout cannot be is refused here

    @property
    def compiled_with(self) -> dict[str, Any]:
        """The arguments of :func:`jaxtrain.compile_step` that are the experiment's."""
        names = ("hide_communication", "deterministic")
        return {"rules": self.laid.rules} | {name: getattr(self.layout, name) for name in names}

    @property
    def eval_sets(self) -> dict[str, EvalBatches]:
        """The evaluation sets, by what the names of their metrics begin with."""
        if isinstance(self.eval_batches, Mapping):
            return {f"{name}/": batches for name, batches in self.eval_batches.items()}
        return {} if self.eval_batches is None else {"": self.eval_batches}

    @property
    def deciding_eval_batches(self) -> EvalBatches | None:
        """The evaluation set that ``best_metric`` refers to, or None."""
        sets = self.eval_sets.items()
        return next((x for name, x in sets if self.best_metric.startswith(name)), None)

    @functools.cached_property
    def laid(self) -> "Laid":
        """The model and the optimizer as the layout has them."""
        return lay_out(self)

    @property
    def stack(self) -> Stack:
        """The stack of the parameters by layer, cut for the layout."""
        return self.laid.stack


class Laid(NamedTuple):
    """A model and its optimizer, cut and wrapped for a layout; fields as in :class:`Experiment`.

    Args:
      stack: how the layers of parameters are cut.
      init_fn, params, loss_fn, eval_loss_fn, stages, rules, optimizer: of parameters that are cut.
    """

    stack: Stack
    init_fn: Callable[[jax.Array], PyTree]
    params: Callable[[], PyTree] | None
    loss_fn: Callable[..., Any]
    eval_loss_fn: Callable[..., Any] | None
    stages: Stages | None
    rules: Rules
    optimizer: optax.GradientTransformation


def lay_out(experiment: Experiment) -> Laid:
    """Cuts the stacks of an experiment for its layout, and sets what its layers keep and compute.

    Raises:
      ValueError: the layout has what this model cannot.
    """
    layout, given, rules = experiment.layout, experiment.stages, experiment.rules
    if given is None or experiment.loss_fn is not None:
        for name in ("remat", "scan_unroll"):
            if (value := getattr(layout, name)) is not None:
                raise ValueError(
                    f"{name} is {value!r} and the loss of experiment {experiment.name!r} is not "
                    "made of stages, whose layers that is for: leave it out"
                )
    if not layout.sequence_parallel:
        rules = dataclasses.replace(rules, axes=dict(rules.axes) | {"residual": "context"})
    wrap, stages, stack = functools.partial(_attending, layout.attention), None, rules.stacked
    init_fn, params = experiment.init_fn, experiment.params
    loss_fn, eval_loss_fn = experiment.loss_fn, experiment.eval_loss_fn
    if given is not None:
        stack = _cut_for(experiment)
        stages = dataclasses.replace(
            given,
            embed=wrap(given.embed),
            block=wrap(given.block) if callable(given.block) else tuple(map(wrap, given.block)),
            between=tuple(map(wrap, given.between)),
            head_loss=wrap(given.head_loss),
            stacked=stack,
        )
        if layout.scan_unroll is not None:
            stages = dataclasses.replace(stages, scan_unroll=layout.scan_unroll)
        if layout.remat is not None:
            kept = functools.partial(rematerialise, layout.remat)
            stages = dataclasses.replace(stages, remat=None if layout.remat == "none" else kept)
        loss_fn = loss_fn or loss_from_stages(stages)
    if given is not None and stack != given.stacked:
        init_fn = lambda rng: stack.cut(experiment.init_fn(rng))  # noqa: E731
        params = experiment.params and (lambda: stack.cut(experiment.params()))
        if experiment.loss_fn is not None:
            loss_fn = _of_natural(stack, experiment.loss_fn)
        eval_loss_fn = eval_loss_fn and _of_natural(stack, eval_loss_fn)
    made = experiment.optimizer
    return Laid(
        stack,
        init_fn,
        params,
        loss_fn if loss_fn is None else wrap(loss_fn),
        eval_loss_fn and wrap(eval_loss_fn),
        stages,
        dataclasses.replace(rules, stacked=stack),
        made(stack) if callable(made) else made,
    )


def _cut_for(experiment: Experiment) -> Stack:
    """Returns how a layout cuts the layers of stages; those that are cut stay as they are."""
    stages, layout = experiment.stages, experiment.layout
    natural, pipeline, pipe = stages.stacked, layout.pipeline, layout.mesh.pipe
    if pipe <= 1 or natural != Stack(natural.key):
        return natural
    if len(natural.parts) > 1:
        if pipeline.balance:
            raise ValueError(
                f"balance weighs one stack of layers, and the model of {experiment.name!r} has "
                f"{len(natural.parts)}: leave it out"
            )
        return dataclasses.replace(natural, virtual=pipeline.virtual)
    init_fn = experiment.init_fn
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    if experiment.has_model_state or natural.key not in shapes:
        return natural  # which a pipeline refuses
    return stack_for(
        stages,
        init_fn,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), experiment.batch),
        layers=jax.tree.leaves(shapes[natural.key])[0].shape[0],
        pipe=pipe,
        virtual=pipeline.virtual,
        balance=pipeline.balance,
        recompute=pipeline.remat == "full",
    )


def _attending(implementation: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with another choice of attention kernel where its model leaves it."""
    if implementation is None:
        return function

    @functools.wraps(function)
    def attending(*args: Any, **kwargs: Any) -> Any:
        with preferred(implementation):
            return function(*args, **kwargs)

    return attending


def _of_natural(stack: Stack, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss_fn)
    def loss(params: PyTree, *rest: Any, **more: Any) -> Any:
        return loss_fn(stack.natural(params), *rest, **more)

    return loss


def make_experiment_mesh(experiment: Experiment, devices: Any = None) -> Mesh:
    """Makes the experiment's mesh over ``devices`` (all by default)."""
    return make_mesh(**experiment.layout.mesh.sizes, devices=devices)


def make_abstract_state(experiment: Experiment, mesh: Mesh) -> TrainState:
    """Returns the state's shapes, dtypes and shardings."""
    laid = experiment.laid
    return abstract_state(laid.init_fn, laid.optimizer, **_state_options(experiment, mesh))


def make_state(experiment: Experiment, mesh: Mesh) -> TrainState:
    """Creates the initial state on the mesh."""
    laid = experiment.laid
    return init_state(
        laid.init_fn,
        laid.optimizer,
        jax.random.key(experiment.seed),
        params=laid.params and laid.params(),
        **_state_options(experiment, mesh),
    )


def depends_on_microbatches(experiment: Experiment, state: TrainState) -> bool:
    """Whether another number of microbatches changes more than rounding.

    So it is where the loss is a scalar, whose mean is one of means, where it has model state, which
    each of them changes, and where it draws numbers and not row by row.
    """
    if experiment.has_model_state:
        return True
    params = jax.eval_shape(experiment.policy.cast_to_compute, state.params)
    given = params, jax.eval_shape(experiment.policy.cast_inputs, experiment.batch)
    trace = jax.make_jaxpr(experiment.laid.loss_fn, return_shape=True)
    traced, loss = trace(*given, jax.random.key(0))
    return not isinstance(loss, WeightedLoss) or draws_otherwise(traced.jaxpr)


def to_checkpoint(experiment: Experiment, state: TrainState) -> TrainState:
    """Returns the state as checkpoints hold it: layers in natural order, on any mesh."""
    return experiment.stack.in_order(state)


def natural(experiment: Experiment, state: TrainState) -> TrainState:
    """Returns the state with its parameters in natural order, as the experiment speaks of them.

    All processes call it, where layers are cut for a pipeline.
    """
    stack = experiment.stack
    if experiment.stages is None or stack == experiment.stages.stacked:
        return state
    return dataclasses.replace(state, params=jax.jit(stack.natural)(state.params))


def restore_state(
    experiment: Experiment, abstract: TrainState, restore: Callable[..., PyTree]
) -> TrainState:
    """Reads a state that has been saved as :func:`to_checkpoint` returns it.

    What was left out of the checkpoint is made as the run has begun with it.

    Args:
      experiment: whose state it is.
      abstract: from :func:`make_abstract_state`.
      restore: reads a checkpoint into shapes and shardings (``Checkpointer.restore``).
    """
    mesh = abstract.step.sharding.mesh
    return restore(
        to_checkpoint(experiment, abstract),
        base=lambda: to_checkpoint(experiment, make_state(experiment, mesh)),
    )


def restore_evaluated(
    experiment: Experiment, abstract: TrainState, reader: Any, step: int
) -> TrainState:
    """Reads what an evaluation takes of a checkpoint and no more: parameters (averages where the
    optimizer keeps any) and model state. Arguments are as for :func:`restore_state`, and a
    :class:`jaxtrain.run.checkpoints.reader.Reader`."""
    wanted, mesh = to_checkpoint(experiment, abstract), abstract.step.sharding.mesh
    base = lambda: to_checkpoint(experiment, make_state(experiment, mesh)).params  # noqa: E731
    params = reader.restore_params(wanted.params, step, base=base)
    kept = {"model_state": wanted.model_state}
    kept = kept if wanted.model_state is None else reader.restore_part(kept, step)
    return TrainState(None, params, (), kept["model_state"], None, None, None)


def compile_train(
    experiment: Experiment,
    state: TrainState,
    mesh: Mesh,
    *,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compiles the train step for a state on the mesh (shapes with shardings suffice)."""
    how = {"mesh": mesh, "compiler_options": compiler_options} | experiment.compiled_with
    return compile_step(build_step(experiment, state, mesh), state, experiment.batch, **how)


def build_step(experiment: Experiment, state: TrainState, mesh: Mesh) -> Step:
    """Builds the train step: pipelined where the mesh has an axis ``pipe`` above 1.

    Raises:
      ValueError: for a pipeline of an experiment without stages, with model state or an engine of
        its own, or with ``accumulate`` (a pipeline's microbatches are that).
    """
    step = experiment.transform(_untransformed(experiment, state, mesh))
    if not callable(step):
        raise ValueError(f"transform returned {step!r}: return a step (state, batch) -> ...")
    return step


def choose_gather(
    experiment: Experiment, state: TrainState, mesh: Mesh
) -> tuple[Gather | None, str]:
    """Says when a train step gathers its weights, and why.

    Unless the experiment says so, it is once per step where several microbatches share them, the
    model could do it layer by layer as well, and the state with all that is then kept takes at most
    half of a device's memory. The other half is for activations.

    Args:
      experiment: what is trained.
      state: on the mesh; shapes with shardings suffice.
      mesh: its kind of device says how much memory there is.

    Returns:
      ``gather`` as :func:`jaxtrain.build_train_step` takes it, and the reason; none where there is
      nothing to choose.

    Raises:
      ValueError: the layout asks for what the loss or the model cannot.
    """
    piped = mesh.shape.get("pipe", 1) > 1 and experiment.stages is not None
    obstacle = why_not_once(experiment, piped=piped)
    asked, microbatches = experiment.layout.gather, experiment.layout.microbatches
    if asked == "layer" and experiment.gather != "model":
        raise ValueError(
            f"`gather` is 'layer' and the model of experiment {experiment.name!r} does not gather "
            "its weights layer by layer (Experiment(gather='model')): leave it out"
        )
    if asked == "step" and obstacle is not None:
        raise ValueError(
            f"weights cannot be gathered once per step in experiment {experiment.name!r}, "
            f"{obstacle}: leave `gather` out"
        )
    if asked is not None:
        when = "once per step" if asked == "step" else "layer by layer"
        return "step" if asked == "step" else experiment.gather, f"{when}, as asked for"
    shardings = gradient_shardings(state, zero=experiment.layout.zero)
    more = 0
    if experiment.gather == "model" and obstacle is None and isinstance(mesh, Mesh):
        more = kept_by_gathering(state.params, shardings, experiment.policy.compute_dtype)
    if more == 0:
        return experiment.gather, ""
    if microbatches == 1:
        return "model", "layer by layer: there is one microbatch"
    kind = mesh.devices.flat[0].device_kind
    chip = chip_of(kind)
    if chip is None or chip.memory_bytes is None:
        return "model", f"layer by layer: the memory of {kind!r} is not known"
    needed = local_bytes(state) + more
    sizes = (
        f"with the state {human_bytes(needed)} of {human_bytes(chip.memory_bytes)} would be kept"
    )
    if 2 * needed <= chip.memory_bytes:
        return "step", f"once per step: {sizes}, at most half"
    return "model", f"layer by layer: {sizes}, more than half"


def why_not_once(experiment: Experiment, *, piped: bool = False) -> str | None:
    """Why gradients cannot be reduced, and weights gathered, once per step; None where they can.

    Args:
      experiment: whose.
      piped: whether its stages are trained as a pipeline.
    """
    return why_not(
        loss_from_stages(experiment.laid.stages) if piped else experiment.laid.loss_fn,
        has_model_state=experiment.has_model_state,
        own_engine=experiment.engine is not plain,
    )


def _untransformed(experiment: Experiment, state: TrainState, mesh: Mesh) -> Step:
    gather, reason = choose_gather(experiment, state, mesh)
    step = _step_that_gathers(experiment, state, mesh, gather)

    @functools.wraps(step)
    def told(state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        if reason:
            tell("weights are gathered", reason)
        return step(state, batch)

    return told


def _step_that_gathers(
    experiment: Experiment, state: TrainState, mesh: Mesh, gather: Gather | None
) -> Step:
    layout, laid = experiment.layout, experiment.laid
    shardings = gradient_shardings(state, zero=layout.zero)
    if mesh.shape.get("pipe", 1) == 1:
        return build_train_step(
            laid.loss_fn,
            laid.optimizer,
            policy=experiment.policy,
            accumulate=layout.accumulate,
            has_model_state=experiment.has_model_state,
            gradient_shardings=shardings,
            gather=gather,
            engine=experiment.engine,
            norms=True,
        )
    if experiment.engine is not plain:
        raise ValueError(
            f"mesh axis 'pipe' has size {mesh.shape['pipe']} and experiment {experiment.name!r} "
            "has an engine of its own, which takes the gradients of a whole loss, where a pipeline "
            "takes them stage by stage: use a mesh without 'pipe'"
        )
    if experiment.stages is None or experiment.has_model_state:
        raise ValueError(
            f"mesh axis 'pipe' has size {mesh.shape['pipe']} and experiment {experiment.name!r} "
            "cannot be pipelined: it needs Experiment(stages=...) and no model state"
        )
    if layout.accumulate != 1:
        raise ValueError(
            f"accumulate is {layout.accumulate} in a pipeline: its microbatches accumulate "
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
    return build_update(
        engine,
        laid.optimizer,
        policy=experiment.policy,
        constrain=constrain_tree(shardings),
        norms=True,
    )


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
    lengths = call_lengths(start, steps, steps_per_call)
    many = scan_steps(build_step(experiment, state, mesh))
    how = {"mesh": mesh} | experiment.compiled_with
    programs = {
        n: compile_step(many, state, [experiment.batch] * n, **how)
        for n in lengths or [steps_per_call]
    }

    def train(state: TrainState, batches: Sequence[PyTree]) -> Any:
        return programs[len(batches)](state, batches)

    return train, programs


def build_evaluation(
    experiment: Experiment, batch: PyTree, mesh: Mesh
) -> Callable[[TrainState, PyTree], WeightedLoss]:
    """Builds the evaluation ``(state, batch) -> WeightedLoss`` of batches like ``batch``.

    It is pipelined where the train step is, unless the experiment has an ``eval_loss_fn``: in as
    many microbatches as the batch's rows allow, up to the train step's.
    """
    given, laid = {"policy": experiment.policy, "gather": experiment.gather}, experiment.laid
    if mesh.shape.get("pipe", 1) > 1 and laid.stages and laid.eval_loss_fn is None:
        options = _of_pipeline(experiment)
        rows = max((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), default=1)
        shared = max(1, rows // math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES))
        options["microbatches"] = math.gcd(shared, options["microbatches"])
        return pipeline_eval_step(laid.stages, mesh=mesh, **options, **given)
    return build_eval_step(
        laid.eval_loss_fn or laid.loss_fn,
        has_model_state=experiment.has_model_state,
        **given,
    )


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


def _state_options(experiment: Experiment, mesh: Mesh) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "rules": experiment.laid.rules,
        "zero": experiment.layout.zero,
        "offload_optimizer": experiment.layout.offload_optimizer,
        "policy": experiment.policy,
        "has_model_state": experiment.has_model_state,
    }
