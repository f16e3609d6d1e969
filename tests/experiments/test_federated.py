"""Digits and text are learned by clients that have rows of their own, to the same bits again."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments.federated import Config
from experiments.federated import build as experiment
from jaxtrain import build, data
from jaxtrain.run.main import parse
from jaxtrain.tree import named_leaves

pytest.importorskip("sklearn")
SMALL = ["--hidden", "16", "--federated.clients", "20", "--federated.per-round", "4"]


def trained(*flags):
    made = experiment(parse(Config, [*SMALL, *flags]))
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    state = build.make_state(made, mesh)
    train, places = build.compile_train(made, state, mesh), build.stream_shardings(made, mesh)
    with made.data.train_batches(0, places) as batches:
        for _ in range(4):
            state, metrics = train(state, next(batches))
    return named_leaves(jax.device_get((state.params, state.method))), metrics


def test_digits_by_clients_of_unequal_size_come_back_to_the_bit():
    flags = ["--federated.partition", "dirichlet", "--federated.outer", "adam"]
    first, metrics = trained(*flags)
    again, _ = trained(*flags)
    assert all(np.array_equal(x, again[name]) for name, x in first.items())
    assert metrics["loss"] < 2


def test_clients_of_text_are_its_packages(tmp_path):
    lines = {"a/x.py": 40, "a/y.py": 40, "b.py": 60, "c.py": 9, "d/z.py": 5}
    for name, count in lines.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(f"{name} = {i}\n" for i in range(count)))
    own = {}
    for name, text in data.text_folder(tmp_path).train:
        own[name.partition("/")[0]] = own.get(name.partition("/")[0], b"") + text
    flags = ["--data", str(tmp_path), "--federated.partition", "labels", "--seq-len", "16"]
    flags += ["--federated.per-round", str(len(own)), "--client-rows", "12"]
    made = experiment(parse(Config, flags))
    assert made.metadata.facts["clients"].endswith(f"to 12 rows, {len(own)} in a round")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with made.data.train_batches(0, sharding) as batches:
        tokens = np.asarray(next(batches)["tokens"]).reshape(len(own), -1)
    assert {bytes(x[:12].astype(np.uint8)) for x in tokens} == {x[:12] for x in own.values()}


def test_a_schedule_is_refused():
    with pytest.raises(ValueError, match="begins anew in each round"):
        experiment(Config(optimizer=jt.run.options.OptimizerOptions(schedule="cosine")))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden": (16, 0)}, r"`hidden` is \(16, 0\): give widths from 1"),
        ({"global_batch": -1}, "`global_batch` is -1: give at least 0"),
    ],
)
def test_sizes_that_are_none_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        experiment(Config(**given))
