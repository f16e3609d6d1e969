"""PPO learns, and is a run as every other: resumed, planned, and compared with one device."""

import pytest

import jaxtrain as jt
from experiments import ppo
from jaxtrain.run.main import parse
from tests import plugs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("cartpole", 495), ("acrobot", -90), ("pendulum", -250)]
)
def test_five_of_five_seeds_reach_it(name, least, tmp_path):
    for seed in range(5):
        config = parse(ppo.Config, ["--environment", name, "--seed", str(seed)])
        folder = str(tmp_path / str(seed))
        result = jt.fit(ppo.build(config), jt.RunOptions(run_dir=folder))
        assert result.evaluation["return"] >= least, seed


@pytest.mark.slow
def test_it_resumes_and_is_planned_and_compared(tmp_path, capsys):
    plugs.check(ppo, "method on_policy", tmp_path, capsys)
