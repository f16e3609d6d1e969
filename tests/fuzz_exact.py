"""Random models, losses, optimizers, grains and cuts: exact steps have the same bits on every mesh
of 2 to 16 simulated devices.

    python -m tests.fuzz_exact --seed 0 --seconds 3600

Every second case is a user's own model and optax chain; the others are decoders, cut over tensor,
pipe, context or expert. ``--case N ...`` repeats some. Exit status 1 where bits differ.
"""

import dataclasses
import hashlib
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from experiments import gpt
from jaxtrain import build
from jaxtrain.compare import parity
from jaxtrain.layout import Layout
from jaxtrain.run.main import parse
from jaxtrain.tree import key_data
from tests import fuzz

DEVICES, STEPS = 16, 3
ACTIVATIONS = [jnp.tanh, jax.nn.gelu, jax.nn.relu, jax.nn.silu]
CHAINS = [
    lambda rate: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate)),
    lambda rate: optax.lamb(rate, weight_decay=0.1),
    lambda rate: optax.adafactor(rate, min_dim_size_to_factor=8),
    lambda rate: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(rate, momentum=0.9)),
    lambda rate: optax.contrib.schedule_free_adamw(rate),
    lambda rate: optax.lion(optax.cosine_decay_schedule(rate, 5)),
]
OPTIMIZERS = ["adamw", "lamb", "adafactor", "lion", "muon", "lars"]
CUTS = ["", "tensor=2", "context=2", "pipe=2", "expert=2", "pipe=2,tensor=2", "expert=2,tensor=2"]
CUTS += ["pipe=2,pipeline.schedule=interleaved,pipeline.virtual=2", "context=2,expert=2"]
TEXT = f"--data {pathlib.Path(__file__).parent / 'engines'} --held-out-bytes 2000 --seq-len 16"


def digest(tree):
    """A hash of all leaves."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(jax.tree.map(key_data, tree))):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def trained(module, flags, layout):
    """The state, the metrics of three steps and an evaluation, on a part of the devices."""
    built = module.build(parse(module.Config, flags.split()))
    built = dataclasses.replace(built, layout=Layout.parse(layout, built.layout))
    devices = jax.devices()[: built.layout.mesh.devices]
    mesh = build.make_experiment_mesh(built, devices)
    state = build.make_state(built, mesh)
    step, told = build.compile_train(built, state, mesh), []
    with built.train_batches(0, build.stream_shardings(built, mesh)) as batches:
        for _ in range(STEPS):
            state, metrics = step(state, batch := next(batches))
            told.append(metrics)
    held_out = build.compile_eval(built, state, batch, mesh)(state, batch)
    return state, told, held_out


def of_decoder(number):
    """A decoder's flags, and layouts of equal bits."""
    r = random.Random(number)
    cut, grains = r.choice(CUTS), r.choice((4, 8))
    most = min(grains, DEVICES // 2 ** cut.count("=2"))
    flags = f"{TEXT} --layers {r.choice((2, 4))} --width {r.choice((16, 32))} --heads 2"
    flags += f" --exact {grains} --global-batch {grains * r.choice((2, 4))} --dropout 0.1"
    flags += f" --optimizer.name {r.choice(OPTIMIZERS)} --optimizer.clip-norm 0.1"
    flags += f" --pipeline.microbatches 2 --precision {r.choice(('f32', 'bf16'))}"
    if "virtual" in cut:
        flags = flags.replace("--layers 2", "--layers 4")
    flags += " --experts 4" * ("expert" in cut)
    layouts = []
    for parts in (most, most // 2):
        data = r.choice([n for n in (1, 2, 4, 8) if n <= parts])
        own = f"data={data},fsdp={parts // data},zero={r.choice((0, 1, 2, 3))}"
        fits = "pipe" not in cut and grains // parts > 1
        layouts.append(",".join(filter(None, (own, "accumulate=2" * fits, cut))))
    return flags, layouts


def of_a_user(number):
    """A loss, a function that draws parameters, an optimizer and batches."""
    r = np.random.default_rng(number)
    widths = [8 * int(r.integers(1, 9)) for _ in range(int(r.integers(2, 5)))]
    activation, squared = ACTIVATIONS[number // 2 % len(ACTIVATIONS)], r.random() < 0.5

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
        rows = 16 * int(1 + number % 3)
        draw = lambda *shape: r.normal(size=(rows, *shape)).astype(np.float32)  # noqa: E731
        return {"x": draw(widths[0]), "y": draw(5), "weight": np.abs(draw())}

    chain = CHAINS[number // 2 % len(CHAINS)](1e-2)
    return loss, init, chain, [batch() for _ in range(STEPS)]


def trained_by_a_user(number, axes):
    """The state and the metrics of all steps."""
    loss, init, optimizer, batches = of_a_user(number)
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    state = jt.init_state(init, optimizer, jax.random.key(number), mesh=mesh, whole=True)
    step = jt.build_train_step(loss, optimizer, exact=16, norms=True)
    compiled, told = jt.compile_step(step, state, batches[0], mesh=mesh), []
    for batch in batches:
        state, metrics = compiled(state, batch)
        told.append(metrics)
    return state, told


def run(number):
    """What differs in a case, or None."""
    parity.set_flags(parity.QUICK)
    if number % 2:
        flags, layouts = of_decoder(number)
        found = [digest(trained(gpt, flags, layout)) for layout in layouts]
        return f"{flags} on {layouts}" if len(set(found)) > 1 else None
    meshes = {"data": 2}, {"data": 4, "fsdp": 4}, {"fsdp": 16}, {"fsdp": 2}, {"data": 8}
    found = [digest(trained_by_a_user(number, axes)) for axes in meshes]
    return f"on {meshes}: {found}" if len(set(found)) > 1 else None


if __name__ == "__main__":
    raise SystemExit(fuzz.main(run, __doc__, DEVICES))
