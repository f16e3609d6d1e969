"""What a save and a restore allocate on the devices."""

import gc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.planning.targets import parse_target
from jaxtrain.run.checkpoints import leaves, manifest
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.checkpoints.reader import Reader
from jaxtrain.sharding.stack import LayerOrder

LAYERS, WIDTH = 8, 96
LAYER = WIDTH * WIDTH * 4
UNEVEN = (3, 1, 2, 2)


def make_state(virtual=1, counts=None, width=WIDTH, **axes):
    """Two stacked leaves of float32 and one that is not, on a mesh; and how they are stacked."""
    mesh, stack = jt.make_mesh(**axes), jt.Stack(virtual=virtual, counts=counts)
    r = np.random.default_rng(0)
    params = {
        "blocks": {"w": r.normal(size=(LAYERS, width, width)).astype(np.float32)},
        "head": r.normal(size=(width,)).astype(np.float32),
    }
    pipe = "pipe" if axes.get("pipe") else None
    specs = {"blocks": P(pipe) if virtual == 1 else P(None, pipe), "head": P()}
    placed = {
        key: jax.device_put(leaf, NamedSharding(mesh, specs[key]))
        for key, leaf in stack.cut(params).items()
    }
    moments = jax.tree.map(lambda x: x + 1, placed)
    whole = jax.device_put(np.int32(0), NamedSharding(mesh, P()))
    return jt.TrainState(whole, placed, {"mu": moments}, None, None, None, whole), stack


def on_devices() -> int:
    """The bytes of all buffers that arrays hold, each once."""
    gc.collect()
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}.values())


@pytest.mark.parametrize(
    "layout",
    [
        {"virtual": 2, "pipe": 2, "data": 4},
        {"virtual": 4, "pipe": 2, "data": 4},
        {"data": 8},
        {"counts": UNEVEN, "pipe": 4, "data": 2},
        {"counts": UNEVEN, "virtual": 2, "pipe": 2, "data": 4},
    ],
    ids=str,
)
def test_a_save_allocates_less_than_a_layer_on_the_devices(tmp_path, monkeypatch, layout):
    state, stack = make_state(**layout)
    asarray, seen = np.asarray, []

    def watched(array, *args, **kwargs):
        if isinstance(array, jax.Array) and array.ndim > 1:  # Orbax copies to the host
            seen.append(on_devices())
        return asarray(array, *args, **kwargs)

    with Checkpointer(tmp_path) as checkpoints:
        before = on_devices()
        with monkeypatch.context() as patch:
            patch.setattr(np, "asarray", watched)
            checkpoints.save(0, stack.in_order(state))
        assert len(seen) >= 2
        assert max(seen) - before < LAYER
        checkpoints.wait()
        restored = checkpoints.restore(stack.in_order(state))
    for found, saved in ((restored.params, state.params), (restored.opt_state, state.opt_state)):
        # What was in the padding is zeros again.
        saved = jax.tree.map(np.asarray, saved.get("mu", saved))
        expected = stack.cut(stack.natural(saved))
        jax.tree.map(np.testing.assert_array_equal, found.get("mu", found), expected)


@pytest.mark.parametrize("rows", [None, tuple(range(15))], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("target", "package"), [("v5e:2x4", "libtpu"), ("h100:1x8", "jax_cuda12_plugin")]
)
def test_checksums_take_no_memory_on_accelerators(target, package, dtype, rows):
    pytest.importorskip(package)
    mesh = jt.make_mesh(pipe=2, data=4, devices=parse_target(target).devices())
    place = NamedSharding(mesh, P(None, "pipe"))
    leaf = jax.ShapeDtypeStruct((2, 8, 1024, 1024), dtype, sharding=place)
    memory = manifest.on_devices.lower([leaf], LayerOrder((2, 8), rows)).compile().memory_analysis()
    assert memory.argument_size_in_bytes == 8 * 1024 * 1024 * leaf.dtype.itemsize
    assert memory.temp_size_in_bytes < 2**17


def test_layers_that_do_not_divide_as_they_lie_are_read_split_along_another_axis():
    mesh = jt.make_mesh(pipe=2, devices=jax.devices()[:2])
    cut = NamedSharding(mesh, P(None, "pipe"))  # [V, L / V, width], of 3 layers and padding
    leaf = jax.ShapeDtypeStruct((2, 2, 4), np.float32, sharding=cut)
    args, whole = leaves._restore_args({"shape": [3, 4]}, leaf)
    assert (args.sharding.spec, whole) == (P(None, "pipe"), False)


@pytest.mark.parametrize("counts", [None, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("width", "portions", "copies"),
    [
        (WIDTH, 1, 2),  # Split along the width, nothing is there twice on any device.
        (33, 3, 8),  # What lies as it did, and each of two leaves by itself, whole on each device.
    ],
)
def test_a_leaf_in_another_order_is_read_as_small_as_can_be(
    tmp_path, monkeypatch, width, portions, copies, counts
):
    """[V, L / V] over 8 devices, where 4 layers cannot be split by 8."""
    state, stack = make_state(2, counts, width, pipe=2, data=4)
    natural, _ = make_state(width=width, pipe=8)
    most, read = [], Reader._read_file
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, stack.in_order(state))
        checkpoints.wait()
        before = on_devices()

        def watched(self, step, args):
            arrays = read(self, step, args)
            most.append(on_devices() - before)
            return arrays

        monkeypatch.setattr(Reader, "_read_file", watched)
        restored = checkpoints.restore(natural)
    jax.tree.map(np.testing.assert_array_equal, restored, natural)
    rows = 8 if counts is None else 4 * max(counts)
    layer = width * width * 4
    assert len(most) == portions
    assert max(most) < copies * rows * layer + LAYERS * layer + layer  # and what has been read
