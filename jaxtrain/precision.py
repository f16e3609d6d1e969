"""Mixed precision: which dtype parameters are kept in, which one is computed in, and loss scaling.

Reductions, softmax, normalisation and losses stay in float32 whatever the policy says; that is the
model's part. The policy casts parameters on their way into the loss, so gradients come back in the
dtype the parameters are kept in. A batch is cast only where the policy names its leaves, because a
weight or a target loses bits in bfloat16 (257 becomes 256). A float32 input that is not cast makes
every product that it meets float32: :func:`jaxtrain.float32_products` and the report of a
compiled step name those.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.ops.scaled import LOST, OPERANDS, RECIPES, Scaled
from jaxtrain.sharding.offload import is_on_host
from jaxtrain.tree import PyTree, is_count, map_named, named_leaves, nodes_of

# The scope of the optimizer in a step, which computes in the dtype of the parameters on purpose.
OPTIMIZER = "optimizer"


class PrecisionWarning(UserWarning):
    """Most products of a step that computes in bfloat16 or float16 take a float32 operand."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

    The loss is multiplied by ``scale`` before the backward pass. After ``growth_interval`` steps in
    a row without an overflow the scale doubles; a step with one halves it.

    Args:
      scale: float32 scalar.
      good_steps: int32 scalar, steps since the last change of scale.
      growth_interval: steps.
      largest: the scale stops growing here.
    """

    scale: jax.Array
    good_steps: jax.Array
    growth_interval: int = dataclasses.field(metadata={"static": True}, default=2000)
    largest: float = dataclasses.field(metadata={"static": True}, default=2.0**24)

    def updated(self, overflow: jax.Array) -> "LossScale":
        """Returns the scale for the next step, given whether this one overflowed (bool scalar)."""
        good = jnp.where(overflow, 0, self.good_steps + 1)
        grow = good >= self.growth_interval
        scale = jnp.where(overflow, self.scale / 2, jnp.where(grow, self.scale * 2, self.scale))
        scale = jnp.clip(scale, 2.0**-14, self.largest)
        return dataclasses.replace(self, scale=scale, good_steps=jnp.where(grow, 0, good))


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a train step.

    Args:
      param_dtype: what parameters (and so optimizer moments) are stored in.
      compute_dtype: what the loss function sees.
      loss_scale: the initial dynamic loss scale, or None for none.
      growth_interval: steps without overflow after which the loss scale doubles.
      cast_batch: a regex. Floating-point batch leaves in whose path it is found (``"^image$"``) are
        cast to ``compute_dtype`` too; ``""`` casts all of them, None casts none.
      keep: a regex. Parameters in whose path it is found (``"norm|router"``) keep the dtype that
        ``init_fn`` gives them, in the state and in the loss.
      recipe: a name of :data:`jaxtrain.ops.scaled.RECIPES`, such as ``"fp8"``, by which products
        with the kernels that ``recipe_in`` finds are rounded; None for none.
      recipe_in: a regex. Kernels in whose path it is found have products of the recipe; all of
        attention and MLP by default, not so embeddings and heads.
      count_rounding: whether steps report which share of the operands' values saturates or is
        flushed to 0, as ``flushed/gradients/blocks`` [layers] and so on. The state then has zeros
        beside each of these kernels, so ``init_state`` takes this policy too.

    >>> Policy.bf16().compute_dtype
    dtype(bfloat16)
    >>> print(Policy.named("fp8"))
    float32 parameters, bfloat16 compute, products by fp8
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    loss_scale: float | None = None
    growth_interval: int = 2000
    cast_batch: str | None = None
    keep: str | None = None
    recipe: str | None = None
    recipe_in: str = r"(^|/)(attn|cross|mlp)/.*kernel(/base)?$"
    count_rounding: bool = False

    def __post_init__(self):
        if self.recipe not in (None, *RECIPES):
            raise ValueError(f"`recipe` is {self.recipe!r}: use one of {', '.join(RECIPES)}")
        if self.count_rounding and self.recipe is None:
            raise ValueError(
                "`count_rounding` is True: the precision rounds no operands of products; give one "
                f"of {', '.join(RECIPES)}, or leave it out"
            )
        object.__setattr__(self, "param_dtype", jnp.dtype(self.param_dtype))
        object.__setattr__(self, "compute_dtype", jnp.dtype(self.compute_dtype))

    @classmethod
    def f32(cls) -> "Policy":
        """Everything in float32."""
        return cls()

    @classmethod
    def bf16(cls, *, cast_batch: str | None = None, keep: str | None = None) -> "Policy":
        """bfloat16 compute, float32 master parameters and optimizer state."""
        return cls(jnp.float32, jnp.bfloat16, cast_batch=cast_batch, keep=keep)

    @classmethod
    def pure_bf16(cls, *, cast_batch: str | None = None, keep: str | None = None) -> "Policy":
        """Everything in bfloat16: half the memory; updates below 1/256 of a parameter are lost."""
        return cls(jnp.bfloat16, jnp.bfloat16, cast_batch=cast_batch, keep=keep)

    @classmethod
    def fp16(
        cls,
        loss_scale: float = 2.0**15,
        growth_interval: int = 2000,
        *,
        cast_batch: str | None = None,
        keep: str | None = None,
    ) -> "Policy":
        """float16 compute, float32 master parameters, dynamic loss scaling."""
        return cls(jnp.float32, jnp.float16, loss_scale, growth_interval, cast_batch, keep)

    @classmethod
    def named(cls, name: str) -> "Policy":
        """Returns the policy called ``name``: f32, bf16, pure_bf16, fp16, or bf16 with a recipe.

        Raises:
          ValueError: for any other name.
        """
        if name not in POLICIES:
            raise ValueError(f"precision {name!r} is not known: use one of {', '.join(POLICIES)}")
        return (
            cls(compute_dtype=jnp.bfloat16, recipe=name)
            if name in RECIPES
            else getattr(cls, name)()
        )

    def cast_to_param(self, params: PyTree) -> PyTree:
        """Casts floating-point parameters, but for those that ``keep`` names, to be stored.

        Raises:
          ValueError: where it names none.
        """
        params = _cast(params, self.param_dtype, keep=self.keep)
        return self._scaled(params, counted=True) if self.count_rounding else params

    def cast_to_compute(self, params: PyTree) -> PyTree:
        """Casts parameters to be computed with, and raises, as :meth:`cast_to_param` does; kernels
        of the recipe become :class:`jaxtrain.ops.scaled.Scaled`, under their old paths.

        Raises:
          ValueError: where ``recipe_in`` finds no kernel.
        """
        params = _cast(params, self.compute_dtype, keep=self.keep)
        if self.recipe is None or nodes_of(Scaled, params):
            return params  # it may have been cast already
        if self.count_rounding:
            raise ValueError(
                "`count_rounding` is True and the state has no place for counts: give init_state "
                "the policy of the step"
            )
        return self._scaled(params)

    def cast_layer(self, weights: PyTree) -> PyTree:
        """Casts like :meth:`cast_to_compute` some of the parameters, of which ``keep`` may name
        none."""
        return _cast(weights, self.compute_dtype, part=True, keep=self.keep)

    def cast_inputs(self, batch: PyTree) -> PyTree:
        """Casts the batch leaves that ``cast_batch`` names to the compute dtype.

        Raises:
          ValueError: where it names no floating-point leaf.
        """
        if self.cast_batch is None:
            return batch
        return _cast(batch, self.compute_dtype, cast_batch=self.cast_batch)

    def initial_loss_scale(self) -> LossScale | None:
        """Returns the loss scale that a new state starts with, or None."""
        if self.loss_scale is None:
            return None
        return LossScale(jnp.float32(self.loss_scale), jnp.int32(0), self.growth_interval)

    def _scaled(self, params: PyTree, *, counted: bool = False) -> PyTree:
        names = {
            name for name, x in named_leaves(params).items() if x.ndim >= 2 and _is_floating(x)
        }
        if not (found := {name for name in names if re.search(self.recipe_in, name)}):
            raise ValueError(
                f"`recipe_in` is {self.recipe_in!r}, which finds no kernel for {self.recipe} among "
                f"{', '.join(sorted(names))}: correct it, or choose another precision"
            )

        def made(x: Any) -> Scaled:
            shape = (*x.shape[:-2], len(OPERANDS), len(LOST) + 1)
            return Scaled(x, self.recipe, jnp.zeros(shape, jnp.float32) if counted else None)

        return map_named(lambda name, x: made(x) if name in found else x, params)

    def __str__(self) -> str:
        scaling = ", dynamic loss scale" if self.loss_scale is not None else ""
        kept = f", {self.keep!r} as it is" if self.keep is not None else ""
        by = f", products by {self.recipe}" if self.recipe is not None else ""
        return f"{self.param_dtype} parameters, {self.compute_dtype} compute{by}{kept}{scaling}"


POLICIES = ("f32", "bf16", "pure_bf16", "fp16", *RECIPES)


def as_policy(policy: Policy | str | None) -> Policy:
    """Accepts a :class:`Policy`, a policy's name, or None for float32.

    >>> as_policy("bf16") == Policy.bf16()
    True
    """
    if policy is None:
        return Policy.f32()
    return Policy.named(policy) if isinstance(policy, str) else policy


def _cast(tree: PyTree, dtype: Any, *, part: bool = False, **option: str | None) -> PyTree:
    """Casts floating-point leaves: those in whose path the regex of ``cast_batch`` is found, all
    but those of ``keep``; one that is found in none is an error, but in a ``part`` of the leaves.
    Those in the memory of the host are cast when they are fetched."""
    ((name, pattern),) = option.items()
    leaves = named_leaves(tree).items()
    floating = {path for path, x in leaves if _is_floating(x) and not is_count(path)}
    found = {path for path in floating if pattern is not None and re.search(pattern, path)}
    if pattern is not None and not found and not part:
        leaves = sorted(named_leaves(tree))
        case = any(re.search(pattern, path, re.IGNORECASE) for path in leaves)
        mend = "it is case-sensitive, and (?i) in front of it makes it not so" if case else ""
        what = "the parameters" if name == "keep" else "the batch"
        raise ValueError(
            f"{name} is {pattern!r}: it matches no floating-point leaf of {what}, whose leaves "
            f"are {leaves}; {mend or 'correct the regex'}"
        )
    chosen = floating - found if name == "keep" else found
    cast = lambda path, x: path in chosen and not is_on_host(x)  # noqa: E731
    return map_named(lambda path, x: x.astype(dtype) if cast(path, x) else x, tree)


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
