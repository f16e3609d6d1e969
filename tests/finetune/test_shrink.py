"""Calibrated kernels against their definitions, and narrow models against ones that were zeroed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.finetune import shrink
from jaxtrain.models import decoder
from jaxtrain.ops.altered import grams
from jaxtrain.ops.packed import pack
from tests import forms

D, F, N = 32, 6, 300


@pytest.fixture
def drawn():
    """A kernel and the gram of uneven, correlated inputs, one of which is always 0."""
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((D, D)) * (rng.random(D) ** 2 * 2)
    mix[:, 5] = 0
    x = rng.standard_normal((N, D)) @ mix
    return rng.standard_normal((D, F)).astype(np.float32), x.T @ x, x


def by_definition(w, gram, group, levels):
    """Optimal brain surgeon in a fixed order: what follows an input is corrected by the inverse of
    the Hessian of all that is not rounded yet."""
    H = gram + np.diag(np.where(np.diag(gram) > 0, 0.01 * np.diag(gram).mean(), 1))
    w, out = w.astype(np.float64), np.empty(w.shape)
    for i in range(len(w)):
        if i % group == 0:
            scale = np.float32(abs(w[i : i + group].astype(np.float32)).max(0)) / np.float32(levels)
            scale = scale.astype(jnp.bfloat16).astype(np.float64)
        out[i] = np.clip(np.rint(w[i] / scale), -levels - 1, levels) * scale
        inverse = np.linalg.inv(H[i:, i:])
        w[i:] -= np.outer(inverse[:, 0] / inverse[0, 0], w[i] - out[i])
    return out


@pytest.mark.parametrize(("kind", "group", "levels"), [("int4", 8, 7), ("int8", None, 127)])
def test_gptq_is_its_definition_and_better_than_rounding(drawn, kind, group, levels):
    w, gram, x = drawn
    found = shrink.gptq(w, gram, kind, group).merged()
    np.testing.assert_allclose(found, by_definition(w, gram, group or D, levels), atol=1e-6)
    rounded = np.asarray(pack(w, kind, group).merged())
    errors = [shrink.error(w, np.asarray(each), gram) for each in (found, rounded)]
    expected = np.linalg.norm(x @ (rounded - w)) / np.linalg.norm(x @ w)
    np.testing.assert_allclose(errors[1], expected, rtol=1e-6)
    assert errors[0] < 0.9 * errors[1]


def test_pruned_weights_stay_0_and_wanda_looks_at_the_inputs(drawn):
    w, gram, _ = drawn
    norms = np.sqrt(np.diag(gram))
    mask = shrink.kept(w, norms, 2, 4)
    for d, f in np.ndindex(D // 4, F):
        scores = abs(w[4 * d : 4 * d + 4, f]) * norms[4 * d : 4 * d + 4]
        assert set(np.flatnonzero(mask[4 * d : 4 * d + 4, f])) == set(np.argsort(-scores)[:2])
    by_size = shrink.kept(w, np.ones(D), 2, 4)
    wanda, magnitude = (shrink.error(w, w * each, gram) for each in (mask, by_size))
    assert wanda < magnitude
    packed = shrink.gptq(w * mask, gram, "int4", 8).merged()
    assert not np.any(np.asarray(packed)[~mask])


@pytest.mark.parametrize(
    "form", [forms.LLAMA, pytest.param({"positions": "learned"}, marks=pytest.mark.slow)]
)
def test_a_narrow_model_is_the_one_whose_other_parts_are_0(form):
    sizes = {"vocab_size": 31, "seq_len": 8, "layers": 2, "width": 16, "heads": 4, "mlp_width": 12}
    model = decoder.DecoderConfig(**sizes, **form)
    params = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
    params = jax.tree.map(
        lambda x: np.array(x + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape)), params
    )
    tokens = jnp.arange(32).reshape(4, 8) % 31
    batch = {"tokens": tokens, "targets": tokens, "mask": jnp.ones((4, 8))}
    paths = ["blocks/attn/out/kernel", "blocks/mlp/down/kernel"]
    found = grams(decoder.loss_fn(model), params, paths, [batch])
    small = shrink.sizes(model, heads=0.5, channels=0.25)
    narrow = shrink.narrow(model, small, params, found)
    assert (small.heads, small.mlp_width, small.head_dim) == (2, 3, 4)
    assert small.kv_heads == model.kv_heads // 2
    # What is cut off adds nothing once the rows behind it are 0.
    parts = {"out": ("attn", model.kv_heads), "down": ("mlp", 12)}
    for (part, (where, count)), path in zip(parts.items(), paths, strict=True):
        kernel, gram = params["blocks"][where][part]["kernel"], found[path]
        for l in range(2):
            size = kernel.shape[1] // count
            rows = [slice(i * size, i * size + size) for i in range(count)]
            energy = [np.trace(kernel[l, r].T @ gram[l, r, r] @ kernel[l, r]) for r in rows]
            for i in np.argsort(energy)[
                : count - len(narrow["blocks"][where][part]["kernel"][l]) // size
            ]:
                kernel[l, rows[i]] = 0
    expected = jax.jit(functools.partial(decoder.logits, model))(params, tokens)
    found = jax.jit(functools.partial(decoder.logits, small))(narrow, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    shapes = jax.eval_shape(lambda: decoder.init(small, jax.random.key(0)))
    jax.tree.map(lambda x, like: np.testing.assert_equal(x.shape, like.shape), narrow, shapes)
    assert dataclasses.asdict(small) != dataclasses.asdict(model)


@pytest.mark.slow
def test_a_narrow_model_is_opened_by_transformers(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"vocab_size": 31, "seq_len": 8, "layers": 2, "width": 16, "heads": 4, "mlp_width": 12}
    model = decoder.DecoderConfig(**sizes, **forms.LLAMA)
    params = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
    tokens = jnp.arange(32).reshape(4, 8) % 31
    batch = {"tokens": tokens, "targets": tokens, "mask": jnp.ones((4, 8))}
    paths = ["blocks/attn/out/kernel", "blocks/mlp/down/kernel"]
    small = shrink.sizes(model, heads=0.5, channels=0.25)
    found = grams(decoder.loss_fn(model), params, paths, [batch])
    narrow = shrink.narrow(model, small, params, found)
    hf.save(tmp_path, small, narrow, family="llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor(np.asarray(tokens))).logits.numpy()
    np.testing.assert_allclose(decoder.logits(small, narrow, tokens), logits, atol=1e-5)
