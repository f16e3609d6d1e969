"""What each kind of parallelism communicates, and nothing else: golden cases per mesh axis."""

import collections
import functools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.planning.hlo import read_program
from jaxtrain.planning.unexpected import unexpected_gathers
from jaxtrain.state import local_bytes
from jaxtrain.tree import named_leaves
from tests.planning import steps

compiled = functools.cache(steps.compile_gpt)


def test_data_parallelism_reduces_exactly_the_gradients():
    train, state, mesh = compiled(data=8)
    found = steps.collectives(train, mesh)
    assert {(c.kind, c.axes, c.group) for c in found} == {("all-reduce", ("data",), 8)}
    moved = collections.Counter()
    for c in found:
        for shape in steps.numbered(c.shapes):
            moved[shape] += c.executions
    expected = collections.Counter()
    for name, leaf in named_leaves(state.params).items():
        # The gradients of layers are reduced a layer at a time, inside the loop.
        layers, shape = (leaf.shape[0], leaf.shape[1:]) if "blocks" in name else (1, leaf.shape)
        expected[tuple(sorted(shape))] += layers
    assert moved - collections.Counter({(): moved[()]}) == expected
    large = sum(c.executions * c.payload for c in found)
    assert 0 <= large - local_bytes(state.params) < 64


def test_fsdp_gathers_every_parameter_and_reduces_its_gradient():
    train, state, mesh = compiled(fsdp=8)
    found = steps.collectives(train, mesh)
    assert {c.axes for c in found} == {("fsdp",)}
    assert {c.kind for c in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    gathered = collections.Counter()
    for c in found:
        if c.kind == "all-gather":
            for shape in steps.numbered(c.shapes):
                gathered[shape] += c.executions
    blocks = state.params["blocks"]
    kernels = [leaf for leaf in jax.tree.leaves(blocks) if leaf.ndim == 3]
    wanted = collections.Counter()
    for leaf in kernels:
        # Once forward and once backward, a layer at a time.
        wanted[tuple(sorted(leaf.shape[1:]))] += 2 * steps.LAYERS
    wanted[tuple(sorted(state.params["embed"]["tokens"].shape))] += 1
    wanted[tuple(sorted(state.params["head"]["kernel"].shape))] += 2
    assert set(wanted) <= set(gathered)
    assert gathered[(64, 64)] == wanted[(64, 64)]
    assert gathered[(64, 176)] == wanted[(64, 176)]


def test_zero_3_gathers_parameters_over_data():
    train, _, mesh = compiled(data=8, zero=3)
    found = steps.collectives(train, mesh)
    assert {c.axes for c in found} == {("data",)}
    gathered = {s for c in found if c.kind == "all-gather" for s in steps.numbered(c.shapes)}
    assert {(64, 64), (64, 176), (64, 320)} <= gathered


def test_the_residual_stream_is_split_over_tensor_between_branches():
    train, _, mesh = compiled(tensor=8)
    program = read_program(train.compiled.as_text(), mesh)
    B, T, D = steps.ROWS, steps.CONFIG.seq_len, 64
    # (The gradients of what several products read are reduced together, and with the norm's sum.)
    size = 4 * B * T * D
    moved = [c for c in program.collectives if c.payload >= size and c.payload % size <= 4]
    assert {c.axes for c in moved} == {("tensor",)}
    executions = collections.Counter()
    for c in moved:
        executions[c.kind] += c.executions
    # Both branches gather what they read, and once more for their weights' gradients, which nothing
    # kept; and the cotangent of what they add. The head gathers, and the table's gradient does.
    # Sums are two each way, with those of the table and the head. That each device keeps its part
    # alone makes them reduce-scatters on TPUs and GPUs; XLA's CPU compiler slices all-reduces, but
    # for the table's, which is asked for by name.
    layers = steps.LAYERS
    wanted = {"all-gather": 6 * layers + 2, "all-reduce": 4 * layers + 1, "reduce-scatter": 1}
    assert executions == wanted
    # What layers keep has a part of the sequence, of the heads or of the hidden features.
    stacked = set(re.findall(rf"f32\[({layers},[0-9,]*)\]", train.compiled.as_text()))
    assert f"{layers},{B},{T // 8},{D}" in stacked
    assert not {f"{layers},{B},{T},{D}", f"{layers},{B * T},{D}"} & stacked


@pytest.mark.slow
def test_tensor_parallelism_reduces_activations_four_times_per_layer():
    train, _, mesh = steps.compile_gpt(logical={"residual": "context"}, tensor=8)
    found = steps.collectives(train, mesh)
    assert {c.axes for c in found} == {("tensor",)}
    # Forward: after attention and after the MLP. Backward: before the MLP and before attention.
    in_layers = [c for c in found if c.executions == steps.LAYERS]
    assert [c.kind for c in in_layers] == ["all-reduce"] * 4
    activations = (steps.CONFIG.seq_len * steps.ROWS, 64)
    unfolded = (steps.CONFIG.seq_len, steps.ROWS, 64)
    for c in in_layers:
        assert set(steps.numbered(c.shapes)) <= {
            tuple(sorted(activations)),
            tuple(sorted(unfolded)),
        }
    outside = [c for c in found if c.executions != steps.LAYERS]
    assert all(c.executions == 1 and c.kind == "all-reduce" for c in outside)


@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 8}, {"tensor": 8}, {"data": 8, "zero": 3}])
def test_nothing_is_gathered_that_should_not_be(axes):
    train, state, mesh = compiled(**axes)
    assert jt.explain(train, mesh, params=state.params).warnings == ()


@pytest.mark.parametrize("axis", ["tensor", "fsdp"])
def test_a_hidden_gather_of_a_whole_parameter_is_reported(axis):
    # P() on the stack of all layers brings it together on every device.
    change = steps.with_constraint(P(), "blocks", "mlp", "down", "kernel")
    train, state, mesh = steps.compile_gpt(loss=change, **{axis: 8})
    program = read_program(train.compiled.as_text(), mesh)
    found = unexpected_gathers(program, state.params, mesh, layers="blocks")
    expected = f"parameter 'blocks/mlp/down/kernel' is gathered whole along {axis}: 1 times a step"
    assert [w for w in found if w.startswith(expected)], found
    # Without the word that this is a stack of layers, fsdp may well gather it.
    assert len(jt.explain(train, mesh, params=state.params).warnings) == (axis == "tensor")
