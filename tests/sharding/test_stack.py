"""Parameters stacked by layer, in natural order and cut for a pipeline."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.models import decoder
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.sharding.stack import LayerOrder, StackedLeaf
from jaxtrain.tree import LayerGroup, named_leaves


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
    with pytest.raises(ValueError, match="`virtual` is 0: a pipeline needs at least 1"):
        jt.Stack(virtual=0)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_the_state_of_virtual_stages_is_the_natural_one_cut(name):
    """For every optimizer: same paths, and shapes that differ by [V, L / V] for [L] alone."""
    model = decoder.DecoderConfig(vocab_size=257, seq_len=8, layers=4, width=256, heads=2)
    mesh = jt.make_mesh(pipe=2, devices=jax.devices()[:2])

    def shapes(stack):
        optimizer = jt.make_optimizer(name, 0.1, stacked=stack.axes, accumulate=2)
        params = jax.eval_shape(lambda: stack.cut(decoder.init(model, jax.random.key(0))))
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
    assert found["blocks"]["w"] == StackedLeaf(params["blocks"]["w"], LayerOrder((2, 2)))
    assert found["blocks"]["w"].shape == (4, 6)
    assert found["blocks"]["w"].dtype == np.float64


# ---- stages of different numbers of layers

UNEVEN = [jt.Stack(counts=(3, 2, 0)), jt.Stack(virtual=2, counts=(2, 1, 0, 2))]


def test_a_counter_of_two_stacks_is_told_by_the_layers_of_its_own():
    stack = jt.Stack(("encoder", "decoder"), counts=(3, 1, 2, 3))  # both are cut into 2 x 3 rows
    params = {"encoder": {"w": np.ones((4, 3, 3))}, "decoder": {"w": np.ones((5, 3, 3))}}
    params = stack.cut(params)
    optimizer = jt.make_optimizer("adafactor", 0.1, stacked=stack.axes)
    found = named_leaves(stack.in_order(state_of(params, jax.device_get(optimizer.init(params)))))
    layers = {name: leaf.shape[0] for name, leaf in found.items() if isinstance(leaf, StackedLeaf)}
    for key, count in (("encoder", 4), ("decoder", 5)):
        mine = {n: x for n, x in layers.items() if f"{LayerGroup(count)}/" in n or key in n}
        assert any(name.endswith("count") for name in mine)
        assert set(mine.values()) == {count}


@pytest.mark.parametrize("stack", UNEVEN, ids=["one", "two"])
def test_uneven_stages_are_padded_with_zeros_that_natural_order_leaves_out(stack):
    params = {"blocks": {"w": 1 + np.arange(10.0).reshape(5, 2)}, "out": np.ones(3)}
    cut = stack.cut(params)
    rows = np.reshape(cut["blocks"]["w"], (len(stack.counts), -1, 2))
    assert [np.count_nonzero(stage.any(-1)) for stage in rows] == list(stack.counts)
    assert all(stage[:count].all() for stage, count in zip(rows, stack.counts, strict=True))
    jax.tree.map(np.testing.assert_array_equal, stack.natural(cut), params)


def test_counts_must_place_every_layer():
    params = {"blocks": {"w": np.ones((8, 2))}}
    with pytest.raises(ValueError, match=r"8 layers and counts \(4, 3\) place 7: give counts with"):
        jt.Stack(counts=(4, 3)).cut(params)
    for wrong in ({"counts": (4, -1)}, {"counts": (0, 0)}, {"counts": (4, 2, 2), "virtual": 2}):
        with pytest.raises(ValueError, match="give the number of layers of every global stage"):
            jt.Stack(**wrong)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_no_optimizer_sees_the_padding(name):
    """Updates and state are those of natural order, at the same paths, and padding stays zero."""
    normal = functools.partial(np.random.default_rng(0).normal, size=(5, 6, 4))
    params = {"blocks": {"w": normal(), "norm": {"scale": normal()[..., 0]}}, "out": normal()[0]}
    params = jax.tree.map(np.float32, params)
    grads = jax.tree.map(lambda p: np.float32(p[::-1] * 0.1), params)
    factors = [("^blocks/", 0.5 ** np.arange(5))]

    def updated(stack):
        optimizer = jt.make_optimizer(
            name, 0.1, weight_decay=0.1, clip_norm=0.5, stacked=stack.axes, rate_multipliers=factors
        )

        @jax.jit
        def run(params, grads):
            state = optimizer.init(params)
            for _ in range(2):
                updates, state = optimizer.update(grads, state, params)
                params = jax.tree.map(lambda p, u: p + u, params, updates)
            return params, state

        return state_of(*run(stack.cut(params), stack.cut(grads)))

    stack, mesh = UNEVEN[1], jt.make_mesh(devices=jax.devices()[:1])
    expected, state = named_leaves(updated(jt.Stack())), updated(stack)
    rows = np.reshape(state.params["blocks"]["w"], (-1, 6, 4))
    assert not np.delete(rows, stack.places, axis=0).any()
    state = dataclasses.replace(state, step=None, skipped=None)
    found = named_leaves(stack.in_order(placed(state, mesh)))
    assert found.keys() == expected.keys() - {"step", "skipped"}
    for path, leaf in found.items():
        leaf = leaf.order.join(leaf.array) if isinstance(leaf, StackedLeaf) else leaf
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-7, err_msg=path)


def test_a_padded_state_in_natural_order_is_itself():
    stack = jt.Stack(virtual=2, counts=(2, 1, 0, 2))
    layers = np.arange(5 * 8.0).reshape(5, 8)
    params = stack.cut({"blocks": {"w": layers}})
    found = stack.in_order(state_of(params)).params["blocks"]["w"]
    assert found.array is params["blocks"]["w"]
    assert found.shape == (5, 8)
    assert found.order.layers.tolist() == [[0, 1, 2, -1], [-1, -1, 3, 4]]
    np.testing.assert_array_equal(found.order.join(found.array), layers)
