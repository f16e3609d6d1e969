"""Tables of which a step touches few rows: against whole tables in float64, and in the program."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compile import compile_step
from jaxtrain.methods.touched import touched_rows
from jaxtrain.ops.row_exchange import buffer_rows, take_rows
from jaxtrain.optim.rows import RowsState
from jaxtrain.planning.estimate import estimate_compiled
from jaxtrain.sharding.rules import OptionalRules, Rules
from jaxtrain.tree import nodes_of

V, D, B, BAG = 64, 4, 32, 3
RATE, LIMIT, EPS = 0.1, 2.0, 1e-8
FAST = {"xla_backend_optimization_level": 0}
RULES = Rules(OptionalRules([("^embed/", ("rows", None))]))
METHOD = touched_rows({"embed/a": ["one"], "embed/b": ["bag"]})


def init(rng, rows=V):
    a, b, c = jax.random.split(rng, 3)
    embed = {"a": jax.random.normal(a, (rows, D)), "b": jax.random.normal(b, (2 * rows, D))}
    return {"embed": embed, "w": jax.random.normal(c, (D, 1)), "unused": jnp.ones(D)}


def loss(params, batch, rng):
    x_BD = take_rows(params["embed"]["a"], batch["one"])
    x_BD += take_rows(params["embed"]["b"], batch["bag"]).sum(1)
    x_BD = jt.constrain(x_BD, "batch", None)
    off_B = (x_BD @ jt.gather(params["w"], "w"))[:, 0] - batch["target"]
    return jt.WeightedLoss(0.5 * jnp.square(off_B).sum(), jnp.float32(len(off_B)))


def make_batch(seed):
    """Popular ids, and some that no table has."""
    r = np.random.default_rng(seed)
    one = np.minimum(r.zipf(1.3, B) - 1, V + 1)
    bag = r.integers(-1, 2 * V, (B, BAG))
    target = r.normal(size=B)
    return {"one": one.astype(np.int32), "bag": bag.astype(np.int32), "target": np.float32(target)}


def optimizer_of(rule="adagrad", **how):
    return jt.optim.by_rows(optax.sgd(0.01), ("^embed/",), RATE, rule=rule, eps=EPS, **how)


def trained(axes, rule="adagrad", *, accumulate=1, policy="f32", steps=3):
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    optimizer, given = optimizer_of(rule, clip_norm=LIMIT), {"mesh": mesh, "rules": RULES}
    state = jt.init_state(init, optimizer, jax.random.key(0), policy=policy, **given)
    how = {"gradient_shardings": jt.gradient_shardings(state), "policy": policy}
    step = jt.build_train_step(loss, optimizer, gather="model", accumulate=accumulate, **how)
    step = METHOD.step(step)
    train = compile_step(step, state, make_batch(0), compiler_options=FAST, **given)
    before = jax.device_get(state.params)
    for number in range(steps):
        state, metrics = train(state, make_batch(number))
    return before, jax.device_get(state), jax.device_get(metrics)


def defined(params, rule="adagrad", steps=3):
    """The same in float64, of whole tables."""
    a, b, w = (np.float64(x) for x in (*params["embed"].values(), params["w"][:, 0]))
    sums = {"a": np.zeros(len(a)), "b": np.zeros(len(b))}
    for number in range(steps):
        batch = make_batch(number)
        grads = {"a": np.zeros_like(a), "b": np.zeros_like(b), "w": np.zeros_like(w)}
        ids = [("a", a, i, r) for r, i in enumerate(batch["one"]) if 0 <= i < len(a)]
        bags = enumerate(batch["bag"])
        ids += [("b", b, i, r) for r, bag in bags for i in bag if 0 <= i < len(b)]
        x = np.zeros((B, D))
        for _, table, i, row in ids:
            x[row] += table[i]
        off = (x @ w - batch["target"]) / B
        grads["w"] = off @ x
        for name, _, i, row in ids:
            grads[name][i] += off[row] * w
        norm = math.sqrt(sum(np.square(g).sum() for g in grads.values()))
        grads = {name: g * min(1, LIMIT / norm) for name, g in grads.items()}
        w = w - 0.01 * grads["w"]
        for name, table in (("a", a), ("b", b)):
            root = 1.0
            if rule == "adagrad":
                sums[name] += np.square(grads[name]).mean(1)
                root = (np.sqrt(sums[name]) + EPS)[:, None]
            table -= RATE * grads[name] / root
    return {"a": a, "b": b, "w": w}, sums, norm


@pytest.mark.parametrize(
    ("axes", "rule", "accumulate"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, "adagrad", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ({"data": 1}, "sgd", 1),
                ({"data": 1}, "adagrad", 2),
                ({"data": 8}, "adagrad", 1),
                ({"fsdp": 8}, "sgd", 2),
                ({"data": 2, "fsdp": 2, "tensor": 2}, "adagrad", 2),
                ({"data": 4, "tensor": 2}, "adagrad", 1),
            ]
        ),
    ],
)
def test_steps_are_those_of_whole_tables(axes, rule, accumulate):
    before, state, metrics = trained(axes, rule, accumulate=accumulate)
    wanted, sums, norm = defined(before, rule)
    assert norm > LIMIT  # the clip counts the tables
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"][:, 0], wanted["w"], rtol=1e-5, atol=1e-6)
    (rows_of,) = nodes_of(RowsState, state.opt_state)
    for name in "ab":
        found, first = state.params["embed"][name], before["embed"][name]
        np.testing.assert_allclose(found, wanted[name], rtol=1e-5, atol=1e-6)
        ids = np.concatenate([make_batch(n)["one" if name == "a" else "bag"] for n in range(3)])
        untouched = np.setdiff1d(np.arange(len(first)), ids)
        assert len(untouched) > 5
        assert found[untouched].tobytes() == first[untouched].tobytes()
        if rule == "adagrad":
            np.testing.assert_allclose(rows_of.sums["embed"][name], sums[name], rtol=1e-5)
            assert not rows_of.sums["embed"][name][untouched].any()


def test_rows_come_in_as_many_exchanges_as_it_takes():
    """All of a device's ids fall on one owner, three times what a buffer holds."""
    mesh, N = jt.make_mesh(data=8, devices=jax.devices()), 64
    assert buffer_rows(N, 8) == 20
    r = np.random.default_rng(0)
    table = r.normal(size=(8 * N, D)).astype(np.float32)
    ids = np.concatenate([7 * N + r.permutation(N), r.integers(-3, 8 * N + 3, 7 * N)])
    d_rows = r.normal(size=(8 * N, D)).astype(np.float32)

    def both(table, given):
        rows, vjp = jax.vjp(lambda table: take_rows(table, given["ids"]), table)
        return table, {"rows": rows, "grad": vjp(given["d"])[0]}

    given = {"ids": ids.astype(np.int32), "d": d_rows}
    place = jax.sharding.NamedSharding(mesh, jax.P("data"))
    own = {"mesh": mesh, "donate": False, "compiler_options": FAST}
    run = compile_step(lambda *x: both(*x)[1], jax.device_put(table, place), given, **own)
    found = jax.device_get(run(jax.device_put(table, place), given))
    known = (ids >= 0) & (ids < 8 * N)
    wanted = np.where(known[:, None], table[ids.clip(0, 8 * N - 1)], 0)
    np.testing.assert_array_equal(found["rows"], wanted)
    grad = np.zeros((8 * N, D))
    np.add.at(grad, ids[known], np.float64(d_rows[known]))
    np.testing.assert_allclose(found["grad"], grad, rtol=1e-5, atol=1e-6)
    sent = re.findall(r"= \(f32\[([\d,]+)\].* all-to-all\(", run.compiled.as_text())
    assert sent == 2 * [f"1,20,{D}"]  # to each device


def compiled(rows, method=METHOD):
    mesh = jt.make_mesh(data=4, fsdp=2, devices=jax.devices())
    optimizer, given = optimizer_of(clip_norm=LIMIT), {"mesh": mesh, "rules": RULES}
    make = lambda rng: init(rng, rows)  # noqa: E731
    state = jt.abstract_state(make, optimizer, **given)
    how = {"gradient_shardings": jt.gradient_shardings(state), "norms": True}
    step = jt.build_train_step(loss, optimizer, gather="model", **how)
    return compile_step(method.step(step), state, make_batch(0), compiler_options=FAST, **given)


def test_no_operation_of_the_program_is_as_large_as_a_table():
    """But for those that write rows into it, in its own memory."""
    programs = {rows: compiled(rows) for rows in (1 << 12, 1 << 15)}
    sizes = (p.compiled.memory_analysis().temp_size_in_bytes for p in programs.values())
    assert len(set(sizes)) == 1
    assert len({estimate_compiled(p).cost.hbm_bytes for p in programs.values()}) == 1
    text = programs[1 << 15].compiled.as_text()
    made = re.findall(r"= \w+\[(?:4096|8192)[,\]]\S* ([\w-]+)\(", text)
    writes = {"scatter", "dynamic-update-slice"}  # of rows in their order
    assert set(made) <= writes | {"parameter", "fusion", "get-tuple-element"}
    assert sum(made.count(each) for each in writes) == 4  # two tables, and what is kept of them
    assert not re.search(r"\[(?:32768|65536)[,\]]", text)  # nothing is whole


def test_what_would_differ_from_whole_tables_is_refused():
    params, batch = init(jax.random.key(0)), make_batch(0)

    none = dict.fromkeys(("embed/a", "embed/b", "embed/c"), ())

    def step_of(optimizer, method=METHOD):
        state = jt.init_state(init, optimizer, jax.random.key(0))
        return method.step(jt.build_train_step(loss, optimizer))(state, batch)

    with pytest.raises(ValueError, match="the optimizer updates none by rows"):
        step_of(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"keeps '.*ema/embed/a' of the table 'embed/a'"):
        step_of(jt.optim.ema(optimizer_of(), 0.9))
    with pytest.raises(ValueError, match="has the tables embed/a and the optimizer updates"):
        step_of(optimizer_of(), touched_rows({"embed/a": ["one"]}))
    with pytest.raises(ValueError, match="has the tables embed/a, embed/b, embed/c and"):
        step_of(optimizer_of(), touched_rows(none))
    with pytest.raises(ValueError, match="`accumulate` is given and tables are updated by rows"):
        jt.optim.by_rows(jt.make_optimizer("sgd", 0.1, accumulate=2), ("^embed/",), 0.1).init(
            params
        )
    with pytest.raises(ValueError, match="selects parameter 'unused', whose shape"):
        jt.optim.by_rows(optax.sgd(0.1), ("^unused",), 0.1).init(params)


def test_clipping_has_the_norm_of_gradients_whose_square_float16_has_not():
    tx = jt.optim.by_rows(optax.sgd(1.0), ("^table$",), 1.0, rule="sgd", clip_norm=1.0)
    params = {"table": jnp.zeros((2, 2), jnp.float16), "w": jnp.zeros(1, jnp.float16)}
    grads = params | {"table": jnp.full((2, 2), 300, jnp.float16)}
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["table"], np.full((2, 2), -0.5, np.float16))
