"""A state that starts from given weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.tree import named_leaves

WIDTH = 256


def init(rng):
    return {
        "base": {"w": jnp.zeros((WIDTH, WIDTH)), "number": jnp.zeros(2, jnp.int32)},
        "head": jax.random.normal(rng, (WIDTH,)),
    }


def loss_fn(params, batch, rng):
    return jnp.square(batch @ params["base"]["w"] @ params["head"]).mean()


def weights():
    w = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    return {"base": {"w": w, "number": np.array([3, 4], np.int32)}}


def on_host(mesh):
    return weights()


def on_one_device(mesh):
    return jax.device_put(weights(), jax.devices()[0])


def on_the_mesh(mesh):
    """Where the state's own will lie: a copy is then easily forgotten."""
    state = jt.init_state(init, optax.sgd(0.1), jax.random.key(0), mesh=mesh, params=weights())
    return {"base": state.params["base"]}


@pytest.mark.parametrize(
    ("place", "axes"),
    [
        (on_host, None),
        (on_one_device, None),
        (on_host, {"data": 2, "fsdp": 4}),
        (on_one_device, {"data": 2, "fsdp": 4}),
        (on_the_mesh, {"data": 2, "fsdp": 4}),
    ],
)
def test_given_weights_are_copied_to_their_places_and_outlive_the_state(place, axes):
    mesh = axes and jt.make_mesh(**axes)
    params, optimizer = place(mesh), jt.make_optimizer("adam", 0.1)
    made = jt.init_state(init, optimizer, jax.random.key(0), mesh=mesh)
    state = jt.init_state(init, optimizer, jax.random.key(0), mesh=mesh, params=params)
    for name, leaf in named_leaves(made).items():
        found = named_leaves(state)[name]
        assert found.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name
        assert found.dtype == leaf.dtype
    np.testing.assert_array_equal(state.params["head"], made.params["head"])
    jax.tree.map(np.testing.assert_array_equal, state.params["base"], weights()["base"])
    step = jt.compile_step(
        jt.build_train_step(loss_fn, optimizer), state, jnp.ones((8, WIDTH)), mesh=mesh
    )
    state, _ = step(state, jnp.ones((8, WIDTH)))
    assert (np.asarray(state.params["base"]["w"]) != weights()["base"]["w"]).mean() > 0.9
    jax.tree.map(np.testing.assert_array_equal, params, weights())


def test_given_weights_are_an_argument_of_the_program_and_no_constant_or_result(tmp_path):
    negatives = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.negative, params), optax.identity().update
    )
    options = {"params": weights(), "policy": jt.Policy.pure_bf16()}
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        state = jt.init_state(init, negatives, jax.random.key(1), **options)
    finally:
        jax.config.update("jax_dump_ir_to", None)
    assert state.params["base"]["w"].dtype == jnp.bfloat16
    programs = [path.read_text() for path in tmp_path.rglob("*.mlir")]
    assert sum(map(len, programs)) < weights()["base"]["w"].nbytes / 4
    mains = [line for line in "".join(programs).splitlines() if "func public @main" in line]
    # What the optimizer reads and what it keeps.
    assert max(main.count(f"tensor<{WIDTH}x{WIDTH}xbf16>") for main in mains) == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bse": {"w": 1.0}}, "params has a leaf 'bse/w' and init_fn makes none of that path"),
        (
            {"base": {"w": np.ones((WIDTH, 3))}},
            r"params has 'base/w' as float32\[256, 3\] and init_fn makes it as float32\[256, 256\]",
        ),
        (
            {"base": {"number": np.ones(2)}},
            r"'base/number' as float32\[2\] and init_fn makes it as int32\[2\]: reshape or cast it",
        ),
    ],
)
def test_given_weights_that_do_not_fit_are_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        jt.init_state(init, optax.sgd(0.1), jax.random.key(0), params=params)


def test_an_optimizer_that_would_train_integers_is_told_of_masks():
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones(2), "table": jnp.arange(2)}
    state = jt.init_state(lambda rng: params, optimizer, jax.random.key(0))
    step = jt.build_train_step(lambda params, batch, rng: params["w"].sum(), optimizer)
    message = r"'opt_state/0/mu/table' as int32\[2\] and returns float32\[2\]: where it belongs to"
    with pytest.raises(ValueError, match=message):
        jt.compile_step(step, state, {})
