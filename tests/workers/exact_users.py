"""Prints whether random models, losses and optax chains of a user's own have the same bits in exact
steps on meshes of 2 to 16 simulated devices. Arguments: the seeds."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.compare import parity

ACTIVATIONS = [jnp.tanh, jax.nn.gelu, jax.nn.relu, jax.nn.silu]
OPTIMIZERS = [
    lambda rate: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate)),
    lambda rate: optax.lamb(rate, weight_decay=0.1),
    lambda rate: optax.adafactor(rate, min_dim_size_to_factor=8),
    lambda rate: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(rate, momentum=0.9)),
    lambda rate: optax.contrib.schedule_free_adamw(rate),
    lambda rate: optax.lion(optax.cosine_decay_schedule(rate, 5)),
]
MESHES = [{"data": 2}, {"data": 4, "fsdp": 4}, {"fsdp": 16}, {"fsdp": 2}, {"data": 8}]


def problem(seed):
    """A loss, a function that draws parameters, an optimizer and batches, all random."""
    r = np.random.default_rng(seed)
    widths = [8 * int(r.integers(1, 9)) for _ in range(int(r.integers(2, 5)))]
    activation, squared = ACTIVATIONS[seed % len(ACTIVATIONS)], r.random() < 0.5

    def init(rng):
        keys = jax.random.split(rng, len(widths))
        pairs = list(zip(keys, widths, [*widths[1:], 5], strict=True))
        draw = lambda key, m, n: jax.random.normal(key, (m, n)) / m**0.5  # noqa: E731
        return {f"layer{i}": {"w": draw(*p), "b": jnp.zeros(p[2])} for i, p in enumerate(pairs)}

    @jt.row_wise
    def loss(params, batch, rng):
        x = batch["x"]
        for i in range(len(widths)):
            layer = params[f"layer{i}"]
            x = activation(x) @ layer["w"] + layer["b"]
        off = jnp.square(x - batch["y"]) if squared else jnp.logaddexp(x, -x * batch["y"])
        weight = batch["weight"]
        total = (off.mean(-1) * weight).sum()
        return jt.WeightedLoss(total, weight.sum(), {"largest": jt.Max(jnp.abs(x).max())})

    def batch():
        rows = 16 * int(1 + seed % 3)
        draw = lambda *shape: r.normal(size=(rows, *shape)).astype(np.float32)  # noqa: E731
        return {"x": draw(widths[0]), "y": draw(5), "weight": np.abs(draw())}

    return loss, init, OPTIMIZERS[seed % len(OPTIMIZERS)](1e-2), [batch() for _ in range(3)]


def train(seed, axes):
    """All bytes of the state and of the metrics."""
    loss, init, optimizer, batches = problem(seed)
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    state = jt.init_state(init, optimizer, jax.random.key(seed), mesh=mesh, whole=True)
    step = jt.build_train_step(loss, optimizer, exact=16, norms=True)
    compiled, found = jt.compile_step(step, state, batches[0], mesh=mesh), []
    for batch in batches:
        state, metrics = compiled(state, batch)
        found.append(jax.device_get(metrics))
    held = jax.device_get((state.params, state.opt_state, found))
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(held)]


if __name__ == "__main__":
    parity.set_flags(parity.QUICK)
    jax.config.update("jax_num_cpu_devices", 16)
    for seed in map(int, sys.argv[1:]):
        first, *others = (train(seed, axes) for axes in MESHES)
        print(seed, "equal" if all(found == first for found in others) else "different", flush=True)
