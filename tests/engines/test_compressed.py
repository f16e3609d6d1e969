"""Compressed gradients: what was sent and what is kept are the gradient, on any mesh."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import build as build_module
from jaxtrain.engines.compressed import Compress, compressed
from jaxtrain.engines.plain import plain
from jaxtrain.methods.local_updates import Local, local_updates
from jaxtrain.planning.ahead_of_time import explain
from jaxtrain.tree import named_leaves
from tests import plugs, problems

FAST = {"xla_backend_optimization_level": 0}
RULES = {"powersgd": {"rank": 1}, "topk": {"fraction": 0.05}, "sign": {}, "int8": {}}
LOSS = jt.row_wise(problems.loss_fn)
R = 8


def compiled(engine, optimizer, mesh, accumulate=1, **given):
    """A state on a mesh and the compiled step of the small regression."""
    how = {"mesh": mesh, "rules": jt.Rules(plugs.RULES)}
    init = {} if engine.init is None else {"memory": engine.init}
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), **how, **init, **given)
    step = jt.build_train_step(LOSS, optimizer, engine=engine, accumulate=accumulate)
    given = {**how, "compiler_options": FAST}
    return state, jt.compile_step(step, state, problems.make_batch(), **given)


def still():
    """An optimizer that moves nothing and keeps the latest gradient."""
    return optax.chain(problems.record_gradients(), optax.sgd(0.0))


@pytest.mark.parametrize("name", RULES)
def test_what_was_sent_and_what_is_kept_are_the_gradients(name):
    mesh = jt.make_mesh(data=4, devices=jax.devices()[:4])
    state, train = compiled(
        compressed(Compress(name, parts=R, **RULES[name])), still(), mesh, accumulate=2
    )
    params = jax.device_get(state.params)
    sent = wanted = jax.tree.map(lambda p: np.zeros(p.shape), params)
    add = functools.partial(jax.tree.map, lambda a, b: a + np.asarray(b, np.float64))
    for number in range(4):
        rows = problems.make_batch(number)
        before = jax.device_get(state.memory)
        if number == 2:  # a step that is left out changes nothing that is kept
            rows["y"][3] = np.nan
        state, metrics = train(state, rows)
        assert metrics["skipped"] == (2 if number == 2 else 0)
        if number == 2:
            jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.memory))
            continue
        sent = add(sent, state.opt_state[0])
        wanted = add(wanted, problems.reference(params, rows)[1])
    back = add(sent, jax.tree.map(lambda e: e.sum(0), state.memory["members"]))
    for part, x in named_leaves(wanted).items():
        scale = abs(x).max()
        np.testing.assert_allclose(named_leaves(back)[part], x, rtol=0, atol=1e-6 * scale)
        if part != "up/bias":  # a vector is sent whole
            lost = abs(named_leaves(sent)[part] - x).max()
            assert lost > (1e-4 if name == "int8" else 1e-2) * scale, part
    errors = state.memory["members"]["up"]["kernel"]
    assert errors.sharding.spec[0] == "data"
    assert errors.addressable_shards[0].data.shape[0] == 2


@pytest.mark.parametrize(
    ("axes", "name", "own"),
    [
        ({"data": 8}, "topk", {"fraction": 1.0}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "powersgd", {"rank": 32}),
    ],
)
def test_all_of_it_is_the_plain_step(axes, name, own):
    optimizer = jt.make_optimizer("adamw", 0.01, eps=1e-3)
    mesh, found = jt.make_mesh(**axes), []
    for engine, on in ((plain, None), (compressed(Compress(name, parts=R, **own)), mesh)):
        on = on or jt.make_mesh(data=1, devices=jax.devices()[:1])
        state, train = compiled(engine, optimizer, on)
        for number in range(3):
            state, metrics = train(state, problems.make_batch(number))
        found.append(jax.device_get((state.params, state.opt_state, metrics)))
    alone, ours = map(named_leaves, found)
    del alone["2/half"]  # no sum over rows
    for part, x in alone.items():
        np.testing.assert_allclose(ours[part], x, rtol=2e-6, atol=1e-6, err_msg=part)


def defined(name, x, q=None):
    """What the rules make of one matrix of R parts [R, m, n], in NumPy and float64."""
    x = np.asarray(x, np.float64)
    shape, size = x.shape[1:], x[0].size
    if name == "powersgd":
        p, _ = np.linalg.qr((x @ q).sum(0))
        return p @ p.T @ x.sum(0)
    flat = x.reshape(len(x), size)
    if name == "topk":
        count = round(0.05 * size)
        least = np.sort(abs(flat), axis=1)[:, -count][:, None]
        return np.where(abs(flat) >= least, flat, 0).sum(0).reshape(shape)

    def written(piece):
        if name == "sign":
            return np.where(piece >= 0, 1, -1) * abs(piece).mean()
        scale = abs(piece).max() / 127
        return np.round(piece / scale) * scale

    c = -(-size // (8 * R)) * 8
    pieces = [slice(i * c, min(size, (i + 1) * c)) for i in range(R)]
    sums = [sum(written(part[piece]) for part in flat) for piece in pieces if piece.start < size]
    return np.concatenate(list(map(written, sums))).reshape(shape)


@pytest.mark.parametrize("name", RULES)
def test_the_rules_are_their_definitions(name):
    """Gradients of given rows: the parts of a loss that is linear in its parameters."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(R, 9, 50)).astype(np.float32)
    engine = compressed(Compress(name, parts=R, **RULES[name]))
    params = {"w": jnp.zeros((9, 50))}
    loss = lambda w, state, batch, rng: (  # noqa: E731
        jt.WeightedLoss((w["w"] * batch["x"]).sum(), batch["weight"].sum()),
        None,
    )
    memory = engine.init(params)
    rows = {"x": x, "weight": np.full(R, 0.5, np.float32)}
    given = (params, None, rows, jax.random.key(0), None)
    found = jax.jit(lambda: engine(loss, 1)(*given, memory=memory))()
    q = np.asarray(memory["shared"]["w"]) if name == "powersgd" else None
    wanted = defined(name, x, q)
    np.testing.assert_allclose(found.grads["w"], wanted, rtol=0, atol=2e-5 * abs(wanted).max())
    # On one device too the bytes are those of R devices: 450 entries are 8 pieces of 64.
    count = {"powersgd": 8 * 59, "topk": 8 * R * 22, "sign": 2 * (64 + 32), "int8": 2 * (512 + 32)}
    assert found.loss.means()["exchanged_bytes"] == count[name]
    errors = np.asarray(found.memory["members"]["w"], np.float64).sum(0)
    weight = 0.5 * R  # errors are of means
    np.testing.assert_allclose(errors * weight + wanted, x.sum(0, dtype=float), atol=1e-4)


def matrices(width=256):
    """A loss of two matrices and a vector."""

    def loss(params, batch, rng):
        y = jnp.tanh(batch["x"] @ params["a"]) @ params["b"] + params["c"]
        return jt.WeightedLoss((y**2).sum(), float(len(batch["x"])))

    def init(rng):
        a, b = jax.random.normal(rng, (2, width, width))
        return {"a": a, "b": b, "c": jnp.zeros(width)}

    return jt.row_wise(loss), init, {"x": np.ones((32, width), np.float32)}


@pytest.mark.parametrize(
    "name", ["powersgd", "topk", "int8", pytest.param("sign", marks=pytest.mark.slow)]
)
def test_a_step_exchanges_once_and_so_many_bytes(name):
    width, k = 256, 4
    loss, init, batch = matrices(width)
    own = {"powersgd": {"rank": k}, "topk": {"fraction": 0.01}}.get(name, {})
    engine = compressed(Compress(name, parts=R, **own))
    mesh, optimizer = jt.make_mesh(data=R), optax.sgd(0.1)
    state = jt.init_state(init, optimizer, jax.random.key(0), mesh=mesh, memory=engine.init)
    step = jt.build_train_step(loss, optimizer, engine=engine, accumulate=2)
    train = jt.compile_step(step, state, batch, mesh=mesh, compiler_options=FAST)
    found = sum(c.sent * c.executions for c in explain(train, mesh).collectives) * R / (R - 1)
    size = width * width
    matrix = {
        "powersgd": 2 * 4 * k * 2 * width,
        "topk": 8 * R * round(0.01 * size),
        "sign": 2 * (size / 8 + 4 * R),
        "int8": 2 * (size + 4 * R),
    }[name]
    wanted = 2 * matrix + 2 * 4 * width
    assert wanted <= found <= 1.1 * wanted
    assert wanted < 0.4 * 2 * 4 * 2 * size
    _, metrics = train(state, batch)
    assert metrics["exchanged_bytes"] == wanted


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rank": 2}, "`compress.rank` is 2 and `compress.name` None"),
        ({"name": "sign", "fraction": 0.5}, "which has none"),
        ({"name": "topk", "fraction": 0.0}, "`compress.fraction` is 0.0"),
        ({"name": "topk", "parts": 0}, "`parts` is 0"),
    ],
)
def test_options_that_cannot_be_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        Compress(**given)


def test_what_it_cannot_go_with_is_refused_before_anything_is_compiled():
    engine, optimizer = compressed(Compress("int8", parts=4)), optax.sgd(0.1)
    refused = functools.partial(pytest.raises, ValueError)
    with refused(match="neither `compress.parts` nor `mesh.data`"):
        Compress("int8").on_mesh(-1)
    with refused(match="'data' has size 8: give a multiple"):
        compiled(engine, optimizer, jt.make_mesh(data=8))
    with refused(match="`zero` 3"):
        compiled(engine, optimizer, jt.make_mesh(data=4, fsdp=2), zero=3)
    with refused(match="has 16 rows .* 4 parts of 8 microbatches"):
        compiled(engine, optimizer, jt.make_mesh(data=4, fsdp=2), accumulate=8)
    with refused(match="not declared a sum over rows"):
        jt.build_train_step(problems.loss_fn, optimizer, engine=engine)
    state = jt.init_state(
        problems.init, optimizer, jax.random.key(0), policy="fp16", memory=engine.init
    )
    step = jt.build_train_step(LOSS, optimizer, policy="fp16", engine=engine)
    with refused(match="dynamic loss scale"):
        jax.eval_shape(step, state, problems.make_batch())
    made = plugs.experiment(plugs.Config(global_batch=16), engine=engine)
    with refused(match="gradients are compressed"):
        local_updates(made, Local(replicas=4))
    with refused(match="another engine"):
        config = jt.Config(compress=Compress("int8", parts=4), gradients="int8")
        config.experiment("x", init_fn=None, loss_fn=LOSS, batch=None, train_batches=None)


Config = plugs.Config


def build(config):
    return plugs.experiment(config)


@pytest.mark.slow
def test_a_run_is_resumed_with_its_errors_and_is_the_same_on_other_meshes(tmp_path, capsys):
    flags = ["--global-batch", "32", "--accumulate", "2", "--compress.name", "powersgd"]
    flags += ["--compress.rank", "1", "--steps", "4", "--save-every", "2"]

    def trained(folder, *more):
        jt.main(Config, build, [*flags, "--run-dir", str(tmp_path / folder), *more])
        kept = jt.Checkpointer(tmp_path / folder / "checkpoints")
        how = {"engine": compressed(Compress("powersgd", rank=1, parts=8))}
        made = plugs.experiment(jt.Config(global_batch=32), **how)
        mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
        state = kept.restore(build_module.make_abstract_state(made, mesh))
        return named_leaves(jax.device_get((state.params, state.opt_state, state.memory)))

    whole = trained("whole", "--mesh.data", "8")
    others = (["8"], ["4", "--mesh.fsdp", "2"], ["2", "--mesh.fsdp", "2", "--mesh.tensor", "2"])
    for number, mesh in enumerate(others):
        again = tmp_path / f"again{number}"
        shutil.copytree(tmp_path / "whole", again)
        shutil.rmtree(again / "checkpoints/4")
        found = trained(again.name, "--mesh.data", *mesh, "--resume")
        assert "resumed at step 2" in capsys.readouterr().out
        for name, x in whole.items():
            same = {"rtol": 0, "atol": 0 if mesh == ["8"] else 2e-5 * abs(x).max()}
            np.testing.assert_allclose(found[name], x, err_msg=f"{mesh} {name}", **same)
