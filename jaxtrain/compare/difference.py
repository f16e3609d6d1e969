"""The equation at which a step on a mesh begins to differ from the step on one device.

Both steps are traced, and run with all their values recorded (:mod:`.recording`). Equations of the
two programs are paired in order, by operation and line of source. On a mesh each device of a
``shard_map`` has its own number, and that stands in some relation to the number on one device: the
same, a part of it, a term of a sum that is still to come (:mod:`.relations`). The search begins at
the results that differ and follows, backwards, values that stand in no such relation. It ends where
an equation's operands do and its result does not.

One device's program runs twice, the second time with arguments off by a few units in the last
place: rounding may make a value differ as much as that does.
"""

import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import pathlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.compare.reasons import SUMS, UNEXPLAINED, reason
from jaxtrain.compare.recording import Value, record
from jaxtrain.compare.relations import Relation, relate
from jaxtrain.jaxprs import equations
from jaxtrain.sharding.mesh import automatic
from jaxtrain.sharding.placement import tracing_on
from jaxtrain.sharding.rules import Rule, Rules
from jaxtrain.tree import PyTree

QUICK = {"xla_backend_optimization_level": 0}
PERTURBED = 4  # units in the last place
NOISE = 30  # what rounding may do, in what the perturbation does
# Where one device's program lacks an equation of these, its operand stands for the result.
PASSING = SUMS | {
    *("enter", "exit", "pvary", "pcast", "pmax", "pmin", "ppermute", "all_gather", "reshard"),
    *("all_gather_invariant", "all_gather_reduced", "sharding_constraint", "mesh_cast"),
    *("copy", "copy_p", "name", "optimization_barrier"),
}
SAME, NEITHER = Relation("same"), Relation("none", error=math.inf)
# What is in other iterations, or other branches, what an operand is.
BOUNDS = frozenset(["carry", "element", "result", "stack", "branch"])
_OWN = str(pathlib.Path(__file__).parents[1]) + os.sep
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "chex")


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two layouts begin to differ.

    Args:
      file, line: the source of the equation; "" and 0 where there is none.
      operation: the equation's primitive.
      result: the shape and dtype of its result on one device of the mesh.
      reason: why it differs, as the end of a sentence.
      error: the size of the difference there, relative in the 2-norm.
      relation: of the result to the result on one device.
      since: where the two programs have no equation in common, the source of the first that one
        device lacks: they begin to differ somewhere between that and here.
      caller: for a line of the library, the line of the user's that led there.
    """

    file: str
    line: int
    operation: str
    result: str
    reason: str
    error: float
    relation: Relation
    since: str = ""
    caller: str = ""

    def __str__(self) -> str:
        place = f"{_short(self.file)}:{self.line}" if self.file else "an equation without a line"
        place = f"between {self.since} and {place}" if self.since else f"at {place}"
        place += f" (called at {self.caller})" if self.caller else ""
        off = f" ({self.error:.2g} off)" if np.isfinite(self.error) else ""
        return f"begins to differ {place}, {self.operation} of {self.result}: {self.reason}{off}"


def first_difference(
    step: Callable[..., Any],
    *args: PyTree,
    mesh: Mesh,
    reference: Callable[..., Any] | None = None,
    rules: Rules | Sequence[Rule] | None = None,
) -> Difference | None:
    """Finds the equation at which a step on a mesh begins to differ from that on one device.

    The step is run with all of its intermediate values kept, so use a small model.

    Args:
      step: a step such as ``step(state, batch)``, or any other function of arrays.
      *args: its arguments. Those that lie on the mesh stay as they are placed, others are copied to
        all of its devices.
      mesh: the mesh, whose axes are left to the compiler. The step is traced within
        ``jax.set_mesh``.
      reference: the step as it is built for :func:`one_device`. Left out, it is ``step``, which
        then takes its mesh from the context or has none.
      rules: sharding rules, as for :func:`jaxtrain.compile_step`.

    Returns:
      None where all results agree.

    >>> from jaxtrain import make_mesh
    >>> local = lambda x: jax.lax.psum(x.sum(), "data")
    >>> step = lambda x: jax.shard_map(local, in_specs=P("data"), out_specs=P())(x)
    >>> first_difference(step, np.ones(8, "f"), mesh=make_mesh(devices=jax.devices()[:1]))
    """
    mesh = automatic(mesh)
    alone, sides = one_device(mesh), []
    for function, where in ((reference or step, alone), (step, mesh)):
        place = functools.partial(_placed_on, mesh=where)
        placed = jax.tree.map(place, args)
        context = functools.partial(tracing_on, where, placed[0] if placed else None, rules)
        with context():
            jaxpr = jax.make_jaxpr(function)(*placed)
        sides.append((jaxpr, jax.tree.leaves(placed), context))
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return difference_of(*sides, compiler_options=QUICK if on_cpu else None)


def one_device(mesh: Mesh) -> Mesh:
    """The mesh of one device whose axes are those of another mesh."""
    shape = (1,) * len(mesh.axis_names)
    return Mesh(
        mesh.devices.reshape(-1)[:1].reshape(shape), mesh.axis_names, axis_types=mesh.axis_types
    )


def difference_of(alone: tuple, spread: tuple, *, compiler_options=None) -> Difference | None:
    """Finds the first difference of the programs of one device and of a mesh: of each the closed
    jaxpr, the arguments, and a function that gives the context to trace in."""
    jaxpr, args, context = alone
    avals = [v.aval for e in equations(jaxpr.jaxpr) for v in e.outvars]
    dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype")}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    coarse = max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0)
    random = np.random.default_rng(0)
    options = {"compiler_options": compiler_options}
    runs = [args, [perturbed(x, PERTURBED * coarse, random) for x in args]]
    reference = record(jaxpr, runs, context=context, **options)
    jaxpr, args, context = spread
    return _Search(reference, record(jaxpr, [args], context=context, **options), coarse).found()


class _Search:
    """Two recorded programs, and which of their values agree."""

    def __init__(self, reference: tuple, program: tuple, coarse: float):
        (_, self.expected, (self.perturbed,)), (_, self.results, _) = reference, program
        self.coarse, self.pending = coarse, set()
        keys = [[_key(value) for value in side[0]] for side in (reference, program)]
        matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
        self.pairs = {
            program[0][b + i]: reference[0][a + i]
            for a, b, size in matcher.get_matching_blocks()
            for i in range(size)
        }
        self.relations = functools.cache(self._relations)
        # What depends on no argument, and what of it tells devices from each other.
        self.fixed = {v: v.name != "argument" for v in program[0]}
        self.placed = {v: v.name == "axis_index" for v in program[0]}
        for table, combine, default in ((self.fixed, all, True), (self.placed, any, False)):
            before = None
            while before != (before := sum(table.values())):  # again, for what loops carry on
                for v in program[0]:
                    if v.inputs:
                        table[v] = combine(table.get(x, default) for x in v.inputs)

    def found(self) -> Difference | None:
        """Searches backwards from the results that differ.

        Values without a counterpart are passed through as seldom as can be: what lies behind many
        of them is less likely to be the cause.
        """
        pairs = zip(self.results, self.expected, strict=True)
        wrong = [v for v, r in pairs if not self.agree(v, r)]
        # By the unknown values on the way: values, each with the last known one in front of it.
        levels, seen, unknown = [[(value, value) for value in wrong]], set(), 0
        while unknown < len(levels):
            frontier = []
            for value, last in levels[unknown]:  # which grows meanwhile
                if value not in seen:
                    seen.add(value)
                    frontier += [(value.number, value, last)] if self.begins(value) else []
                    before = value if self.relations(value) else last
                    for operand, right in self.inputs(value):
                        if not np.all(right):
                            counts = operand.name not in PASSING | BOUNDS
                            more = unknown + (counts and self.relations(operand) is None)
                            levels += [[] for _ in range(more + 1 - len(levels))]
                            levels[more].append((operand, before))
            if frontier:
                known = [each for each in frontier if self.relations(each[1])]
                # Of those that one device lacks, the nearest to what is known.
                nearest = min(known) if known else max(frontier)
                value, last = nearest[1:]
                found = self.explained(value) if known else None
                if found and not (unknown and found.reason == UNEXPLAINED):
                    return found
                same = not known and _place(value) == _place(last)
                return dataclasses.replace(
                    self.explained(last), since="" if same else _label(value)
                )
            unknown += 1
        return (
            dataclasses.replace(self.explained(wrong[0]), since="the beginning") if wrong else None
        )

    def begins(self, value: Value) -> bool:
        """Whether a value is wrong in an iteration in which its operands are right."""
        wrong = ~self.right(value)
        rights = [right for _, right in self.inputs(value)]
        agree = [x.reshape(x.shape + (1,) * (wrong.ndim - x.ndim)) for x in rights]
        return value.name not in BOUNDS and bool(
            np.any(functools.reduce(np.logical_and, agree, wrong))
        )

    def agree(self, value: Value, other: Value) -> bool:
        """Whether a result is that of one device; what cannot be compared counts as that."""
        relations = self.relations(value, other) or ()
        return all(relation.kind == "same" for relation in relations)

    def inputs(self, value: Value) -> list[tuple[Value, np.ndarray]]:
        """What a value was computed from, and in which iterations that is right."""
        operands = [operand for operand in value.inputs if operand.name != "literal"]
        return [(operand, self.right(operand)) for operand in operands]

    def right(self, value: Value) -> np.ndarray:
        """In which iterations of its loops a value is one that a correct program may have."""
        if value.number < 0 or self.depends(value):
            return np.ones(value.loops, bool)
        relations = self.relations(value)
        if relations is None:
            right = np.full(value.loops, self.fixed[value])
        else:
            right = np.array([r.right for r in relations]).reshape(value.loops)
        if value.name in BOUNDS and not np.all(right) and value not in self.pending:
            self.pending.add(value)  # a loop may carry a value on to itself
            within = all(np.all(self.right(operand)) for operand in value.inputs)
            self.pending.remove(value)
            return np.full(value.loops, True) if within else right
        return right

    def counterpart(self, value: Value) -> Value | None:
        if value in self.pairs:
            return self.pairs[value]
        return self.counterpart(value.inputs[0]) if value.name in PASSING else None

    def _relations(self, value: Value, other: Value | None = None) -> list[Relation] | None:
        """The relation of a value to its counterpart in each iteration; None where it has none."""
        other = other or self.counterpart(value)
        if other is None or value.number < 0:
            return None
        again = other.data if other.number < 0 else self.perturbed[other.number]
        alone = (_iterations(x, other)[(0,) * len(other.axes)] for x in (other.data, again))
        alone = [(b, self.bound(other, b, c)) for b, c in zip(*alone, strict=True)]
        found = np.moveaxis(_iterations(value.data, value), len(value.axes), 0)
        alike = other.loops == value.loops and value.taken is None
        each = [[one] for one in alone] if alike else [alone] * len(found)
        result = [_nearest(a, bs, value.axes) for a, bs in zip(found, each, strict=True)]
        if "pipe" in value.axes and not (alike and all(r.right for r in result)):
            # Each stage has its own layers of its own microbatch: any iteration's will do.
            axes, stage = dict(value.axes), 1 + list(value.axes).index("pipe")
            parts, shape = axes.pop("pipe"), found.shape[1 + len(value.axes) :]
            if shape and alone[0][0].shape[:1] == (parts * shape[0],):
                alone = [(x, bound) for b, bound in alone for x in np.split(b, parts)]
            stages, runs = (np.moveaxis(x, stage, 1) for x in (found, _taken(value)))
            for i, (xs, rs) in enumerate(zip(stages, runs, strict=True)):
                all_ = [_nearest(x, alone, axes) for x, r in zip(xs, rs, strict=True) if r.any()]
                result[i] = min(result[i], max(all_, key=_badness, default=SAME), key=_badness)
        return None if NEITHER in result else result

    def bound(self, other: Value, expected: np.ndarray, again: np.ndarray) -> float:
        """The distance that rounding may make."""
        expected, again = _finite(expected), _finite(again)
        moved = (3 if self.coarse > 1e-4 else NOISE) * float(np.linalg.norm(again - expected))
        if not jnp.issubdtype(other.aval.dtype, jnp.inexact):
            return moved
        sizes = [np.abs(_finite(x.data)).max(initial=0) for x in other.inputs if _inexact(x)]
        least = PERTURBED * self.coarse * max(sizes, default=0) * expected.size**0.5
        relative = min(100 * self.coarse, 0.02) * float(np.linalg.norm(expected))
        return max(relative, moved, least)

    def explained(self, value: Value) -> Difference:
        """Says why a value differs though its operands do not."""
        relation = max(self.relations(value) or [NEITHER], key=_badness)
        operands = [(x, r) for x in value.inputs if (r := self.worst(x)) is not None]
        given = getattr(self.pairs.get(value), "inputs", ())
        pairs = zip(value.inputs, given, strict=False)
        numbers = [(x.data, y.data) for x, y in pairs if x.name == y.name == "literal"]
        by_device = any(map(self.depends, value.inputs))
        why = reason(value, relation, operands, numbers=numbers, by_device=by_device)
        # What leaves a map unfinished is named where it was made.
        named = self.origin(*operands[0]) if value.name == "exit" and operands else value
        file, line, caller = _place(named)
        shape = ",".join(map(str, named.aval.shape))
        result = f"{named.aval.dtype}[{shape}]"
        return Difference(file, line, named.name, result, why, relation.error, relation, "", caller)

    def origin(self, value: Value, relation: Relation) -> Value:
        """Follows a reduction that is still to come to the equation that began it."""
        alike = lambda r: r and (r.kind, r.axes) == (relation.kind, relation.axes)  # noqa: E731
        seen, more = {value}, [value]
        while more:
            value = more[0]
            more = [x for x in value.inputs if x not in seen and alike(self.worst(x))]
            seen.update(more)
        return value

    def depends(self, value: Value) -> bool:
        """Whether a value tells devices from each other and nothing else."""
        return self.fixed.get(value, False) and self.placed[value]

    def worst(self, value: Value) -> Relation | None:
        """The relation of a value in the iteration where it is farthest from the same."""
        if self.depends(value) or not (found := self.relations(value)):
            return None
        return max(found, key=lambda r: (bool(r.axes), r.error))


def _nearest(found: np.ndarray, expected: Sequence[tuple], axes: Mapping[str, int]) -> Relation:
    """The best relation to one of several values, each with the distance that rounding may make."""
    best = NEITHER
    for one, bound in expected:
        best = min(best, relate(found, one, axes, bound) or NEITHER, key=_badness)
        if best.right:
            break
    return best


def _badness(relation: Relation) -> tuple:
    return not relation.right, relation is NEITHER, relation.error


def _taken(value: Value) -> np.ndarray:
    """[iterations, devices...]: where the branch that a value is in was taken."""
    shape = tuple(value.axes.values())
    runs = np.ones((math.prod(value.loops), *shape), bool)
    if value.taken is not None:
        index, k = value.taken
        chosen = np.moveaxis(_iterations(index.data, index), len(index.axes), 0) == k
        chosen = chosen.reshape(*chosen.shape, *(1,) * (len(shape) - len(index.axes)))
        runs &= np.repeat(chosen, len(runs) // len(chosen), axis=0)
    return runs


def _iterations(data: Any, value: Value) -> np.ndarray:
    """[devices..., iterations, *shape]"""
    first, last = len(value.axes), len(value.axes) + len(value.loops)
    data = np.asarray(data)
    return data.reshape((*data.shape[:first], math.prod(value.loops), *data.shape[last:]))


def _finite(x: Any) -> np.ndarray:
    return np.nan_to_num(np.asarray(x).astype(np.float64), posinf=0, neginf=0)


def _inexact(value: Value) -> bool:
    return jnp.issubdtype(value.aval.dtype, jnp.inexact)


def perturbed(x: Any, relative: float, random: np.random.Generator) -> Any:
    """Returns an array with every number off by up to ``relative`` of it; integers stay."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    factor = 1 + relative * random.uniform(-1, 1, x.shape)
    return jax.device_put((_finite(x) * factor).astype(x.dtype), x.sharding)


def _placed_on(x: Any, mesh: Mesh) -> jax.Array:
    """An array as it lies on the mesh, or a copy of it on each of its devices."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return x
    typed = jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
    return jax.device_put(x if typed else np.asarray(x), NamedSharding(mesh, P()))


def _key(value: Value) -> tuple:
    """What is equal for an equation of one program and the same of the other."""
    file, line, _ = _place(value)
    kind = str(value.aval.dtype), value.aval.ndim
    return value.name, value.output, file, line, *kind


def _place(value: Value) -> tuple[str, int, str]:
    """The file and line of a value's equation; for one of the library's, the caller's too."""
    inside = None
    for equation in value.equations:
        for frame in getattr(equation.source_info.traceback, "frames", ()):
            name = frame.file_name
            if name.startswith(_libraries()):
                continue
            if not name.startswith(_OWN):
                here = name, frame.line_num
                return (*here, "") if inside is None else (*inside, f"{_short(name)}:{here[1]}")
            inside = inside or (name, frame.line_num)
    return (*(inside or ("", 0)), "")


def _label(value: Value) -> str:
    file, line, _ = _place(value)
    return f"{_short(file)}:{line}" if file else "the beginning"


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Where files lie that no user wrote."""
    specs = filter(None, map(importlib.util.find_spec, LIBRARIES))
    homes = [str(pathlib.Path(spec.origin).parent) + os.sep for spec in specs]
    return (*homes, sysconfig.get_path("stdlib") + os.sep, "<")


def _short(name: str) -> str:
    """A path from the working folder, where it lies in that."""
    here, path = pathlib.Path.cwd(), pathlib.Path(name)
    return str(path.relative_to(here)) if path.is_relative_to(here) else name
