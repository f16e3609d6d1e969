"""Rules, the automatic FSDP rule, ZeRO, and state that follows its parameter by path."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.models import decoder
from jaxtrain.sharding import placement
from jaxtrain.sharding.placement import tracing_on
from jaxtrain.sharding.rules import OptionalRules, param_shardings, ruled_shardings, state_shardings
from jaxtrain.sharding.specs import spread
from jaxtrain.tree import named_leaves
from tests import problems

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
    twice = [("^embed", ("embed", "embed")), *RULES]  # which an axis can split once
    assert specs(param_shardings(params(), mesh, twice))["embed/tokens"] == P("fsdp", None)
    rules = jt.Rules(RULES, axes={"vocab": None, "embed": ("fsdp", "tensor")})
    assert specs(param_shardings(params(), mesh, rules))["embed/tokens"] == P(
        None, ("fsdp", "tensor")
    )


def test_what_an_axis_has_split_counts_by_its_parts_for_the_next():
    mesh = jt.make_mesh(data=2, fsdp=4)
    # Of (8, 4) each device has (2, 4); of (4, 3) it has (1, 3), which nothing divides.
    assert spread(P("fsdp"), (8, 4), mesh, ("data",)) == P("fsdp", "data")
    assert spread(P("fsdp"), (4, 3), mesh, ("data",)) == P("fsdp")


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


@pytest.mark.parametrize("shape", [(16, 16), (4, 16, 16), (16, 16, 16)])
def test_both_factors_of_a_square_kernel_follow_the_dimension_that_they_have(shape):
    """What a factor holds is asked of the optimizer: a gradient that varies along one dimension."""
    mesh = jt.make_mesh(pipe=2, fsdp=2, tensor=2)
    names = ("layers", "embed", "heads")[-len(shape) :]
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    init = lambda rng: {"w": jnp.ones(shape)}  # noqa: E731
    rules = [("w", names)]
    state = jt.init_state(init, optimizer, jax.random.key(0), mesh=mesh, rules=rules)
    carried = {name: jt.Rules().mesh_axes(name, mesh)[0] for name in names}
    leaves = {n.split("/")[-2]: n for n in named_leaves(state.opt_state) if "v_" in n}
    expected = {factor: [] for factor in leaves}
    for dimension, name in enumerate(names):
        grad = jnp.arange(1.0, 17)[: shape[dimension]]
        grad = grad.reshape([-1 if d == dimension else 1 for d in range(len(shape))])
        grads = {"w": jnp.broadcast_to(grad, shape)}
        _, after = jax.jit(optimizer.update)(grads, optimizer.init(init(None)), init(None))
        for factor, path in leaves.items():
            value = named_leaves(after)[path]
            spread = [float(jnp.ptp(value, axis).max()) for axis in range(value.ndim)]
            if max(spread) > 1e-3:
                expected[factor].append((int(np.argmax(spread)), carried[name]))
    assert sorted(expected) == ["v_col", "v_row"]
    for factor, axes in expected.items():
        assert len(axes) == len(shape) - 1
        found = named_leaves(state.opt_state)[leaves[factor]].sharding.spec
        assert tuple(found) == tuple(axis for _, axis in sorted(axes)), factor


def test_a_factor_of_unknown_meaning_is_split_only_as_every_meaning_allows():
    mesh = jt.make_mesh(pipe=2, fsdp=2, tensor=2)
    params = {"w": jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)}
    shardings = param_shardings(params, mesh, [("w", ("layers", "embed", "heads"))])
    state = {"rows": {"w": jax.ShapeDtypeStruct((4, 16), jnp.float32)}}
    found = state_shardings(state, params, shardings, mesh)
    assert found["rows"]["w"].spec == P("pipe", None)


def factors():
    """Shampoo's left factor per layer, [L, m, m], and a table that is no parameter's."""

    def init(params):
        w = params["blocks"]["q"]["kernel"]
        return {
            "left": {"w": jnp.zeros((*w.shape[:2], w.shape[1]))},
            "table": jnp.zeros((1024, 1024)),
        }

    def update(grads, state, params=None):
        g = grads["blocks"]["q"]["kernel"]
        left = state["left"]["w"] + jnp.einsum("lmi,lni->lmn", g, g)
        return grads, {"left": {"w": left}, "table": state["table"] + jnp.abs(g).sum()}

    return optax.GradientTransformation(init, update)


def test_state_that_follows_no_parameter_lies_by_rules_of_its_own():
    optimizer = optax.chain(factors(), optax.adam(1e-3))
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)

    def loss_fn(params, x, rng):
        return jnp.square(jnp.tanh(x @ params["blocks"]["q"]["kernel"].sum(0))).mean()

    def train(mesh, rules):
        state = jt.init_state(
            lambda rng: params(), optimizer, jax.random.key(0), mesh=mesh, rules=rules
        )
        train = jt.compile_step(jt.build_train_step(loss_fn, optimizer), state, x, mesh=mesh)
        return train(state, x)[0]

    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    with pytest.raises(ValueError, match=r"'opt_state/0/table' .* rule for it \(of Rules\(state="):
        train(mesh, RULES)
    state = [("^opt_state/.*left", ("layers", "embed", "heads")), ("table$", ())]
    found = train(mesh, jt.Rules(RULES, state=state))
    assert found.opt_state[0]["left"]["w"].sharding.spec == P(None, "fsdp", "tensor")
    assert found.opt_state[0]["table"].sharding.is_fully_replicated
    assert found.opt_state[1][0].mu["blocks"]["q"]["kernel"].sharding.spec == P(
        None, "fsdp", "tensor"
    )
    for a, b in zip(
        *map(jax.tree.leaves, (found.opt_state, train(None, None).opt_state)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    # Cut for an interleaved pipeline, the layers are the second axis.
    leaf = {"left": jax.ShapeDtypeStruct((2, 2, 8, 8), jnp.float32)}
    mesh = jt.make_mesh(pipe=2, fsdp=2, tensor=2)
    rules = jt.Rules(state=[("^left$", state[0][1])], stacked=jt.Stack(virtual=2))
    lies = ruled_shardings(leaf, {"left": None}, mesh, rules)["left"]
    assert lies.spec == P(None, "pipe", "fsdp", "tensor")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("^params/", ()), r"'\^params/' matches no state leaf; there are step, opt_state"),
        (
            ("mu/odd", ("embed", None)),
            r"state leaf 'opt_state/0/mu/odd' has shape \(3,\) and .* 2 axes",
        ),
        (("mu/odd", ("embed",)), r"state leaf 'opt_state/0/mu/odd' .*\(3\) is not divisible"),
    ],
)
def test_rules_of_a_state_that_do_not_fit_are_refused(rule, message):
    mesh = jt.make_mesh(fsdp=8)
    with pytest.raises(ValueError, match=message):
        jt.abstract_state(
            lambda rng: params(), optax.adam(1e-3), mesh=mesh, rules=jt.Rules(state=[rule])
        )


def test_the_key_is_split_between_the_parameters_and_the_steps():
    draw = lambda rng: {"w": jax.random.normal(rng, 3)}  # noqa: E731
    state = jt.init_state(draw, optax.sgd(1.0), jax.random.key(0))
    first, second = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(state.params["w"], draw(first)["w"])
    assert state.rng == second


def test_the_state_is_born_in_its_place_and_is_the_same_on_every_mesh():
    """But for the last bits of normal numbers, which XLA rounds by the shape of a shard."""

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
        chex.assert_trees_all_close(state.params, alone.params, rtol=5e-7, atol=0)


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
            [(r"kernal$", (None, None, None))],
            r"sharding rule 'kernal\$' matches no parameter; there are blocks/q/kernel: correct",
        ),
        (
            {"fsdp": 8},
            [(r"kernel$", ("a", "b", "c"))],
            "sharding axis 'a' is neither a logical axis",
        ),
        (
            {"fsdp": 8},
            (r"kernel$", (None, "embed", None)),
            r"Rules\(params=...\) has the entry 'kernel\$': write a sequence of pairs",
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


def test_a_large_parameter_is_whole_where_a_rule_says_so():
    optimizer, mesh = optax.adam(1e-3), jt.make_mesh(fsdp=2, tensor=4)
    create = lambda rules: jt.abstract_state(  # noqa: E731
        lambda rng: {"w": jnp.zeros((1025, 1027))}, optimizer, mesh=mesh, rules=rules
    )
    state = create([("w", (None, None))])
    assert state.params["w"].sharding.is_fully_replicated
    assert state.opt_state[0].mu["w"].sharding.is_fully_replicated
    step = jt.build_train_step(
        lambda params, batch, rng: params["w"].sum() * batch.sum(), optimizer
    )
    jt.compile_step(step, state, jnp.ones(8), mesh=mesh)
    # Axes that this mesh does not have leave it whole by accident, but for those of a pipeline.
    with pytest.raises(
        ValueError, match=r"'w' has .* would be copied whole .*\(None, None\) where"
    ):
        create([("w", ("experts", None))])
    assert create([("w", ("layers", None))]).params["w"].sharding.is_fully_replicated


def test_the_norms_of_405b_are_whole_without_a_pipeline():
    config = decoder.PRESETS["llama-405b"]()
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    found = specs(param_shardings(shapes, jt.make_mesh(fsdp=4, tensor=2), rules=decoder.RULES))
    assert found["blocks/norm_attn/scale"] == P(None, None)
    assert found["blocks/mlp/up/kernel"] == P(None, "fsdp", "tensor")


def test_stacked_parameters_without_a_rule_lie_along_the_pipeline():
    mesh = jt.make_mesh(pipe=2, fsdp=4)
    state = jt.abstract_state(lambda rng: params(), optax.adam(1e-3), mesh=mesh)
    for tree in (state.params, state.opt_state[0].mu):
        assert specs(jax.tree.map(lambda x: x.sharding, tree)) == {
            "blocks/q/bias": P("pipe", "fsdp"),
            "blocks/q/kernel": P("pipe", None, "fsdp"),
            "embed/tokens": P("fsdp", None),
            "odd": P(),
        }
    other = param_shardings(params(), mesh, jt.Rules(stacked="layers"))
    assert specs(other)["blocks/q/bias"] == P(None, "fsdp")


def test_a_table_for_several_models_may_hold_rules_for_others():
    mesh, table = jt.make_mesh(fsdp=8), [("^w$", ("embed",)), ("^other$", ("embed",))]
    tree = {"w": jax.ShapeDtypeStruct((16,), jnp.float32)}
    for rules in (OptionalRules(table), jt.Rules(OptionalRules(table))):
        assert specs(param_shardings(tree, mesh, rules)) == {"w": P("fsdp")}


def test_rules_in_natural_order_fit_layers_that_are_cut():
    mesh = jt.make_mesh(pipe=4, fsdp=2)
    tree = {"blocks": {"w": jnp.zeros((8, 6)), "other": jnp.zeros((8, 5))}, "out": jnp.zeros(4)}
    cut = jt.Stack(virtual=2)
    table = OptionalRules([("^blocks/w$", ("layers", "embed")), ("^nothing$", ("embed",))])
    found = specs(param_shardings(cut.cut(tree), mesh, jt.Rules(table, stacked=cut)))
    assert found == {
        "blocks/other": P(None, "pipe"),  # which no rule matches
        "blocks/w": P(None, "pipe", "fsdp"),
        "out": P("fsdp"),
    }


def test_a_mesh_of_jax_with_one_axis_does_all_that_one_of_ours_does():
    optimizer, batch = optax.adam(1e-2), problems.make_batch()
    results = []
    for mesh in (jt.make_mesh(data=8), jax.make_mesh((8,), ("data",))):
        state = jt.init_state(problems.init, optimizer, jax.random.key(0), mesh=mesh, zero=2)
        shardings = jt.gradient_shardings(state, zero=2)
        assert "data" in shardings["up"]["kernel"].spec
        options = {"accumulate": 2, "gradient_shardings": shardings}
        step = jt.build_train_step(problems.loss_fn, optimizer, **options)
        train = jt.compile_step(step, state, batch, mesh=mesh)
        state, _ = train(state, jt.from_local_rows(batch, mesh))
        results.append(jax.device_get(state.params))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_state_without_a_mesh_pins_no_gradient():
    state = jt.init_state(lambda rng: params(), optax.sgd(0.1), jax.random.key(0))
    assert jt.gradient_shardings(state, zero=2) is None


def test_the_key_of_shapes_is_of_the_kind_that_is_asked_for():
    key = jax.random.key(0, impl="rbg")
    shapes = jt.abstract_state(lambda rng: params(), optax.sgd(0.1), rng=key)
    assert shapes == jax.eval_shape(
        lambda key: jt.init_state(lambda rng: params(), optax.sgd(0.1), key), key
    )


def test_describe_sharding_lists_model_state():
    init = lambda rng: ({"w": jnp.ones(3)}, {"norm": {"mean": jnp.ones(5)}})  # noqa: E731
    state = jt.init_state(init, optax.sgd(0.1), jax.random.key(0), has_model_state=True)
    lines = jt.describe_sharding(state).splitlines()
    assert ["model_state/norm/mean", "5", "float32", "whole", "20"] in [x.split() for x in lines]
    assert ["model", "state", "20"] in [x.split() for x in lines]


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
        pinned = pins(lambda x: jt.constrain(x, "batch", None, "mlp"), jnp.ones((6, 4, 6)))
        assert pinned == [P(P.UNCONSTRAINED, None, "tensor")]
        with pytest.raises(ValueError, match=r"2 axis names .* for an array of rank 3"):
            jax.jit(lambda x: jt.constrain(x, "batch", None))(x)


def pins(function, *args):
    """Specs of the constraints that a function is traced with."""
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return [
        e.params["sharding"].spec for e in equations if e.primitive.name == "sharding_constraint"
    ]


def test_a_residual_stream_is_split_over_tensor_where_its_length_divides():
    mesh, even, uneven = jt.make_mesh(data=2, context=2, tensor=2), (2, 8, 3), (2, 6, 3)
    within, between = P("data", "context", None), P("data", ("context", "tensor"), None)
    for rules, spec in ((None, between), (jt.Rules(axes={"residual": "context"}), within)):
        with placement.tracing_on(mesh, None, rules):
            assert pins(placement.scatter_sequence, jnp.ones(even)) == [within, spec]
            assert pins(placement.gather_sequence, jnp.ones(even)) == [spec, within]
            placement.check_length(8)
    with placement.tracing_on(mesh, None):
        assert pins(placement.scatter_sequence, jnp.ones(uneven)) == [within, within]
        with pytest.warns(placement.UnevenWarning, match=r"rows of 6 .* no multiple of 4.* tensor"):
            placement.check_length(6)
    assert pins(placement.scatter_sequence, jnp.ones(even)) == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_lies_by_the_names_of_its_axes(accumulate):
    optimizer = optax.adam(0.1, eps=1e-3)
    r = np.random.default_rng(0)
    batch = {
        "tokens": r.normal(size=(8, 6)).astype(np.float32),
        "mask": (r.random(8) < 0.7).astype(np.float32),
    }

    def loss_fn(params, batch, rng):
        hidden = jnp.tanh(jnp.cumsum(batch["tokens"], 1)[..., None] * params["w"])
        return jt.WeightedLoss((hidden.sum((1, 2)) * batch["mask"]).sum(), batch["mask"].sum())

    def train(mesh, rules):
        init = lambda rng: {"w": jnp.linspace(0.5, 1, 4)}  # noqa: E731
        state = jt.init_state(init, optimizer, jax.random.key(0), mesh=mesh, rules=rules)
        step = jt.build_train_step(loss_fn, optimizer, accumulate=accumulate)
        step = jt.compile_step(step, state, batch, mesh=mesh, rules=rules)
        return step, step(state, batch)[0]

    rules = jt.Rules(batch=[("^tokens$", ("batch", "sequence"))])
    step, found = train(jt.make_mesh(data=4, context=2), rules)
    assert step.batch_shardings["tokens"].spec == P("data", "context")
    assert step.batch_shardings["mask"].spec == P(("data",))
    _, expected = train(None, None)
    for a, b in zip(*map(jax.tree.leaves, (found.opt_state, expected.opt_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match=r"batch leaf 'tokens' has shape \(8, 6\): dimension 1 "):
        train(jt.make_mesh(data=2, context=4), rules)
    with pytest.raises(ValueError, match=r"sharding rule 'tokns' matches no batch leaf"):
        train(jt.make_mesh(data=8), jt.Rules(batch=[("tokns", ("batch",))]))


def test_activations_follow_the_axes_of_the_rules():
    mesh, x = jt.make_mesh(data=2, fsdp=2, tensor=2), jnp.ones((8, 4))
    with tracing_on(mesh, None, jt.Rules(axes={"heads": None})):
        assert pins(lambda x: jt.constrain(x, "batch", "heads"), x) == [P(("data", "fsdp"), None)]
    with tracing_on(mesh, None):
        (spec,) = pins(lambda x: jt.constrain(x, "batch", "heads"), x)
        assert spec == P(("data", "fsdp"), "tensor")


def test_one_step_follows_the_rules_that_each_compilation_is_given():
    mesh, seen = jt.make_mesh(data=4, tensor=2), []

    def loss_fn(params, batch, rng):
        hidden = jt.constrain(batch["x"] @ params["w"], "batch", "heads")
        jax.debug.inspect_array_sharding(hidden, callback=lambda s: seen.append(s.spec))
        return jnp.square(hidden).mean()

    optimizer = optax.sgd(0.1)
    state = jt.init_state(
        lambda rng: {"w": jnp.ones((4, 4))}, optimizer, jax.random.key(0), mesh=mesh
    )
    step = jt.build_train_step(loss_fn, optimizer)
    batch = {"x": jnp.ones((8, 4))}
    for rules in (None, jt.Rules(axes={"heads": None})):
        jt.compile_step(step, state, batch, mesh=mesh, rules=rules)
    assert {len([e for e in spec if e]) for spec in seen} == {1, 2}


@pytest.fixture(scope="module")
def three_axes():
    """An optimizer, a state on data x fsdp x tensor, and a batch."""
    optimizer = optax.sgd(0.1)
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    state = jt.init_state(
        lambda rng: {"layers": {"w": jnp.ones((3, 4, 8))}},
        optimizer,
        jax.random.key(0),
        mesh=mesh,
        rules=[("w", (None, "embed", "mlp"))],
    )
    return optimizer, mesh, state, jnp.ones((8, 4))


def plain_loss(params, x, rng):
    return jnp.square(x @ params["layers"]["w"][0]).mean()


def gathering_loss(params, x, rng):
    def layer(x, w):
        w = jt.gather(w, "layers")["w"]
        return jnp.tanh(x @ w) @ w.T, None

    return jnp.square(jax.lax.scan(layer, x, params["layers"])[0]).mean()


def test_weights_enter_a_loss_without_the_axes_of_the_batch(three_axes):
    optimizer, mesh, state, x = three_axes
    step = jt.build_train_step(plain_loss, optimizer)
    with tracing_on(mesh, state):
        assert P(None, None, "tensor") in pins(step, state, x)
    shardings = jt.gradient_shardings(state, zero=2)
    step = jt.build_train_step(plain_loss, optimizer, gradient_shardings=shardings)
    assert P(None, None, "tensor") in pins(step, state, x)
    step = jt.build_train_step(gathering_loss, optimizer, gather="model")
    with tracing_on(mesh, state):
        assert pins(step, state, x) == []  # in its loop
        text = str(jax.make_jaxpr(step)(state, x))
    assert "sharding_constraint" in text
    assert "P(None, 'tensor')" in text
    two = jt.make_mesh(fsdp=4, tensor=2)
    assert pins(jt.build_train_step(plain_loss, optimizer), _on(state, two), x) == []


def _on(state, mesh):
    specs = jax.tree.map(lambda x: jax.NamedSharding(mesh, x.sharding.spec), state)
    return jax.device_put(state, specs)


def test_a_step_that_cannot_know_how_its_weights_lie_is_refused(three_axes):
    optimizer, mesh, state, x = three_axes
    step = jt.build_train_step(plain_loss, optimizer)
    with pytest.raises(
        ValueError, match=r"mesh data 2 x fsdp 2 x tensor 2 .*jaxtrain.compile_step"
    ):
        jax.jit(step)(state, x)
    unpinned = jt.build_train_step(plain_loss, optimizer, gather="model")
    with pytest.raises(ValueError, match=r"calls neither jaxtrain.gather nor"):
        jt.compile_step(unpinned, state, x, mesh=mesh)
    with pytest.raises(ValueError, match=r"`gather` is 'always': use 'step' or 'model'"):
        jt.build_train_step(plain_loss, optimizer, gather="always")
    with tracing_on(mesh, state), pytest.raises(ValueError, match=r"no parameter 'layer/w'"):
        jt.gather({"w": x}, "layer")
