"""A partitioner and a buffer assignment in miniature: what a traced step costs one device.

The compilers answer in seconds to minutes; a search has hundreds of questions. So this module walks
the jaxpr of **the very step that would be compiled**, traced over an abstract mesh, and keeps for
every value the mesh axes that split each of its dimensions. Three rules stand for the compilers:

*Partitioning.* Axes go from operands to results dimension by dimension. Where a product contracts
a split dimension, its result is summed over those devices (all-reduce; reduce-scatter where the
result is the gradient of a parameter that is split over them). Where an operand is split over an
axis that the other one splits its own rows by (a weight under FSDP), the smaller one is gathered.
Where :func:`jaxtrain.parallel.placement.constrain` names a layout, that is what follows.

*Fusion.* Element-wise work, changes of dtype, broadcasts, slices, transposes and reshapes are part
of what reads them, and have no memory of their own until a matrix product, a loop or the end of a
loop's body needs them in memory. Results of products, reductions, look-ups and loops do have.

*Liveness.* A buffer lives from the operation that writes it to the last that reads it, directly or
through fused work; operations run in the order of the jaxpr; element-wise work and updates write
over an operand of theirs that dies. Of a loop's body, the temporaries of one iteration count, and
the stacked results of all. Of branches, the larger counts. The state is donated and not counted:
it is there throughout, and its new value is written over the old.

What it cannot see: what a compiler reorders, recomputes or splits further, and paddings to tiles.
How far it is off is measured against the compilers (:mod:`.search` prints it per row).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.planning.flops import CHEAP, count_equation, product_dimensions, product_flops
from jaxtrain.planning.liveness import Buffer, Liveness
from jaxtrain.planning.partition import (
    REDUCTIONS,
    Axes,
    Cost,
    Operand,
    Partitioner,
    Spec,
    Value,
    axis_names,
)
from jaxtrain.planning.uses import CALLS, MOVES, kernel_operands, read_inside, wide_variables

IN_PLACE = frozenset(["scatter", "scatter-add", "scatter_add", "dynamic_update_slice"])
# Results with memory of their own. Everything else is element-wise.
HEAVY = frozenset(
    [
        *REDUCTIONS,
        *IN_PLACE,
        *("dot_general", "conv_general_dilated", "gather", "concatenate", "sort", "top_k"),
        *("cumsum", "cumlogsumexp", "cummax", "reduce_window_sum", "reduce_window_max"),
        *("select_and_scatter_add", "cholesky", "triangular_solve"),
        *("psum", "ppermute", "all_gather", "all_to_all"),
    ]
)
# Element-wise work that costs more than reading its result.
COSTLY = frozenset(["tanh"])


@dataclasses.dataclass(frozen=True)
class CompilerQuirks:
    """Where compilers differ.

    Args:
      keeps_constants: arrays made from nothing outside of a loop (masks) are kept for it.
      copies_branches: an array that a branch updates is copied first.
      delays_gradients: products that nothing in a loop's body reads run at its end.
      keeps_costly: element-wise work of :data:`COSTLY` that several read is done once and kept.
      rounds_residuals: float32 arrays that a loop leaves for matrix products of default precision
        alone are stored as bfloat16, what these products round them to.
      tiles_kernels: what a loop leaves for kernels lies row by row in tiles of 8 x 128.
    """

    keeps_constants: bool = False
    copies_branches: bool = False
    delays_gradients: bool = False
    keeps_costly: bool = False
    rounds_residuals: bool = False
    tiles_kernels: bool = False


def walk_step(
    jaxpr: Any,
    specs: Sequence[Spec],
    mesh: Mapping[str, int],
    parameters: Mapping[tuple, Spec],
    *,
    stored: int = 0,
    quirks: CompilerQuirks = CompilerQuirks(),
) -> tuple[Cost, int]:
    """Walks a traced step.

    Args:
      jaxpr: a closed jaxpr, ``jax.make_jaxpr(step)(state, batch)``.
      specs: mesh axes per dimension of each argument.
      mesh: sizes of mesh axes.
      parameters: spec by shape, of parameters and of their layers: how gradients will lie.
      stored: how many of the arguments, from the first on, are the state.

    Returns:
      The cost of one device, and the bytes it needs at its peak besides the arguments.
    """
    walk = Walk(mesh, parameters, quirks)
    walk.wide = wide_variables(jaxpr.jaxpr) if quirks.rounds_residuals else None
    walk.tiled = kernel_operands(jaxpr.jaxpr) if quirks.tiles_kernels else frozenset()
    arguments = [
        dataclasses.replace(walk.argument(v.aval, spec), stored=i < stored)
        for i, (v, spec) in enumerate(zip(jaxpr.jaxpr.invars, specs, strict=True))
    ]
    _, peak = walk.level(jaxpr.jaxpr, [_constant(c) for c in jaxpr.consts], arguments, top=True)
    return walk.cost, peak


class Walk(Partitioner):
    """The state of a walk: the mesh, the cost so far, and how the compiler is.

    Attributes:
      wide: variables whose every bit counts, see :func:`wide_variables`; None for all.
      tiled: variables that kernels read, see :func:`kernel_operands`.
      inside: variables that the innermost loop reads, see :func:`read_inside`; None outside.
    """

    def __init__(
        self, mesh: Mapping[str, int], parameters: Mapping[tuple, Spec], quirks: CompilerQuirks
    ):
        super().__init__(mesh, parameters)
        self.quirks = quirks
        self.wide: frozenset | None = None
        self.tiled: frozenset = frozenset()
        self.inside: frozenset | None = None

    def level(
        self, jaxpr: Any, consts: list, arguments: list, *, carry: Sequence[Value] = (), top=False
    ) -> tuple[list[Value], int]:
        """Walks one jaxpr (a step, a loop's body, a branch).

        Args:
          jaxpr: its equations.
          consts, arguments: values of its variables.
          carry: those of the arguments that its results are written over.
          top: whether it is the step itself.

        Returns:
          Its results, and the most bytes that are alive at once besides its arguments.
        """
        liveness = Liveness()
        for value in carry:
            for root in value.roots:
                liveness.adopt(root)
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        # The new state is written over the old; other results end up in memory.
        results = self.run(jaxpr, env, liveness, frozenset() if top else _variables(jaxpr.outvars))
        liveness.tick()
        for root in liveness.late.union(*(value.roots for value in results)):
            liveness.read(root)
        return results, liveness.peak()

    def run(self, jaxpr: Any, env: dict, liveness: Liveness, kept: frozenset) -> list[Value]:
        """Walks equations in order, those of calls in place."""
        for equation in _needed(jaxpr):
            name = equation.primitive.name
            inputs = [_read(env, v) for v in equation.invars]
            if name in CALLS and CALLS[name] in equation.params:
                inner = equation.params[CALLS[name]]
                inner, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", [])
                inner_env = dict(zip(inner.constvars, map(_constant, consts), strict=True))
                inner_env |= dict(zip(inner.invars, inputs, strict=True))
                asked = {
                    i for i, o in zip(inner.outvars, equation.outvars, strict=True) if o in kept
                }
                outputs = self.run(inner, inner_env, liveness, _variables(asked))
            else:
                liveness.tick()
                outputs = self.once(name, equation, inputs, liveness)
                costly = self.quirks.keeps_costly and name in COSTLY
                for value, variable in zip(outputs, equation.outvars, strict=True):
                    if variable in kept or (costly and _readers(jaxpr, variable) > 1):
                        self.settle(value, liveness, in_place=True)
            env.update(zip(equation.outvars, outputs, strict=True))
        return [_read(env, v) for v in jaxpr.outvars]

    def once(
        self, name: str, equation: Any, inputs: list[Value], liveness: Liveness
    ) -> list[Value]:
        """Walks an equation, unless this level has computed the same from the same before."""
        key = _key(name, equation, inputs)
        if key is None:
            return self.equation(name, equation, inputs, liveness)
        if key not in liveness.known:
            liveness.known[key] = inputs, self.equation(name, equation, inputs, liveness)
        return liveness.known[key][1]

    def settle(
        self, value: Value, liveness: Liveness, *, in_place: bool = False, keep_free: bool = False
    ) -> None:
        """Gives fused work memory of its own."""
        if value.free and keep_free and value.shape:
            value.free, value.fused = False, True
        if not value.fused or value.free:
            for root in value.roots:
                liveness.read(root)
            return
        for root in value.roots:
            liveness.read(root)
        self.cost.hbm_bytes += self.traffic(value)
        buffer = Buffer(self.bytes(value), f"fused {value.dtype}{list(value.shape)}{value.spec}")
        self.cost.hbm_bytes += buffer.size
        liveness.write(buffer, in_place=in_place)
        value.roots, value.fused = frozenset([buffer]), False

    def hand_over(self, value: Value, liveness: Liveness) -> None:
        """Gives a loop's input memory of its own: it takes buffers, not parts of them."""
        self.settle(value, liveness)
        if value.part and not value.free:
            buffer = Buffer(self.bytes(value), f"slice {value.dtype}{list(value.shape)}")
            self.cost.hbm_bytes += 2 * buffer.size
            liveness.write(buffer)
            value.roots, value.part = frozenset([buffer]), False

    def equation(
        self, name: str, equation: Any, inputs: list[Value], liveness: Liveness
    ) -> list[Value]:
        """Walks one equation that is no call."""
        special = getattr(self, "do_" + name.replace("-", "_"), None)
        if special is not None:
            return special(equation, inputs, liveness)
        if name in MOVES:
            return self.move(name, equation, inputs, liveness)
        specs = [self.along(name, equation, inputs, v.aval.shape) for v in equation.outvars]
        if name not in CHEAP:
            flops, unknown = count_equation(equation)
            split = self.parts(a for axes in specs[0] for a in axes) if specs else 1
            self.cost.flops.update({dtype: count / split for dtype, count in flops.items()})
            self.cost.unknown |= unknown
        elif name not in HEAVY:
            for value in inputs:
                # What is made from nothing is made as it is needed.
                if value.free and value.shape == equation.outvars[0].aval.shape:
                    value.spec = specs[0]
            return [
                self.fuse(inputs, v.aval, spec)
                for v, spec in zip(equation.outvars, specs, strict=True)
            ]
        return self.heavy(name, equation.outvars, specs, inputs, liveness)

    def heavy(self, name, variables, specs, inputs, liveness) -> list[Value]:
        """Results that are written to memory; operands are read where they lie, fused or not."""
        for root in frozenset().union(*(value.roots for value in inputs)):
            liveness.read(root)
        in_place = name in IN_PLACE
        read = inputs[1:] if in_place else inputs
        update = inputs[1 if name == "dynamic_update_slice" else -1] if in_place else None
        self.cost.hbm_bytes += sum(map(self.traffic, read))
        outputs = []
        for variable, spec in zip(variables, specs, strict=True):
            aval = variable.aval
            what = f"{name} {aval.dtype}{list(aval.shape)}{spec}"
            buffer = Buffer(self.size(aval.shape, aval.dtype, spec), what)
            # What is updated in place is touched where the update is.
            self.cost.hbm_bytes += self.bytes(update) if in_place else buffer.size
            liveness.write(buffer, in_place=in_place)
            outputs.append(Value(tuple(aval.shape), aval.dtype, spec, frozenset([buffer])))
        return outputs

    def fuse(self, inputs: list[Value], aval: Any, spec: Spec) -> Value:
        """Element-wise work on values."""
        roots = frozenset().union(*(value.roots for value in inputs))
        free = all(value.free for value in inputs)
        stored = all(value.stored or value.free for value in inputs)
        return Value(
            tuple(aval.shape), aval.dtype, spec, roots, fused=True, free=free, stored=stored
        )

    # What only moves data.

    def move(
        self, name: str, equation: Any, inputs: list[Value], liveness: Liveness
    ) -> list[Value]:
        """Views of a value."""
        value, params = inputs[0], equation.params
        outputs = []
        for variable in equation.outvars:
            shape = tuple(variable.aval.shape)
            if name == "reshape":
                spec = self.reshaped(value, shape)
            elif name == "transpose":
                spec = tuple(value.spec[d] for d in params["permutation"])
            elif name == "squeeze":
                gone = {d % len(value.shape) for d in params["dimensions"]}
                spec = tuple(axes for d, axes in enumerate(value.spec) if d not in gone)
            elif name == "expand_dims":
                spec = self.reshaped(value, shape)
            elif name == "sharding_constraint":
                return [self.constrained(value, params["sharding"].spec, liveness)]
            elif len(equation.outvars) == len(inputs) and name != "slice":
                i = equation.outvars.index(variable)
                outputs.append(dataclasses.replace(inputs[i]))
                continue
            else:
                spec = self.fit(shape, value.spec)
            dtype, part = variable.aval.dtype, value.part or name in ("slice", "dynamic_slice")
            outputs.append(
                dataclasses.replace(value, shape=shape, dtype=dtype, spec=spec, part=part)
            )
        return outputs

    def constrained(self, value: Value, spec: Any, liveness: Liveness) -> Value:
        """What a sharding constraint makes of a value."""
        entries = list(spec) + [None] * (len(value.shape) - len(spec))
        open_ = jax.sharding.PartitionSpec.UNCONSTRAINED
        wanted = [
            old if entry is open_ else tuple(a for a in axis_names(entry) if a in self.mesh)
            for old, entry in zip(value.spec, entries, strict=True)
        ]
        laid, copied = self.reshard(value, self.fit(value.shape, wanted))
        if copied:
            for root in value.roots:
                liveness.read(root)
            buffer = Buffer(copied)
            liveness.write(buffer)
            laid.roots, laid.fused = frozenset([buffer]), False
        return laid

    # Equations with rules of their own.

    def do_iota(self, equation, inputs, liveness):
        aval = equation.outvars[0].aval
        return [Value(tuple(aval.shape), aval.dtype, ((),) * len(aval.shape), free=True)]

    def do_convert_element_type(self, equation, inputs, liveness):
        aval = equation.outvars[0].aval
        if aval.dtype == inputs[0].dtype:
            return [dataclasses.replace(inputs[0])]
        return [self.fuse(inputs, aval, inputs[0].spec)]

    def do_dot_general(self, equation, inputs, liveness):
        (lhs, rhs), aval = inputs[:2], equation.outvars[0].aval
        (left_rows, right_rows), (lc, rc), (lb, rb), groups = product_dimensions(equation)
        for value in inputs:
            self.settle(value, liveness)
        if self.inside is not None and equation.outvars[0] not in self.inside:
            liveness.late.update(lhs.roots, rhs.roots)
        left, right = (
            Operand(v, c, rows, list(v.spec))
            for v, c, rows in ((lhs, lc, left_rows), (rhs, rc, right_rows))
        )
        for d in groups:
            # Any row may need any group.
            self.send("all-gather", right.spec[d], self.bytes(rhs) * self.parts(right.spec[d]))
            right.spec[d] = ()
        for a, b in zip(lb, rb, strict=True):
            left.spec[a] = right.spec[b] = left.spec[a] or right.spec[b]
        # A weight gives way, else the smaller one.
        left_gives = self.bytes(lhs) < self.bytes(rhs)
        if lhs.stored != rhs.stored:
            left_gives = lhs.stored
        copied = self.give_way(left, right) if left_gives else self.give_way(right, left)
        # Either side of a contracted dimension may be cut as the other one is.
        over = [a for i, j in zip(lc, rc, strict=True) for a in left.spec[i] or right.spec[j]]
        wanted = [left.spec[d] for d in (*lb, *left.rows)] + [right.spec[d] for d in right.rows]
        shape = tuple(aval.shape)
        # Rows that are contracted group by group make a leading dimension of groups.
        spec = self.fit(shape, [()] * (len(shape) - len(wanted)) + wanted)
        used = [a for axes in spec for a in axes]
        partial = tuple(dict.fromkeys(a for a in over if a not in used))
        flops = product_flops(equation) / self.parts((*used, *partial))
        self.cost.flops[str(jnp.dtype(lhs.dtype))] += flops
        final, whole = self.sum_up(shape, aval.dtype, spec, partial)
        liveness.transient(copied + whole)
        return self.heavy("dot_general", equation.outvars, [final], inputs, liveness)

    do_ragged_dot_general = do_dot_general

    def do_conv_general_dilated(self, equation, inputs, liveness):
        (lhs, rhs), aval = inputs, equation.outvars[0].aval
        for value in inputs:
            self.settle(value, liveness)
        numbers = equation.params["dimension_numbers"]
        batch = numbers.lhs_spec[0], numbers.out_spec[0]
        wanted = [()] * len(aval.shape)
        wanted[batch[1]] = lhs.spec[batch[0]]
        spec = self.fit(aval.shape, wanted)
        out = math.prod(aval.shape) / self.parts(wanted[batch[1]])
        taps = math.prod(rhs.shape) / rhs.shape[numbers.rhs_spec[0]]
        self.cost.flops[str(jnp.dtype(lhs.dtype))] += 2 * out * taps
        return self.heavy("conv_general_dilated", equation.outvars, [spec], inputs, liveness)

    def do_gather(self, equation, inputs, liveness):
        (table, indices), aval = inputs[:2], equation.outvars[0].aval
        numbers = equation.params["dimension_numbers"]
        wanted: list[Axes] = [()] * len(aval.shape)
        rows = [d for d in range(len(aval.shape)) if d not in numbers.offset_dims]
        for d, axes in zip(rows, indices.spec, strict=False):
            wanted[d] = axes
        kept = [d for d in range(len(table.shape)) if d not in numbers.collapsed_slice_dims]
        for d, source in zip(numbers.offset_dims, kept, strict=False):
            if aval.shape[d] == table.shape[source]:
                wanted[d] = table.spec[source]
        spec = self.fit(aval.shape, wanted)
        over = tuple(a for d in numbers.collapsed_slice_dims for a in table.spec[d])
        self.send("all-reduce", over, self.size(aval.shape, aval.dtype, spec))
        if not math.prod(aval.shape[d] for d in rows) > 1:
            return [dataclasses.replace(table, shape=tuple(aval.shape), spec=spec)]
        return self.heavy("gather", equation.outvars, [spec], [table, indices], liveness)

    def do_scatter_add(self, equation, inputs, liveness):
        (table, _, updates), aval = inputs[:3], equation.outvars[0].aval
        self.settle(updates, liveness)
        numbers = equation.params["dimension_numbers"]
        windows = numbers.update_window_dims
        rows = [d for d in range(len(updates.shape)) if d not in windows]
        partial = tuple(a for d in rows for a in updates.spec[d])
        spec = table.spec
        if table.free:
            outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
            inside = [d for d in range(len(aval.shape)) if d not in outside]
            wanted: list[Axes] = [()] * len(aval.shape)
            for d, source in zip(inside, windows, strict=True):
                wanted[d] = updates.spec[source]
            spec = self.fit(aval.shape, wanted)
        final, whole = self.sum_up(tuple(aval.shape), aval.dtype, spec, partial)
        liveness.transient(whole)
        return self.heavy("scatter-add", equation.outvars, [final], [table, updates], liveness)

    def do_psum(self, equation, inputs, liveness):
        axes = tuple(equation.params["axes"])
        for value in inputs:
            self.send("all-reduce", axes, self.bytes(value))
        return self.heavy("psum", equation.outvars, [v.spec for v in inputs], inputs, liveness)

    def do_ppermute(self, equation, inputs, liveness):
        name = equation.params["axis_name"]
        axes = (name,) if isinstance(name, str) else tuple(name)
        for value in inputs:
            self.send("ppermute", axes, self.bytes(value))
        return self.heavy("ppermute", equation.outvars, [v.spec for v in inputs], inputs, liveness)

    def do_shard_map(self, equation, inputs, liveness):
        params = equation.params
        manual = (
            params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        )
        inner = params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)
        for value in inputs:
            self.settle(value, liveness)
        arguments = []
        for value, variable in zip(inputs, inner.invars, strict=True):
            spec = tuple(tuple(a for a in axes if a not in manual) for axes in value.spec)
            arguments.append(
                Value(tuple(variable.aval.shape), variable.aval.dtype, spec, stored=value.stored)
            )
        results, peak = self.level(inner, [], arguments)
        liveness.transient(peak - sum(self.bytes(r) for r in results if r.roots))
        specs = []
        for value, spec in zip(results, params["out_specs"], strict=True):
            names = list(spec) + [None] * (len(value.shape) - len(spec))
            specs.append(
                tuple((*axis_names(n), *axes) for n, axes in zip(names, value.spec, strict=True))
            )
        return self.heavy("shard_map", equation.outvars, specs, inputs, liveness)

    def do_pallas_call(self, equation, inputs, liveness):
        # Local code: whoever calls a kernel has split its operands.
        for value in inputs:
            self.settle(value, liveness)
        self.cost.flops.update(count_equation(equation)[0])
        specs = [((),) * len(v.aval.shape) for v in equation.outvars]
        return self.heavy("pallas_call", equation.outvars, specs, inputs, liveness)

    def do_scan(self, equation, inputs, liveness):
        params = equation.params
        body = params["jaxpr"]
        n_consts, n_carry, length = params["num_consts"], params["num_carry"], params["length"]
        for value in inputs:
            self.hand_over(value, liveness)
        carry = inputs[n_consts : n_consts + n_carry]
        slices = [
            Value(v.shape[1:], v.dtype, v.spec[1:], free=v.free, stored=v.stored)
            for v in inputs[n_consts + n_carry :]
        ]
        consts = [dataclasses.replace(v, roots=frozenset(), fused=False) for v in inputs[:n_consts]]
        layouts = [v.spec for v in carry]
        outer, outside = self.cost, self.inside
        if self.quirks.delays_gradients:
            self.inside = read_inside(body.jaxpr)
        # A carry that starts as zeros lies as the body leaves it.
        for _ in range(2):
            self.cost = Cost()
            start = [
                self.held(v, spec, self.laid_size(variable, spec))
                for v, spec, variable in zip(
                    carry, layouts, body.jaxpr.invars[n_consts:], strict=False
                )
            ]
            results, peak = self.level(
                body.jaxpr,
                [_constant(c) for c in body.consts],
                [*consts, *start, *slices],
                carry=start,
            )
            found = [
                r.spec if v.free else spec
                for v, spec, r in zip(carry, layouts, results, strict=False)
            ]
            if found == layouts:
                break
            layouts = found
        body_cost, self.cost, self.inside = self.cost, outer, outside
        if self.quirks.keeps_constants:
            for value, inside in zip(inputs, consts, strict=False):
                if value.free:
                    value.spec = inside.spec
                    self.settle(value, liveness, keep_free=True)
        self.cost.add(body_cost, length)
        specs = [*layouts, *(((), *r.spec) for r in results[n_carry:])]
        liveness.transient(peak)
        outputs = []
        for i, (variable, spec) in enumerate(zip(equation.outvars, specs, strict=True)):
            aval = variable.aval
            # What a kernel reads in the body is a carry's argument.
            inside = body.jaxpr.invars[n_consts + i] if i < n_carry else variable
            size = self.laid_size(inside, spec)
            # A carry is updated where it lies, if nobody else reads it later.
            buffer = Buffer(size, f"scan {aval.dtype}{list(aval.shape)}{spec}")
            liveness.write(buffer, in_place=i < n_carry)
            outputs.append(Value(tuple(aval.shape), aval.dtype, spec, frozenset([buffer])))
        return outputs

    def laid_size(self, variable: Any, spec: Spec) -> int:
        """Bytes of a loop's result on one device, as its readers ask for it."""
        aval = variable.aval
        dtype, shape = aval.dtype, list(aval.shape)
        if dtype == jnp.float32 and not (self.wide is None or variable in self.wide):
            dtype = jnp.dtype(jnp.bfloat16)
        if variable in self.tiled and len(shape) > 2:
            shape[-2:] = (-(-shape[-2] // 8) * 8, -(-shape[-1] // 128) * 128)
        return self.size(shape, dtype, spec)

    def held(self, value: Value, spec: Spec, size: int) -> Value:
        """A loop's carry of so many bytes as its body sees it."""
        return Value(value.shape, value.dtype, spec, frozenset([Buffer(size, "carry")]))

    def do_while(self, equation, inputs, liveness):
        params = equation.params
        body, skip = params["body_jaxpr"], params["cond_nconsts"]
        for value in inputs:
            self.hand_over(value, liveness)
        arguments = [Value(v.shape, v.dtype, v.spec) for v in inputs[skip:]]
        first = params["body_nconsts"]
        arguments[first:] = [self.held(v, v.spec, self.bytes(v)) for v in arguments[first:]]
        _, peak = self.level(
            body.jaxpr, [_constant(c) for c in body.consts], arguments, carry=arguments[first:]
        )
        liveness.transient(peak)
        specs = [v.spec for v in inputs[skip + params["body_nconsts"] :]]
        return self.heavy("while", equation.outvars, specs, inputs, liveness)

    def do_cond(self, equation, inputs, liveness):
        outer = self.cost
        walked = []
        for value in inputs:
            self.settle(value, liveness)
        for branch in equation.params["branches"]:
            self.cost = Cost()
            arguments = [
                Value(v.shape, v.dtype, v.spec, free=v.free, stored=v.stored) for v in inputs[1:]
            ]
            results, peak = self.level(
                branch.jaxpr, [_constant(c) for c in branch.consts], arguments
            )
            own = sum(self.bytes(r) for r in results if r.roots)
            walked.append((sum(self.cost.flops.values()), peak - own, self.cost, results))
        self.cost = outer
        dearest = max(walked, key=lambda w: w[0])
        self.cost.add(dearest[2])
        liveness.transient(max(w[1] for w in walked))
        specs = [r.spec for r in dearest[3]]
        # A result that is an argument, or an update of one, is written over it.
        return [
            self.passed(variable, spec, results, inputs, liveness)
            for variable, spec, results in zip(
                equation.outvars, specs, zip(*(w[3] for w in walked), strict=True), strict=True
            )
        ]

    def passed(self, variable, spec, results, inputs, liveness) -> Value:
        aval = variable.aval
        buffer = Buffer(self.size(aval.shape, aval.dtype, spec))
        for value in inputs:
            for root in value.roots:
                liveness.read(root)
        liveness.write(
            buffer, in_place=not self.quirks.copies_branches and any(not r.roots for r in results)
        )
        return Value(tuple(aval.shape), aval.dtype, spec, frozenset([buffer]))


def _key(name: str, equation: Any, inputs: list[Value]) -> Any:
    """What makes two equations the same, or None where nothing cheap tells."""
    if equation.effects or name in ("scan", "while", "cond", "shard_map", "random_bits"):
        return None
    atoms = []
    for atom, value in zip(equation.invars, inputs, strict=True):
        if hasattr(atom, "val"):
            if np.size(atom.val) > 1:
                return None
            atoms.append(("literal", str(atom.val), str(atom.aval)))
        else:
            atoms.append(id(value))
    # The sharding of a constraint is not told apart by its text alone on all versions.
    return name, tuple(atoms), str(equation.params)


def _readers(jaxpr: Any, variable: Any) -> int:
    operands = itertools.chain(jaxpr.outvars, *(e.invars for e in jaxpr.eqns))
    return sum(v is variable for v in operands)


def _needed(jaxpr: Any) -> list:
    """The equations whose results are read."""
    wanted = set(_variables(jaxpr.outvars))
    needed = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in wanted for v in equation.outvars):
            needed.append(equation)
            wanted |= _variables(equation.invars)
    return needed[::-1]


def _variables(atoms: Iterable[Any]) -> frozenset:
    return frozenset(a for a in atoms if not hasattr(a, "val"))


def _read(env: Mapping, atom: Any) -> Value:
    return _constant(atom.val) if hasattr(atom, "val") else env[atom]


def _constant(x: Any) -> Value:
    shape = np.shape(x)
    return Value(shape, getattr(x, "dtype", np.dtype(type(x))), ((),) * len(shape), free=True)
