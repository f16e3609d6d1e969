"""Rules, the automatic FSDP rule, ZeRO, and state that follows its parameter by path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.parallel.sharding import param_shardings
from jaxtrain.tree import named_leaves

RULES = [
    (r"blocks/.*/kernel$", ("layers", "embed", "heads")),
    (r"^embed/tokens$", ("vocab", "embed")),
]


def params():
    return {
        "blocks": {"q": {"kernel": jnp.ones((4, 16, 32)), "bias": jnp.ones((4, 32))}},
        "embed": {"tokens": jnp.ones((64, 16))},
        "odd": jnp.ones(3),
    }


def specs(tree):
    return {name: sharding.spec for name, sharding in named_leaves(tree).items()}


def test_rules_place_by_path_and_the_rest_is_fsdp():
    found = specs(param_shardings(params(), jt.make_mesh(data=2, fsdp=2, tensor=2), RULES))
    assert found == {
        "blocks/q/bias": P(None, "fsdp"),
        "blocks/q/kernel": P(None, "fsdp", "tensor"),
        "embed/tokens": P("tensor", "fsdp"),
        "odd": P(),
    }


def test_the_first_matching_rule_decides_and_the_table_of_axes_can_be_changed():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    first = [(r"^embed", (None, "tensor")), *RULES]
    assert specs(param_shardings(params(), mesh, first))["embed/tokens"] == P(None, "tensor")
    rules = jt.Rules(RULES, axes={"vocab": None, "embed": ("fsdp", "tensor")})
    assert specs(param_shardings(params(), mesh, rules))["embed/tokens"] == P(
        None, ("fsdp", "tensor")
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_says_what_is_split_over_data(zero):
    mesh = jt.make_mesh(data=8)
    state = jt.init_state(
        lambda rng: params(), optax.adam(1e-3), jax.random.key(0), mesh=mesh, zero=zero
    )

    def split(tree):
        return specs(jax.tree.map(lambda x: x.sharding, tree))

    grads = specs(jt.gradient_shardings(state, zero=zero))
    over_data = {"blocks/q/kernel": P(None, None, "data"), "embed/tokens": P("data", None)}
    for name, spec in over_data.items():
        assert split(state.params)[name] == (spec if zero == 3 else P())
        assert grads[name] == (spec if zero >= 2 else P())
        assert split(state.opt_state)[f"0/mu/{name}"] == (spec if zero >= 1 else P())
    assert split(state.opt_state)["0/count"] == P()


def test_optimizer_state_follows_its_parameter_by_path_factored_moments_too():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    optimizer = optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=8), optax.trace(0.9))
    state = jt.init_state(
        lambda rng: params(), optimizer, jax.random.key(0), mesh=mesh, rules=RULES
    )
    found = specs(jax.tree.map(lambda x: x.sharding, state.opt_state))
    name = "blocks/q/kernel"
    trace = next(k for k in found if "trace" in k and k.endswith(name))
    row = next(k for k in found if "v_row" in k and k.endswith(name))
    assert found[trace] == P(None, "fsdp", "tensor")
    shape = named_leaves(state.opt_state)[row].shape
    assert shape == (4, 16)
    assert found[row] == P(None, "fsdp")


def test_the_state_is_born_in_its_place_with_the_same_bits_on_every_mesh():
    def init(rng):
        names = sorted(named_leaves(params()))
        keys = dict(zip(names, jax.random.split(rng, len(names)), strict=True))
        return jt.tree.map_named(lambda n, x: jax.random.normal(keys[n], x.shape), params())

    alone = jt.init_state(init, optax.adam(1e-3), jax.random.key(3))
    for axes in (
        {"data": 8},
        {"fsdp": 8},
        {"data": 2, "tensor": 4},
        {"data": 2, "fsdp": 2, "tensor": 2},
    ):
        rules = RULES if "tensor" in axes else None
        state = jt.init_state(
            init, optax.adam(1e-3), jax.random.key(3), mesh=jt.make_mesh(**axes), rules=rules
        )
        jax.tree.map(np.testing.assert_array_equal, state.params, alone.params)


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        (
            {"tensor": 8},
            [(r"kernel$", ("layers", "heads", "embed"))],
            r"'blocks/q/kernel' has shape \(4, 12, 768\): dimension 1 \(12\) is not divisible by "
            r"mesh axis 'tensor' of size 8; use a divisor of 12 or map 'heads' to None",
        ),
        (
            {"pipe": 8},
            [(r"kernel$", (None, "layers", "embed"))],
            r"dimension 1 \(12\) is not divisible by mesh axis 'pipe' of size 8; use pipe 6 or 12$",
        ),
        ({"fsdp": 8}, [(r"kernel$", ("embed",))], r"names 1 axes \('embed',\): name one axis, or"),
        (
            {"fsdp": 8},
            [(r"kernel$", ("a", "b", "c"))],
            "sharding axis 'a' is neither a logical axis",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused_before_compiling(axes, rules, message):
    tree = {"blocks": {"q": {"kernel": jax.ShapeDtypeStruct((4, 12, 768), jnp.float32)}}}
    with pytest.raises(ValueError, match=message):
        param_shardings(tree, jt.make_mesh(**axes), rules)


@pytest.mark.parametrize("axes", [{"tensor": 8}, {"fsdp": 8}])
def test_a_large_parameter_left_whole_is_an_error_that_names_it(axes):
    tree = {"blocks": {"w": jax.ShapeDtypeStruct((1025, 1027), jnp.float32)}}
    with pytest.raises(
        ValueError, match=r"'blocks/w' has shape \(1025, 1027\) and would be copied"
    ):
        param_shardings(tree, jt.make_mesh(**axes))


def test_describe_sharding_adds_up():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    state = jt.init_state(
        lambda rng: params(), optax.adam(1e-3), jax.random.key(0), mesh=mesh, rules=RULES
    )
    table = jt.describe_sharding(state)
    kernel = next(line for line in table.splitlines() if line.startswith("blocks/q/kernel"))
    assert kernel.split() == [
        "blocks/q/kernel",
        "4x16x32",
        "float32",
        "-,",
        "fsdp,",
        "tensor",
        "2,048",
    ]
    on_one = sum(
        s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards[:1]
    )
    totals = {
        line.rsplit(None, 1)[0].strip(): line.rsplit(None, 1)[1] for line in table.splitlines()
    }
    assert totals["parameters"] == f"{on_one:,}"
    assert totals["optimizer state"] == f"{2 * on_one + 4:,}"


def test_constrain_pins_activations_on_a_mesh_and_is_nothing_without_one():
    x = jnp.ones((8, 4, 6))
    assert jt.constrain(x, "batch", "sequence", "mlp") is x
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda x: jt.constrain(2 * x, "batch", "sequence", "mlp"))(x)
        assert pinned.sharding.spec == P(("data", "fsdp"), None, "tensor")
        uneven = jax.jit(lambda x: jt.constrain(2 * x, "batch", None, None))(jnp.ones((3, 4, 6)))
        assert uneven.shape == (3, 4, 6)
        with pytest.raises(ValueError, match=r"2 axis names .* for an array of rank 3"):
            jax.jit(lambda x: jt.constrain(x, "batch", None))(x)
