"""Floating-point operations of a function, counted exactly from its jaxpr."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.ops.attention import shares_of
from jaxtrain.ops.grouped import heat_of, trips_of

# Primitives without a product: element by element, moved, reduced, drawn, or exchanged. What is in
# no list is named in the plan and never free.
_CHEAP = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg
nextafter not one_minus_square or polygamma polynomial population_count pow real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta

broadcast_in_dim concatenate dynamic_slice dynamic_update_slice empty empty2 expand_dims gather
iota pad reshape rev scatter scatter-add scatter_add scatter_max scatter_min scatter_mul
scatter_sub select_and_gather_add select_and_scatter select_and_scatter_add slice split squeeze
stack tile transpose unstack

approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and
reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max
reduce_window_min reduce_window_sum reduce_xor sort top_k

random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
random_wrap rng_bit_generator rng_uniform threefry2x32

after_all all_gather all_gather_invariant all_gather_reduced all_to_all axis_index create_token
custom_lin dce_sink debug_callback debug_print device_put mesh_cast name optimization_barrier
pbroadcast pcast pmax pmin ppermute psum psum2 psum_invariant psum_scatter pvary
ragged_all_to_all reduce_scatter reshard sharding_constraint stage
"""
CHEAP = frozenset(_CHEAP.split())


@dataclasses.dataclass(frozen=True)
class Flops:
    """The floating-point operations of a traced function, over all devices.

    Only matrix products and convolutions count, at two operations per multiplication and addition.
    Recomputation in a backward pass is counted. A ``cond`` counts as its largest branch, or as the
    mean of them where :func:`jaxtrain.ops.attention.branch_shares` says how often each is taken.
    The loop over an expert's tokens counts as where tokens are spread evenly.

    Args:
      by_dtype: operations by dtype of the operands (the wider one where they differ).
      unknown_loops: other ``while`` loops, whose bodies are counted once.
      unknown: primitives that nothing here knows (factorisations, calls of foreign code), by name;
        each counts one float32 operation per element that it reads or writes.
      kernels: calls of Pallas kernels and of cuDNN's attention, of which every tile is counted,
        also those that the kernel finds masked and skips (in causal attention almost half).
    """

    by_dtype: Mapping[str, float]
    unknown_loops: int = 0
    unknown: tuple[str, ...] = ()
    kernels: int = 0

    @property
    def total(self) -> float:
        """Operations over all dtypes."""
        return sum(self.by_dtype.values())


def count_flops(function: Callable[..., Any], *args: Any) -> Flops:
    """Counts the floating-point operations of ``function(*args)`` without running it.

    Args:
      function: anything JAX can trace.
      *args: its arguments; shapes suffice.

    >>> a, b = jnp.ones((2, 3)), jnp.ones((3, 5))
    >>> count_flops(lambda a, b: a @ b, a, b).total
    60.0
    """
    return count_jaxpr(jax.make_jaxpr(function)(*args))


def count_jaxpr(jaxpr: Any) -> Flops:
    """Counts the floating-point operations of a jaxpr."""
    counter = _Counter()
    by_dtype = dict(counter.count(jaxpr))
    return Flops(by_dtype, counter.loops, tuple(sorted(counter.unknown)), counter.kernels)


def count_equation(equation: Any) -> tuple[Mapping[str, float], set[str]]:
    """Counts the FLOPs of one equation by dtype; also names primitives of unknown cost."""
    counter = _Counter()
    return counter.equation(equation), counter.unknown


def bodies(eqn: Any) -> list[Any]:
    """The jaxprs inside of an equation: of calls, loops, branches and kernels."""
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        # The function itself; its rules have run where it was differentiated.
        body = eqn.params.get("call_jaxpr")
        return [] if body is None else [body]
    found = []
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                found.append(inner)
    return found


def mean_trips(eqn: Any) -> int | None:
    """Returns how often the body of a ``while`` runs in the mean; None if not stated."""
    return trips_of(_scopes(eqn))


def heat(eqn: Any) -> float:
    """Returns :func:`jaxtrain.ops.grouped.heat_of` of a ``while``."""
    return heat_of(_scopes(eqn))


def _scopes(eqn: Any) -> str:
    return str(getattr(getattr(eqn, "source_info", None), "name_stack", ""))


def branch_shares_of(eqn: Any) -> list[float] | None:
    """Returns the share of calls that take each branch of a ``cond``; None if not stated."""
    shares = shares_of(_scopes(eqn))
    return shares if shares and len(shares) == len(eqn.params["branches"]) else None


def product_flops(eqn: Any) -> float:
    """Counts the operations of a ``dot_general`` or a ``ragged_dot_general``.

    A ragged product multiplies each row with the matrix of its own group: the groups do not count.
    """
    a, b = (v.aval.shape for v in eqn.invars[:2])
    _, contracted, batch, groups = product_dimensions(eqn)
    outside = {*contracted[1], *batch[1], *groups}
    return 2.0 * math.prod(a) * math.prod(n for d, n in enumerate(b) if d not in outside)


def product_dimensions(eqn: Any) -> tuple[Any, Any, Any, tuple[int, ...]]:
    """The dimensions of a product by what becomes of them.

    Returns:
      Those that only the operands' own rows have, that are contracted, and that are in both, each
      as a pair (left, right); and those of the right operand that number its groups.
    """
    numbers, groups = eqn.params.get("dimension_numbers"), ()
    if numbers is None:
        ragged = eqn.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, tuple(ragged.rhs_group_dimensions)
    contracted, batch = numbers
    rows = [
        [d for d in range(v.aval.ndim) if d not in (*c, *b)]
        for v, c, b in zip(eqn.invars, contracted, batch, strict=False)
    ]
    return (rows[0], [d for d in rows[1] if d not in groups]), contracted, batch, groups


class _Counter:
    def __init__(self):
        self.loops = self.kernels = 0
        self.unknown: set[str] = set()

    def count(self, jaxpr: Any) -> collections.Counter:
        total: collections.Counter = collections.Counter()
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            total.update(self.equation(eqn))
        return total

    def equation(self, eqn: Any) -> collections.Counter:
        name = eqn.primitive.name
        if name in ("dot_general", "ragged_dot_general"):
            return collections.Counter({_dtype(eqn): product_flops(eqn)})
        if name == "conv_general_dilated":
            return collections.Counter({_dtype(eqn): _convolution(eqn)})
        if name.startswith("dot_product_attention"):
            self.kernels += 1
            return collections.Counter({_dtype(eqn): _attention(eqn)})
        if name == "cond":
            counts = [self.count(branch) for branch in eqn.params["branches"]]
            shares = branch_shares_of(eqn)
            if shares is None:
                return max(counts, key=lambda count: count.total())
            total = collections.Counter()
            for share, count in zip(shares, counts, strict=True):
                total.update({dtype: share * flops for dtype, flops in count.items()})
            return total
        total: collections.Counter = collections.Counter()
        known = set(self.unknown)
        for body in bodies(eqn):
            total.update(self.count(body))
        self.loops += name == "while" and mean_trips(eqn) is None
        if name == "pallas_call":
            self.kernels += 1
            self.unknown = known  # what moves a kernel's tiles multiplies nothing
        elif name not in CHEAP and not bodies(eqn):
            self.unknown.add(name)
            total["float32"] += sum(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
        times = _times(eqn)
        return collections.Counter({key: times * value for key, value in total.items()})


def _times(eqn: Any) -> int:
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "while":
        trips = mean_trips(eqn)
        return 1 if trips is None else trips
    if eqn.primitive.name == "pallas_call":
        return math.prod(eqn.params["grid_mapping"].grid)
    if eqn.primitive.name == "shard_map":
        # The body is what one device does along the axes that are mapped.
        mesh = eqn.params["mesh"]
        axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", mesh.axis_names))
        return math.prod(mesh.shape[axis] for axis in axes)
    return 1


def _dtype(eqn: Any) -> str:
    return max((v.aval.dtype for v in eqn.invars[:2]), key=lambda d: jnp.dtype(d).itemsize).name


def _attention(eqn: Any) -> float:
    """Counts cuDNN's attention: two products forward; scores again and four gradients backward."""
    (B, T, H, K), S = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[1]
    return 2.0 * B * T * S * H * K * (5 if "bwd" in eqn.primitive.name else 2)


def _convolution(eqn: Any) -> float:
    out, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
    # The kernel's input features are those of one group already.
    features_out = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(out) * math.prod(kernel) / features_out
