"""The vision experiment reaches its accuracy, with momentum and with LARS, also on a mesh."""

import re

import numpy as np
import pytest
from PIL import Image

from experiments.vision import Config, build
from jaxtrain.experiment import make_abstract_state, make_experiment_mesh
from jaxtrain.run.loop import RunOptions, fit
from jaxtrain.run.main import main, parse

pytest.importorskip("sklearn")


@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("lars", marks=pytest.mark.slow)])
def test_97_percent_of_held_out_digits(optimizer, tmp_path, capsys):
    flags = ["--optimizer.name", optimizer, "--mesh.data", "8", "--steps", "150"]
    main(Config, build, flags)
    printed = capsys.readouterr().out
    accuracy = float(printed.split("held-out accuracy ")[1].split("%")[0])
    assert accuracy >= 97.0


def test_statistics_are_part_of_the_state_and_learned(tmp_path):
    config = parse(Config, ["--steps", "20", "--mesh.data", "2", "--mesh.fsdp", "4"])
    state = fit(build(config), RunOptions(run_dir=str(tmp_path / "run"))).state
    variance = state.model_state["norms"]["0"]["var"]
    assert float(abs(variance - 1).max()) > 0.1


def test_a_folder_of_images_is_trained_on(tmp_path, capsys):
    noise = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
    for n, pixels in enumerate(noise):
        (tmp_path / "images" / "abc"[n % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / "abc"[n % 3] / f"{n}.png")
    flags = ["--data", str(tmp_path / "images"), "--steps", "1", "--global-batch", "8"]
    flags += ["--channels", "4", "--run-dir", str(tmp_path / "run")]
    main(Config, build, flags)
    printed = capsys.readouterr().out
    assert "of 3 classes" in printed
    assert "held-out accuracy" in printed
    # It is resumed where the images have been moved to.
    (tmp_path / "images").rename(tmp_path / "moved")
    flags[1] = str(tmp_path / "moved")
    main(Config, build, [*flags, "--resume"])
    assert "held-out accuracy" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(Config, build, ["--image-size", "4"])
    assert "--image-size is of files of images" in capsys.readouterr().err


@pytest.mark.slow
def test_a_vision_transformer_learns_digits_in_a_pipeline(tmp_path, capsys):
    flags = ["--model", "vit", "--optimizer.name", "adamw", "--steps", "200"]
    flags += ["--mesh.pipe", "2", "--mesh.tensor", "2", "--mesh.data", "2"]
    main(Config, build, [*flags, "--run-dir", str(tmp_path / "run")])
    accuracy = float(capsys.readouterr().out.split("held-out accuracy ")[1].split("%")[0])
    assert accuracy >= 75.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--channels", "8"], "--channels (8,) is not for --model vit"),
        (["--optimizer.name", "momentum"], "give --optimizer.name adamw"),
        (["--patch", "3"], "images of 8x8 cannot be cut into patches of 3"),
        (["--mesh.tensor", "3"], "--mesh.tensor 3 does not divide 4 heads"),
        (["--model", "convnet", "--layers", "2"], "--layers 2 is not for --model convnet"),
    ],
)
def test_what_is_of_the_other_model_is_refused(flags, message):
    given = ["--model", "vit", "--optimizer.name", "adamw", *flags]
    with pytest.raises(ValueError, match=re.escape(message)):
        build(parse(Config, given))


def test_a_vision_transformer_is_planned_as_it_trains():
    flags = ["--model", "vit", "--optimizer.name", "adamw", "--mesh.pipe", "2"]
    built = build(parse(Config, flags))
    state = make_abstract_state(built, make_experiment_mesh(built))
    kernel = state.params["blocks"]["attn"]["q"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 64, 64)
    assert built.batch["image"].shape == (128, 8, 8, 1)
