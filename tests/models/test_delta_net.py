"""Layers of linear attention in a decoder: documents, generation, counts, and what is refused.

Values and gradients against transformers are in tests/hf/test_weights.py, layouts in
tests/compare/test_parity.py.
"""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models import decoder, exact, mup
from jaxtrain.models.decoding import CausalDecoder
from jaxtrain.models.generate import generate, generate_with_routes
from jaxtrain.serve.engine import cache_shapes
from jaxtrain.tree import named_leaves

MODEL = decoder.DecoderConfig(
    **{"vocab_size": 61, "seq_len": 32, "layers": 2, "width": 16, "heads": 2, "head_dim": 8},
    **{"positions": "rope", "norm": "rmsnorm", "norm_offset": True, "mlp": "swiglu", "bias": False},
    **{"delta_pattern": (True, False), "delta_heads": 4, "delta_key_heads": 2, "delta_taps": 3},
    **{"out_gate": True, "rope_dim": 4, "qk_norm": True},
)
ALONE = dataclasses.replace(MODEL, delta_pattern=(True,))
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 24))


@functools.cache
def params_of(model):
    drawn = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
    return jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, drawn)


@functools.cache
def logits_of(model):
    return jax.jit(functools.partial(decoder.logits, model))


def test_a_packed_document_is_that_of_a_row_of_its_own():
    cuts = [0, 11, 13, 24]
    lengths = np.diff(cuts)
    segments = np.repeat(np.arange(1, 4), lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    logits = logits_of(MODEL)
    packed = logits(params_of(MODEL), TOKENS[:1], segments=segments, positions=positions)
    for start, end in itertools.pairwise(cuts):
        alone = np.pad(TOKENS[:1, start:end], ((0, 0), (0, 24 - end + start)))
        found = logits(params_of(MODEL), alone)[:, : end - start]
        np.testing.assert_allclose(packed[:, start:end], found, atol=2e-5)
    assert np.abs(packed[:, 11:] - logits(params_of(MODEL), TOKENS[:1])[:, 11:]).max() > 0.01


@pytest.mark.parametrize("model", [MODEL, pytest.param(ALONE, marks=pytest.mark.slow)])
def test_what_is_generated_is_most_probable_in_the_whole_row(model):
    lengths, params = np.array([9, 4]), params_of(model)
    given = {"max_new_tokens": 8, "temperature": 0.0, "prompt_lengths": lengths}
    new = np.asarray(generate(model, params, TOKENS[:, :9], **given))
    rows = np.stack(
        [
            [*row[:n], *more, *row[n + 8 : 24]]
            for row, n, more in zip(TOKENS, lengths, new, strict=True)
        ]
    )
    best = np.asarray(logits_of(model)(params, rows).argmax(-1))
    for row, n, more in zip(best, lengths, new, strict=True):
        np.testing.assert_array_equal(row[n - 1 : n + 7], more)
    assert len(np.unique(new)) > 3


def test_a_chunk_of_which_some_tokens_count_continues_every_row():
    model, params = MODEL, params_of(MODEL)
    reader, counts = CausalDecoder(model), np.array([5, 2])
    last = TOKENS[np.arange(2), 7 + counts][:, None]

    @jax.jit
    def read(params):
        _, cache = reader.prefill(params, TOKENS[:, :7], jnp.array([7, 7]), room=8)
        _, cache = reader.extend(params, cache, TOKENS[:, 7:12], jnp.array([7, 7]), counts)
        return reader.extend(params, cache, last, jnp.array(7 + counts), jnp.array([1, 1]))[0]

    found, expected = read(params), logits_of(model)(params, TOKENS)[np.arange(2), 7 + counts]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_every_parameter_has_a_rule_and_flops_are_counted_by_hand():
    shapes = named_leaves(jax.eval_shape(functools.partial(decoder.init, MODEL), jax.random.key(0)))
    for path in shapes:
        assert sum(bool(re.search(pattern, path)) for pattern, _ in decoder.RULES) == 1, path
    D, V, H, G, K = 16, 61, 4, 2, 8
    mlp, attention = 3 * D * MODEL.mlp_width, D * (2 * 16 + 16 + 16) + 16 * D + 2 * K
    linear = (
        D * (2 * G * K + 2 * H * K) + D * 2 * H + 3 * (2 * G * K + H * K) + 2 * H + K + H * K * D
    )
    weights = linear + attention + 2 * mlp + 4 * D + D + D * V
    assert decoder.parameter_count(MODEL) == weights
    expected = 6 * weights + 12 * 16 * MODEL.seq_len + 18 * H * K * K
    assert decoder.flops_per_token(MODEL) == expected


def test_a_config_comes_back_from_json():
    again = decoder.DecoderConfig(**json.loads(json.dumps(dataclasses.asdict(MODEL))))
    assert again == MODEL
    assert hash(again.block) == hash(MODEL.block)


def test_what_has_no_state_of_a_row_says_so():
    holds = r"delta_pattern=\(True, False\) .* whose state of a row no page of keys holds: gene"
    with pytest.raises(ValueError, match=holds):
        cache_shapes(MODEL, jnp.float32, 2, 8, None, None)
    with pytest.raises(ValueError, match=holds):
        exact.check_form(MODEL)
    mixture = dataclasses.replace(MODEL, experts=4)
    with pytest.raises(ValueError, match=holds):
        generate_with_routes(mixture, None, TOKENS, max_new_tokens=1)
    with pytest.raises(ValueError, match="the model has latent, gated or linear attention: muP"):
        mup.factors(MODEL, MODEL, rule="adamw")
    with pytest.raises(ValueError, match=r"its length must divide layers=3"):
        dataclasses.replace(MODEL, layers=3)
    with pytest.raises(ValueError, match="dense_layers=1 of these stand before the stack"):
        dataclasses.replace(mixture, dense_layers=1)
    batch = {"tokens": TOKENS, "targets": TOKENS, "mask": np.ones(TOKENS.shape)}
    with (
        jax.set_mesh(jt.make_mesh(data=2, tensor=4)),
        pytest.raises(ValueError, match="2 key heads of the delta rule are not divisible by mesh"),
    ):
        jax.eval_shape(
            decoder.loss_fn(dataclasses.replace(MODEL, heads=4)), params_of(MODEL), batch, None
        )
