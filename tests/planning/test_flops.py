"""FLOPs counted from the jaxpr, against sums done by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.flops import count_flops
from jaxtrain.models import decoder
from jaxtrain.ops.attention import branch_shares
from tests.planning import steps

a, b = jnp.ones((2, 3)), jnp.ones((3, 5))


def test_products_convolutions_and_batches():
    assert count_flops(jnp.matmul, a, b).total == 2 * 2 * 3 * 5
    q, k = jnp.ones((7, 2, 3)), jnp.ones((7, 3, 5))
    assert count_flops(jnp.matmul, q, k).total == 7 * 60
    image, kernel = jnp.ones((4, 9, 9, 6)), jnp.ones((3, 3, 2, 8))

    def conv(image, kernel):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )

    # Every output element is a product over 3 x 3 x 2.
    kernel = jnp.ones((3, 3, 2, 9))
    assert count_flops(conv, image, kernel).total == 2 * (4 * 7 * 7 * 9) * (3 * 3 * 2)


def test_a_branch_that_says_its_shares_counts_by_them():
    def fork(flag):
        with branch_shares(1, 3):  # of (false, true)
            return jax.lax.cond(flag, lambda: (a @ b).sum(), lambda: (a @ b @ b.T).sum())

    once, both = 2 * 2 * 3 * 5, 2 * (2 * 2 * 3 * 5)
    assert count_flops(fork, True).total == both / 4 + once * 3 / 4


def test_loops_multiply_branches_take_the_larger_and_dtypes_are_kept_apart():
    w = jnp.ones((6, 3, 3), jnp.bfloat16)
    x = jnp.ones((2, 3), jnp.bfloat16)
    looped = count_flops(lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], x, w)
    assert looped.by_dtype == {"bfloat16": 6 * 2 * 2 * 3 * 3}
    branches = count_flops(
        lambda flag: jax.lax.cond(flag, lambda: (a @ b).sum(), lambda: (a @ b @ b.T).sum()), True
    )
    assert branches.total == 60 + 60
    endless = count_flops(
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ jnp.ones((3, 3)), x), a
    )
    assert (endless.total, endless.unknown_loops) == (36, 1)


def test_rules_of_derivatives_are_counted_once():
    @jax.custom_vjp
    def f(x):
        return x @ b

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g @ b.T,))
    assert count_flops(f, a).total == 60
    assert count_flops(jax.grad(lambda x: f(x).sum()), a).total == 120
    recomputed = jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ b) @ b.T).sum()))
    plain = jax.grad(lambda x: jnp.sin(jnp.sin(x @ b) @ b.T).sum())
    assert count_flops(plain, a).total == 4 * 60
    assert count_flops(recomputed, a).total == 6 * 60


def test_ragged_products_are_those_of_their_rows():
    M, K, N, groups = 12, 5, 7, 3
    x, w, sizes = jnp.ones((M, K)), jnp.ones((groups, K, N)), jnp.array([3, 9, 0])
    assert count_flops(jax.lax.ragged_dot, x, w, sizes).by_dtype == {"float32": 2 * M * K * N}
    # The product, and gradients of rows and matrices, whatever the number of groups.
    backward = jax.value_and_grad(lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum(), (0, 1))
    assert count_flops(backward, x, w).total == 3 * 2 * M * K * N
    narrow = jnp.bfloat16
    x, w = x.astype(narrow), w.astype(narrow)
    assert count_flops(jax.lax.ragged_dot, x, w, sizes).by_dtype == {"bfloat16": 2 * M * K * N}


def test_what_is_not_known_is_named_and_not_free():
    def step(x):
        return jax.lax.scan(lambda x, _: (jnp.linalg.cholesky(x) @ x, None), x, length=4)[0]

    counted = count_flops(step, jnp.ones((6, 6)))
    assert counted.unknown == ("cholesky",)
    assert counted.total == 4 * (2 * 6**3 + 2 * 6 * 6)
    foreign = jax.ffi.ffi_call("somewhere", jax.ShapeDtypeStruct((6,), jnp.float32))
    counted = count_flops(foreign, jnp.ones((6, 6)))
    assert (counted.unknown, counted.total) == (("ffi_call",), 6 * 6 + 6)
    # Kernels of ours count as what their bodies multiply.
    assert count_flops(jax.nn.softmax, jnp.ones(9)).unknown == ()


def test_every_device_of_a_map_counts():
    mesh = jt.make_mesh(data=8)
    f = jax.shard_map(lambda x: x @ b, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert count_flops(f, jnp.ones((16, 3))).total == 2 * 16 * 3 * 5


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_decoder_is_its_formula_but_for_the_causal_half(remat):
    config = dataclasses.replace(steps.CONFIG, remat=remat, seq_len=64)
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    batch = steps.batch_shapes(4, config.seq_len)
    loss = decoder.loss_fn(config)
    counted = count_flops(
        lambda p, x: jax.value_and_grad(lambda p: loss(p, x, None).total)(p), params, batch
    ).total
    tokens = 4 * config.seq_len
    weights = 4 * 64 * 64 + 3 * 64 * 176
    head = 320 * 64
    # 64 positions are one tile: no causal saving, and scores are computed again backward.
    attention = 2 * 64 * 64  # one product of queries and keys, per token
    forward = config.layers * (2 * weights + 2 * attention)
    # The head's logits are computed tile by tile, forward and backward alike.
    backward = config.layers * (4 * weights + 5 * attention)
    again = forward - config.layers * 2 * 64 * 64 if remat == "full" else 0
    least = tokens * (forward + backward + 6 * head)
    assert counted == pytest.approx(least + tokens * again, rel=0.06)
    assert counted >= least
