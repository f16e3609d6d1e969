"""What a traced step does with its values: which are only moved, which only matrix products read.

The TPU compiler runs a float32 product of default precision on operands rounded to bfloat16. An
array that nothing else reads it keeps rounded: of a layer's residuals that is the output of a norm
or the hidden state of an MLP, half the bytes of what the jaxpr says.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.planning.flops import bodies

# Part of what reads them: data is moved, or seen in another shape.
MOVES = frozenset(
    [
        *("reshape", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "split"),
        *("rev", "copy", "copy_p", "sharding_constraint", "name", "reduce_precision"),
        *("optimization_barrier", "stop_gradient"),
    ]
)
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
}


def wide_variables(jaxpr: Any) -> frozenset:
    """The variables, at all depths, that anything but a rounding product reads.

    Args:
      jaxpr: of a step. Its own results count as read.

    Returns:
      Variables; a float32 one outside of these loses nothing by being kept in bfloat16.
    """
    return _trace_back(jaxpr, lambda equation: not _rounds(equation), MOVES, results=True)


def kernel_operands(jaxpr: Any) -> frozenset:
    """The variables, at all depths, that a Pallas kernel reads as they lie.

    The TPU compiler lays these out row by row in tiles; another layout would be a copy.
    """
    keep = frozenset(
        [
            *("copy", "copy_p", "name", "optimization_barrier", "sharding_constraint"),
            *("dynamic_slice", "squeeze"),
        ]
    )
    return _trace_back(jaxpr, lambda e: e.primitive.name == "pallas_call", keep, results=False)


def read_inside(body: Any) -> frozenset:
    """The variables of a loop's body, at all depths, that its own equations read.

    Others only leave it, moved and converted at most: gradients of weights, of a loop over layers.
    """
    through = MOVES | {"convert_element_type"}
    return _trace_back(body, lambda e: e.primitive.name not in through, through, results=False)


def _trace_back(
    jaxpr: Any, counts: Callable[[Any], bool], through: frozenset, *, results: bool
) -> frozenset:
    """The variables that an equation reads which counts, directly or through moves and calls."""
    found: set = set()
    _mark(jaxpr, found, [results] * len(jaxpr.outvars), counts, through)
    return frozenset(found)


def _mark(jaxpr: Any, found: set, results: list[bool], counts: Callable, through: frozenset):
    """Adds the variables of one jaxpr; ``results`` says which of its results do."""

    def add(atoms, flags):
        found.update(a for a, f in zip(atoms, flags, strict=True) if f and not hasattr(a, "val"))

    def mark(body, flags):
        inner = getattr(body, "jaxpr", body)
        _mark(inner, found, flags, counts, through)
        return [v in found for v in inner.invars]

    add(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        name, params, count = equation.primitive.name, equation.params, counts(equation)
        outputs = [v in found for v in equation.outvars]
        read = [count] * len(equation.invars)
        if name in through and len(equation.outvars) == 1:
            read = outputs * len(equation.invars)
        elif name in through and len(equation.invars) == len(equation.outvars):
            read = outputs
        elif name in CALLS and CALLS[name] in params:
            read = mark(params[CALLS[name]], outputs)
        elif name == "shard_map":
            read = mark(params["jaxpr"], outputs)
        elif name == "scan":
            carry = params["num_carry"]
            read = mark(params["jaxpr"], [count] * carry + outputs[carry:])
        elif name == "cond":
            branches = [mark(b, outputs) for b in params["branches"]]
            read = [count, *(any(flags) for flags in zip(*branches, strict=True))]
        elif name != "pallas_call":
            for body in bodies(equation):
                mark(body, [count] * len(getattr(body, "jaxpr", body).outvars))
        add(equation.invars, read)


def _rounds(equation: Any) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    precision = equation.params["precision"]
    default = precision is None or all(p == jax.lax.Precision.DEFAULT for p in precision)
    return default and all(v.aval.dtype == jnp.float32 for v in equation.invars)
