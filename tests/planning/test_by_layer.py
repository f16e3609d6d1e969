"""Memory by part: counted from the shapes by hand, and together the plan's own figure."""

import dataclasses
import io

import jax
import jax.numpy as jnp
from rich.console import Console

import jaxtrain as jt
from jaxtrain.experiment import Experiment
from jaxtrain.models import decoder
from jaxtrain.planning import by_layer, estimate
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.targets import parse_target
from tests.commands import refused

L, B, D, F = 6, 32, 16, 64


def make_experiment(block, *, remat=None, **optimizer):
    def init(rng):
        layers = {"mlp": {"w": jnp.zeros((L, D, F)), "v": jnp.zeros((L, F, D))}}
        return {"enter": jnp.zeros((4, D)), "blocks": layers, "leave": {"w": jnp.zeros((D, 8))}}

    stages = jt.Stages(
        lambda params, batch, rng: batch @ params["enter"],
        block,
        lambda params, x, batch: jnp.square(x @ params["leave"]["w"]).mean(),
        remat=remat,
    )
    return Experiment.of(
        name="toy",
        init_fn=init,
        loss_fn=jt.loss_from_stages(stages),
        stages=stages,
        optimizer=jt.make_optimizer("adamw", 1e-3, **optimizer),
        batch=jax.ShapeDtypeStruct((B, 4), jnp.float32),
        train_batches=None,
        steps=1,
        layout=jt.Layout.parse("data=2"),
    )


def named(layer, x, batch, rng):
    with jax.named_scope("mlp"):
        return x + jax.nn.sigmoid(x @ layer["mlp"]["w"]) @ layer["mlp"]["v"]


def checkpointed(layer, *, prevent_cse):
    return jax.checkpoint(layer, prevent_cse=prevent_cse)


def test_parts_have_their_own_memory_and_are_the_peak_with_the_rest():
    plan = plan_experiment(
        make_experiment(named, remat=checkpointed, freeze=("^leave",)), parse_target("cpu:2")
    )
    parts = {part.name: part for part in plan.parts}
    weights = 4 * L * 2 * D * F
    # Of all that a layer makes, its input alone is kept.
    assert parts["blocks/mlp"] == by_layer.Part("blocks/mlp", L, weights, 2 * weights, weights, 0)
    assert parts["blocks"] == by_layer.Part("blocks", L, kept=4 * L * (B // 2) * D)
    assert parts["enter"] == by_layer.Part("enter", 0, 4 * 4 * D, 2 * 4 * 4 * D, 4 * 4 * D)
    leave = 4 * 8 * D
    assert dataclasses.replace(parts["leave"], optimizer_state=0) == by_layer.Part(
        "leave", 0, leave
    )
    memory = plan.memory
    assert sum(part.parameters for part in plan.parts) == memory.parameters
    assert sum(part.optimizer_state for part in plan.parts) == memory.optimizer_state
    assert sum(part.kept for part in plan.parts) == memory.activations
    besides = by_layer.besides(plan.parts, memory)
    assert sum(part.total for part in plan.parts) + sum(besides.values()) == memory.peak
    console = Console(file=io.StringIO(), width=100)
    console.print(by_layer.table(plan.parts, memory))
    drawn = console.file.getvalue()
    assert "blocks/mlp" in drawn
    assert "…" not in drawn
    assert by_layer.parts_of(jnp.ones(2)) == ()


def test_what_a_layer_keeps_is_told_with_the_scope_that_makes_it():
    def kept(experiment):
        return dict(estimate.estimate(experiment, 2, kind="gpu").kept)

    # The sigmoid's result and its derivative, and the input of the first product.
    found = kept(make_experiment(named))
    assert found == {"blocks/mlp": 2 * 4 * L * (B // 2) * F, "blocks": 4 * L * (B // 2) * D}
    config = decoder.DecoderConfig(vocab_size=64, seq_len=16, layers=3, width=32, heads=2)
    rows = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    model = make_experiment(named).with_(
        init_fn=lambda rng: decoder.init(config, rng),
        loss_fn=decoder.loss_fn(config),
        stages=decoder.stages(config),
        batch={"tokens": rows, "targets": rows, "mask": rows.update(dtype=jnp.float32)},
        rules=jt.Rules(decoder.RULES),
    )
    found = kept(model)
    assert found.keys() == {"blocks", "blocks/attn", "blocks/mlp"}
    assert found["blocks/mlp"] >= 4 * 3 * (4 // 2) * 16 * config.block.mlp_width


def test_a_search_is_of_several_layouts(capsys):
    assert "--by-layer is of one layout" in refused(
        capsys, "plan", "experiments.gpt", "--target", "cpu:2", "--search", "--by-layer"
    )
