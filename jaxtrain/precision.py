"""Mixed precision: which dtype parameters are kept in, which one is computed in, and loss scaling.

Reductions, softmax, normalisation and losses stay in float32 whatever the policy says; that is the
model's part. The policy casts parameters on their way into the loss, so gradients come back in the
dtype the parameters are kept in.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


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

    >>> Policy.bf16().compute_dtype
    dtype(bfloat16)
    >>> Policy.named("float33")
    Traceback (most recent call last):
    ValueError: precision 'float33' is not known: use one of f32, bf16, pure_bf16, fp16
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    loss_scale: float | None = None
    growth_interval: int = 2000

    def __post_init__(self):
        object.__setattr__(self, "param_dtype", jnp.dtype(self.param_dtype))
        object.__setattr__(self, "compute_dtype", jnp.dtype(self.compute_dtype))

    @classmethod
    def f32(cls) -> "Policy":
        """Everything in float32."""
        return cls()

    @classmethod
    def bf16(cls) -> "Policy":
        """bfloat16 compute, float32 master parameters and optimizer state."""
        return cls(jnp.float32, jnp.bfloat16)

    @classmethod
    def pure_bf16(cls) -> "Policy":
        """Everything in bfloat16: half the memory; updates below 1/256 of a parameter are lost."""
        return cls(jnp.bfloat16, jnp.bfloat16)

    @classmethod
    def fp16(cls, loss_scale: float = 2.0**15, growth_interval: int = 2000) -> "Policy":
        """float16 compute, float32 master parameters, dynamic loss scaling."""
        return cls(jnp.float32, jnp.float16, loss_scale, growth_interval)

    @classmethod
    def named(cls, name: str) -> "Policy":
        """Returns the policy called ``name``: f32, bf16, pure_bf16 or fp16.

        Raises:
          ValueError: for any other name.
        """
        if name not in POLICIES:
            raise ValueError(f"precision {name!r} is not known: use one of {', '.join(POLICIES)}")
        return getattr(cls, name)()

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts floating-point leaves to the parameter dtype."""
        return _cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts floating-point leaves to the compute dtype."""
        return _cast(tree, self.compute_dtype)

    def initial_loss_scale(self) -> LossScale | None:
        """Returns the loss scale that a new state starts with, or None."""
        if self.loss_scale is None:
            return None
        return LossScale(jnp.float32(self.loss_scale), jnp.int32(0), self.growth_interval)

    def __str__(self) -> str:
        scaling = ", dynamic loss scale" if self.loss_scale is not None else ""
        return f"{self.param_dtype} parameters, {self.compute_dtype} compute{scaling}"


POLICIES = ("f32", "bf16", "pure_bf16", "fp16")


def float32_products(function: Callable[..., Any], *args: Any) -> list[str]:
    """Lists the matrix products and convolutions that take a float32 operand.

    In a bf16 step the list should be empty: one float32 product on an accelerator costs what many
    bfloat16 ones do, and nothing else shows that it is there. Pallas kernels are not looked into.

    Args:
      function: anything JAX can trace, such as an un-jitted train step.
      *args: its arguments; shapes suffice.

    Returns:
      One line per product: operand dtypes and shapes, and where in the source it stands.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    lines = []
    for eqn in _equations(jaxpr):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        operands = [v.aval for v in eqn.invars[:2]]
        if any(a.dtype in (jnp.float32, jnp.float64) for a in operands):
            shapes = " x ".join(a.str_short() for a in operands)
            lines.append(f"{eqn.primitive.name} {shapes}{_where(eqn)}")
    return lines


def _where(eqn: Any) -> str:
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    for frame in frames:
        if "/jax/" not in frame.file_name and "/flax/" not in frame.file_name:
            return f" at {frame.file_name}:{frame.line_num}"
    return ""


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "pallas_call":
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
