"""Every value that a traced program computes, as the compiled program computes it.

A jaxpr is run again with its intermediate values as further results. Calls are run in place. A
value inside a ``scan`` comes back stacked over the iterations, and one inside a ``shard_map``
stacked over the devices of the axes that the map takes over, so each device's own number is there.
All branches of a ``cond`` run, and the one that is taken gives its result. The bodies of ``while``
and of kernels stay closed: their results alone are recorded. All values are in memory at once, so a
program is to be small.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxtrain.planning.walk import inner_jaxpr, scan_operands
from jaxtrain.tree import key_data


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a recorded program.

    Args:
      name: the primitive that gave it, or "argument", "constant", "literal"; "enter" and "exit" at
        the bounds of a ``shard_map``; "carry", "element", "result" and "stack" at those of a loop;
        "branch" for the result of a ``cond``.
      equations: the equation and those that it lies in, from the inside out.
      inputs: the values that it was computed from.
      data: a tracer while the program is traced, then an array
        [devices by axis..., iterations..., *shape] on the host.
      aval: the shape and dtype on one device.
      output: which of the equation's results it is.
      lead: the stacks that it lies in, from the outside in: sizes by mesh axis, None for a loop.
      depth: how many dimensions these stacks have; a map's axes share one.
      taken: for a value in a branch, the choice of the branch, and which choice is its own.
      number: its place in the program.
    """

    name: str
    equations: tuple[Any, ...]
    inputs: tuple["Value", ...]
    data: Any
    aval: Any
    output: int = 0
    lead: tuple[tuple[str | None, int], ...] = ()
    depth: int = 0
    taken: tuple["Value", int] | None = None
    number: int = -1

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes over which there is one value for each device."""
        return {axis: size for axis, size in self.lead if axis is not None}

    @property
    def loops(self) -> tuple[int, ...]:
        """Iterations of the loops that the value is in, from the outside in."""
        return tuple(size for axis, size in self.lead if axis is None)


def record(
    jaxpr: ClosedJaxpr,
    runs: Sequence[Sequence[Any]],
    *,
    context: Callable[[], Any] = contextlib.nullcontext,
    compiler_options: dict[str, Any] | None = None,
) -> tuple[list[Value], list[Value], list[list[np.ndarray]]]:
    """Runs a program and returns its values.

    Args:
      runs: its arguments, placed where they belong; several runs of the same shapes.
      context: entered for tracing.

    Returns:
      All values in order, with the data of the first run; those of them that are the results; and
      the data of the other runs, in the order of all values.
    """
    recorder = _Recorder()

    def program(*args):
        recorder.values.clear()
        given = [recorder.add("argument", (), (), x, x.aval, i) for i, x in enumerate(args)]
        recorder.results = recorder.run(jaxpr.jaxpr, jaxpr.consts, given, ())
        return [key_data(value.data) for value in recorder.values]

    with context():
        compiled = jax.jit(program).lower(*runs[0]).compile(compiler_options or {})
    found = [[np.asarray(x) for x in jax.device_get(compiled(*args))] for args in runs]
    for number, value in enumerate(recorder.values):
        value.number = number
        for data in found:
            data[number] = _devices_first(value, data[number])
        value.data = found[0][number]
    return recorder.values, recorder.results, found[1:]


class _Recorder:
    """Runs jaxprs; what it calls ``values`` are those so far, as tracers of the scope it is in."""

    def __init__(self):
        self.values: list[Value] = []
        self.results: list[Value] = []

    def add(self, name, equations, inputs, data, aval, output=0) -> Value:
        self.values.append(Value(name, equations, tuple(inputs), data, aval, output))
        return self.values[-1]

    def run(self, jaxpr, consts, given, above) -> list[Value]:
        pairs = zip(consts, jaxpr.constvars, strict=True)
        constants = [Value("constant", above, (), x, v.aval) for x, v in pairs]
        env = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= dict(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Value:
            literal = isinstance(atom, Literal)
            return Value("literal", (), (), atom.val, atom.aval) if literal else env[atom]

        for equation in jaxpr.eqns:
            if equation.outvars:  # what prints, or stops the program, has no result
                inputs = list(map(read, equation.invars))
                found = self.equation(equation, inputs, jaxpr, (equation, *above))
                env |= dict(zip(equation.outvars, found, strict=True))
        return list(map(read, jaxpr.outvars))

    def equation(self, equation, inputs, jaxpr, here) -> list[Value]:
        if equation.primitive.name == "shard_map":
            return self.shard_map(equation, inputs, here)
        if equation.primitive.name == "scan":
            return self.scan(equation, inputs, here)
        if equation.primitive.name == "cond":
            return self.cond(equation, inputs, here)
        if (called := inner_jaxpr(equation)) is not None:
            inner = getattr(called, "jaxpr", called)
            return self.run(inner, getattr(called, "consts", ()), inputs, here)
        pairs = zip(equation.invars, inputs, strict=True)
        operands = {v: x.data for v, x in pairs if not isinstance(v, Literal)}
        alone = jaxpr.replace(
            constvars=[],
            invars=list(operands),
            outvars=list(equation.outvars),
            eqns=[equation],
            effects=equation.effects,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        found = jaxpr_as_fun(ClosedJaxpr(alone, []))(*operands.values())
        name = equation.primitive.name
        return [
            self.add(name, here, inputs, x, v.aval, i)
            for i, (x, v) in enumerate(zip(found, equation.outvars, strict=True))
        ]

    def inside(self, start: int, stacked: Sequence[Any], lead: tuple) -> None:
        """Exchanges the tracers of a scope that ends for those of the scope around it."""
        for value, data in zip(self.values[start:], stacked, strict=True):
            value.data, value.lead, value.depth = data, (*lead, *value.lead), value.depth + 1

    def bound(self, names, here, values, data, variables) -> list[Value]:
        """Values that enter or leave a scope: each is made of one at the other side."""
        each = enumerate(zip(names, values, data, variables, strict=True))
        return [self.add(name, here, (x,), d, v.aval, i) for i, (name, x, d, v) in each]

    def shard_map(self, equation, inputs, here) -> list[Value]:
        params, start, inner = equation.params, len(self.values), []
        manual = params.get("newly_manual_axes", params.get("manual_axes"))
        axes = tuple(axis for axis in params["mesh"].axis_names if axis in manual)
        body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        consts = getattr(params["jaxpr"], "consts", ())

        def on_device(*args):
            del self.values[start:]
            given = self.bound(["enter"] * len(args), here, inputs, args, body.invars)
            inner[:] = self.run(body, consts, given, here)
            each = [value.data[None] for value in self.values[start:]]
            return [value.data for value in inner], each

        data, stacked = jax.shard_map(
            on_device,
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=(list(params["out_specs"]), P(axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*(x.data for x in inputs))
        lead = tuple((axis, params["mesh"].shape[axis]) for axis in axes)
        self.inside(start, stacked, lead)
        return self.bound(["exit"] * len(data), here, inner, data, equation.outvars)

    def cond(self, equation, inputs, here) -> list[Value]:
        index, found = inputs[0], []
        for k, body in enumerate(equation.params["branches"]):
            start = len(self.values)
            found.append(self.run(body.jaxpr, body.consts, inputs[1:], here))
            for value in self.values[start:]:
                value.taken = value.taken or (index, k)
        results = []
        for i, (v, *given) in enumerate(zip(equation.outvars, *found, strict=True)):
            data = jax.lax.select_n(index.data, *(jnp.asarray(x.data) for x in given))
            results.append(self.add("branch", here, (index, *given), data, v.aval, i))
        return results

    def scan(self, equation, inputs, here) -> list[Value]:
        params, start, inner = equation.params, len(self.values), []
        (first, first_x), length = scan_operands(equation), params["length"]
        body = params["jaxpr"]

        def step(carry, x):
            del self.values[start:]
            names, variables = ["carry"] * len(carry) + ["element"] * len(x), body.jaxpr.invars
            given = self.bound(names, here, inputs[first:], (*carry, *x), variables[first:])
            inner[:] = self.run(body.jaxpr, body.consts, [*inputs[:first], *given], here)
            for value, after in zip(given[: len(carry)], inner, strict=False):
                value.inputs = (*value.inputs, after)
            data = [value.data for value in inner]
            each = [value.data for value in self.values[start:]]
            return data[: len(carry)], (data[len(carry) :], each)

        carried, xs = ([x.data for x in part] for part in (inputs[first:first_x], inputs[first_x:]))
        carried, (ys, stacked) = jax.lax.scan(
            step, carried, xs, length, reverse=params["reverse"], unroll=params["unroll"]
        )
        self.inside(start, stacked, ((None, length),))
        names = ["result"] * len(carried) + ["stack"] * len(ys)
        return self.bound(names, here, inner, [*carried, *ys], equation.outvars)


def _devices_first(value: Value, data: np.ndarray) -> np.ndarray:
    """Lays out the stacks of a value as its class says."""
    lead = value.lead
    data = data.reshape((*(size for _, size in lead), *data.shape[value.depth :]))
    order = sorted(range(len(lead)), key=lambda i: lead[i][0] is None)
    return np.transpose(data, (*order, *range(len(lead), data.ndim)))
