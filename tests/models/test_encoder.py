"""Encoders: every mesh agrees with one device, and what is refused. tests/hf has the oracle."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxtrain.models import encoder, layers
from jaxtrain.models.encoder import EncoderConfig
from tests import problems
from tests.compare import noisy

# Values are compared, and how fast they are computed does not matter.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

SMALL = EncoderConfig(
    vocab_size=61, seq_len=16, layers=2, width=32, heads=4, unused_positions=2, loss_chunk=2
)
# Layers of two kinds, of which stages begin with either; the first has one norm less.
MODERN = EncoderConfig(
    vocab_size=61,
    seq_len=16,
    layers=4,
    width=32,
    heads=4,
    positions="rope",
    rope_theta=100.0,
    local_rope_theta=10.0,
    window=4,
    window_pattern=(False, True, True),
    norm_position="pre",
    mlp="geglu_exact",
    bias=False,
    token_types=None,
)
MEAN = dataclasses.replace(MODERN, head="classes", classes=3, pooling="mean")
CLASSES = dataclasses.replace(SMALL, head="classes", classes=3, loss_chunk=None, dropout=0.2)


def init(config, rng):
    return problems.with_noise(encoder.init(config, rng))


def rows(config):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (16, 16)).astype(np.int32)
    segments = (np.arange(16) < rng.integers(4, 17, (16, 1))).astype(np.int32)
    found = {"tokens": tokens, "segments": segments, "types": tokens % 2}
    if config.head == "classes":
        label = rng.integers(0, 3, 16).astype(np.int32)
        return found | {"label": label, "mask": (rng.random(16) < 0.8).astype(np.float32)}
    places = np.sort(rng.permuted(np.tile(np.arange(16, dtype=np.int32), (16, 1)), axis=1)[:, :4])
    mask = np.take_along_axis(segments, places, axis=1).astype(np.float32)
    return found | {"places": places, "targets": tokens[:, :4], "mask": mask}


@pytest.mark.parametrize(
    ("config", "layout", "policy"),
    [
        *(
            pytest.param(config, layout, "f32", marks=pytest.mark.slow)
            for config in (MODERN, MEAN)
            for layout in (
                "data=2,fsdp=2,tensor=2",
                "pipe=2,fsdp=2,tensor=2",
                "context=8",
                "context=4,data=2",
            )
        ),
        *(
            pytest.param(config, layout, policy, marks=pytest.mark.slow)
            for config in (SMALL, CLASSES)
            for layout, policy in (
                ("data=2,fsdp=2,tensor=2", "f32"),
                ("pipe=2,fsdp=2,tensor=2", "f32"),
                ("pipe=2,data=2,tensor=2,zero=2", "f32"),
                ("data=8,zero=3", "f32"),
                ("data=2,tensor=4", "f32"),
                ("pipe=2,context=2,data=2", "f32"),
                ("pipe=2", "bf16"),
            )
        ),
    ],
    ids=lambda value: getattr(value, "head", None),
)
def test_every_mesh_agrees_with_one_device(config, layout, policy):
    noisy.parity(encoder, config, rows(config), layout, steps=2, policy=policy)


def test_predictions_are_of_their_places_and_padding_is_not_seen():
    params, batch = init(SMALL, jax.random.key(0)), rows(SMALL)
    spread = {name: np.zeros((16, 16), x.dtype) for name, x in batch.items() if x.shape == (16, 4)}
    for name in ("targets", "mask"):
        np.put_along_axis(spread[name], batch["places"], batch[name], axis=1)
    del spread["places"]
    whole = {n: x for n, x in batch.items() if n != "places"} | spread
    config = dataclasses.replace(SMALL, loss_chunk=None)
    loss = quick_jit(encoder.loss_fn(config))
    other = {"tokens": np.where(batch["segments"] > 0, batch["tokens"], 7)}
    for same in (whole, batch | other):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5),
            loss(params, same, None),
            loss(params, batch, None),
        )


def test_the_mean_of_a_row_leaves_its_padding_out():
    made = layers.pure(encoder.NormedClassHead, MEAN, jax.random.key(0))
    head = layers.apply(encoder.NormedClassHead, MEAN, made)
    segments, x = np.array([[1, 1, 0, 0]]), np.random.default_rng(0).normal(size=(2, 1, 4, 32))
    x[1, :, :2] = x[0, :, :2]
    a, b = quick_jit(jax.vmap(lambda x: head(x, segments)))(x.astype(np.float32))
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 3}, "classes=3 and head='tokens': give a number of classes with"),
        ({"head": "classes"}, "classes=None and head='classes'"),
        ({"window": 4, "local_rope_theta": 9.0}, "needs a window and rotary positions: set both"),
        ({"unused_positions": -1}, "unused_positions=-1 must be a whole number"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_what_has_no_head_has_no_loss():
    config = dataclasses.replace(SMALL, head="none")
    with pytest.raises(ValueError, match="head='none' predicts nothing"):
        encoder.loss_fn(config)(encoder.init(config, jax.random.key(0)), rows(config), None)
