"""Mistakes of the first hour are refused, or told, where they are made."""

import pathlib
import re
import tomllib

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxtrain as jt
from tests.commands import run

ROOT = pathlib.Path(__file__).parents[1]


def test_the_version_is_told(capsys):
    assert run(capsys, "--version")[:2] == (0, f"jaxtrain {jt.__version__}\n")
    with (ROOT / "pyproject.toml").open("rb") as file:
        dynamic = tomllib.load(file)["tool"]["setuptools"]["dynamic"]
    assert dynamic == {"version": {"attr": "jaxtrain.__version__"}}


def test_an_unknown_axis_of_a_mesh_names_those_that_are():
    with pytest.raises(TypeError, match=r"no axis 'model', only .*data, fsdp.*tensor"):
        jt.make_mesh(model=2)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))


def test_model_state_that_nobody_asked_for_is_refused_at_once():
    init_fn, _ = jt.from_linen(Net(), jnp.ones((4, 2)), has_model_state=True)
    with pytest.raises(ValueError, match="returns model state too: pass has_model_state=True"):
        jt.init_state(init_fn, optax.sgd(0.1), jax.random.key(0))


def test_a_linen_module_that_is_not_told_of_training_says_so():
    x = jnp.ones((4, 2))
    init_fn, apply = jt.from_linen(Net(), x, has_model_state=True)
    params, kept = init_fn(jax.random.key(0))
    with pytest.warns(UserWarning, match=r"Net takes train= and is trained with its default"):
        apply(params, kept, x, rng=jax.random.key(1))
    apply(params, kept, x, rng=None)
    apply(params, kept, x, rng=jax.random.key(1), train=True)
    _, apply = jt.from_linen(Net(), x, training={"train": True}, has_model_state=True)
    apply(params, kept, x, rng=jax.random.key(1))


def test_a_flax_block_becomes_a_stack():
    text = (ROOT / "jaxtrain/engines/README.md").read_text()
    names = {"nn": nn, "jax": jax, "jnp": jnp, "rng": jax.random.key(0)}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    stages = jt.Stages(
        lambda params, batch, rng: batch["x"],
        names["run_block"],
        lambda params, x, batch: jt.WeightedLoss(x.sum(), jnp.float32(1)),
    )
    x = jnp.ones((2, 32))
    loss = jt.loss_from_stages(stages)({"blocks": names["layers"]}, {"x": x}, None)
    for i in range(8):
        x = x @ names["layers"]["kernel"][i] + names["layers"]["bias"][i]
    assert float(loss.total) == pytest.approx(float(x.sum()), rel=1e-4)
