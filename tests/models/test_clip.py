"""Two towers: where a text and an image are read, and every mesh and microbatch as one device."""

import contextlib
import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import compare
from jaxtrain.engines.cached import cached, of_embeddings
from jaxtrain.models import clip
from jaxtrain.models.clip import ClipConfig, TextConfig
from jaxtrain.models.vit import ViTConfig
from tests import problems

SIZES = {"layers": 2, "width": 16, "heads": 2, "dropout": 0.2}
IMAGE = SIZES | {"image": (8, 8, 1), "patch": 4, "mlp": "gelu_quick"}
TEXT = SIZES | {"vocab_size": 20, "seq_len": 8}
CLIP = ClipConfig(
    image=ViTConfig(**IMAGE, patch_bias=False, embed_norm=True), text=TextConfig(**TEXT), features=8
)
SIGLIP = ClipConfig(
    image=ViTConfig(**IMAGE, first=False),
    text=TextConfig(**TEXT, causal=False),
    features=16,
    loss="sigmoid",
)
FORMS = {"clip": CLIP, "siglip": SIGLIP}


def make_batch(rows=32, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 18, (rows, 8)).astype(np.int32)
    tokens[np.arange(rows), rng.integers(2, 8, rows)] = 19
    return {
        "image": rng.standard_normal((rows, 8, 8, 1)).astype(np.float32),
        "tokens": tokens,
        "mask": (rng.random(rows) < 0.8).astype(np.float32),
        "caption": rng.integers(0, 9, rows).astype(np.int32),
    }


def experiment_of(config, accumulate=1):
    """Two steps; no bias is zero."""
    encode, loss = (functools.partial(each, config) for each in (clip.encode, clip.loss))
    batches = [make_batch(seed=seed) for seed in range(2)]
    return jt.Experiment.of(
        name="towers",
        init_fn=lambda rng: problems.with_noise(clip.init(config, rng), 0.02),
        loss_fn=of_embeddings(encode, loss),
        engine=cached,
        optimizer=optax.adamw(1e-2, eps=1e-4),
        batch=jax.eval_shape(lambda: batches[0]),
        train_batches=lambda start, sharding: contextlib.nullcontext(iter(batches)),
        steps=2,
        rules=jt.Rules(clip.RULES, stacked=clip.STACK, batch=clip.BATCH),
        gathers_layers=True,
        layout=jt.Layout(accumulate=accumulate),
    )


def agrees(config, *layouts):
    for found in compare(experiment_of(config), layouts=layouts, steps=2):
        assert found.refusal is None
        assert {"gradients", "parameters", "optimizer state"} <= found.worst.keys()
        assert not {part: x for part, x in found.worst.items() if x[0] > 1e-5}, found.worst


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rows of")
@pytest.mark.parametrize("form", FORMS)
def test_every_mesh_agrees_with_one_device(form):
    layouts = ["data=8", "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2,accumulate=2"]
    layouts += ["data=8,zero=3,accumulate=4", "data=2,fsdp=2,tensor=2,accumulate=4"]
    agrees(FORMS[form], *layouts)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_four_microbatches_of_the_towers_are_the_batch(form):
    """To 1e-6 in all gradients together, with what rows drop."""
    grads = []
    for accumulate in (1, 4):
        made = experiment_of(FORMS[form])
        given = {"policy": "f32", "has_model_state": False, "gather": None, "engine": cached}
        engine = jt.step.build_engine(made.task.loss_fn, accumulate=accumulate, **given)
        params = made.task.init_fn(jax.random.key(0))
        run = jax.jit(lambda *given, engine=engine: engine(*given).grads)
        grads.append(run(params, None, make_batch(), jax.random.key(1), None))
    far, size = (optax.tree.norm(x) for x in (jax.tree.map(jnp.subtract, *grads), grads[0]))
    assert size > 0.1
    assert far < 1e-6 * size


def test_a_text_is_read_at_its_end_and_sees_no_padding():
    config = dataclasses.replace(CLIP, text=TextConfig(**TEXT, end=19))
    params = clip.init(config, jax.random.key(0))
    read = jax.jit(functools.partial(clip.encode_texts, config))
    tokens = np.array([[3, 4, 19, 0, 0, 0, 0, 0], [3, 4, 19, 5, 6, 19, 7, 8]])
    first, padded = read(params, tokens)
    np.testing.assert_allclose(first, padded, atol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(first), 1, rtol=1e-6)
    largest = jax.jit(functools.partial(clip.encode_texts, CLIP))
    np.testing.assert_allclose(largest(params, tokens)[0], first, atol=1e-6)
    other = dataclasses.replace(CLIP, text=TextConfig(**TEXT, end=18))
    read = jax.jit(functools.partial(clip.encode_texts, other))
    assert np.abs(read(params, np.where(tokens == 19, 18, tokens))[0] - first).max() > 1e-3
    # Without causality, at the last position, which sees all.
    params = clip.init(SIGLIP, jax.random.key(0))
    read = jax.jit(functools.partial(clip.encode_texts, SIGLIP))
    first, other = read(params, tokens)
    assert np.abs(first - other).max() > 1e-3


def test_the_bias_begins_where_two_rows_match_with_their_chance_of_being_a_pair():
    first = jax.jit(
        lambda rng, pairs: clip.init(SIGLIP, rng, pairs=pairs)["bias"], static_argnums=1
    )
    assert jax.nn.sigmoid(first(jax.random.key(0), 128)) == pytest.approx(1 / 129, rel=1e-5)
    assert first(jax.random.key(0), None) == -10  # SigLIP's own


def test_towers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="classes=3 are no part of a tower"):
        dataclasses.replace(CLIP, image=dataclasses.replace(CLIP.image, classes=3))
    with pytest.raises(ValueError, match="give as many features"):
        dataclasses.replace(SIGLIP, features=8)
    with pytest.raises(ValueError, match="loss='hinge' is not one of softmax, sigmoid"):
        dataclasses.replace(CLIP, loss="hinge")
    with pytest.raises(ValueError, match="first=False leaves that out"):
        ViTConfig(**IMAGE, first=False, classes=3)


@pytest.mark.slow
def test_the_example_of_the_readme_learns():
    text = (pathlib.Path(__file__).parents[2] / "jaxtrain/models/README.md").read_text()
    (code,) = (
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "clip" in each
    )
    given = {"jax": jax, "jnp": jnp, "jt": jt, "optimizer": jt.make_optimizer("adamw", 0.01)}
    names = given | {"mesh": jt.make_mesh(data=2, devices=jax.devices()[:2])}
    exec(code, names)
    before = jax.device_get(names["state"].params)
    state, metrics = names["train"](names["state"], names["pairs"])
    assert np.isfinite(metrics["loss"])
    assert int(metrics["skipped"]) == 0
    assert problems.worst(jax.device_get(state.params), before)[0] > 1e-3
