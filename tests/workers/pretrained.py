"""One process of several that load a folder's weights, and count what they read and hold.

jaxtrain launch --processes 2 --simulate-devices-per-process 2 -- python tests/workers/pretrained.py
FOLDER
"""

import functools
import sys
import zlib

import jax
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain import hf
from jaxtrain.hf import safetensors
from jaxtrain.host import distributed
from jaxtrain.models import decoder
from jaxtrain.tree import map_named, named_leaves

MODEL = decoder.DecoderConfig(
    vocab_size=8192,
    seq_len=16,
    layers=8,
    width=1024,
    heads=8,
    kv_heads=4,
    mlp_width=2816,
    positions="rope",
    norm="rmsnorm",
    mlp="swiglu",
    bias=False,
    tied=False,
)


def value(path, shape):
    """What stands in a parameter."""
    return np.random.default_rng(zlib.crc32(path.encode())).random(shape, np.float32)


def params():
    """The model's parameters, the same in all processes."""
    shapes = jax.eval_shape(lambda: decoder.init(MODEL, jax.random.key(0)))
    return map_named(lambda path, x: value(path, x.shape), shapes)


def memory(name):
    """Bytes in memory now (VmRSS), or the most since it was last forgotten (VmHWM)."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(folder) -> None:
    distributed.initialize()
    mesh = jt.make_mesh(fsdp=2, tensor=2)
    read = safetensors.Tensor.__getitem__
    count = [0]

    def counting(self, index):
        part = read(self, index)
        count[0] += part.nbytes
        return part

    safetensors.Tensor.__getitem__ = counting
    init = functools.partial(decoder.init, MODEL)
    given = {"mesh": mesh, "rules": jt.Rules(decoder.RULES)}
    abstract = jt.abstract_state(init, optax.sgd(0.1), **given).params
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    begin = {
        "load": lambda: hf.load(hf.open_weights(folder), shardings),
        "init_state": lambda: (
            jt.init_state(
                init, optax.sgd(0.1), jax.random.key(0), params=hf.open_weights(folder), **given
            ).params
        ),
    }
    for name, make in begin.items():
        count[0] = 0
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = memory("VmRSS")
        arrays = jax.block_until_ready(make())
        used = memory("VmHWM") - before
        shards = [s for x in jax.tree.leaves(arrays) for s in x.addressable_shards]
        own = sum(shard.data.nbytes for shard in shards)
        print("measured:", name, own, count[0], used, flush=True)
        for path, array in named_leaves(arrays).items():
            expected = value(path, array.shape)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index], err_msg=path)
        del arrays, shards


if __name__ == "__main__":
    main(sys.argv[1])
