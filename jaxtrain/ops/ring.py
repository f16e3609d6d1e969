"""Attention whose keys go around a ring of devices, each of which has some positions of a row.

No device ever has all keys of a row (Liu et al. 2023, https://arxiv.org/abs/2310.01889): while it
attends to those of one device, those of the next are on their way, and what it finds is put
together by the log-sum-exp. The backward pass goes around once more, and the gradients of keys and
values travel with them.

A zig-zag shares causal work evenly: a row is cut into 2 C pieces, and for the time of the ring
device i has pieces i and 2 C - 1 - i, of whose scores every step has half on every device. Where
there is a window positions stay in order, and keys that nobody sees are not sent.

Shapes: B batch, C devices of the ring, T queries and S keys of a device, G key and value heads,
R query heads of each, K features.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.ops.mask import Mask
from jaxtrain.ops.numerics import MASKED, wide
from jaxtrain.ops.per_device import not_taken_over, repeated, split_over
from jaxtrain.ops.tiled import SAVED, Part, tile_rows
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import in_shard_map
from jaxtrain.tree import PyTree

ALL = slice(None)


def ring_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: Mask,
    *,
    softcap: float | None,
) -> jax.Array:
    """Computes attention without dropout and bias, of rows that the axes of ``sequence`` divide.

    Arguments and result are those of :func:`jaxtrain.ops.tiled.tiled_attention`.
    """
    (axes, size), (_, parts) = split_over("sequence"), split_over("heads")
    B, T, H, K = q_BTHK.shape
    k, v = (repeated(x, parts).transpose(0, 2, 1, 3) for x in (k_BSGK, v_BSGK))
    q = q_BTHK.reshape(B, T, k.shape[1], -1, K).transpose(0, 2, 3, 1, 4)
    # On a CPU a permutation within a pipeline's branch waits for devices that take the other.
    gathers = platform() == "cpu" and in_shard_map()
    part = Part(mask.causal, mask.window, softcap, tile_rows.value)
    ring = _Ring(axes, size, T // size, part, gathers)
    out_BGRTK = _attention(ring, q, k, v, mask.documents, mask.windowed)
    return out_BGRTK.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


class _Ring(NamedTuple):
    """Static arguments: mesh axes, their size, the queries of a device, the attention of all to
    all, and whether what is sent is gathered instead."""

    axes: tuple[str, ...]
    size: int
    length: int
    part: Part
    gathers: bool

    @property
    def zigzag(self) -> bool:
        return self.part.causal and self.part.window is None and self.length % 2 == 0

    def hops(self, windowed: jax.Array | None) -> int:
        """The number of other devices whose keys any query may see."""
        window = self.part.window
        if window is None or windowed is not None or not self.part.causal:
            return self.size - 1
        return min(self.size - 1, -(-(window - 1) // self.length))

    def specs(self, kinds: str) -> tuple[P, ...]:
        """How arrays lie: queries [B, G, R, T, ...] (q), keys [B, G, S, K] (k), document numbers
        [B, T] (d) and what all devices have alike (a)."""
        batch, heads = (split_over(name)[0] or None for name in ("batch", "heads"))
        of = {"q": P(batch, heads, None, self.axes), "k": P(batch, heads, self.axes)}
        of |= {"d": P(batch, self.axes), "a": P()}
        return tuple(of[kind] for kind in kinds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, q_BGRTK, k_BGSK, v_BGSK, documents, windowed):
    return _forward(ring, q_BGRTK, k_BGSK, v_BGSK, documents, windowed)[0]


def _forward(ring, q_BGRTK, k_BGSK, v_BGSK, documents, windowed):
    def local(q, k, v, documents, windowed):
        q, k, v, documents = _in_zigzag(ring, q, k, v, documents)

        def see(at, k, v, keys_BS, *sums):
            met = None if documents is None else (documents[0], keys_BS)

            def more(part, numbers, t, s, sums):
                found = part.forward(q[:, :, :, t], k[:, :, s], v[:, :, s], numbers)
                old = [x[:, :, :, t] for x in sums]
                return tuple(map(_put, sums, _together(old, found), (t, t)))

            return _each(_parts(ring, at, met, windowed), more, sums), ()

        nothing = jnp.zeros(q.shape, wide(q.dtype))
        sums = nothing, jnp.full_like(nothing[..., :1], MASKED)
        keys = k, v, None if documents is None else documents[1]
        (out, lse), _ = _around(ring, ring.hops(windowed), keys, see, sums, ())
        return tuple(_out_of_zigzag(ring, x, 3) for x in (out.astype(q.dtype), lse))

    inputs = q_BGRTK, k_BGSK, v_BGSK, documents, windowed
    found = _on_each_device(ring, local, "qkkda", "qq", *inputs)
    out_BGRTK, lse_BGRT1 = map(checkpoint_name, found, SAVED)
    return out_BGRTK, (inputs, out_BGRTK, lse_BGRT1)


def _backward(ring, saved, d_out_BGRTK):
    inputs, out_BGRTK, lse_BGRT1 = saved

    def local(q, k, v, documents, windowed, out, lse, d_out):
        q, k, v, documents = _in_zigzag(ring, q, k, v, documents)
        out, lse, d_out = (_into_zigzag(ring, x, 3) for x in (out, lse, d_out))

        def see(at, k, v, keys_BS, d_q, d_k, d_v):
            met = None if documents is None else (documents[0], keys_BS)

            def more(part, numbers, t, s, sums):
                of_rows = (x[:, :, :, t] for x in (out, lse, d_out))
                keys = k[:, :, s], v[:, :, s], numbers
                found = part.backward(q[:, :, :, t], *keys, *of_rows)
                return tuple(map(_add, sums, found, ((3, t), (2, s), (2, s))))

            d_q, *d_kv = _each(_parts(ring, at, met, windowed), more, (d_q, d_k, d_v))
            return (d_q,), tuple(d_kv)

        d_q, d_k, d_v = (jnp.zeros(x.shape, wide(x.dtype)) for x in (q, k, v))
        keys = k, v, None if documents is None else documents[1]
        (d_q,), (d_k, d_v) = _around(ring, ring.hops(windowed), keys, see, (d_q,), (d_k, d_v))
        found = zip((d_q, d_k, d_v), (3, 2, 2), strict=True)
        return tuple(_out_of_zigzag(ring, x.astype(q.dtype), axis) for x, axis in found)

    kept = *inputs, out_BGRTK, lse_BGRT1, d_out_BGRTK
    d_qkv = _on_each_device(ring, local, "qkkdaqqq", "qkk", *kept)
    return *d_qkv, None, None


_attention.defvjp(_forward, _backward)


def _on_each_device(ring: _Ring, local: Callable, inputs: str, outputs: str, *args: PyTree):
    kinds = {"in_specs": ring.specs(inputs), "out_specs": ring.specs(outputs)}
    # It has no rule for its gradient, which check_vma is for.
    return jax.shard_map(local, **kinds, axis_names=not_taken_over(), check_vma=False)(*args)


def _around(ring: _Ring, hops: int, keys: PyTree, see: Callable, still: tuple, moving: tuple):
    """Calls ``see(at, *keys, *still, *moving) -> (still, moving)`` for the keys of the device
    itself, ``at`` 0, and of those so many places before it.

    Sums that are ``still`` stay where they are; those ``moving`` are with their keys, and at home
    in the end. What the next call needs is on its way during each.
    """

    def step(carry, at):
        here, still, moving = carry
        there = _sent(ring, here)
        return (there, *see(at, *here, *still, *_sent(ring, moving))), None

    if not hops:
        return see(0, *keys, *still, *moving)
    there = _sent(ring, keys)
    carry = there, *see(0, *keys, *still, *moving)
    (there, still, moving), _ = jax.lax.scan(step, carry, jnp.arange(1, hops))
    still, moving = see(hops, *there, *still, *_sent(ring, moving))
    return still, _sent(ring, moving, ring.size - hops)


def _parts(ring: _Ring, at: Any, documents: Any, windowed: jax.Array | None) -> Iterator[tuple]:
    """What the queries of this device see of the keys of that ``at`` places before it.

    Yields:
      A condition, None for one that holds; and what is seen where it does and where not, None for
      nothing: a part of attention, its numbers, the queries and the keys.
    """
    here, half = _here(ring), ring.length // 2
    part, whole = ring.part, ring.part._replace(causal=False, window=None)
    if isinstance(at, int) and at == 0:
        yield from _by_window(windowed, None, None, (part, (documents, None), ALL, ALL))
        return
    there = jnp.mod(here - at, ring.size)
    if ring.zigzag:
        # The first piece of a device before this one; else with the second piece of its own both.
        places = (ALL, slice(0, half)), (slice(half, None), ALL)
        cuts = [documents and (documents[0][:, t], documents[1][:, s]) for t, s in places]
        seen = ((whole, (cut, None), *place) for cut, place in zip(cuts, places, strict=True))
        yield there < here, *seen
        return
    apart = here - there
    seen = apart > 0 if part.causal else None
    if part.window is None:
        yield seen, (whole, (documents, None), ALL, ALL), None
        return
    near = (jnp.abs(apart) - 1) * ring.length + 1 < part.window
    near = near if seen is None else near & seen
    positions = apart * ring.length + jnp.arange(ring.length)
    yield from _by_window(windowed, near, seen, (part, (documents, positions), ALL, ALL))


def _by_window(windowed, near, seen, part) -> Iterator[tuple]:
    """The part where it is ``near``, and without its window, if that does not hold, where it is
    ``seen``."""
    if windowed is None:
        yield near, part, None
        return
    yield windowed if near is None else windowed & near, part, None
    whole = part[0]._replace(window=None), *part[1:]
    yield ~windowed if seen is None else ~windowed & seen, whole, None


def _each(parts: Iterator[tuple], more: Callable, sums: tuple) -> tuple:
    """Adds to the sums what is seen, by ``more(*part, sums)``."""
    for holds, *sides in parts:
        add, other = (
            (lambda sums: sums) if side is None else functools.partial(more, *side)
            for side in sides
        )
        sums = add(sums) if holds is None else jax.lax.cond(holds, add, other, sums)
    return sums


def _together(one, other):
    """Two parts of attention and their log-sum-exps as one."""
    top = jnp.maximum(one[1], other[1])
    weights = [jnp.exp(lse - top) for _, lse in (one, other)]
    total = sum(weights)
    out = sum(w * x for w, (x, _) in zip(weights, (one, other), strict=True)) / total
    return out, top + jnp.log(total)


def _put(x: jax.Array, new: jax.Array, t: slice) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new, t.start or 0, axis=3)


def _add(x: jax.Array, more: jax.Array, place: tuple[int, slice]) -> jax.Array:
    axis, cut = place
    after = x.shape[axis] - (cut.start or 0) - more.shape[axis]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (cut.start or 0, after)
    return x + jnp.pad(more, widths)


def _here(ring: _Ring) -> jax.Array:
    return jax.lax.axis_index(ring.axes)


def _sent(ring: _Ring, tree: PyTree, places: int = 1) -> PyTree:
    """Sends what each device has to the one so many places behind it."""
    return _moved(ring, tree, [(i, (i + places) % ring.size) for i in range(ring.size)])


def _moved(ring: _Ring, tree: PyTree, pairs: list[tuple[int, int]]) -> PyTree:
    if ring.gathers:
        source = [one for one, _ in sorted(pairs, key=lambda pair: pair[1])]
        from_here = jnp.array(source)[_here(ring)]
        return jax.tree.map(lambda x: jax.lax.all_gather(x, ring.axes)[from_here], tree)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axes, pairs), tree)


def _in_zigzag(ring: _Ring, q, k, v, documents):
    """Queries, keys, values and document numbers as the ring has them."""
    q = _into_zigzag(ring, q, 3)
    k, v = (_into_zigzag(ring, x, 2) for x in (k, v))
    return q, k, v, jax.tree.map(lambda x: _into_zigzag(ring, x, 1), documents)


def _homes(ring: _Ring, piece: int) -> list[tuple[int, int]]:
    """Where the first or second piece of each device goes."""
    pieces = ((i, 2 * i + piece) for i in range(ring.size))
    return [(i, min(c, 2 * ring.size - 1 - c)) for i, c in pieces]


def _into_zigzag(ring: _Ring, x: jax.Array, axis: int) -> jax.Array:
    if not ring.zigzag:
        return x
    pieces = enumerate(jnp.split(x, 2, axis))
    return _turned(ring, *(_moved(ring, x, _homes(ring, i)) for i, x in pieces), axis)


def _out_of_zigzag(ring: _Ring, x: jax.Array, axis: int) -> jax.Array:
    if not ring.zigzag:
        return x
    pieces = jnp.split(_turned(ring, *jnp.split(x, 2, axis), axis), 2, axis)
    back = ([(b, a) for a, b in _homes(ring, i)] for i in range(2))
    moved = (_moved(ring, x, pairs) for x, pairs in zip(pieces, back, strict=True))
    return jnp.concatenate(list(moved), axis)


def _turned(ring: _Ring, one: jax.Array, other: jax.Array, axis: int) -> jax.Array:
    """Both pieces of this device; on every second one in the other order."""
    even = _here(ring) % 2 == 0
    pieces = jnp.where(even, one, other), jnp.where(even, other, one)
    return jnp.concatenate(pieces, axis)
