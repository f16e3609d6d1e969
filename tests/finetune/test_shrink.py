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
from jaxtrain.tree import map_named, named_leaves
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


def test_awq_is_the_best_of_its_grid_and_never_worse_than_rounding(drawn):
    w, _, x = drawn
    x = x * np.tile([1, 1, 20, 1], D // 4)  # a few inputs are large
    gram = x.T @ x

    def lost(s):
        groups = (w * s[:, None]).astype(np.float64).reshape(D // 8, 8, F)
        step = np.float32(abs(groups).max(1, keepdims=True)) / np.float32(7)
        step = step.astype(jnp.bfloat16).astype(np.float64)
        rounded = (np.rint(groups / step) * step).reshape(D, F) / s[:, None]
        return np.linalg.norm(x @ (rounded - w)) / np.linalg.norm(x @ w)

    for heads in ((1, 1), (2, 4)):
        squares = np.diag(gram).reshape(*heads, -1)
        squares = np.broadcast_to(squares.mean(1, keepdims=True), squares.shape).reshape(D)
        rms = np.sqrt(np.maximum(squares, 1e-8 * squares.max()))
        grid = [np.float32((rms / rms.max()) ** (i / 20)) for i in range(21)]
        losses = list(map(lost, grid))
        best = int(np.argmin(losses))
        found = shrink.awq(w, gram, "int4", 8, heads=heads)
        np.testing.assert_array_equal(found, grid[best])
        assert 0 < best < 20
        assert losses[best] < 0.8 * losses[0]
    np.testing.assert_array_equal(shrink.awq(w, 0 * gram, "int4", 8), np.ones(D))


GEMMA = {"mlp": "geglu", "norm_offset": True, "norm_position": "sandwich", "qk_norm": True}
SIZES = {"vocab_size": 31, "seq_len": 8, "layers": 2, "width": 16, "heads": 4, "mlp_width": 12}
ALL = {"norm_attn", "norm_mlp", "attn/v", "mlp/up"}
EXACT = {"mlp": "geglu_exact", "norm": "layernorm", "qkv_bias": True}


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        (forms.LLAMA, ALL),
        ({}, ALL - {"mlp/up"}),
        (forms.LLAMA | GEMMA, ALL),
        pytest.param({"mlp": "relu", "kv_heads": 1}, ALL, marks=pytest.mark.slow),
        pytest.param(forms.LLAMA | EXACT, ALL, marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt2", "gemma", "relu", "layer norms without bias"],
)
def test_folded_scales_leave_the_function_as_it_is(form, parts):
    model = decoder.DecoderConfig(**SIZES, **form)
    params = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(0.5 * rng.standard_normal(x.shape)), params)
    table, named, scales = shrink.folds(model), named_leaves(params), {}
    assert table.keys() == parts
    for part, (readers, (G, R)) in table.items():
        L, D, _ = named[f"blocks/{readers[0]}/kernel"].shape
        drawn = np.exp(rng.uniform(-3, 0, (L, G, 1, D // G // R)))
        scales[part] = np.float32(np.broadcast_to(drawn, (L, G, R, D // G // R))).reshape(L, D)
    folded = shrink.fold(model, params, scales)
    readers = {reader for readers, _ in table.values() for reader in readers}
    for name, x in named_leaves(folded).items():
        module, _, leaf = name.removeprefix("blocks/").rpartition("/")
        expected = module in parts or (leaf == "kernel" and module in readers)
        assert np.array_equal(x, named[name]) != expected, name
    tokens = jnp.arange(32).reshape(4, 8) * 7 % 31
    logits = jax.jit(functools.partial(decoder.logits, model))
    expected = logits(params, tokens)
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(logits(folded, tokens), expected, atol=1e-5)
    back = shrink.fold(model, folded, {part: 1 / s for part, s in scales.items()})
    for name, x in named_leaves(back).items():
        np.testing.assert_allclose(x, named[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_scales_are_searched_for_all_kernels_that_read_the_same_inputs():
    model = decoder.DecoderConfig(**SIZES, **forms.LLAMA)
    params = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
    named, rng = named_leaves(params), np.random.default_rng(0)
    found = {}
    for readers, _ in shrink.folds(model).values():
        D = named[f"blocks/{readers[0]}/kernel"].shape[1]
        x = rng.standard_normal((2, 64, D)) * np.exp(2 * rng.standard_normal(D))
        found |= {f"blocks/{reader}/kernel": x.swapaxes(1, 2) @ x for reader in readers}
    scales = shrink.input_scales(model, params, found, "int8", None)
    folded = shrink.fold(model, params, scales)
    packed = map_named(lambda name, x: pack(x, "int8").merged() if name in found else x, folded)
    dense = named_leaves(shrink.fold(model, packed, {part: 1 / s for part, s in scales.items()}))
    gained = []
    for part, (readers, _) in shrink.folds(model).items():
        for l in range(2):
            errors = np.zeros(2)
            for name in (f"blocks/{reader}/kernel" for reader in readers):
                w, gram = np.float64(named[name][l]), found[name][l]
                for i, other in enumerate((dense[name], pack(named[name], "int8").merged())):
                    size = 2 * 2 ** np.floor(np.log2(np.trace(w.T @ gram @ w)) / 2)
                    errors[i] += np.trace((other[l] - w).T @ gram @ (other[l] - w)) / size**2
            assert errors[0] <= errors[1] * (1 + 1e-6), (part, l)
            gained.append(errors[0] / errors[1])
    assert np.mean(gained) < 0.9


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
    model = decoder.DecoderConfig(**SIZES, **form)
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
    model = decoder.DecoderConfig(**SIZES, **forms.LLAMA)
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
