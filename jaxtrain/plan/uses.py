"""What a traced step does with its values: which are only moved, which only matrix products read.

The TPU compiler runs a float32 product of default precision on operands rounded to bfloat16. An
array that nothing else reads it keeps rounded: of a layer's residuals that is the output of a norm
or the hidden state of an MLP, half the bytes of what the jaxpr says.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.plan.flops import bodies

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
    wide: set = set()
    _mark(jaxpr, wide, [True] * len(jaxpr.outvars))
    return frozenset(wide)


def _mark(jaxpr: Any, wide: set, results: list[bool]) -> None:
    """Adds the variables of one jaxpr, of whose results some are read widely."""

    def read(atoms, widely):
        wide.update(a for a, w in zip(atoms, widely, strict=True) if w and not hasattr(a, "val"))

    read(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        name, params = equation.primitive.name, equation.params
        read_widely = [True] * len(equation.invars)
        if name == "dot_general":
            read_widely = [not _rounds(equation)] * len(equation.invars)
        elif name in MOVES and len(equation.invars) == len(equation.outvars):
            read_widely = [v in wide for v in equation.outvars]
        elif name in CALLS and CALLS[name] in params:
            inner = getattr(params[CALLS[name]], "jaxpr", params[CALLS[name]])
            _mark(inner, wide, [v in wide for v in equation.outvars])
            read_widely = [v in wide for v in inner.invars]
        elif name == "scan":
            inner, consts, carry = params["jaxpr"].jaxpr, params["num_consts"], params["num_carry"]
            stacked = [v in wide for v in equation.outvars[carry:]]
            _mark(inner, wide, [True] * carry + stacked)
            read_widely = [v in wide for v in inner.invars]
            read_widely[consts : consts + carry] = [True] * carry
        else:
            for body in bodies(equation):
                inner = getattr(body, "jaxpr", body)
                _mark(inner, wide, [True] * len(inner.outvars))
        read(equation.invars, read_widely)


def _rounds(equation: Any) -> bool:
    precision = equation.params["precision"]
    default = precision is None or all(p == jax.lax.Precision.DEFAULT for p in precision)
    return default and all(v.aval.dtype == jnp.float32 for v in equation.invars)
