"""Flax modules behind the step builders: statistics, dropout and what gradients flow to."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.tree import named_leaves

ROWS, INPUTS, STEPS = 64, 6, 60


class NNXNet(nnx.Module):
    """BatchNorm of the inputs, then dropout, then a dense layer."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(INPUTS, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.List([nnx.Linear(INPUTS, 1, rngs=rngs)])

    def __call__(self, x):
        # The norm promotes to the float32 of its statistics.
        return self.dense[0](self.drop(self.norm(x).astype(x.dtype)))


class LinenNet(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


def adapted(form):
    if form == "nnx":
        return jt.from_nnx(NNXNet, has_model_state=True)
    shape = jax.ShapeDtypeStruct((ROWS, INPUTS), jnp.float32)
    modes = {"training": {"train": True}, "evaluation": {"train": False}}
    return jt.from_linen(LinenNet(), shape, **modes, has_model_state=True)


def batches():
    r = np.random.default_rng(0)
    for _ in range(STEPS):
        x = (2.9 + 1.5 * r.normal(size=(ROWS, INPUTS))).astype(np.float32)
        yield {"x": x, "y": x[:, :1] - 2.9}


BF16 = jt.Policy.bf16(cast_batch="^x$")


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        pytest.param("nnx", "f32", id="nnx-f32"),
        pytest.param("linen", BF16, id="linen-bf16"),
        pytest.param("nnx", BF16, id="nnx-bf16", marks=pytest.mark.slow),
        pytest.param("linen", "f32", id="linen-f32", marks=pytest.mark.slow),
    ],
)
def test_statistics_are_tracked_dropout_follows_the_key_and_parameters_alone_learn(form, policy):
    init_fn, apply = adapted(form)

    def loss_fn(params, model_state, batch, rng):
        y, model_state = apply(params, model_state, batch["x"], rng=rng)
        return jt.WeightedLoss(jnp.square(y - batch["y"]).sum(), jnp.float32(ROWS)), model_state

    optimizer = optax.adam(1e-2)
    common = {"policy": policy, "has_model_state": True}
    state = jt.init_state(init_fn, optimizer, jax.random.key(0), **common)
    assert sorted(name.split("/")[-1] for name in named_leaves(state.params)) == [
        *("bias", "bias", "kernel", "scale")
    ]
    step = jt.build_train_step(loss_fn, optimizer, **common)
    first, *rest = batches()
    train = jt.compile_step(step, state, first)
    if policy != "f32":
        assert "ok   0 of 3 products in float32" in train.report()
    expected = {"mean": np.zeros(INPUTS), "var": np.ones(INPUTS)}
    for batch in (first, *rest):
        seen = jnp.asarray(batch["x"], "float32" if policy == "f32" else "bfloat16")
        seen = np.asarray(seen, np.float64)
        for name, value in (("mean", seen.mean(0)), ("var", seen.var(0))):
            expected[name] = 0.9 * expected[name] + 0.1 * value
        state, metrics = train(state, batch)
    kept = {name.split("/")[-1]: leaf for name, leaf in named_leaves(state.model_state).items()}
    assert kept.keys() == {"mean", "var"}
    for name, leaf in kept.items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-4)
    assert np.abs(np.asarray(kept["mean"]) - 2.9).max() < 0.2  # and not 0, where it began

    # The same rows with another key are dropped otherwise; without a key none is, at any time.
    batch = {name: jnp.asarray(value) for name, value in first.items()}
    call = jax.jit(lambda rng: apply(state.params, state.model_state, batch["x"], rng=rng))
    (one, _), (two, _) = call(jax.random.key(1)), call(jax.random.key(2))
    (again, _), (off, after) = call(jax.random.key(1)), call(None)
    assert (one != two).mean() > 0.9
    np.testing.assert_array_equal(one, again)
    jax.tree.map(np.testing.assert_array_equal, after, state.model_state)
    by_hand = (first["x"] - kept["mean"]) / np.sqrt(kept["var"] + 1e-5)
    learned = {name.split("/")[-1]: leaf for name, leaf in named_leaves(state.params).items()}
    named = {n: leaf for n, leaf in named_leaves(state.params).items() if n.endswith("bias")}
    dense_bias, norm_bias = sorted(named.values(), key=jnp.size)
    by_hand = (by_hand * learned["scale"] + norm_bias) @ learned["kernel"] + dense_bias
    np.testing.assert_allclose(off, by_hand, atol=1e-4)
    loss = jt.build_eval_step(loss_fn, **common)(state, batch).means()["loss"]
    assert float(loss) < float(metrics["loss"])  # noise is off


def test_a_module_with_state_is_refused_where_none_is_expected():
    with pytest.raises(ValueError, match=r"besides its parameters \('norm/mean'\): pass has_model"):
        jt.from_nnx(NNXNet)
    with pytest.raises(ValueError, match=r"\('batch_stats/BatchNorm_0/mean'\): pass has_model"):
        jt.from_linen(LinenNet(), jnp.ones((1, INPUTS)), evaluation={"train": False})


def test_stacked_layers_of_nnx_draw_each_from_a_key_of_their_own():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.gain = nnx.Param(jnp.ones(64))

        def __call__(self, x):
            return self.drop(x * self.gain)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def create(rngs):
                return Layer(rngs)

            self.layers = create(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)(
                self.layers, x
            )

    init_fn, apply = jt.from_nnx(Stack)
    dropped = apply(init_fn(jax.random.key(0)), jnp.ones(64), rng=jax.random.key(1)) == 0
    assert dropped.shape == (3, 64)
    assert not (dropped[0] == dropped[1]).all()
    assert not (dropped[1] == dropped[2]).all()


def test_what_linen_modules_sow_is_of_the_last_call_and_what_they_keep_stays():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            last = self.variable("kept", "last", lambda: (jnp.zeros(()), jnp.zeros(())))
            calls = self.variable("losses", "calls", lambda: jnp.zeros(()))
            y = nn.Dense(1)(x)
            self.sow("losses", "size", jnp.square(y).mean())
            if self.is_mutable_collection("kept"):
                last.value = (last.value[0] + 1, last.value[0])
                calls.value += 1
            return y

    x = jnp.ones((4, INPUTS))
    init_fn, apply = jt.from_linen(Sowing(), x, has_model_state=True)

    def loss_fn(params, model_state, batch, rng):
        _, model_state = apply(params, model_state, batch, rng=rng)
        return model_state["losses"]["size"][0], model_state

    given = {"has_model_state": True}
    state = jt.init_state(init_fn, optax.sgd(0.1), jax.random.key(0), **given)
    before, losses = state.model_state["kept"]["last"][0], []
    train = jt.compile_step(
        jt.build_train_step(loss_fn, optax.sgd(0.1), **given), state, x, donate=False
    )
    for _ in range(3):
        state, metrics = train(state, x)
        losses.append(float(metrics["loss"]))
        assert float(state.model_state["losses"]["size"][0]) == losses[-1]
    assert losses[0] > losses[1] > losses[2]
    kept = jax.tree.map(lambda a: float(a - before), state.model_state["kept"]["last"])
    assert kept == (3, 2)
    assert float(state.model_state["losses"]["calls"]) >= 3
    apply(state.params, state.model_state, x, rng=None)
