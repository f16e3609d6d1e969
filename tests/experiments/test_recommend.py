"""The recommender: its clicks, its AUC, and what it reaches."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.recommend import DENSE, EDGES_E, HISTORY, Clicks, Config, aucs, build, curves
from jaxtrain.build import make_abstract_state, make_experiment_mesh
from jaxtrain.run.main import main, parse

TINY = ["--global-batch", "32", "--users", "64", "--items", "32", "--width", "8", "--hidden", "8"]
TINY += ["--held-out-rows", "64"]


def test_a_row_is_a_function_of_the_seed_and_its_number():
    config = Config(users=1000, items=100)
    clicks = Clicks(config, 1 << 30)
    rows = [clicks[n] for n in range(2000)]
    for n in (0, 1999):
        again = Clicks(config, 5)[n]
        assert all(np.array_equal(again[name], x) for name, x in rows[n].items())
    other = Clicks(Config(users=1000, items=100, seed=1), 5)[0]
    assert not np.array_equal(other["dense"], rows[0]["dense"])
    all_of = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    assert all_of["history"].shape == (2000, HISTORY)
    assert all_of["dense"].shape == (2000, DENSE)
    lengths = (all_of["history"] >= 0).sum(1)
    assert set(lengths) == set(range(HISTORY + 1))  # ragged
    assert (np.sort(all_of["history"] < 0, axis=1) == (all_of["history"] < 0)).all()
    _, counts = np.unique(all_of["user"], return_counts=True)
    assert counts.max() > 100 > 3 > np.median(counts)  # few have most
    assert all_of["user"].max() > 900
    # Clicks are as likely as is said.
    expected = 1 / (1 + np.exp(-all_of["logit"]))
    error = (all_of["click"] - expected).mean() / np.sqrt((expected * (1 - expected)).mean() / 2000)
    assert abs(error) < 4
    assert Clicks(Config(users=10**8, items=10), 5)[0]["user"] < 10**8


def test_the_auc_of_histograms_is_that_of_ranks():
    r = np.random.default_rng(0)
    click = r.random(4000) < 0.3
    logit = r.normal(size=4000) + 1.5 * click
    above = (logit[click][:, None] > logit[~click]).mean()
    place = (logit - EDGES_E[0]) / (EDGES_E[1] - EDGES_E[0])
    near = np.maximum(1 - np.abs(place[:, None] - np.arange(len(EDGES_E))), 0)
    counts = np.stack([near[click].sum(0), near[~click].sum(0)])
    means = {"counts": counts, "best_counts": counts}
    assert abs(aucs(means)["auc"] - above) < 1e-3
    assert aucs({}) == {}
    image = curves(means)
    assert image.shape == (256, 256, 3)
    blue = image[..., 0] < 100
    assert blue.any(0).all()
    assert blue.any(1).all()
    assert (blue[::-1].argmax(0) > 0).sum() > 200  # above the diagonal


@pytest.mark.slow
def test_a_run_leaves_its_curves_and_says_both_aucs(tmp_path, capsys):
    run = tmp_path / "run"
    main(Config, build, [*TINY, "--steps", "2", "--run-dir", str(run), "--mesh.data", "8"])
    printed = capsys.readouterr().out
    assert re.search(r"held-out AUC 0\.\d{4}, of the best possible model 0\.\d{4}", printed)
    assert (run / "roc.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--private.noise", "1", "--seed", "5"], "training is private and"),
        (["--compress.name", "topk", "--mesh.data", "2"], "engine compressing"),
        (["--optimizer.rate-multipliers", "^embed/=0.5"], "which finds tables"),
        (["--offload-optimizer"], "offload_optimizer"),
        (["--local.replicas", "2"], "a method of its own"),
        (["--optimizer.ema", "0.9"], "`ema` is given and tables"),
        (["--optimizer.accumulate", "2"], "`accumulate` is given and tables"),
    ],
)
def test_what_whole_tables_need_is_refused(flags, named):
    def state_of():
        experiment = build(parse(Config, [*TINY, *flags]))
        return make_abstract_state(experiment, make_experiment_mesh(experiment, jax.devices()[:1]))

    with pytest.raises(ValueError, match=named):
        state_of()


@pytest.mark.slow
def test_the_auc_comes_near_to_the_best_possible(tmp_path):
    command = [sys.executable, "-m", "experiments.recommend", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"held-out AUC (\S+), of the best possible model (\S+)", done.stdout)
    assert found, done.stderr
    auc, best = map(float, found[0])
    assert best - 0.006 < auc <= best
