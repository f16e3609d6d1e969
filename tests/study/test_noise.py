"""The gradient noise scale against its closed form, its definition and the batches of a run."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxtrain as jt
from jaxtrain.run.main import load_experiment
from jaxtrain.study.noise import advice, estimate, measure
from tests import commands

INPUTS = 5


def numbers_of(grad_KP, weight_K):
    """What :func:`estimate` takes, of mean gradients of microbatches."""
    mean_P = np.average(grad_KP, axis=0, weights=weight_K)
    away_KP = grad_KP - mean_P
    return weight_K, (away_KP**2).sum(1), away_KP @ mean_P, mean_P @ mean_P


def defined(grad_KP, weight_K):
    """|G|^2 and tr(S) as the paper writes them."""
    B, b = weight_K.sum(), weight_K.mean()
    big = (np.average(grad_KP, axis=0, weights=weight_K) ** 2).sum()
    small = np.average((grad_KP**2).sum(1), weights=weight_K)
    return np.array([(B * big - b * small) / (B - b), (small - big) / (1 / b - 1 / B)])


@pytest.mark.parametrize("equal", [True, False])
def test_it_is_the_formula_and_its_jackknife(equal):
    r = np.random.default_rng(0)
    weight_K = np.full(12, 4.0) if equal else r.uniform(2, 9, 12)
    grad_KP = r.normal(size=(12, 3)) / np.sqrt(weight_K)[:, None] + [1.0, 0.5, 0.0]
    noise = estimate(*numbers_of(grad_KP, weight_K))
    np.testing.assert_allclose(noise[:2], defined(grad_KP, weight_K), rtol=1e-12)
    assert noise.scale == pytest.approx(noise.trace / noise.signal)
    without = [np.arange(12) != j for j in range(12)]
    each_K2 = np.array([defined(grad_KP[keep], weight_K[keep]) for keep in without])
    cov = np.cov(each_K2.T, ddof=0) * 11
    for end in (noise.low, noise.high):  # where the t statistic of trace - end signal is its limit
        away, along = noise.trace - end * noise.signal, np.array([-end, 1])
        t = away / np.sqrt(along @ cov @ along)
        assert abs(t) == pytest.approx(stats.t.ppf(0.95, 11), rel=1e-6)
    assert noise.low < noise.scale < noise.high


def regression(r, rows, cov, away, deviation):
    """Gradients [rows, P] of half squared errors at ``away`` from the weights that made y."""
    x = r.multivariate_normal(np.zeros(len(cov)), cov, rows)
    error = x @ away - deviation * r.normal(size=rows)
    return x * error[:, None]


def test_a_regression_has_its_closed_form_within_the_interval():
    r = np.random.default_rng(1)
    half = r.normal(size=(INPUTS, INPUTS))
    cov, away, deviation, K, b = half @ half.T / INPUTS, 0.3 * r.normal(size=INPUTS), 0.5, 48, 4
    # Fourth moments of a Gaussian (Isserlis): E[g g'] = C (d'Cd + s^2) + 2 Cd d'C, less G G'.
    signal = (cov @ away) @ (cov @ away)
    trace = np.trace(cov) * (away @ cov @ away + deviation**2) + signal
    found = []
    for _ in range(300):
        grads = regression(r, K * b, cov, away, deviation)
        found.append(estimate(*numbers_of(grads.reshape(K, b, -1).mean(1), np.full(K, float(b)))))
    found = np.array(found)
    for known, column in ((signal, found[:, 0]), (trace, found[:, 1])):
        assert abs(column.mean() - known) < 4 * column.std() / np.sqrt(len(column))
    held = np.mean((found[:, 3] <= trace / signal) & (trace / signal <= found[:, 4]))
    assert 0.82 < held < 0.97, held
    assert np.median(found[:, 4]) < 3 * trace / signal  # and is no idle interval


def test_without_a_signal_the_interval_has_no_end():
    r = np.random.default_rng(2)
    noise = estimate(*numbers_of(r.normal(size=(40, 50)), np.ones(40)))
    assert noise.high == np.inf
    assert noise.low > 1
    with pytest.raises(ValueError, match="2 of 4 microbatches have weight"):
        estimate(np.array([1.0, 0, 0, 2]), np.ones(4), np.ones(4), 1.0)


def test_no_ratio_that_the_data_allow_is_outside_the_interval():
    """With three microbatches, whose interval mostly has no end, and may begin at 0."""
    r, ratios = np.random.default_rng(5), np.append(0, np.geomspace(1e-2, 1e2, 60))
    for _ in range(300):
        grad_KP = r.normal(size=(3, 2)) * r.uniform(0.1, 3, (3, 1)) + r.uniform(0, 2)
        noise = estimate(*numbers_of(grad_KP, np.ones(3)))
        each_K2 = np.array([defined(grad_KP[keep], np.ones(2)) for keep in ~np.eye(3, dtype=bool)])
        along = np.stack([-ratios, np.ones_like(ratios)])
        deviation = np.sqrt(np.einsum("ar,ab,br->r", along, np.cov(each_K2.T, ddof=0) * 2, along))
        t = (noise.trace - ratios * noise.signal) / deviation
        allowed = ratios[np.abs(t) < 0.999 * stats.t.ppf(0.95, 2)]
        assert np.all((noise.low <= allowed) & (allowed <= noise.high))


def test_advice_is_of_the_interval():
    given = {"scale": 100.0, "low": 50.0, "high": 200.0}
    assert "below the noise scale: twice the batch needs 0.52" in advice(4, **given)
    assert "near the noise scale: twice the batch needs 0.75" in advice(100, **given)
    assert "0.97 of the steps, so that little is gained" in advice(1600, **given)
    assert "below the noise scale: twice the batch needs 0.50" in advice(4, np.inf, 50.0, np.inf)


@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    """A linear regression with masked rows."""

    global_batch: int = 8
    steps: int = 2


def experiment_of(rows, **fields):
    def init_fn(rng):
        return {"w": jax.random.normal(rng, (INPUTS,)), "still": jnp.ones(3)}

    def loss_fn(params, batch, rng):
        y = batch["x"] @ params["w"] + params["still"].sum()
        error = 0.5 * (y - batch["y"]) ** 2 * batch["mask"]
        return jt.WeightedLoss(total=error.sum(), weight=batch["mask"].sum())

    config = Config(**fields)
    loss_fn = jt.row_wise(loss_fn)
    made = config.experiment("line", init_fn=init_fn, loss_fn=loss_fn, **config.batches_of(rows))
    return made.with_(optimizer=jt.make_optimizer("adamw", 0.05, freeze=["still"]))


def rows_of(count, r, mask=0.7):
    x = r.normal(size=(count, INPUTS)).astype(np.float32)
    keep = r.random(count) < mask
    return [
        {"x": a, "y": a.sum() ** 2, "mask": np.float32(k)} for a, k in zip(x, keep, strict=True)
    ]


def test_of_a_run_it_is_the_noise_of_the_batches_that_follow(tmp_path):
    experiment = experiment_of(rows_of(128, np.random.default_rng(3)))
    state = jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path), save_every=1)).state
    found = measure(experiment, str(tmp_path), {1: 1, 2: 2}, 10)
    w = np.asarray(state.params["w"], np.float64)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with experiment.data.train_batches(2, place) as stream:
        batches = [jax.device_get(batch) for batch in itertools.islice(stream, 10)]
    weight_K = np.array([batch["mask"].sum(dtype=np.float64) for batch in batches])
    assert np.ptp(weight_K) > 0
    grad_KP = np.stack(
        [((b["x"] @ w + 3 - b["y"]) * b["mask"]) @ b["x"].astype(np.float64) for b in batches]
    )
    signal, trace = defined(grad_KP / weight_K[:, None], weight_K)
    per_row = 8 / weight_K.mean()
    assert found[2].signal == pytest.approx(signal, rel=1e-4)
    assert found[2].trace == pytest.approx(trace * per_row, rel=1e-4)
    assert found[2].scale == pytest.approx(trace / signal * per_row, rel=1e-4)
    assert found[1].scale != pytest.approx(found[2].scale, rel=1e-3)


def test_equal_rows_have_no_noise(tmp_path):
    rows = rows_of(1, np.random.default_rng(4), mask=1.0) * 64
    experiment = experiment_of(rows)
    jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path), save_every=2))
    noise = measure(experiment, str(tmp_path), {2: 2}, 8)[2]
    assert noise.signal > 0.01
    assert max(noise.scale, noise.high) < 1e-10


@pytest.mark.slow
def test_the_command_has_a_row_for_every_checkpoint(tmp_path, capsys):
    run = str(tmp_path / "run")
    experiment = load_experiment("tests.small", ["--steps", "4"], command="test")
    jt.fit(experiment, jt.RunOptions(run_dir=run, save_every=2))
    capsys.readouterr()
    given = ["noise", run, "--module", "tests.small", "--microbatches"]
    status, out, error = commands.run(capsys, *given, "4")
    assert (status, error) == (0, "")
    kept = json.loads((tmp_path / "run/landscape.json").read_text())["noise"]
    assert [x["step"] for x in kept["checkpoints"]] == [2, 4]
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][4] == "4", out
    assert [line[0] for line in lines[2:4]] == ["2", "4"]
    assert lines[4][:4] == ["The", "batch", "of", "8"]
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    one = [*given, "8", *mesh, "--global-batch", "4", "--step", "4"]
    status, out, error = commands.run(capsys, *one)
    assert (status, error) == (0, "")
    assert "of 4 rows:" in out.splitlines()[0]
    assert "The batch of 8 rows" in out
    # Eight halves of the same rows: of the whole pass the gradient is the same.
    again = json.loads((tmp_path / "run/landscape.json").read_text())["noise"]["checkpoints"][0]
    B_squared = [x["signal"] + x["trace"] / 32 for x in (kept["checkpoints"][1], again)]
    assert B_squared[0] == pytest.approx(B_squared[1], rel=1e-4)
    assert "has 4 batches, and rows that come twice" in commands.refused(capsys, *given, "5")
    assert "error: --microbatches is 2: give at least 3" in commands.refused(capsys, *given, "2")
