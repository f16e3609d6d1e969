"""Defines :class:`Experiment`: the data and pure functions that `fit`, `plan` and `parity` take.

An experiment module has ``build(config) -> Experiment``. Because everything takes this one object,
what was planned is what is trained.
"""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import jax
import optax

from jaxtrain.engines.pipeline.balance import balanced, weigh
from jaxtrain.engines.plain import Engine, as_engine, plain
from jaxtrain.layout import Effect, Layout
from jaxtrain.methods.method import Method
from jaxtrain.ops.attention import preferred
from jaxtrain.ops.context import exchange
from jaxtrain.ops.dispatch import dispatch
from jaxtrain.ops.remat import keeping, layout_keeps
from jaxtrain.optim import freezing
from jaxtrain.optim.masks import Mask
from jaxtrain.precision import Policy, as_policy
from jaxtrain.sharding.placement import Gather
from jaxtrain.sharding.rules import Rules, as_rules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages, loss_from_stages
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, name_of


class Repeated(NamedTuple):
    """A held-out batch in which every row is equally often, to be as large as the others."""

    batch: PyTree
    share: float
    """Rows that it stands for, as a share of those that it has."""


# Opens the endless stream of global batches from a step on, placed on devices; each batch is a
# function of its step and of nothing else.
BatchStream = Callable[[int, PyTree], AbstractContextManager[Iterator[PyTree]]]
EvalBatches = Callable[[PyTree], Iterable[PyTree | Repeated]]


def no_batches(start_step: int, sharding: jax.sharding.NamedSharding):
    """Stands for the batches of an experiment that was built without its data; always raises."""
    raise ValueError("this experiment was built without its data: build(config) has it")


@dataclasses.dataclass(frozen=True)
class Task:
    """The model and its loss, in natural order."""

    init_fn: Callable[[jax.Array], PyTree]
    """``rng -> params`` (with ``has_model_state``: ``-> (params, model_state)``), layers in natural
    order."""
    loss_fn: Callable[..., Any] | None = None
    """The loss, as :func:`jaxtrain.build_train_step` takes it; None for that of ``stages``."""
    stages: Stages | None = None
    """The model as :class:`jaxtrain.Stages`; a mesh axis ``pipe`` above 1 needs it. The layout cuts
    layers in natural order; those that are cut already stay as they are."""
    eval_loss_fn: Callable[..., Any] | None = None
    """The loss of the evaluation, called with ``rng=None`` and never pipelined; by default
    ``loss_fn``, or ``stages`` where the train step is pipelined."""
    params: Callable[[], PyTree] | None = None
    """Returns weights to begin with, in natural order, such as a file's, which
    :func:`jaxtrain.init_state` is given as its ``params``; called where a run begins, and where it
    continues from checkpoints without the frozen ones (``RunOptions.save_frozen``)."""
    freeze: Mask | None = None
    """What does not train, whatever the optimizer: patterns of paths or a function, as
    ``make_optimizer(freeze=)`` takes them."""
    back: Callable[[PyTree], PyTree] | None = None
    """Makes the parameters of the plain model of those that train, such as merged ones; None where
    they are the same. ``conclude`` and ``show`` are given its result."""
    rules: Rules = dataclasses.field(default_factory=Rules)
    """Sharding rules."""
    gathers_layers: bool = False
    """The model can gather its weights layer by layer; ``layout.gather`` says whether it does."""
    engine: Engine = plain
    """The gradient engine, as :func:`jaxtrain.build_train_step` takes it, such as one that clips
    the gradients of every example. No mesh axis ``pipe`` goes with another than the usual one."""
    has_model_state: bool = False
    """Whether the losses and ``init_fn`` have the form with model state."""
    flops_per_step: float | None = None
    """FLOPs of one step over all devices, by ``flops_formula``; None where unknown."""
    flops_formula: str = ""
    """Name of the formula."""

    def __post_init__(self) -> None:
        if self.loss_fn is None and self.stages is None:
            raise ValueError("the experiment has neither `loss_fn` nor `stages`: give one of them")
        object.__setattr__(self, "rules", as_rules(self.rules))
        object.__setattr__(self, "engine", as_engine(self.engine))

    @property
    def gather(self) -> Gather | None:
        """What :func:`jaxtrain.build_train_step` takes, unless the layout chooses."""
        return "model" if self.gathers_layers else None

    @property
    def made_of_stages(self) -> bool:
        """Whether the loss is that of the stages, so that a layout says what their layers keep."""
        return self.stages is not None and self.loss_fn is None


@dataclasses.dataclass(frozen=True)
class Data:
    """The batches of a run."""

    batch: PyTree
    """The shapes and dtypes of one global batch."""
    train_batches: BatchStream
    """Opens the stream of training batches, placed by a sharding of rows or, where the layout
    splits more of a batch, by those of its leaves."""
    eval_batches: EvalBatches | Mapping[str, EvalBatches] | None = None
    """``sharding -> batches``, one pass over the held-out ones, placed as training batches are, of
    which some may be :class:`Repeated`; or several passes by name, whose metrics are
    ``NAME/loss``; None for no evaluation. It is kept by name, one pass under ``""``."""
    items_per_step: int = 0
    """Number of tokens (or images) that one global batch holds."""
    item: str = "tokens"
    """Name of what is counted so."""
    steps_per_epoch: float | None = None
    """Steps that a pass over the training rows takes, perhaps a fraction, by which the logs and the
    line of progress have the epoch; None where unknown."""
    counts: Callable[[int], Mapping[str, float]] | None = None
    """``step -> numbers`` that are logged with the metrics of a step, such as the epochs of each
    source of its data."""
    watermarks: Any = None
    """The :class:`jaxtrain.data.Watermarks` of rows from a growing source; None without any."""
    guarantee: str | None = None
    """The guarantee of a run to its rows, such as an epsilon, for the header and the end."""

    def __post_init__(self) -> None:
        if not isinstance(given := self.eval_batches, Mapping):
            given = {} if given is None else {"": given}
        object.__setattr__(self, "eval_batches", given)

    @property
    def eval_sets(self) -> dict[str, EvalBatches]:
        """The evaluation sets, by what the names of their metrics begin with."""
        return {name and f"{name}/": batches for name, batches in self.eval_batches.items()}


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The records and reports of a run, which no step computes with."""

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The configuration, as JSON-able data, stored with every checkpoint."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Text files to keep in the run's folder (name to text), such as a tokenizer."""
    fingerprints: Mapping[str, str | Mapping[int, str]] = dataclasses.field(default_factory=dict)
    """Fingerprints of what the flags do not tell, such as the text behind a path: name to text,
    equal only where it is the same, or to texts by the step from which each holds. A run is resumed
    with equal ones."""
    may_change: Mapping[str, Effect] = dataclasses.field(default_factory=dict)
    """Entries of ``config["flags"]``, and fingerprints, that may differ in a resumed run: dotted
    names, or patterns of them (``mesh.*``), to the effect; of texts by step, ``LATER``. All others
    are refused unless ``RunOptions.accept_changes`` names them."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """More lines for the header (name to text)."""
    derived: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda means: {}
    """``means -> numbers`` that follow from the means of a step or an evaluation set, such as a
    perplexity; they are logged, and ``best_metric`` may be one. Metrics whose names
    begin with _ are for this function alone, and are not logged."""
    beside_loss: Sequence[str] = ()
    """Metrics of a step that the line of progress has beside the loss, such as a reward."""
    show: Callable[[TrainState, Mapping[str, Any]], Mapping[str, Any]] | None = None
    """``(state, evaluation means) -> texts and pictures``, by name, which TensorBoard shows of each
    evaluation where the optimizer makes histograms (``make_optimizer(watch_bins=)``). The state is
    as for ``conclude``; pictures are uint8 [height, width, 3]."""
    pictures: Callable[[TrainState, Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Pictures as those of ``show``; a run leaves those of its end in its folder as NAME.png."""
    conclude: Callable[[TrainState, Mapping[str, float]], list[str]] | None = None
    """``(state, evaluation means) -> lines`` printed when training is over; the state has what is
    evaluated in ``params`` (:func:`jaxtrain.averaged`). Of a run that was stopped early while it
    kept its best checkpoint, they are that one's, without optimizer state and metrics of several
    numbers."""
    best_metric: str = "loss"
    """The evaluation metric that decides which checkpoint is best; ``NAME/loss`` with
    ``eval_batches`` by name."""
    best_mode: str = "min"
    """``"min"`` or ``"max"``."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a training run is made of."""

    name: str
    """Names the run's folder."""
    task: Task
    data: Data
    optimizer: optax.GradientTransformation | Callable[[Stack], optax.GradientTransformation]
    """An optax transformation, or a function of a :class:`jaxtrain.Stack` that makes one."""
    steps: int
    """Train steps in all."""
    layout: Layout = dataclasses.field(default_factory=Layout)
    """The layout of the step over devices, and its schedule. It cuts the layers of ``stages`` for a
    pipeline, sets what they keep, and changes no mathematics."""
    policy: Policy = dataclasses.field(default_factory=Policy)
    """Dtypes; a policy's name will do."""
    method: Method = dataclasses.field(default_factory=Method)
    """What happens around the train step; evaluation is not part of it."""
    seed: int = 0
    """Seed of parameters and of the randomness of steps."""
    metadata: Metadata = dataclasses.field(default_factory=Metadata)

    def __repr__(self) -> str:
        size = f"{self.data.items_per_step:,} {self.data.item}"
        return f"Experiment({self.name!r}, {self.steps:,} steps of {size}, seed {self.seed})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", as_policy(self.policy))
        if (sets := self.data.eval_sets) and self.deciding_set is None:
            raise ValueError(
                f"`best_metric` is {self.metadata.best_metric!r} and eval_batches has sets by "
                f"name: say of which, as in {next(iter(sets))}loss"
            )
        more = {
            name: dict(found) | dict(getattr(self.metadata, name))
            for name in ("facts", "fingerprints")
            if (found := getattr(self.method, name))
        }
        object.__setattr__(self, "metadata", dataclasses.replace(self.metadata, **more))
        for part in (self.task.engine, self.method):
            if part.check is not None:
                part.check(self)
        self.laid  # noqa: B018  what a layout cannot be is refused here

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Makes an experiment of its fields and those of its task, data and metadata, by name.

        ``gather="model"``, as :func:`jaxtrain.build_train_step` takes it, is ``gathers_layers``.
        """
        if "gather" in fields:
            if (gather := fields.pop("gather")) not in (None, "model"):
                raise ValueError(f"gather is {gather!r}: give 'model', or that of the layout")
            fields["gathers_layers"] = gather == "model"
        parts = _by_part(fields)
        return cls(
            **parts.pop(""), **{name: _PARTS[name](**given) for name, given in parts.items()}
        )

    def with_(self, **fields: Any) -> Self:
        """Returns the experiment with other values of its fields, or of its parts' fields."""
        own = (parts := _by_part(fields)).pop("")
        for name, given in parts.items():
            own[name] = dataclasses.replace(own.get(name, getattr(self, name)), **given)
        return dataclasses.replace(self, **own)

    @property
    def compiled_with(self) -> dict[str, Any]:
        """The arguments of :func:`jaxtrain.compile_step` that are the experiment's."""
        names = ("hide_communication", "deterministic")
        return {"rules": self.laid.rules} | {name: getattr(self.layout, name) for name in names}

    @property
    def deciding_set(self) -> str | None:
        """The key, in ``data.eval_sets``, of the set that ``best_metric`` is of, or None: of a set
        within another, the inner one."""
        sets = filter(self.metadata.best_metric.startswith, self.data.eval_sets)
        return max(sets, key=len, default=None)

    @property
    def train_batches(self) -> BatchStream:
        """Opens the stream of training batches as the method has them."""
        return self.method.batches(self.data.train_batches)

    @functools.cached_property
    def laid(self) -> "Laid":
        """The model and the optimizer as the layout has them."""
        return lay_out(self)

    @property
    def stack(self) -> Stack:
        """The stack of the parameters by layer, cut for the layout."""
        return self.laid.rules.stacked


_PARTS = {"": Experiment, "task": Task, "data": Data, "metadata": Metadata}
_PART_OF = {f.name: part for part, kind in _PARTS.items() for f in dataclasses.fields(kind)}


def _by_part(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sorts fields by the part of an experiment that has them; its own are under ``""``."""
    found: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in fields.items():
        if name not in _PART_OF:
            near = difflib.get_close_matches(name, sorted(_PART_OF), n=1, cutoff=0.0)
            raise ValueError(f"an experiment has no field {name!r}: try {near[0]!r}")
        found[_PART_OF[name]][name] = value
    return found


@dataclasses.dataclass(frozen=True)
class Laid(Task):
    """A task of parameters that are cut as ``rules.stacked`` says, wrapped for a layout, and the
    optimizer for them."""

    optimizer: optax.GradientTransformation | None = None


def lay_out(experiment: Experiment) -> Laid:
    """Cuts the stacks of an experiment for its layout, and sets what its layers keep and compute.

    Raises:
      ValueError: the layout has what this model cannot.
    """
    layout, task, rules = experiment.layout, experiment.task, experiment.task.rules
    if not task.made_of_stages:
        for name in ("remat", "scan_unroll"):
            if (value := getattr(layout, name)) is not None:
                raise ValueError(
                    f"`{name}` is {value!r} and the loss of experiment {experiment.name!r} is not "
                    "made of stages, whose layers that is for: leave it out"
                )
    if layout.exchange is not None and layout.mesh.context == 1:
        raise ValueError(
            f"`exchange` is {layout.exchange!r} and mesh axis 'context' has size 1, so that no "
            "device has a part of a row: use --mesh.context, or leave it out"
        )
    if layout.dispatch is not None and layout.mesh.expert == 1:
        raise ValueError(
            f"`dispatch` is {layout.dispatch!r} and mesh axis 'expert' has size 1, so that every "
            "device has all experts: use --mesh.expert, or leave it out"
        )
    if not layout.sequence_parallel:
        rules = dataclasses.replace(rules, axes=dict(rules.axes) | {"residual": "context"})
    contexts = {preferred: layout.attention, exchange: layout.exchange, layout_keeps: layout.remat}
    contexts[dispatch] = layout.dispatch
    wrap = functools.partial(_within, {c: x for c, x in contexts.items() if x is not None})
    made = {name: wrap(getattr(task, name)) for name in ("loss_fn", "eval_loss_fn")}
    stack = rules.stacked
    if (given := task.stages) is not None:
        stack, own = _cut_for(experiment), {}
        if experiment.method.start is not None and (stack.virtual > 1 or stack.padded):
            raise ValueError(
                "`method` keeps a state of its own, whose layers a pipeline of uneven stages or "
                f"`pipeline.virtual` {stack.virtual} does not put in order: use even stages, with "
                "`pipeline.virtual` 1"
            )
        if layout.scan_unroll is not None:
            own["scan_unroll"] = layout.scan_unroll
        if layout.remat is not None:
            own["remat"] = keeping(layout.remat)
        made["stages"] = dataclasses.replace(
            given,
            embed=wrap(given.embed),
            block=tuple(map(wrap, given.blocks)),
            between=tuple(map(wrap, given.between)),
            head_loss=wrap(given.head_loss),
            stacked=stack,
            **own,
        )
        if stack != given.stacked:
            made |= {n: _of_natural(stack, made[n]) for n in ("loss_fn", "eval_loss_fn")}
            made["init_fn"] = lambda rng: stack.cut(task.init_fn(rng))
            made["params"] = task.params and (lambda: stack.cut(task.params()))
        made["loss_fn"] = made["loss_fn"] or loss_from_stages(made["stages"])
    if layout.offload_parameters:
        _check_offload(experiment, made.get("stages"))
    made["rules"] = dataclasses.replace(rules, stacked=stack)
    return Laid(**vars(task) | made, optimizer=optimizer_for(experiment, stack))


def _check_offload(experiment: Experiment, stages: Stages | None) -> None:
    """Raises ValueError where the layers of an experiment cannot be fetched one by one."""
    layout, task, own = experiment.layout, experiment.task, f"experiment {experiment.name!r}"
    pipe, recipe = layout.mesh.pipe, experiment.policy.recipe
    method, engine = (name_of(x) for x in (experiment.method.step, task.engine.make))
    for fits, obstacle in (
        (task.made_of_stages, f"the loss of {own} is not made of stages, whose layers that is for"),
        (task.gathers_layers, f"{own} does not gather its weights layer by layer (gathers_layers)"),
        (pipe == 1, f"mesh axis 'pipe' has size {pipe}, whose stages keep their layers on devices"),
        (layout.gather != "step", "`gather` is 'step', which makes all weights whole at once"),
        (experiment.method == Method(), f"{own} has a method around its steps, {method!r}"),
        (task.engine is plain, f"{own} has an engine of its own, {engine!r}, with whole weights"),
        (recipe is None, f"the precision is {recipe!r}, whose kernels are scaled before any layer"),
    ):
        if not fits:
            raise ValueError(f"`offload_parameters` is True and {obstacle}: leave one of them out")
    if stages.remat is None:
        raise ValueError(
            "`offload_parameters` is True and `remat` 'none', with which the backward pass keeps "
            "all layers that were fetched: give remat 'full' or 'dots'"
        )


def optimizer_for(experiment: Experiment, stack: Stack) -> optax.GradientTransformation:
    """Returns the optimizer of an experiment for parameters that are stacked so, of which those
    train that its task does not freeze."""
    made, freeze = experiment.optimizer, experiment.task.freeze
    made = made(stack) if callable(made) else made
    return made if freeze is None else freezing(made, freeze)


def _cut_for(experiment: Experiment) -> Stack:
    """Returns how a layout cuts the layers of stages; those that are cut stay as they are."""
    task, layout, batch = experiment.task, experiment.layout, experiment.data.batch
    stages, init_fn = task.stages, task.init_fn
    natural, pipeline, pipe = stages.stacked, layout.pipeline, layout.mesh.pipe
    if pipe == 1 or natural != Stack(natural.key):
        return natural
    even = dataclasses.replace(natural, virtual=pipeline.virtual)
    if len(natural.parts) > 1:
        if pipeline.balance:
            raise ValueError(
                f"`balance` weighs one stack of layers, and the model of {experiment.name!r} has "
                f"{len(natural.parts)}: leave it out"
            )
        return even
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    if task.has_model_state or natural.key not in shapes:
        return natural  # which a pipeline refuses
    layers = jax.tree.leaves(shapes[natural.key])[0].shape[0]
    parts = pipe * pipeline.virtual
    if not 1 < parts <= layers or not (pipeline.balance or layers % parts):
        return even
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), batch)
    weights, recompute = weigh(stages, init_fn, row), pipeline.remat == "full"
    counts = balanced(weights, layers=layers, stages=parts, recompute=recompute)
    return dataclasses.replace(even, counts=counts)


def _within(contexts: Mapping[Any, str], function: Callable[..., Any] | None) -> Any:
    """Returns the function with what a layout chooses where its model leaves that open."""
    if not contexts or function is None:
        return function

    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context, value in contexts.items():
                stack.enter_context(context(value))
            return function(*args, **kwargs)

    return within


def _of_natural(stack: Stack, loss_fn: Callable[..., Any] | None) -> Any:
    if loss_fn is None:
        return None

    @functools.wraps(loss_fn)
    def loss(params: PyTree, *rest: Any, **more: Any) -> Any:
        return loss_fn(stack.natural(params), *rest, **more)

    return loss
