"""Constrain, the change that trains kernels whose zeros stay, or that are rounded as they will be
stored."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.finetune.change import Change
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.ops.altered import Masked, NotZero, Rounded
from jaxtrain.ops.linear import kernel_rules, merge, put
from jaxtrain.ops.packed import Kind, pack
from jaxtrain.sharding.rules import Rule, Rules
from jaxtrain.sharding.stack import Stack
from jaxtrain.tree import PyTree, named_leaves


@dataclasses.dataclass(frozen=True)
class Constrain(Change):
    """Kernels of attention and MLP of which a function is multiplied, which is what is sampled from
    and exported."""

    keep_zeros: bool = False
    """Weights that are 0 stay 0."""
    rounded: Kind | None = None
    """Codes that each kernel is rounded to wherever it is multiplied (quantization-aware)."""
    group: int | None = None
    """Inputs that share a scale; left out, 64, and all of them for int8."""

    freeze = property(lambda self: (r"/kept$",) if self.keep_zeros else ())
    key = "constrained"

    def params(self, params: PyTree, rng: Any = None, stacked: Stack | None = None) -> PyTree:
        def make(name: str, kernel: Any) -> Any:
            shape = jax.ShapeDtypeStruct(kernel.shape, jnp.float32)
            try:  # before anything is read
                jax.eval_shape(lambda w: pack(w, self.rounded or "int8", self.group), shape)
            except ValueError as error:
                raise ValueError(f"parameter {name!r}: {error}") from None
            kept = NotZero(kernel) if rng is None else (kernel != 0).astype(jnp.uint8)
            found = Masked(kernel, kept) if self.keep_zeros else kernel
            return found if self.rounded is None else Rounded(found, self.rounded, self.group)

        if self == Constrain(group=self.group):
            return params
        if not any(re.search(Quantize.targets[0], name) for name in named_leaves(params)):
            raise ValueError(
                "the model has no kernel of attention or MLP that could be masked or rounded, but "
                "packed ones or none: leave that out"
            )
        return put(params, Quantize.targets[0], make)

    def back(self, params: PyTree) -> PyTree:
        return merge(params)

    def rules(self, rules: Rules | Sequence[Rule], shapes: PyTree) -> Rules:
        return kernel_rules(rules, shapes)
