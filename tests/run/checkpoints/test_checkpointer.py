"""Checkpoints hold what was saved, bit for bit, and come back on any devices."""

import dataclasses
import json
import math
import os
import pickle
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.tree import map_named, named_leaves
from tests.run.survive.processes import free_port, together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any
    rng: Any
    loss_scale: Any
    position: int
    seconds: float
    done: bool
    buffer: Any


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def make_state(seed: int = 0) -> State:
    """A training state with every kind of leaf, on the default device."""
    key = jax.random.key(seed)
    params = {
        "w": jax.random.normal(key, (8, 4)),
        "h": jax.random.normal(key, (8,), jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(
        step=jnp.int32(7),
        params=params,
        opt_state=optimizer.init(params),
        rng=jax.random.fold_in(key, 1),
        loss_scale=None,
        position=2**40 + 1,
        seconds=0.1,
        done=True,
        buffer=np.arange(5, dtype=np.int64) + seed,
    )


def shard(state: State, mesh: jax.sharding.Mesh, spec: P) -> State:
    """Puts every matrix at ``spec`` and the other JAX arrays everywhere."""

    def place(name, leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        matrix = leaf.ndim == 2 and leaf.size
        return jax.device_put(leaf, NamedSharding(mesh, spec if matrix else P()))

    return map_named(place, state)


def abstract(state: State) -> State:
    def describe(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(describe, state)


def host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).copy() if hasattr(leaf, "dtype") else leaf


def assert_same(left: Any, right: Any) -> None:
    """Same structure, types, dtypes and bytes, by NumPy alone."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for name, one in named_leaves(left).items():
        other = named_leaves(right)[name]
        assert isinstance(other, jax.Array) == isinstance(one, jax.Array), name
        if not isinstance(one, jax.Array):
            assert type(other) is type(one), name
        one, other = host(one), host(other)
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert one.tobytes() == other.tobytes(), name
        else:
            assert one == other, name


def test_restores_on_any_mesh_bit_for_bit(tmp_path):
    layouts = {
        "data4 tensor2": (mesh_of(data=4, tensor=2), P("data", "tensor")),
        "one device": (mesh_of(data=1), P()),
        "fsdp8": (mesh_of(fsdp=8), P("fsdp")),
        "transposed": (mesh_of(tensor=2, data=4), P("tensor", "data")),
        "back": (mesh_of(data=4, tensor=2), P("data", "tensor")),
    }
    original = make_state()
    expected = digest(original)
    saved = shard(original, *layouts["data4 tensor2"])
    for step, (name, layout) in enumerate(layouts.items()):
        with Checkpointer(tmp_path) as checkpoints:
            assert checkpoints.save(step, saved)
        target = shard(make_state(seed=1), *layout)
        for template in (target, abstract(target)):
            restored = Checkpointer(tmp_path).restore(template)
            assert_same(original, restored)
            assert digest(restored) == expected, name
            for path, leaf in named_leaves(restored).items():
                if isinstance(leaf, jax.Array):
                    assert leaf.sharding == named_leaves(target)[path].sharding, (name, path)
        saved = restored  # the next round saves from the mesh just restored to


def test_uncommitted_leaves_stay_free_to_move(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": jnp.arange(4.0), "key": jax.random.key(3)})
        shapes = jax.eval_shape(lambda: {"w": jnp.zeros(4), "key": jax.random.key(0)})
        arrays = {"w": jnp.zeros(4), "key": jax.random.key(0)}
        everywhere = NamedSharding(mesh_of(data=8), P())
        for template in (shapes, arrays):
            restored = checkpoints.restore(template)
            assert not restored["w"].committed
            assert not restored["key"].committed
            np.testing.assert_array_equal(restored["w"], np.arange(4.0))
            jax.jit(lambda s: s, in_shardings=everywhere)(restored)


@settings(max_examples=10, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda s: s.isprintable() and "/" not in s),
        st.tuples(
            st.sampled_from(
                ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "int4", "complex64"]
            ),
            st.lists(st.integers(0, 3), max_size=3),
            st.integers(0, 2**32 - 1),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_names_dtypes_and_shapes_survive(tmp_path_factory, leaves):
    def array(dtype, shape, seed):
        values = np.random.default_rng(seed).integers(0, 2, shape)
        return jnp.asarray(values.astype(jnp.dtype(dtype)))

    state = {"always": jnp.ones(1), "nested": {k: array(*v) for k, v in leaves.items()}}
    with Checkpointer(tmp_path_factory.mktemp("any")) as checkpoints:
        checkpoints.save(0, state)
        assert_same(state, checkpoints.restore(state))


@pytest.fixture
def gate(monkeypatch):
    """Holds up the threads in which Orbax writes arrays and JSON, until ``open`` is set."""

    class Gate:
        open = threading.Event()
        reached = threading.Event()

    start = threading.Thread.start

    def guarded(thread):
        if thread.name in ("array_type_handler", "json_ch_save"):
            run = thread.run

            def wait_and_run():
                Gate.reached.set()
                assert Gate.open.wait(timeout=30)
                run()

            thread.run = wait_and_run
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", guarded)
    yield Gate
    Gate.open.set()


def test_buffers_may_be_donated_and_overwritten_when_save_returns(tmp_path, gate):
    mesh = mesh_of(data=4, tensor=2)
    state = {
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("data"))),
        "single": jnp.arange(1000.0),
        "deleted": jnp.full((16,), 3.0),
        "rng": jax.random.key(5),
        "host": np.arange(6.0),
    }
    expected = jax.tree.map(host, state)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for name in ("sharded", "single"):
        overwrite(jnp.copy(state[name]))  # compiled beforehand

    checkpoints = Checkpointer(tmp_path)
    gate.open.set()
    checkpoints.save(0, state)  # creates the directory, so that only writing is gated below
    checkpoints.wait()
    gate.open.clear()
    gate.reached.clear()

    config = {"lr": [1]}
    checkpoints.save(1, state, config=config)
    overwritten = {k: jax.block_until_ready(overwrite(state[k])) for k in ("sharded", "single")}
    state["deleted"].delete()
    state["host"][:] = -1
    config["lr"].append(2)
    assert gate.reached.wait(timeout=30)  # the writer stood at the gate all the while
    assert not (tmp_path / "1").exists()
    gate.open.set()

    template = {k: np.zeros_like(v) if k != "rng" else state["rng"] for k, v in expected.items()}
    restored = checkpoints.restore(template, step=1)
    for name, array in overwritten.items():
        np.testing.assert_array_equal(array, -np.ones_like(expected[name]))
    for name, value in expected.items():
        np.testing.assert_array_equal(host(restored[name]), value, err_msg=name)
    assert checkpoints.config(1) == {"lr": [1]}
    checkpoints.close()


def test_a_failed_save_is_raised_leaves_no_checkpoint_and_can_be_retried(tmp_path, monkeypatch):
    state = {"w": jnp.arange(3.0)}
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(0, state)
    checkpoints.wait()

    def full(source, target):
        raise OSError(f"no space left for {target}")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)  # the last act of a save: giving it its final name
        checkpoints.save(1, state)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.wait()
    assert Checkpointer(tmp_path).steps() == [0]
    assert checkpoints.save(1, state)
    assert checkpoints.steps() == [0, 1]
    checkpoints.close()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_keeps_the_latest_and_the_best(tmp_path, mode):
    losses = [5.0, 1.0, math.nan, 1.0, 9.0, None, 4.0, math.inf, 3.0]
    options = {"keep": 2, "keep_best": 2, "best_mode": mode, "best_metric": "score"}
    state = {"w": jnp.zeros(2)}

    def expected(upto: int, present: set[int]) -> tuple[set[int], int | None]:
        finite = [s for s in present if losses[s] is not None and math.isfinite(losses[s])]
        sign = 1 if mode == "min" else -1
        best = sorted(finite, key=lambda s: (sign * losses[s], s))
        return {*sorted(present)[-2:], *best[:2]}, best[0] if best else None

    present: set[int] = set()
    checkpoints = Checkpointer(tmp_path, **options)
    for step, loss in enumerate(losses):
        if step == 4:  # a new process must remember what the old one saved
            checkpoints.close()
            checkpoints = Checkpointer(tmp_path, **options)
        checkpoints.save(step, state, metrics=None if loss is None else {"score": loss})
        present, best = expected(step, present | {step})
        assert checkpoints.steps() == sorted(present)
        assert checkpoints.latest_step() == step
        assert checkpoints.best_step() == best
    checkpoints.close()


def test_keep_none_keeps_all(tmp_path):
    with Checkpointer(tmp_path, keep=None, keep_best=0) as checkpoints:
        for step in range(5):
            checkpoints.save(step, {"w": jnp.zeros(1)})
        assert checkpoints.steps() == [0, 1, 2, 3, 4]
        assert checkpoints.best_step() is None


def test_save_every_force_and_repeats(tmp_path):
    state = {"w": jnp.zeros(1)}
    with Checkpointer(tmp_path, save_every=10) as checkpoints:
        assert not checkpoints.save(5, state)
        assert checkpoints.save(10, state)
        assert not checkpoints.save(10, state, force=True)  # the very step is there already
        assert not checkpoints.save(17, state)
        assert checkpoints.save(17, state, force=True)
        assert checkpoints.steps() == [10, 17]


def test_going_back_needs_the_later_steps_dropped(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": jnp.full(2, step)}, metrics={"eval/loss": float(step)})
        with pytest.raises(
            ValueError, match=r"step 2 is behind the latest checkpoint 3 .*drop_aft"
        ):
            checkpoints.save(2, {"w": jnp.zeros(2)})
        assert checkpoints.best_step() == 1
        checkpoints.drop_after(1)
        assert checkpoints.steps() == [1]
        assert checkpoints.save(2, {"w": jnp.full(2, 20)}, metrics={"eval/loss": 0.125})
        restored = checkpoints.restore({"w": np.zeros(2, np.int32)})
        assert checkpoints.best_step() == 2
        np.testing.assert_array_equal(restored["w"], [20, 20])


def test_config_and_metrics_round_trip(tmp_path):
    config = {"name": "gpt", "lr": 3e-4, "mesh": {"data": 2}, "betas": [0.9, 0.95], "clip": None}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(1)}, config=config, metrics={"a": jnp.float32(0.5)})
        checkpoints.save(2, {"w": jnp.zeros(1)}, metrics={"a": math.nan, "b": -math.inf})
    reader = Checkpointer(tmp_path)
    assert reader.config(1) == config
    assert reader.config() == {}
    assert reader.metrics(1) == {"a": 0.5}
    assert math.isnan(reader.metrics()["a"])
    assert reader.metrics()["b"] == -math.inf
    for file in tmp_path.glob("*/*/metadata"):
        json.loads(file.read_text(), parse_constant=pytest.fail)  # strict JSON has no bare NaN
    with pytest.raises(TypeError, match="config entry 'optimizer' cannot be written as JSON"):
        Checkpointer(tmp_path).save(3, {"w": jnp.zeros(1)}, config={"optimizer": optax.sgd(1)})


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_continue_the_same_stream(tmp_path, impl):
    mesh = mesh_of(data=4)
    one = jax.random.key(11, impl=impl)
    many = jax.device_put(jax.random.split(one, 4), NamedSharding(mesh, P("data")))
    state = {"one": one, "many": many, "none": jax.random.split(one, 4)[:0]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        restored = checkpoints.restore(abstract(state))
    assert restored["many"].sharding == many.sharding
    assert restored["none"].shape == (0,)
    assert restored["none"].dtype == one.dtype
    for name in ("one", "many"):
        assert str(jax.random.key_impl(restored[name])) == impl
        draw = jax.vmap(lambda k: jax.random.bits(k, (3,)))
        np.testing.assert_array_equal(
            draw(jnp.atleast_1d(restored[name])), draw(jnp.atleast_1d(state[name]))
        )


def test_another_model_is_named_by_its_first_difference(tmp_path):
    state = {"a": jnp.zeros((3, 4)), "b": {"w": jnp.zeros(2)}, "k": jax.random.key(0), "n": 3}
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(5, state)

    def error(**changes) -> str:
        with pytest.raises(ValueError, match=r"checkpoint 5 in .* is of another model") as caught:
            checkpoints.restore({**state, **changes})
        return str(caught.value)

    assert "'a' is float32(3, 4) there and float32(3, 5) in the state" in error(a=jnp.zeros((3, 5)))
    assert "'a' is float32(3, 4) there and bfloat16(3, 4)" in error(a=jnp.zeros((3, 4), "bfloat16"))
    assert "it lacks 'b/v' float32(2,)" in error(b={"w": jnp.zeros(2), "v": jnp.zeros(2)})
    assert "it holds 'b/w' float32(2,), which the state lacks" in error(b={})
    assert "'k' is key<fry>() there and key<rbg>()" in error(k=jax.random.key(0, impl="rbg"))
    assert "'n' is the Python int 3 there and float32()" in error(n=jnp.float32(0))
    assert "'n' is the Python int 3 there and the Python float" in error(n=0.0)
    checkpoints.close()


def test_missing_checkpoints_say_what_there_is(tmp_path):
    nowhere = tmp_path / "nowhere"
    reader = Checkpointer(nowhere)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*nowhere"):
        reader.restore({"w": jnp.zeros(1)})
    assert (reader.steps(), reader.latest_step(), reader.best_step()) == ([], None, None)
    assert not nowhere.exists()
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(4, {"w": jnp.zeros(1)})
        checkpoints.save(8, {"w": jnp.zeros(1)})
        for read in (lambda: checkpoints.restore({"w": 0}, 6), lambda: checkpoints.config(6)):
            with pytest.raises(FileNotFoundError, match=r"step 6 in .*run: it has 4, 8"):
                read()


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"w": jnp.zeros(1), "name": "gpt"}, TypeError, "leaf 'name' of the state is a str"),
        ({"w": np.array(["a"])}, TypeError, "leaf 'w' of the state has dtype <U1"),
        ({"w": np.array([None])}, TypeError, "leaf 'w' of the state has dtype object"),
        ({"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)}, ValueError, "share the path 'a/b'"),
        (np.zeros(2), ValueError, "bare leaf without a path"),
        ({"n": 3}, ValueError, "no array with elements"),
    ],
)
def test_states_that_cannot_be_saved(tmp_path, state, error, message):
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path).save(0, state)


def test_options_are_checked(tmp_path):
    for options in ({"keep": 0}, {"keep_best": -1}, {"best_mode": "least"}, {"save_every": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Checkpointer(tmp_path, **options)
    with pytest.raises(ValueError, match="step is -1"):
        Checkpointer(tmp_path).save(-1, {"w": jnp.zeros(1)})


def test_half_written_steps_are_never_the_latest(tmp_path):
    state = {"w": jnp.arange(3.0)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    killed = tmp_path / "2.orbax-checkpoint-tmp"  # what a save killed half-way leaves behind
    (killed / "state").mkdir(parents=True)
    (killed / "manifest").mkdir()
    older = tmp_path / "9.orbax-checkpoint-tmp"
    older.mkdir()
    (tmp_path / "3" / "state").mkdir(parents=True)  # a copy broken off
    (tmp_path / "3" / "state" / "part").write_text("x")

    reader = Checkpointer(tmp_path)
    assert reader.steps() == [1]
    assert reader.latest_step() == 1
    # To a reader they may be the save of a job that is still running.
    assert killed.exists()
    assert older.exists()
    np.testing.assert_array_equal(reader.restore({"w": np.zeros(3, np.float32)})["w"], [0, 1, 2])

    with Checkpointer(tmp_path, keep=1, keep_best=0) as writer:
        assert writer.save(2, state)
        assert writer.steps() == [2]
        assert writer.save(3, state)
        assert writer.steps() == [3]
    assert not killed.exists()
    assert not older.exists()
    assert (tmp_path / "damaged-3" / "state" / "part").exists()  # not ours to delete


def test_python_numbers_come_back_as_the_template_asks(tmp_path):
    state = {"w": jnp.zeros(1), "step": 5, "big": 2**70, "x": math.inf, "flag": False}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        assert checkpoints.restore({**state, "step": 0, "big": 0, "x": 0.0, "flag": True}) == state
        arrays = {"step": jnp.int32(0), "x": jnp.float32(0), "flag": jnp.array(True)}
        part = checkpoints.restore_part(jax.eval_shape(lambda: arrays))
        assert part["step"].dtype == jnp.int32
        assert (int(part["step"]), float(part["x"]), bool(part["flag"])) == (5, math.inf, False)
        with pytest.raises(ValueError, match=r"'big' is the Python int \d+ there and int32\(\)"):
            checkpoints.restore_part({"big": jnp.int32(0)})


def test_a_part_is_restored_by_its_paths(tmp_path):
    state = make_state()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        part = checkpoints.restore_part({"params": {"w": state.params["w"]}})
        np.testing.assert_array_equal(part["params"]["w"], state.params["w"])
        with pytest.raises(ValueError, match="it lacks 'params/v'"):
            checkpoints.restore_part({"params": {"v": state.params["w"]}})


def test_no_pickle_either_way(tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, forbidden)
    state = make_state()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, config={"a": 1})
        assert_same(state, checkpoints.restore(state))


def test_remote_directories_keep_their_scheme(tmp_path, monkeypatch):
    assert str(Checkpointer("gs://bucket/run").directory) == "gs://bucket/run"
    monkeypatch.chdir(tmp_path)
    assert str(Checkpointer("runs/a").directory) == str(tmp_path / "runs" / "a")


def test_digest_sees_everything_but_the_placement():
    base = {"a": jnp.arange(8.0), "k": jax.random.key(1), "n": 3, "large": np.zeros(5000)}
    sharded = jax.device_put(base["a"], NamedSharding(mesh_of(data=8), P("data")))
    assert digest({**base, "a": sharded}) == digest(base)
    assert digest({**base, "a": np.arange(8, dtype=np.float32)}) == digest(base)
    changed = base["large"].copy()
    changed[2500] = 1e-300
    nudged = np.arange(8, dtype=np.float32)
    nudged[7] = np.nextafter(nudged[7], 8)
    others = [
        {**base, "a": nudged},
        {**base, "a": jnp.arange(8.0).at[0].set(-0.0)},
        {**base, "a": jnp.arange(8.0).astype(jnp.bfloat16)},
        {**base, "a": jnp.arange(8.0).reshape(2, 4)},
        {**base, "k": jax.random.key(2)},
        {**base, "n": 4},
        {**base, "n": 3.0},
        {**{k: v for k, v in base.items() if k != "a"}, "b": base["a"]},
        {**base, "large": changed},
        {**base, "more": jnp.zeros(1)},
    ]
    assert len({digest(tree) for tree in [base, *others]}) == len(others) + 1


TWO_PROCESSES = """
import sys
import jax

process, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
def at(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
key = jax.eval_shape(lambda: jax.random.key(0)).dtype
template = {
    "w": at((4, 6), "float32", "data", "tensor"),
    "none": at((0, 2), "float32"),
    "keys": at((2,), key, "data"),
    "host": np.zeros(3, np.int64),
    "n": 0,
}
with Checkpointer(directory, keep=1, best_metric="loss") as checkpoints:
    state = checkpoints.restore(template, step=1)
    assert not state["w"].is_fully_addressable
    checkpoints.drop_after(1)
    for step, loss in ((2, 0.5), (3, 0.7), (4, 0.6)):
        assert checkpoints.save(step, state, metrics={"loss": loss})
    assert (checkpoints.steps(), checkpoints.best_step()) == ([2, 4], 2)
    print("digest", digest(state))
"""


def test_two_processes_restore_what_one_saved_and_the_other_way_round(tmp_path):
    keys = jax.random.split(jax.random.key(3), 2)
    state = {
        "w": jnp.arange(24.0).reshape(4, 6),
        "none": jnp.zeros((0, 2)),
        "keys": keys,
        "host": np.arange(3),
        "n": 9,
    }
    with Checkpointer(tmp_path, keep_best=0) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    command, port = [sys.executable, "-c", TWO_PROCESSES], str(free_port())
    for output in together([[*command, number, port, str(tmp_path)] for number in "01"]):
        assert f"digest {digest(state)}" in output
    reader = Checkpointer(tmp_path)
    assert reader.steps() == [2, 4]
    assert_same(state, reader.restore(state))


def test_a_state_of_another_optimizer_is_called_that(tmp_path):
    state = {"params": {"w": jnp.ones(3)}, "opt_state": {"count": jnp.int32(0)}}
    other = {"params": {"w": jnp.ones(3)}, "opt_state": {"trace": jnp.ones(3)}}
    shape = {"params": {"w": jnp.ones(3)}, "opt_state": {"count": jnp.zeros(2)}}
    model = {"params": {"w": jnp.ones(4)}, "opt_state": {"trace": jnp.ones(4)}}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for wanted, words in (
            (other, "is of another optimizer: it lacks 'opt_state/trace'"),
            (shape, "is of another optimizer: 'opt_state/count' is"),
            ({"params": state["params"]}, "is of another optimizer: it holds 'opt_state/count'"),
            (model, "is of another model"),
        ):
            with pytest.raises(ValueError, match=words):
                checkpoints.restore(wanted)
