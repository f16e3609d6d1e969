"""What rounding loses, counted in the step, against counts in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.build import make_experiment_mesh, make_state, natural
from jaxtrain.models import decoder
from jaxtrain.ops import scaled
from jaxtrain.ops.linear import matmul
from jaxtrain.tree import is_count, named_leaves
from tests import small

RECIPES = {
    "fp8": (ml_dtypes.float8_e4m3fn, 464),
    "fp8_tensor": (ml_dtypes.float8_e4m3fn, 464),
    "mxfp8": (ml_dtypes.float8_e4m3fn, 464),
    "nvfp4": (ml_dtypes.float4_e2m1fn, 7),
}


def draw(shape, seed, spread=4.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype("f")


def count(x_MK, recipe):
    """Saturated, flushed and all, by the definition of the formats."""
    dtype, beyond = RECIPES[recipe]
    top = np.float32(ml_dtypes.finfo(dtype).max)
    x_MK = np.asarray(x_MK, "f")
    if recipe in ("fp8", "fp8_tensor"):
        scale = np.abs(x_MK).max(1 if recipe == "fp8" else None, keepdims=True) / top
        units, used = x_MK / scale, np.ones_like(x_MK, bool)
    else:
        size = {"mxfp8": 32, "nvfp4": 16}[recipe]
        blocks = np.abs(x_MK).reshape(len(x_MK), -1, size).max(2).repeat(size, 1)
        if recipe == "mxfp8":
            scale = 2.0 ** np.ceil(np.log2(blocks.astype(float) / 448))
            units, used = x_MK / scale, np.ones_like(x_MK, bool)
        else:
            tensor = np.abs(x_MK).max() / (top * np.float32(448))
            own = (blocks / top / tensor).astype(ml_dtypes.float8_e4m3fn).astype("f")
            used = own != 0
            units = x_MK / (np.where(used, own, 1) * tensor)
    grid = np.abs(units).clip(max=float(top))
    zero = (grid.astype(dtype).astype("f") == 0) | ~used
    if recipe == "nvfp4":  # to the even one of two, as the others
        zero = (grid <= 0.25) | ~used
    return [((np.abs(units) >= beyond) & ~zero).sum(), (zero & (x_MK != 0)).sum(), x_MK.size]


@pytest.mark.parametrize("recipe", RECIPES)
def test_counts_are_those_of_numpy(recipe):
    x = draw((24, 64), 0)
    x[3, 5:9] = 0  # which nothing is lost of
    if recipe == "nvfp4":  # a block whose scale is subnormal, and rounded down
        x[5, :16] = np.abs(x).max() / 448 * 2.0**-9 * 1.45
    found = np.asarray(jax.jit(scaled.lost, static_argnums=1)(x, scaled.RECIPES[recipe].y[0]))
    assert found.tolist() == count(x, recipe)
    assert 0 < found[1] < x.size
    assert (found[0] > 0) == (recipe == "nvfp4")  # the others' scales leave nothing beyond


def loss_fn(params, batch, rng):
    y = matmul(batch["x"], params["mlp"]["kernel"])
    mask = batch["mask"]
    return jt.WeightedLoss((y * batch["dy"] * mask[:, None]).sum(), mask.sum())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_reports_the_share_of_all_rows_whatever_a_microbatch_weighs(accumulate):
    batch = {"x": draw((16, 32), 1), "dy": draw((16, 32), 2), "mask": np.arange(16.0, dtype="f")}
    kernel, policy = draw((32, 32), 3), jt.Policy(recipe="fp8", count_rounding=True)
    optimizer = jt.make_optimizer("adamw", 0.1, weight_decay=0.1)
    init = lambda rng: {"mlp": {"kernel": jnp.asarray(kernel)}}  # noqa: E731
    states, told = [], []
    for own in (policy, jt.Policy(recipe="fp8")):
        state = jt.init_state(init, optimizer, jax.random.key(0), policy=own)
        how = {"policy": own, "accumulate": accumulate, "norms": True}
        step = jt.build_train_step(jt.row_wise(loss_fn), optimizer, **how)
        state, metrics = jax.jit(step)(state, batch)
        states.append(named_leaves(state.params))
        told.append(metrics)
    counted, plain = told
    for operand, x in (
        ("activations", batch["x"]),
        ("weights", kernel.T),
        ("gradients", batch["dy"] * batch["mask"][:, None]),  # of row 0 nothing but zeros
    ):
        expected = count(np.where(np.abs(x).max(1, keepdims=True) == 0, 1, x), "fp8")
        share = counted.pop(f"flushed/{operand}/mlp/kernel")
        np.testing.assert_allclose(share, expected[1] / expected[2], rtol=1e-6)
        assert counted.pop(f"saturated/{operand}/mlp/kernel") == 0
    # Nothing else has changed, and what stands for counts has not moved.
    assert counted.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(counted[name], value, rtol=1e-6, err_msg=name)
    assert not states[0].pop("mlp/kernel/rounding_counts").any()
    np.testing.assert_allclose(states[0]["mlp/kernel"], states[1]["mlp/kernel"], rtol=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pipe": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 4, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"pipe": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("recipe", ["fp8", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_shares_are_those_of_one_device_by_layer_on_every_mesh(recipe, layout):
    config = decoder.DecoderConfig(
        vocab_size=64, seq_len=16, layers=4, width=32, heads=2, mlp="swiglu"
    )
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17))
    mask = np.random.default_rng(1).random((16, 16)) < np.linspace(0.2, 1, 16)[:, None]
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask.astype("f")}
    batch |= {"segments": np.ones((16, 16), int), "positions": np.tile(np.arange(16), (16, 1))}
    layers = np.exp(np.arange(4.0))[:, None, None]  # each loses another share

    def init(rng):
        params = decoder.init(config, rng)
        down = params["blocks"]["mlp"]["down"]
        spread = jnp.exp(layers * jax.random.normal(rng, (4, *down["kernel"].shape[1:])))
        down["kernel"] *= spread / spread.max((1, 2), keepdims=True)
        return params

    policy = jt.Policy(recipe=recipe, count_rounding=True)
    optimizer, found = jt.make_optimizer("adamw", 0.1), []
    devices = jax.devices()[: int(np.prod(list(layout.values())))]
    for sizes, own in (({}, devices[:1]), (layout, devices)):
        mesh = jt.make_mesh(**sizes, devices=own)
        stages, cut = decoder.stages(config), lambda params: params
        if mesh.shape["pipe"] > 1:
            stacked = jt.Stack(virtual=2)
            stages, cut = dataclasses.replace(stages, stacked=stacked), stacked.cut
        rules = jt.Rules(decoder.RULES, stacked=stages.stacked)
        given = {"mesh": mesh, "rules": rules}
        make = lambda rng, cut=cut: cut(init(rng))  # noqa: E731
        state = jt.init_state(make, optimizer, jax.random.key(0), policy=policy, **given)
        if mesh.shape["pipe"] > 1:
            how = {"mesh": mesh, "microbatches": 4, "policy": policy, "schedule": "interleaved"}
            step = jt.build_update(jt.pipeline(stages, **how), optimizer)
        else:
            loss = jt.loss_from_stages(stages)
            step = jt.build_train_step(loss, optimizer, policy=policy, accumulate=2)
        state, metrics = jt.compile_step(step, state, batch, **given)(state, batch)
        found.append({n: np.asarray(x) for n, x in metrics.items() if n.startswith("flushed")})
    alone, split = found
    assert [x.shape for x in split.values()] == [(4,)] * 3
    assert np.ptp(alone["flushed/weights/blocks"]) > 0.05
    for name, expected in alone.items():  # of gradients, a value in thousands falls otherwise
        exact = "gradients" not in name
        np.testing.assert_allclose(
            split[name], expected, atol=1e-7 if exact else 2e-3, err_msg=name
        )


def test_what_cannot_count_is_refused_and_generation_has_the_plain_kernels():
    with pytest.raises(ValueError, match="`count_rounding` is True: the precision rounds no"):
        jt.Policy(count_rounding=True)
    policy = jt.Policy(recipe="fp8", count_rounding=True)
    with pytest.raises(ValueError, match="count_rounding` is True and the step has an engine of"):
        jt.build_train_step(loss_fn, None, policy=policy, engine=lambda loss: loss)
    with pytest.raises(ValueError, match="no place for counts: give init_state the policy"):
        jax.eval_shape(policy.cast_to_compute, {"mlp": {"kernel": np.ones((2, 2), "f")}})
    config = small.Config(precision="fp8", count_rounding=True, recipe_in="kernel")
    experiment = small.build(config)
    state = make_state(experiment, make_experiment_mesh(experiment, jax.devices()[:1]))
    kept = named_leaves(state.params)
    assert len(list(filter(is_count, kept))) == 2
    plain = named_leaves(natural(experiment, state).params)
    assert plain.keys() == {name for name in kept if not is_count(name)}


def test_kernels_of_a_layer_are_counted_together_however_many_it_stacks():
    rng = np.random.default_rng(0)
    one, several = rng.integers(1, 9, (4, 3, 3)), rng.integers(1, 9, (4, 2, 3, 3))
    counts = {"blocks/a/rounding_counts": one, "blocks/b/rounding_counts": several}
    found = scaled.shares_lost({n: jnp.asarray(x, "f") for n, x in counts.items()}, jt.Stack())
    both = one + several.sum(1)
    for c, kind in enumerate(("saturated", "flushed")):
        for k, operand in enumerate(("activations", "weights", "gradients")):
            expected = both[:, k, c] / both[:, k, 2]
            np.testing.assert_allclose(found[f"{kind}/{operand}/blocks"], expected, rtol=1e-6)


def test_counts_lie_by_themselves_whatever_rules_say_of_their_kernels():
    policy, mesh = jt.Policy(recipe="fp8", count_rounding=True), jt.make_mesh(fsdp=8)
    init = lambda rng: {"blocks": {"mlp": {"kernel": jnp.ones((3, 16, 8))}}}  # noqa: E731
    rules = [("kernel", ("layers", "embed", None))]
    given = {"mesh": mesh, "rules": rules, "policy": policy}
    params = jt.abstract_state(init, jt.make_optimizer("sgd", 0.1), **given).params
    specs = {name: x.sharding.spec for name, x in named_leaves(params).items()}
    assert specs.pop("blocks/mlp/kernel/rounding_counts") == P()
    assert specs == {"blocks/mlp/kernel": P(None, "fsdp", None)}
