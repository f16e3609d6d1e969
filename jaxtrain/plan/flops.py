"""Floating-point operations of a function, counted exactly from its jaxpr."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Flops:
    """What a traced function multiplies.

    Matrix products and convolutions alone, at two operations per multiplication and addition, over
    all devices. What a backward pass computes again is counted; a ``cond`` counts as its largest
    branch.

    Args:
      by_dtype: operations by dtype of the operands (the wider one where they differ).
      unknown_loops: ``while`` loops, whose bodies are counted once.
      fused: calls of kernels that cannot be looked into, by name, not counted.
      kernels: calls of Pallas kernels, of which every tile is counted, also those that the kernel
        finds masked and skips (in causal attention almost half).
    """

    by_dtype: Mapping[str, float]
    unknown_loops: int = 0
    fused: tuple[str, ...] = ()
    kernels: int = 0

    @property
    def total(self) -> float:
        """Over all dtypes."""
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
    return Flops(by_dtype, counter.loops, tuple(sorted(counter.fused)), counter.kernels)


def count_equation(equation: Any) -> Mapping[str, float]:
    """Counts those of one call in a jaxpr, by dtype."""
    times, counter = _times(equation), _Counter()
    counts = (counter.count(body) for body in bodies(equation))
    total: collections.Counter = sum(counts, collections.Counter())
    return {key: times * value for key, value in total.items()}


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


class _Counter:
    def __init__(self):
        self.loops = self.kernels = 0
        self.fused: set[str] = set()

    def count(self, jaxpr: Any) -> collections.Counter:
        total: collections.Counter = collections.Counter()
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = eqn.primitive.name
            if name == "dot_general":
                total[_dtype(eqn)] += _product(eqn)
            elif name == "conv_general_dilated":
                total[_dtype(eqn)] += _convolution(eqn)
            elif name == "cond":
                total += max(
                    (self.count(branch) for branch in eqn.params["branches"]),
                    key=lambda count: count.total(),
                )
            else:
                inner = [self.count(body) for body in bodies(eqn)]
                self.loops += name == "while"
                self.kernels += name == "pallas_call"
                if name.startswith("dot_product_attention"):
                    self.fused.add(name)
                for count in inner:
                    times = _times(eqn)
                    total.update({key: times * value for key, value in count.items()})
        return total


def _times(eqn: Any) -> int:
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
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


def _product(eqn: Any) -> float:
    a, b = (v.aval.shape for v in eqn.invars[:2])
    (contract_a, contract_b), (_, batch_b) = eqn.params["dimension_numbers"]
    del contract_a
    columns = [n for d, n in enumerate(b) if d not in (*contract_b, *batch_b)]
    return 2.0 * math.prod(a) * math.prod(columns)


def _convolution(eqn: Any) -> float:
    out, kernel = eqn.outvars[0].aval.shape, eqn.invars[1].aval.shape
    # The kernel's input features are those of one group already.
    features_out = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(out) * math.prod(kernel) / features_out
