"""Rows to batches on a device mesh, where batch number `step` depends on the seed and nothing else.

There is no iterator state to save: to go on after a stop, ask for the next step. The same batches
come out on one process and on a thousand, each of which reads only the rows of its own devices.

Shape legend: B rows in the global batch, T tokens in a row.
"""

import collections
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import grain
import jax
import numpy as np

from jaxtrain.data import blocks
from jaxtrain.data.rows import RowStream, array_of, as_rows, fields_of_row
from jaxtrain.host import storage

Batch = dict[str, Any]
Shardings = jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding]
# How (seed, step) becomes rows; it is raised with any change to that, and kept with every run.
ORDER_VERSION = 1
# The rounds of the cipher that grain.MapDataset.shuffle permutes with.
_SHUFFLE_ROUNDS = 4
# Rows that are read at a time from a bucket.
_FAR_ROWS = 16


class RowSource(Protocol):
    """A grain RandomAccessDataSource or MapDataset; rows are dicts of arrays of fixed shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


def spread(rows: Any, number: int) -> list[Any]:
    """Returns so many rows, evenly spread; all where there are fewer.

    >>> spread(range(10), 4), spread("ab", 4)
    ([0, 3, 6, 9], ['a', 'b'])
    """
    places = np.linspace(0, len(rows) - 1, min(number, len(rows)))
    return [rows[place] for place in places.astype(int).tolist()]


class Batches:
    """Global batches of a source, addressed by step; nothing here changes once made.

    Row r of batch `step` is row ``step * B + r`` of an endless sequence of epochs, each of which
    has every row of the source once, in an order that depends on `seed` and the epoch: that of
    ``grain.MapDataset.source(source).shuffle(s).repeat()`` with s made from `seed` by NumPy's
    SeedSequence, so that neighbouring seeds share no epoch. A batch may span two epochs.

    Args:
      source: random access to rows, or data that :func:`jaxtrain.data.as_rows` makes such of; row
        0 is read once, to know the shapes. One with a method
        ``row_order(seed=, global_batch=)`` brings its own order, as `Mixture` does: that returns
        what takes ``step * B + r`` to the row's index. One with ``__getitems__(indices)``, as
        `WorkerRows` has, gives the rows of a batch at once.
      global_batch: B, the rows in a batch over all processes.
      seed: at least 0.
      shuffle: False keeps the order of the source in every epoch, and the seed has no effect.

    Attributes:
      shapes: the shape and dtype of every array of a batch, as `jax.eval_shape` would give them.

    Raises:
      ValueError: if the source is empty, or `global_batch` or `seed` is too small.

    >>> rows = [{"x": np.full(2, i)} for i in range(3)]
    >>> batches = Batches(rows, global_batch=2, seed=0, shuffle=False)
    >>> [batches.batch(step)["x"][:, 0].tolist() for step in range(3)]
    [[0, 1], [2, 0], [1, 2]]
    """

    def __init__(self, source: RowSource, *, global_batch: int, seed: int, shuffle: bool = True):
        source = _checked(source, global_batch)
        if seed < 0:
            raise ValueError(f"`seed` is {seed}; give at least 0")
        self.source = source
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        order = getattr(source, "row_order", None)
        self._order = order(seed=seed, global_batch=global_batch) if order else None
        self._shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        row = {name: array_of(value, name) for name, value in fields_of_row(source, 0).items()}
        self.shapes = {
            name: jax.ShapeDtypeStruct((global_batch, *value.shape), value.dtype)
            for name, value in row.items()
        }

    def source_index(self, position: int) -> int:
        """Returns which row of the source stands at `position` (``step * B + r``)."""
        if self._order is not None:
            return self._order(position)
        if not self.shuffle:
            return position % len(self.source)
        return shuffled(position, len(self.source), self._shuffle_seed)

    def batch(self, step: int) -> Batch:
        """Returns global batch `step` as NumPy arrays [B, ...]."""
        return self._read(step, range(self.global_batch))

    def rows(self, step: int, row_slice: slice) -> Batch:
        """Returns ``batch(step)`` cut to ``row_slice`` of its rows, reading only those."""
        return self._read(step, range(self.global_batch)[row_slice])

    def sharded(self, step: int, sharding: Shardings) -> Batch:
        """Returns global batch `step` as global `jax.Array`s, each laid out by `sharding`, one for
        all or by their names.

        Each row that a device of this process holds is read once, no other is. Axes after the
        first may be sharded too (tokens over a context axis): of a source with a method
        ``part(index, start, stop)``, as packed and mixed rows have, no other places are read.

        Raises:
          ValueError: if `sharding` does not divide a shape of the batch.
        """
        of = sharding if isinstance(sharding, Mapping) else dict.fromkeys(self.shapes, sharding)
        wanted_B = np.zeros(self.global_batch, bool)
        for name, array in self.shapes.items():
            wanted_B |= addressable_rows(name, array.shape, of[name])
        span = _span(self.shapes, of) if hasattr(self.source, "part") else None
        here = self._read(step, np.flatnonzero(wanted_B).tolist(), span)
        offset_B, first_place = np.cumsum(wanted_B) - 1, span[0] if span else 0

        def place(name: str) -> jax.Array:
            array = self.shapes[name]

            def part(index: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = index[0].indices(self.global_batch)
                first, cuts = offset_B[start], list(index[1:])
                if first_place:
                    low, high, _ = cuts[-1].indices(array.shape[-1])
                    cuts[-1] = slice(low - first_place, high - first_place)
                return here[name][first : first + stop - start][:, *cuts]

            return jax.make_array_from_callback(array.shape, of[name], part, dtype=array.dtype)

        return {name: place(name) for name in self.shapes}

    def stream(
        self,
        start_step: int = 0,
        *,
        sharding: Shardings | None = None,
        prefetch: int = 2,
    ) -> "BatchStream":
        """Returns an endless iterator over the batches from `start_step` on, made ahead of need.

        Args:
          start_step: the step of the first batch.
          sharding: if given, batches come as by `sharded`, else as by `batch`.
          prefetch: how many batches to have ready or in the making, at least 1.

        >>> rows = [{"x": np.full(2, i)} for i in range(3)]
        >>> with Batches(rows, global_batch=2, seed=0, shuffle=False).stream(1) as stream:
        ...     next(stream)["x"][:, 0].tolist()
        [2, 0]
        """
        if sharding is None:
            return BatchStream(self.batch, start_step, prefetch=prefetch)
        return BatchStream(lambda step: self.sharded(step, sharding), start_step, prefetch=prefetch)

    def _read(self, step: int, rows: Sequence[int], span: tuple[int, int] | None = None) -> Batch:
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step is {step}; give at least 0")
        first = step * self.global_batch
        wanted = [self.source_index(first + row) for row in rows]
        together = getattr(self.source, "__getitems__", None)
        one = self.source.__getitem__
        if span:
            one, together = (lambda index: part_of(self.source, index, *span)), None
        read = storage.retrying(
            lambda: together(wanted) if together else _all_of(one, wanted),
            f"the rows of batch {step}",
        )
        return {name: _stacked(read, name, array) for name, array in self.shapes.items()}


def _stacked(rows: Sequence[Any], name: str, array: jax.ShapeDtypeStruct) -> np.ndarray:
    if not rows:
        return np.zeros((0, *array.shape[1:]), array.dtype)
    try:
        return np.stack(
            [getattr(row, name) if isinstance(row, tuple) else row[name] for row in rows]
        )
    except (KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"rows of a batch are unlike in '{name}' ({error}): give each row the arrays of row 0, "
            "of the same shapes; pad, and mask the padding"
        ) from None


def _all_of(one: Callable[[int], Any], wanted: Sequence[int]) -> list[Any]:
    """The rows of a batch: one after the other, and at the same time once one is not on a disk."""
    before, found = blocks.asked(), []
    while len(found) < len(wanted) and blocks.asked() == before:
        found.append(one(wanted[len(found)]))
    if rest := wanted[len(found) :]:
        with ThreadPoolExecutor(_FAR_ROWS, "jaxtrain-rows") as pool:
            found += pool.map(one, rest)
    return found


def shuffled(position: int, length: int, seed: int) -> int:
    """Returns which of `length` rows stands at a position of an endless sequence of epochs.

    Each epoch has every row once, in an order that its number and the seed give: a permutation that
    is computed for one row at a time, whatever the length. It is a Feistel cipher (four rounds of
    Simon, https://eprint.iacr.org/2013/404) of the index, repeated until that is below the length.

    >>> sorted(shuffled(position, 5, seed=1) for position in range(5, 10))
    [0, 1, 2, 3, 4]
    """
    epoch, index = divmod(position, length)
    # grain's cipher drops the top bit of 4^k, k at least 8, and would read another row twice.
    if (bits := index.bit_length()) > 16 and bits % 2 and index == length - 1 == 1 << bits - 1:
        return index
    # What MapDataset.shuffle computes, without its 40 microseconds of bookkeeping a row.
    return grain.experimental.index_shuffle(
        index, max_index=length - 1, seed=(seed + epoch) % 2**32, rounds=_SHUFFLE_ROUNDS
    )


class BatchStream(Iterator[Batch]):
    """Makes ``make(step)`` for successive steps on one thread, ahead of the consumer.

    An error of ``make`` is raised by the `next` of that very step, noted with the step, and closes
    the stream. Closing (also by ``with``) waits for the batch in the making, and no thread is left.
    grain's own prefetching does neither: after an error it goes on with the step after, and its
    ``close`` leaves the thread running. At least 1 batch is ready or in the making (``prefetch``).
    """

    def __init__(self, make: Callable[[int], Batch], start_step: int = 0, *, prefetch: int = 2):
        if prefetch < 1:
            raise ValueError(f"prefetch is {prefetch}; give at least 1")
        if start_step < 0:
            raise ValueError(f"start_step is {start_step}; give at least 0")
        self._make = make
        self._first_pending = operator.index(start_step)
        self._prefetch = prefetch
        self._pending: collections.deque[Future[Batch]] = collections.deque()
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "jaxtrain-batches")
        self._fill()

    def __next__(self) -> Batch:
        if self._executor is None:
            raise ValueError("the stream of batches is closed; open another with stream(step)")
        future = self._pending.popleft()
        step = self._first_pending
        self._first_pending += 1
        self._fill()
        try:
            return future.result()
        except Exception as error:
            error.add_note(f"while making batch {step}")
            self.close()
            raise

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops what was prefetched and ends the thread; more calls do nothing."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
            self._pending.clear()

    def _fill(self) -> None:
        while len(self._pending) < self._prefetch:
            step = self._first_pending + len(self._pending)
            self._pending.append(self._executor.submit(self._make, step))


def eval_batches(
    source: RowSource, global_batch: int, *, sharding: Shardings | None = None
) -> Iterator[Batch]:
    """Yields every row of a source once, in order; the last batch is filled up with rows of zeros.

    A row of zeros has mask 0 and segment 0, so a sum weighted by the mask is that of the source. A
    loss that is weighted differently counts these rows: give it :func:`whole_batches`.

    Args:
      source: random access to rows.
      global_batch: B, the rows in a batch over all processes.
      sharding: if given, batches come as by `Batches.sharded`, else as NumPy arrays.

    >>> rows = [{"x": np.full(2, i + 1)} for i in range(3)]
    >>> [batch["x"][:, 0].tolist() for batch in eval_batches(rows, 2)]
    [[1, 2], [3, 0]]
    """
    source = _finite(source, global_batch)
    count = -(-len(source) // global_batch)
    return _in_order(_Rows(source, range(count * global_batch)), global_batch, count, sharding)


def whole_batches(
    source: RowSource, global_batch: int, *, sharding: Shardings | None = None
) -> Iterator[tuple[Batch, int]]:
    """Yields every row of a source, in order, in batches of one size that hold nothing else.

    The rows that fill no batch come in parts whose sizes divide it, repeated to the size of a
    batch: that leaves a mean over rows as it is, whatever the loss looks like. Arguments are those
    of :func:`eval_batches`.

    Yields:
      A batch, and how many rows it stands for: each of them is in it equally often.

    >>> rows = [{"x": np.full(2, i + 1)} for i in range(7)]
    >>> [(batch["x"][:, 0].tolist(), count) for batch, count in whole_batches(rows, 4)]
    [([1, 2, 3, 4], 4), ([5, 6, 5, 6], 2), ([7, 7, 7, 7], 1)]
    """
    source = _finite(source, global_batch)
    whole, left = divmod(len(source), global_batch)
    counts, places = [global_batch] * whole, list(range(whole * global_batch))
    while left:
        count = next(n for n in range(left, 0, -1) if global_batch % n == 0)
        first = len(source) - left
        places += [*range(first, first + count)] * (global_batch // count)
        counts.append(count)
        left -= count
    rows = _Rows(source, places)  # in the order of their indices, whatever the source's
    yield from zip(_in_order(rows, global_batch, len(counts), sharding), counts, strict=True)


def _in_order(
    source: RowSource, global_batch: int, count: int, sharding: Shardings | None
) -> Iterator[Batch]:
    batches = Batches(source, global_batch=global_batch, seed=0, shuffle=False)
    steps = range(count)
    return (batches.batch(n) if sharding is None else batches.sharded(n, sharding) for n in steps)


def addressable_rows(
    name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> np.ndarray:
    """Returns which rows of an array of this shape devices of this process hold: bool [shape[0]].
    Raises ValueError if `sharding` does not divide `shape`; it names the array."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"batch array '{name}' of shape {shape} cannot be laid out by {sharding}; choose a "
            "global batch and sequence length that the mesh axes divide"
        ) from error
    wanted_B = np.zeros(shape[0], bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        wanted_B[index[0]] = True
    return wanted_B


def _span(
    shapes: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, jax.sharding.Sharding]
) -> tuple[int, int] | None:
    """The places of rows, by the last axis of all arrays, that devices of this process hold; None
    where it is all of them, or not the same axis."""
    lengths = {array.shape[-1] if len(array.shape) > 1 else None for array in shapes.values()}
    if len(lengths) > 1 or None in lengths:
        return None
    (length,), held = lengths, []
    for name, array in shapes.items():
        for index in shardings[name].addressable_devices_indices_map(array.shape).values():
            held.append(index[-1].indices(length)[:2])
    start, stop = min(low for low, _ in held), max(high for _, high in held)
    return None if (start, stop) == (0, length) else (start, stop)


class _Rows:
    """Some rows of a source by their indices; those beyond its end are zeros."""

    def __init__(self, source: RowSource, indices: Sequence[int]):
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> dict[str, Any]:
        index = self._indices[place]
        return self._source[index] if index < len(self._source) else self._zeros

    def part(self, place: int, start: int, stop: int) -> dict[str, Any]:
        index = self._indices[place]
        if index < len(self._source):
            return part_of(self._source, index, start, stop)
        return {name: value[..., start:stop] for name, value in self._zeros.items()}

    @functools.cached_property
    def _zeros(self) -> dict[str, Any]:
        row = fields_of_row(self._source, 0)
        return {name: np.zeros_like(value) for name, value in row.items()}


def part_of(source: RowSource, index: int, start: int, stop: int) -> dict[str, Any]:
    """Returns the places from ``start`` to ``stop`` of a row, by the last axis of its arrays; the
    row is read whole where the source has no method ``part``."""
    if (part := getattr(source, "part", None)) is not None:
        return part(index, start, stop)
    return {name: value[..., start:stop] for name, value in source[index].items()}


def _checked(source: Any, global_batch: int) -> RowSource:
    source = as_rows(source)
    if not isinstance(source, RowStream) and len(source) < 1:
        raise ValueError(f"the source {source!r} has no rows")
    if global_batch < 1:
        raise ValueError(f"`global_batch` is {global_batch}; give at least 1")
    return source


def _finite(source: Any, global_batch: int) -> RowSource:
    if isinstance(source, RowStream):
        raise ValueError(
            "rows to evaluate on are a RowStream, which has no end: give a list of rows"
        )
    return _checked(source, global_batch)
