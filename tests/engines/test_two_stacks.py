"""An encoder and a decoder in one pipeline: plain functions, against one device.

The stream is a pair: what the encoder has made of the source so far, and the target. The decoder's
layers attend to the encoder's result, which goes round the ring with it.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import worst
from jaxtrain.engines.pipeline import pipeline
from jaxtrain.sharding.placement import constrain_tree
from jaxtrain.sharding.stack import StackedLeaf
from jaxtrain.step import build_update
from tests.problems import record_gradients

# Most of the time of these tests is LLVM's; its optimisations are not what is tested.
FAST = {"xla_backend_optimization_level": 0}
SLOW = pytest.mark.slow
ROWS, MICROBATCHES, STEPS, TOLERANCE = 16, 4, 2, 1e-5
ENCODER, DECODER, WIDTH, HIDDEN, WORDS, SOURCE, TARGET = 4, 8, 8, 12, 11, 5, 3
RULES = [
    ("^(encoder|decoder)/up$", ("layers", "embed", "mlp")),
    ("^(encoder|decoder)/down$", ("layers", "mlp", None)),
    ("^decoder/look$", ("layers", "embed", None)),
]


def init(rng):
    r = np.random.default_rng(0)

    def layers(count, *shape):
        return (0.25 * r.normal(size=(count, *shape))).astype(np.float32)

    def mlp(count):
        return {"up": layers(count, WIDTH, HIDDEN), "down": layers(count, HIDDEN, WIDTH)}

    return {
        "table": layers(WORDS, WIDTH),
        "encoder": mlp(ENCODER),
        "norm": 1 + layers(WIDTH),
        "start": layers(TARGET, WIDTH),
        "decoder": mlp(DECODER) | {"look": layers(DECODER, WIDTH, WIDTH)},
        "gain": 1 + layers(WIDTH),
    }


def embed(params, batch, rng):
    source = params["table"][batch["source"]]
    return {"source": source, "target": jnp.zeros((len(source), TARGET, WIDTH), source.dtype)}


def mlp(layer, x, rng):
    noise = 1.0 if rng is None else 1.0 + 0.1 * jax.random.normal(rng, x.shape)
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"] * noise


def encode(layer, x, batch, rng):
    return x | {"source": mlp(layer, x["source"], rng)}


def between(params, x, batch, rng):
    noise = 1.0 if rng is None else 1.0 + 0.1 * jax.random.normal(rng, (WIDTH,))
    target = params["table"][batch["target"]] + params["start"]
    return {"source": jnp.tanh(x["source"]) * params["norm"] * noise, "target": target}


def decode(layer, x, batch, rng):
    scores = jnp.einsum("btk,bsk->bts", x["target"] @ layer["look"], x["source"])
    seen = jax.nn.softmax(scores) @ x["source"]
    return x | {"target": mlp(layer, x["target"] + seen, rng)}


def head_loss(params, x, batch):
    logits = (x["target"] * params["gain"]) @ params["table"].T
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][..., None], -1)[..., 0]
    return jt.WeightedLoss((nll * batch["mask"]).sum(), batch["mask"].sum())


def stages_of(stack):
    return jt.Stages(embed, (encode, decode), head_loss, stacked=stack, between=(between,))


def written_out(params, batch, rng):
    """The loss, layer by layer."""
    x = embed(params, batch, rng)
    for index in range(ENCODER + DECODER):
        key, i = ("encoder", index) if index < ENCODER else ("decoder", index - ENCODER)
        if key == "decoder" and not i:
            x = between(params, x, batch, rng)
        layer = jax.tree.map(lambda p, i=i: p[i], params[key])
        layer_rng = None if rng is None else jax.random.fold_in(rng, index)
        x = (encode if key == "encoder" else decode)(layer, x, batch, layer_rng)
    return head_loss(params, x, batch)


def make_batch(seed=0):
    r = np.random.default_rng(seed)
    words = functools.partial(r.integers, 0, WORDS, dtype=np.int32)
    mask = (r.random((ROWS, TARGET)) < r.random((ROWS, 1))).astype(np.float32)
    mask[0] = 1.0
    shape = (ROWS, TARGET)
    source = words((ROWS, SOURCE))
    return {"source": source, "target": words(shape), "next": words(shape), "mask": mask}


def train(axes=None, stack=None, *, zero=0, freeze=None, **options):
    """A few steps, and an evaluation; with recorded gradients in the optimizer state."""
    stack = stack or jt.Stack(("encoder", "decoder"))
    chain = jt.make_optimizer(
        "lamb", 1e-2, weight_decay=0.1, clip_norm=0.5, eps=1e-4, stacked=stack.axes, freeze=freeze
    )
    optimizer = optax.chain(record_gradients(), chain)
    mesh = axes and jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    rules = jt.Rules(RULES, stacked=stack) if axes else None
    params = stack.cut(init(None))
    given = {"mesh": mesh, "rules": rules, "zero": zero}
    state = jt.init_state(lambda rng: params, optimizer, jax.random.key(0), **given)
    if axes is None:
        loss_fn = jt.loss_from_stages(stages_of(stack))
        step = jt.build_train_step(loss_fn, optimizer, accumulate=MICROBATCHES)
        evaluate = jt.build_eval_step(loss_fn)
    else:
        shardings = jt.gradient_shardings(state, zero=zero)
        given = {"mesh": mesh, "microbatches": MICROBATCHES, "schedule": "interleaved"}
        engine = pipeline(stages_of(stack), gradient_shardings=shardings, **given, **options)
        step = build_update(engine, optimizer, constrain=constrain_tree(shardings))
        evaluate = jt.pipeline_eval_step(stages_of(stack), **given)
    given = {"mesh": mesh, "compiler_options": FAST}
    evaluated = jt.compile_step(evaluate, state, make_batch(), donate=False, **given)
    loss = evaluated(state, make_batch())
    compiled = jt.compile_step(step, state, make_batch(), **given)
    for seed in range(STEPS):
        state, metrics = compiled(state, make_batch(seed))
    natural = jax.tree.map(whole, stack.in_order(state)) if axes else state
    return jax.device_get(
        {
            "evaluation": loss,
            "metrics": {name: metrics[name] for name in ("loss", "weight", "grad_norm")},
            "gradients": natural.opt_state[0],
            "parameters": natural.params,
            "moments": natural.opt_state[1],
        }
    )


def whole(leaf):
    return leaf.order.join(leaf.array) if isinstance(leaf, StackedLeaf) else leaf


one_device = functools.cache(lambda freeze: train(freeze=freeze))

PAIR = ("encoder", "decoder")
TWO, UNEVEN = jt.Stack(PAIR, virtual=2), jt.Stack(PAIR, counts=(3, 1, 5, 3))
SHARED = dataclasses.replace(TWO, counts=(1, 1, 2, 0, 2, 3, 2, 1))
FREEZE = ("^decoder/(up|look)$", "^encoder/up$", "^start$")
CASES = [
    ({"pipe": 2, "data": 2, "tensor": 2}, TWO, FREEZE, {"remat": "none", "zero": 1}),
    pytest.param({"pipe": 4, "data": 2}, None, None, {"remat": "full"}, marks=SLOW),
    pytest.param({"pipe": 2, "fsdp": 2}, UNEVEN, None, {"remat": "none"}, marks=SLOW),
    pytest.param({"pipe": 2, "tensor": 2}, SHARED, FREEZE, {"remat": "none"}, marks=SLOW),
    pytest.param({"pipe": 2, "data": 2, "fsdp": 2}, SHARED, None, {"zero": 2}, marks=SLOW),
    pytest.param({"pipe": 2}, TWO, None, {"skip_bubbles": False, "remat": "none"}, marks=SLOW),
    pytest.param({"pipe": 4, "fsdp": 2}, None, FREEZE, {"zero": 3}, marks=SLOW),
]


@pytest.mark.parametrize(("axes", "stack", "freeze", "options"), CASES)
def test_an_encoder_and_a_decoder_train_as_on_one_device(axes, stack, freeze, options):
    found, expected = train(axes, stack, freeze=freeze, **options), one_device(freeze)
    errors = {part: worst(found[part], expected[part]) for part in expected}
    assert not {part: error for part, error in errors.items() if error[0] > TOLERANCE}, errors


@pytest.mark.slow
def test_the_loss_of_two_stacks_is_the_model_written_out():
    params, batch, rng = init(None), make_batch(), jax.random.key(2)
    loss = jt.loss_from_stages(stages_of(SHARED))

    @jax.jit
    def gradients(params):
        expected = jax.grad(lambda p: written_out(p, batch, rng).total)(params)
        found = jax.grad(lambda p: loss(p, batch, rng).total)(SHARED.cut(params))
        return SHARED.natural(found), expected

    assert worst(*jax.device_get(gradients(params)))[0] < TOLERANCE


def test_mistakes_in_stages_of_several_stacks():
    with pytest.raises(ValueError, match="has 2 blocks, 1 keys of stacked parameters and 1 func"):
        stages_of("encoder")
    with pytest.raises(ValueError, match=r"several stacks of layers \(encoder, decoder\) and sch"):
        pipeline(stages_of(PAIR), mesh=jt.make_mesh(pipe=8), microbatches=4)
    stages = dataclasses.replace(stages_of(PAIR), between=(lambda *_: {"source": jnp.zeros(3)},))
    with pytest.raises(ValueError, match=r"Stages\.between turns .* must keep the shape and dtype"):
        jax.eval_shape(jt.loss_from_stages(stages), init(None), make_batch(), None)
    with pytest.raises(ValueError, match=r"counts is \(3, 1, 5\): give the number of layers of ev"):
        jt.Stack(PAIR, counts=(3, 1, 5))
