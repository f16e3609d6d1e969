"""Lookups on a mesh against their definition, and what they move."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.ops.lookup import embed_lookup
from jaxtrain.planning.hlo import read_program

B, T, V, D = 8, 16, 24, 32


def arrays():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T))
    tokens[0] = V - 1  # a frequent one, in the last device's part
    tokens[1, :2] = -1, V + 3
    return rng.standard_normal((V, D)), tokens, rng.standard_normal((B, T, D))


def total(table, tokens, weights, rows):
    found = embed_lookup(tokens, table, rows)
    return (found * weights).sum(), found


def on_mesh(mesh, rows="vocab"):
    """Value and gradient of ``sum(weights * table[tokens])``, and the compiled program's text."""
    table, tokens, weights = arrays()
    split = NamedSharding(mesh, P("tensor" if rows else None, "fsdp"))
    across = NamedSharding(mesh, P(("data", "fsdp")))
    with jax.set_mesh(mesh):
        gradient = jax.value_and_grad(lambda *args: total(*args, rows), has_aux=True)
        placed = jax.jit(gradient, out_shardings=(None, split))
        given = (
            jax.device_put(jnp.asarray(table, jnp.float32), split),
            jax.device_put(jnp.asarray(tokens), across),
            jax.device_put(jnp.asarray(weights, jnp.float32), across),
        )
        compiled = placed.lower(*given).compile()
        (_, found), d_table = compiled(*given)
    return found, d_table, compiled.as_text()


@pytest.mark.parametrize("rows", ["vocab", None])
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"context": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 8},
        {"data": 2, "tensor": 4},
        {"data": 8},
    ],
    ids=str,
)
def test_a_lookup_on_a_mesh_and_its_gradient_are_those_of_the_definition(axes, rows):
    found, d_table, _ = on_mesh(jt.make_mesh(**axes), rows)
    table, tokens, weights = arrays()
    tokens = np.clip(tokens, 0, V - 1)
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weights)
    np.testing.assert_array_equal(found, table[tokens].astype(np.float32))
    np.testing.assert_allclose(d_table, expected, rtol=1e-5, atol=1e-5)


def test_what_moves_is_activations_and_one_scattered_gradient():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    moved = [c for c in read_program(on_mesh(mesh)[2], mesh).collectives if c.payload > 4]
    activations, part = B // 4 * T * D * 4, V // 2 * D * 4
    assert sorted((c.kind, c.axes, c.payload) for c in moved) == [
        ("all-gather", ("fsdp",), part),
        ("all-gather", ("tensor",), activations),  # of cotangents
        ("all-reduce", ("data",), part // 2),
        ("reduce-scatter", ("fsdp",), part),
        ("reduce-scatter", ("tensor",), activations),
    ]


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "tensor": 4}])
def test_a_frequent_token_is_summed_in_float32(mesh):
    rows = jnp.zeros((1, 1024), jnp.int32) + 5
    with jax.set_mesh(jt.make_mesh(**mesh)) if mesh else contextlib.nullcontext():
        grad = jax.jit(jax.grad(lambda table: embed_lookup(rows, table, "vocab").sum()))
        d_table = grad(jnp.zeros((8, 2), jnp.bfloat16))
    assert d_table.dtype == jnp.bfloat16
    assert d_table[5].tolist() == [1024, 1024]  # 256 in bfloat16
    assert d_table.sum() == 2048
