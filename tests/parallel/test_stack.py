"""Parameters stacked by layer, in natural order and cut for an interleaved pipeline."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.models import gpt
from jaxtrain.parallel.sharding import param_shardings
from jaxtrain.parallel.stack import Cut
from jaxtrain.tree import named_leaves


def state_of(params, opt_state=None):
    return jt.TrainState(0, params, opt_state, None, None, None, 0)


def placed(tree, mesh, *spec):
    sharding = jax.NamedSharding(mesh, P(*spec))
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)


def test_a_cut_stack_joins_to_natural_order():
    params = {"blocks": {"w": np.arange(16.0).reshape(8, 2)}, "out": np.ones(3)}
    stack = jt.Stack(virtual=4)
    cut = stack.cut(params)
    assert cut["blocks"]["w"].shape == (4, 2, 2)
    jax.tree.map(np.testing.assert_array_equal, stack.natural(cut), params)
    assert named_leaves(jt.Stack().cut(params)) == named_leaves(params)
    with pytest.raises(ValueError, match="8 layers, not divisible by virtual=3: use a divisor of"):
        jt.Stack(virtual=3).cut(params)
    with pytest.raises(ValueError, match="virtual is 0: a pipeline needs at least 1"):
        jt.Stack(virtual=0)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_the_state_of_virtual_stages_is_the_natural_one_cut(name):
    """For every optimizer: same paths, and shapes that differ by [V, L / V] for [L] alone."""
    model = gpt.GPTConfig(vocab_size=257, seq_len=8, layers=4, width=256, heads=2)
    mesh = jt.make_mesh(pipe=2, devices=jax.devices()[:2])

    def shapes(stack):
        optimizer = jt.make_optimizer(name, 0.1, stacked=stack.axes, accumulate=2)
        params = jax.eval_shape(lambda: stack.cut(gpt.init(model, jax.random.key(0))))
        state = state_of(params, jax.eval_shape(optimizer.init, params))
        whole = jax.NamedSharding(mesh, P())
        arrays = dataclasses.replace(state, step=None, skipped=None)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), arrays
        )

    def named(tree):
        return {path: (leaf.shape, leaf.dtype) for path, leaf in named_leaves(tree).items()}

    natural = named(shapes(jt.Stack()))
    for stack in (jt.Stack(virtual=2), jt.Stack(virtual=4)):
        assert named(stack.in_order(shapes(stack))) == natural


def test_the_stack_may_be_one_array_under_its_key():
    mesh, stack = jt.make_mesh(pipe=2, devices=jax.devices()[:2]), jt.Stack(virtual=2)
    rules = jt.Rules(stacked=stack)
    params = stack.cut({"blocks": np.ones((4, 3, 3)), "blocks_too": np.ones((2, 2, 3))})
    assert param_shardings(params, mesh, rules)["blocks"].spec == P(None, "pipe")
    optimizer = jt.make_optimizer("lamb", 0.1, stacked=stack.axes)
    state = state_of(params, optimizer.init(params))
    state = placed(dataclasses.replace(state, step=None, skipped=None), mesh)
    found = {name: leaf.shape for name, leaf in named_leaves(stack.in_order(state)).items()}
    assert {s for n, s in found.items() if n.endswith("blocks")} == {(4, 3, 3)}
    assert {s for n, s in found.items() if n.endswith("too")} == {(2, 2, 3)}


def test_leaves_that_only_look_stacked_stay_as_they_are():
    mesh, stack = jt.make_mesh(pipe=2, devices=jax.devices()[:2]), jt.Stack(virtual=2)
    params = {
        "blocks": {"w": np.zeros((2, 3, 4))},
        "encoder": {"blocks": {"w": np.zeros((2, 3, 4))}},  # of another model's own
    }
    # Of the moments of a stacked parameter one has no layers, though V numbers.
    opt_state = {"mu": params, "factor": {"blocks": {"w": np.zeros((2, 4))}}}
    state = placed(dataclasses.replace(state_of(params, opt_state), step=None, skipped=None), mesh)
    found = {name: leaf.shape for name, leaf in named_leaves(stack.in_order(state)).items()}
    assert found == {
        "params/blocks/w": (6, 4),
        "params/encoder/blocks/w": (2, 3, 4),
        "opt_state/mu/blocks/w": (6, 4),
        "opt_state/mu/encoder/blocks/w": (2, 3, 4),
        "opt_state/factor/blocks/w": (2, 4),
    }


def test_natural_order_copies_nothing():
    stack = jt.Stack(virtual=2)
    params = {"blocks": {"w": np.arange(24.0).reshape(2, 2, 6)}, "out": np.ones(8)}
    found = stack.in_order(state_of(params)).params
    assert found["out"] is params["out"]
    assert found["blocks"]["w"] == Cut(params["blocks"]["w"], (4, 6))
    assert found["blocks"]["w"].dtype == np.float64
