"""A change is a value that turns one experiment into another, such as DPO's reference or LoRA."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax

from jaxtrain.optim import masks
from jaxtrain.sharding.rules import Rule, Rules, as_rules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages
from jaxtrain.tree import PyTree

# The key of the layers of a model that has another one beside it, layer by layer.
STACKED = "blocks"


class Change:
    """What :func:`apply` takes: a subclass says what is not as before. A library user calls its
    methods one by one."""

    freeze: ClassVar[masks.Mask] = ()
    """What does not train, as ``make_optimizer(freeze=)`` takes it."""
    flops: ClassVar[tuple[float, str]] = (1, "")
    """The factor that it has on FLOPs, and what is added to the name of their formula."""
    key: ClassVar[str | None] = None
    """The name, in the config of checkpoints, of a change that is a dataclass of flags, by which
    :func:`jaxtrain.run.trained.load` finds the parameters of the plain model again."""
    record = property(lambda self: {self.key: dataclasses.asdict(self)} if self.key else {})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Returns the change of a checkpoint's config; that without an effect where it has none."""
        fields = config.get(cls.key, {}).items()
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields})

    def params(
        self, params: PyTree, rng: jax.Array | None = None, stacked: Stack | None = None
    ) -> PyTree:
        """Returns the changed parameters, in natural order. ``rng`` is the key of what is drawn;
        with None that is left out, and leaves may be weights that are yet to be read."""
        return params

    def back(self, params: PyTree) -> PyTree:
        """Returns the parameters of the plain model: what is sampled from and exported."""
        return params

    def rules(self, rules: Rules | Sequence[Rule], shapes: PyTree = None) -> Rules:
        """Returns the sharding rules of the changed parameters."""
        return as_rules(rules)

    def stages(self, stages: Stages | None) -> Stages | None:
        """Returns the changed model; None stands for a model without stages."""
        return stages


def apply(experiment: Any, change: Change, **fields: Any) -> Any:
    """Returns an :class:`jaxtrain.Experiment` with a change.

    Args:
      experiment, change: those; of several changes the first is applied first.
      fields: other fields of the experiment that change with it, such as ``batch``.

    Raises:
      ValueError: the change has stages of its own, and the loss of the experiment is not of stages;
        or it has a loss of its own, and a change before it has too.
    """
    task = experiment.task
    stack = task.rules.stacked if task.stages is None else task.stages.stacked
    if (stages := change.stages(task.stages)) is not task.stages and not task.made_of_stages:
        raise ValueError(
            f"experiment {experiment.name!r} has a `loss_fn`, which {type(change).__name__} cannot "
            "change: leave it out, so that the loss is that of the stages"
        )

    if stages is not None and stages.head_loss is not task.stages.head_loss:
        own = type(change).__name__
        if (before := getattr(task.stages.head_loss, "changed_by", None)) is not None:
            raise ValueError(
                f"{before} and {own} each have a loss of their own, of which a model has one: "
                "apply one of the two"
            )
        stages.head_loss.changed_by = own

    def init_fn(rng: jax.Array) -> Any:
        if not task.has_model_state:
            return change.params(task.init_fn(rng), rng, stack)
        params, model_state = task.init_fn(rng)
        return change.params(params, rng, stack), model_state

    def back(params: PyTree) -> PyTree:
        params = change.back(params)
        return params if task.back is None else task.back(params)

    def frozen(params: PyTree) -> PyTree:
        both = (masks.resolve("freeze", each, params) for each in (task.freeze, change.freeze))
        return jax.tree.map(operator.or_, *both)

    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    shapes = shapes[0] if task.has_model_state else shapes
    (factor, words), flops = change.flops, task.flops_per_step
    return experiment.with_(
        init_fn=init_fn,
        params=task.params and (lambda: change.params(task.params(), None, stack)),
        freeze=frozen if task.freeze and change.freeze else task.freeze or change.freeze,
        back=back,
        rules=change.rules(task.rules, shapes),
        stages=stages,
        flops_per_step=None if flops is None else factor * flops,
        flops_formula=task.flops_formula and task.flops_formula + words,
        config={**experiment.metadata.config, **change.record},
        **fields,
    )


def apart(params: Mapping[str, Any], key: str) -> tuple[dict[str, Any], Any]:
    """Returns the parameters of a model, or of its layer, and what another has under ``key``."""
    own = dict(params)
    return own, own.pop(key, {})


def without(params: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the parameters of a model alone, beside which another has some under ``key``."""
    own, _ = apart(params, key)
    return own | {STACKED: apart(own[STACKED], key)[0]}


def check_layers(stages: Stages | None, *, instead: str) -> None:
    """Raises ValueError for a model beside whose layers no other can lie; ``instead`` mends it."""
    if stages is None or len(stages.blocks) > 1 or stages.shared or stages.stacked.key != STACKED:
        raise ValueError(
            f"the model is not made of stages, in one stack '{STACKED}' of layers that share no "
            f"parameters, beside which another model could lie: use {instead}"
        )
