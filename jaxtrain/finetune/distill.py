"""Distillation: a student learns from all that a trained teacher says of each token, row or image.

Hinton et al. 2015, https://arxiv.org/abs/1503.02531: the loss is

    (1 - mix) cross-entropy + mix T^2 KL(teacher || student),

of which the second is that of both models' softmax at the temperature T
(:mod:`jaxtrain.models.distilling`).

Shapes: L stacked layers of the student, M of the teacher, K = ceil(M / L).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.finetune.change import STACKED, Change, apart, check_layers, without
from jaxtrain.loss import WeightedLoss
from jaxtrain.sharding.rules import OptionalRules, Rule, Rules, as_rules
from jaxtrain.sharding.stack import LayerOrder
from jaxtrain.stages import Stages
from jaxtrain.tree import PyTree

# Where the teacher's weights are: those of layers among the student's, so that whatever cuts these
# cuts both, and the others beside them.
TEACHER = "teacher"


@dataclasses.dataclass(frozen=True)
class Distill:
    """A trained model to learn from, besides the data."""

    teacher: str | None = None
    """A run of this experiment, a Hugging Face folder, or a name on its hub: a model of the same
    tokens and labels, which may be deeper and wider, and stays as it is."""
    temperature: float = 2.0
    """The logits of both are divided by this before they are compared."""
    mix: float = 0.5
    """The share of the teacher in the loss; the rest is the data's."""

    def numbers(self) -> dict[str, float]:
        """Returns the numbers of the loss by name; raises ValueError for those that cannot be."""
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"`temperature` is {self.temperature}: give a number above 0")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"`mix` is {self.mix}, and is a share: give a number from 0 to 1")
        return {"temperature": self.temperature, "mix": self.mix}


@dataclasses.dataclass(frozen=True)
class DistillTokens(Distill):
    """A trained model to learn from, besides the text."""

    hidden: float = 0.0
    """A weight of what both models' last hidden states differ by: the squared differences of the
    cosines of a document's predicted tokens, which need no common width."""

    def numbers(self) -> dict[str, float]:
        if not 0 <= self.hidden < float("inf"):
            raise ValueError(
                f"`hidden` is {self.hidden}, and is a weight: give 0 or a number above"
            )
        return {**super().numbers(), "hidden": self.hidden}


@dataclasses.dataclass(frozen=True)
class DistillText(DistillTokens):
    """A trained decoder to learn from, or its stored answers, besides the text."""

    stored: str | None = None
    """A folder of such a model's answers that experiments.teach has written, in place of it."""


def student_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss of the student alone as one of parameters that have its teacher's too."""
    return lambda params, *rest: loss_fn(without(params, TEACHER), *rest)


@dataclasses.dataclass(frozen=True)
class StoredDistillation(Change):
    """The change that has a student learn from a teacher's stored answers, which its batches bring.

    Args:
      head_loss: in place of the student's, such as
        :func:`jaxtrain.models.decoder.stored_distillation_loss`.
    """

    head_loss: Callable[[PyTree, PyTree, PyTree], WeightedLoss]

    def stages(self, stages: Stages | None) -> Stages | None:
        return stages and dataclasses.replace(stages, head_loss=self.head_loss)


@dataclasses.dataclass(frozen=True)
class Distillation(Change):
    """The change that makes student and teacher one model, for every mesh and every pipeline.

    The teacher may have another width and depth. Its layers lie among the student's, under
    ``blocks/teacher`` [L, K, ...]: layer l of the student goes with K of the teacher's, so that a
    pipeline's stages have as much of the teacher as of the student. Where M is no multiple of L,
    the last of them are zeros, which are computed and left out. The residual stream has both
    models'; the teacher costs a forward pass and its weights, no gradient and no moment.

    Args:
      teacher: the model to learn from, in one stack of layers that share no parameters; None for a
        model without stages, such as a ConvNet, which ``head_loss`` computes whole, from the batch.
      init: ``rng -> params`` of the teacher, in natural order.
      head_loss: ``(params, x, teacher_params, teacher_x, batch) -> WeightedLoss``, in place of the
        student's ``head_loss``, such as :func:`jaxtrain.models.decoder.distillation_loss`. Without
        stages ``teacher_x`` is None.
      depth: L, of the stack alone.
      weights: returns the teacher's trained parameters, which begin in the place of those drawn.
      teacher_rules: its sharding rules, whose patterns begin with ``^``.
      cost: FLOPs of the teacher's forward pass over those of a step of the student.
    """

    teacher: Stages | None
    init: Callable[[jax.Array], PyTree]
    head_loss: Callable[[PyTree, PyTree, PyTree, PyTree, PyTree], WeightedLoss]
    depth: int
    weights: Callable[[], PyTree] | None = None
    teacher_rules: Sequence[Rule] = ()
    cost: float = 0.0

    freeze: ClassVar = (f"(^|/){TEACHER}/",)
    flops = property(lambda self: (1 + self.cost, f", and {self.cost:.2g} of it for the teacher"))

    @functools.cached_property
    def order(self) -> LayerOrder:
        """How the teacher's layers lie among the student's, [L, K]."""
        layers = jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0))[STACKED])
        M, K = layers[0].shape[0], -(-layers[0].shape[0] // self.depth)
        return LayerOrder((self.depth, K), None if self.depth * K == M else tuple(range(M)))

    def params(self, params: Mapping[str, Any], rng: Any = None, stacked: Any = None) -> dict:
        """Returns parameters with the teacher's: drawn with a key, else ``weights``; without these
        they are left out."""
        if rng is None and self.weights is None:
            return dict(params)
        found = self.weights() if rng is None else self.init(jax.random.fold_in(rng, 1))
        if self.teacher is None:
            return {**params, TEACHER: found}
        outer = {name: value for name, value in found.items() if name != STACKED}
        layers = {TEACHER: jax.tree.map(self.order.split, found[STACKED])}
        return {**params, STACKED: {**params.get(STACKED, {}), **layers}, TEACHER: outer}

    def back(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the student's parameters alone."""
        return without(params, TEACHER)

    def rules(self, rules: Rules | Sequence[Rule], shapes: Any = None) -> Rules:
        """Returns the sharding rules of both."""
        begin, own = f"^{STACKED}/", as_rules(rules)

        def placed(rule: Rule) -> Rule:
            pattern, axes = rule
            if not pattern.startswith(begin):
                return f"^{TEACHER}/{pattern.removeprefix('^')}", axes
            axes = (axes[0], None, *axes[1:]) if axes else axes
            return f"{begin}{TEACHER}/{pattern.removeprefix(begin)}", axes

        params = OptionalRules((*map(placed, self.teacher_rules), *own.params))
        return dataclasses.replace(own, params=params)

    def stages(self, stages: Stages | None) -> Stages:
        """Returns the stages of both; raises ValueError as :func:`check_layers`, and for a student
        without stages."""
        still = jax.lax.stop_gradient
        if self.teacher is None:

            def whole_loss(params: PyTree, x: PyTree, batch: PyTree) -> WeightedLoss:
                ours, theirs = apart(params, TEACHER)
                return self.head_loss(ours, x, still(theirs), None, batch)

            if stages is None:
                raise ValueError(
                    "the student is not made of stages, of which the last has the loss of both: "
                    "use jaxtrain.ops.losses.outcome_divergence"
                )
            return dataclasses.replace(stages, head_loss=whole_loss)
        for each in (stages, self.teacher):
            check_layers(each, instead="jaxtrain.ops.losses.divergence")
        M, K = self.order.count, self.order.sizes[1]

        def embed(params: PyTree, batch: PyTree, rng: jax.Array | None) -> PyTree:
            ours, theirs = apart(params, TEACHER)
            known = still(self.teacher.embed(theirs, batch, None))
            return {"student": stages.embed(ours, batch, rng), TEACHER: known}

        def block(layer, shared, x: PyTree, batch: PyTree, rng, index: jax.Array) -> PyTree:
            ours, theirs = apart(layer, TEACHER)

            def teach(x: PyTree, row: tuple[PyTree, jax.Array]) -> tuple[PyTree, None]:
                weights, number = row
                y = self.teacher.layer(0, {STACKED: weights}, x, batch, None, number)
                if self.order.rows is not None:
                    y = jax.tree.map(lambda y, x: jnp.where(number < M, y, x), y, x)
                return y, None

            known, _ = jax.lax.scan(teach, x[TEACHER], (theirs, K * index + jnp.arange(K)))
            student = stages.layer(0, {STACKED: ours}, x["student"], batch, rng, index)
            return {"student": student, TEACHER: still(known)}

        def head_loss(params: PyTree, x: PyTree, batch: PyTree) -> WeightedLoss:
            ours, theirs = apart(params, TEACHER)
            return self.head_loss(ours, x["student"], theirs, still(x[TEACHER]), batch)

        return dataclasses.replace(stages, embed=embed, block=block, head_loss=head_loss, shared=())
