"""A function of whole arrays, run on the pieces that devices hold, with bits that no mesh decides.

The function is traced for whole arrays, and its equations are run one by one. One that treats each
element alone runs on the piece of each device. A sum is one of integers, in any order. Any other
equation that reads a split array reads it whole. A compiler cannot contract, reorder or replace a
floating-point operation, because its result passes a bitwise or with a zero that is known only when
the program runs. So each is rounded by itself, in any fusion and for any length of a piece. Two
such fences make one. (An exclusive or would not do: two of them cancel, for example around a
product by 1, which the compiler removes.)

Approximations, such as ``exp``, are computed on whole arrays, because XLA takes another one for the
elements that fill no vector: ``exp``, ``log`` and ``atan`` of an array differ in their last bits
from those of its pieces (jax 0.10.2 on a CPU; in 0.12 ``atan`` alone does).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxtrain.ops.grouped import TRIPS
from jaxtrain.precision import OPTIMIZER
from jaxtrain.sharding.collectives import all_gather, piece_of
from jaxtrain.sharding.specs import entries_of, names_of
from jaxtrain.tree import PyTree

# Of an equation that calls others, the parameter that has these.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = """
jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint
"""
# Element by element, and without rounding: no compiler can change what these give.
_EXACT = """
abs and ceil clamp convert_element_type copy copy_p eq floor ge gt is_finite le lt max min ne neg
not or population_count round select_n shift_left shift_right_arithmetic shift_right_logical sign
stop_gradient xor
"""
_ROUNDED = "add add_any div integer_pow mul nextafter rem rsqrt sqrt square sub"
_APPROXIMATED = """
acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 lgamma log
log1p logistic pow sin sinh tan tanh
"""
_MOVES = """
argmax argmin broadcast_in_dim concatenate dynamic_slice gather iota pad reshape rev slice sort
squeeze transpose
"""
_NOTHING = "optimization_barrier sharding_constraint"
_CALLS, _EXACT, _ROUNDED, _APPROXIMATED, _MOVES, _NOTHING = (
    frozenset(names.split())
    for names in (_CALLS, _EXACT, _ROUNDED, _APPROXIMATED, _MOVES, _NOTHING)
)
_AGREE = {
    "reduce_max": jax.lax.pmax,
    "reduce_min": jax.lax.pmin,
    "reduce_and": jax.lax.pmin,
    "reduce_or": jax.lax.pmax,
}
# Bits of a part of a number that is summed in parts, and how many of these make no larger integer
# than 32 bits have.
_BITS, _AT_ONCE = 13, 1 << 17

Split = tuple[tuple[int, tuple[str, ...]], ...]


class Piece(NamedTuple):
    """The part of an array that a device has.

    Args:
      x: the part. A dimension of size 1 stands for one along which all elements are the same.
      shape: of the whole array.
      split: the dimensions that mesh axes split, with these axes.
    """

    x: jax.Array
    shape: tuple[int, ...]
    split: Split = ()


def split_of(spec: P, rank: int) -> Split:
    """The dimensions that a spec splits, and the axes.

    >>> split_of(P(None, "fsdp"), 3)
    ((1, ('fsdp',)),)
    """
    entries = map(names_of, entries_of(spec, rank))
    return tuple((d, names) for d, names in enumerate(entries) if names)


def in_pieces(
    function: Callable[..., Any],
    places: Sequence[P],
    returned: Sequence[P],
    slow: dict[str, int],
    zero: Callable[..., jax.Array],
) -> Callable[..., Any]:
    """Makes a function of whole arrays one of the pieces of a device, within a map over mesh axes.

    Args:
      function: of trees.
      places: a spec of axes of the map for each leaf that it is given.
      returned: a spec for each of the first leaves that it returns; the others are whole.
      slow: see :class:`jaxtrain.sharding.collectives.Shards`.
      zero: of the given trees: an int32 that is 0, of which the compiler does not know it.
    """

    def run(*given: PyTree) -> Any:
        leaves, form = jax.tree.flatten(given)
        splits = [split_of(spec, jnp.ndim(x)) for spec, x in zip(places, leaves, strict=True)]
        pieces = [
            Piece(x, _whole_shape(x.shape, s), s) for x, s in zip(leaves, splits, strict=True)
        ]
        shapes = [jax.ShapeDtypeStruct(p.shape, p.x.dtype) for p in pieces]
        closed, made = jax.make_jaxpr(function, return_shape=True)(*form.unflatten(shapes))
        runner = _Runner(slow, zero(*given))
        with jax.named_scope(OPTIMIZER):
            found = runner.run(closed.jaxpr, closed.consts, pieces)
            pairs = zip(found, [*returned, *[P()] * (len(found) - len(returned))], strict=True)
            found = [runner.laid(p, split_of(spec, len(p.shape))) for p, spec in pairs]
        return jax.tree.unflatten(jax.tree.structure(made), found)

    return run


class _Runner:
    """Runs equations on pieces."""

    def __init__(self, slow: dict[str, int], zero: jax.Array):
        self.slow, self.zero = slow, zero

    def run(self, jaxpr: Any, consts: Sequence[Any], pieces: Sequence[Piece]) -> list[Piece]:
        whole = [Piece(x, jnp.shape(x)) for x in map(jnp.asarray, consts)]
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*whole, *pieces), strict=True))

        def read(v: Any) -> Piece:
            if isinstance(v, Literal):
                return Piece(jnp.asarray(v.val, v.aval.dtype), v.aval.shape)
            return known[v]

        for eqn in jaxpr.eqns:
            found = self.equation(jaxpr, eqn, [read(v) for v in eqn.invars])
            known |= zip(eqn.outvars, found, strict=True)
        return [read(v) for v in jaxpr.outvars]

    def equation(self, jaxpr: Any, eqn: Any, given: list[Piece]) -> list[Piece]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            inner = next(params[key] for key in _CALLED if key in params)
            consts = getattr(inner, "consts", ())
            return self.run(getattr(inner, "jaxpr", inner), consts, given)
        if name in _NOTHING:
            return given
        number = name in _APPROXIMATED and not eqn.outvars[0].aval.shape
        if number or name in _EXACT | _ROUNDED:
            return [self.alike(eqn, given)]
        if name == "broadcast_in_dim" and len(given) == 1:
            return [_broadcast(given[0], params["shape"], params["broadcast_dimensions"])]
        if name == "transpose":
            return [_transposed(given[0], params["permutation"])]
        if name == "squeeze":
            axes = params["dimensions"]
            return [_without(given[0], axes, given[0].x.squeeze(axes))]
        if name in _AGREE:
            return [self.agreed(eqn, given[0])]
        if name == "reduce_sum":
            return [self.summed(given[0], params["axes"])]
        if name == "cond":  # however its operands lie: a compiler would round within a branch
            return self.chosen(params["branches"], given)
        return self.of_whole(jaxpr, eqn, given)

    def alike(self, eqn: Any, given: list[Piece]) -> Piece:
        """An equation whose result has at each place what operands have there."""
        shape = eqn.outvars[0].aval.shape
        given = [p if len(p.shape) == len(shape) else _broadcast(p, shape, ()) for p in given]
        split = max((p.split for p in given), key=_parts)
        xs = [self.laid(p, split, spread=False) for p in given]
        local = jnp.broadcast_shapes(*(x.shape for x in xs))
        wide = [x if x.shape == local else jnp.broadcast_to(x, local) for x in xs]
        if eqn.primitive.name == "div":
            # Of one number for all, XLA may multiply by the reciprocal, and then of a piece of one.
            wide[1] = self.sealed(wide[1], like=wide[0])
        x = eqn.primitive.bind(*wide, **eqn.params)
        x = x if eqn.primitive.name in _EXACT else self.sealed(x)
        return Piece(x, tuple(shape), split)

    def sealed(self, x: jax.Array, like: jax.Array | None = None) -> jax.Array:
        """The same number by other operations than those of floating-point numbers; with ``like``,
        one that no compiler knows to be the same at each place."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        cast = functools.partial(jax.lax.bitcast_convert_type, new_dtype=bits)
        zero = self.zero.astype(bits)
        # Shifted, because (x | zero) | (zero & like) is x | zero to a compiler.
        zero = zero if like is None else (zero << 1) & cast(like)
        return jax.lax.bitcast_convert_type(cast(x) | zero, x.dtype)

    def laid(self, piece: Piece, split: Split, *, spread: bool = True) -> jax.Array:
        """What a device has of an array that is split so; dimensions of one number for all are
        spread."""
        x = piece.x
        for d, names in piece.split:
            if (d, names) not in split:
                x = all_gather(x, names, d, self.slow)
        new = [s for s in split if s not in piece.split]
        x = piece_of(x, [(d, names) for d, names in new if x.shape[d] > 1])
        local = _local_shape(piece.shape, split)
        return jnp.broadcast_to(x, local) if spread and x.shape != local else x

    def agreed(self, eqn: Any, piece: Piece) -> Piece:
        """A maximum, a minimum, or whether any or all are true."""
        axes, dtype = eqn.params["axes"], piece.x.dtype
        x = eqn.primitive.bind(piece.x, **eqn.params)
        if across := _across(piece, axes):
            x = _AGREE[eqn.primitive.name](x.astype(jnp.int32) if dtype.kind == "b" else x, across)
        return _without(piece, axes, x.astype(dtype))

    def summed(self, piece: Piece, axes: Sequence[int]) -> Piece:
        """A sum, rounded from integers: those of a number's parts, in units of the largest."""
        axes, across = tuple(axes), _across(piece, axes)
        x, dtype = self.laid(piece, piece.split), piece.x.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            x = x.sum(axes, dtype=dtype)
            return _without(piece, axes, jax.lax.psum(x, across) if across else x)
        wide = jnp.promote_types(dtype, jnp.float32)
        agree = lambda x: jax.lax.pmax(x, across) if across else x  # noqa: E731
        total = integer_sum(x.astype(wide), axes, agree, across)
        return _without(piece, axes, self.sealed(total.astype(dtype)))

    def chosen(self, branches: Sequence[Any], given: list[Piece]) -> list[Piece]:
        """The results of one of some branches, all of which are computed: a device that waits for
        others within one may wait for ever."""
        which, *given = given
        found = [self.run(branch.jaxpr, branch.consts, given) for branch in branches]

        def choose(*each: Piece) -> Piece:
            split = max((p.split for p in each), key=_parts)
            return Piece(
                jax.lax.select_n(which.x, *(self.laid(p, split) for p in each)),
                each[0].shape,
                split,
            )

        return [choose(*each) for each in zip(*found, strict=True)]

    def of_whole(self, jaxpr: Any, eqn: Any, given: list[Piece]) -> list[Piece]:
        """Any other equation, of whole arrays on each device."""
        operands = {v: p for v, p in zip(eqn.invars, given, strict=True) if type(v) is not Literal}
        alone = jaxpr.replace(
            constvars=[],
            invars=list(operands),
            outvars=list(eqn.outvars),
            eqns=[eqn],
            effects=eqn.effects,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        function = jaxpr_as_fun(ClosedJaxpr(alone, []))
        if eqn.primitive.name not in _MOVES:
            function = apart(function, self.zero)
        found = function(*(self.laid(p, ()) for p in operands.values()))
        return [Piece(x, x.shape) for x in found]


def apart(function: Callable[..., Any], zero: jax.Array) -> Callable[..., Any]:
    """Makes a function the body of a loop, which no compiler fuses with what is around it, for its
    single pass is known when it runs alone."""

    def run(*given: Any) -> Any:
        def body(i: jax.Array, carried: Any) -> Any:
            _, own = jax.lax.optimization_barrier((i, carried[0]))
            return carried[0], function(*own)

        made = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, *given))
        with jax.named_scope(f"{TRIPS}1"):
            return jax.lax.fori_loop(0, 1 + zero, body, (given, made))[1]

    return run


def integer_sum(
    x: jax.Array,
    axes: tuple[int, ...],
    agree: Callable[[jax.Array], jax.Array] = lambda top: top,
    across: tuple[str, ...] = (),
) -> jax.Array:
    """Sums floating-point numbers with the same bits in any order and on any number of devices.

    Numbers are cut into parts of 13 bits, in units of a power of two above the largest magnitude,
    and the parts are summed as integers. What is below 2^-39 of the largest (2^-65 in float64) is
    rounded away; a sum with an infinity or a NaN is NaN.

    Args:
      x: float32 or wider.
      axes: dimensions, which the result has not.
      agree: the maximum over what all devices have of one number.
      across: mesh axes over which is summed too, within a map.

    >>> x = jnp.array([2.0**24, 1.0, 1.0, 1.0])
    >>> float(integer_sum(x, (0,)))
    16777220.0
    """
    info, bits = jnp.finfo(x.dtype), jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bias, count = 1 - int(info.minexp), (info.nmant + 16) // _BITS
    power = lambda e: jax.lax.bitcast_convert_type(e << info.nmant, x.dtype)  # noqa: E731
    finite = jnp.isfinite(x)
    top = agree(jnp.where(finite, jnp.abs(x), jnp.inf).max(axes, keepdims=True))
    exponent = jax.lax.bitcast_convert_type(top, bits) >> info.nmant
    unit = jnp.clip(2 * bias - 1 - exponent, 1, 2 * bias - 40)
    rest, parts = jnp.where(finite, x, 0) * power(unit), []
    for number in range(count):
        rest = rest * 2**_BITS
        part = jnp.trunc(rest) if number < count - 1 else jnp.round(rest)
        parts.append(part.astype(jnp.int32))
        rest = rest - part
    left = set(axes)
    while left:
        parts = _carried([_add_some(part, left) for part in parts])
        left = {d for d in left if parts[0].shape[d] > 1}
    if across:
        parts = _carried(list(jax.lax.psum(jnp.stack(parts), across)))
    total = functools.reduce(
        lambda total, part: total * 2**_BITS + part, parts, jnp.zeros_like(top)
    )
    total = total * 2.0 ** (-_BITS * count) * power(2 * bias - unit)
    return jnp.where(jnp.isinf(top), jnp.nan, total).squeeze(axes)


def _add_some(part: jax.Array, axes: set[int]) -> jax.Array:
    """Sums integers of a part along some axes, of as many as fit into 32 bits."""
    if (d := next((d for d in axes if part.shape[d] > _AT_ONCE), None)) is not None:
        padding = [(0, -n % _AT_ONCE if i == d else 0) for i, n in enumerate(part.shape)]
        shape = (*part.shape[:d], -1, _AT_ONCE, *part.shape[d + 1 :])
        return jnp.pad(part, padding).reshape(shape).sum(d + 1)
    now, size = [], 1
    for d in sorted(axes, reverse=True):
        if size * part.shape[d] <= _AT_ONCE:
            now, size = [*now, d], size * part.shape[d]
    return part.sum(now, keepdims=True)


def _carried(parts: list[jax.Array]) -> list[jax.Array]:
    """Parts of 13 bits again, most significant first; two more in front take what is left."""
    over, found = jnp.zeros_like(parts[0]), []
    for part in (*reversed(parts), jnp.zeros_like(parts[0])):
        part = part + over
        over = part >> _BITS
        found.append(part - (over << _BITS))
    return [over, *reversed(found)]


def _parts(split: Split) -> int:
    return math.prod(jax.lax.axis_size(names) for _, names in split)


def _whole_shape(local: Sequence[int], split: Split) -> tuple[int, ...]:
    sizes = {d: jax.lax.axis_size(names) for d, names in split}
    return tuple(n * sizes.get(d, 1) for d, n in enumerate(local))


def _local_shape(whole: Sequence[int], split: Split) -> tuple[int, ...]:
    sizes = {d: jax.lax.axis_size(names) for d, names in split}
    return tuple(n // sizes.get(d, 1) for d, n in enumerate(whole))


def _across(piece: Piece, axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(name for d, names in piece.split if d in axes for name in names)


def _broadcast(piece: Piece, shape: Sequence[int], places: Sequence[int]) -> Piece:
    """The array with more dimensions, along which it is the same."""
    places, new = tuple(places), [1] * len(shape)
    for d, n in zip(places, piece.x.shape, strict=True):
        new[d] = n
    split = tuple((places[d], names) for d, names in piece.split)
    return Piece(piece.x.reshape(new), tuple(shape), split)


def _transposed(piece: Piece, order: Sequence[int]) -> Piece:
    order = tuple(order)
    split = tuple(sorted((order.index(d), names) for d, names in piece.split))
    return Piece(piece.x.transpose(order), tuple(piece.shape[d] for d in order), split)


def _without(piece: Piece, axes: Sequence[int], x: jax.Array) -> Piece:
    """A result without these dimensions, of which none is left split."""
    kept = [d for d in range(len(piece.shape)) if d not in axes]
    split = tuple((kept.index(d), names) for d, names in piece.split if d in kept)
    return Piece(x, tuple(piece.shape[d] for d in kept), split)
