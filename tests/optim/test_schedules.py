"""Schedules against their definitions in NumPy float64, and the errors for bad values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import jit

from jaxtrain.optim import make_schedule, schedules

COUNTS = np.arange(0, 60)


def warmed(after, warmup_steps, peak):
    """The definition of warm-up: peak * count / w, then ``after`` of the steps since its end."""

    def rate(count):
        return peak * count / warmup_steps if count < warmup_steps else after(count - warmup_steps)

    return np.array([rate(int(count)) for count in COUNTS], np.float64)


def cosine(x, peak, final):
    return final + (peak - final) * (1 + np.cos(np.pi * x)) / 2


def sgdr(t, period, multiplier, peak, final):
    while t >= period:
        t, period = t - period, period * multiplier
    return cosine(t / period, peak, final)


def stable_decay(t, steps, decay, peak, final, shape):
    x = np.clip((t - (steps - decay)) / decay, 0, 1)
    return final + (peak - final) * (1 - (x if shape == "linear" else np.sqrt(x)))


# name -> (options, definition(t, warmup, peak, final)) with a run of 40 steps.
CASES = {
    "constant": ({}, lambda t, w, p, f: p),
    "linear": (
        {"total_steps": 40, "final": ...},
        lambda t, w, p, f: p + (f - p) * min(t / (40 - w), 1),
    ),
    "cosine": (
        {"total_steps": 40, "final": ...},
        lambda t, w, p, f: cosine(min(t / (40 - w), 1), p, f),
    ),
    "cosine_restarts": (
        {"period": 6, "multiplier": 2, "final": ...},
        lambda t, w, p, f: sgdr(t, 6, 2, p, f),
    ),
    "exponential": (
        {"decay_rate": 0.3, "decay_steps": 7, "final": ...},
        lambda t, w, p, f: max(f, p * 0.3 ** (t / 7)),
    ),
    "step": (
        {"boundaries": (11, 12, 30), "factor": 0.5},
        lambda t, w, p, f: p * 0.5 ** sum(t + w >= b for b in (11, 12, 30)),
    ),
    "inverse_sqrt": (
        {},
        lambda t, w, p, f: p * np.sqrt(max(w, 1) / (max(w, 1) + t)),
    ),
    "warmup_stable_decay": (
        {"total_steps": 40, "decay_steps": 12, "final": ...},
        lambda t, w, p, f: stable_decay(t, 40 - w, 12, p, f, "linear"),
    ),
}


def build(name, peak, final, warmup_steps):
    options = {k: final if v is ... else v for k, v in CASES[name][0].items()}
    return getattr(schedules, name)(peak, warmup_steps=warmup_steps, **options)


@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
@pytest.mark.parametrize("name", CASES)
def test_schedule_is_its_definition(name, warmup_steps):
    peak, final = 0.3, 0.02
    schedule = build(name, peak, final, warmup_steps)
    definition = CASES[name][1]
    expected = warmed(lambda t: definition(t, warmup_steps, peak, final), warmup_steps, peak)
    rates = jit(jax.vmap(schedule))(COUNTS)
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(rates, expected, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_schedule_takes_traced_rates(name):
    peaks, final = jnp.array([0.1, 0.4]), 0.01
    traced = jit(jax.vmap(lambda peak, f: build(name, peak, f, 5)(17)))
    rates = traced(peaks, jnp.full(2, final))
    expected = [build(name, float(peak), final, 5)(17) for peak in peaks]
    np.testing.assert_allclose(rates, np.array(expected), rtol=1e-6)


def test_the_peak_comes_first_at_count_warmup_steps():
    for name in CASES:
        schedule = build(name, 0.5, 0.0, 4)
        assert float(schedule(0)) == 0.0, name
        assert float(schedule(3)) < 0.5, name
        assert float(schedule(4)) == 0.5, name


@given(
    period=st.integers(1, 9),
    multiplier=st.integers(1, 4),
    count=st.integers(0, 100_000),
)
@settings(max_examples=15, deadline=None)
def test_restarts_fall_on_the_exact_step(period, multiplier, count):
    schedule = schedules.cosine_restarts(1.0, period=period, multiplier=multiplier, final=0.1)
    expected = sgdr(count, period, multiplier, 1.0, 0.1)
    np.testing.assert_allclose(float(schedule(count)), expected, rtol=1e-5)


def test_other_shape_and_default_of_stable_decay():
    schedule = schedules.warmup_stable_decay(1.0, total_steps=50, decay_shape="sqrt")
    expected = [stable_decay(t, 50, 10, 1.0, 0.0, "sqrt") for t in range(55)]
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.arange(55)), expected, atol=1e-6)


def test_counts_beyond_float32_integers_are_exact():
    schedule = schedules.cosine_restarts(1.0, period=2)
    count = 2**24 + 1  # float32 rounds it to even, where a cycle starts
    np.testing.assert_allclose(float(schedule(jnp.int32(count))), 0.5, rtol=1e-6)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_make_schedule_builds_every_name(name):
    options = {"boundaries": (10, 20)} if name == "step" else {}
    options |= {"decay_rate": 0.1} if name == "exponential" else {}
    schedule = make_schedule(name, 0.2, total_steps=40, warmup_steps=4, final=None, **options)
    direct = {"total_steps": 40} if name in ("linear", "cosine", "warmup_stable_decay") else {}
    direct |= {"decay_steps": 36} if name == "exponential" else {}
    direct |= {"period": 12} if name == "cosine_restarts" else {}
    same = schedules.SCHEDULES[name](0.2, warmup_steps=4, **direct, **options)
    np.testing.assert_array_equal(jax.vmap(schedule)(COUNTS), jax.vmap(same)(COUNTS))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: schedules.constant(-1.0), "`peak` is -1; it must be at least 0"),
        (lambda: schedules.constant(float("nan")), "`peak` is nan"),
        (lambda: schedules.constant(float("inf")), "`peak` is inf"),
        (lambda: schedules.constant("fast"), "`peak` is 'fast'; it must be a number"),
        (lambda: schedules.constant(1.0, warmup_steps=-1), "`warmup_steps` is -1"),
        (lambda: schedules.constant(1.0, warmup_steps=1.5), "`warmup_steps` is 1.5"),
        (lambda: schedules.cosine(1.0, total_steps=0), "`total_steps` is 0"),
        (
            lambda: schedules.linear(1.0, total_steps=5, warmup_steps=5),
            "more than `warmup_steps`, 5",
        ),
        (lambda: schedules.cosine(1.0, total_steps=5, final=-0.1), "`final` is -0.1"),
        (lambda: schedules.cosine_restarts(1.0, period=0), "`period` is 0"),
        (lambda: schedules.cosine_restarts(1.0, period=2, multiplier=1.5), "`multiplier` is 1.5"),
        (lambda: schedules.exponential(1.0, decay_rate=0, decay_steps=1), "`decay_rate` is 0"),
        (lambda: schedules.exponential(1.0, decay_rate=2, decay_steps=1), "`decay_rate` is 2"),
        (lambda: schedules.exponential(1.0, decay_rate=0.5, decay_steps=0), "`decay_steps` is 0"),
        (lambda: schedules.step(1.0, boundaries=()), "`boundaries` is ()"),
        (lambda: schedules.step(1.0, boundaries=(3, 3)), "`boundaries` is (3, 3)"),
        (lambda: schedules.step(1.0, boundaries=(3,), warmup_steps=4), "`boundaries` is 3"),
        (lambda: schedules.step(1.0, boundaries=(3,), factor=0), "`factor` is 0"),
        (lambda: schedules.inverse_sqrt(1.0, timescale=0), "`timescale` is 0"),
        (
            lambda: schedules.warmup_stable_decay(
                1.0, total_steps=9, warmup_steps=2, decay_steps=8
            ),
            "`decay_steps` is 8; only 7",
        ),
        (
            lambda: schedules.warmup_stable_decay(1.0, total_steps=9, decay_shape="x"),
            "`decay_shape` is 'x'",
        ),
        (lambda: make_schedule("cos", 1.0, total_steps=9), "'cos' is not one of constant, cosine"),
        (
            lambda: make_schedule("constant", 1.0, total_steps=9, period=9),
            "schedule 'constant' has no option period (given 9), which is of cosine_restarts; it",
        ),
        (
            lambda: make_schedule("step", 1.0, total_steps=9),
            "'step' has no default of `boundaries`",
        ),
        (lambda: make_schedule("constant", 1.0, total_steps=0), "`total_steps` is 0"),
    ],
)
def test_bad_values_are_named(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
