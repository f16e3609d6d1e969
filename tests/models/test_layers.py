"""Blocks of encoders, decoders and vision transformers, of one code, against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.models import attending, layers, parts
from jaxtrain.models.config import BlockConfig
from jaxtrain.ops.cached import Tiles
from jaxtrain.tree import map_named, named_leaves
from tests.models import decoder_definition as definition

B, T, D = 4, 6, 16
ENCODER = {"causal": False, "mlp": "gelu_exact"}
FORMS = {
    "bert": BlockConfig(width=D, heads=4, norm_position="post", norm_eps=1e-12, **ENCODER),
    "vit": BlockConfig(width=D, heads=4, dropout=0.1, **ENCODER),
    "qwen": BlockConfig(
        width=D,
        heads=4,
        kv_heads=2,
        head_dim=6,
        rope_theta=1e6,
        norm="rmsnorm",
        mlp="swiglu",
        bias=False,
        qkv_bias=True,
    ),
}
# Two rows end in padding, one holds two documents.
SEGMENTS = np.array([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4, [1] * 3 + [2] * 3], np.int32)
POSITIONS = np.array([[*range(6)]] * 3 + [[0, 1, 2] * 2], np.int32)


@functools.cache
def params_of(form):
    made = layers.pure(layers.Block, FORMS[form], jax.random.key(0))
    rng = np.random.default_rng(0)
    return map_named(lambda _, x: np.float32(x + 0.3 * rng.standard_normal(x.shape)), made)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_and_its_gradients_are_those_of_the_definition(form):
    config, params, rng = FORMS[form], params_of(form), np.random.default_rng(1)
    x, d_y = rng.standard_normal((2, B, T, D)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params):
        packing = {"segments_BT": SEGMENTS, "positions_BT": POSITIONS}
        block = functools.partial(layers.block, config, x_BTD=jnp.asarray(x), **packing)
        y, pullback = jax.vjp(lambda params: block(params), params)
        return y, pullback(jnp.asarray(d_y))[0]

    def defined(params):
        rows = zip(x, SEGMENTS, POSITIONS, strict=True)
        return np.stack([definition.block(config, params, *row) for row in rows])

    y, grads = run(params)
    exact = jax.tree.map(np.float64, params)
    np.testing.assert_allclose(y, defined(exact), rtol=1e-4, atol=1e-5)
    for path, grad in named_leaves(grads).items():
        direction, step = rng.standard_normal(grad.shape), 1e-5
        ends = [
            map_named(lambda n, w, s=s, p=path, d=direction: w + s * d if n == p else w, exact)
            for s in (step, -step)
        ]
        slope = ((defined(ends[0]) - defined(ends[1])) * d_y).sum() / (2 * step)
        np.testing.assert_allclose(
            (grad * direction).sum(), slope, rtol=1e-3, atol=1e-3, err_msg=path
        )
    if form == "bert":
        with jax.set_mesh(jt.make_mesh(data=4, tensor=2)):
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
                run(params),
                (y, grads),
            )


def test_a_cache_is_seen_whole_but_in_layers_with_a_window():
    config = BlockConfig(width=4, heads=1, window=2, window_pattern=(True, False))
    k, v = jnp.zeros((1, 1, 4, 4)), jnp.eye(4)[None, None]
    new = jnp.ones((1, 1, 1, 4)), k[:, :, 3:], v[:, :, 3:], jnp.array([3])
    tiles = Tiles(4, lambda t: (k, v))
    of_layer = jax.jit(jax.vmap(lambda index: attending.step_attention(config, index, *new, tiles)))
    np.testing.assert_allclose(of_layer(jnp.arange(2))[:, 0, 0, 0], [[0, 0, 0.5, 0.5], [0.25] * 4])


def test_shapes_follow_the_sizes_of_a_block():
    shapes = {name: leaf.shape for name, leaf in named_leaves(params_of("qwen")).items()}
    expected = {"q": (D, 24), "k": (D, 12), "v": (D, 12), "out": (24, D)}
    assert {n: shapes[f"attn/{n}/kernel"] for n in expected} == expected
    assert {name for name in shapes if "bias" in name} == {f"attn/{n}/bias" for n in "qkv"}
    assert shapes["mlp/gate/kernel"] == (D, 64)


def test_a_bfloat16_bias_s_gradient_is_rounded_once():
    narrow = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    graph, params = nnx.split(parts.Dense(2, 32, **narrow))
    d_y = jnp.asarray(np.random.default_rng(0).standard_normal((4096, 32)) + 0.1, jnp.bfloat16)

    @jax.jit
    def gradient(params, d_y):
        run = lambda params: nnx.merge(graph, params)(jnp.ones((4096, 2), jnp.bfloat16))  # noqa: E731
        return jax.vjp(run, params)[1](d_y)[0]["bias"].get_value()

    exact, found = np.float64(d_y).sum(axis=0), gradient(params, d_y)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(found), exact, rtol=2**-8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 18}, "width=18 is not divisible by heads=4"),
        ({"head_dim": 5, "rope_theta": 1e4}, "head_dim=5 is odd; use an even one"),
        ({"head_dim": 0}, "head_dim=0 must be a whole number"),
        ({"norm_position": "behind"}, "norm_position='behind' is not one of pre, post, sandwich"),
        ({"attention_softcap": 0.0}, "attention_softcap=0.0 must be a number above 0, or None"),
        ({"window_pattern": (True, False)}, "window=None must be a number then"),
        ({"window": 3, "window_pattern": (False,)}, "and true at least once"),
        ({"window": 3, "window_pattern": (1, 0)}, r"window_pattern=\(1, 0\) must say by true and"),
        ({"local_rope_theta": 1e4}, "needs a window and rotary positions: set both"),
        ({"mlp": "tanh"}, "mlp='tanh' is not one of gelu, gelu_exact, gelu_quick, relu, swiglu"),
        ({"causal": 1}, "causal=1 must be true or false"),
        ({"rope_dim": 4}, "rope_dim=4 is not below head_dim=4: leave it out"),
        ({"q_rank": 4}, "q_rank=4 is of latent attention, and kv_rank=None"),
        ({"delta_heads": 4, "delta_key_heads": 3}, "delta_heads=4 is not divisible by delta_key_h"),
        ({"shared_gate": True}, "shared_gate=True is of shared_experts, which are None"),
        ({"kv_rank": 8, "rope_dim": 4}, "kv_rank=8 is latent attention: it needs rotary"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BlockConfig(**({"width": D, "heads": 4} | changes))
