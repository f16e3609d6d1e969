"""What a GPU computes, against float64 and against a CPU: ``JAX_PLATFORMS=cuda,cpu pytest
tests/test_gpu.py`` on a machine with one, skipped elsewhere."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compile import EIGHT_BITS
from jaxtrain.models import decoder, exact
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.generate import generate
from jaxtrain.ops import attention as ops
from jaxtrain.ops.attention import attention
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.scaled import scaled_product
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.tree import named_leaves
from tests.ops.test_attention import definition

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "kv_heads": 2}
FORMS = {
    "gpt2": {},
    "llama": LLAMA,
    "gemma": {**LLAMA, "mlp": "geglu", "norm_position": "sandwich", "logit_softcap": 30.0},
    "experts": {**LLAMA, "experts": 4, "experts_per_token": 2},
}


def model_of(form, **sizes):
    sizes = {"vocab_size": 257, "seq_len": 64, "layers": 2, "width": 128, "heads": 4} | sizes
    return DecoderConfig(**sizes, **FORMS[form])


def make_batch(model, rows=4, seed=0):
    tokens = np.random.default_rng(seed).integers(1, model.vocab_size, (rows, model.seq_len + 1))
    mask = np.ones((rows, model.seq_len), np.float32)
    mask[0, -5:] = 0
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "mask": mask,
    }


def distance(found, expected):
    found, expected = (np.asarray(x, np.float64).ravel() for x in (found, expected))
    assert np.isfinite(found).all()
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": False}, {"window": 50}, {"segments": True}], ids=str
)
def test_attention_of_cudnn_and_its_gradients_are_those_of_the_definition(width, mask):
    rng, (B, T, H, G) = np.random.default_rng(0), (2, 256, 4, 2)
    q, d_out = rng.standard_normal((2, B, T, H, width))
    k, v = rng.standard_normal((2, B, T, G, width))
    q, k, v, d_out = (
        np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, k, v, d_out)
    )
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1) if "segments" in mask else None
    form = {"causal": mask.get("causal", True), "window": mask.get("window")}
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        by_definition = functools.partial(definition, jnp, segments_BT=segments, **form)
        expected, backward = jax.vjp(by_definition, *map(jnp.asarray, (q, k, v)))
        expected = expected, *backward(jnp.asarray(d_out))

    @jax.jit
    def run(q, k, v, d_out):
        its = Mask(**form, segments=None if segments is None else jnp.asarray(segments, jnp.int32))
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, its, implementation="cudnn"), q, k, v)
        return out, *backward(d_out)

    assert ops.choose("auto", dtype=jnp.bfloat16, head_dim=width) == "cudnn"
    found = run(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, d_out)))
    for each, of in zip(found, expected, strict=True):
        assert distance(each, of) < 1e-2


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_has_the_loss_and_the_gradient_of_a_cpu_in_float32(form, precision):
    model, policy = model_of(form), jt.Policy.named(precision)
    params = decoder.init(model, jax.random.key(0))
    params = jax.device_get(jax.tree.map(lambda x: 3 * x, params))
    batch = make_batch(model)
    loss = decoder.loss_fn(model)

    def value(params, policy=policy):
        sums = loss(policy.cast_to_compute(params), batch, None)
        return sums.total / sums.weight

    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.value_and_grad(value))(params)
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = functools.partial(value, policy=jt.Policy())
            expected = jax.jit(jax.value_and_grad(on_cpu))(params)
    near = {"f32": 2e-6, "bf16": 5e-2}[precision]
    assert abs(found[0] - expected[0]) < near * expected[0]
    whole = float(optax.tree.norm(expected[1]))
    for name, each in named_leaves(found[1]).items():
        of = named_leaves(expected[1])[name]
        # That of a bias of keys is 0.
        assert np.linalg.norm(each - of) < 5 * near * (np.linalg.norm(of) + 0.01 * whole), name


@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensor"])
def test_products_of_eight_bits_are_those_of_a_cpu(recipe):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape) for shape in ((256, 128), (128, 64), (256, 64)))
    args = [jax.device_get(jnp.asarray(a, jnp.bfloat16)) for a in (x, w, dy)]

    def both(x, w, dy):
        y, pullback = jax.vjp(functools.partial(scaled_product, recipe), x, w)
        return y, *pullback(dy)

    compiled = jax.jit(both).lower(*args).compile(compiler_options=EIGHT_BITS)
    assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') >= 2
    found = compiled(*args)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(both)(*args)
    for each, of in zip(found, expected, strict=True):
        assert distance(each, of) < 5e-3


def test_a_deterministic_step_has_the_same_bits_twice():
    model = model_of("gpt2", seq_len=256, width=256)
    chain = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=jt.Stack().axes)
    policy, batch = jt.Policy.bf16(), make_batch(model, rows=8)
    step = jt.build_train_step(decoder.loss_fn(model), chain, policy=policy)
    init = functools.partial(decoder.init, model)
    states = []
    for _ in range(2):
        state = jt.init_state(init, chain, jax.random.key(0), policy=policy)
        train = jt.compile_step(step, state, batch, deterministic=True)
        for _ in range(3):
            state, _ = train(state, batch)
        states.append(jax.device_get(state.params))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_a_cpu(form):
    model = model_of(form)
    params = jax.device_get(decoder.init(model, jax.random.key(0)))
    prompt = make_batch(model)["tokens"][:, :20]

    def on(kind):
        with jax.default_device(jax.devices(kind)[0]):
            return generate(model, params, prompt, max_new_tokens=20, temperature=0)

    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(on("gpu"), on("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_log_probabilities_are_those_that_a_server_sampled_with(dtype):
    model = model_of("llama", seq_len=150)
    params = decoder.init(model, jax.random.key(0))
    params = jax.tree.map(lambda x: (3 * x).astype(dtype), params)
    engine = Engine(model, params, slots=4, exact=True)
    prompts = [make_batch(model, seed=i)["tokens"][0, : 9 + 7 * i].tolist() for i in range(6)]
    for prompt in prompts:
        engine.submit(Request(prompt, max_tokens=30, temperature=1.0, seed=1))
    sampled = {}
    while engine.is_busy:
        for event in engine.step():
            sampled.setdefault(event.number, []).append((event.token, event.logprob))
    for prompt, events in zip(prompts, sampled.values(), strict=True):
        tokens, given = zip(*events, strict=True)
        row = np.asarray([*prompt, *tokens], np.int32)[None]
        mask = np.zeros(row.shape, np.float32)[:, 1:]
        mask[:, len(prompt) - 1 :] = 1
        batch = {"tokens": row[:, :-1], "targets": row[:, 1:], "mask": mask}
        found = np.asarray(exact.log_probs(model, params, batch))[0, len(prompt) - 1 :]
        np.testing.assert_array_equal(found, np.asarray(given, np.float32))


@pytest.mark.parametrize("more", [[], ["--deterministic"]], ids=["as usual", "deterministic"])
def test_a_run_continues_from_its_checkpoint(more, tmp_path):
    flags = ["--model", "tiny", "--seq-len", "64", "--precision", "bf16", *more]
    flags += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "1", "--steps"]

    def losses(folder, steps, *more):
        command = [sys.executable, "-m", "experiments.gpt", *flags, str(steps), *more]
        done = subprocess.run(
            [*command, "--run-dir", str(folder)], capture_output=True, text=True, check=False
        )
        assert not done.returncode, done.stderr[-2000:]
        lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]

    whole = losses(tmp_path / "whole", 6)
    losses(tmp_path / "parts", 3)
    step, loss = losses(tmp_path / "parts", 6, "--resume", "--accept-changes", "steps")[-1]
    assert (step, loss) == (whole[-1][0], whole[-1][1] if more else pytest.approx(whole[-1][1]))
