"""cuDNN's attention on meshes, without a GPU: JAX's own binding of it around a stand-in kernel.

Everything of the binding runs, its checks, its derivative and its partitioning; a plain computation
takes the place of the two custom calls. What is compiled for a GPU is read as it is lowered.
"""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from experiments import gpt as experiment_gpt
from jaxtrain.build import build_step, make_abstract_state
from jaxtrain.layout import Layout, MeshShape
from jaxtrain.ops import attention as ops
from jaxtrain.ops.attention import attention
from jaxtrain.ops.mask import Mask
from jaxtrain.run import options
from jaxtrain.sharding.mesh import make_mesh
from jaxtrain.sharding.placement import constrain


@pytest.fixture
def on_gpus(monkeypatch):
    """The simulated devices pass for GPUs, with cuDNN there."""
    # The binding has no public name.
    names = [name for name in sys.modules if name.endswith("cudnn.fused_attention_stablehlo")]
    binding = sys.modules[names[0]]
    monkeypatch.setattr(binding, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(ops, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for primitive, kernel in (
        (binding._dot_product_attention_fwd_p, forward_kernel),
        (binding._dot_product_attention_bwd_p, backward_kernel),
    ):
        rule = mlir.lower_fun(kernel, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform="cpu")


def forward_kernel(q_BTHK, k_BSGK, v_BSGK, bias, *_, is_training, **options):
    """What cuDNN computes; the statistics that it keeps are not read here."""
    B, T, H, _ = q_BTHK.shape
    out_BTHK = softmax_attention(q_BTHK, k_BSGK, v_BSGK, bias, **options)
    return [out_BTHK, jnp.zeros((B, H, T), jnp.float32)] if is_training else [out_BTHK]


def backward_kernel(q_BTHK, k_BSGK, v_BSGK, bias, *rest, variadic_args, **options):
    run = functools.partial(softmax_attention, variadic_args=variadic_args, **options)
    gradients = jax.vjp(run, q_BTHK, k_BSGK, v_BSGK, bias)[1](rest[-1])
    return list(gradients[: 3 + variadic_args[1]])


def softmax_attention(q_BTHK, k_BSGK, v_BSGK, bias, *, scale, mask_type, variadic_args, **_):
    k, v = (jnp.repeat(x, q_BTHK.shape[2] // x.shape[2], axis=2) for x in (k_BSGK, v_BSGK))
    scores = scale * jnp.einsum("bthk,bshk->bhts", q_BTHK, k, preferred_element_type=jnp.float32)
    if variadic_args[0]:
        scores += bias.astype(jnp.float32)
    if "CAUSAL" in mask_type.name:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bhts,bshk->bthk", weights, v.astype(jnp.float32)).astype(q_BTHK.dtype)


def loss(q_BTHK, k_BSGK, v_BSGK, segments_BT, *, causal=True):
    q_BTHK = constrain(q_BTHK, "batch", "sequence", "heads", None)
    k, v = (constrain(x, "batch", "sequence", "kv_heads", None) for x in (k_BSGK, v_BSGK))
    out = attention(q_BTHK, k, v, Mask(causal, segments=segments_BT)).astype(jnp.float32)
    return jnp.sin(out).sum(axis=(1, 2, 3)), out


def by_stages(*args):
    """Rows go to the stages of the mesh, as microbatches do."""
    rows = jax.P("pipe")
    return jax.shard_map(loss, in_specs=rows, out_specs=rows, axis_names={"pipe"}, check_vma=False)(
        *args
    )


def gradients(function):
    def total(*args):
        losses, out = function(*args)
        return losses.sum(), out

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))


def arrays(G, *, packed, B=8, T=8, S=8, H=4, K=8):
    rng = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, S, G, K), (B, S, G, K)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    return q, k, v, np.sort(rng.integers(0, 3, (B, T)), axis=1) if packed else None


@pytest.mark.parametrize(
    ("sizes", "G", "packed", "local"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, True, "2x8x2x8"),
        # Key heads fewer than the tensor axis: two devices have the same one.
        ({"data": 2, "tensor": 4}, 2, False, "4x8x1x8"),
        ({"pipe": 2, "fsdp": 2, "tensor": 2}, 4, True, "2x8x2x8"),
        ({"pipe": 2, "tensor": 4}, 2, False, "4x8x1x8"),
        # Positions are exchanged for heads.
        ({"data": 2, "context": 2, "tensor": 2}, 2, True, "4x8x1x8"),
        ({"pipe": 2, "context": 4}, 2, True, "4x8x1x8"),
        pytest.param({"data": 4, "tensor": 2}, 4, False, "2x8x2x8", marks=pytest.mark.slow),
        pytest.param({"pipe": 2, "data": 4}, 1, True, "1x8x4x8", marks=pytest.mark.slow),
        pytest.param({"pipe": 8}, 1, False, "1x8x4x8", marks=pytest.mark.slow),
    ],
)
def test_each_device_runs_the_kernel_on_its_own_rows_and_heads(on_gpus, sizes, G, packed, local):
    args = arrays(G, packed=packed)
    expected = gradients(loss)(*args)
    with jax.set_mesh(make_mesh(**sizes)):
        run = gradients(by_stages if "pipe" in sizes else loss)
        got = run(*args)
        text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=1e-5)
    calls = re.findall(r"custom_call @__cudnn\$fmha(\w+)\(.*?: \(tensor<(\w+)xbf16>", text)
    name = "ScaleBiasSoftmax" if packed else "Softmax"
    assert calls == [(name, local), (f"{name}Backward", local)]
    # Neither the rule of the binding nor the partitioner has a say in it.
    assert "CustomSPMDPartitioning" not in text


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipe": 2, "data": 2, "tensor": 2},
        pytest.param({"pipe": 2, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_whole_step_is_lowered_with_the_kernel_in_it(on_gpus, sizes):
    config = experiment_gpt.Config(
        **{"layers": 2, "width": 32, "heads": 4, "seq_len": 16, "global_batch": 16},
        layout=Layout(mesh=MeshShape(**{"data": 1} | sizes)),
        optimizer=options.OptimizerOptions(name="sgd"),
        precision="bf16",
    )
    experiment = experiment_gpt.outline(config)
    mesh = make_mesh(**sizes)
    state = make_abstract_state(experiment, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(build_step(experiment, state, mesh))
        text = (
            step.trace(state, experiment.data.batch).lower(lowering_platforms=("cuda",)).as_text()
        )
    # Forward, and in the backward pass; a stage is run again there.
    assert text.count("custom_call @__cudnn$fmhaScaleBiasSoftmaxBackward(") == 1
    assert text.count("custom_call @__cudnn$fmhaScaleBiasSoftmax(") == 1 + ("pipe" in sizes)


def test_a_step_that_was_planned_trains_with_its_own_kernel(on_gpus):
    q, k, v, _ = arrays(2, packed=False)
    traced = jax.jit(functools.partial(loss, segments_BT=None))
    with jax.set_mesh(make_mesh(data=4, tensor=2)):
        with ops.ahead_of_time("traced"), pytest.warns(ops.AheadOfTimeWarning):
            planned = str(traced.trace(q, k, v).jaxpr)
        trained = str(traced.trace(q, k, v).jaxpr)
    assert "dot_product_attention" in trained
    assert "dot_product_attention" not in planned


def test_queries_may_differ_from_keys_in_number(on_gpus):
    q, k, v, _ = arrays(2, packed=False, S=12)
    run = functools.partial(loss, segments_BT=None, causal=False)
    with jax.set_mesh(make_mesh(data=4, tensor=2)):
        text = jax.jit(run).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text


@pytest.mark.parametrize(
    ("sizes", "changes", "reason"),
    [
        ({"context": 8}, {}, "query heads that mesh axes context of size 8 divide, and they are 4"),
        ({"tensor": 8}, {}, "query heads that mesh axes tensor of size 8 divide, and they are 4"),
        ({"data": 8}, {"T": 7, "S": 7}, "packed rows of an even length, and it is 7"),
    ],
)
def test_auto_says_why_it_takes_another(on_gpus, caplog, sizes, changes, reason):
    ops._say_once.cache_clear()
    args = arrays(2, packed=True, **changes)
    expected = gradients(loss)(*args)
    with jax.set_mesh(make_mesh(**sizes)):
        run = gradients(loss)
        text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        got = run(*args)
    assert "cudnn" not in text
    assert f"attention: xla, because cudnn needs {reason}" in caplog.text
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.05)
