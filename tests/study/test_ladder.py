"""The command ``jaxtrain ladder``: what it trains, what it refuses, and what it says of the law."""

import json
import re

import numpy as np
import pytest

from jaxtrain.run.main import load_config
from jaxtrain.study import laws
from jaxtrain.study.ladder import LadderOptions, Size, measure, points_of, read_sizes
from tests.commands import refused, run

GPT = ["--layers", "2", "--seq-len", "32", "--global-batch", "4", "--tokenizer", "bytes"]
SIZES = ["--sizes", "width=16,24,32", "heads=1,1,2"]


def asked(folder, *budgets):
    own = ["--budgets", *budgets, "--study-dir", str(folder / "ladder")]
    return ["ladder", "experiments.gpt", *SIZES, *own]


def test_a_size_is_the_parameters_of_its_layers_and_its_flops_are_counted():
    options = LadderOptions("experiments.gpt", ("width=16",), (1e9,), "x")
    flags = (GPT, [*GPT, "--tokenizer", "512"])
    configs = [load_config("experiments.gpt", given, command="ladder")[1] for given in flags]
    (size, experiment, _), (again, *_) = (
        measure(options, given, config, {"width": 16, "heads": 1})
        for given, config in zip(flags, configs, strict=True)
    )
    assert size.N == again.N < 16 * 512  # whatever the vocabulary
    assert again.flops > size.flops == experiment.task.flops_per_step
    assert size.tokens == 4 * 32
    (_, point), *_ = points_of([size], [50 * size.flops])
    assert point == {"width": 16, "heads": 1, "steps": 50}


@pytest.mark.slow
def test_what_makes_no_ladder_is_refused_before_anything_is_trained(tmp_path, capsys):
    few = refused(capsys, *asked(tmp_path, "1e7", "1e9", "2e9"), "--", *GPT)
    assert re.search(r"1e\+07 FLOPs, which are \d steps of width=16 heads=1: give \S+ or more", few)
    one = refused(capsys, *asked(tmp_path, "2e9"), "--", *GPT)
    assert "3 runs of 3 sizes and 3 lengths do not tell a law's 5 constants" in one
    typed = refused(capsys, *asked(tmp_path, "2e9"), "--", *GPT, "--steps", "9")
    assert "--steps is typed and is what a budget gives: leave it out" in typed
    target = refused(capsys, *asked(tmp_path, "2e9"), "--target", "width=64", "--", *GPT)
    assert "give one value for each flag of --sizes, width, heads" in target
    assert not (tmp_path / "ladder").exists()
    with pytest.raises(ValueError, match="2 of a, 1 of b: give a value of each for every size"):
        read_sizes(["a=1,2", "b=3"], name="sizes")


@pytest.mark.slow
def test_a_ladder_is_trained_and_forecasts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    more = ["--target", "width=48", "heads=3", "--target-budget", "6e9", "--", *GPT]
    command = [*asked(tmp_path, "8e8", "1.5e9", "3e9"), *more, "--sample-seconds", "0"]
    status, out, err = run(capsys, *command)
    assert status == 0, err
    found = json.loads((tmp_path / "ladder" / "ladder.json").read_text())
    assert len(found["runs"]) == 9
    N, D, L = (np.array([x[k] for x in found["runs"]]) for k in ("parameters", "tokens", "loss"))
    assert [x["width"] for x in found["runs"]] == 3 * [16, 24, 32]
    law = laws.Law(**found["law"])
    np.testing.assert_allclose(laws.fit(N, D, L)[0], law, rtol=1e-6)
    forecast = found["forecast"]
    size = Size(**forecast["size"])
    expected = law.loss(size.N, size.tokens * forecast["steps"])
    assert forecast["loss"] == pytest.approx(expected)
    assert f"--width=48 --heads=3 --steps={forecast['steps']}" in out
    # What is there is not trained again.
    again = run(capsys, *command)
    assert (again[0], again[1]) == (0, out)
    assert "trial" not in again[2]
