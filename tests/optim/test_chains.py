"""One table of tests over every optimizer: descent, stacking, freezing, accumulation, dtypes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import jit

import jaxtrain as jt
from jaxtrain.optim import OPTIMIZERS, decay_mask, make_optimizer, schedules
from jaxtrain.optim.options import keywords
from jaxtrain.optim.rules import PER_LAYER, RULES
from jaxtrain.tree import map_named, named_leaves
from tests import problems

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)

# Small enough matrices to factor, or Adafactor's own rule would go untested.
SMALL = {"adafactor": {"min_dim_size_to_factor": 3}}
STACKED = {r"^blocks/": 1, r"^pairs/": 2}
SHAPES = {
    "blocks": {"attn": {"w": (2, 4, 6)}, "bias": (2, 6)},
    "pairs": {"w": (1, 2, 5, 4)},
    "head": {"w": (4, 7)},
}


def random_tree(seed, leading=()):
    """Trees are NumPy's: one JAX operation after another would take longer than the tests."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=leading + shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def initial_params():
    params = random_tree(0)
    # One layer whose norm is 0 beside another whose norm is not: its trust ratio alone is 1.
    params["blocks"]["bias"][0] = 0.0
    # Layers of very different size, so that rules taken over the whole stack come out wrong.
    params["blocks"]["attn"]["w"][0] *= 0.1
    return params


def steps_of_gradients(steps):
    grads = random_tree(1, (steps,))
    grads["blocks"]["attn"]["w"][:, 1] *= 0.1
    grads["pairs"]["w"][:, 0, 1] *= 5.0
    return grads


def one_gradient():
    return jax.tree.map(lambda g: g[0], steps_of_gradients(1))


def unstack(tree, axes_before=0):
    """Splits the stacked layers into parameters of their own: blocks/w -> blocks_0/w, ..."""
    out = {"head": tree["head"]}
    for key, sizes in (("blocks", (2,)), ("pairs", (1, 2))):
        for index in np.ndindex(sizes):
            pick = (slice(None),) * axes_before + index
            name = "_".join([key, *map(str, index)])
            out[name] = jax.tree.map(lambda x, pick=pick: x[pick], tree[key])
    return out


def train(tx, params, grads):
    """Applies updates for gradients stacked by step, in one scan."""

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), grads)
    return params, state


def assert_close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@every_optimizer
def test_stacked_layers_train_as_unstacked_ones(name):
    def run(params, grads, stacked):
        tx = make_optimizer(
            name, 0.05, weight_decay=0.1, clip_norm=8.0, stacked=stacked, **SMALL.get(name, {})
        )
        return train(tx, params, grads)[0]

    params, grads = initial_params(), steps_of_gradients(10)

    @jit
    def both(params, grads):
        return run(params, grads, STACKED), run(unstack(params), unstack(grads, 1), ())

    stacked, apart = both(params, grads)
    assert_close(unstack(stacked), apart, rtol=3e-5, atol=3e-6)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-3, stacked, params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("name", PER_LAYER)
def test_the_stack_taken_as_one_leaf_would_differ(name):
    # The same comparison without ``stacked=`` fails, so the test above has something to find.
    params = {"w": initial_params()["blocks"]["attn"]["w"]}
    grads = {"w": one_gradient()["blocks"]["attn"]["w"]}
    options = {"lars": {"trust_coefficient": 1.0}, "muon": {"muon_mask": ("w",)}} | SMALL

    def first_update(stacked):
        tx = make_optimizer(name, 1.0, stacked=stacked, **options.get(name, {}))
        return tx.update(grads, tx.init(params), params)[0]["w"]

    difference = jit(lambda: jnp.abs(first_update(()) - first_update(("w",))).max())()
    assert difference > 1e-2


@every_optimizer
def test_descends_under_vmap_over_learning_rates_and_grad(name):
    target = jnp.asarray(np.random.default_rng(5).normal(size=(4, 4)), jnp.float32)
    params = {"w": target + 1.0, "b": jnp.ones(4)}

    def loss_of(params):
        return jnp.sum((params["w"] - target) ** 2) + jnp.sum(params["b"] ** 2)

    def final_loss(rate):
        options = {"trust_coefficient": 0.1} if name == "lars" else {}
        tx = make_optimizer(name, rate, weight_decay=1e-4, clip_norm=5.0, **options)

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss_of)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        (after, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=20)
        return loss_of(after)

    rates, h = np.array([0.2, 0.3] if name == "muon" else [0.02, 0.04]), 1e-3
    lanes = jnp.asarray(np.concatenate([rates, rates - h, rates + h]), jnp.float32)
    losses, slopes = jit(jax.vmap(jax.value_and_grad(final_loss)))(lanes)
    assert all(losses[:2] < 0.75 * loss_of(params)), losses
    np.testing.assert_allclose(slopes[:2], (losses[4:] - losses[2:4]) / (2 * h), rtol=0.05)


@every_optimizer
def test_frozen_parameters_are_as_if_they_were_not_there(name):
    params, grads = initial_params(), one_gradient()
    # The gradient of what is frozen may be anything at all.
    grads["head"]["w"][:] = np.nan
    options = {"weight_decay": 0.1, "clip_norm": 2.0, "stacked": STACKED, **SMALL.get(name, {})}
    frozen = make_optimizer(name, 0.1, freeze=(r"^head/",), **options)
    plain = make_optimizer(name, 0.1, **options)

    @jit
    def both(params, grads):
        def without(tree):
            return {key: value for key, value in tree.items() if key != "head"}

        some = without(params)
        updates, _ = plain.update(without(grads), plain.init(some), some)
        return frozen.update(grads, frozen.init(params), params), updates

    (updates, state), expected = both(params, grads)
    assert not np.any(updates.pop("head")["w"])
    assert_close(updates, expected, rtol=1e-6)
    assert not any("head" in path for path in named_leaves(state))


@every_optimizer
def test_state_paths_end_in_the_parameter_path_and_keep_its_dtype(name):
    shapes = jax.eval_shape(initial_params)
    half = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), shapes)
    tx = make_optimizer(
        name, 0.1, clip_norm=1.0, stacked=STACKED, accumulate=2, **SMALL.get(name, {})
    )
    for params, dtype in ((shapes, jnp.float32), (half, jnp.bfloat16)):
        state = jax.eval_shape(tx.init, params)
        leaves = {
            path: leaf
            for path, leaf in named_leaves(state).items()
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim
        }
        leaves = {p: leaf for p, leaf in leaves.items() if not p.endswith("ns_coeffs")}
        by_length = sorted(named_leaves(params), key=len, reverse=True)
        for path, leaf in leaves.items():
            owner = next((p for p in by_length if path.endswith("/" + p)), None)
            assert owner is not None, path
            assert leaf.dtype == (jnp.float32 if "acc_grads" in path else dtype), path
            full = named_leaves(params)[owner].shape
            assert name == "adafactor" or leaf.shape == full, path
            stacked_axes = {"blocks": 1, "pairs": 2}.get(owner.split("/")[0], 0)
            assert leaf.shape[:stacked_axes] == full[:stacked_axes], path
        if name not in ("sgd", "rmsprop", "adafactor"):
            assert {p for p in by_length if any(k.endswith("/" + p) for k in leaves)} == set(
                by_length
            )
        # Gradients of either width leave the state's structure and dtypes as they were.
        for grads in (shapes, half):
            updates, after = jax.eval_shape(tx.update, grads, state, params)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
                lambda x: (x.shape, x.dtype), state
            )
            assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(
                lambda x: x.dtype, grads
            )


@every_optimizer
def test_four_weighted_calls_make_one_update(name):
    params, grads = (
        {"blocks": tree["blocks"], "head": tree["head"]}
        for tree in (initial_params(), steps_of_gradients(4))
    )
    weights = np.array([5.0, 1.0, 0.0, 3.0], np.float32)
    options = {"weight_decay": 0.1, "clip_norm": 2.0, "stacked": ("^blocks/",)}
    options |= SMALL.get(name, {})
    accumulating = make_optimizer(name, 0.1, accumulate=4, **options)
    plain = make_optimizer(name, 0.1, **options)

    @jit
    def both(params, grads):
        def call(state, batch):
            grad, weight = batch
            updates, state = accumulating.update(grad, state, params, weight=weight)
            return state, updates

        state, updates = jax.lax.scan(call, accumulating.init(params), (grads, weights))
        mean = jax.tree.map(lambda g: jnp.tensordot(weights / weights.sum(), g, 1), grads)
        return updates, state, plain.update(mean, plain.init(params), params)

    updates, state, (expected, expected_state) = both(params, grads)
    assert not any(np.any(u[:3]) for u in jax.tree.leaves(updates))
    assert_close(jax.tree.map(lambda u: u[3], updates), expected, rtol=1e-3, atol=1e-6)
    assert_close(state.inner_opt_state, expected_state, rtol=1e-4, atol=1e-7)


@every_optimizer
def test_every_leaf_of_a_new_state_has_a_buffer_of_its_own(name):
    """A jitted step refuses to write over one that it is given twice."""
    leaves = jax.tree.leaves(make_optimizer(name, 0.1).init({"w": np.ones((2, 3), np.float32)}))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars", "muon"])
def test_multipliers_are_the_rate_and_the_decay_of_each_parameter(name):
    options = {"trust_coefficient": 0.1} if name == "lars" else {}
    layers = np.array([0.3, 0.7])
    tx = make_optimizer(
        name,
        0.05,
        weight_decay=0.1,
        # The first pattern that matches decides; the 1 x 2 layers of "pairs" have one factor each.
        rate_multipliers=[("^blocks/.*bias", 2.0), ("^blocks/", 0.5), ("^pairs/", layers)],
        decay_multipliers=lambda path: {"blocks/attn/w": 3.0, "head/w": 0.0}.get(path, 1.0),
        stacked=STACKED,
        **options,
    )
    params, grads = initial_params(), steps_of_gradients(5)
    parts = [("blocks/bias", (), 2.0, 1), ("blocks/attn/w", (), 0.5, 3), ("head/w", (), 1.0, 0)]
    parts += [("pairs/w", (0, layer), rate, 1) for layer, rate in enumerate(layers)]

    def alone(path, index, rate, decay, p, g):
        """The parameter, or one layer of it, by an optimizer of its own."""
        stacked = {} if index else {k: n for k, n in STACKED.items() if re.search(k, path)}
        # What Muon leaves to AdamW.
        left = name == "muon" and path in ("blocks/bias", "head/w")
        rule = ("adamw", {"b2": 0.95, "eps": 1e-10}) if left else (name, options)
        own = make_optimizer(
            rule[0], 0.05 * rate, weight_decay=0.1 * decay, stacked=stacked, **rule[1]
        )
        return train(own, {path: p[path][index]}, {path: g[path][(slice(None), *index)]})[0][path]

    @jit
    def both(params, grads):
        p, g = named_leaves(params), named_leaves(grads)
        return named_leaves(train(tx, params, grads)[0]), [alone(*part, p, g) for part in parts]

    together, expected = both(params, grads)
    for (path, index, *_), value in zip(parts, expected, strict=True):
        np.testing.assert_allclose(together[path][index], value, rtol=1e-5, atol=1e-6, err_msg=path)


def references(rate, decay, mask):
    """Each rule as optax has it. LARS has no decay here: see test_layerwise for the paper's."""
    coupled = optax.add_decayed_weights(decay, mask)
    return {
        "sgd": optax.chain(coupled, optax.sgd(rate)),
        "momentum": optax.chain(coupled, optax.sgd(rate, momentum=0.9)),
        "adam": optax.chain(coupled, optax.adam(rate)),
        "adamw": optax.adamw(rate, weight_decay=decay, mask=mask),
        "adan": optax.adan(rate, b2=0.5, eps_root=0.0, weight_decay=decay, mask=mask),
        "rmsprop": optax.chain(coupled, optax.rmsprop(rate, momentum=0.5)),
        "adafactor": optax.adafactor(
            rate,
            min_dim_size_to_factor=3,
            momentum=0.9,
            weight_decay_rate=rate * decay,
            weight_decay_mask=mask,
        ),
        "lion": optax.lion(rate, weight_decay=decay, mask=mask),
        "lamb": optax.lamb(rate, weight_decay=decay, mask=mask),
        "lars": optax.lars(rate),
        "muon": optax.contrib.muon(
            rate,
            weight_decay=decay,
            weight_decay_mask=mask,
            adam_b2=0.95,
            nesterov=False,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: map_named(
                lambda name, p: (
                    optax.contrib.MuonDimensionNumbers()
                    if p.ndim == 2 and name != "head/w"
                    else None
                ),
                params,
            ),
        ),
    }


@every_optimizer
def test_unstacked_it_is_optax(name):
    options = {
        # optax weights changes of the gradient by 1 - b2, and the paper by b2.
        "adan": {"b2": 0.5},
        "rmsprop": {"momentum": 0.5},
        "adafactor": {"min_dim_size_to_factor": 3, "momentum": 0.9},
        # optax has no default for them.
        "lamb": {"trust_mask": (".",)},
        "lars": {"trust_mask": (".",)},
        # optax has one eps and one nesterov for both groups, and decays none of AdamW's.
        "muon": {"decay_mask": (r"blocks_.*/w", r"pairs_"), "eps": 1e-8, "nesterov": False},
    }.get(name, {})
    decay = 0.0 if name == "lars" else 0.1
    ours = make_optimizer(name, 0.05, weight_decay=decay, **options)
    theirs = references(0.05, 0.1, decay_mask)[name]
    params, grads = unstack(initial_params()), unstack(steps_of_gradients(10), 1)
    run = jit(lambda p, g: (train(ours, p, g)[0], train(theirs, p, g)[0]))
    assert_close(*run(params, grads), rtol=1e-5, atol=1e-6)


@every_optimizer
def test_options_without_use_are_refused(name):
    values = {
        "nesterov": True,
        "trust_mask": ("w",),
        "muon_mask": ("w",),
        "muon_scale": "rms",
        "moment_dtype": "float32",
        "ns_steps": 3,
        "min_dim_size_to_factor": 4,
        "parameter_scale": False,
    }
    unused = {option for rule in RULES.values() for option in keywords(rule)}
    unused -= set(keywords(RULES[name]))
    assert unused
    for option in unused:
        with pytest.raises(
            ValueError, match=f"'{name}' has no option {option} .*it takes .*freeze"
        ):
            make_optimizer(name, 0.1, **{option: values.get(option, 0.5)})


def use_on(params, **options):
    make_optimizer("lamb", 0.1, **options).init(params)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: make_optimizer("adma", 0.1), "optimizer 'adma' is not one of sgd, momentum"),
        (lambda p: make_optimizer("sgd", -0.1), "`learning_rate` is -0.1"),
        (lambda p: make_optimizer("sgd", float("nan")), "`learning_rate` is nan"),
        (lambda p: make_optimizer("sgd", jnp.ones(2)), "`learning_rate` is Array"),
        (lambda p: make_optimizer("sgd", 0.1, weight_decay=-1), "`weight_decay` is -1"),
        (lambda p: make_optimizer("sgd", 0.1, clip_norm=0), "`clip_norm` is 0; it must be above 0"),
        (lambda p: make_optimizer("sgd", 0.1, accumulate=0), "`accumulate` is 0"),
        (lambda p: use_on(p, accumulate_ramp=[3]), "`accumulate_ramp` is [3]: write pairs"),
        (lambda p: use_on(p, accumulate_ramp=[(3, 1, 2)]), "`accumulate_ramp` is [(3, 1, 2)]"),
        (lambda p: make_optimizer("adam", 0.1, b1=1.0), "`b1` is 1; it must be at least 0 and"),
        (lambda p: make_optimizer("adam", 0.1, eps=-1), "`eps` is -1"),
        (lambda p: make_optimizer("adam", 0.1, nesterov=1), "`nesterov` is 1"),
        (lambda p: make_optimizer("adam", 0.1, moment_dtype="int8"), "`moment_dtype` is 'int8'"),
        (lambda p: make_optimizer("adam", 0.1, moment_dtype="?"), "`moment_dtype` is '?'"),
        (lambda p: make_optimizer("muon", 0.1, ns_steps=0), "`ns_steps` is 0"),
        (lambda p: make_optimizer("muon", 0.1, muon_scale="x"), "`muon_scale` is 'x'"),
        (lambda p: make_optimizer("muon", 0.1, adam_ratio=0), "`adam_ratio` is 0"),
        (
            lambda p: make_optimizer("adafactor", 0.1, clipping_threshold=0),
            "`clipping_threshold` is 0",
        ),
        (
            lambda p: make_optimizer("rmsprop", 0.1, nesterov=True),
            "`nesterov` has no effect on 'rmsprop' with momentum 0",
        ),
        (
            lambda p: make_optimizer("adafactor", 0.1, moment_dtype="bfloat16"),
            "'adafactor' with momentum 0 keeps none",
        ),
        (
            lambda p: make_optimizer("muon", 0.1, muon_mask=("bias",), stacked=STACKED).init(p),
            "`muon_mask` selects parameter 'blocks/bias', whose shape per layer is (6,)",
        ),
        (lambda p: use_on(p, stacked=("^block/",)), "`stacked` pattern '^block/' matches no param"),
        (lambda p: use_on(p, freeze=("embed",)), "`freeze` pattern 'embed' matches no parameter"),
        (lambda p: use_on(p, freeze="head"), "`freeze` is the string 'head'; write ('head',)"),
        (lambda p: use_on(p, freeze=("",)), "`freeze` freezes every parameter"),
        (lambda p: use_on(p, decay_mask=("nope",)), "`decay_mask` pattern 'nope' matches no"),
        (
            lambda p: use_on(p, freeze=lambda p: jax.tree.map(lambda _: False, p)),
            "`freeze` selects no parameter; the paths are like 'blocks/attn/w'",
        ),
        (
            lambda p: use_on(p, rate_multipliers=[("hed", 0.5)]),
            "`rate_multipliers` pattern 'hed' matches no parameter",
        ),
        (
            lambda p: use_on(p, decay_multipliers=[("head", -1.0)]),
            "`decay_multipliers` of parameter 'head/w' is -1; it must be at least 0 and finite",
        ),
        (
            lambda p: use_on(p, rate_multipliers=("head", 0.5)),
            "`rate_multipliers` is ('head', 0.5); write pairs: (('^head/', 0.5),)",
        ),
        (lambda p: use_on(p, rate_multipliers=0.5), "`rate_multipliers` is 0.5; write pairs"),
        (lambda p: use_on(p, decay_multipliers=None), "`decay_multipliers` is None; write pairs"),
        (
            lambda p: use_on(p, rate_multipliers=[("blocks", [1, 2, 3])], stacked=STACKED),
            "`rate_multipliers` of parameter 'blocks/attn/w' has shape (3,); it must be a number, "
            "or one for each of its 2 layers",
        ),
        (
            lambda p: use_on(p, rate_multipliers=[("head", [1, 2])], stacked=STACKED),
            "'head/w' has shape (2,); it must be a number, for it is not stacked",
        ),
        (lambda p: use_on(p, lerning_rate=None), "has no option lerning_rate (given None)"),
        (lambda p: use_on(p, trust_mask=("nope",)), "`trust_mask` pattern 'nope' matches no"),
        (
            lambda p: use_on(p, decay_mask=lambda p: {"head": {"w": True}}),
            "`decay_mask` must return a tree of bools with the structure of the parameters; "
            "they differ at 'blocks/attn/w'",
        ),
    ],
)
def test_bad_values_are_named(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(initial_params())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("clip_norm", [1.0, 1e4])
def test_clip_is_one_norm_over_what_trains_before_decay(dtype, clip_norm):
    rng = np.random.default_rng(2)
    # bfloat16 sums of this many squares would be off by several parts in a thousand.
    grads = {
        "a": jnp.asarray(1.01 + 0.01 * rng.normal(size=(64, 64)), dtype),
        "b": {"c": jnp.asarray(rng.normal(size=(3, 5)), dtype)},
        "frozen": jnp.full(7, 100.0, dtype),
    }
    more = {"weight_decay": 0.1, "decay_mask": (".",), "freeze": ("frozen",)}
    tx = make_optimizer("sgd", 1.0, clip_norm=clip_norm, **more)
    updates, _ = jit(tx.update)(grads, tx.init(grads), grads)
    trains = [np.asarray(g, np.float64) for g in (grads["a"], grads["b"]["c"])]
    norm = np.sqrt(sum((g**2).sum() for g in trains))
    scale = min(1.0, clip_norm / norm) + 0.1  # the parameters are the gradients
    rounding = {"rtol": 1e-5 if dtype == jnp.float32 else 2**-8}
    assert updates["a"].dtype == dtype
    np.testing.assert_allclose(np.float64(updates["a"]), -trains[0] * scale, **rounding)
    np.testing.assert_allclose(np.float64(updates["b"]["c"]), -trains[1] * scale, **rounding)
    assert not np.any(updates["frozen"])


def test_decay_follows_the_mask_by_default_and_as_told():
    params = jax.tree.map(jnp.ones_like, initial_params())
    zero = jax.tree.map(jnp.zeros_like, params)

    def decayed(**options):
        tx = make_optimizer("adamw", 0.5, weight_decay=0.2, stacked=STACKED, **options)
        updates = jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, zero)
        for update in jax.tree.leaves(updates):
            assert np.all(update == 0) or np.allclose(update, -0.1)
        return {path for path, u in named_leaves(updates).items() if np.any(u)}

    assert decayed() == {"blocks/attn/w", "pairs/w", "head/w"}
    assert decayed(decay_mask=("bias", "head")) == {"blocks/bias", "head/w"}
    w_only = decayed(freeze=("^head/",), decay_mask=lambda p: map_named(lambda n, _: "w" in n, p))
    assert w_only == {"blocks/attn/w", "pairs/w"}


def test_moment_dtype_narrows_first_moments_and_widens_all():
    params = {"w": jnp.ones((4, 4))}

    def dtypes(params, moment_dtype):
        tx = make_optimizer("adam", 0.1, moment_dtype=moment_dtype)
        before = jax.eval_shape(tx.init, params)
        after = jax.eval_shape(tx.update, params, before, params)[1]
        state, after = (optax.tree.get(s, "ScaleByAdamState") for s in (before, after))
        names = [(s.mu["w"].dtype.name, s.nu["w"].dtype.name) for s in (state, after)]
        assert names[0] == names[1]
        return names[0]

    half = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    assert dtypes(params, None) == ("float32", "float32")
    assert dtypes(params, jnp.bfloat16) == ("bfloat16", "float32")
    assert dtypes(half, None) == ("bfloat16", "bfloat16")
    assert dtypes(half, "float32") == ("float32", "float32")


@every_optimizer
def test_bfloat16_moments_save_two_bytes_of_each_first_moment(name):
    if "moment_dtype" not in keywords(RULES[name]):
        pytest.skip("keeps no moment of the gradient")
    params = {"w": jnp.ones((64, 32)), "bias": jnp.ones(32)}
    options = {"momentum": 0.9} if name in ("rmsprop", "adafactor") else {}

    def state_bytes(**more):
        tx = make_optimizer(name, 0.1, **options, **more)
        leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    saved = state_bytes() - state_bytes(moment_dtype="bfloat16")
    second = {"adam", "adamw", "adan", "lamb", "rmsprop"}
    assert saved == 2 * count * (2 if name == "adan" else 1)
    assert state_bytes() >= 4 * count * (2 if name in second else 1)


def test_bfloat16_parameters_are_computed_in_float32():
    # 0.999 is 1.0 in bfloat16: a second moment scaled there would not decay at all.
    params = {"w": jnp.full((4, 4), 0.3, jnp.bfloat16)}
    tx = make_optimizer("adam", 0.1, moment_dtype="float32")
    state, update = tx.init(params), jit(tx.update)
    gradients = [1.0] + [0.0] * 20
    for g in gradients:
        _, state = update({"w": jnp.full((4, 4), g, jnp.bfloat16)}, state, params)
    nu = optax.tree.get(state, "ScaleByAdamState").nu["w"]
    np.testing.assert_allclose(nu, 0.001 * 0.999**20, rtol=1e-4)


def test_schedules_advance_with_the_updates():
    tx = make_optimizer("sgd", schedules.linear(1.0, total_steps=4))
    params = {"w": jnp.ones(2)}
    state, update = tx.init(params), jit(tx.update)
    seen = []
    for _ in range(5):
        updates, state = update(params, state, params)
        seen.append(float(-updates["w"][0]))
    np.testing.assert_allclose(seen, [1.0, 0.75, 0.5, 0.25, 0.0])


def test_adam_ratio_is_the_rate_of_what_muon_leaves():
    params, grads = initial_params(), one_gradient()

    def updates(**options):
        tx = make_optimizer("muon", 0.1, weight_decay=0.1, stacked=STACKED, **options)
        return named_leaves(jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads))

    whole, part = updates(), updates(adam_ratio=0.25)
    for path in whole:
        ratio = 1.0 if path in ("blocks/attn/w", "pairs/w") else 0.25
        np.testing.assert_allclose(part[path], ratio * whole[path], rtol=1e-6)


@pytest.mark.parametrize(
    "order", [*(pytest.param(p, marks=pytest.mark.slow) for p in (1.0, 3.0)), 2.0, "max"]
)
def test_clips_by_value_and_then_by_another_norm(order):
    """Of the mean of two weighted calls, whose powers would overflow."""
    one, two = (jax.tree.map(lambda x: 1e20 * x, random_tree(seed)) for seed in (2, 3))
    tx = make_optimizer(
        "sgd", 1.0, clip_value=3e19, clip_norm=2e19, clip_order=order, accumulate=2, stacked=STACKED
    )

    @jit
    def run(one, two):
        _, state = tx.update(one, tx.init(one), one, weight=1.0)
        return tx.update(two, state, one, weight=3.0)[0]

    mean = jax.tree.map(lambda a, b: np.clip((np.float64(a) + 3 * b) / 4, -3e19, 3e19), one, two)
    flat = np.concatenate([x.ravel() for x in jax.tree.leaves(mean)])
    scale = min(1, 2e19 / np.linalg.norm(flat, np.inf if order == "max" else order))
    assert_close(run(one, two), jax.tree.map(lambda x: -scale * x, mean), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "fsdp": 2}, {"fsdp": 4, "tensor": 2}])
def test_clips_ramps_and_plateaus_are_the_same_on_a_mesh(sizes):
    tx = make_optimizer(
        "lamb",
        0.05,
        clip_value=0.01,
        clip_norm=0.05,
        clip_order="max",
        accumulate=3,
        accumulate_ramp=[(1, 2), (2, 2)],
        plateau_factor=0.5,
        plateau_patience=1,
        plateau_window=1,
        rate_multipliers=[("kernel", 0.5)],
        weight_decay=0.1,
    )

    def run(mesh):
        state = jt.init_state(problems.init, tx, jax.random.key(0), mesh=mesh)
        step = jt.build_train_step(problems.loss_fn, tx)
        train = jt.compile_step(step, state, problems.make_batch(), mesh=mesh)
        rates = []
        for i in range(15):
            state, metrics = train(state, problems.make_batch(i, keep=0.2 + 0.05 * i))
            rates.append([metrics["learning_rate"], metrics["learning_rate/kernel"]])
        return jax.device_get((state.params, rates))

    (alone, rates), (apart, others) = run(None), run(jt.make_mesh(**sizes))
    assert_close(alone, apart, rtol=1e-4, atol=1e-6)
    assert_close(rates, others, rtol=1e-6)
    assert rates[-1][0] < 0.05


@every_optimizer
def test_a_step_has_a_derivative_where_gradients_are_0(name):
    """Of a whole parameter, and of one of its entries; by the loss that follows two steps."""
    start = {"w": jnp.asarray(np.random.default_rng(7).normal(size=(4, 4)), jnp.float32)}
    start["unused"] = jnp.ones((3, 3))
    mask = jnp.ones((4, 4)).at[1, 2].set(0.0)

    def loss_of(params):
        return jnp.sum(mask * params["w"] ** 2) + 0.0 * jnp.sum(params["unused"])

    def after_two(params, rate, options):
        tx = make_optimizer(name, rate, **options)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(jax.grad(loss_of)(params), state, params)
            params = optax.apply_updates(params, updates)
        return loss_of(params)

    for options in ({}, {"min_dim_size_to_factor": 2}) if name == "adafactor" else ({},):
        slopes = jit(jax.grad(functools.partial(after_two, options=options), (0, 1)))(start, 0.02)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
        assert float(slopes[1]) != 0
        if name == "adafactor":
            h = 1e-3
            above, below = (after_two(start, 0.02 + x, options) for x in (h, -h))
            np.testing.assert_allclose(slopes[1], (above - below) / (2 * h), rtol=0.02)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "eps" in keywords(RULES[name])])
def test_without_eps_a_gradient_of_0_moves_nothing(name):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    grads = {"w": jnp.zeros((4, 4)), "b": jnp.array([1.0, 0.0, 2.0, 0.0])}
    tx = make_optimizer(name, 0.1, eps=0.0)
    updates, _ = jit(tx.update)(grads, tx.init(params), params)
    assert not np.asarray(updates["w"]).any()
    np.testing.assert_array_equal(np.sign(updates["b"]), [-1, 0, -1, 0])
    if name == "rmsprop":  # 1 / sqrt(1 - b2)
        np.testing.assert_allclose(updates["b"][::2], -0.1 / np.sqrt(0.1), rtol=1e-6)


def test_clipping_passes_nothing_on_beside_a_gradient_that_is_no_number():
    tx, grads = (
        make_optimizer("sgd", 1.0, clip_norm=1.0),
        {"a": jnp.array(jnp.nan), "b": jnp.ones(2)},
    )
    assert np.isnan(tx.update(grads, tx.init(grads), grads)[0]["b"]).all()


def test_the_trust_ratio_of_lars_is_that_of_huge_gradients_too():
    tx = make_optimizer("lars", 1.0, momentum=0.0, trust_coefficient=0.001, weight_decay=0.1)
    params, grads = {"w": jnp.ones((4, 4))}, {"w": jnp.full((4, 4), 3e19)}
    updates, _ = jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.001, rtol=1e-5)  # |w| / |g| times g
