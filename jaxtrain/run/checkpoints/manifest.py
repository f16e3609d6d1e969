"""What a checkpoint says of itself: every leaf's shape, dtype and checksum, sealed by a hash.

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

_SEAL = "sha256"


class DamagedCheckpointError(ValueError):
    """A checkpoint does not hold what was saved; the message names it and what is wrong."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns JSON-able ``content`` with the SHA-256 of its text beside it.

    >>> unseal(seal({"a": [1.5, "x"]}))
    {'a': [1.5, 'x']}
    """
    return {**content, _SEAL: _sha256(content)}


def unseal(sealed: Any) -> dict[str, Any]:
    """Returns what was sealed; content without a seal, of older checkpoints, passes.

    Raises:
      ValueError: the content is not what was sealed.
    """
    if not isinstance(sealed, dict):
        raise ValueError(f"it is a {type(sealed).__name__} and no JSON object")
    content = {key: value for key, value in sealed.items() if key != _SEAL}
    if sealed.get(_SEAL, _sha256(content)) != _sha256(content):
        raise ValueError("its content is not what was saved")
    return content


def check(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a manifest's content, having made sure that it has the form of one.

    Raises:
      ValueError: it has not.
    """
    leaves, metrics = content.get("leaves"), content.get("metrics")
    if not isinstance(leaves, dict) or not isinstance(metrics, dict):
        raise ValueError("it has no leaves and metrics")
    for name, entry in leaves.items():
        try:
            if "value" in entry:
                decode(entry)
            else:
                sound = all(type(size) is int and size >= 0 for size in entry["shape"])
                if not sound or not isinstance(entry["dtype"], str):
                    raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(f"leaf {name!r} is {str(entry)[:100]}") from None
    for name, value in metrics.items():
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"metric {name!r} is {str(value)[:100]}") from None
    return content


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Returns a checksum of each array's 32-bit words and their places, from 0 to 2^32 - 1.

    JAX arrays are read where they are, with one program per set of devices; NumPy arrays on the
    host. In a run of several processes all must call it alike, and get the same numbers.

    Args:
      arrays: JAX or NumPy arrays with elements, by name; no PRNG keys.

    >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> checksums({"x": x}) == checksums({"x": jnp.asarray(x)})
    True
    >>> checksums({"x": x}) == checksums({"x": x[::-1]})
    False
    """
    sums: dict[str, Any] = {}
    groups: dict[Any, dict[str, Any]] = {}
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            key = frozenset(array.sharding.device_set), array.committed
            groups.setdefault(key, {})[name] = array
        else:
            sums[name] = _checksum(np, np.asarray(array))
    for group in groups.values():
        sums |= _device_checksums(group)
    return {name: int(x) for name, x in jax.device_get(sums).items()}


@jax.jit
def _device_checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _one(array) for name, array in arrays.items()}


@jax.jit
def _one(array: jax.Array) -> jax.Array:
    # A jit of its own: leaves of one shape are traced once.
    return _checksum(jnp, array)


def _checksum(xp: Any, array: Any) -> Any:
    """The sum over all words of ``mix(word + place)``; ``mix`` is a bijection of 32-bit words."""
    words = _words(xp, array)
    words = words if words.ndim else words.reshape(1)  # NumPy warns of overflow in scalars only
    place = xp.zeros((), np.uint32)
    for axis, size in enumerate(words.shape):
        shape = [1] * words.ndim
        shape[axis] = size
        steps = xp.arange(size, dtype=np.uint32).reshape(shape)
        place = place * np.uint32(0x9E3779B1) + (steps + np.uint32(1)) * np.uint32(0x85EBCA77)
    # The last steps of MurmurHash3 (Appleby), which spread every bit over the word.
    h = words + place
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (h ^ (h >> np.uint32(16))).sum(dtype=np.uint32)


def _words(xp: Any, array: Any) -> Any:
    """The bits of an array as uint32; wider elements get one more axis, low word first."""
    dtype = array.dtype
    view = _bitcast if xp is jnp else _view
    if jax.dtypes.issubdtype(dtype, np.bool_):
        return array.astype(np.uint32)
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return _words(xp, xp.stack([array.real, array.imag], axis=-1))
    if _bits(dtype) < 8:  # int4 and such, whose layout in memory is the backend's own
        exact = np.int8 if jax.dtypes.issubdtype(dtype, np.integer) else np.float32
        return _words(xp, array.astype(exact))
    if dtype.itemsize < 4:
        return view(array, np.dtype(f"uint{8 * dtype.itemsize}")).astype(np.uint32)
    return view(array, np.dtype(np.uint32))


def _bitcast(array: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, dtype)


def _view(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.dtype.itemsize == dtype.itemsize:
        return np.ascontiguousarray(array).view(dtype).reshape(array.shape)
    return np.ascontiguousarray(array)[..., None].view(dtype)


@functools.cache
def _bits(dtype: np.dtype) -> int:
    info = jnp.iinfo if jax.dtypes.issubdtype(dtype, np.integer) else jnp.finfo
    return info(dtype).bits


def _sha256(content: Mapping[str, Any]) -> str:
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
    """``is_stored`` of a manifest entry."""
    return "value" not in entry and math.prod(entry["shape"]) > 0


def describe(name: str, leaf: Any) -> dict[str, Any]:
    """Returns the manifest entry of a leaf, concrete or abstract, without its checksum.

    Raises:
      TypeError: the leaf is neither a Python number nor an array of numbers or keys.
    """
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


def encode(value: bool | int | float) -> bool | int | float | str:
    """Returns a number as strict JSON has it: NaN and infinities become words for ``float()``."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(entry: Mapping[str, Any]) -> bool | int | float:
    """Returns the Python number of an entry."""
    return {"bool": bool, "int": int, "float": float}[entry["python"]](entry["value"])


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``config`` as JSON reads it back, safe from later changes.

    Raises:
      TypeError: an entry cannot be written as JSON.
    """
    plain = {}
    for key, value in config.items():
        try:
            plain[str(key)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"config entry {key!r} cannot be written as JSON: {error}") from error
    return plain


def _holds(dtype_name: str, value: bool | int | float) -> bool:
    """Whether a scalar array of this dtype is what JAX would make of the Python number."""
    if dtype_name == "bool" or isinstance(value, bool):
        return dtype_name == "bool" and isinstance(value, bool)
    if dtype_name.startswith("key<"):
        return False
    dtype = jax.numpy.dtype(dtype_name)
    if isinstance(value, float):
        return jax.dtypes.issubdtype(dtype, np.floating)
    if not jax.dtypes.issubdtype(dtype, np.integer):
        return False
    info = jax.numpy.iinfo(dtype)
    return int(info.min) <= value <= int(info.max)
