"""A wrong layout is named to the line: planted bugs, relations by definition, and silence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from experiments.planted import BUGS, look
from jaxtrain.compare import difference, parity
from jaxtrain.compare.difference import first_difference, one_device
from jaxtrain.compare.recording import record
from jaxtrain.compare.relations import relate
from jaxtrain.models import decoder
from tests.compare.noisy import experiment_of

# One of each way to be wrong: what each says of itself is in the table.
EVERY_DAY = {
    "loss_not_summed": "reduce_sum of float32[]: it leaves the shard_map as a partial sum",
    "summed_over_another_axis": "a partial sum over 'tensor', and the sum here is over 'data'",
    "mean_of_means": "a mean of means",
    "key_shared_by_shards": "a key is shared by the shards of 'data'",
    "no_sum_over_rows": "square of float32[4]: its operand is a partial sum over 'data'",
}


def mesh_of(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


@pytest.mark.parametrize("name", EVERY_DAY)
def test_a_planted_bug_is_named_to_the_line(name):
    row = look(name)
    assert row.named
    assert EVERY_DAY[name] in str(row.difference)


@pytest.mark.slow
def test_planted_bugs_are_named_and_what_is_right_is_not():
    rows = {name: look(name, right=True) for name in BUGS}
    assert len(rows) >= 16
    assert {name for name, row in rows.items() if not row.named} == set()
    assert {name for name, row in rows.items() if row.alarm} == set()


R = np.random.default_rng(0)
WHOLE = R.normal(size=(4, 6))
PARTS = R.normal(size=(4, 2, 4, 6))


@pytest.mark.parametrize(
    ("found", "expected", "kind", "axes"),
    [
        (np.broadcast_to(WHOLE, (4, 2, 4, 6)), WHOLE, "same", ()),
        (PARTS, PARTS.sum((0, 1)), "sum", ("a", "b")),
        (PARTS[:, :1].repeat(2, 1), PARTS[:, 0].sum(0), "sum", ("a",)),
        (PARTS, PARTS.mean((0, 1)), "mean", ("a", "b")),
        (PARTS, PARTS.max((0, 1)), "max", ("a", "b")),
        (np.broadcast_to(WHOLE / 4, (4, 2, 4, 6)), WHOLE, "share", ("a",)),
        (np.broadcast_to(WHOLE * 2, (4, 2, 4, 6)), WHOLE, "times", ()),
        (np.broadcast_to(WHOLE[::-1], (4, 2, 4, 6)), WHOLE, "order", ()),
        (PARTS, WHOLE, "none", ()),
        (np.broadcast_to(np.pad(WHOLE, ((0, 3), (0, 0))), (4, 2, 7, 6)), WHOLE, "padded", ()),
    ],
)
def test_relations_are_what_their_names_say(found, expected, kind, axes):
    relation = relate(found, expected, {"a": 4, "b": 2}, 1e-9)
    assert (relation.kind, relation.axes) == (kind, axes)
    if kind == "none":
        nearest = min(np.linalg.norm(part - expected) for part in PARTS.reshape(8, 4, 6))
        assert relation.error >= nearest / np.linalg.norm(expected)


def test_a_split_value_is_put_together_over_any_axes_in_any_order():
    whole = R.normal(size=(8, 6))
    rows = whole.reshape(2, 4, 1, 6).swapaxes(0, 1)  # split over b, and within that over a
    relation = relate(rows, whole, {"a": 4, "b": 2}, 1e-9)
    assert (relation.kind, relation.split) == ("same", ((0, ("b", "a")),))
    columns = np.stack(np.split(whole, 2, 1))
    relation = relate(columns, whole, {"b": 2}, 1e-9)
    assert (relation.kind, relation.split) == ("same", ((1, ("b",)),))
    assert relate(whole[0], whole, {}, 1e-9) is None  # of another rank


def test_values_in_loops_branches_and_maps_are_those_of_each_device_and_iteration():
    def local(x_ND):
        def step(total, x_D):
            odd = jax.lax.axis_index("data") % 2
            y_D = jax.lax.cond(odd == 1, lambda x: x * 3, lambda x: x + 1, x_D)
            return total + y_D.sum(), jnp.tanh(y_D)

        return jax.lax.scan(step, 0.0, x_ND)[0][None]

    mesh = mesh_of(data=4)
    x_ND = R.normal(size=(8, 3)).astype("f")
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    jaxpr = jax.make_jaxpr(on_mesh(local, check_vma=False))(x_ND)
    values, (result,), _ = record(jaxpr, [[x_ND]])
    by_name = {value.name: value for value in values}
    parts = x_ND.reshape(4, 2, 3)
    y = np.where(np.arange(4)[:, None, None] % 2 == 1, parts * 3, parts + 1)
    np.testing.assert_allclose(by_name["tanh"].data, np.tanh(y), rtol=1e-5)  # [devices, rows, D]
    assert (by_name["tanh"].axes, by_name["tanh"].loops) == ({"data": 4}, (2,))
    np.testing.assert_allclose(by_name["carry"].data[:, 1], y[:, 0].sum(-1), rtol=1e-5)
    (taken,) = [v for v in values if v.name == "mul" and v.taken]
    np.testing.assert_allclose(taken.data, parts * 3, rtol=1e-5)
    np.testing.assert_allclose(result.data, y.sum((1, 2)), rtol=1e-5)


def test_rounding_is_no_difference():
    """A sum that is zero except for rounding, made large as Adam would."""

    def step(x_N):
        if jax.sharding.get_abstract_mesh().size > 1:
            x_N = jax.lax.with_sharding_constraint(x_N, P("data"))
        noise = (x_N - x_N.mean()).sum()
        return x_N.sum(), noise / 1e-12

    x_N = (1 + np.random.default_rng(0).random(1000)).astype("f")
    noise = [jax.jit(step)(x_N)[1]]
    with jax.set_mesh(mesh := mesh_of(data=8)):
        noise.append(jax.jit(step)(x_N)[1])
    assert abs(noise[0] - noise[1]) > 0.1 * abs(noise[0])
    assert first_difference(step, x_N, mesh=mesh) is None


def test_a_step_that_keeps_its_mesh_is_compared_with_one_built_for_one_device():
    def build(mesh, factor):
        local = lambda x: jax.lax.psum(jnp.square(x).sum(), "data") * factor  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())

    mesh, x = mesh_of(data=2), R.normal(size=8).astype("f")
    built = lambda factor: first_difference(  # noqa: E731
        build(mesh, factor), x, mesh=mesh, reference=build(one_device(mesh), 1.0)
    )
    assert built(1.0) is None
    found = built(1.5)
    assert "a number in it is 1.5 here and 1 on one device" in str(found)
    assert found.line == build.__code__.co_firstlineno + 1


@pytest.mark.slow
def test_a_bug_in_a_pipeline_is_named_by_parity():
    def block(layer, x, batch, rng):
        stages = jax.sharding.get_abstract_mesh().shape.get("pipe", 1)
        return x + jnp.tanh(x @ layer["w"]) * (1 + 0.01 * (stages - 1))

    def head_loss(params, x, batch):
        return jt.WeightedLoss(jnp.square(x @ params["out"]).sum(), batch["mask"].sum())

    stages = jt.Stages(lambda params, batch, rng: jnp.tanh(batch["x"]), block, head_loss)
    init_fn = lambda rng: {  # noqa: E731
        "blocks": {"w": 0.3 * jax.random.normal(rng, (2, 4, 4))},
        "out": jnp.ones((4, 2)),
    }
    batch = {"x": R.normal(size=(8, 4)).astype("f"), "mask": np.ones(8, "f")}
    rules = [("^blocks/w", ("layers", None, None))]
    with pytest.raises(AssertionError, match="begins to differ") as error:
        jt.parity(
            init_fn,
            jt.loss_from_stages(stages),
            batch,
            stages=stages,
            rules=rules,
            layouts=["pipe=2"],
            pipeline={"microbatches": 2},
            steps=1,
            explain=True,
        )
    line = block.__code__.co_firstlineno + 2
    assert f"test_difference.py:{line}, mul of float32[4,4]" in str(error.value)
    assert "a number in it is 1.01 here and 1 on one device" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("layout", parity.LAYOUTS)
def test_nothing_is_said_of_a_layout_of_a_shipped_model(layout, monkeypatch):
    config = decoder.DecoderConfig(vocab_size=31, seq_len=8, layers=4, width=16, heads=4)
    tokens = R.integers(0, 31, (16, 8)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens, "mask": np.ones((16, 8), "f")}
    searched = []
    found = difference._Search.found
    monkeypatch.setattr(difference._Search, "found", lambda s: searched.append(s) or found(s))
    experiment = experiment_of(decoder, config, [batch] * 3)
    # Every layout is off by more than this.
    (comparison,) = parity.compare(experiment, layouts=[layout], steps=1, explain=-1.0)
    assert comparison.refusal is None
    assert searched
    assert comparison.difference is None
