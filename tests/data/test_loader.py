"""Loading: a batch is a function of (seed, step), and each process reads its own rows once."""

import collections
import errno
import gc
import os
import sys
import threading
import time

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.data import (
    Batches,
    BatchStream,
    ByteTokenizer,
    Document,
    PackedTokens,
    eval_batches,
    tokenize,
    whole_batches,
)
from jaxtrain.data.loader import addressable_rows, shuffled
from jaxtrain.host import storage
from jaxtrain.host.storage import StorageError
from tests.run.survive.processes import free_port, together


class Rows:
    """Rows [4] that say which they are, and how often each was read."""

    def __init__(self, length):
        self.length = length
        self.reads = collections.Counter()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads[index] += 1
        return {
            "tokens": np.arange(4, dtype=np.int32) + 100 * index,
            "mask": np.ones(4, np.float32),
        }


def numbers(batch):
    return (np.asarray(batch["tokens"])[:, 0] // 100).tolist()


def counted(length, *, global_batch, seed=0, shuffle=True):
    rows = Rows(length)
    batches = Batches(rows, global_batch=global_batch, seed=seed, shuffle=shuffle)
    rows.reads.clear()
    return rows, batches


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    global_batch=st.integers(1, 50),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
def test_every_row_once_in_every_epoch(length, global_batch, seed, shuffle):
    batches = Batches(Rows(length), global_batch=global_batch, seed=seed, shuffle=shuffle)
    steps = range(-(-3 * length // global_batch))
    order = [number for step in steps for number in numbers(batches.batch(step))]
    for epoch in range(3):
        assert sorted(order[epoch * length :][:length]) == list(range(length))


def test_a_batch_depends_on_seed_and_step_alone():
    first, second = (Batches(Rows(50), global_batch=7, seed=3) for _ in range(2))
    forward = [numbers(first.batch(step)) for step in range(20)]
    backward = [numbers(second.batch(step)) for step in reversed(range(20))][::-1]
    assert forward == backward
    assert numbers(Batches(Rows(50), global_batch=7, seed=4).batch(0)) != forward[0]


def test_order_is_that_of_grain():
    for seed in (0, 1, 2**40):
        grain_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        expected = grain.MapDataset.range(37).shuffle(seed=grain_seed).repeat()
        batches = Batches(Rows(37), global_batch=10, seed=seed)
        got = [number for step in range(12) for number in numbers(batches.batch(step))]
        assert got == [expected[position] for position in range(120)]


def seed_seq(seed, n):
    """What C++ defines std::seed_seq{seed}.generate to give, for n words below 7."""
    words, p = [0x8B8B8B8B] * n, (n - (n - 1) // 2) // 2
    q = p + (n - 1) // 2
    for k in range(2 * n):
        own, first, second = k % n, (k + p) % n, (k + q) % n
        if k < n:
            r = words[own] ^ words[first] ^ words[own - 1]
            r = 1664525 * (r ^ r >> 27) % 2**32
            words[first] = (words[first] + r) % 2**32
            r = (r + (1, seed + 1)[k] if k < 2 else r + own) % 2**32
            words[second] = (words[second] + r) % 2**32
        else:
            r = (words[own] + words[first] + words[own - 1]) % 2**32
            r = 1566083941 * (r ^ r >> 27) % 2**32
            words[first] ^= r
            r = (r - own) % 2**32
            words[second] ^= r
        words[own] = r
    return words


def permuted(index, length, seed):
    """The definition: four rounds of a Feistel network, repeated until it is below the length."""
    if length == 1:
        return 0
    W = max(16, ((length - 1).bit_length() + 1) // 2 * 2) // 2
    low = 2**W - 1

    def rotated(x, r):
        return (x << r | x >> W - r) & low

    keys = seed_seq(seed, 4)
    while True:
        left, right = index >> W, index & low
        for key in keys:
            mixed = rotated(right, 1) & rotated(right, 8) ^ rotated(right, 2) ^ key & low
            left, right = right, left ^ mixed
        index = left << W | right
        if index < length:
            return index


@pytest.mark.parametrize("length", [1, 2, 100, 2**16, 2**16 + 2, 10**6, 10**12])
def test_the_permutation_is_its_definition(length):
    for seed in (0, 1, 2**32 - 1):
        for n in (0, 1, length // 3, length - 1):
            if n < length:
                assert shuffled(n, length, seed) == permuted(n, length, seed), (n, seed)
    assert shuffled(7 * length, length, 5) == permuted(0, length, 12)  # another key every epoch


def test_a_power_of_four_and_one_more_are_permuted_too():
    length = 2**16 + 1
    order = [shuffled(n, length, seed=3) for n in range(length)]
    assert sorted(order) == list(range(length))


def test_order_stays_what_it_was():
    """A resumed run must find the order it was started with, whatever was upgraded meanwhile."""
    batches = Batches(Rows(10), global_batch=5, seed=0)
    assert [numbers(batches.batch(step)) for step in (0, 1, 2, 10**9)] == [
        [5, 8, 9, 7, 4],
        [2, 1, 0, 3, 6],
        [6, 9, 4, 8, 0],
        [5, 6, 3, 8, 2],
    ]


def test_epochs_and_neighbouring_seeds_differ():
    orders = [
        tuple(numbers(Batches(Rows(100), global_batch=100, seed=seed).batch(epoch)))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == 16


def test_a_grain_dataset_is_a_source():
    source = grain.MapDataset.range(6).map(lambda n: {"x": np.full(2, n)})
    batches = Batches(source, global_batch=4, seed=0, shuffle=False)
    assert batches.batch(1)["x"][:, 1].tolist() == [4, 5, 0, 1]


@settings(max_examples=30, deadline=None)
@given(
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    stride=st.sampled_from([None, 1, 2, -1]),
)
def test_rows_reads_only_those(start, stop, stride):
    rows, batches = counted(30, global_batch=12)
    chosen = slice(start, stop, stride)
    part = batches.rows(2, chosen)
    read = rows.reads.copy()
    whole = batches.batch(2)
    for name in whole:
        np.testing.assert_array_equal(part[name], whole[name][chosen])
        assert part[name].dtype == whole[name].dtype
    assert read == collections.Counter(numbers(whole)[chosen])


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (2, 2, 2),
        ("data", "fsdp", "context"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )


@pytest.mark.parametrize(
    "spec", [P(("data", "fsdp")), P("data", "context"), P(None, "context"), P(), P("fsdp")]
)
def test_sharded_is_the_batch_and_reads_each_row_once(mesh, spec):
    rows, batches = counted(64, global_batch=8)
    sharding = NamedSharding(mesh, spec)
    got = batches.sharded(3, sharding)
    assert rows.reads == collections.Counter(numbers(got))
    assert len(rows.reads) == 8
    whole = batches.batch(3)
    for name, array in got.items():
        assert array.sharding == sharding
        assert array.dtype == whole[name].dtype
        np.testing.assert_array_equal(array, whole[name])


def test_half_of_the_devices_need_half_of_the_rows(mesh):
    """Of a mesh's devices, only those of this process count; a stub hides the others."""

    class HalfHere:
        def __init__(self, sharding, here):
            self.sharding, self.here = sharding, here

        def shard_shape(self, shape):
            return self.sharding.shard_shape(shape)

        def addressable_devices_indices_map(self, shape):
            indices = self.sharding.devices_indices_map(shape)
            return {device: indices[device] for device in self.here}

    devices = mesh.devices.reshape(-1)
    sharding = NamedSharding(mesh, P(("data", "fsdp"), "context"))
    wanted = [
        addressable_rows("x", (8, 4), HalfHere(sharding, half))
        for half in (devices[:4], devices[4:], devices[[0, 7]])
    ]
    assert [rows.nonzero()[0].tolist() for rows in wanted] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [0, 1, 6, 7],
    ]


PROCESS = """
import sys, collections
from fractions import Fraction
import jax, numpy as np
rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax.sharding import NamedSharding, PartitionSpec
from jaxtrain.data import Batches, Mixture, eval_batches, whole_batches

reads = collections.Counter()
class Rows:
    def __len__(self): return 20
    def __getitem__(self, index):
        reads[index] += 1
        return {"x": np.full(3, index, np.int32)}

# Processes interleaved along the mesh: this one's rows are not one block.
devices = sorted(jax.devices(), key=lambda device: (device.id % 2, device.process_index))
mesh = jax.sharding.Mesh(np.array(devices), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
batches = Batches(Rows(), global_batch=8, seed=5)
reads.clear()
batch = batches.sharded(3, sharding)
print("reads", *sorted(reads.elements()), flush=True)
with batches.stream(3, sharding=sharding) as stream:
    again = next(stream)["x"].addressable_shards
    for shard, other in zip(batch["x"].addressable_shards, again, strict=True):
        np.testing.assert_array_equal(shard.data, other.data)
evaluated = [shard.data[:, 0].tolist() for batch in eval_batches(Rows(), 8, sharding=sharding)
             for shard in batch["x"].addressable_shards]
for shard in batch["x"].addressable_shards:
    print("rows", shard.index[0].start, *shard.data[:, 0].tolist(), flush=True)
print("eval", *sum(evaluated, []), flush=True)

class Parts(Rows):
    def __getitem__(self, index): return self.part(index, 0, 4)
    def part(self, index, start, stop):
        places[start, stop] += 1
        return {"x": (10 * index + np.arange(4))[start:stop]}

# Each process has one half of every row, of a mixture and of held-out rows too.
places = collections.Counter()
mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("data", "context"))
split = {"x": NamedSharding(mesh, PartitionSpec("data", "context"))}
def check(batch, rows):
    whole = 10 * np.array(rows)[:, None] + np.arange(4)
    for shard in batch["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
half = {"a": Fraction(1, 2), "b": Fraction(1, 2)}
mixed = Batches(Mixture({"a": Parts(), "b": Parts()}, [(0, half)]), global_batch=8, seed=5)
of_each = [mixed.source_index(24 + n) % 20 for n in range(8)]
batches_3 = [batches.source_index(24 + n) for n in range(8)]
for batches, rows in ((Batches(Parts(), global_batch=8, seed=5), batches_3), (mixed, of_each)):
    places.clear()
    check(batches.sharded(3, split), rows)
    print("places", *sum(places.items(), ()), flush=True)
places.clear()
for (batch, count), rows in zip(whole_batches(Parts(), 8, sharding=split),
                                [range(8), range(8, 16), [*range(16, 20)] * 2], strict=True):
    check(batch, rows)
places.subtract([(0, 4)])  # the first row shows the arrays
print("places", *sum((+places).items(), ()), flush=True)
"""


def test_two_processes_make_the_batch_of_one():
    command, port = [sys.executable, "-c", PROCESS], str(free_port())
    results = together([[*command, rank, port] for rank in "01"])
    lines = [[line.split() for line in out.splitlines()] for out in results]
    got = [None] * 8
    for line in lines[0] + lines[1]:
        if line[0] == "rows":
            got[int(line[1]) : int(line[1]) + 2] = map(int, line[2:])
    assert got == numbers(Batches(Rows(20), global_batch=8, seed=5).batch(3))
    for out, half in zip(lines, ("(0, 2)", "(2, 4)"), strict=True):
        found = [" ".join(line[1:]) for line in out if line[0] == "places"]
        assert found == [f"{half} 8", f"{half} 8", f"{half} 24"]

    for out in lines:
        held = [number for line in out if line[0] == "rows" for number in line[2:]]
        assert len(held) == 4
        assert next(line[1:] for line in out if line[0] == "reads") == sorted(held, key=int)
    evaluated = [
        int(word) for out in lines for line in out if line[0] == "eval" for word in line[1:]
    ]
    assert sorted(evaluated) == sorted([*range(20), 0, 0, 0, 0])


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("jaxtrain-batches")]


@pytest.fixture(autouse=True)
def no_thread_left():
    assert our_threads() == []
    yield
    assert our_threads() == []


def test_stream_is_the_batches_in_order():
    batches = Batches(Rows(10), global_batch=4, seed=1)
    with batches.stream(5, prefetch=3) as stream:
        assert our_threads()
        got = [numbers(next(stream)) for _ in range(12)]
    assert got == [numbers(batches.batch(step)) for step in range(5, 17)]


def test_stream_to_devices(mesh):
    batches = Batches(Rows(10), global_batch=4, seed=1)
    sharding = NamedSharding(mesh, P("data"))
    with batches.stream(sharding=sharding) as stream:
        for step in range(3):
            batch = next(stream)
            assert batch["tokens"].sharding == sharding
            np.testing.assert_array_equal(batch["tokens"], batches.batch(step)["tokens"])


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_stream_keeps_exactly_prefetch_batches_ahead():
    made = []
    with BatchStream(lambda step: made.append(step) or {"step": step}, 7, prefetch=3) as stream:
        wait_for(lambda: made == [7, 8, 9])
        assert next(stream) == {"step": 7}
        wait_for(lambda: made == [7, 8, 9, 10])
        time.sleep(0.02)
        assert made == [7, 8, 9, 10]


def failing(step):
    if step == 2:
        raise OSError("the disk is gone")
    return {"step": step}


def test_an_error_is_raised_at_its_step_and_ends_the_stream():
    stream = BatchStream(failing, prefetch=4)
    assert [next(stream)["step"] for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(stream)
    assert caught.value.__notes__ == ["while making batch 2"]
    assert our_threads() == []
    with pytest.raises(ValueError, match="stream of batches is closed"):
        next(stream)


def test_close_ends_the_thread_and_drops_what_was_not_begun():
    made, begun, go = [], threading.Event(), threading.Event()

    def make(step):
        made.append(step)
        begun.set()
        go.wait(10)
        return {}

    stream = BatchStream(make, prefetch=5)
    begun.wait(10)
    threading.Timer(0.05, go.set).start()
    stream.close()
    assert our_threads() == []
    assert made == [0]
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_an_error_of_the_consumer_closes_the_stream():
    def consume():
        with Batches(Rows(10), global_batch=4, seed=1).stream() as stream:
            next(stream)
            raise KeyError("of the consumer")

    with pytest.raises(KeyError, match="of the consumer"):
        consume()
    assert our_threads() == []


def test_a_forgotten_stream_ends_its_thread():
    stream = Batches(Rows(10), global_batch=4, seed=1).stream()
    next(stream)
    (thread,) = our_threads()
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 20), global_batch=st.integers(1, 25))
def test_eval_batches_are_every_row_once_in_order(length, global_batch):
    batches = list(eval_batches(Rows(length), global_batch))
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    assert all(len(batch["mask"]) == global_batch for batch in batches)
    assert len(batches) == -(-length // global_batch)
    assert numbers({"tokens": joined["tokens"][:length]}) == list(range(length))
    assert joined["mask"].sum() == 4 * length
    assert not joined["mask"][length:].any()
    assert not joined["tokens"][length:].any()


class Reversed(Rows):
    """Rows with an order of their own, as of masked ones, that is of training alone."""

    def row_order(self, *, seed, global_batch):
        return lambda position: len(self) - 1 - position % len(self)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 20), global_batch=st.integers(1, 25))
def test_whole_batches_are_every_row_equally_often_in_order(length, global_batch):
    seen = []
    for batch, count in whole_batches(Reversed(length), global_batch):
        found = numbers(batch)
        assert len(found) == global_batch
        assert found == found[:count] * (global_batch // count)
        seen += found[:count]
    assert seen == list(range(length))


def test_eval_batches_on_devices(mesh):
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    placed = list(eval_batches(Rows(6), 4, sharding=sharding))
    for got, expected in zip(placed, eval_batches(Rows(6), 4), strict=True):
        assert got["tokens"].sharding == sharding
        np.testing.assert_array_equal(got["tokens"], expected["tokens"])
        np.testing.assert_array_equal(got["mask"], expected["mask"])


def test_packed_rows_to_batches():
    texts = [bytes(range(n, n + 20)) for n in range(30)]
    corpus = tokenize([Document(str(n), text) for n, text in enumerate(texts)], ByteTokenizer())
    packed = PackedTokens(corpus, 16)
    batches = Batches(packed, global_batch=4, seed=0)
    assert {name: (array.shape, str(array.dtype)) for name, array in batches.shapes.items()} == {
        "tokens": ((4, 16), "int32"),
        "targets": ((4, 16), "int32"),
        "mask": ((4, 16), "float32"),
        "segments": ((4, 16), "int32"),
        "positions": ((4, 16), "int32"),
    }
    batch = batches.batch(2)
    for row in range(4):
        expected = packed[batches.source_index(8 + row)]
        for name in expected:
            np.testing.assert_array_equal(batch[name][row], expected[name])
    assert sum(batch["mask"].sum() for batch in eval_batches(packed, 7)) == corpus.num_bytes


def test_refusals(mesh):
    rows = Rows(10)
    with pytest.raises(ValueError, match="has no rows"):
        Batches(Rows(0), global_batch=1, seed=0)
    with pytest.raises(ValueError, match="has no rows"):
        eval_batches(Rows(0), 4)
    for make in (lambda n: Batches(rows, global_batch=n, seed=0), lambda n: eval_batches(rows, n)):
        with pytest.raises(ValueError, match="`global_batch` is 0; give at least 1"):
            make(0)
    with pytest.raises(ValueError, match="`seed` is -1"):
        Batches(rows, global_batch=1, seed=-1)
    batches = Batches(rows, global_batch=6, seed=0)
    with pytest.raises(ValueError, match="step is -1"):
        batches.batch(-1)
    with pytest.raises(TypeError):
        batches.batch(1.5)
    with pytest.raises(ValueError, match="prefetch is 0"):
        batches.stream(prefetch=0)
    with pytest.raises(ValueError, match="start_step is -1"):
        batches.stream(-1)
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    with pytest.raises(ValueError, match=r"batch array 'tokens' of shape \(6, 4\) cannot be laid"):
        batches.sharded(0, sharding)


def test_rows_are_read_through_failures_that_pass(monkeypatch):
    """A batch is whole or an error; never short, and never of other rows."""
    rows, fails = Rows(10), [0]

    class Failing(Rows):
        def __getitem__(self, index):
            if fails[0] and index == 7:
                fails[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().__getitem__(index)

    pauses = []
    monkeypatch.setattr(storage, "pause", pauses.append)
    monkeypatch.setattr(storage, "now", lambda: sum(pauses))
    expected = [Batches(rows, global_batch=4, seed=3).batch(step) for step in range(5)]
    fails[0] = 3
    with Batches(Failing(10), global_batch=4, seed=3).stream() as stream:
        for batch in expected:
            found = next(stream)
            assert found.keys() == batch.keys()
            for name, values in batch.items():
                np.testing.assert_array_equal(found[name], values)
    assert len(pauses) == 3
    fails[0] = 10**9
    batches = Batches(Failing(10), global_batch=10, seed=3)
    with batches.stream() as stream, pytest.raises(StorageError, match="the rows of batch 0: Inp"):
        next(stream)
