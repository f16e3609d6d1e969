"""Metrics with a reduction of their own, over microbatches, stages of a pipeline and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from tests.engines.test_left_out import ROWS, D, block, embed, init, make_batch

PARTS = 4
TX = optax.sgd(0.1)


def head_loss(params, x, batch):
    error = jnp.square(x @ params["out"] - batch["y"])
    metrics = {
        "best": jt.Max(-error.min()),  # always below 0, which is what sums begin with
        "rows": jt.Sum(batch["mask"].sum()),
        "first_y": jt.Last(batch["y"][0]),
        "mean": error.sum(),
        # One entry for each input of the head.
        "largest_of": jt.Max(x.max(0)),
        "load": jnp.abs(x).sum(0),
        "share": ((jnp.abs(x) * batch["mask"][:, None]).sum(0), batch["mask"].sum() * jnp.ones(D)),
    }
    return jt.WeightedLoss(error.sum(), jnp.float32(len(error)), metrics)


STAGES = jt.Stages(embed=embed, block=block, head_loss=head_loss)


def definition(params, batch):
    """The metrics of one whole batch, in float64, and the last microbatch's first target."""
    x = np.float64(batch["x"]) * np.float64(params["gain"])
    for w in np.float64(params["blocks"]["w"]):
        x = x + np.tanh(x @ w)
    error = (x @ np.float64(params["out"]) - batch["y"]) ** 2
    means = {"best": -error.min(), "rows": batch["mask"].sum(), "mean": error.mean()}
    means |= {"largest_of": x.max(0), "load": np.abs(x).mean(0)}
    means["share"] = np.average(np.abs(x), 0, batch["mask"])
    return means | {"first_y": batch["y"][PARTS - 1]}  # microbatch j holds rows j, j + k, ...


def build(way):
    if way == "accumulated":
        return jt.build_train_step(jt.loss_from_stages(STAGES), TX, accumulate=PARTS)
    mesh = jt.make_mesh(pipe=2, data=2, devices=jax.devices()[:4])
    return jt.build_update(jt.pipeline(STAGES, mesh=mesh, microbatches=PARTS), TX)


@pytest.mark.parametrize("way", ["accumulated", "pipelined"])
def test_each_metric_has_its_own_reduction(way):
    state = jt.init_state(init, TX, jax.random.key(0))
    batches = [make_batch(seed, np.arange(ROWS) % 3) for seed in range(3)]
    batches[1]["x"][0] = np.inf
    after, metrics = jax.jit(jt.scan_steps(build(way)))(state, batches)
    after_first, _ = jax.jit(build(way))(state, batches[0])
    expected = [definition(state.params, batches[0]), definition(after_first.params, batches[2])]
    for name in expected[0]:
        found = np.asarray(metrics[name])
        assert np.isnan(found[1]).all(), name  # left out
        wanted = np.stack([e[name] for e in expected])
        np.testing.assert_allclose(found[::2], wanted, rtol=1e-5, err_msg=name)
    assert int(after.skipped) == PARTS


@pytest.mark.parametrize("way", ["plain", "pipelined"])
def test_an_evaluation_reduces_over_its_batches(way):
    state = jt.init_state(init, TX, jax.random.key(0))
    step = jt.build_eval_step(jt.loss_from_stages(STAGES))
    if way == "pipelined":
        mesh = jt.make_mesh(pipe=2, devices=jax.devices()[:2])
        step = jt.pipeline_eval_step(STAGES, mesh=mesh, microbatches=PARTS)
    step = jax.jit(step)
    batches = [make_batch(seed, np.arange(ROWS) % 3) for seed in range(3)]
    first, *rest = [jax.device_get(step(state, batch)) for batch in batches]
    means = sum(rest, start=first).means()
    each = [definition(state.params, batch) for batch in batches]
    every = {name: np.stack([e[name] for e in each]) for name in each[0]}
    expected = {name: x.mean(0) for name, x in every.items()}
    expected |= {"best": every["best"].max(), "rows": every["rows"].sum()}
    expected["largest_of"] = every["largest_of"].max(0)
    expected["first_y"] = batches[-1]["y"][0] if way == "plain" else every["first_y"][-1]
    for name, value in expected.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-5, err_msg=name)


def test_a_metric_whose_shape_changes_with_the_batch_is_named():
    step = jt.build_eval_step(lambda w, x, rng: jt.WeightedLoss(x.sum(), 1.0, {"rows": jt.Max(x)}))
    state = jt.init_state(lambda rng: jnp.ones(()), TX, jax.random.key(0))
    parts = [step(state, jnp.ones(rows)) for rows in (4, 1)]
    with pytest.raises(ValueError, match=r"metric 'rows/value' has shape \(4,\) in one part .*1,"):
        sum(parts[1:], start=parts[0])
