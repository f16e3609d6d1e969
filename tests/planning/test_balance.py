"""What the parts of a model weigh, and the layers that each stage is given for it."""

import functools

import pytest
import tyro

from experiments import gpt as experiment
from jaxtrain import data
from jaxtrain.engines.pipeline import make_table
from jaxtrain.engines.pipeline.balance import Weights, balanced, weigh
from jaxtrain.engines.pipeline.tables import bubble, makespan
from jaxtrain.models import decoder


@functools.cache
def gpt2():
    model = decoder.PRESETS["gpt2-124m"]()
    batch = data.packed_shapes(1, model.seq_len)
    return weigh(decoder.stages(model), functools.partial(decoder.init, model), batch)


def test_gpt2_on_four_stages_waits_for_no_head():
    T, D, V = 1024, 768, 50257
    weights = gpt2()
    dense = 24 * T * D**2
    assert dense < weights.layer[0] < dense + 4 * T**2 * D  # attention, of which half is masked
    assert weights.head == pytest.approx((2 * T * D * V, 6 * T * D * V), rel=0.01)
    assert weights.embed == (0, 0)
    counts = balanced(weights, layers=12, stages=4)
    assert counts == (4, 4, 4, 0)
    table = make_table("1f1b", stages=4, microbatches=32)
    even, better = (
        dict(zip(("forward", "backward"), weights.of_stages(c), strict=True))
        for c in ((3, 3, 3, 3), counts)
    )
    assert sum(even.values()).max() > 1.4 * sum(better.values()).max()
    assert makespan(table, **even) > 1.35 * makespan(table, **better)
    assert bubble(table, **even) > 2 * bubble(table, **better)


def test_every_layer_is_placed_and_no_move_of_one_helps():
    weights = Weights((1, 3), (2, 7), (3, 11))
    for layers in range(1, 20):
        for stages in range(1, 6):
            counts = balanced(weights, layers=layers, stages=stages)
            assert sum(counts) == layers
            busiest = sum(weights.of_stages(counts)).max()
            for give in range(stages):
                for take in range(stages):
                    moved = [n - (g == give) + (g == take) for g, n in enumerate(counts)]
                    assert sum(weights.of_stages(moved)).max() >= busiest or min(moved) < 0


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ("--layers 5 --mesh.pipe 2", (2, 3)),
        ("--layers 4 --mesh.pipe 2", None),
        ("--layers 6 --mesh.pipe 2 --pipeline.balance --tokenizer 4096", (4, 2)),
        ("--layers 5", None),
    ],
)
def test_the_experiment_places_layers_that_do_not_divide_and_others_when_asked(flags, counts):
    config = tyro.cli(experiment.Config, args=["--width", "64", "--heads", "2", *flags.split()])
    assert experiment.outline(config).stack.counts == counts
