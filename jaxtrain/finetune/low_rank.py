"""LoRA, the change that trains low-rank additions to kernels, which stay themselves.

Hu et al. 2021, https://arxiv.org/abs/2106.09685; the scale alpha / sqrt(rank) is that of
Kalajdzievski 2023, https://arxiv.org/abs/2312.03732, and DoRA is Liu et al. 2024,
https://arxiv.org/abs/2402.09353.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxtrain.finetune.change import Change
from jaxtrain.ops.linear import Dora, Kernel, LowRank, kernel_rules, low_rank, merge, norms
from jaxtrain.ops.packed import Packed
from jaxtrain.optim import masks
from jaxtrain.sharding.rules import Rule, Rules
from jaxtrain.sharding.stack import Stack
from jaxtrain.tree import PyTree, map_kind, map_named, named_leaves, named_nodes, nodes_of


@dataclasses.dataclass(frozen=True)
class LoRA(Change):
    """Low-rank additions to kernels, which train in their place; at first they change nothing."""

    rank: int | None = None
    """Rank of the additions, such as 16; left out, there are none."""
    targets: tuple[str, ...] = ("/(attn|cross|mlp)/.*kernel$",)
    """Regexes found in the paths of kernels, of which the first that matches decides; q/kernel$=8
    has a rank of its own."""
    alpha: float = 32.0
    """Additions are scaled by alpha / rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA)."""
    dora: bool = False
    """Train the norm of each output's weights apart from their direction (DoRA)."""
    train: tuple[str, ...] = ()
    """Regexes of the paths of other parameters that train, such as ^head/ or norm."""

    flops: ClassVar = (2 / 3, ", two thirds of it where weights have no gradient")
    key = "low_rank"

    def params(self, params: PyTree, rng: Any = None, stacked: Stack | None = None) -> PyTree:
        stack = stacked or Stack()
        ranks = {name: len(x.shape) - stack.holds(name) for name, x in named_leaves(params).items()}
        left = [name for name, ndim in ranks.items() if ndim == 2]
        for target in self.targets if self.rank is not None else ():
            pattern, _, own = target.rpartition("=")
            has_own = pattern and own.isdecimal()
            pattern, rank = (pattern, int(own)) if has_own else (target, self.rank)
            if not (found := [name for name in left if re.search(pattern, name)]):
                raise ValueError(
                    f"`targets` has {target!r}, which finds none of the model's kernels "
                    f"{', '.join(left)}: correct it"
                )
            left = [name for name in left if name not in found]
            alpha = self.alpha * max(rank, 1) ** (0.5 if self.rank_stabilized else 0)
            how = {"rank": rank, "alpha": alpha, "rng": rng, "stacked": stack}
            params = low_rank(params, f"^({'|'.join(map(re.escape, found))})$", **how)
            if self.dora and (tables := [name for name in found if not name.endswith("kernel")]):
                raise ValueError(
                    f"`targets` has {target!r}, which finds {tables[0]!r}: DoRA is for kernels of "
                    "dense layers; narrow it"
                )
        decomposed = lambda kernel: Dora(kernel, norms(kernel.base))  # noqa: E731
        return map_kind(LowRank, decomposed, params) if self.dora else params

    def freeze(self, params: PyTree) -> PyTree:
        """Returns the mask of what stays: all but the additions and what ``train`` names."""
        added = {f"{name}/{x}" for name in named_nodes(LowRank, params) for x in "ab"}
        added |= {name for name in named_leaves(params) if name.endswith("/magnitude")}
        masks.check_matches("train", self.train, params)
        trains = lambda name: name in added or any(re.search(p, name) for p in self.train)  # noqa: E731
        return map_named(lambda name, _: not trains(name), params)

    def back(self, params: PyTree) -> PyTree:
        """Returns merged parameters; additions to packed kernels stay, which dense would take eight
        times the memory where a run samples from what it trains."""
        return map_kind(Kernel, lambda x: x if nodes_of(Packed, x) else merge(x), params)

    def rules(self, rules: Rules | Sequence[Rule], shapes: PyTree) -> Rules:
        return kernel_rules(rules, shapes)


class Strengths(LoRA):
    """The same with the scale of each addition as a leaf beside it, which is data to a program in
    which several have others."""

    def params(self, params: PyTree, rng: Any = None, stacked: Stack | None = None) -> PyTree:
        def opened(x: LowRank) -> LowRank:
            factor = None if rng is None else jnp.full(x.a.shape[:-2], x.scale)
            return dataclasses.replace(x, scale=1.0, factor=factor)

        return map_kind(LowRank, opened, super().params(params, rng, stacked))
