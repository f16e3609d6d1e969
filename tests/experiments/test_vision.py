"""The vision experiment reaches its accuracy, with momentum and with LARS, also on a mesh."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from PIL import Image

from experiments.vision import Config, build, confusion, load
from jaxtrain import hf
from jaxtrain.build import make_abstract_state, make_experiment_mesh, make_state, rows_of
from jaxtrain.hf import stablehlo
from jaxtrain.models import convnet, layers, vit
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.loop import RunOptions, fit
from jaxtrain.run.main import main, parse
from jaxtrain.tree import named_leaves
from tests.commands import refused
from tests.commands import run as command

pytest.importorskip("sklearn")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "lars"])
def test_97_percent_of_held_out_digits(optimizer, tmp_path, capsys):
    flags = ["--optimizer.name", optimizer, "--mesh.data", "8", "--steps", "150"]
    main(Config, build, flags)
    printed = capsys.readouterr().out
    accuracy = float(printed.split("held-out accuracy ")[1].split("%")[0])
    assert accuracy >= 97.0


def test_with_group_norm_an_image_knows_nothing_of_others():
    made = build(Config(norm="group", channels=(4,), global_batch=4))
    assert not made.task.has_model_state
    params, rng = made.task.init_fn(jax.random.key(0)), np.random.default_rng(0)
    batch = {n: rng.random(x.shape).astype(x.dtype) for n, x in made.data.batch.items()}
    loss = lambda rows: made.task.loss_fn(params, {n: x[rows] for n, x in batch.items()}, None)  # noqa: E731
    parts = loss(slice(0, 1)).total + loss(slice(1, 4)).total
    np.testing.assert_allclose(parts, loss(slice(0, 4)).total, rtol=1e-6)


def test_a_picture_says_what_held_out_images_are_taken_for():
    images = load()
    one_more = lambda state, batch: jax.nn.one_hot((batch["label"] + state) % 10, 10)  # noqa: E731
    for shift in (0, 1):
        pixels = confusion(images, one_more, shift, {})["confusion"]
        assert pixels.shape == (160, 160, 3)
        cells = pixels[8::16, 8::16, 0]
        expected = 255 * (1 - np.roll(np.eye(10), shift, axis=1))
        np.testing.assert_array_equal(cells, expected)


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
    # Only images to train on are augmented, and of every epoch anew.
    plain, augmented = (
        build(parse(Config, [*flags[:6], *more])) for more in ([], ["--crop", "1", "--flip"])
    )
    held_out = [
        rows_of(next(iter(each.data.eval_batches[""](None)))) for each in (plain, augmented)
    ]
    np.testing.assert_array_equal(*(each["image"] for each in held_out))
    with plain.data.train_batches(0, None) as one, augmented.data.train_batches(0, None) as two:
        one, two = next(one), next(two)
    np.testing.assert_array_equal(one["label"], two["label"])
    assert not np.array_equal(one["image"], two["image"])
    with pytest.raises(SystemExit):
        main(Config, build, ["--image-size", "4"])
    assert "--image-size is of files of images" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--crop is 8: images have 8x8 pixels; give less"):
        build(parse(Config, ["--crop", "8"]))


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
        (["--model", "convnet", "--channels", "8", "0"], "channels=(8, 0) must be numbers from 1"),
        (["--model", "convnet", "--dropout", "nan"], "dropout=nan must be at least 0 and below 1"),
        (["--model", "convnet", "--dropout", "1.5"], "dropout=1.5 must be at least 0 and below 1"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(flags, message):
    given = ["--model", "vit", "--optimizer.name", "adamw", *flags]
    with pytest.raises(ValueError, match=re.escape(message)):
        build(parse(Config, given))


def test_a_vision_transformer_is_planned_as_it_trains():
    flags = ["--model", "vit", "--optimizer.name", "adamw", "--mesh.pipe", "2"]
    built = build(parse(Config, flags))
    state = make_abstract_state(built, make_experiment_mesh(built))
    kernel = state.params["blocks"]["attn"]["q"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 64, 64)
    assert built.data.batch["image"].shape == (128, 8, 8, 1)


PIXELS = {"mean": [0.5, 0.25, 0.5], "std": [0.5, 0.5, 0.25]}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A Hugging Face folder of a vision transformer with five classes, and images of three."""
    folder = tmp_path_factory.mktemp("vit")
    shape = {"image": (8, 8, 3), "patch": 4, "layers": 1, "width": 16, "heads": 2, "classes": 5}
    config = vit.ViTConfig(**shape)
    files = {hf.weights.PREPROCESSOR: hf.weights.preprocessor(config, PIXELS)}
    hf.save(folder / "vit", config, vit.init(config, jax.random.key(0)), files=files)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    np.savez(folder / "images.npz", images=pixels, labels=np.arange(40) % 3)
    return folder


@pytest.mark.slow
def test_a_pretrained_transformer_is_tuned_and_exported(pretrained, tmp_path, capsys):
    run, out, start = str(tmp_path / "run"), tmp_path / "out", tuning(pretrained)
    flags = [*start, "--init-from", f"{pretrained}/vit"]
    experiment = build(parse(Config, flags))
    state = make_state(experiment, make_experiment_mesh(experiment))
    wanted = hf.load(hf.open_weights(pretrained / "vit"))
    jax.tree.map(np.testing.assert_array_equal, state.params["embed"], wanted["embed"])
    assert state.params["head"]["out"]["kernel"].shape == (16, 3)
    main(Config, build, [*flags, "--run-dir", run])
    printed = " ".join(capsys.readouterr().out.split())
    assert "with a new head of 3 classes, where it had 5" in printed
    assert command(capsys, "hf", "export", "--run", run, "--out", str(out))[0] == 0
    labels = json.loads((out / "config.json").read_text())["id2label"]
    assert labels == {"0": "0", "1": "1", "2": "2"}
    # A run and its export begin with the same weights and images.
    begun = [build(parse(Config, [*start, "--init-from", path])) for path in (run, str(out))]
    expected, found = (hf.load(each.task.params()) for each in begun)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    assert hf.pixels(out) == trained.stored(run)["pixels"] == PIXELS
    rows = [rows_of(next(iter(each.data.eval_batches[""](None))))["image"] for each in begun]
    np.testing.assert_array_equal(*rows)
    pixels = np.load(pretrained / "images.npz")["images"] / 255
    normalized = (pixels - PIXELS["mean"]) / PIXELS["std"]
    assert min(np.abs(normalized - rows[0][0]).max((1, 2, 3))) < 1e-6


@pytest.mark.slow
def test_what_is_exported_is_opened_by_transformers(pretrained, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    flags = [*tuning(pretrained), "--init-from", f"{pretrained}/vit", "--run-dir", run]
    main(Config, build, flags)
    assert command(capsys, "hf", "export", "--run", run, "--out", out)[0] == 0
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    image = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    seen = np.asarray(
        processor(image, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    )
    normalized = (image / 255 - PIXELS["mean"]) / PIXELS["std"]
    np.testing.assert_allclose(seen[0].transpose(1, 2, 0), normalized, atol=1e-6)
    opened = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    ours = vit.logits(
        trained.model(run), trained.load(run)[1], {"image": normalized[None].astype(np.float32)}
    )
    np.testing.assert_allclose(ours, opened(torch.tensor(seen)).logits.detach(), atol=1e-5)


def tuning(folder):
    """The flags of two steps on images, which are given what to begin with."""
    flags = ["--model", "vit", "--optimizer.name", "adamw", "--data", f"{folder}/images.npz"]
    return [*flags, "--steps", "2", "--global-batch", "8"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data", "digits"],
            "the images are 8x8x1 and the model in .* is of images of 8x8x3",
        ),
        (["--layers", "2"], "--layers 2 is not for --init-from"),
        (["--model", "convnet"], "--init-from is not for --model convnet: give --model vit"),
        (["--init-from", "nothing"], "'nothing' is neither a run nor a Hugging Face folder"),
    ],
)
def test_what_a_pretrained_transformer_cannot_have_is_refused(pretrained, flags, message):
    given = ["--model", "vit", "--optimizer.name", "adamw", "--data", f"{pretrained}/images.npz"]
    given += ["--init-from", f"{pretrained}/vit", *flags]
    with pytest.raises(ValueError, match=message):
        build(parse(Config, given))


@pytest.fixture(scope="module")
def convnet_run(tmp_path_factory):
    """The folder of a run on images in folders of three classes, and its state at the end."""
    folder, rng = tmp_path_factory.mktemp("convnet"), np.random.default_rng(0)
    for n in range(48):
        path = folder / "images" / "abc"[n % 3] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(60 * (n % 3), 136 + 60 * (n % 3), (8, 8, 3), np.uint8)).save(
            path
        )
    flags = ["--data", f"{folder}/images", "--global-batch", "8", "--channels", "4", "12"]
    flags += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"]
    flags += ["--mesh.data", "2", "--mesh.fsdp", "4"]
    config = parse(Config, [*flags, "--steps", "8", "--run-dir", str(folder / "run")])
    state = fit(build(config), config.run).state
    return folder, config, jax.device_get(state)


def test_a_reopened_convnet_predicts_what_its_run_has_evaluated(convnet_run, capsys):
    folder, config, state = convnet_run
    run, images = str(folder / "run"), load(config.data, config.image_size)
    asked = ["predict", "--run", run, "--data", f"{folder}/images", "--mesh.fsdp", "8"]
    status, out, err = command(capsys, *asked, "--rows", "9")
    assert status == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    shares = np.array([[line["probabilities"][name] for name in "abc"] for line in lines])
    right = np.array(["abc".index(line["image"][0]) for line in lines])
    assert [line["image"] for line in lines] == sorted(f"{'abc'[n % 3]}/{n}.png" for n in range(48))
    # The run's own evaluation, of the images that it has held out.
    held = images.held_out.chosen
    log = map(json.loads, (folder / "run/log.jsonl").read_text().splitlines())
    told = [line for line in log if "eval/loss" in line][-1]
    assert (shares.argmax(1) == right)[held].mean() == pytest.approx(told["eval/accuracy"])
    status, out, err = command(capsys, "evaluate", *asked[1:], "--rows", "9")
    assert status == 0, err
    assert f"{(shares.argmax(1) == right).mean():.1%} right of 48" in out
    losses = -np.log(shares[np.arange(48), right])
    assert losses[held].mean() == pytest.approx(told["eval/loss"], rel=1e-6)
    # Its logits, by the statistics that it has come to, and not by those that it began with.
    model, variables, _ = trained.load(run)
    batch = {"image": np.stack([images.held_out[i]["image"] for i in range(len(held))])}
    logits = convnet.logits(model, variables, batch)
    net = layers.apply(convnet.ConvNet, model, state.params, state.model_state)
    np.testing.assert_allclose(logits, net(batch["image"], None), atol=1e-6)
    assert np.abs(state.model_state["norms"]["0"]["var"] - 1).max() > 0.1
    fresh = convnet.init(model, jax.random.key(0))[1]
    assert np.abs(convnet.logits(model, state.params, batch, fresh) - logits).max() > 0.1
    # Any number of rows goes through the exported program.
    program = stablehlo.program(model, variables)
    found = program.call(named_leaves(variables), batch)
    np.testing.assert_allclose(found, logits, atol=1e-6)


def test_a_run_that_stores_no_model_is_refused(tmp_path, capsys):
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:  # as a ConvNet's earlier release
        checkpoints.save(
            1, {"params": {"w": np.zeros(1)}}, config={"experiment": "vision", "flags": {}}
        )
    given = {"predict": ["--data", str(tmp_path)], "export": ["--out", str(tmp_path / "out")]}
    for name, flags in given.items():
        said = refused(capsys, name, "--run", str(tmp_path), *flags)
        assert "has no model: an experiment of your own stores none, and a ConvNet" in said


@pytest.mark.slow
def test_a_convnet_of_an_earlier_release_is_resumed_and_has_a_model(convnet_run, tmp_path):
    run, config = str(tmp_path / "run"), convnet_run[1]
    one, two = (build(dataclasses.replace(config, steps=steps)) for steps in (1, 2))
    then = {n: x for n, x in one.metadata.config.items() if n in ("experiment", "module", "flags")}
    fit(one.with_(config=then), RunOptions(run_dir=run))
    fit(two, RunOptions(run_dir=run, resume=True))
    assert trained.model(run) == convnet.ConvNetConfig((8, 8, 3), 3, (4, 12))
    assert trained.load(run, 2)[1]["norms"]["0"]["var"].shape == (4,)
