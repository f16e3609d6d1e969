"""Manifest of a checkpoint: every leaf's shape, dtype and checksum, sealed by a hash.

A leaf's checksum is computed where the leaf lives, on the devices, when it is saved and again when
it has been restored: it covers the disk and all software in between. Being a sum modulo 2^32 it is
the same for every layout of the shards, on any number of devices and processes. It finds accidents,
every single wrong word for certain and any other damage but for one in 2^32; it is no defence
against somebody who writes a checkpoint to deceive (nothing in one is ever executed, though).
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.sharding import offload
from jaxtrain.sharding.stack import LayerOrder, StackedLeaf

_SEAL = "sha256"


class DamagedCheckpointError(ValueError):
    """A checkpoint does not hold what was saved; the message names it and what is wrong."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns JSON-able ``content`` with the SHA-256 of its text beside it.

    >>> unseal(seal({"a": [1.5, "x"]}))
    {'a': [1.5, 'x']}
    """
    return {**content, _SEAL: digest_of(content)}


def unseal(sealed: Any) -> dict[str, Any]:
    """Returns what was sealed, or raises ValueError where the content is another; content without a
    seal, of older checkpoints, passes."""
    if not isinstance(sealed, dict):
        raise ValueError(f"it is a {type(sealed).__name__} and no JSON object")
    content = {key: value for key, value in sealed.items() if key != _SEAL}
    if sealed.get(_SEAL, digest_of(content)) != digest_of(content):
        raise ValueError("its content is not what was saved")
    return content


def check(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a manifest's content; raises ValueError where it lacks the form of one."""
    leaves, metrics = content.get("leaves"), content.get("metrics")
    if not isinstance(leaves, dict) or not isinstance(metrics, dict):
        raise ValueError("it has no leaves and metrics")
    for what, values, read in (("leaf", leaves, _check_entry), ("metric", metrics, float)):
        for name, value in values.items():
            try:
                read(value)
            except (KeyError, TypeError, ValueError, OverflowError):
                raise ValueError(f"{what} {name!r} is {str(value)[:100]}") from None
    return content


def _check_entry(entry: Mapping[str, Any]) -> None:
    if "value" in entry:
        decode(entry)
        return
    shape, cut, rows = entry["shape"], entry.get("cut", []), entry.get("rows", [])
    sound = all(type(size) is int and size >= 0 for size in (*shape, *cut, *rows))
    if not sound or not isinstance(entry["dtype"], str):
        raise ValueError
    if (order := order_in_file(entry)) is not None:
        fits = rows == sorted(set(rows)) and max(rows, default=-1) < math.prod(order.sizes)
        if not fits or [order.count, *cut[len(order.sizes) :]] != shape:
            raise ValueError


def checksums(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Returns a checksum of each array's 32-bit words and their places, from 0 to 2^32 - 1.

    JAX arrays are read where they are, with one program per set of devices; NumPy arrays on the
    host. In a run of several processes all must call it alike, and get the same numbers. TPUs and
    GPUs need no memory for it. CPUs write the words of an array down, of one at a time.

    Args:
      leaves: JAX or NumPy arrays with elements, by name; no PRNG keys. A ``StackedLeaf`` has the
        checksum of the array in natural order, whatever is in its padding.

    >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> checksums({"x": x}) == checksums({"x": jnp.asarray(x)})
    True
    >>> checksums({"x": x}) == checksums({"x": x[::-1]})
    False
    """

    sums: dict[str, int] = {}
    groups: dict[Any, dict[str, jax.Array]] = {}
    for name, leaf in leaves.items():
        array, order = (leaf.array, leaf.order) if isinstance(leaf, StackedLeaf) else (leaf, None)
        if isinstance(array, jax.Array):
            devices = array.sharding.device_set
            alone = name if next(iter(devices)).platform == "cpu" else ""
            key = frozenset(devices), array.committed, alone, order
            groups.setdefault(key, {})[name] = array
        else:
            sums[name] = int(_checksum(np, np.asarray(array), order))
    for (*_, order), group in groups.items():
        found = jax.device_get(on_devices([*group.values()], order))
        sums |= zip(group, map(int, found), strict=True)
    return sums


@functools.partial(jax.jit, static_argnums=1)
def on_devices(arrays: list[jax.Array], order: LayerOrder | None) -> list[jax.Array]:
    """Returns the checksums of JAX arrays, uint32, whose layers lie in this order."""
    return [_one(array, order) for array in arrays]


@functools.partial(jax.jit, static_argnums=1)
def _one(array: jax.Array, order: LayerOrder | None) -> jax.Array:
    # A jit of its own: leaves of one shape are traced once.
    return _checksum(jnp, offload.on_devices(array), order)


def _checksum(xp: Any, array: Any, order: LayerOrder | None) -> Any:
    """The sum over all words of ``mix(word + place)``; ``mix`` is a bijection of 32-bit words.

    Where the layers lie in an order, its axes count as the one that they are in natural order.
    """
    words = _words(xp, array)
    words = words if words.ndim else words.reshape(1)  # NumPy warns of overflow in scalars only
    axes = [xp.arange(size, dtype=np.uint32) for size in words.shape]
    if order is not None:
        axes[: len(order.sizes)] = [order.layers.astype(np.uint32)]
    place, rest = xp.zeros((), np.uint32), words.ndim
    for steps in axes:
        rest -= steps.ndim
        steps = steps.reshape(*steps.shape, *[1] * rest) + np.uint32(1)
        place = place * np.uint32(0x9E3779B1) + steps * np.uint32(0x85EBCA77)
    # The last steps of MurmurHash3 (Appleby), which spread every bit over the word.
    h = words + place
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h = h ^ (h >> np.uint32(16))
    if order is not None and order.rows is not None:
        padding = order.layers.reshape(*order.sizes, *[1] * (words.ndim - len(order.sizes))) < 0
        h = xp.where(padding, np.uint32(0), h)
    return h.sum(dtype=np.uint32)


def _words(xp: Any, array: Any) -> Any:
    """The bits of an array as uint32; wider elements get one more axis, low word first."""
    dtype = array.dtype
    view = jax.lax.bitcast_convert_type if xp is jnp else _view
    if jax.dtypes.issubdtype(dtype, np.bool_):
        return array.astype(np.uint32)
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return _words(xp, xp.stack([array.real, array.imag], axis=-1))
    if jax.dtypes.itemsize_bits(dtype) < 8:  # int4 and such, which backends lay out as they like
        exact = np.int8 if jax.dtypes.issubdtype(dtype, np.integer) else np.float32
        return _words(xp, array.astype(exact))
    if dtype.itemsize < 4:
        return view(array, np.dtype(f"uint{8 * dtype.itemsize}")).astype(np.uint32)
    return view(array, np.dtype(np.uint32))


def _view(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``bitcast_convert_type`` of NumPy."""
    words = np.ascontiguousarray(array).reshape(*array.shape, 1).view(dtype)
    return words[..., 0] if array.dtype.itemsize == dtype.itemsize else words


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of JSON-able content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number, which the manifest itself holds."""
    return type(leaf) in (bool, int, float)


def is_key(leaf: Any) -> bool:
    """Whether an array, concrete or abstract, holds typed PRNG keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_stored(leaf: Any) -> bool:
    """Whether the leaf has elements for the array file; numbers and empty arrays need none."""
    return not is_number(leaf) and math.prod(leaf.shape) > 0


def in_file(entry: Mapping[str, Any]) -> bool:
    """``is_stored`` of a manifest entry; False as well for what was left out."""
    return "value" not in entry and math.prod(entry["shape"]) > 0 and not is_left_out(entry)


def order_in_file(entry: Mapping[str, Any]) -> LayerOrder | None:
    """Returns the order of an array's layers in the file; None for one axis, in order."""
    if "cut" not in entry:
        return None
    lead = len(entry["cut"]) - len(entry["shape"]) + 1
    return LayerOrder(tuple(entry["cut"][:lead]), tuple(entry["rows"]) if "rows" in entry else None)


def layout(order: LayerOrder, array: Any) -> dict[str, list[int]]:
    """Returns what :func:`order_in_file` reads: the entry's part of an array in this order."""
    rows = {} if order.rows is None else {"rows": list(order.rows)}
    return {"cut": list(array.shape)} | rows


def is_left_out(entry: Mapping[str, Any]) -> bool:
    """Whether the manifest has the checksum of an array of which the file has none."""
    return bool(entry.get("left_out"))


def describe(name: str, leaf: Any) -> dict[str, Any]:
    """Returns the manifest entry of a leaf, concrete or abstract, without its checksum; raises
    TypeError for what is neither a Python number nor an array of numbers or keys."""
    if is_number(leaf):
        return {"python": type(leaf).__name__, "value": encode(leaf)}
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"leaf {name!r} of the state is a {type(leaf).__name__}: a checkpoint holds arrays, "
            "PRNG keys and Python numbers only"
        )
    entry = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if is_key(leaf):
        if isinstance(leaf, jax.Array):
            entry["impl"] = str(jax.random.key_impl(leaf))
    elif not (jax.dtypes.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool):
        raise TypeError(f"leaf {name!r} of the state has dtype {leaf.dtype}, which is no number")
    return entry


def placeholder(entry: Mapping[str, Any]) -> Any:
    """Returns a leaf of an entry's kind, for the host, that has no memory of its own."""
    if "value" in entry:
        return decode(entry)
    shape = tuple(entry["shape"])
    if "impl" in entry:
        make = functools.partial(jax.random.key, 0, impl=entry["impl"])
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(make).dtype)
    return np.broadcast_to(np.zeros((), jnp.dtype(entry["dtype"])), shape)


def kind(entry: Mapping[str, Any]) -> str:
    """Names what an entry is, for error messages: ``float32(3, 4)``."""
    if "value" in entry:
        return f"the Python {entry['python']} {entry['value']}"
    return f"{entry['dtype']}{tuple(entry['shape'])}"


def agree(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a saved leaf can become the wanted one."""
    if "value" in saved and "value" in wanted:
        return saved["python"] == wanted["python"]
    if "value" in saved:  # a number may be wanted as a scalar array: eval_shape makes it one
        return wanted["shape"] == [] and _holds(wanted["dtype"], decode(saved))
    return "value" not in wanted and all(saved[k] == wanted[k] for k in ("shape", "dtype"))


def difference(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, whole: bool) -> str | None:
    """Says how saved entries differ from the wanted ones, by their first path; None if they agree.
    With ``whole`` all that is saved must be wanted."""
    other = [name for name in wanted if name not in saved or not agree(saved[name], wanted[name])]
    other += [name for name in saved if whole and name not in wanted]
    if not other:
        return None
    first = other[0]
    # A training state in which all but the optimizer's part is the same.
    of = "optimizer" if all(name.startswith("opt_state/") for name in other) else "model"
    if first not in saved:
        missing = sum(name not in saved for name in other)
        what = f"lacks {first!r} {kind(wanted[first])}, which the state has ({missing} such paths)"
    elif first not in wanted:
        extra = sum(name not in wanted for name in other)
        what = f"holds {first!r} {kind(saved[first])}, which the state lacks ({extra} such paths)"
    else:
        kinds = f"{kind(saved[first])} there and {kind(wanted[first])} in the state"
        return f"is of another {of}: {first!r} is {kinds}"
    return f"is of another {of}: it {what}"


def in_saved_precision(entry: Mapping[str, Any], leaf: Any) -> Any:
    """Returns a wanted leaf, abstract in the saved dtype where both are of floating point."""
    saved = entry.get("dtype", "key<")
    if saved.startswith("key<") or saved == str(leaf.dtype):
        return leaf
    dtypes = jnp.dtype(saved), leaf.dtype
    if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in dtypes):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, dtypes[0], sharding=getattr(leaf, "sharding", None))


def encode(value: bool | int | float) -> bool | int | float | str:
    """Returns a number as strict JSON has it: NaN and infinities become words for ``float()``."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(entry: Mapping[str, Any]) -> bool | int | float:
    """Returns the Python number of an entry."""
    return {"bool": bool, "int": int, "float": float}[entry["python"]](entry["value"])


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``config`` as JSON reads it back, safe from later changes; raises TypeError
    for an entry that cannot be written as JSON."""
    plain = {}
    for key, value in config.items():
        try:
            plain[str(key)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"config entry {key!r} cannot be written as JSON: {error}") from error
    return plain


def _holds(dtype_name: str, value: bool | int | float) -> bool:
    """Whether a scalar array of this dtype is what JAX would make of the Python number."""
    kinds = {bool: np.bool_, int: np.integer, float: np.floating}
    if dtype_name.startswith("key<"):
        return False
    dtype = jnp.dtype(dtype_name)
    if type(value) is not int or not jax.dtypes.issubdtype(dtype, np.integer):
        return jax.dtypes.issubdtype(dtype, kinds[type(value)])
    return int(jnp.iinfo(dtype).min) <= value <= int(jnp.iinfo(dtype).max)
