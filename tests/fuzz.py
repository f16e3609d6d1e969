"""Random models, rules, meshes and pipelines through the public builders, against one device.

    python -m tests.fuzz --seed 0 --seconds 60

The models constrain nothing: what a user writes first. Every case is drawn from its own number, so
``--case N ...`` repeats some. Exit status 1 where a case disagrees.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import random
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.compare.parity import worst
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.layout import Layout
from jaxtrain.ops.grouped import expert_mlp
from jaxtrain.ops.routing import route

DEVICES = 16
ROWS, WIDTH, HIDDEN, WORDS, LENGTH, LAYERS = 32, 32, 64, 64, 4, 4
TOLERANCE = 2e-4
QUICK = {"xla_backend_optimization_level": 0}

# Blocks: parameter shapes by name, and x [..., D] -> [..., D].
D, H = WIDTH, HIDDEN
BLOCKS = {
    "dense": ({"w": (D, D)}, lambda p, x: jnp.tanh(x @ p["w"])),
    "residual": ({"w": (D, D)}, lambda p, x: x + jnp.tanh(x @ p["w"])),
    "bias": ({"w": (D, D), "b": (D,)}, lambda p, x: x + jnp.tanh(x @ p["w"] + p["b"])),
    "mlp": ({"up": (D, H), "down": (H, D)}, lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"]),
    "gated": (
        {"up": (D, H), "gate": (D, H), "down": (H, D)},
        lambda p, x: x + (jnp.tanh(x @ p["up"]) * (x @ p["gate"])) @ p["down"],
    ),
    "tied": ({"w": (D, H)}, lambda p, x: x + jnp.tanh(x @ p["w"]) @ p["w"].T),
    "norm": (
        {"scale": (D,)},
        lambda p, x: p["scale"] * x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3),
    ),
    "attention": ({name: (D, D) for name in "qkvo"}, lambda p, x: _attend(p, x)),
    "experts": (
        {"route": (D, 4), "up": (4, D, H), "down": (4, H, D)},
        lambda p, x: x + _mixture(p, x),
    ),
    "scan": (
        {"up": (LAYERS, D, H), "down": (LAYERS, H, D)},
        lambda p, x: jax.lax.scan(
            jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"] / 4, None)), x, p
        )[0],
    ),
}
# A model's last block where its mesh has an axis of experts.
ROUTED = (BLOCKS["experts"][0], lambda p, x: x + _routed(p, x))
STACKABLE = ("residual", "bias", "mlp", "gated", "tied", "attention")
AXES = (None, "embed", "mlp", "both", "fsdp", "tensor")


def _attend(p, x):
    q, k, v = ((x @ p[name]).reshape(-1, LENGTH, 4, D // 4) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return x + jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape) @ p["o"]


def _mixture(p, x):
    weights = jax.nn.softmax(x @ p["route"])
    hidden = jnp.tanh(jnp.einsum("...d,edh->...eh", x, p["up"]))
    return jnp.einsum("...eh,ehd,...e->...d", hidden, p["down"], weights)


def _routed(p, x):
    routes = route(x, p["route"], per_token=2)
    weights = {"up": p["up"], "down": p["down"]}
    return expert_mlp("gelu", x, weights, routes.weights_BTJ, routes.experts_BTJ)


def _initial(n: np.random.Generator, shapes, lead=()):
    # Numbers, not random functions: most of a case's time would be their compilation.
    return {
        name: (n.normal(size=(*lead, *shape)) / math.sqrt(shape[-2] if shape[1:] else 1)).astype(
            "f"
        )
        for name, shape in sorted(shapes.items())
    }


def make_model(r: random.Random, piped: bool, blocks=BLOCKS):
    """Returns (init_fn, loss_fn, stages, batch, what was drawn)."""
    kinds = [r.choice(list(BLOCKS)) for _ in range(r.randint(1, 3))]
    stacked = r.choice(STACKABLE)
    looked_up = r.random() < 0.5
    head = r.choice(["square", "masked", "words", "contrast"])
    if piped:
        kinds, head = [], r.choice(["square", "masked", "words"])
    kinds += [kind for kind in blocks if kind not in BLOCKS]
    shapes = {f"{i}-{kind}": blocks[kind][0] for i, kind in enumerate(kinds)}

    n = np.random.default_rng(r.randrange(10**6))
    params = {name: _initial(n, shape) for name, shape in shapes.items()}
    params["table"] = n.normal(size=(WORDS, D)).astype("f")
    if piped:
        params["blocks"] = _initial(n, BLOCKS[stacked][0], (LAYERS,))

    def embed(params, batch, rng):
        return params["table"][batch["words"]] if looked_up else jnp.tanh(batch["x"])

    def head_loss(params, x, batch):
        weight = batch["mask"] if head != "square" else jnp.ones(x.shape[:2])
        if head == "words":
            logits = jax.nn.log_softmax(x @ params["table"].T)
            error = -jnp.take_along_axis(logits, batch["next"][..., None], -1)[..., 0]
        elif head == "contrast":
            sums = x.mean(1) / D
            error = -jax.nn.log_softmax(sums @ sums.T, axis=-1).diagonal()[:, None]
        else:
            error = jnp.square(x - batch["x"][..., :1]).mean(-1)
        return jt.WeightedLoss((error * weight).sum(), weight.sum())

    def block(layer, x, batch, rng):
        return BLOCKS[stacked][1](layer, x)

    def loss_fn(params, batch, rng):
        x = embed(params, batch, rng)
        for name, kind in zip(shapes, kinds, strict=True):
            x = blocks[kind][1](params[name], x)
        for layer in range(LAYERS if piped else 0):
            x = block(jax.tree.map(lambda p, i=layer: p[i], params["blocks"]), x, batch, rng)
        return head_loss(params, x, batch)

    stages = jt.Stages(embed, block, head_loss) if piped else None
    batch = {
        "x": n.normal(size=(ROWS, LENGTH, D)).astype("f"),
        "words": n.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32),
        "next": n.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32),
        "mask": (n.random((ROWS, LENGTH)) < n.random((ROWS, 1)) + 0.1).astype("f"),
    }
    drawn = ([stacked] if piped else kinds) + [head] + (["lookup"] if looked_up else [])
    return lambda rng: jax.tree.map(jnp.asarray, params), loss_fn, stages, batch, drawn


def make_rules(r: random.Random, params, piped: bool) -> jt.Rules:
    """A rule for most parameters, of axes that divide it."""
    rules = []
    for name, leaf in jt.tree.named_leaves(params).items():
        routed = re.search("routed/(up|down)", name)  # an axis of experts has to split these
        if r.random() < 0.2 and not piped and not routed:
            continue  # left to the automatic rule
        axes = [r.choice(AXES) for _ in leaf.shape]
        # A router's few experts are fewer than the devices along some axes.
        axes = [axis if size >= 8 else None for axis, size in zip(axes, leaf.shape, strict=True)]
        if "experts" in name or "scan" in name or "routed" in name:
            axes[0] = None
        if routed:
            axes[0] = "experts"
        if piped and name.startswith("blocks/"):
            axes[0] = "layers"
        rules.append((f"^{name}$", tuple(axes)))
    return jt.Rules(rules, axes={"both": ("fsdp", "tensor")})


def make_case(number: int) -> dict:
    """The arguments of ``jt.parity``, and what was drawn, of a case."""
    r = random.Random(number)
    piped = r.random() < 0.25
    # Small numbers are cases that were wrong once, which are to stay what they were.
    more = number >= 1000 and not piped
    routed = more and random.Random(-number).random() < 0.4
    blocks = BLOCKS | ({"routed": ROUTED} if routed else {})
    init_fn, loss_fn, stages, batch, drawn = make_model(r, piped, blocks)
    rules = make_rules(r, jax.eval_shape(init_fn, jax.random.key(0)), piped)
    while True:
        axes = ("pipe", "data", "fsdp", "tensor") if piped else ("data", "fsdp", "tensor")
        # Three axes at once are what has gone wrong, so most meshes have them.
        sizes = {axis: r.choice((2, 2, 2, 4, 1)) for axis in axes}
        rows = sizes["data"] * sizes["fsdp"]
        if sizes.get("pipe") != 1 and 1 < math.prod(sizes.values()) <= DEVICES:
            break
    microbatches = r.choice([k for k in (1, 2, 4) if ROWS % (k * rows) == 0])
    optimizer = r.choice(["momentum", "adamw", "lamb", "muon", "adafactor"])
    zero = r.choice((0, 0, 1, 2, 3))
    pipeline = {
        "microbatches": 4,
        "schedule": r.choice(["1f1b", "gpipe"]),
        "remat": r.choice(["full", "none"]),
    }
    chain = jt.make_optimizer(optimizer, learning_rate=1e-2, **_steady(optimizer))
    if (
        routed
        and 2 * math.prod(sizes.values()) <= DEVICES
        and ROWS % (microbatches * rows * 2) == 0
    ):
        sizes["expert"] = 2
    if more and 2 * math.prod(sizes.values()) <= DEVICES and r.random() < 0.5:
        sizes["context"] = 2
        split = ("^x$", ("batch", "sequence", None)), ("^(words|next|mask)$", ("batch", "sequence"))
        rules = dataclasses.replace(rules, batch=split)
    layout = ",".join(f"{axis}={size}" for axis, size in (sizes | {"zero": zero}).items())
    return {
        "about": [layout, f"accumulate={microbatches}", optimizer, *drawn]
        + ([str(pipeline)] if piped else []),
        "rules": rules,
        "arguments": {
            "init_fn": init_fn,
            "loss_fn": loss_fn,
            "batch": batch,
            "rules": rules,
            "stages": stages,
            "layouts": [layout],
            "accumulate": 1 if piped else microbatches,
            "pipeline": pipeline,
            "optimizer": chain,
            "steps": 1,
            "tolerance": TOLERANCE,
        },
    }


def _steady(optimizer: str) -> dict:
    """An epsilon above rounding, where the rule divides by a gradient's own size."""
    return {"eps": 1e-4} if optimizer in ("adamw", "lamb") else {}


def gradient_error(arguments: dict) -> dict[str, float]:
    """How far loss, gradients and evaluation on the mesh are off one device's, by name."""
    layout = Layout.parse(arguments["layouts"][0])
    mesh = jt.make_mesh(**layout.mesh.sizes, devices=jax.devices()[: layout.mesh.devices])
    optimizer, batch = optax.sgd(1.0), arguments["batch"]
    start = functools.partial(jt.init_state, arguments["init_fn"], optimizer, jax.random.key(0))
    step = jt.build_train_step(arguments["loss_fn"], optimizer, accumulate=arguments["accumulate"])
    evaluate = jt.build_eval_step(arguments["loss_fn"])

    def both(state, batch):
        after, metrics = step(state, batch)
        change = jax.tree.map(jnp.subtract, state.params, after.params)
        return change | {"loss": metrics["loss"], "evaluation": evaluate(state, batch).total}

    placed = {"mesh": mesh, "rules": arguments["rules"]}
    found, expected = (
        jt.compile_step(both, state, batch, donate=False, compiler_options=QUICK, **given)(
            state, batch
        )
        for state, given in ((start(**placed, zero=layout.zero), placed), (start(), {}))
    )
    found, expected = map(jt.tree.named_leaves, (found, expected))
    return {
        name: float(np.linalg.norm(np.asarray(found[name]) - x) / (np.linalg.norm(x) + 1e-6))
        for name, x in jax.device_get(expected).items()
    }


def evaluation_error(arguments: dict) -> float:
    """How far the evaluation of a pipeline is off one device's."""
    layout, batch = Layout.parse(arguments["layouts"][0]), arguments["batch"]
    mesh = jt.make_mesh(**layout.mesh.sizes, devices=jax.devices()[: layout.mesh.devices])
    start = functools.partial(jt.init_state, arguments["init_fn"], optax.sgd(1), jax.random.key(0))
    state = start(mesh=mesh, rules=arguments["rules"], zero=layout.zero)
    evaluate = jt.pipeline_eval_step(arguments["stages"], mesh=mesh, microbatches=4)
    found = jt.compile_step(
        evaluate, state, batch, mesh=mesh, donate=False, compiler_options=QUICK
    )(state, batch)
    expected = jax.jit(jt.build_eval_step(arguments["loss_fn"]))(start(), batch)
    return worst(jax.device_get(found), jax.device_get(expected))[0]


def run(number: int) -> str | None:
    """Runs a case; returns what is wrong with it."""
    case = make_case(number)
    text = f"{case['about']} {dict(case['rules'].params)}"
    if case["arguments"]["stages"] is None and number % 4:
        error, name = max((e, n) for n, e in gradient_error(case["arguments"]).items())
        return f"{text}: {name} is off by {error:.1e}" if not error < TOLERANCE else None
    try:
        jt.parity(**case["arguments"])
    except AssertionError as error:
        return f"{text}: {str(error).splitlines()[0]}"
    if case["arguments"]["stages"] and not (error := evaluation_error(case["arguments"])) < 1e-5:
        return f"{text}: the evaluation is off by {error:.1e}"
    return None


def main(run=run, about=__doc__, devices=DEVICES) -> int:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", type=int, nargs="+", help="these and no others")
    options = parser.parse_args()
    simulate_devices(devices)
    end, tried, wrong, refused = time.monotonic() + options.seconds, 0, 0, 0
    for number in options.case or itertools.count(options.seed * 1_000_000):
        if options.case is None and time.monotonic() > end:
            break
        try:
            fault = run(number)
        except ValueError as error:
            refused += 1
            print(f"case {number} is refused: {error}", flush=True)
            continue
        tried += 1
        if fault:
            wrong += 1
            print(f"case {number}: {fault}", flush=True)
        if tried % 20 == 0:
            jax.clear_caches()  # programs of past cases take memory
    print(f"{wrong} wrong of {tried} cases, {refused} refused")
    return 1 if wrong or refused or not tried else 0


if __name__ == "__main__":
    raise SystemExit(main())
