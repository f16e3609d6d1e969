"""What the benchmarks compare must be the same mathematics."""

import ast
import dataclasses
import pathlib

import jax
import numpy as np

import jaxtrain as jt
from experiments.bench import floor
from experiments.bench import step as row
from jaxtrain.models import gpt
from jaxtrain.parity import worst


def test_the_hand_written_step_is_the_same_step():
    model, _ = row.model_and_rows("small")
    model = dataclasses.replace(model, layers=2, width=32, seq_len=16)
    batch = row.make_batch(model, 4)
    params = jax.jit(lambda: gpt.init(model, jax.random.key(0)))()
    optimizer = jt.make_optimizer(
        "adamw",
        row.LEARNING_RATE,
        weight_decay=row.WEIGHT_DECAY,
        clip_norm=row.CLIP_NORM,
        stacked=gpt.STACKED,
    )
    state = jt.init_state(lambda rng: params, optimizer, jax.random.key(0))
    step = jax.jit(jt.build_train_step(gpt.loss_fn(model), optimizer))
    its_optimizer, its_step = floor.make_step(
        model.heads, row.LEARNING_RATE, row.WEIGHT_DECAY, row.CLIP_NORM
    )
    its_params = row.unstacked(params)
    its_state = its_optimizer.init(its_params)
    for _ in range(3):
        state, metrics = step(state, batch)
        its_params, its_state, loss = its_step(
            its_params, its_state, batch["tokens"], batch["targets"]
        )
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    moved = jax.tree.map(lambda a, b: a - b, row.unstacked(state.params), row.unstacked(params))
    its_moved = jax.tree.map(lambda a, b: a - b, its_params, row.unstacked(params))
    for layer in (*moved["layers"], *its_moved["layers"]):
        # Adam blows up the rounding noise of a gradient that is zero: softmax sees no key bias.
        del layer["attn"]["k"]["bias"]
    error, name = worst(moved, its_moved)
    assert error < 1e-3, name


def test_the_hand_written_step_owes_nothing_to_the_library():
    tree = ast.parse(pathlib.Path(floor.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    }
    assert imported == {"functools", "jax", "optax"}
