"""The decoder against its definition in NumPy float64, and the promises that others build on."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.jaxprs import float32_products
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.sharding.rules import as_rules, param_shardings
from jaxtrain.stages import run_layers
from jaxtrain.tree import map_named, named_leaves
from tests.forms import LLAMA
from tests.models import decoder_definition as definition

SIZES = dict(vocab_size=13, seq_len=8, layers=3, width=16, heads=4)
FORMS = {
    "gpt2": DecoderConfig(**SIZES),
    "llama": DecoderConfig(**SIZES, **LLAMA),
}
B, T = 4, 8

# Values, shapes and memory are what these tests look at: machine code need not be fast.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})

both_forms = pytest.mark.parametrize("form", list(FORMS))
FORMS["sinusoidal"] = DecoderConfig(**SIZES, positions="sinusoidal", embed_scale=True)


@functools.cache
def params_of(form):
    """Parameters well away from their initial values, so that every term counts."""
    params = quick_jit(functools.partial(decoder.init, FORMS[form]))(jax.random.key(0))
    rng = np.random.default_rng(0)

    def move(name, leaf):
        moved = np.asarray(leaf + 0.3 * rng.standard_normal(leaf.shape), np.float32)
        padded = name in ("embed/tokens", "head/kernel")
        return jnp.asarray(np.where(leaf == 0, 0, moved) if padded else moved)

    return map_named(move, params)


def batch_of(documents=True, seed=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 13, (2, B, T)).astype(np.int32)
    batch = {"tokens": tokens, "targets": targets, "mask": rng.integers(0, 2, (B, T)) * 1.0}
    batch["mask"] = batch["mask"].astype(np.float32)
    if documents:
        row = np.array([1, 1, 1, 2, 2, 2, 2, 0], np.int32)
        batch["segments"] = np.stack([row, np.ones(T, np.int32), row, row])
        positions = np.array([0, 1, 2, 0, 1, 2, 3, 0], np.int32)
        batch["positions"] = np.stack([positions, np.arange(T, dtype=np.int32)] + [positions] * 2)
    return batch


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def plain_gradient(config):
    loss = decoder.loss_fn(config)
    return jax.value_and_grad(lambda params, batch: loss(params, batch, None).total)


@functools.cache  # one compilation per configuration and batch structure
def gradient(config):
    return quick_jit(plain_gradient(config))


@functools.cache
def logits(config):
    return quick_jit(functools.partial(decoder.logits, config))


def assert_close(a, b, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), a, b)


@pytest.mark.parametrize(
    ("form", "documents"),
    [*itertools.product(("gpt2", "llama"), (False, True)), ("sinusoidal", True)],
)
def test_loss_and_logits_are_those_of_the_definition(form, documents):
    config, params, batch = FORMS[form], params_of(form), batch_of(documents)
    got = quick_jit(decoder.loss_fn(config))(params, batch, None)
    nll = definition.per_token_losses(config, float64(params), batch)
    np.testing.assert_allclose(got.total, (nll * batch["mask"]).sum(), rtol=1e-5)
    assert got.weight == batch["mask"].sum()
    options = {k: batch[k] for k in ("segments", "positions") if documents}
    z = logits(config)(params, batch["tokens"], **options)
    assert z.shape == (B, T, 13)
    right = (np.asarray(z).argmax(-1) == batch["targets"]) * batch["mask"]
    assert got.metrics["accuracy"] == right.sum()
    first = [batch[k][0] if k in batch else None for k in ("tokens", "segments", "positions")]
    np.testing.assert_allclose(z[0], definition.logits(config, float64(params), *first), atol=1e-4)


@both_forms
def test_gradients_are_finite_differences_of_the_definition(form):
    config, params, batch = FORMS[form], params_of(form), batch_of()
    _, grads = gradient(config)(params, batch)
    exact, rng, step = float64(params), np.random.default_rng(1), 1e-5

    def total(params):
        return (definition.per_token_losses(config, params, batch) * batch["mask"]).sum()

    for path, grad in named_leaves(grads).items():
        direction = rng.standard_normal(grad.shape)
        ends = [
            map_named(lambda n, x, s=s, p=path, d=direction: x + s * d if n == p else x, exact)
            for s in (step, -step)
        ]
        slope = (total(ends[0]) - total(ends[1])) / (2 * step)
        # Keys' biases shift every score of a row alike: their gradient is zero but for rounding.
        np.testing.assert_allclose(
            (grad * direction).sum(), slope, rtol=1e-3, atol=2e-4, err_msg=path
        )


@both_forms
def test_packed_documents_have_the_logits_of_each_alone(form):
    config, params, packed = FORMS[form], params_of(form), batch_of()
    row = packed["tokens"][0]
    # What follows a document does not count: attention is causal.
    tokens = np.stack([row, row, np.roll(row, -3), row])
    segments, positions = np.ones((B, T), np.int32), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    segments[0], positions[0] = packed["segments"][0], packed["positions"][0]
    z = logits(config)(params, tokens, segments=segments, positions=positions)
    np.testing.assert_allclose(z[0, :3], z[1, :3], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(z[0, 3:7], z[2, :4], rtol=1e-5, atol=1e-5)
    assert np.abs(z[0] - z[3])[3:].max() > 0.1


@pytest.mark.slow
@both_forms
def test_remat_and_unrolling_change_memory_and_no_value(form):
    config, params, batch = FORMS[form], params_of(form), batch_of()
    expected = gradient(config)(params, batch)
    for changes in {
        "gpt2": ({"remat": "full"}, {"remat": "offload"}, {"scan_unroll": 2, "remat": "dots"}),
        "llama": ({"remat": "dots"}, {"remat": "save_attention"}, {"scan_unroll": 3}),
    }[form]:
        got = gradient(dataclasses.replace(config, **changes))(params, batch)
        for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max() + 1e-6)


def lowered(layers, **changes):
    config = DecoderConfig(**SIZES | dict(seq_len=32, width=32, layers=layers), **changes)
    batch = dict.fromkeys(("tokens", "targets"), np.ones((8, 32), np.int32))
    batch["mask"] = np.ones((8, 32), np.float32)
    params = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(0))
    return gradient(config).lower(params, batch)


def test_remat_keeps_less():
    none, dots, save_attention, full = (
        lowered(8, remat=remat).compile().memory_analysis().temp_size_in_bytes
        for remat in ("none", "dots", "save_attention", "full")
    )
    assert full < 0.7 * dots < 0.7 * none
    # Per layer, position and head: an output as wide as the head, and a log-sum-exp.
    kept = 4 * 8 * (8 * 32) * (32 + SIZES["heads"])
    np.testing.assert_allclose(save_attention - full, kept, rtol=0.01)


def test_only_layers_outside_a_loop_are_barred_from_merging():
    # Inlined, a recomputation stands beside its original and the compiler would merge the two.
    assert "optimization_barrier" not in lowered(4, remat="full").as_text()
    assert "optimization_barrier" in lowered(1, remat="full").as_text()
    assert "optimization_barrier" in lowered(4, remat="full", scan_unroll=4).as_text()


def test_dots_recomputes_no_product_with_weights():
    config, batch = FORMS["llama"], batch_of()
    products = {
        remat: str(
            jax.make_jaxpr(plain_gradient(dataclasses.replace(config, remat=remat)))(
                params_of("llama"), batch
            )
        ).count("dot_general[")
        for remat in ("none", "dots", "full")
    }
    # On a CPU none keeps attention's weights, and dots multiplies queries and keys for them again.
    assert products["dots"] == products["none"] + 1
    # full repeats q, k, v, out, gate, up and attention's second too; down's result is not needed
    # again.
    assert products["full"] == products["dots"] + 7


@both_forms
def test_a_bfloat16_step_has_no_float32_product(form):
    config, batch = FORMS[form], batch_of()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(form))
    assert float32_products(plain_gradient(config), params_of(form), batch)  # the check can fail
    for remat in ("none", "dots", "full"):
        step = plain_gradient(dataclasses.replace(config, remat=remat))
        assert float32_products(step, params, batch) == []
    rows = functools.partial(decoder.logits, config)
    assert float32_products(jax.grad(lambda p: rows(p, batch["tokens"]).sum()), params) == []

    total, grads = gradient(config)(params, batch)
    exact_total, exact = gradient(config)(
        jax.tree.map(lambda x: x.astype(jnp.float32), params), batch
    )
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, exact_total, rtol=0.01)
    for path, grad in named_leaves(grads).items():
        assert grad.dtype == jnp.bfloat16
        error = jnp.linalg.norm(grad.astype(jnp.float32) - named_leaves(exact)[path])
        assert error < 0.1 * jnp.linalg.norm(named_leaves(exact)[path]) + 0.1, path


def test_a_frequent_token_s_bfloat16_gradient_is_summed_in_float32():
    config, params = FORMS["llama"], params_of("llama")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    batch = {"tokens": np.full((64, T), 3, np.int32)}
    grads = jax.grad(lambda p: decoder.embed(config, p, batch).astype(jnp.float32).sum())(narrow)
    assert grads["embed"]["tokens"].dtype == jnp.bfloat16
    assert (grads["embed"]["tokens"][3] == 512).all()  # sums of ones in bfloat16 end at 256


def test_padding_of_the_vocabulary_changes_nothing():
    for form, config in FORMS.items():
        bare = dataclasses.replace(config, vocab_multiple=1)
        params, batch = params_of(form), batch_of()

        def cut(name, leaf):
            axis = {"embed/tokens": 0, "head/kernel": 1}.get(name)
            return leaf if axis is None else jnp.take(leaf, jnp.arange(13), axis=axis)

        total, grads = gradient(config)(params, batch)
        assert_close(
            (total, map_named(cut, grads)),
            gradient(bare)(map_named(cut, params), batch),
            rtol=1e-5,
            atol=1e-5,
        )
        assert not grads["embed"]["tokens"][13:].any()
        assert config.tied or not grads["head"]["kernel"][:, 13:].any()
        assert not params["embed"]["tokens"][13:].any()  # as init made them


def test_grouped_keys_equal_repeated_ones():
    config, params, batch = FORMS["llama"], params_of("llama"), batch_of()
    whole = dataclasses.replace(config, kv_heads=4)

    def repeat(name, leaf):
        if "/attn/k/" not in name and "/attn/v/" not in name:
            return leaf
        heads = leaf.reshape(3, 16, 2, 4)
        return jnp.repeat(heads, 2, axis=2).reshape(3, 16, 16)

    grouped = gradient(config)(params, batch)
    repeated = gradient(whole)(map_named(repeat, params), batch)
    np.testing.assert_allclose(grouped[0], repeated[0], rtol=1e-5)
    q = ("blocks", "attn", "q", "kernel")
    got, expected = (functools.reduce(lambda t, k: t[k], q, g[1]) for g in (grouped, repeated))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_it_maps_over_parameters():
    config, batch = FORMS["llama"], batch_of()
    several = [params_of("llama"), jax.tree.map(lambda x: 0.9 * x, params_of("llama"))]
    one = plain_gradient(dataclasses.replace(config, remat="dots"))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *several)
    got = quick_jit(jax.vmap(one, in_axes=(0, None)))(stacked, batch)
    expected = gradient(config)(several[1], batch)
    assert_close(jax.tree.map(lambda x: x[1], got), expected, rtol=1e-4, atol=1e-5)


@both_forms
def test_stages_in_any_split_make_the_whole(form):
    config = dataclasses.replace(FORMS[form], dropout=0.2)
    params, batch, rng = params_of(form), batch_of(), jax.random.key(3)
    whole = quick_jit(decoder.loss_fn(config))(params, batch, rng)

    @quick_jit
    def blocks(stacked, x, batch, rng, first=0):
        return run_layers(decoder.stages(config), {"blocks": stacked}, x, batch, rng, first)

    block = quick_jit(decoder.stages(config).block)
    x = decoder.embed(config, {"embed": params["embed"]}, batch, rng)
    head, tail = (
        jax.tree.map(lambda w, s=s: w[s], params["blocks"]) for s in (slice(1), slice(1, 3))
    )
    x = blocks(head, x, batch, rng)
    split = blocks(tail, x, batch, rng, first=1)
    for l in (1, 2):
        layer = jax.tree.map(lambda w, l=l: w[l], params["blocks"])
        x = block(layer, {}, x, batch, jax.random.fold_in(rng, l), l)
    np.testing.assert_allclose(split, x, rtol=1e-5, atol=1e-5)
    last = {k: params[k] for k in ("final_norm", "embed" if config.tied else "head")}
    loss = decoder.head_loss(config, last, x, batch)
    assert_close(loss, whole, rtol=1e-5)


def test_dropout_is_off_without_a_key_and_right_on_average():
    config = FORMS["gpt2"]
    dropped = dataclasses.replace(config, dropout=0.4)
    params, batch = params_of("gpt2"), batch_of()
    loss = quick_jit(decoder.loss_fn(dropped))
    plain, _ = gradient(config)(params, batch)
    np.testing.assert_allclose(loss(params, batch, None).total, plain, rtol=1e-6)
    a, b, c = (loss(params, batch, jax.random.key(k)).total for k in (0, 0, 1))
    assert a == b != c
    plain = decoder.embed(config, params, batch, None)
    keys = jax.random.split(jax.random.key(0), 2000)
    many = quick_jit(jax.vmap(lambda key: decoder.embed(dropped, params, batch, key)))(keys)
    np.testing.assert_allclose((many == 0).mean(), 0.4, atol=0.01)
    np.testing.assert_allclose(many.mean(axis=0), plain, atol=0.12)
    # The branches of a layer drop different features: of two branches of ones, some keep one.
    layer = jax.tree.map(lambda w: jnp.zeros_like(w[0]), params["blocks"])
    for branch in (layer["attn"]["out"], layer["mlp"]["down"]):
        branch["bias"] += 1
    layer = functools.partial(decoder.stages(dropped).block, layer)
    x = layer({}, jnp.zeros((B, T, 16)), batch, keys[0], 0)
    kept = np.bincount(np.asarray(x * 0.6).round().astype(int).ravel(), minlength=3) / x.size
    np.testing.assert_allclose(kept, [0.16, 0.48, 0.36], atol=0.07)


def test_initial_values():
    config = DecoderConfig(vocab_size=500, seq_len=16, layers=8, width=64, heads=4, tied=False)
    init = quick_jit(functools.partial(decoder.init, config))
    params = init(jax.random.key(0))
    named = named_leaves(params)
    assert {leaf.dtype for leaf in named.values()} == {jnp.dtype("float32")}
    for path, leaf in named.items():
        if path.endswith("bias"):
            assert not leaf.any()
        elif path.endswith("scale"):
            assert (leaf == 1).all()
        else:
            residual = "attn/out" in path or "mlp/down" in path
            used = leaf[:500] if path == "embed/tokens" else leaf[..., :500]
            np.testing.assert_allclose(used.std(), 0.02 / (4 if residual else 1), rtol=0.05)
    kernels = params["blocks"]["attn"]
    assert (kernels["q"]["kernel"][0] != kernels["q"]["kernel"][1]).all()
    assert (kernels["q"]["kernel"] != kernels["k"]["kernel"]).all()
    assert (params["head"]["kernel"][:, :64] != params["embed"]["tokens"][:64].T).mean() > 0.99
    with pytest.raises(AssertionError):
        assert_close(params, init(jax.random.key(1)), rtol=0.1)


@both_forms
def test_the_mesh_changes_neither_initial_values_nor_gradients(form):
    config, batch = FORMS[form], batch_of()
    other = {"gpt2": "fsdp", "llama": "context"}[form]
    mesh = jt.make_mesh(data=2, tensor=2, **{other: 2})
    make = functools.partial(decoder.init, config)
    key = jax.random.key(0)
    shardings = param_shardings(jax.eval_shape(make, key), mesh, decoder.RULES)
    placed = quick_jit(make, out_shardings=shardings)(key)
    plain = quick_jit(make)(key)
    jax.tree.map(np.testing.assert_array_equal, placed, plain)
    with jax.set_mesh(mesh):
        got = gradient(config)(placed, batch)
    assert_close(got, gradient(config)(plain, batch), rtol=1e-4, atol=1e-5)


@both_forms
def test_every_parameter_has_a_rule_of_its_rank(form):
    shapes = jax.eval_shape(functools.partial(decoder.init, FORMS[form]), jax.random.key(0))
    mesh = jt.make_mesh(data=1, fsdp=2, tensor=2, pipe=1, devices=jax.devices()[:4])
    rules = as_rules(decoder.RULES)
    assert param_shardings(shapes, mesh, rules)  # ranks and divisibility
    for path, leaf in named_leaves(param_shardings(shapes, mesh, rules)).items():
        split = any(entry is not None for entry in leaf.spec)
        assert split == path.endswith(("kernel", "embed/tokens", "embed/positions")) or (
            path.endswith("bias") and "norm" not in path
        ), path
    (stacked,) = decoder.stages(FORMS[form]).stacked.axes
    for path in named_leaves(shapes):
        assert sum(bool(re.search(pattern, path)) for pattern, _ in decoder.RULES) == 1, path
        assert bool(re.search(stacked, path)) == path.startswith("blocks/")


def test_presets_have_the_published_sizes():
    assert decoder.PRESETS["tiny"]() == decoder.tiny()
    assert {
        name: decoder.parameter_count(preset()) for name, preset in decoder.PRESETS.items()
    } == {
        "tiny": decoder.parameter_count(decoder.tiny()),
        "tiny-moe": decoder.parameter_count(decoder.tiny_moe()),
        "tiny-deepseek": decoder.parameter_count(decoder.tiny_deepseek()),
        "tiny-delta": decoder.parameter_count(decoder.tiny_delta()),
        "gpt2-124m": 124_439_808,
        "llama-1b": 1_100_048_384,
        "llama-7b": 6_738_415_616,
        "llama-70b": 70_553_706_496,
        "llama-405b": 405_853_388_800,
        "mistral-7b": 7_241_732_096,
        "qwen2.5-7b": 7_615_616_512,
        "qwen3-8b": 8_190_735_360,
        "mixtral-8x7b": 46_702_792_704,
        "olmoe-1b-7b": 6_919_161_856,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-next-80b-a3b": 79_674_391_296,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "deepseek-v3": 671_026_419_200,
        "gemma2-2b": 2_614_341_888,
        "gemma2-9b": 9_241_705_984,
        "gemma2-27b": 27_227_128_320,
        "gemma3-1b": 999_885_952,
        "gemma3-4b": 3_880_263_168,
        "gemma3-12b": 11_766_034_176,
        "gemma3-27b": 27_009_346_304,
    }


def test_flops_are_counted_by_hand_for_llama():
    D, F, L, V, S, kv = 2048, 5632, 22, 32000, 2048, 256
    weights = L * (2 * D * D + 2 * D * kv + 3 * D * F) + V * D
    norms = (2 * L + 1) * D
    expected = 6 * (weights + norms) + 12 * L * D * S
    assert decoder.flops_per_token(decoder.PRESETS["llama-1b"]()) == expected
    near = dataclasses.replace(decoder.PRESETS["llama-1b"](), window=100)
    assert decoder.flops_per_token(near) == expected - 12 * L * D * (S - 100)
    some = dataclasses.replace(near, window_pattern=(True, True, False))  # 15 layers of 22
    assert decoder.flops_per_token(some) == expected - 12 * 15 * D * (S - 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"width": 18},
            "width=18 is not divisible by heads=4; use a width that is a multiple of 4",
        ),
        ({"kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"positions": "rope", "width": 12}, "head_dim=3 is odd"),
        ({"positions": "alibi"}, "positions='alibi' is not one of learned, rope"),
        ({"attention": "flash"}, "attention='flash' is not one of auto, xla, cudnn"),
        ({"layers": 0}, "layers=0 must be a whole number"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"loss_chunk": 3}, "loss_chunk=3 must be a divisor of seq_len=8"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(SIZES | changes))


def test_rows_longer_than_the_learned_positions_are_refused():
    tokens = np.zeros((1, 9), np.int32)
    with pytest.raises(ValueError, match="rows of 9 tokens are longer than the 8 learned"):
        decoder.logits(FORMS["gpt2"], params_of("gpt2"), tokens)
    assert decoder.logits(FORMS["llama"], params_of("llama"), tokens).shape == (1, 9, 13)


def test_attention_dropout_follows_its_key_and_z_loss_its_coefficient():
    config = dataclasses.replace(FORMS["gpt2"], attention_dropout=0.5, z_loss=0.1)
    params, batch = params_of("gpt2"), batch_of()
    loss = quick_jit(lambda rng: decoder.loss_fn(config)(params, batch, rng))
    losses = [loss(rng) for rng in (None, jax.random.key(0), jax.random.key(1), jax.random.key(0))]
    totals = [float(loss.total) for loss in losses]
    assert totals[1] == totals[3]
    assert len(set(totals)) == 3
    plain = quick_jit(lambda: decoder.loss_fn(FORMS["gpt2"])(params, batch, None))()
    z = decoder.logits(
        FORMS["gpt2"],
        params,
        batch["tokens"],
        segments=batch["segments"],
        positions=batch["positions"],
    )
    expected = 0.1 * (batch["mask"] * np.log(np.exp(float64(z)).sum(-1)) ** 2).sum()
    np.testing.assert_allclose(losses[0].metrics["z_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(totals[0] - plain.total, expected, rtol=1e-4)


def test_a_fused_kernel_refuses_dropout_before_anything_is_compiled():
    with pytest.raises(
        ValueError, match=r"attention_dropout=0\.1 is not offered by attention='spl"
    ):
        dataclasses.replace(FORMS["gpt2"], attention_dropout=0.1, attention="splash")


def program_sizes(layers, optimizer, **changes):
    """Equations of a train step's jaxpr, and instructions before and after XLA's compiler."""
    config = decoder.DecoderConfig(
        vocab_size=32, seq_len=16, layers=layers, width=16, heads=2, remat="dots", **changes
    )
    chain = jt.make_optimizer(optimizer, 1e-3, clip_norm=1.0, stacked=jt.Stack().axes)
    state = jt.abstract_state(lambda rng: decoder.init(config, rng), chain)
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct((4, 16), "float32")}
    step = jax.jit(jt.build_train_step(decoder.loss_fn(config), chain))
    traced = step.trace(state, batch)
    lowered = traced.lower()
    compiled = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    return np.array(
        [len(str(text).splitlines()) for text in (traced.jaxpr, lowered.as_text())]
        + [sum(" = " in line for line in compiled.splitlines())]
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_program_does_not_grow_with_depth(optimizer):
    few, many = (program_sizes(layers, optimizer) for layers in (12, 48))
    assert few.min() > 300
    # The same operations on longer stacks; the compiler fuses a few of them otherwise.
    np.testing.assert_array_equal(few[:2], many[:2])
    assert many[2] == pytest.approx(few[2], rel=0.05)


def test_heads_that_the_mesh_cannot_split_are_refused():
    config = decoder.DecoderConfig(vocab_size=11, seq_len=8, layers=1, width=24, heads=3)
    optimizer = optax.sgd(0.1)
    mesh = jt.make_mesh(tensor=8)
    state = jt.abstract_state(
        functools.partial(decoder.init, config), optimizer, mesh=mesh, rules=decoder.RULES
    )
    batch = {name: jax.ShapeDtypeStruct((8, 8), jnp.int32) for name in ("tokens", "targets")}
    batch["mask"] = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = jt.build_train_step(decoder.loss_fn(config), optimizer)
    with pytest.raises(ValueError, match=r"3 attention heads are .* axis tensor of size 8"):
        jt.compile_step(step, state, batch, mesh=mesh)
