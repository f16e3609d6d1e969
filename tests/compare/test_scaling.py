"""Scaling reports: speed-ups by hand, what cannot be, and small real runs on simulated devices."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from jaxtrain.compare import scaling, turns
from jaxtrain.compare.scaling import Point
from jaxtrain.host import extras
from jaxtrain.planning.report import Memory, Plan
from jaxtrain.planning.targets import target_of
from tests import commands, problems

MODULE = "tests.small"


def point(devices, rows, seconds, **given):
    return Point(f"{devices}", devices, rows, 10 * rows, "", step_seconds=seconds, **given)


def test_speed_up_and_efficiency_are_those_by_hand():
    strong = [point(2, 8, (4.0, 8.0, 6.0)), point(8, 8, (2.0, 2.0, 2.0))]
    first, last = scaling.over_first("strong", strong)
    assert (first.speed_up, first.efficiency) == (1, 1)
    assert (last.speed_up, last.efficiency) == (3, 0.75)  # 2, 4 and 3 times, on 4 times as many
    assert last.scaling == "strong"
    weak = [point(2, 8, (4.0, 8.0, 6.0)), point(8, 32, (5.0, 10.0, 10.0))]
    _, last = scaling.over_first("weak", weak)
    assert last.speed_up == pytest.approx(4 * 0.8)  # 4 times the items, in 1.25 of the time
    assert last.efficiency == pytest.approx(0.8)


@pytest.mark.slow
def test_two_simulated_devices_are_timed_and_told_apart(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scaling, "ROUNDS", 2)
    flags = ["--devices", "1,2", "--out", str(tmp_path / "new"), "--optimizer.name", "sgd"]
    flags += ["--steps", "3", "--steps-per-call", "2"]
    status, out, _ = commands.run(capsys, "scaling", MODULE, *flags)
    assert status == 0
    points = json.loads((tmp_path / "new" / "scaling.json").read_text())["points"]
    found = [(p["scaling"], p["devices"], p["global_batch"], p["mesh"]) for p in points]
    assert found == [
        ("strong", 1, 8, "1 device"),
        ("strong", 2, 8, "data 2"),
        ("weak", 1, 8, "1 device"),
        ("weak", 2, 16, "data 2"),
    ]
    one, strong, again, weak = points
    assert {**one, "scaling": "weak"} == again
    for p, rows in ((strong, 1), (weak, 2)):
        ratios = rows * np.divide(one["step_seconds"], p["step_seconds"])
        assert p["speed_up"] == pytest.approx(np.median(ratios))
        assert p["efficiency"] == pytest.approx(p["speed_up"] / 2)
        assert len(p["step_seconds"]) == 2
        assert (p["on"], p["predicted"]) == ("simulated CPU", False)
        assert p["items"] == 8 * rows
    assert (one["sent_bytes"], strong["sent_bytes"]) == (0, weak["sent_bytes"])
    # All gradients are added up: of two devices, each sends as much as there is.
    shapes = jax.eval_shape(problems.init, jax.random.key(0))
    gradients = 4 * sum(x.size for x in jax.tree.leaves(shapes))
    assert gradients <= strong["sent_bytes"] < 1.5 * gradients
    assert "1 simulated CPU" in out
    assert "Simulated devices share cores: their times say nothing of real speeds." in out
    assert "predicted" not in out.lower()
    assert (tmp_path / "new" / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_target_is_planned_and_cpus_are_timed_beside_it_only_if_asked(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs the compilers: pip install 'jaxtrain[aot]'")
    flags = ["--devices", "1,8,16", "--target", "h100", "--global-batch", "16"]
    flags += ["--out", str(tmp_path)]
    status, out, _ = commands.run(capsys, "scaling", MODULE, *flags)
    assert status == 0
    points = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert [p["on"] for p in points] == 2 * ["h100:1x1", "h100:1x8", "h100:2x8"]
    assert all(p["predicted"] and len(p["step_seconds"]) == 1 for p in points)
    plan = ["plan", MODULE, "--json", "--target", "h100:2x8", "--global-batch", "256"]
    plan = json.loads(commands.run(capsys, *plan)[1])
    last = points[-1]
    assert last["step_seconds"] == [plan["roofline"]["step_seconds"]]
    assert last["sent_bytes"] == sum(row["sent"] for row in plan["traffic"])
    assert last["memory_bytes"] == plan["memory"]["peak"]
    assert "Predicted steps have not run" in out
    assert "simulated" not in out.lower()
    status, out, _ = commands.run(capsys, "scaling", MODULE, *flags, "--simulate-devices", "8")
    assert status == 0
    points = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert [(p["devices"], p["predicted"]) for p in points[:2]] == [(1, False), (8, False)]
    assert sum(p["predicted"] for p in points) == 6


def test_a_step_that_does_not_fit_a_target_is_named(monkeypatch):
    memory = Memory(0, 0, 0, 0, 0, 0, program=0, peak=3 * 2**30, limit=2**30)
    given = {"name": "x", "target": "h100:1x2", "device_kind": "", "devices": 2, "hosts": 1}
    given |= {"mesh": {}, "flops": None, "flops_formula": None, "peak_flops": None, "assumed": ""}
    plan = Plan(**given, fits=False, shortage=2**31, memory=memory)
    monkeypatch.setattr(scaling, "plan_experiment", lambda *_: plan)
    why = r"variant 2: on h100:1x2 the step does not fit: 3.0 GiB of 1.0 GiB per device.*use fsdp"
    with pytest.raises(ValueError, match=why):
        scaling.predict(point(2, 8, ()), None, target_of("h100", 2))


def test_measured_is_solid_and_predicted_dashed_and_hollow(monkeypatch, tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    kept = []
    monkeypatch.setattr(scaling, "save_figure", lambda figure, path: kept.append(figure))
    real, simulated = {"on": "NVIDIA H100 80GB HBM3"}, {"on": scaling.SIMULATED}
    planned = {"on": "h100:1x2", "predicted": True}
    series = [
        scaling.over_first(name, [point(1, 8, [1e-3], **on), point(2, 8, [5e-4], **on)])
        for on in (real, simulated, planned)
        for name in ("strong", "weak")
    ]
    scaling.draw(series, tmp_path / "x.png")
    (figure,) = kept
    assert isinstance(figure, figures.Figure)
    left, right = figure.axes
    for axes, last in ((left, 0.5), (right, 100)):
        found = [(x.get_linestyle(), x.get_marker(), x.get_markerfacecolor()) for x in axes.lines]
        assert [style[:2] for style in found[::2]] == [("-", "o"), ("-", "s"), ("--", "o")]
        assert [style[2] == "none" for style in found[::2]] == [False, False, True]
        assert all(list(x.get_ydata())[-1] == pytest.approx(last) for x in axes.lines)
    labels = [text.get_text() for text in right.get_legend().texts]
    assert labels[1::2] == [
        "weak, NVIDIA H100 80GB HBM3",
        "weak, simulated CPU",
        "weak, h100, predicted",
    ]


@pytest.mark.parametrize(
    ("chip", "devices", "text"),
    [
        *(("h100", 1, "h100:1x1"), ("h100", 6, "h100:1x6"), ("h100", 8, "h100:1x8")),
        *(("h100", 64, "h100:8x8"), ("a100", 12, "a100:2x6"), ("v5e", 1, "v5e:1x1")),
        *(("v5litepod", 8, "v5e:2x4"), ("v5p", 64, "v5p:4x4x4"), ("v4", 4, "v4:2x2x1")),
        *(("tpu7x", 8, "tpu7x:2x2x1"), ("v6e", 256, "v6e:16x16")),
    ],
)
def test_a_chip_and_a_number_are_a_target(chip, devices, text):
    target = target_of(chip, devices)
    assert (str(target), target.size) == (text, devices)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["1"], "--devices is '1': give numbers, such as 1,2,4,8"),
        (["0,2"], "--devices is '0,2': give numbers"),
        (["1,16"], "--devices has 16 and JAX sees 8 here: give --simulate-devices 16"),
        (["1,2", "--target", "h100:1x8"], "--target is 'h100:1x8': name one chip"),
        (["1,2", "--target", "cpu"], "--target is 'cpu': name one chip"),
        (["1,2", "--target", "v5e"], "--devices has 2: no slice of v5e has so many; 1x1, or"),
        (["4,6", "--global-batch", "9"], "--global-batch is 9, which weak scaling splits in 4"),
        (["1,2", "--mesh.tensor", "2"], "variant devices=1 global-batch=8: mesh data -1 x tensor"),
        (["1,2", "--mesh.data", "2"], "variant devices=1 global-batch=8: mesh data 2 needs 2"),
        (["1,3"], "variant devices=3 global-batch=8: batch leaf 'mask' has shape (8,)"),
        (["1,8", "--fault"], "variant devices=1 global-batch=8: --global-batch is too odd"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_compiled(
    capsys, monkeypatch, flags, sentence
):
    monkeypatch.delattr(turns._Run, "compile")
    monkeypatch.delattr(scaling, "plan_experiment")
    status, out, error = commands.run(capsys, "scaling", MODULE, "--devices", *flags)
    assert (status, out) == (2, "")
    *_, line = error.splitlines()
    assert line.startswith(f"error: {sentence}")


def test_a_picture_without_matplotlib_is_refused_before_anything_is_timed(capsys, monkeypatch):
    def missing(purpose, extra, *modules):
        raise ImportError(f"{purpose}: pip install -e '.[{extra}]'")

    monkeypatch.setattr(extras, "load", missing)
    monkeypatch.delattr(scaling, "load_config")
    error = commands.refused(capsys, "scaling", MODULE, "--devices", "1,2", "--out", "x")
    assert "pip install -e '.[plot]'" in error
