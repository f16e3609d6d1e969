"""The train step is a pure function: it can be vmapped, scanned, differentiated and jitted."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from tests import problems


def make(accumulate=1, optimizer=None, **options):
    optimizer = optimizer or jt.make_optimizer("adamw", learning_rate=1e-2, clip_norm=1.0)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), policy=options.get("policy"))
    return state, jt.build_train_step(problems.loss_fn, optimizer, accumulate=accumulate, **options)


def stacked_batches(count: int):
    batches = [problems.make_batch(seed) for seed in range(count)]
    return jax.tree.map(lambda *x: np.stack(x), *batches)


@pytest.mark.parametrize("sign", [1, -1])
def test_one_step_of_sgd_is_the_definition(sign):
    state, step = make(optimizer=optax.sgd(0.5), norms=True)
    batch = problems.make_batch()
    batch["mask"] *= sign
    loss, grads, weight = problems.reference(state.params, batch)
    after, metrics = jax.jit(step)(state, batch)
    expected = jax.tree.map(lambda p, g: np.asarray(p) - 0.5 * g, state.params, grads)
    chex.assert_trees_all_close(after.params, expected, rtol=1e-5, atol=1e-6)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["weight"]) == weight
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["update_norm"]) == pytest.approx(0.5 * norm, rel=1e-5)
    after_norm = np.sqrt(sum(np.square(p).sum() for p in jax.tree.leaves(after.params)))
    assert float(metrics["param_norm"]) == pytest.approx(after_norm, rel=1e-5)
    assert int(after.step) == 1


def test_learning_rate_in_force_is_reported():
    schedule = jt.schedules.cosine(1e-2, warmup_steps=4, total_steps=20)
    state, step = make(optimizer=jt.make_optimizer("adam", learning_rate=schedule))
    step = jax.jit(step)
    for count in range(6):
        state, metrics = step(state, problems.make_batch(count))
        assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(count)), rel=1e-6)


def test_several_steps_in_one_call_are_the_same_steps():
    mesh = jt.make_mesh(data=4, devices=jax.devices()[:4])
    optimizer = jt.make_optimizer("adamw", learning_rate=1e-2, clip_norm=1.0)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), mesh=mesh)
    step = jt.build_train_step(problems.loss_fn, optimizer)
    batches = [problems.make_batch(seed) for seed in range(3)]
    once = jt.compile_step(step, state, batches[0], mesh=mesh, donate=False)
    alone, losses = state, []
    for batch in batches:
        alone, metrics = once(alone, batch)
        losses.append(float(metrics["loss"]))
    many = jt.compile_step(jt.scan_steps(step), state, batches, mesh=mesh)
    together, metrics = many(state, batches)
    assert int(together.step) == 3
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    chex.assert_trees_all_close(together.params, alone.params, rtol=1e-6)
    chex.assert_trees_all_close(together.opt_state, alone.opt_state, rtol=1e-6)


def test_vmap_over_a_population_of_seeds_and_learning_rates():
    seeds, rates = jnp.arange(3), jnp.array([1e-3, 1e-2, 1e-1])
    batches = stacked_batches(4)

    def train(seed, learning_rate):
        optimizer = jt.make_optimizer("adamw", learning_rate=learning_rate, weight_decay=0.1)
        state = jt.init_state(problems.init, optimizer, jax.random.key(seed))
        step = jt.build_train_step(problems.loss_fn, optimizer, accumulate=2)
        return jax.lax.scan(step, state, batches)

    population = jax.jit(jax.vmap(train))(seeds, rates)
    for i, (seed, rate) in enumerate(zip(seeds, rates, strict=True)):
        alone = jax.jit(train)(seed, rate)
        member = jax.tree.map(lambda x, i=i: x[i], population)
        chex.assert_trees_all_close(
            (member[0].params, member[0].opt_state, member[1]),
            (alone[0].params, alone[0].opt_state, alone[1]),
            rtol=2e-5,
            atol=1e-6,
        )


def test_scanning_ten_steps_in_one_call_equals_ten_calls():
    state, step = make(accumulate=2)
    batches = stacked_batches(10)
    scanned, history = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    jitted = jax.jit(step)
    for i in range(10):
        state, metrics = jitted(state, jax.tree.map(lambda x, i=i: x[i], batches))
        assert float(history["loss"][i]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    chex.assert_trees_all_close(scanned.params, state.params, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(scanned.opt_state, state.opt_state, rtol=1e-5, atol=1e-7)
    assert int(scanned.step) == 10


OTHER_RULES = [
    pytest.param(x, marks=pytest.mark.slow) for x in ("momentum", "adan", "lamb", "muon")
]


@pytest.mark.parametrize("name", ["adamw", "optax", *OTHER_RULES])
def test_differentiating_through_steps_agrees_with_finite_differences(name):
    batches = stacked_batches(4) | {"on": np.ones(4, np.float32)}
    batches["x"][..., 2] = 0  # parameters without any gradient
    batches["on"][1] = name == "optax"  # nor any other has one, whose norm has no derivative there
    batches["mask"][2] = 0  # a step that changes nothing
    held_out = problems.make_batch(99)

    def loss_fn(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        return jt.WeightedLoss(loss.total * batch["on"], loss.weight)

    def final_loss(log_rate):
        if name == "optax":
            optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(jnp.exp(log_rate)))
        else:
            given = {"clip_norm": 0.5, "weight_decay": 0.1}
            optimizer = jt.make_optimizer(name, jnp.exp(log_rate), **given)
        state = jt.init_state(problems.init, optimizer, jax.random.key(0))
        step = jt.build_train_step(loss_fn, optimizer, accumulate=2)
        state, _ = jax.lax.scan(step, state, batches)
        loss = problems.loss_fn(state.params, held_out, None)
        return loss.total / loss.weight

    at, h = jnp.log(0.3 if name == "optax" else 0.03), 0.01
    slope = jax.jit(jax.grad(final_loss))(at)
    final_loss = jax.jit(final_loss)
    finite = (final_loss(at + h) - final_loss(at - h)) / (2 * h)
    assert abs(float(finite)) > 1e-2
    assert float(slope) == pytest.approx(float(finite), rel=1e-2)


def test_the_step_has_no_side_effects():
    state, step = make(accumulate=2)
    batch = problems.make_batch()
    before = jax.tree.map(np.array, (state.params, state.opt_state, batch))
    first = jax.jit(step)(state, batch)
    second = jax.jit(step)(state, batch)
    chex.assert_trees_all_equal((state.params, state.opt_state, batch), before)
    chex.assert_trees_all_equal(first[0].params, second[0].params)


def test_the_randomness_of_a_step_is_its_key_folded_with_its_number():
    def loss(params, batch, rng):
        return params["w"] * jax.random.normal(rng, ())

    optimizer = optax.sgd(1.0)
    state = jt.init_state(lambda rng: {"w": jnp.float32(1.0)}, optimizer, jax.random.key(0))
    step = jax.jit(jt.build_train_step(loss, optimizer))
    for number in range(3):
        draw = jax.random.normal(jax.random.fold_in(state.rng, number), ())
        expected = state.params["w"] - draw
        state, _ = step(state, jnp.zeros(1))
        assert float(state.params["w"]) == pytest.approx(float(expected), rel=1e-6)


def test_a_scalar_loss_weighs_one():
    optimizer = optax.sgd(0.1)
    state = jt.init_state(lambda rng: {"w": jnp.ones(3)}, optimizer, jax.random.key(0))

    def loss(params, batch, rng):
        return jnp.mean(params["w"] * batch)

    step = jt.build_train_step(loss, optimizer, accumulate=2)
    state, metrics = step(state, jnp.arange(4.0)[:, None] * jnp.ones(3))
    assert float(metrics["loss"]) == pytest.approx(1.5)
    assert float(metrics["weight"]) == 2.0
    np.testing.assert_allclose(state.params["w"], 1 - 0.1 * 0.5, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_that_is_not_finite_changes_no_parameter_and_no_optimizer_state(accumulate):
    state, step = make(accumulate)
    step, batch = jax.jit(step), problems.make_batch()
    batch["y"][5] = np.nan  # in one microbatch
    after, metrics = step(state, batch)
    chex.assert_trees_all_equal(after.params, state.params)
    chex.assert_trees_all_equal(after.opt_state, state.opt_state)
    assert int(metrics["skipped"]) == accumulate == int(after.skipped)
    assert float(metrics["weight"]) == 0 == float(metrics["grad_norm"])
    assert int(after.step) == 1
    recovered, metrics = step(after, problems.make_batch(1))
    assert int(metrics["skipped"]) == 0
    assert int(recovered.skipped) == accumulate
    chex.assert_tree_all_finite(recovered.params)


def test_a_gradient_whose_square_overflows_leaves_the_step_out():
    optimizer = jt.make_optimizer("adam", 0.1)
    state = jt.init_state(lambda rng: {"w": jnp.ones(16)}, optimizer, jax.random.key(0))
    step = jax.jit(jt.build_train_step(lambda params, batch, rng: params["w"] @ batch, optimizer))
    state, metrics = step(state, jnp.full(16, 3e19))  # finite, and the norm 1.2e20 is too
    assert int(metrics["skipped"]) == 1
    state, metrics = step(state, jnp.ones(16))
    assert int(metrics["skipped"]) == 0
    np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-6)


def test_model_state_that_is_not_finite_leaves_the_step_out():
    def loss(params, variance, batch, rng):
        return problems.loss_fn(params, batch, rng), variance + batch["extra"].sum()

    optimizer = optax.sgd(0.1)
    state = jt.init_state(
        lambda rng: (problems.init(rng), jnp.float32(1.0)),
        optimizer,
        jax.random.key(0),
        has_model_state=True,
    )
    step = jax.jit(jt.build_train_step(loss, optimizer, accumulate=2, has_model_state=True))
    extra = np.full(problems.ROWS, 3e38, np.float32)
    after, metrics = step(state, problems.make_batch() | {"extra": extra})
    assert int(metrics["skipped"]) == 2
    chex.assert_trees_all_equal((after.params, after.model_state), (state.params, jnp.float32(1.0)))
    after, metrics = step(state, problems.make_batch() | {"extra": 0 * extra + 1})
    assert int(metrics["skipped"]) == 0
    assert float(after.model_state) == 1 + problems.ROWS


@pytest.mark.parametrize("policy", ["f32", jt.Policy.fp16(64.0)], ids=str)
def test_a_step_of_weight_zero_changes_nothing_but_the_count(policy):
    def loss(params, seen, batch, rng):
        return problems.with_extra(params, batch, rng), seen + batch["x"].sum()

    init = lambda rng: (problems.init(rng), jnp.float32(1.0))  # noqa: E731
    optimizer, given = jt.make_optimizer("adamw", 1e-2, clip_norm=1.0), {"has_model_state": True}
    state = jt.init_state(init, optimizer, jax.random.key(0), policy=policy, **given)
    step = jax.jit(jt.build_train_step(loss, optimizer, policy=policy, accumulate=2, **given))
    state, _ = step(state, problems.make_batch())
    batch = problems.make_batch(1)
    batch["mask"][:] = np.arange(problems.ROWS) // 2 % 2 * 2 - 1  # of both signs in each microbatch
    after, metrics = step(state, batch)
    stays = operator.attrgetter("params", "opt_state", "model_state", "loss_scale", "skipped")
    chex.assert_trees_all_equal(stays(after), stays(state))
    assert (int(after.step), float(metrics["weight"]), int(metrics["skipped"])) == (2, 0, 0)


@pytest.mark.parametrize("group", [optax.multi_transform, None], ids=["groups", "masked"])
def test_a_call_that_adds_nothing_moves_only_what_is_accumulated(group):
    parts = jt.make_optimizer("sgd", 0.1, accumulate=2), jt.make_optimizer("adamw", 0.1)
    optimizer = optax.multi_transform(dict(zip("ab", parts, strict=True)), {"a": "a", "b": "b"})
    if group is None:
        masks = {"a": True, "b": False}, {"a": False, "b": True}
        optimizer = optax.chain(*map(optax.masked, parts, masks))

    def loss(params, batch, rng):
        return jt.WeightedLoss((batch * (params["a"] + params["b"])).sum(), batch.sum())

    ones = {"a": jnp.ones(()), "b": jnp.ones(())}
    state = jt.init_state(lambda rng: ones, optimizer, jax.random.key(0))
    step = jax.jit(jt.build_train_step(loss, optimizer, norms=True))
    first, _ = step(state, jnp.ones(4))
    assert (float(first.params["a"]), float(first.params["b"]) < 1) == (1, True)
    second, metrics = step(first, jnp.zeros(4))
    assert float(second.params["a"]) == pytest.approx(0.9)
    assert float(second.params["b"]) == float(first.params["b"])
    assert float(metrics["update_norm"]) == pytest.approx(0.1)


def test_sums_of_some_parameters_under_other_names_are_refused():
    accumulated = optax.flatten(jt.make_optimizer("sgd", 0.1, accumulate=2))
    ones, loss = (
        {"a": jnp.ones(()), "b": jnp.ones(2)},
        lambda p, x, rng: (p["a"] * x * p["b"]).sum(),
    )
    some = optax.multi_transform({"a": accumulated, "b": optax.sgd(0.1)}, {"a": "a", "b": "b"})
    for optimizer in (accumulated, some):
        state = jt.init_state(lambda rng: ones, optimizer, jax.random.key(0))
        step = jt.build_train_step(loss, optimizer)
        if optimizer is some:
            with pytest.raises(ValueError, match="under other names than these have"):
                step(state, 1.0)
        else:
            state, _ = step(step(state, 1.0)[0], 1.0)
            assert float(state.params["a"]) == pytest.approx(0.8)


def test_an_infinity_that_model_state_begins_with_leaves_no_step_out():
    def loss(params, seen, batch, rng):
        found = problems.loss_fn(params, batch, rng)
        best = jnp.minimum(seen["best"], found.total) + 0 * batch["far"]
        return found, seen | {"best": best}

    init = lambda rng: (problems.init(rng), {"best": jnp.inf, "masked": -jnp.inf * jnp.ones(2)})  # noqa: E731
    state = jt.init_state(init, optax.sgd(0.1), jax.random.key(0), has_model_state=True)
    step = jax.jit(jt.build_train_step(loss, optax.sgd(0.1), has_model_state=True))
    batch = problems.make_batch() | {"far": np.float32(0)}
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 0
    best = float(state.model_state["best"])
    assert best == pytest.approx(float(metrics["loss"] * metrics["weight"]), rel=1e-6)
    state, metrics = step(state, batch | {"far": np.float32(np.inf)})
    assert (int(metrics["skipped"]), float(state.model_state["best"])) == (1, best)


def test_frozen_parameters_are_in_no_norm_and_leave_no_step_out():
    def loss(params, batch, rng):
        return (params["w"] * batch).sum() + (jnp.sqrt(params["still"]) * batch).sum()

    optimizer = optax.chain(jt.make_optimizer("adam", 0.1, freeze=("^still$",)))
    state = jt.init_state(
        lambda rng: {"w": jnp.float32(1.0), "still": jnp.float32(0.0)},
        optimizer,
        jax.random.key(0),
    )
    after, metrics = jax.jit(jt.build_train_step(loss, optimizer))(state, jnp.float32(0.5))
    assert float(metrics["grad_norm"]) == 0.5  # the frozen one's gradient is infinite
    assert int(metrics["skipped"]) == 0
    assert float(after.params["w"]) == pytest.approx(0.9)
    assert float(after.params["still"]) == 0.0


def test_integer_parameters_stay_as_they_are():
    def loss(params, batch, rng):
        return (params["w"] * batch).sum() + 0.0 * params["number"].sum()

    number = 2**24 + np.arange(3)  # float32 has only every other one
    optimizer = jt.make_optimizer("adamw", 0.1, weight_decay=0.1, decay_mask=("",))
    state = jt.init_state(
        lambda rng: {"w": jnp.ones(()), "number": jnp.asarray(number, jnp.int32)},
        optimizer,
        jax.random.key(0),
    )
    after, _ = jax.jit(jt.build_train_step(loss, optimizer))(state, jnp.ones(4))
    assert after.params["number"].tolist() == number.tolist()
    assert float(after.params["w"]) < 1


@pytest.mark.parametrize("name", ["loss", "weight", "grad_norm", "skipped"])
def test_a_metric_with_a_name_of_the_step_s_own_is_refused(name):
    def loss(params, batch, rng):
        return jt.WeightedLoss(params["w"].sum(), jnp.float32(1.0), {name: jnp.float32(7.0)})

    state = jt.init_state(lambda rng: {"w": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0))
    for step in (jt.build_train_step(loss, optax.sgd(0.1)), jt.build_eval_step(loss)):
        with pytest.raises(ValueError, match=f"the loss calls a metric '{name}'"):
            step(state, jnp.zeros(1))


def test_a_metric_of_several_is_refused():
    loss = lambda params, x, rng: jt.WeightedLoss(x.sum(), 1.0, {"d": {"x": x}})  # noqa: E731
    with pytest.raises(ValueError, match="the metric 'd' is a dict: give each of its entries"):
        run(loss)


def test_a_random_key_among_parameters_is_refused():
    init = lambda rng: {"w": jnp.ones(2), "k": rng}  # noqa: E731
    optimizer = jt.make_optimizer("sgd", 0.1)
    state = jt.init_state(init, optimizer, jax.random.key(0))
    with pytest.raises(ValueError, match="parameter 'k' is a random key"):
        jt.build_train_step(lambda params, x, rng: params["w"].sum(), optimizer)(state, 0.0)


def test_a_complex_parameter_is_refused_by_name():
    def loss(params, batch, rng):
        return jnp.abs(params["phase"]).sum()

    init = lambda rng: {"phase": jnp.ones(2, jnp.complex64)}  # noqa: E731
    state = jt.init_state(init, optax.sgd(0.1), jax.random.key(0))
    with pytest.raises(ValueError, match="parameter 'phase' is complex64"):
        jt.build_train_step(loss, optax.sgd(0.1))(state, jnp.zeros(1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weight_that_is_a_function_of_parameters_is_warned_of(accumulate):
    def loss(params, batch, rng, constant=lambda x: x):
        shares = jax.nn.sigmoid(params["w"] * batch)
        return jt.WeightedLoss((shares * (params["w"] - batch) ** 2).sum(), constant(shares.sum()))

    still = functools.partial(loss, constant=jax.lax.stop_gradient)
    state = jt.init_state(lambda rng: {"w": jnp.ones(())}, optax.sgd(0.1), jax.random.key(0))
    build = functools.partial(jt.build_train_step, optimizer=optax.sgd(0.1), accumulate=accumulate)
    with pytest.warns(UserWarning, match="the weight that the loss returns has a derivative"):
        build(loss)(state, jnp.arange(4.0))
    assert np.isfinite(build(still)(state, jnp.arange(4.0))[1]["loss"])
    # A loss whose weight is learned elsewhere is differentiated, and evaluated, as any other.
    learned = lambda params, x, rng: jt.WeightedLoss((x * params["w"]).sum(), (x**2).sum())  # noqa: E731
    slope = jax.grad(lambda x: build(learned)(state, x)[0].params["w"])(jnp.arange(1.0, 5))
    x = np.arange(1.0, 5)
    expected = -0.1 * (1 / (x**2).sum() - x.sum() * 2 * x / (x**2).sum() ** 2)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
    evaluate = jt.build_eval_step(learned)
    outer = lambda x: evaluate(build(learned)(state, x)[0], x).means()["loss"]  # noqa: E731
    assert np.isfinite(jax.grad(outer)(jnp.arange(1.0, 5))).all()


def test_leaves_of_one_name_are_refused():
    both = {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
        jt.init_state(lambda rng: both, optax.sgd(0.1), jax.random.key(0))


def test_an_optimizer_that_searches_along_a_line_is_told_what_a_step_gives():
    def loss(params, batch, rng):
        return jnp.square(params["w"] - batch).sum()

    for optimizer, works in ((optax.lbfgs(), False), (optax.lbfgs(linesearch=None), True)):
        state = jt.init_state(lambda rng: {"w": jnp.ones(2)}, optimizer, jax.random.key(0))
        step = jt.build_train_step(loss, optimizer)
        if works:
            assert np.isfinite(step(state, jnp.zeros(2))[1]["loss"])
        else:
            with pytest.raises(ValueError, match="asks for more than a step gives it"):
                step(state, jnp.zeros(2))


def test_multisteps_in_the_chain_equals_the_scan_in_the_step_with_ragged_masks():
    batches = [
        problems.make_batch(seed, keep=keep) for seed, keep in enumerate([0.1, 0.9, 0.5, 1.0])
    ]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "clip_norm": 0.05}
    state, big_step = make(optimizer=jt.make_optimizer("adamw", **options))
    big, metrics = jax.jit(big_step)(state, whole)
    state, small_step = make(optimizer=jt.make_optimizer("adamw", **options, accumulate=4))
    small_step = jax.jit(small_step)
    for batch in batches:
        first = state.params
        state, small_metrics = small_step(state, batch)
        if batch is not batches[-1]:
            chex.assert_trees_all_equal(state.params, first)
    chex.assert_trees_all_close(state.params, big.params, rtol=1e-5, atol=1e-7)
    assert float(small_metrics["learning_rate"]) == float(metrics["learning_rate"])


def test_eval_sums_add_up_to_the_mean_over_everything():
    state, _ = make()
    evaluate = jax.jit(jt.build_eval_step(problems.loss_fn))
    parts = [problems.make_batch(s, keep=k) for s, k in ((0, 0.1), (1, 1.0))]
    total = evaluate(state, parts[0]) + evaluate(state, parts[1])
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    assert float(total.means()["loss"]) == pytest.approx(
        problems.reference(state.params, whole)[0], rel=1e-6
    )


def test_eval_sums_are_float32():
    def loss(params, batch, rng):
        return jt.WeightedLoss(jnp.bfloat16(3), jnp.bfloat16(1), {"x": jnp.bfloat16(1)})

    part = jt.build_eval_step(loss)(make()[0], None)
    total = sum([part] * 599, start=part)  # bfloat16 stays at 256
    assert (float(total.total), float(total.weight), float(total.metrics["x"])) == (1800, 600, 600)


def test_a_loss_that_is_no_scalar_is_refused():
    state, _ = make()
    step = jt.build_train_step(lambda params, batch, rng: batch["mask"], optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"the loss has shape \(16,\).*must be scalars"):
        step(state, problems.make_batch())


def test_an_optimizer_that_takes_no_loss_is_given_none():
    """optax.contrib.sam refuses arguments that it does not know."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))
    state, step = make(optimizer=sam)
    step, losses = jax.jit(step), []
    for _ in range(5):
        state, metrics = step(state, problems.make_batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def test_accumulate_below_one_is_refused():
    with pytest.raises(ValueError, match="`accumulate` is 0: use 1 or more"):
        jt.build_train_step(problems.loss_fn, optax.sgd(0.1), accumulate=0)


def with_statistics(loss_of):
    """A state with model state, and a step whose loss and statistics ``loss_of`` makes."""
    init = lambda rng: ({"w": jnp.ones(3)}, {"mean": jnp.zeros(3), "n": jnp.int32(0)})  # noqa: E731
    optimizer = optax.sgd(0.1)
    state = jt.init_state(init, optimizer, jax.random.key(0), has_model_state=True)
    step = jt.build_train_step(loss_of, optimizer, has_model_state=True, accumulate=2)
    return lambda: step(state, jnp.ones((4, 3)))


def plain_form(params, batch, rng):
    return (params["w"] * batch).mean()


def state_form(params, model_state, batch, rng):
    return plain_form(params, batch, rng), model_state


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda: run(lambda p, b, rng: ((p["w"] * b).mean(), {"a": 1.0})),
            r"the loss returned a tuple of 2: return WeightedLoss\(total, weight, metrics=",
        ),
        (
            lambda: run(state_form),
            r"called as loss_fn\(params, batch, rng\) .* pass has_model_state=True where it is",
        ),
        (
            lambda: run(lambda params, batch: 0.0),
            r"called as loss_fn\(params, batch, rng\) and does not take that: give it these",
        ),
        (
            lambda: run(state_form, has_model_state=True),
            r"has_model_state=True and the state holds no model state: pass .* to init_state",
        ),
        (
            with_statistics(lambda p, s, b, rng: (0.0, {})),
            r"'mean' as float32\[3\] and returned not",
        ),
        (
            with_statistics(lambda p, s, b, rng: (0.0, s | {"mean": s["mean"].astype("bfloat16")})),
            r"'mean' as float32\[3\] and returned bfloat16\[3\]: return every leaf as it came",
        ),
        (
            with_statistics(lambda p, s, b, rng: plain_form(p, b, rng)),
            r"the loss returns \(loss, model_state\), and it returned",
        ),
        (
            lambda: jt.init_state(
                lambda rng: {"w": 1.0}, optax.sgd(0.1), jax.random.key(0), has_model_state=True
            ),
            r"init_fn returns \(params, model_state\), and it returned dict",
        ),
    ],
)
def test_a_loss_of_another_form_is_refused_in_one_sentence(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def run(loss_fn, **options):
    optimizer = optax.sgd(0.1)
    state = jt.init_state(lambda rng: {"w": jnp.ones(3)}, optimizer, jax.random.key(0))
    jt.build_train_step(loss_fn, optimizer, **options)(state, jnp.ones((4, 3)))
