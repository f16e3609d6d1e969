"""The norms of every layer: against NumPy float64, on stacked layers, on a mesh, over a resume."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import jit

import jaxtrain as jt
from jaxtrain.optim import reports, watch
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from tests.engines import pipelines as small

LAYERS, RATE = 6, 0.5
# In natural order, in interleaved chunks, and in stages of different sizes, whose rows are padded.
STACKS = [
    jt.Stack(),
    jt.Stack(virtual=2),
    jt.Stack(counts=(3, 1, 2)),
    jt.Stack(virtual=2, counts=(1, 2, 1, 2)),
]


def random_tree(seed):
    normal = np.random.default_rng(seed).normal
    return {
        "bias": normal(size=2),
        "blocks": {"b": normal(size=(LAYERS, 3)), "w": normal(size=(LAYERS, 4, 3))},
        "head": {"kernel": normal(size=(3, 2))},
    }


def norms(kind, tree):
    """The definition, in float64."""
    layers = [
        np.linalg.norm(np.concatenate([x[layer].ravel() for x in tree["blocks"].values()]))
        for layer in range(LAYERS)
    ]
    return {
        f"{kind}/blocks": np.array(layers),
        f"{kind}/bias": np.linalg.norm(tree["bias"]),
        f"{kind}/head/kernel": np.linalg.norm(tree["head"]["kernel"]),
    }


def expected(grads, params, updates):
    told = norms("grad_norm", grads) | norms("param_norm", params) | norms("update_norm", updates)
    ratios = {
        name.replace("update_norm", "update_ratio"): value / told[name.replace("update", "param")]
        for name, value in told.items()
        if name.startswith("update_norm")
    }
    return told | ratios


def told(opt_state):
    return {name: np.array(x) for name, x in reports(opt_state).items() if "/" in name}


def check(found, wanted, rtol=1e-5):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == np.shape(value), name
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)


@pytest.mark.parametrize("stack", STACKS)
def test_the_norms_are_those_of_the_definition_in_every_third_update(stack):
    tx = jt.make_optimizer("sgd", RATE, watch_every=3, stacked=stack.axes, freeze=("^frozen$",))
    natural, still = random_tree(0), {"frozen": jnp.ones(2)}
    natural["blocks"]["w"][2] = 0.0
    natural["blocks"]["b"][2] = 0.0
    params = stack.cut(jax.tree.map(jnp.float32, natural)) | still
    state, update = tx.init(params), jit(tx.update)
    for number in range(1, 8):
        grads = random_tree(number)
        cut = stack.cut(jax.tree.map(jnp.float32, grads)) | still
        _, state = update(cut, state, params)
        if number in (1, 3, 6):
            with np.errstate(divide="ignore"):  # layer 2 holds zeros, which an update leaves
                wanted = expected(grads, natural, jax.tree.map(lambda g: RATE * g, grads))
        check(told(state), wanted)


@pytest.mark.parametrize("stack", STACKS)
def test_the_histograms_are_those_of_numpy(stack):
    bins, natural, grads = 7, random_tree(0), random_tree(1)
    tx = jt.make_optimizer("sgd", RATE, watch_every=3, watch_bins=bins, stacked=stack.axes)
    params, cut = (stack.cut(jax.tree.map(jnp.float32, tree)) for tree in (natural, grads))
    state = jit(tx.update)(cut, tx.init(params), params)[1]
    state = jit(tx.update)(params, state, params)[1]  # the second is not measured
    found = {name: np.array(x) for name, x in reports(state).items() if "histogram" in name}
    updates = jax.tree.map(lambda g: -RATE * g, grads)
    assert len(found) == 9
    for kind, tree in (("grad", grads), ("param", natural), ("update", updates)):
        for name, parts in (
            ("blocks", list(tree["blocks"].values())),
            ("bias", [tree["bias"][None]]),
            ("head/kernel", [tree["head"]["kernel"][None]]),
        ):
            r = max(np.abs(part).max() for part in parts)
            rows = [
                np.histogram(np.concatenate([x[i].ravel() for x in parts]), bins, (-r, r))[0]
                for i in range(len(parts[0]))
            ]
            wanted = np.array([[*row, r] for row in rows])
            wanted = wanted if name == "blocks" else wanted[0]
            np.testing.assert_allclose(found[f"{kind}_histogram/{name}"], wanted, rtol=1e-6)


def test_what_is_not_updated_has_the_ratio_0_and_bfloat16_is_summed_in_float32():
    tx = watch(optax.sgd(RATE), every=1)
    params = {"still": jnp.zeros(2), "long": jnp.full(3000, 1.5, jnp.bfloat16)}
    grads = params | {"long": params["long"] / 2}
    found = told(tx.update(grads, tx.init(params), params)[1])
    assert found["update_ratio/still"] == found["grad_norm/still"] == 0
    assert found["param_norm/long"] == pytest.approx(1.5 * 3000**0.5, rel=1e-6)
    assert found["update_ratio/long"] == pytest.approx(0.25, rel=1e-6)


def test_accumulated_calls_are_one_update_whose_whole_gradient_is_measured():
    tx = jt.make_optimizer("sgd", RATE, clip_norm=1e-3, watch_every=2, accumulate=2)
    params = {"w": jnp.array([3.0, 4.0])}
    state, found = tx.init(params), []
    for scale, weight in ((1, 3), (5, 1), (2, 1), (4, 1), (1, 1), (1, 1), (jnp.nan, 1), (1, 1)):
        grads = {"w": jnp.array([0.6, 0.8]) * scale}
        _, state = tx.update(grads, state, params, weight=weight)
        found.append(float(reports(state)["grad_norm/w"]))
    # Updates 1 and 2 are measured, 3 is not, and the fourth is left out.
    assert found == pytest.approx([0, 2, 2, 3, 3, 3, 3, 3])
    assert float(reports(state)["update_norm/w"]) == pytest.approx(RATE * 1e-3)


RULES = [
    ("^blocks/", ("layers", "embed", "mlp")),
    ("^embed$", (None, "embed")),
    ("^head$", ("mlp", None)),
]


def init(rng):
    keys = jax.random.split(rng, 3)
    return {
        "blocks": {"w": 0.3 * jax.random.normal(keys[0], (4, 16, 16))},
        "embed": 0.3 * jax.random.normal(keys[1], (8, 16)),
        "head": 0.3 * jax.random.normal(keys[2], (16, 4)),
    }


def loss_fn(params, batch, rng):
    x = batch["x"] @ params["embed"]
    for layer in range(4):
        x = x + jnp.tanh(x @ params["blocks"]["w"][layer])
    return jt.WeightedLoss(jnp.square(x @ params["head"] - batch["y"]).sum(), jnp.float32(16))


def batch_of(number):
    normal = np.random.default_rng(number).normal
    return {"x": np.float32(normal(size=(16, 8))), "y": np.float32(normal(size=(16, 4)))}


def test_a_mesh_measures_what_one_device_does_and_a_resumed_run_goes_on(tmp_path):
    watching = {"stacked": ("^blocks/",), "watch_every": 2, "watch_bins": 8}
    tx = jt.make_optimizer("lamb", 0.01, clip_norm=1.0, **watching)
    seen = {}
    for name, mesh in (
        ("one", jt.make_mesh(devices=jax.devices()[:1])),
        ("eight", jt.make_mesh(fsdp=4, tensor=2)),
    ):
        state = jt.init_state(init, tx, jax.random.key(0), mesh=mesh, rules=RULES)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        step = jt.build_train_step(loss_fn, tx)
        train = jt.compile_step(step, state, batch_of(0), mesh=mesh)
        seen[name] = []
        for number in range(4):
            if name == "eight" and number == 3:
                with Checkpointer(tmp_path) as checkpoints:
                    checkpoints.save(3, state)
                    saved, state = digest(state), checkpoints.restore(like)
                assert digest(state) == saved
            state, metrics = train(state, batch_of(number))
            seen[name].append({k: np.array(x) for k, x in metrics.items() if "norm/" in k})
            if not number:
                seen[name][0] |= {k: np.array(x) for k, x in metrics.items() if "param_h" in k}
    for one, eight in zip(*seen.values(), strict=True):
        check(eight, one)
        assert one["grad_norm/blocks"].shape == (4,)
    # Of four updates the first, the second and the fourth are measured.
    heads = [float(each["grad_norm/head"]) for each in seen["one"]]
    assert heads[1] == heads[2]
    assert len(set(heads)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stack"),
    [
        ("pipe=2,fsdp=2,tensor=2", jt.Stack()),
        ("pipe=2,data=2,tensor=2", jt.Stack(virtual=2)),
        ("pipe=2,data=4", jt.Stack(counts=(5, 3))),
    ],
)
def test_a_pipeline_measures_what_one_device_does(layout, stack):
    # Compared with the rest of the optimizer's state, leaf by leaf.
    how = {"schedule": "interleaved" if stack.virtual > 1 else "1f1b", "watch_every": 2}
    small.assert_lamb_agrees(layout, stack, small.loss_fn, small.STAGES, **how)


def test_a_run_that_does_not_watch_keeps_nothing_and_the_arguments_are_checked():
    params = jax.tree.map(jnp.float32, random_tree(0))
    nothing = jt.make_optimizer("sgd", RATE, watch_every=0).init(params)
    assert told(nothing) == {}
    assert "norms" not in str(jax.tree.structure(nothing))
    with pytest.raises(ValueError, match="`watch_every` is -1; it must be at least 0"):
        jt.make_optimizer("sgd", RATE, watch_every=-1)
    with pytest.raises(ValueError, match="`watch_bins` is 9 and `watch_every` 0: give that, too"):
        jt.make_optimizer("sgd", RATE, watch_bins=9)
    tx = watch(optax.sgd(RATE), every=1)
    with pytest.raises(ValueError, match="watch measures the parameters"):
        tx.update(params, tx.init(params))
