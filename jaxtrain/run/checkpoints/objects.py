"""Arrays of a checkpoint as plain objects, for buckets that TensorStore has no client for.

An array is a Zarr array of version 2, not compressed: ``NAME/.zarray``, and one object per chunk,
whose bytes are the chunk's. Every process writes the chunks that its devices hold. A copy of the
checkpoint on a disk is one that Orbax reads, as it would have written it there without OCDBT.
"""

import collections
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from jaxtrain.host import storage
from jaxtrain.host.paths import read_object, scheme_of, write_object
from jaxtrain.run.checkpoints.leaves import ocp

# A chunk's bytes at most, which are what is tried again where storage fails, and how many are on
# their way at a time.
CHUNK_BYTES = 64 << 20
PARALLEL = 16
# How long an object is tried to be written: its checkpoint is saved again by whoever asked for it.
PUT_SECONDS = 20.0
_ABOUT = ".zarray"

# Where a part of an array begins and ends along each axis.
Part = tuple[tuple[int, int], ...]


def holds(directory: epath.PathLike) -> bool:
    """Whether the arrays of checkpoints in a directory are such objects.

    >>> [holds(each) for each in ("/runs/a", "gs://bucket/a", "s3://bucket/a", "hdfs://name/a")]
    [False, False, True, True]
    """
    return scheme_of(directory) not in ("", "gs")


class ObjectHandler:
    """Writes arrays; Orbax's TypeHandler protocol, as far as saving needs it.

    Args:
      kind: ``jax.Array``, of which every process writes the shards that it holds the first copy of,
        or ``np.ndarray``, which the first process writes.
    """

    def __init__(self, kind: type):
        self._kind = kind

    def typestr(self) -> str:
        return "jax.Array" if self._kind is jax.Array else "np.ndarray"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> list["ocp.future.Future"]:
        """Copies arrays from the devices, and begins to write them in the background."""
        del args
        for shard in itertools.chain(*map(_written, values)):  # before the first one is waited for
            shard.data.copy_to_host_async()
        arrays = [(info, *_held(value)) for info, value in zip(infos, values, strict=True)]

        async def write() -> None:
            for info, *_ in arrays:
                await info.await_path_creation()
            with ThreadPoolExecutor(PARALLEL, "jaxtrain-objects") as pool:
                objects = (each for array in arrays for each in _objects(*array))
                put = lambda each: write_object(*each, seconds=PUT_SECONDS)  # noqa: E731
                collections.deque(_ahead(pool, put, objects), maxlen=0)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="objects")]

    def finalize(self, directory: epath.Path) -> None:
        """All is written."""


def read(folder: epath.Path, wanted: Mapping[str, "ocp.RestoreArgs"]) -> dict[str, Any]:
    """Reads arrays of a checkpoint by their names, each process what its devices are to hold.

    Args:
      folder: where the arrays are, the ``state`` of a step.
      wanted: how each is to be laid out; those without a sharding come on the host.

    Raises:
      ValueError: an array is missing, or an object of it is cut short.
      StorageError: storage went on failing.
    """
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(PARALLEL, "jaxtrain-objects") as pool:
        grids = dict(zip(wanted, pool.map(lambda name: _grid(folder / name), wanted), strict=True))
        shardings = {name: getattr(wanted[name], "sharding", None) for name in wanted}
        parts = {name: _wanted(grid.shape, shardings[name]) for name, grid in grids.items()}
        tasks = [(n, place) for n, grid in grids.items() for place in grid.chunks_of(parts[n])]
        chunks = _ahead(pool, lambda task: _get(folder / task[0], grids[task[0]], task[1]), tasks)
        for name, grid in grids.items():
            here = {part: np.empty([b - a for a, b in part], grid.dtype) for part in parts[name]}
            for place in grid.chunks_of(parts[name]):
                chunk, data = grid.part_of(place), next(chunks)
                for part, array in here.items():
                    both = [(max(*a), min(*b)) for a, b in map(zip, part, chunk)]
                    if all(start < stop for start, stop in both):
                        array[_within(both, part)] = data[_within(both, chunk)]
            found[name] = next(iter(here.values()))
            if (sharding := shardings[name]) is not None:
                cut = lambda index, of=here, shape=grid.shape: of[_part(index, shape)]  # noqa: E731
                found[name] = jax.make_array_from_callback(grid.shape, sharding, cut)
    return found


class _Grid(NamedTuple):
    """How an array is cut into chunks."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    def chunks_of(self, parts: Iterable[Part]) -> list[tuple[int, ...]]:
        """The places of the chunks that some parts lie on, in order."""
        found: set[tuple[int, ...]] = set()
        for part in parts:
            spans = zip(part, self.chunk, strict=True)
            found |= {*itertools.product(*(range(a // c, -(-b // c)) for (a, b), c in spans))}
        return sorted(found)

    def part_of(self, place: tuple[int, ...]) -> Part:
        """What a chunk covers."""
        return tuple((at * c, (at + 1) * c) for at, c in zip(place, self.chunk, strict=True))


def chunk_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of chunks that a shard of this shape is cut into, the first axes first.

    >>> chunk_shape((8, 1024), 4), chunk_shape((6, 1 << 20, 8), 4)
    ((8, 1024), (2, 1048576, 8))
    """
    chunk = list(shape)
    for axis, size in enumerate(shape):
        parts = -(-math.prod(chunk) * itemsize // CHUNK_BYTES)
        if parts > 1:
            chunk[axis] //= next(n for n in range(min(parts, size), size + 1) if size % n == 0)
    return tuple(chunk)


def _written(value: Any) -> list[Any]:
    """The shards of an array that this process writes."""
    return [each for each in getattr(value, "addressable_shards", ()) if each.replica_id == 0]


def _held(value: Any) -> tuple[_Grid, list[tuple[Part, np.ndarray]]]:
    """How an array is cut, and those of its parts that this process is to write."""
    if isinstance(value, jax.Array):
        shard, shards = value.sharding.shard_shape(value.shape), _written(value)
        held = [(_part(each.index, value.shape), np.asarray(each.data)) for each in shards]
    else:
        shard, held = value.shape, [(_part((), value.shape), np.array(value))]
        held = held if jax.process_index() == 0 else []
    return _Grid(value.shape, chunk_shape(shard, value.dtype.itemsize), value.dtype), held


def _objects(info: Any, grid: _Grid, held: Any) -> Iterator[tuple[str, bytes]]:
    """Paths and bytes of what this process is to write of an array."""
    if jax.process_index() == 0:
        about = {
            "zarr_format": 2,
            "shape": grid.shape,
            "chunks": grid.chunk,
            # The dtypes of ml_dtypes have no name in Zarr but TensorStore's, which is theirs.
            "dtype": grid.dtype.str if grid.dtype.isbuiltin == 1 else grid.dtype.name,
            "order": "C",
        } | dict.fromkeys(("fill_value", "filters", "compressor"))
        yield f"{info.path}/{_ABOUT}", json.dumps(about).encode()
    for part, data in held:
        for place in grid.chunks_of([part]):
            piece = data[_within(grid.part_of(place), part)]
            yield f"{info.path}/{_key(place)}", piece.tobytes()


def _key(chunk: Sequence[int]) -> str:
    return ".".join(map(str, chunk)) or "0"


def _grid(path: epath.Path) -> _Grid:
    try:
        about = json.loads(read_object(path / _ABOUT))
        return _Grid(tuple(about["shape"]), tuple(about["chunks"]), np.dtype(about["dtype"]))
    except (FileNotFoundError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is no array ({storage.why(error)})") from error


def _get(path: epath.Path, grid: _Grid, place: tuple[int, ...]) -> np.ndarray:
    data, size = read_object(path / _key(place)), math.prod(grid.chunk) * grid.dtype.itemsize
    if len(data) != size:
        raise ValueError(f"'{path / _key(place)}' has {len(data)} bytes, not {size}")
    return np.frombuffer(data, grid.dtype).reshape(grid.chunk)


def _ahead(pool: ThreadPoolExecutor, call: Any, items: Any) -> Iterator[Any]:
    """Yields ``call`` of each item in order; no more are made ahead than have a thread."""
    pending: list[Any] = []
    for item in items:
        if len(pending) >= PARALLEL:
            yield pending.pop(0).result()
        pending.append(pool.submit(call, item))
    for each in pending:
        yield each.result()


def _part(index: Sequence[slice], shape: Sequence[int]) -> Part:
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _within(part: Part, outer: Part) -> tuple[slice, ...]:
    """The index of a part in an array that is another part."""
    pairs = zip(part, outer, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)


def _wanted(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> list[Part]:
    """The parts of an array that this process is to hold."""
    if sharding is None:
        return [_part((), shape)]
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(_part(index, shape) for index in indices))
