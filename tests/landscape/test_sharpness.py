"""The largest eigenvalue, against spectra that are known and Hessians that are formed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxtrain.build import make_state
from jaxtrain.experiment import Repeated
from jaxtrain.landscape.command import View
from jaxtrain.landscape.sharpness import Curvature, build_product, largest_eigenvalue
from jaxtrain.loss import WeightedLoss
from jaxtrain.ops import attention
from jaxtrain.ops.norms import rms_norm
from jaxtrain.state import TrainState
from jaxtrain.step import build_eval_step
from tests import problems
from tests.run.test_loop import make_experiment


@pytest.mark.parametrize(
    "values_N",
    [
        np.linspace(-12, 9, 20),  # the largest in size is another
        np.concatenate([np.full(30, 1e-3), [5.0, 5.0, 7.0]]),  # as after training: a few outliers
        np.full(5, -2.0),  # one product spans it all
    ],
)
def test_a_quadratic_has_the_eigenvalue_of_its_matrix(values_N):
    r = np.random.default_rng(0)
    N = len(values_N)
    q_NN, _ = np.linalg.qr(r.normal(size=(N, N)))
    a_NN = jnp.float32(q_NN * values_N @ q_NN.T)

    def product(x):
        y_N = a_NN @ jnp.concatenate([x["a"], x["b"]])
        return {"a": y_N[:2], "b": y_N[2:]}

    start = r.normal(size=N).astype("f")
    start = {"a": jnp.asarray(start[:2]), "b": jnp.asarray(start[2:])}
    largest, scale = values_N.max(), np.abs(values_N).max()
    found = largest_eigenvalue(product, start, iterations=N, tolerance=1e-6)
    assert found.value == pytest.approx(largest, abs=3e-6 * scale)
    # There are N vectors: no rounding brings up another, or a value that is none.
    whole = largest_eigenvalue(product, start, iterations=2 * N, tolerance=0)
    assert whole.products <= N
    assert whole.value == pytest.approx(largest, abs=3e-6 * scale)
    early = largest_eigenvalue(product, start, iterations=3, tolerance=0)
    assert early.products == min(3, len(np.unique(values_N)))
    assert np.abs(values_N - early.value).min() <= early.error + 3e-6 * scale


def test_what_is_not_finite_has_none():
    found = largest_eigenvalue(lambda x: x * np.nan, jnp.ones(3))
    assert (np.isnan(found.value), found.products) == (True, 1)


def test_batches_of_other_weights_have_the_hessian_of_their_mean():
    def loss_of(norm):
        def loss_fn(params, batch, rng):
            hidden = jnp.tanh(norm(batch["x"], params["scale"]) @ params["up"]["kernel"])
            error = jnp.square(hidden @ params["down"]["kernel"] - batch["y"]).mean(-1)
            return WeightedLoss((error * batch["mask"]).sum(), batch["mask"].sum())

        return loss_fn

    # Ours has a rule of its own for its derivative; this one is written out.
    own = functools.partial(rms_norm, eps=1e-5)
    plain = lambda x, scale: x * scale / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)  # noqa: E731
    params = problems.init(jax.random.key(0)) | {"scale": jnp.ones(problems.INPUTS)}
    batches = [problems.make_batch(0, rows=16), problems.make_batch(1, rows=16, keep=0.1)]
    state = TrainState(None, params, (), None, None, None, None)
    add = jax.jit(build_product(build_eval_step(loss_of(own))))

    def product(moving):  # all but what does not train
        at, weights = Curvature(state, moving, jax.tree.map(jnp.zeros_like, moving)), []
        for batch in batches:
            at, weight = add(at, batch)
            weights.append(weight)
        return jax.tree.map(lambda x: x / sum(weights), at.product)

    moving = params | {"up": {"kernel": params["up"]["kernel"], "bias": None}}
    flat, unravel = ravel_pytree(moving)

    def mean(flat):
        parts = [loss_of(plain)(unravel(flat), batch, None) for batch in batches]
        return sum(part.total for part in parts) / sum(part.weight for part in parts)

    expected = np.linalg.eigvalsh(np.float64(jax.jit(jax.hessian(mean))(flat)))[-1]
    start = unravel(jax.random.normal(jax.random.key(1), flat.shape))
    found = largest_eigenvalue(product, start, iterations=40, tolerance=1e-5)
    assert found.value == pytest.approx(expected, rel=2e-5)
    assert found.error <= 1e-5 * found.value


@pytest.mark.slow
def test_a_kernel_whose_gradient_has_no_derivative_makes_room_for_xla(monkeypatch, caplog):
    splash = attention.KERNELS["splash"]
    compute = functools.partial(splash.compute, interpret=True)
    here = splash._replace(platform="cpu", compute=compute)
    monkeypatch.setitem(attention.KERNELS, "splash", here)

    def loss_fn(params, batch, rng, implementation="splash"):
        q = (batch["x"] @ params["w"])[:, :, None]
        out = attention.attention(q, q, q, implementation=implementation)
        return jnp.square(out - batch["x"][:, :, None]).mean()

    x = np.random.default_rng(0).normal(size=(10, 128, 8)).astype("f")
    parts = {"x": x[:8]}, Repeated({"x": np.tile(x[8:], (4, 1, 1))}, 0.25)
    experiment = make_experiment(
        init_fn=lambda rng: {"w": jax.random.normal(rng, (8, 8))},
        loss_fn=loss_fn,
        eval_batches=lambda sharding: iter(parts),
        mesh={"data": 8},
    )
    view = View(experiment, 2)
    state = make_state(experiment, view.mesh)
    state = TrainState(None, state.params, (), None, None, None, None)
    trained = jax.make_jaxpr(jax.grad(lambda params: loss_fn(params, {"x": x}, None)))
    assert "pallas_call" in str(trained(state.params))
    flat, unravel = ravel_pytree(jax.tree.map(np.array, state.params))
    found = view.sharpness(view.compile_product(state), state, iterations=40, tolerance=1e-5)
    assert "attention: xla, because splash needs a gradient that is taken once" in caplog.text
    plain = lambda flat: loss_fn(unravel(flat), {"x": x}, None, "xla")  # noqa: E731
    values = np.linalg.eigvalsh(np.float64(jax.jit(jax.hessian(plain))(flat)))
    assert found.value == pytest.approx(values[-1], rel=1e-4)
