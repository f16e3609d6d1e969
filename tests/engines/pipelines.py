"""A model in forty lines that is no GPT, for tests of the pipeline: tied table, MLP layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.stages import Stages

LAYERS, WIDTH, HIDDEN, WORDS, LENGTH = 8, 8, 12, 11, 4


def init(rng):
    keys = jax.random.split(rng, 4)
    return {
        "table": 0.5 * jax.random.normal(keys[0], (WORDS, WIDTH)),
        "blocks": {
            "up": 0.4 * jax.random.normal(keys[1], (LAYERS, WIDTH, HIDDEN)),
            "down": 0.4 * jax.random.normal(keys[2], (LAYERS, HIDDEN, WIDTH)),
        },
        "gain": 1.0 + 0.1 * jax.random.normal(keys[3], (WIDTH,)),
        "unused": jnp.ones(3),
    }


def embed(params, batch, rng):
    return params["table"][batch["words"]]


def block(layer, x, batch, rng):
    noise = 1.0 if rng is None else (1.0 + 0.1 * jax.random.normal(rng, x.shape)).astype(x.dtype)
    hidden = jnp.tanh(x @ layer["up"]) * batch["gate"][:, None, None].astype(x.dtype)
    return x + hidden @ layer["down"] * noise


def head_loss(params, x, batch):
    logits = ((x * params["gain"]) @ params["table"].T).astype(jnp.float32)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][..., None], -1)[..., 0]
    right = (logits.argmax(-1) == batch["next"]) * batch["mask"]
    total = (nll * batch["mask"]).sum() + 0.01 * jnp.square(logits).sum()  # a term of every row
    return jt.WeightedLoss(total, batch["mask"].sum(), {"accuracy": right.sum()})


STAGES = Stages(embed=embed, block=block, head_loss=head_loss)


def loss_fn(params, batch, rng):
    """The same model without a pipeline."""
    x = embed(params, batch, rng)
    for index in range(LAYERS):
        layer = jax.tree.map(lambda p, i=index: p[i], params["blocks"])
        x = block(layer, x, batch, None if rng is None else jax.random.fold_in(rng, index))
    return head_loss(params, x, batch)


def assert_lamb_agrees(layout, stack, loss_fn, stages, *, schedule, **options):
    """Trains with LAMB in a pipeline, cut as a stack says, as on one device; the loss takes layers
    in natural order."""
    rules = [("^blocks/up", ("layers", "embed", "mlp")), ("^blocks/down", ("layers", "mlp", None))]
    table = jt.parity(
        lambda rng: stack.cut(init(rng)),
        lambda params, batch, rng: loss_fn(stack.natural(params), batch, rng),
        make_batch(16),
        optimizer=jt.make_optimizer("lamb", 1e-2, eps=1e-4, stacked=stack.axes, **options),
        rules=jt.Rules(rules, stacked=stack),
        layouts=[layout],
        stages=dataclasses.replace(stages, stacked=stack),
        pipeline={"microbatches": 4, "schedule": schedule},
    )
    assert "1 of 1 meshes agree with one device to 1e-05" in table


def make_batch(rows, seed=0):
    """Rows of very different numbers of tokens; row 1 has none."""
    r = np.random.default_rng(seed)
    mask = (r.random((rows, LENGTH)) < r.random((rows, 1))).astype(np.float32)
    mask[0], mask[1] = 1.0, 0.0
    return {
        "words": r.integers(0, WORDS, (rows, LENGTH)).astype(np.int32),
        "next": r.integers(0, WORDS, (rows, LENGTH)).astype(np.int32),
        "gate": r.random(rows).astype(np.float32),
        "mask": mask,
    }
