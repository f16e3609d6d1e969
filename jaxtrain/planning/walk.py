"""Estimates a traced step's cost on one device: mesh axes propagated through its jaxpr.

The compilers answer in seconds to minutes; a search has hundreds of questions. So this module walks
the jaxpr of **the very step that would be compiled**, traced over an abstract mesh, and keeps for
every value the mesh axes that split each of its dimensions. Three rules stand for the compilers:

*Partitioning.* Axes go from operands to results dimension by dimension. Where a product contracts
a split dimension, its result is summed over those devices (all-reduce; reduce-scatter where the
result is the gradient of a parameter that is split over them). Where an operand is split over an
axis that the other one splits its own rows by (a weight under FSDP), the smaller one is gathered.
Where :func:`jaxtrain.sharding.placement.constrain` names a layout, that is what follows.

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
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.flops import (
    CHEAP,
    bodies,
    branch_shares_of,
    count_equation,
    heat,
    mean_trips,
    product_dimensions,
    product_flops,
)
from jaxtrain.ops.attention import in_fused_kernel
from jaxtrain.planning.liveness import Buffer, Liveness
from jaxtrain.planning.partition import REDUCTIONS, Cost, Partitioner, Spec, Value
from jaxtrain.sharding.specs import entries_of, names_of

# Data is moved, or seen in another shape: part of what reads it.
MOVES = frozenset(
    [
        *("reshape", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "split"),
        *("rev", "copy", "copy_p", "sharding_constraint", "name", "reduce_precision"),
        *("optimization_barrier", "stop_gradient"),
    ]
)
# What is sent in a manual region.
COLLECTIVES = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), "reduce-scatter"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "collective-permute",
}
# What is no call, though it may have a jaxpr.
NO_CALLS = CHEAP | {"scan", "while", "cond", "shard_map", "pallas_call", "reduce"}
IN_PLACE = frozenset(["scatter", "scatter-add", "scatter_add", "dynamic_update_slice"])
# Results with memory of their own. Everything else is element-wise.
HEAVY = frozenset(
    [
        *REDUCTIONS,
        *IN_PLACE,
        *("gather", "concatenate", "stack", "sort", "top_k"),
        *("cumsum", "cumlogsumexp", "cummax", "reduce_window_sum", "reduce_window_max"),
        *("select_and_scatter_add", "cholesky", "triangular_solve"),
    ]
)


def walk_step(
    jaxpr: Any,
    specs: Sequence[Spec],
    mesh: Mapping[str, int],
    parameters: Mapping[tuple, Spec],
    *,
    stored: int = 0,
    rounds: bool = False,
) -> tuple[Cost, int, dict[Buffer, tuple[Any, Any]]]:
    """Walks a traced step.

    Args:
      jaxpr: a closed jaxpr, ``jax.make_jaxpr(step)(state, batch)``.
      specs: mesh axes per dimension of each argument.
      parameters: spec by shape, of parameters and of their layers: how gradients will lie.
      stored: how many of the arguments, from the first on, are the state.
      rounds: whether float32 arrays that a loop leaves for products of default precision alone are
        kept as bfloat16, what these round them to, as the TPU compiler does. (The one switch: a
        float32 decoder that keeps everything is 16 % off without it, and 2 % with it.)

    Returns:
      The cost of one device, the bytes it needs at its peak besides the arguments, and those of its
      buffers that a loop stacks for a later one to read (activations, for the backward pass), each
      with the body of that loop and the result there.
    """
    walk = CostInterpreter(mesh, parameters, rounds)
    arguments = [
        Value(tuple(v.aval.shape), v.aval.dtype, walk.fit(v.aval.shape, spec), stored=i < stored)
        for i, (v, spec) in enumerate(zip(jaxpr.jaxpr.invars, specs, strict=True))
    ]
    _, peak = walk.level(jaxpr.jaxpr, [_constant(c) for c in jaxpr.consts], arguments, top=True)
    return walk.cost, peak, {buffer: walk.stacked[buffer] for buffer in walk.kept}


class CostInterpreter(Partitioner):
    """The state of a walk.

    Attributes:
      rounded: variables that a loop keeps as bfloat16.
      stacked: buffers that loops have stacked, with the body of the loop and its result.
      kept: those of them that later loops read.
      fused_kernel: whether the walk is inside of what a chip's own kernel computes, whose
        intermediate results are in no memory.
    """

    def __init__(self, mesh: Mapping[str, int], parameters: Mapping[tuple, Spec], rounds: bool):
        super().__init__(mesh, parameters)
        self.rounds = rounds
        self.rounded: set = set()
        self.stacked: dict = {}
        self.kept: set = set()
        self.fused_kernel = False

    def level(
        self, jaxpr: Any, consts: list, arguments: list, *, carry: Sequence[Value] = (), top=False
    ) -> tuple[list[Value], int]:
        """Walks one jaxpr: a step, which is ``top``, a loop's body, or a branch.

        ``carry`` are those of the arguments that its results are written over. Returns its results,
        and the most bytes that are alive at once besides its arguments.
        """
        liveness = Liveness()
        for value in carry:
            value.roots = liveness.write(self.bytes(value))
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        # The new state is written over the old; other results end up in memory.
        results = self.run(jaxpr, env, liveness, frozenset() if top else _variables(jaxpr.outvars))
        liveness.tick()
        liveness.read(_roots(results))
        return results, liveness.peak() - sum(map(self.bytes, carry))

    def run(self, jaxpr: Any, env: dict, liveness: Liveness, kept: frozenset) -> list[Value]:
        """Walks equations in order, those of calls in place."""
        if self.rounds:
            self.rounded |= _rounded(jaxpr)
        for equation in _needed(jaxpr):
            name = equation.primitive.name
            inputs = [_read(env, v) for v in equation.invars]
            outside = self.fused_kernel
            stack = getattr(getattr(equation, "source_info", None), "name_stack", "")
            self.fused_kernel = outside or in_fused_kernel(str(stack))
            if (called := inner_jaxpr(equation)) is not None:
                inner, consts = getattr(called, "jaxpr", called), getattr(called, "consts", [])
                inner_env = dict(zip(inner.constvars, map(_constant, consts), strict=True))
                inner_env |= dict(zip(inner.invars, inputs, strict=True))
                pairs = zip(inner.outvars, equation.outvars, strict=True)
                asked = _variables(i for i, o in pairs if o in kept)
                outputs = self.run(inner, inner_env, liveness, asked)
            else:
                liveness.tick()
                outputs = self.equation(name, equation, inputs, liveness)
                pairs = zip(outputs, equation.outvars, strict=True)
                asked = [value for value, variable in pairs if variable in kept]
                self.materialize(asked, liveness, in_place=True)
            self.fused_kernel = outside
            env.update(zip(equation.outvars, outputs, strict=True))
        return [_read(env, v) for v in jaxpr.outvars]

    def equation(
        self, name: str, equation: Any, inputs: list[Value], liveness: Liveness
    ) -> list[Value]:
        """Walks one equation that is no call."""
        special = getattr(self, "do_" + name.replace("-", "_"), None)
        if special is not None:
            return special(equation, inputs, liveness)
        if name in MOVES:
            return self.move(name, equation, inputs)
        if name in COLLECTIVES:
            return self.exchange(name, equation, inputs, liveness)
        params, variables = equation.params, equation.outvars
        specs = [self.along(name, params, inputs, tuple(v.aval.shape)) for v in variables]
        if name in CHEAP and name not in HEAVY:
            return [self.fuse(inputs, v.aval, s) for v, s in zip(variables, specs, strict=True)]
        if name not in CHEAP:
            self.count(equation, [a for axes in specs[0] for a in axes] if specs else ())
        return self.unfused(name, variables, specs, inputs, liveness)

    def count(self, equation: Any, split: Iterable[str] = ()) -> None:
        """Counts the FLOPs of an equation whose work these axes split."""
        flops, unknown = count_equation(equation)
        fused = equation.primitive.name.startswith(("pallas_call", "dot_product_attention"))
        kind = "attention" if fused else "matmul"
        for dtype, count in flops.items():
            self.cost.flops[kind, dtype] += count / self.parts(split)
        self.cost.unknown |= unknown

    # Memory: what is in it, and what moves through it.

    def moved(self, size: float, *, by_product: bool = False) -> None:
        """Counts bytes that are read or written."""
        if self.fused_kernel:
            return
        if by_product:
            self.cost.product_bytes += size
        else:
            self.cost.other_bytes += size

    def traffic(self, value: Value) -> int:
        """Bytes read for a value: of each buffer it is made of, as much as it has elements."""
        if value.free:
            return 0
        if not value.fused or not value.roots:
            return self.bytes(value)
        most = self.size(value.shape, np.dtype(np.float32), value.spec)
        return sum(min(root.size, most) for root in value.roots)

    def materialize(
        self, values: Iterable[Value], liveness: Liveness, *, in_place: bool = False
    ) -> None:
        """Gives fused work memory of its own."""
        for value in values:
            liveness.read(value.roots)
            if value.fused and not value.free:
                size = self.bytes(value)
                self.moved(self.traffic(value) + size)
                value.roots, value.fused = liveness.write(size, in_place=in_place), False

    def unfused(self, name, variables, specs, inputs, liveness, *, product=False) -> list[Value]:
        """Results that are written to memory; operands are read where they lie, fused or not."""
        outputs = self.store(variables, specs, inputs, liveness, in_place=name in IN_PLACE)
        # Operands of one reduction are made of the same array, as far as they are large.
        read, written = inputs[:1] if name == "reduce" else inputs, outputs
        if name in IN_PLACE:
            # What is updated in place is touched where the update is.
            read, written = inputs[1:], [inputs[1 if name == "dynamic_update_slice" else -1]]
        self.moved(sum(map(self.traffic, read)), by_product=product)
        self.moved(sum(map(self.bytes, written)), by_product=product)
        return outputs

    def store(self, variables, specs, inputs, liveness, *, in_place: int = 0) -> list[Value]:
        """Results in memory of their own, the first ``in_place`` of them written over operands."""
        liveness.read(_roots(inputs))
        outputs = []
        for i, (variable, spec) in enumerate(zip(variables, specs, strict=True)):
            shape, dtype = tuple(variable.aval.shape), variable.aval.dtype
            size = self.size(shape, dtype, spec) // (2 if variable in self.rounded else 1)
            roots = liveness.write(size, in_place=i < in_place)
            outputs.append(Value(shape, dtype, spec, roots))
        return outputs

    def fuse(self, inputs: list[Value], aval: Any, spec: Spec) -> Value:
        """Element-wise work on values."""
        free = all(value.free for value in inputs)
        stored = all(value.stored or value.free for value in inputs)
        shape = tuple(aval.shape)
        return Value(shape, aval.dtype, spec, _roots(inputs), fused=True, free=free, stored=stored)

    def do_add_any(self, equation, inputs, liveness):
        """Gradients from several uses, which are added up on each device first."""
        first, second = inputs
        specs = [self.along("add_any", {}, inputs, first.shape)]
        total = self.fuse(inputs, equation.outvars[0].aval, specs[0])
        if first.summed and first.summed == second.summed and first.spec == second.spec:
            self.send("all-reduce", second.summed, self.bytes(second), times=-1)
            total.summed = first.summed
        return [total]

    def move(self, name: str, equation: Any, inputs: list[Value]) -> list[Value]:
        """Views of a value."""
        if len(equation.outvars) == len(inputs) > 1 or name in ("name", "copy", "copy_p"):
            return [dataclasses.replace(value) for value in inputs]
        value, params = inputs[0], equation.params
        outputs = []
        for variable in equation.outvars:
            shape = tuple(variable.aval.shape)
            if name in ("reshape", "expand_dims", "squeeze"):
                spec = self.reshaped(value, shape)
            elif name == "transpose":
                spec = tuple(value.spec[d] for d in params["permutation"])
            else:
                spec = self.fit(shape, value.spec)
            part = value.part or name in ("slice", "dynamic_slice")
            summed = value.summed if math.prod(shape) == math.prod(value.shape) else ()
            changes = {"shape": shape, "spec": spec, "part": part, "summed": summed}
            outputs.append(dataclasses.replace(value, **changes))
        return outputs

    def exchange(self, name: str, equation: Any, inputs: list[Value], liveness) -> list[Value]:
        """Collectives of a manual region, in which a device's own part is the shape."""
        params, specs, whole = equation.params, [], 0
        axes = names_of(params.get("axes", params.get("axis_name")))
        # A ragged exchange has more operands, which say what goes where.
        for value, variable in zip(inputs, equation.outvars, strict=False):
            shape = tuple(variable.aval.shape)
            specs.append(value.spec if len(shape) == len(value.spec) else ((),) * len(shape))
            # The whole is what an all-gather ends with, and what others begin with.
            whole += max(self.bytes(value), self.size(shape, value.dtype, specs[-1]))
        self.send(COLLECTIVES[name], axes, whole)
        return self.unfused(name, equation.outvars, specs, inputs, liveness)

    # Equations with rules of their own.

    def do_sharding_constraint(self, equation, inputs, liveness):
        (value,) = inputs
        entries = entries_of(equation.params["sharding"].spec, len(value.shape))
        open_ = jax.sharding.PartitionSpec.UNCONSTRAINED
        wanted = [
            old if entry is open_ else names_of(entry)
            for old, entry in zip(value.spec, entries, strict=True)
        ]
        laid = dataclasses.replace(value, spec=self.fit(value.shape, wanted))
        if self.scatter(value, laid.spec):
            liveness.read(value.roots)
            laid.roots, laid.fused, laid.summed = liveness.write(self.bytes(laid)), False, ()
        elif copied := self.reshard(value, laid.spec):
            liveness.read(value.roots)
            laid.roots, laid.fused = liveness.write(copied), False
        return [laid]

    def do_dot_general(self, equation, inputs, liveness):
        (lhs, rhs), aval = inputs[:2], equation.outvars[0].aval
        self.materialize(inputs, liveness)
        spec, split, meanwhile = self.product(
            lhs, rhs, product_dimensions(equation), tuple(aval.shape), aval.dtype
        )
        kind = "attention" if self.fused_kernel else "matmul"
        self.cost.flops[kind, lhs.dtype.name] += product_flops(equation) / self.parts(split)
        liveness.transient(meanwhile)
        found = self.unfused("dot", equation.outvars, [spec], inputs, liveness, product=True)
        found[0].summed = tuple(a for a in split if not any(a in axes for axes in spec))
        return found

    do_ragged_dot_general = do_dot_general

    def do_conv_general_dilated(self, equation, inputs, liveness):
        self.materialize(inputs, liveness)
        numbers = equation.params["dimension_numbers"]
        wanted = [()] * len(equation.outvars[0].aval.shape)
        wanted[numbers.out_spec[0]] = rows = inputs[0].spec[numbers.lhs_spec[0]]
        self.count(equation, rows)
        spec = self.fit(equation.outvars[0].aval.shape, wanted)
        return self.unfused("conv", equation.outvars, [spec], inputs, liveness, product=True)

    def do_pallas_call(self, equation, inputs, liveness):
        # Local code: whoever calls a kernel has split its operands.
        self.materialize(inputs, liveness)
        self.count(equation)
        specs = [((),) * len(v.aval.shape) for v in equation.outvars]
        return self.unfused("kernel", equation.outvars, specs, inputs, liveness, product=True)

    def do_gather(self, equation, inputs, liveness):
        (table, indices), aval = inputs[:2], equation.outvars[0].aval
        numbers = equation.params["dimension_numbers"]
        wanted: list = [()] * len(aval.shape)
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
        found = self.unfused("gather", equation.outvars, [spec], [indices], liveness)
        found[0].summed = over
        liveness.read(table.roots)
        return found

    def do_scatter_add(self, equation, inputs, liveness):
        (table, _, updates), aval = inputs[:3], equation.outvars[0].aval
        self.materialize([updates], liveness)
        numbers = equation.params["dimension_numbers"]
        windows = numbers.update_window_dims
        rows = [d for d in range(len(updates.shape)) if d not in windows]
        spec = table.spec
        if table.free:
            outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
            inside = [d for d in range(len(aval.shape)) if d not in outside]
            wanted: list = [()] * len(aval.shape)
            for d, source in zip(inside, windows, strict=True):
                wanted[d] = updates.spec[source]
            spec = self.fit(aval.shape, wanted)
        partial = tuple(a for d in rows for a in updates.spec[d])
        final, whole = self.add_up(tuple(aval.shape), aval.dtype, spec, partial)
        liveness.transient(whole)
        return self.unfused("scatter-add", equation.outvars, [final], [table, updates], liveness)

    def do_shard_map(self, equation, inputs, liveness):
        params = equation.params
        manual = params.get("newly_manual_axes", params.get("manual_axes"))
        inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        self.materialize(inputs, liveness)
        arguments = []
        for value, variable in zip(inputs, inner.invars, strict=True):
            spec = tuple(tuple(a for a in axes if a not in manual) for axes in value.spec)
            arguments.append(
                Value(tuple(variable.aval.shape), value.dtype, spec, stored=value.stored)
            )
        results, peak = self.level(inner, [], arguments)
        liveness.transient(peak - sum(self.bytes(r) for r in results if r.roots))
        specs = []
        for value, spec in zip(results, params["out_specs"], strict=True):
            entries = map(names_of, entries_of(spec, len(value.shape)))
            specs.append(tuple((*n, *axes) for n, axes in zip(entries, value.spec, strict=True)))
        return self.store(equation.outvars, specs, inputs, liveness)

    def do_scan(self, equation, inputs, liveness):
        params = equation.params
        body = params["jaxpr"]
        (first, first_x), length = scan_operands(equation), params["length"]
        n_carry = first_x - first
        self.materialize(inputs, liveness)
        for value in inputs:
            if value.part and not value.free:
                # A loop takes buffers, not parts of them.
                self.moved(2 * self.bytes(value))
                value.roots, value.part = liveness.write(self.bytes(value)), False
        self.kept |= self.stacked.keys() & _roots(inputs[first_x:])
        slices = [
            Value(v.shape[1:], v.dtype, v.spec[1:], free=v.free, stored=v.stored)
            for v in inputs[first_x:]
        ]
        consts = [dataclasses.replace(v, roots=frozenset(), fused=False) for v in inputs[:first]]
        outer, carry = self.cost, inputs[first:first_x]
        layouts = [v.spec for v in carry]
        for _ in range(2):
            self.cost = Cost()
            results, peak = self.body(body, consts, carry, layouts, slices)
            # A carry that starts as zeros lies as the body leaves it.
            found = [
                r.spec if v.free else spec
                for v, spec, r in zip(carry, layouts, results, strict=False)
            ]
            if found == layouts:
                break
            layouts = found
        body_cost, self.cost = self.cost, outer
        self.cost.add(body_cost, length)
        liveness.transient(peak)
        specs = [*layouts, *(((), *r.spec) for r in results[n_carry:])]
        # A carry is updated where it lies, if nobody else reads it later.
        outputs = self.store(equation.outvars, specs, inputs, liveness, in_place=n_carry)
        for value, variable in zip(outputs[n_carry:], body.jaxpr.outvars[n_carry:], strict=True):
            self.stacked |= dict.fromkeys(value.roots, (body.jaxpr, variable))
        return outputs

    def body(self, body, consts, carry, layouts, slices) -> tuple[list[Value], int]:
        """Walks a loop's body once."""
        start = [Value(v.shape, v.dtype, spec) for v, spec in zip(carry, layouts, strict=True)]
        made = [_constant(c) for c in body.consts]
        return self.level(body.jaxpr, made, [*consts, *start, *slices], carry=start)

    def do_while(self, equation, inputs, liveness):
        params = equation.params
        first = params["cond_nconsts"]
        self.materialize(inputs, liveness)
        carry = inputs[first + params["body_nconsts"] :]
        consts = [Value(v.shape, v.dtype, v.spec) for v in inputs[first : len(inputs) - len(carry)]]
        specs = [v.spec for v in carry]
        outer, self.cost = self.cost, Cost()
        _, peak = self.body(params["body_jaxpr"], consts, carry, specs, [])
        trips, hotter = mean_trips(equation), heat(equation)
        for key, flops in self.cost.flops.items():
            self.cost.hot_flops[key] += hotter * flops
        outer.add(self.cost, 1 if trips is None else trips)
        self.cost = outer
        liveness.transient(peak)
        return self.store(equation.outvars, specs, inputs, liveness)

    def do_cond(self, equation, inputs, liveness):
        outer = self.cost
        walked = []
        self.materialize(inputs, liveness)
        for branch in equation.params["branches"]:
            self.cost = Cost()
            arguments = [
                Value(v.shape, v.dtype, v.spec, free=v.free, stored=v.stored) for v in inputs[1:]
            ]
            results, peak = self.level(branch.jaxpr, map(_constant, branch.consts), arguments)
            own = sum(self.bytes(r) for r in results if r.roots)
            walked.append((sum(self.cost.flops.values()), peak - own, self.cost, results))
        self.cost = outer
        dearest = max(walked, key=lambda w: w[0])
        shares = branch_shares_of(equation) or [float(w is dearest) for w in walked]
        for share, (_, _, cost, _) in zip(shares, walked, strict=True):
            self.cost.add(cost, share)
        liveness.transient(max(w[1] for w in walked))
        outputs = []
        for i, variable in enumerate(equation.outvars):
            # A result that is an argument, or an update of one, is written over it.
            over = any(not w[3][i].roots for w in walked)
            spec = dearest[3][i].spec
            outputs += self.store([variable], [spec], inputs, liveness, in_place=over)
        return outputs


def inner_jaxpr(equation: Any) -> Any | None:
    """The one jaxpr of a call, which takes the operands and gives the results; else None."""
    inside = [] if equation.primitive.name in NO_CALLS else bodies(equation)
    taken = [len(getattr(called, "jaxpr", called).invars) for called in inside]
    return inside[0] if taken == [len(equation.invars)] else None


def scan_operands(equation: Any) -> tuple[int, int]:
    """Returns the indices of a scan's first carry and first scanned input among its operands.

    JAX's versions have different names for these parameters; the ranks tell them in every version.
    """
    body = equation.params["jaxpr"].jaxpr

    def stacked(outer: Any, inner: Any) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in pairs)

    first_x = len(equation.invars) - stacked(equation.invars, body.invars)
    carried = len(equation.outvars) - stacked(equation.outvars, body.outvars)
    return first_x - carried, first_x


def _needed(jaxpr: Any) -> list:
    """The equations whose results are read."""
    wanted = set(_variables(jaxpr.outvars))
    needed = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in wanted for v in equation.outvars):
            needed.append(equation)
            wanted |= _variables(equation.invars)
    return needed[::-1]


def _rounded(jaxpr: Any) -> set:
    """The float32 variables that loops take an entry of at a time, and only multiply."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body, (_, first) = equation.params["jaxpr"].jaxpr, scan_operands(equation)
            for stack, entry in zip(equation.invars[first:], body.invars[first:], strict=True):
                if stack.aval.dtype == np.float32 and _only_multiplied(body, entry):
                    found.add(stack)
    return found


def _only_multiplied(jaxpr: Any, variable: Any) -> bool:
    """Whether nothing reads a variable but products of default precision, however it is moved."""
    if any(v is variable for v in jaxpr.outvars):
        return False
    for equation in jaxpr.eqns:
        places = [i for i, v in enumerate(equation.invars) if v is variable]
        name, params = equation.primitive.name, equation.params
        if not places or (name == "dot_general" and params["precision"] is None):
            continue
        if name in MOVES:
            inner, readers = jaxpr, equation.outvars
        elif (called := inner_jaxpr(equation)) is not None:
            inner = getattr(called, "jaxpr", called)
            readers = [inner.invars[i] for i in places]
        else:
            return False
        if not all(_only_multiplied(inner, reader) for reader in readers):
            return False
    return True


def _roots(values: Iterable[Value]) -> frozenset:
    return frozenset().union(*(value.roots for value in values))


def _variables(atoms: Iterable[Any]) -> frozenset:
    return frozenset(a for a in atoms if not hasattr(a, "val"))


def _read(env: Mapping, atom: Any) -> Value:
    return _constant(atom.val) if hasattr(atom, "val") else env[atom]


def _constant(x: Any) -> Value:
    shape = np.shape(x)
    return Value(shape, getattr(x, "dtype", np.dtype(type(x))), ((),) * len(shape), free=True)
