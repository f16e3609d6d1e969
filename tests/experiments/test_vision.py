"""The vision experiment reaches its accuracy, with momentum and with LARS, also on a mesh."""

import pytest

from experiments.vision import Config, build
from jaxtrain.run.loop import RunOptions, fit
from jaxtrain.run.main import main, parse

pytest.importorskip("sklearn")


@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("lars", marks=pytest.mark.slow)])
def test_97_percent_of_held_out_digits(optimizer, tmp_path, capsys):
    flags = ["--optimizer.name", optimizer, "--mesh.data", "8", "--steps", "150"]
    main(Config, build, [*flags, "--run-dir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    accuracy = float(printed.split("held-out accuracy ")[1].split("%")[0])
    assert accuracy >= 97.0


def test_statistics_are_part_of_the_state_and_learned(tmp_path):
    config = parse(Config, ["--steps", "20", "--mesh.data", "2", "--mesh.fsdp", "4"])
    state = fit(build(config), RunOptions(run_dir=str(tmp_path / "run"))).state
    variance = state.model_state["norms"]["0"]["var"]
    assert float(abs(variance - 1).max()) > 0.1
