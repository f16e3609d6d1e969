"""The flags of optimizers follow from the rules."""

import dataclasses
import inspect
import json
import re

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from experiments import gpt, vision
from jaxtrain import optim
from jaxtrain.optim.options import keywords
from jaxtrain.run import options
from jaxtrain.run.main import parse
from tests.optim.test_schedules import COUNTS, cosine, sgdr, stable_decay, warmed


def test_every_option_of_every_rule_and_schedule_is_a_flag_but_a_mask():
    flags = inspect.signature(options.OptimizerOptions).parameters.keys()
    for module, functions, no_flags in (
        (optim.rules, optim.rules.RULES, {"muon_mask"}),
        (optim.schedules, optim.schedules.SCHEDULES, {"total_steps"}),
    ):
        taken = {name for function in functions.values() for name in keywords(function)}
        assert taken - flags == no_flags
        assert module.OPTIONS.keys() <= taken & flags


# Each schedule with each of its options by flags, and its definition in the steps since the end of
# a warm-up of 4, to a peak of 0.2, in a run of 40.
SCHEDULES = {
    "constant": lambda t: 0.2,
    "linear": lambda t: 0.2 * (1 - min(t / 36, 1)),
    "linear --optimizer.final 0.1": lambda t: 0.2 - 0.1 * min(t / 36, 1),
    "cosine": lambda t: cosine(min(t / 36, 1), 0.2, 0),
    "cosine --optimizer.final 0.1": lambda t: cosine(min(t / 36, 1), 0.2, 0.1),
    "cosine_restarts": lambda t: sgdr(t, 12, 1, 0.2, 0),
    "cosine_restarts --optimizer.final 0.1": lambda t: sgdr(t, 12, 1, 0.2, 0.1),
    "cosine_restarts --optimizer.period 7": lambda t: sgdr(t, 7, 1, 0.2, 0),
    "cosine_restarts --optimizer.multiplier 2": lambda t: sgdr(t, 6, 2, 0.2, 0),
    "cosine_restarts --optimizer.period 7 --optimizer.multiplier 3": (
        lambda t: sgdr(t, 7, 3, 0.2, 0)
    ),
    "exponential --optimizer.decay-rate 0.3": lambda t: 0.2 * 0.3 ** (t / 36),
    "exponential --optimizer.decay-rate 0.3 --optimizer.decay-steps 9 --optimizer.final 0.1": (
        lambda t: max(0.1, 0.2 * 0.3 ** (t / 9))
    ),
    "step --optimizer.boundaries 11 30": lambda t: 0.2 * 0.1 ** ((t >= 7) + (t >= 26)),
    "step --optimizer.boundaries 11 30 --optimizer.factor 0.5": (
        lambda t: 0.2 * 0.5 ** ((t >= 7) + (t >= 26))
    ),
    "inverse_sqrt": lambda t: 0.2 * (4 / (4 + t)) ** 0.5,
    "inverse_sqrt --optimizer.timescale 9": lambda t: 0.2 * (9 / (9 + t)) ** 0.5,
    "warmup_stable_decay": lambda t: stable_decay(t, 36, 8, 0.2, 0, "linear"),
    "warmup_stable_decay --optimizer.decay-steps 12 --optimizer.final 0.1": (
        lambda t: stable_decay(t, 36, 12, 0.2, 0.1, "linear")
    ),
    "warmup_stable_decay --optimizer.decay-shape sqrt": (
        lambda t: stable_decay(t, 36, 8, 0.2, 0, "sqrt")
    ),
}


EVERYDAY = {
    "cosine --optimizer.final 0.1",
    "cosine_restarts --optimizer.multiplier 2",
    "exponential --optimizer.decay-rate 0.3",
    "step --optimizer.boundaries 11 30 --optimizer.factor 0.5",
}


def schedule_of(flags, monkeypatch):
    given = "--optimizer.learning-rate 0.2 --optimizer.warmup-steps 4 --optimizer.schedule"
    monkeypatch.setattr(optim, "make_optimizer", lambda name, rate, **_: rate)
    return options.make_optimizer(parse(jt.Config, [*given.split(), *flags]).optimizer, steps=40)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, marks=() if flags in EVERYDAY else pytest.mark.slow)
        for flags in SCHEDULES
    ],
)
def test_flags_make_every_schedule_with_every_option(flags, monkeypatch):
    rate = schedule_of(flags.split(), monkeypatch)
    expected = warmed(SCHEDULES[flags], 4, 0.2)
    np.testing.assert_allclose(jax.vmap(rate)(COUNTS), expected, rtol=1e-5, atol=1e-7)


def test_an_option_of_another_schedule_is_refused(monkeypatch):
    """Every pair of the two that the table above has not, and what has no default."""
    for name, function in optim.schedules.SCHEDULES.items():
        for option in optim.schedules.OPTIONS.keys() - keywords(function) - {"decay_rate"}:
            chosen = options.OptimizerOptions(schedule=name, **{option: 3})
            with pytest.raises(ValueError, match=f"'{name}' has no option {option} "):
                options.make_optimizer(chosen, steps=40)
    chosen = options.OptimizerOptions(decay_rate=0.3)
    with pytest.raises(ValueError, match="optimizer 'muon' has no option decay_rate "):
        options.make_optimizer(chosen, steps=40)
    with pytest.raises(ValueError, match="'step' has no default of `boundaries`"):
        schedule_of(["step"], monkeypatch)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("muon --optimizer.ns-steps 0", "`ns_steps` is 0; it must be at least 1"),
        ("lamb --optimizer.nesterov True", "'lamb' has no option nesterov (given True)"),
        ("rmsprop --optimizer.nesterov True", "no effect on 'rmsprop' with momentum 0"),
    ],
)
def test_flags_reach_the_rule(flags, message):
    config = parse(gpt.Config, ["--optimizer.name", *flags.split()])
    with pytest.raises(ValueError, match=re.escape(message)):
        options.make_optimizer(config.optimizer, steps=4)


def test_a_rate_that_cannot_be_is_named_as_its_flag():
    config = parse(gpt.Config, ["--optimizer.learning-rate", "-1"])
    with pytest.raises(ValueError, match="`learning_rate` is -1; it must be at least 0"):
        options.make_optimizer(config.optimizer, steps=4)


def test_the_rate_is_the_rules_unless_the_experiment_or_a_flag_says_another():
    def rate(name, **more):
        chosen = options.OptimizerOptions(name=name, schedule="constant", warmup_steps=0, **more)
        tx = options.make_optimizer(chosen, steps=4, default_rates=vision.LEARNING_RATES)
        return float(optim.current_learning_rate(tx.init({"w": 1.0})))

    assert rate("lion") == pytest.approx(3e-4)
    assert rate("lars") == pytest.approx(30.0)
    assert rate("lars", learning_rate=2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["keep", "coordinator", "experiment"])
def test_a_field_that_every_config_has_is_refused_where_it_is_named(name):
    with pytest.raises(ValueError, match=f"Own has a field '{name}', .*; give it another name"):
        dataclasses.make_dataclass("Own", [(name, int, 1)], bases=(jt.Config,), frozen=True)
    dataclasses.make_dataclass("Own", [("steps", int, 7)], bases=(jt.Config,), frozen=True)


def of_layers(stack, *, stages=True, **flags):
    """An experiment of a user's: three stacked layers, under the default flags of a Config."""

    def init_fn(rng):
        layers = {"w": jax.numpy.ones((3, 4, 4)), "b": jax.numpy.ones((3, 4))}
        return stack.cut({"blocks": layers, "out": jax.numpy.ones((4, 2))})

    chain = options.OptimizerOptions(clip_norm=None, warmup_steps=0, **flags)
    config = dataclasses.make_dataclass("Own", [], bases=(jt.Config,), frozen=True)(optimizer=chain)
    block = lambda layer, x, batch, rng: jax.numpy.tanh(x @ layer["w"] + layer["b"])  # noqa: E731
    model = jt.Stages(lambda p, b, _: b["x"], block, lambda p, x, b: (x @ p["out"]).sum(), stack)
    given = {"stages": model} if stages else {}
    rows = [{"x": np.ones(4, np.float32)}] * 32
    given |= {"init_fn": init_fn, "loss_fn": jt.loss_from_stages(model)}
    return config.experiment("own", **given, **config.batches_of(rows))


SLOW_RULES = [
    pytest.param(name, marks=() if name == "muon" else pytest.mark.slow)
    for name in optim.OPTIMIZERS
]


@pytest.mark.parametrize(
    "stack", [jt.Stack(), jt.Stack(virtual=3), jt.Stack(counts=(2, 1))], ids=["", "cut", "uneven"]
)
@pytest.mark.parametrize("name", SLOW_RULES)
def test_the_chain_of_a_users_layers_acts_layer_by_layer(name, stack):
    """Under the flags of a Config, against an optimizer of layers that are not stacked."""
    rng = np.random.default_rng(0)
    shapes = {"blocks": {"w": (3, 4, 4), "b": (3, 4)}, "out": (4, 2)}
    small = {"min_dim_size_to_factor": 2} if name == "adafactor" else {}
    chain = of_layers(stack, name=name, **small).laid.optimizer
    apart = options.make_optimizer(
        options.OptimizerOptions(name=name, clip_norm=None, warmup_steps=0, **small), steps=1000
    )

    def tree():
        draw = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def split(tree):
        layers = {str(i): jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(3)}
        return {"layers": layers, "out": tree["out"]}

    def updates(tx, params, grads):
        state = tx.init(params)
        for g in grads:
            found, state = tx.update(g, state, params)
        return found

    params, grads = tree(), [tree(), tree()]
    found = jax.jit(lambda: updates(chain, stack.cut(params), list(map(stack.cut, grads))))()
    expected = jax.jit(lambda: updates(apart, split(params), list(map(split, grads))))()
    found = split(stack.natural(found))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-7), found, expected)


def test_an_optimizer_that_does_not_know_the_stack_is_named():
    layers, rng = of_layers(jt.Stack()), jax.random.key(0)
    told = "optimizer 'lamb' takes the layers stacked below 'blocks' for one parameter"
    unaware = jt.make_optimizer("lamb", 0.1)
    with pytest.warns(UserWarning, match=told):
        state = jt.init_state(layers.task.init_fn, unaware, rng)
    batch = {"x": np.ones((32, 4), np.float32)}
    with pytest.warns(UserWarning, match=told):
        jax.eval_shape(jt.build_train_step(layers.task.loss_fn, unaware), state, batch)
    mesh = jt.make_mesh(pipe=3, devices=jax.devices()[:3])
    engine = jt.pipeline(layers.task.stages, mesh=mesh, microbatches=2)
    with pytest.warns(UserWarning, match=told):
        jax.eval_shape(jt.build_update(engine, unaware), state, batch)
    # Without a word: one that knows, one for which it is the same, and layers that are a list.
    for quiet in (
        jt.make_optimizer("lamb", 0.1, stacked=layers.stack.axes),
        jt.make_optimizer("lamb", 0.1, stacked=()),
        jt.make_optimizer("adamw", 0.1),
        of_layers(jt.Stack(), stages=False).laid.optimizer,
    ):
        jt.init_state(layers.task.init_fn, quiet, rng)
    listed = {"blocks": [{"w": np.ones((4, 4)), "b": np.ones(4)}]}
    jt.init_state(lambda _: listed, unaware, rng)


def test_muon_with_nothing_to_orthogonalise_is_refused():
    with pytest.raises(ValueError, match="optimizer 'muon' has nothing to orthogonalise"):
        jt.make_optimizer("muon", 0.1).init({"norm": {"scale": np.ones((4, 4))}, "b": np.ones(4)})


def test_flags_of_groups_are_their_rates_in_the_metrics():
    flags = "--optimizer.rate-multipliers ^blocks/b$=3 ^blocks/=0.5,0.7,1 --optimizer.freeze ^out$"
    flags += " --optimizer.decay-multipliers ^blocks/=2 --optimizer.warmup-steps 0"
    flags += " --optimizer.name sgd --optimizer.learning-rate 0.2 --optimizer.clip-norm None"
    tx = options.make_optimizer(
        parse(jt.Config, flags.split()).optimizer, steps=40, stacked=("^blocks/",)
    )
    layers = {"w": np.ones((3, 4, 4), np.float32), "b": np.ones((3, 4), np.float32)}
    params = {"blocks": layers, "out": np.ones((4, 2), np.float32)}
    updates, state = jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)
    told = optim.reports(state)
    assert told.keys() == {"learning_rate", "learning_rate/blocks/b", "learning_rate/blocks"}
    np.testing.assert_allclose(told["learning_rate/blocks/b"], 0.6, rtol=1e-6)
    np.testing.assert_allclose(told["learning_rate/blocks"], [0.1, 0.14, 0.2], rtol=1e-6)
    # The gradient is 1, and the decay of the matrices 0.1 times 2.
    expected = np.broadcast_to(np.reshape([-0.12, -0.168, -0.24], (3, 1, 1)), (3, 4, 4))
    np.testing.assert_allclose(updates["blocks"]["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(updates["blocks"]["b"], -0.6, rtol=1e-5)
    assert not np.any(updates["out"])
    plain = options.make_optimizer(options.OptimizerOptions(name="sgd"), steps=40)
    assert optim.reports(plain.init({"w": 1.0})).keys() == {"learning_rate"}


@pytest.mark.parametrize(
    ("flags", "factor"),
    [("--optimizer.accumulate 2", 4.0), ("--optimizer.batch-scaling sqrt", 2**0.5)],
)
def test_the_rate_follows_the_rows_of_an_update(flags, factor, monkeypatch):
    monkeypatch.setattr(optim, "make_optimizer", lambda name, rate, **_: rate)
    flags = f"--optimizer.learning-rate 0.1 --optimizer.base-batch 16 {flags}"
    config = parse(jt.Config, ["--optimizer.schedule", "constant", *flags.split()])
    rate = options.make_optimizer(config.optimizer, steps=40, global_batch=32)
    assert float(rate(39)) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate_multipliers": ("^a",)}, "`rate_multipliers` is '^a': write it as ^head/=0.1"),
        ({"accumulate_ramp": ("1",)}, "`accumulate_ramp` is '1': write it as 1:500"),
        ({"accumulate_ramp": ("1:0",)}, "`accumulate_ramp` is 0; it must be at least 1"),
        ({"accumulate_ramp": ("0:1",)}, "`accumulate_ramp` is 0; it must be at least 1"),
        ({"accumulate": 41}, "--steps is 40: the first update takes 41 steps (`accumulate`)"),
        ({"accumulate_ramp": ("50:1",)}, "--steps is 40: the first update takes 50 steps"),
        ({"batch_scaling": "sqrt"}, "`batch_scaling` is 'sqrt': give `base_batch` too"),
        ({"base_batch": 8}, "`base_batch` is 8: the rows of a step are not known here"),
        ({"clip_norm": None, "clip_order": 1.0}, "give `clip_norm` too"),
        ({"plateau_patience": 3}, "need `plateau_factor`"),
    ],
)
def test_flags_that_cannot_be_are_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        options.make_optimizer(options.OptimizerOptions(name="sgd", **given), steps=40).init(1.0)


def test_flags_that_a_module_with_an_optimizer_does_not_read_are_refused():
    arguments = {"init_fn": None, "loss_fn": len, "batch": None, "train_batches": None}

    def build(flags, *, of_stack=False, default=None):
        config = parse(jt.Config, flags.split(), default=default)
        config.experiment("flags", **arguments)  # This one uses every flag.
        repr(config)
        make = lambda: optax.sgd(config.optimizer.learning_rate or 0.1)  # noqa: E731
        optimizer = (lambda stack: make()) if of_stack else make()
        return config.experiment("own", optimizer=optimizer, **arguments), config

    for of_stack in (False, True):
        build("--optimizer.learning-rate 0.2", of_stack=of_stack)
        with pytest.raises(
            ValueError, match=r"own, which --optimizer\.name, --optimizer\.ema cannot change"
        ):
            build(
                "--optimizer.learning-rate 0.2 --optimizer.ema 0.9 --optimizer.name lion",
                of_stack=of_stack,
            )
    # A run that an older version began with an unused flag goes on, with no other.
    begun = jt.Config(optimizer=options.OptimizerOptions(ema=0.9))
    build("--steps 7", default=begun)
    with pytest.raises(ValueError, match=r"which --optimizer\.ema cannot"):
        build("--optimizer.ema 0.8", default=begun)


def test_the_optimizer_of_flags_is_described_in_one_line():
    arguments = {"init_fn": None, "loss_fn": len, "batch": None, "train_batches": None}

    def described(flags):
        config = parse(jt.Config, flags.split())
        return config.experiment("flags", rates={"adamw": 0.003}, **arguments).optimizer.description

    assert described("--optimizer.name adamw") == (
        "adamw, rate 0.003, cosine schedule after 20 updates of warm-up, weight decay 0.1, "
        "gradient clipped to norm 1, no average"
    )
    average = "--optimizer.ema 0.99 --optimizer.clip-norm None --optimizer.warmup-steps 0"
    sgd = "--optimizer.name sgd --optimizer.schedule constant --optimizer.base-batch 64"
    accumulated = "--steps 10 --optimizer.accumulate 4 --optimizer.learning-rate 0.1"
    assert described(f"{sgd} {average} {accumulated}") == (
        "sgd, rate 0.2, constant schedule, weight decay 0.1, no clipping, average (EMA) 0.99, "
        "2 updates in 10 steps, the last 2 of which are part of no update"
    )


def test_flags_without_a_bound_can_be_written_as_json():
    flags = "--optimizer.clipping-threshold inf --optimizer.clip-order max"
    chosen = parse(jt.Config, ["--optimizer.name", "adafactor", *flags.split()]).optimizer
    json.dumps(dataclasses.asdict(chosen), allow_nan=False)
    options.make_optimizer(chosen, steps=40).init({"w": np.ones((2, 2), np.float32)})
