"""Products with kernels: a kernel is an array, or any pytree that says how it is multiplied.

Every dense layer calls :func:`matmul`, the head :func:`matmul_float32`, and a table of tokens is
looked up by :func:`through` too. So a feature of the weights (low-rank additions, quantization) is
a kernel that stands where an array stood: :func:`put` places kernels by path, :func:`kernel_rules`
shards their parts, :func:`merge` makes arrays of them again. Layers stacked in one kernel are
scanned, and a part that is frozen costs no gradient, as with arrays.

Shapes: N tokens, D inputs, F outputs, R rank; ``...`` leading dimensions, such as layers.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.numerics import wide
from jaxtrain.sharding.placement import constrain
from jaxtrain.sharding.rules import PartAxes, Rule, Rules, as_rules
from jaxtrain.sharding.stack import LayerOrder, Stack
from jaxtrain.tree import PyTree, map_kind, map_named, named_leaves, path_name

Axes = Sequence[str | None]
Product = Callable[[jax.Array, Any], jax.Array]


@runtime_checkable
class Kernel(Protocol):
    """Protocol of a pytree that may replace a weight matrix [D, F]."""

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        """Returns ``product(x, kernel)``, of products of ``x`` with arrays and with kernels."""

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        """Returns the logical axes of each part by its name, given those of the whole."""

    def merged(self) -> jax.Array:
        """Returns the array [D, F] that it stands for."""


def matmul(x_ND: jax.Array, kernel_DF: Any) -> jax.Array:
    """Returns ``x @ kernel``, [N, F], for an array or a :class:`Kernel`.

    Callers flatten their tokens to [N, D]: with [B, T, D] the weight's gradient transposes and
    copies on a CPU, at twice the time.
    """
    return apply_kernel(_matmul, x_ND, kernel_DF)


def matmul_float32(x_ND: jax.Array, kernel_DF: Any) -> jax.Array:
    """Multiplies in the operands' dtype and returns the float32 accumulator, [N, F].

    The derivative rounds cotangents to the operands' dtype first: the rule that JAX has for a
    product with ``preferred_element_type`` would multiply float32 by bfloat16, at the speed of
    float32.
    """
    return apply_kernel(_matmul_float32, x_ND, kernel_DF)


def apply_kernel(product: Product, x: jax.Array, kernel: Any) -> jax.Array:
    """Returns ``product(x, kernel)``, where ``product`` is one that takes arrays alone."""
    if _is_kernel(kernel):
        return kernel.multiply(x, lambda x, part: apply_kernel(product, x, part))
    return product(x, kernel)


def add_bias(y_NF: jax.Array, bias_F: jax.Array | None) -> jax.Array:
    """Returns ``y + bias``, added in float32, in the dtype of both; None adds nothing."""
    if bias_F is None:
        return y_NF
    # In bfloat16 the bias's gradient would be rounded after every row that is added to it.
    dtype = jnp.result_type(y_NF, bias_F)
    return (y_NF.astype(wide(dtype)) + bias_F.astype(wide(dtype)).reshape(1, -1)).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """The kernel ``base + scale * a @ b``, which is never formed (Hu et al. 2021, LoRA,
    https://arxiv.org/abs/2106.09685).

    Args:
      base: [..., D, F], an array or another kernel.
      a, b: [..., D, R] and [..., R, F]: the transposes of PEFT's ``lora_A`` and ``lora_B``.
      scale: PEFT's ``lora_alpha / r``.
      factor: [...], what multiplies the scale, of programs to which that is data; None for 1.

    >>> kernel = LowRank(jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), scale=0.5)
    >>> matmul(jnp.ones((1, 2)), kernel)
    Array([[2., 2.]], dtype=float32)
    """

    base: Any
    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})
    factor: jax.Array | None = None

    @property
    def strength(self) -> Any:
        """The scale, and the factor where there is one; [...] or a number."""
        return self.scale if self.factor is None else self.scale * self.factor

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        y = product(x, self.base)
        # Small, so gathered first: XLA's partitioner would permute them among all devices within a
        # branch of a pipeline that not all take, and those that do would wait for ever.
        a, b = (constrain(part, None, None) for part in (self.a, self.b))
        low_NR = (self.strength * product(x, a)).astype(b.dtype)
        return y + matmul_float32(low_NR, b).astype(y.dtype)

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        *lead, inputs, outputs = axes
        a, b = PartAxes((*lead, inputs, None)), PartAxes((*lead, None, outputs))
        parts = {"base": axes, "a": a, "b": b}
        return parts if self.factor is None else parts | {"factor": tuple(lead)}

    def merged(self) -> jax.Array:
        base = merge(self.base)
        a, b = (x.astype(wide(x.dtype)) for x in (self.a, self.b))
        return (base + jnp.expand_dims(self.strength, (-1, -2)) * (a @ b)).astype(base.dtype)

    @property
    def T(self) -> "LowRank":
        """The transpose: a tied head is that of the token table."""
        return LowRank(self.base.T, self.b.T, self.a.T, self.scale, self.factor)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Dora:
    """The kernel ``magnitude * V / |V|`` of ``V = base + scale * a @ b``, which is never formed.

    The norm is that of each output's weights, and has no gradient (Liu et al. 2024, DoRA,
    https://arxiv.org/abs/2402.09353, section 4.3).

    Args:
      low: V.
      magnitude: [..., F], PEFT's ``lora_magnitude_vector``; :func:`norms` of the base at first.
    """

    low: LowRank
    magnitude: Any

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        y = self.low.multiply(x, product)
        low = jax.lax.stop_gradient(self.low)
        a, b = (constrain(part, None, None) for part in (low.a, low.b))
        squares_F = jnp.square(merge(low.base).astype(wide(a.dtype))).sum(0)
        # |W + s a b|^2 without its D F numbers.
        mixed_RF = 2 * matmul_float32(a.T, low.base) + low.strength * matmul_float32(a.T @ a, b)
        squares_F += low.strength * (b * mixed_RF).sum(0)
        return (y * (self.magnitude / jnp.sqrt(squares_F))).astype(y.dtype)

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        *lead, _, outputs = axes
        return {"low": axes, "magnitude": PartAxes((*lead, outputs))}

    def merged(self) -> jax.Array:
        v = self.low.merged()
        scale = self.magnitude / norms(v)
        return (v * scale[..., None, :]).astype(v.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Norms:
    """The norms of a kernel of weights that are read when they are asked for, layer by layer."""

    base: Any
    dtype = np.dtype(np.float32)
    shape = property(lambda self: (*self.base.shape[:-2], self.base.shape[-1]))

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        *lead, outputs = (slice(*i.indices(n)) for i, n in zip(index, self.shape, strict=True))
        out = np.empty([i.stop - i.start for i in (*lead, outputs)], self.dtype)
        for place in np.ndindex(*out.shape[:-1]):
            at = tuple(
                slice(i.start + p, i.start + p + 1) for i, p in zip(lead, place, strict=True)
            )
            whole = lambda part, at=at: part[(*at, *[slice(None)] * (len(part.shape) - len(at)))]  # noqa: E731
            layer = jax.tree.map(lambda part, of=whole: jnp.asarray(of(part)), self.base)
            out[place] = np.asarray(norms(layer)).reshape(-1)[outputs]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)

    def cut(self, order: LayerOrder) -> "_Norms":
        """Returns the norms as a :class:`jaxtrain.Stack` cuts them."""
        return _Norms(jax.tree.map(order.split, self.base))


def norms(kernel: Any) -> Any:
    """Returns the norm [..., F] of each output's weights in a kernel [..., D, F]; of one that is
    yet to be read, what is read later."""
    if all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(kernel)):
        whole = merge(kernel)
        return jnp.sqrt(jnp.square(whole.astype(wide(whole.dtype))).sum(-2))
    return _Norms(kernel)


def low_rank(
    params: PyTree,
    pattern: str,
    *,
    rank: int,
    alpha: float,
    rng: jax.Array | None,
    stacked: Stack | None = None,
) -> PyTree:
    """Puts :class:`LowRank` kernels in the place of kernels, as PEFT's LoRA begins.

    ``a`` is uniform within ``1 / sqrt(D)``, ``b`` is 0, so that nothing changes at first. Give
    ``freeze=(r"^(?!.*/(a|b)$)",)`` to :func:`jaxtrain.make_optimizer` to train these alone.

    Args:
      params: the parameters, in natural order or cut.
      pattern: a regex found in the paths of the kernels: ``r"/(q|v)/kernel$"``.
      rank: R.
      alpha: the added product is scaled by ``alpha / rank``.
      rng: a key, from which each kernel takes one by its path; None leaves out ``a`` and ``b``, for
        ``init_state(params=)``, and leaves may be weights that are yet to be read.
      stacked: which parameters are stacked by layer; those under ``blocks`` by default.

    Raises:
      ValueError: where nothing matches, or something that is no matrix; for ``rank`` below 1.

    >>> params = {"blocks": {"q": {"kernel": jnp.ones((3, 4, 6))}}}
    >>> named = named_leaves(low_rank(params, "q", rank=2, alpha=4, rng=jax.random.key(0)))
    >>> {name: leaf.shape for name, leaf in named.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'blocks/q/kernel/base': (3, 4, 6), 'blocks/q/kernel/a': (3, 4, 2),
     'blocks/q/kernel/b': (3, 2, 6)}
    """
    if rank < 1:
        raise ValueError(f"`rank` is {rank}: use 1 or more")
    stacked = stacked or Stack()

    def make(name: str, base: jax.Array) -> LowRank:
        lead = stacked.lead if stacked.holds(name) else 0
        if len(base.shape) != lead + 2:
            raise ValueError(
                f"parameter {name!r} has shape {base.shape}, of which {lead} axes are layers, and "
                f"is no matrix: narrow the pattern {pattern!r}"
            )
        if rng is None:
            return LowRank(base, None, None, alpha / rank)
        *layers, D, F = base.shape
        key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
        bound = D**-0.5
        a = jax.random.uniform(key, (*layers, D, rank), minval=-bound, maxval=bound)
        return LowRank(base, a, jnp.zeros((*layers, rank, F)), alpha / rank)

    return put(params, pattern, make)


def put(params: PyTree, pattern: str, make: Callable[[str, jax.Array], Any]) -> PyTree:
    """Puts ``make(path, leaf)`` in the place of every leaf whose path the regex is found in.

    Raises:
      ValueError: where that is none.
    """
    names = list(named_leaves(params))
    if not any(re.search(pattern, name) for name in names):
        raise ValueError(
            f"pattern {pattern!r} matches no parameter; there are {', '.join(names)}: correct it"
        )
    return map_named(
        lambda name, leaf: make(name, leaf) if re.search(pattern, name) else leaf, params
    )


def merge(params: PyTree) -> PyTree:
    """Returns parameters with arrays in the place of all kernels, each in the dtype of its base."""
    return map_kind(Kernel, lambda x: x.merged(), params)


def kernel_rules(rules: Rules | Sequence[Rule] | None, params: PyTree) -> Rules:
    """Returns sharding rules in which each rule of a kernel's path is one for each of its parts.

    Args:
      rules: written for a model whose kernels are arrays.
      params: parameters with kernels among them; shapes suffice. Parts of a kernel without a rule
        are sharded as any parameter without one.

    >>> kernel = LowRank(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.ones((1, 3)), 1.0)
    >>> for rule in kernel_rules([("^w$", ("embed", "mlp"))], {"w": kernel}).params:
    ...     print(*rule)
    ^w/base(/|$) ('embed', 'mlp')
    ^w/a(/|$) ('embed', None)
    ^w/b(/|$) (None, 'mlp')
    """
    rules, parts, idle = as_rules(rules), [], set()
    for name, kernel in _kernels("", params):
        rule = next((rule for rule in rules.params if re.search(rule[0], name)), None)
        if rule is not None:
            parts += _rules_of(name, kernel, rule[1])
            idle.add(rule[0])
    idle = {p for p in idle if not any(re.search(p, name) for name in named_leaves(params))}
    kept = (rule for rule in rules.params if rule[0] not in idle)
    return dataclasses.replace(rules, params=type(rules.params)((*parts, *kept)))


def copies(kernel: Any, count: int, *, axes: Axes) -> Any:
    """Returns a kernel [..., D, F] ``count`` times, stacked: one for each shard of the tokens.

    ``axes`` are the logical axes of the whole; what they leave out is gathered.
    """
    rules = _rules_of("", kernel, axes)

    def stack(name: str, part: jax.Array) -> jax.Array:
        of = next(of for pattern, of in rules if re.search(pattern, name and f"/{name}"))
        return constrain(jnp.broadcast_to(part, (count, *part.shape)), "tokens", *of)

    return map_named(stack, kernel)


def _rules_of(name: str, kernel: Any, axes: Axes) -> list[Rule]:
    if not axes or not _is_kernel(kernel):
        return [(f"^{re.escape(name)}(/|$)", axes)]
    parts = (
        (f"{name}/{part}", getattr(kernel, part), of) for part, of in kernel.axes(axes).items()
    )
    return [rule for part in parts for rule in _rules_of(*part)]


def _kernels(name: str, tree: PyTree) -> Iterator[tuple[str, Kernel]]:
    """Kernels by path, and behind each those among its parts."""
    inner = lambda x: x is not tree and _is_kernel(x)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=inner):
        if _is_kernel(leaf):
            own = f"{name}/{path_name(path)}".removeprefix("/")
            yield own, leaf
            yield from _kernels(own, leaf)


def _is_kernel(x: Any) -> bool:
    return isinstance(x, Kernel)


def _matmul(x_ND: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(x_ND.dtype, kernel_DF.dtype)
    contracted = (((x_ND.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x_ND.astype(dtype), kernel_DF.astype(dtype), contracted)


@jax.custom_jvp
def _matmul_float32(x_ND: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    return jnp.matmul(x_ND, kernel_DF, preferred_element_type=wide(x_ND.dtype))


@_matmul_float32.defjvp
def _matmul_float32_jvp(primals, tangents):
    (x_ND, kernel_DF), (d_x_ND, d_kernel_DF) = primals, tangents
    out_NF = _matmul_float32(x_ND, kernel_DF)
    return out_NF, (d_x_ND @ kernel_DF + x_ND @ d_kernel_DF).astype(out_NF.dtype)
