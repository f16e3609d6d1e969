"""Quantize, the change that holds kernels which do not train in 4 or 8 bits.

Under the additions of :class:`jaxtrain.finetune.low_rank.LoRA` that is QLoRA (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314).
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxtrain.finetune.change import Change
from jaxtrain.ops.linear import Dora, kernel_rules, norms, put
from jaxtrain.ops.packed import Kind, Packed, pack, pack_later
from jaxtrain.sharding.rules import Rule, Rules
from jaxtrain.sharding.stack import Stack
from jaxtrain.tree import PyTree, is_a, map_kind


@dataclasses.dataclass(frozen=True)
class Quantize(Change):
    """Packed kernels in the place of arrays, which do not train; applied after LoRA, they are the
    bases of its additions. Weights that are yet to be read are packed as they are read."""

    kind: Kind | None = None
    """Codes of the kernels, such as nf4; left out, all stay as they are."""
    group: int | None = None
    """Inputs that share a scale; left out, 64, and all of them for int8."""
    targets: tuple[str, ...] = ("/(attn|cross|mlp)/.*kernel((/low)?/base)?$",)
    """Regexes found in the paths of kernels."""
    keep: tuple[str, ...] = ()
    """Regexes of the paths of kernels that stay as they are, such as those that train."""

    key = "quantized"

    def params(self, params: PyTree, rng: Any = None, stacked: Stack | None = None) -> PyTree:
        if self.kind is None:
            return params

        def make(name: str, kernel: Any) -> Any:
            if any(re.search(pattern, name) for pattern in self.keep):
                return kernel
            try:
                return (pack_later if rng is None else pack)(kernel, self.kind, self.group)
            except ValueError as error:
                raise ValueError(f"parameter {name!r}: {error}") from None

        params = put(params, "|".join(f"(?:{x})" for x in self.targets), make)
        # DoRA begins with the norms of what it multiplies.
        return map_kind(Dora, lambda x: Dora(x.low, norms(x.low.base)), params)

    def freeze(self, params: PyTree) -> PyTree:
        """Returns the mask of what stays: the parts of packed kernels."""
        is_packed = is_a(Packed)
        of = lambda x: jax.tree.map(lambda _: is_packed(x), x)  # noqa: E731
        return jax.tree.map(of, params, is_leaf=is_packed)

    def rules(self, rules: Rules | Sequence[Rule], shapes: PyTree) -> Rules:
        return kernel_rules(rules, shapes)
