"""Spaces of a study, and what the command refuses before anything starts."""

import pytest

from jaxtrain.run.main import load_config
from jaxtrain.study.space import Dimension, grid, read_space
from tests.commands import refused

SMALL = ["study", "tests.small", "--trials", "2"]


def read(tmp_path, text, *flags, module="tests.small"):
    (tmp_path / "space.toml").write_text(text)
    _, config = load_config(module, flags, command="study")
    return read_space(str(tmp_path / "space.toml"), module, config, flags)


def test_a_space_is_of_the_experiments_own_flags(tmp_path):
    text = """
    global-batch = [4, 8]
    centred = [true, false]
    mesh.data = {low = 1, high = 2}
    eval_every = {low = 1, high = 7, step = 4}
    [optimizer]
    learning-rate = {low = 1e-3, high = 1, log = true}
    weight-decay = {low = 0, high = 0.25, step = 0.1}
    name = ["adamw", "sgd"]
    """
    assert read(tmp_path, text) == [
        Dimension("global-batch", (4, 8)),
        Dimension("centred", (True, False)),
        Dimension("mesh.data", low=1, high=2),
        Dimension("eval-every", low=1, high=5, step=4),
        Dimension("optimizer.learning-rate", low=1e-3, high=1.0, log=True),
        Dimension("optimizer.weight-decay", low=0.0, high=0.2, step=0.1),
        Dimension("optimizer.name", ("adamw", "sgd")),
    ]


def test_a_grid_has_all_combinations():
    space = [Dimension("a", low=1, high=3), Dimension("b", ("x", "y"))]
    assert [tuple(point.values()) for point in grid(space)] == [
        (a, b) for a in (1, 2, 3) for b in "xy"
    ]
    with pytest.raises(ValueError, match="a is a range without steps"):
        grid([Dimension("a", low=0.1, high=0.3)])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optimizer.learning-rte = [1.0]", "did you mean --optimizer.learning-rate?"),
        ("precision = ['f32', 'f8']", "tests.small does not take --precision=f8"),
        ("optimizer.name = {low = 1, high = 2}", "optimizer.name takes no numbers"),
        ("global-batch = {low = 1.5, high = 2}", "every end and step is a whole number"),
        ("global-batch = ['many']", "tests.small does not take --global-batch=many"),
        ("global-batch = {low = 8, high = 2}", "low is below high"),
        ("global-batch = {low = 2, hihg = 8}", "did you mean high?"),
        ("global-batch = {low = 2}", "lacks high"),
        ("global-batch = []", "give different values"),
        ("global-batch = 3", "give a list, or a range"),
        ("optimizer.ema = {low = 0.0, high = 1.0, log = true}", "with log it is above 0"),
        ("seed = [-1]", "tests.small does not take --seed=-1"),
        ("run-dir = ['a']", "--run-dir is of a start of a run"),
        ("steps = [1, 2]", "--steps is typed too"),
        ("", "varies nothing"),
        ("steps = ", "is no TOML"),
    ],
)
def test_a_wrong_space_is_refused(text, sentence, tmp_path):
    with pytest.raises(ValueError, match=f"(?s)space.*{sentence.replace('?', '[?]')}"):
        read(tmp_path, text, "--steps", "3")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--workers", "0"], "--workers is 0: give at least 1"),
        (["--pruner", "halving"], "give the steps between evaluations"),
        (["--fault"], "--global-batch is too odd"),
        (["--run-dir", "x"], "--run-dir is of one run"),
        (["--sampler", "grid"], "a range without steps"),
        (["--repeats", "2", "--sampler", "grid"], "a range without steps"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(flags, sentence, tmp_path, capsys):
    (tmp_path / "space.toml").write_text("optimizer.ema = {low = 0.5, high = 0.9}")
    given = ["--space", str(tmp_path / "space.toml"), "--study-dir", str(tmp_path / "study")]
    assert sentence in refused(capsys, *SMALL, *given, *flags)
    assert not (tmp_path / "study").exists()
