"""Gradients compressed before they are summed over the mesh axis ``data``; what is left out of a
step is kept and added to the next (error feedback).

A batch has R parts of its rows. Each has the gradient g of its rows, as a part of the mean, and an
error e of its own. It sends an approximation s of g + e, and keeps e' = g + e - s: all that was
sent plus all errors is the sum of the gradients, to rounding.

Of a matrix ``powersgd`` sends two thin factors (Vogels et al. 2019,
https://arxiv.org/abs/1905.13727), ``topk`` the largest entries (Stich et al. 2018,
https://arxiv.org/abs/1809.07599), ``sign`` signs and a mean magnitude (Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847), ``int8`` 255 levels of the largest magnitude. Vectors are whole.
The last two sum in two stages (Tang et al. 2021, https://arxiv.org/abs/2102.02888): each device
receives one piece of all parts, sums it, and sends it to all, rounded again; the second error is
that of the piece's owner. So what a device receives does not grow with R.

The number of parts is part of the mathematics. The mesh is not, but for weights that other axes
split: topk, sign and int8 take each device's share of such a matrix for a matrix of its own.

Shapes: R parts, of which a device has r; P pieces of a leaf, as many as parts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.accumulated import accumulated
from jaxtrain.engines.members import AXIS, at, each, parts_of
from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, plain, run_engine
from jaxtrain.host.least import check_least, given
from jaxtrain.loss import Last, LossFn
from jaxtrain.sharding.placement import free_axes, sizes_are_final, specs_of
from jaxtrain.sharding.row_keys import row_count
from jaxtrain.sharding.specs import axes_of, restrict
from jaxtrain.tree import PyTree, by_paths, map_named, named_leaves

Name = Literal["powersgd", "topk", "sign", "int8"]


@dataclasses.dataclass(frozen=True)
class Compress:
    """Gradients compressed before they are summed over the mesh axis data; what a step leaves out
    is added to the next."""

    name: Name | None = None
    """Rule of compression: powersgd sends two thin factors of a matrix, topk its largest entries,
    sign one bit of each, int8 eight; left out, gradients are summed as they are."""
    rank: int = 4
    """Width of the factors of powersgd."""
    fraction: float = 0.01
    """Share of the entries of a matrix, or of a stack of them, that topk sends."""
    parts: int | None = None
    """Number of parts of the batch whose gradients are compressed: a multiple of the mesh axis
    data; left out, the size of that."""

    def __post_init__(self) -> None:
        check_least(self, rank=1, parts=1)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"`compress.fraction` is {self.fraction}: give above 0, and at most 1")
        takes = {None: set(), "powersgd": {"rank", "parts"}, "topk": {"fraction", "parts"}}
        typed = given(self)
        for field in sorted(typed.keys() - {"name"} - takes.get(self.name, {"parts"})):
            raise ValueError(
                f"`compress.{field}` is {typed[field]} and `compress.name` {self.name}, "
                "which has none: give another name, or leave it out"
            )

    def on_mesh(self, data: int) -> "Compress":
        """Returns it with its number of parts, on a mesh whose axis ``data`` has this size."""
        if self.name is None or self.parts is not None:
            return self
        if data < 1:
            raise ValueError(
                f"`compress.name` is {self.name} and neither `compress.parts` nor `mesh.data` is "
                "given: give one of them, for the number of parts is part of the mathematics"
            )
        return dataclasses.replace(self, parts=data)


def compressed(how: Compress) -> Engine:
    """Returns the engine for ``build_train_step(engine=)``, whose ``init`` is ``memory`` of
    ``init_state``. It is called once per step, whatever ``accumulate`` is.

    >>> engine = compressed(Compress("topk", fraction=0.25, parts=2))
    >>> engine.init({"kernel": jnp.ones((3, 4))})["members"]["kernel"].shape
    (2, 3, 4)
    """
    rules = {"sign": functools.partial(two_stages, SIGN), "powersgd": whole}
    rules |= {"int8": functools.partial(two_stages, INT8)}
    rule = rules.get(how.name, functools.partial(_largest, how.fraction))

    def init(params: PyTree) -> PyTree:
        def error(x: jax.Array) -> jax.Array:
            return jnp.zeros((how.parts, *x.shape), jnp.promote_types(x.dtype, jnp.float32))

        memory = {"members": jax.tree.map(error, params)}
        if how.name == "powersgd":
            memory["shared"] = map_named(functools.partial(_first_factor, how.rank), params)
        return memory

    def compressing(loss_fn: LossFn, microbatches: int) -> GradientEngine:
        built = plain(loss_fn) if microbatches == 1 else accumulated(loss_fn, microbatches)
        return _engine(built, rule, how.parts, microbatches)

    return Engine(compressing, accumulates=True, init=init, by_parts=True)


class Parts(NamedTuple):
    """The collectives of R parts, of which this device has those of the leading axis [r, ...].

    ``received`` has the bytes that each part receives, on a ring, as they are traced."""

    count: int
    mapped: bool
    received: list[float]

    def total(self, x: jax.Array) -> jax.Array:
        """[r, ...] -> the sum over all parts [...], in float32 or wider."""
        # Of 16 bits it would be rounded in between, and XLA's CPU compiler ends the process.
        x, own = x.astype(jnp.promote_types(x.dtype, jnp.float32)).sum(0), x.dtype
        return self._received(jax.lax.psum(x, AXIS) if self.mapped else x, 2).astype(own)

    def gathered(self, x: jax.Array) -> jax.Array:
        """[r, ...] -> [R, ...]."""
        return self._received(jax.lax.all_gather(x, AXIS, tiled=True) if self.mapped else x)

    def turned(self, x: jax.Array) -> jax.Array:
        """All pieces of own parts [r, P, ...] -> own pieces of all parts [R, r, ...]."""
        how = {"split_axis": 1, "concat_axis": 0, "tiled": True}
        x = jax.lax.all_to_all(x, AXIS, **how) if self.mapped else x
        return self._received(x, 1 / x.shape[1])

    def _received(self, x: jax.Array, times: float = 1) -> jax.Array:
        self.received.append(x.nbytes * times)
        return x

    def numbers(self, here: int) -> jax.Array:
        """The numbers [r] of this device's parts."""
        return (jax.lax.axis_index(AXIS) * here if self.mapped else 0) + jnp.arange(here)


# What a rule makes of a leaf [r, ...] of gradients and errors: the total [...] and new errors.
Rule = Callable[[Parts, jax.Array], tuple[jax.Array, jax.Array]]


def whole(parts: Parts, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return parts.total(x), jnp.zeros_like(x)


def _largest(fraction: float, parts: Parts, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if fraction == 1:
        return whole(parts, x)
    flat = x.reshape(len(x), -1)
    size = flat.shape[1]
    _, index = jax.lax.top_k(jnp.abs(flat), max(1, round(fraction * size)))
    value = jnp.take_along_axis(flat, index, 1)
    every = parts.gathered(index), parts.gathered(value)
    # Part by part: devices that added in another order would drift apart.
    add = lambda sums, sent: (sums.at[sent[0]].add(sent[1], unique_indices=True), None)  # noqa: E731
    total, _ = jax.lax.scan(add, jnp.zeros(size, x.dtype), every)
    error = flat.at[jnp.arange(len(x))[:, None], index].set(0)
    return total.reshape(x.shape[1:]), error.reshape(x.shape)


class Code(NamedTuple):
    """A rounding of pieces [..., c] to few bits: how it is written, and read."""

    write: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    read: Callable[[jax.Array, jax.Array], jax.Array]


def _to_int8(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    del valid
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def _to_signs(x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    sums = jnp.where(valid, jnp.abs(x), 0).sum(-1, keepdims=True)
    return jnp.packbits(x >= 0, -1), sums / jnp.maximum(valid.sum(-1, keepdims=True), 1)


INT8 = Code(_to_int8, lambda code, scale: code.astype(scale.dtype) * scale)
SIGN = Code(_to_signs, lambda code, scale: (2.0 * jnp.unpackbits(code, -1) - 1.0) * scale)


def two_stages(code: Code, parts: Parts, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums a leaf [r, ...] of every part's, of which each piece is written in few bits, summed by
    one device, and written again. Returns the total [...] and errors [r, ...]."""
    here, size = len(x), x[0].size
    piece = -(-size // (8 * parts.count)) * 8
    pad = parts.count * piece - size
    flat = jnp.pad(x.reshape(here, -1), ((0, 0), (0, pad))).reshape(here, parts.count, piece)
    valid = jnp.asarray(np.arange(size + pad).reshape(parts.count, piece) < size)
    own = parts.numbers(here)
    sent = code.write(flat, valid)
    sums = code.read(*map(parts.turned, sent)).sum(0)
    again = code.write(sums, valid[own])
    error = flat - code.read(*sent)
    error = error.at[jnp.arange(here), own].add(sums - code.read(*again))
    total = code.read(*map(parts.gathered, again)).reshape(-1)[:size]
    return total.reshape(x.shape[1:]), error.reshape(here, -1)[:, :size].reshape(x.shape)


def _first_factor(rank: int, name: str, x: jax.Array) -> jax.Array | None:
    """The factor [..., n, k] that powersgd begins with; None of what is sent whole."""
    if x.ndim < 2 or rank * sum(x.shape[-2:]) >= np.prod(x.shape[-2:]):
        return None
    key = jax.random.fold_in(jax.random.key(rank), sum(map(ord, name)))
    return jax.random.normal(key, (*x.shape[:-2], x.shape[-1], rank))


def _low_rank(parts: Parts, x: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of power iteration: the total, errors and the next factor."""
    with jax.default_matmul_precision("highest"):
        p = jnp.linalg.qr(parts.total(x @ q))[0]
        own = jnp.swapaxes(x, -1, -2) @ p
        q = parts.total(own)
        product = lambda q: p @ jnp.swapaxes(q, -1, -2)  # noqa: E731
        return product(q), x - product(own), q


def _engine(built: GradientEngine, rule: Rule, count: int, microbatches: int) -> GradientEngine:
    """The engine that sums, compressed, what ``built`` gives of each of ``count`` parts."""

    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset(), memory=None):
        del model_state  # which an engine by parts is not given
        if loss_scale is not None:
            raise ValueError(
                "gradients are compressed and the policy has a dynamic loss scale (fp16): what is "
                "kept from step to step could overflow with no scale to lower; use bf16 or f32"
            )
        specs = specs_of(params) or {}
        _check(count, batch, microbatches, specs)

        def one(number: jax.Array, rows: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
            params, rng = shared
            # A single part draws as the plain step does.
            key = rng if count == 1 else jax.random.fold_in(rng, number)
            sums = run_engine(built, params, None, rows, key, None, frozen=frozen)
            return _pinned(sums.grads, specs), sums.loss

        grads, losses = each(one, jnp.arange(count), batch, (params, rng), split=True)
        add = lambda a, b: (a + b, None)  # noqa: E731
        loss, _ = jax.lax.scan(add, at(losses, 0), at(losses, slice(1, None)))
        per = jnp.where(loss.weight != 0, 1 / jnp.where(loss.weight != 0, loss.weight, 1), 0)
        errors = named_leaves(memory["members"])
        # Errors are of means: batches may have other weights.
        x = {n: g * per.astype(g.dtype) + errors[n] for n, g in named_leaves(grads).items()}
        factors = named_leaves(memory.get("shared", {}))
        totals, *made, received = exchanged(rule, x, factors, specs)
        counted = dict(loss.metrics) | {"exchanged_bytes": Last(jnp.float32(received))}
        loss = dataclasses.replace(loss, metrics=counted)
        kept = {
            part: map_named(lambda name, old, new=new: new.get(name, old), memory[part])
            for part, new in zip(("members", "shared"), made, strict=True)
            if part in memory
        }
        sums = {name: mean * loss.weight.astype(mean.dtype) for name, mean in totals.items()}
        return GradientSums(by_paths(sums, params), loss, None, microbatches, kept)

    return engine


def exchanged(
    rule: Rule,
    x: Mapping[str, jax.Array],
    factors: Mapping[str, jax.Array] = {},
    specs: Mapping[str, P] = {},
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array], float]:
    """Sums leaves over their parts, compressed, along the mesh axis ``data`` where that divides R.

    Args:
      rule: of matrices without a factor; vectors are sent whole.
      x: leaves [R, ...] by path.
      factors: of powersgd, by path.
      specs: of leaves [...] on the mesh that is traced for, by path; none without one.

    Returns:
      Totals [...], errors [R, ...] and new factors, by path, and how many bytes a part receives.
    """
    count = len(next(iter(x.values())))
    parts = Parts(count, parts_of(count) > 1, [])

    def on_device(x: Mapping[str, jax.Array], factors: Mapping[str, jax.Array]) -> tuple:
        low = {name: _low_rank(parts, x[name], q) for name, q in factors.items() if name in x}

        def local(x: Mapping[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
            return {n: (rule if y.ndim > 2 else whole)(parts, y) for n, y in x.items()}

        rest = {name: y for name, y in x.items() if name not in low}
        if specs and (free := free_axes(jax.sharding.get_abstract_mesh())):
            # Of a collective on what the partitioner splits it would make one whole first.
            own = {name: restrict(specs[name], free) for name in rest}
            places = {name: P(None, *spec) for name, spec in own.items()}
            out = {name: (own[name], places[name]) for name in rest}
            how = {"axis_names": set(free), "check_vma": False}
            local = jax.shard_map(local, in_specs=(places,), out_specs=out, **how)
        found = low | local(rest)
        totals, errors = ({n: made[i] for n, made in found.items()} for i in (0, 1))
        return totals, errors, {name: made[2] for name, made in low.items()}

    if parts.mapped:
        places = {"in_specs": (P(AXIS), P()), "out_specs": (P(), P(AXIS), P())}
        on_device = jax.shard_map(on_device, axis_names={AXIS}, check_vma=False, **places)
    return (*on_device(x, factors), sum(parts.received))


def _pinned(grads: PyTree, specs: Mapping[str, P]) -> PyTree:
    """Gradients that lie, along axes that are left to the partitioner, as their parameters do."""
    free = free_axes(jax.sharding.get_abstract_mesh())
    if not specs or not free:
        return grads
    places = map_named(lambda name, _: restrict(specs[name], free), grads)
    return jax.lax.with_sharding_constraint(grads, places)


def _check(count: int, batch: PyTree, microbatches: int, specs: Mapping[str, P]) -> None:
    """Raises ValueError where a mesh or a batch cannot have so many parts."""
    mesh, rows = jax.sharding.get_abstract_mesh(), row_count(batch)
    if AXIS in free_axes(mesh) and sizes_are_final() and parts_of(count) == 1:
        raise ValueError(
            f"`compress.parts` is {count} and mesh axis {AXIS!r} has size {mesh.shape[AXIS]}: give "
            "a multiple of it, so that each part of the axis has parts of its own"
        )
    for name, x in named_leaves(batch).items():
        if jnp.ndim(x) and (x.shape[0] != rows or rows % (count * microbatches)):
            raise ValueError(
                f"batch leaf {name!r} has {x.shape[0]} rows and gradients are compressed in "
                f"{count} parts of {microbatches} microbatches: give all leaves a multiple of "
                f"{count * microbatches} rows, or make it a scalar"
            )
    for name, spec in specs.items():
        if AXIS in axes_of(spec):
            raise ValueError(
                f"parameter {name!r} is split over mesh axis {AXIS!r} (`zero` 3), along which "
                "gradients are compressed: spread it over fsdp"
            )
