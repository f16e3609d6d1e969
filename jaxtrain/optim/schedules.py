"""Learning-rate schedules: functions ``count -> learning rate``, each with linear warm-up.

``count`` is the number of updates already made, so the first update uses ``schedule(0)``. Warm-up
over ``w`` steps gives ``peak * count / w`` while ``count < w``: zero at count 0, and the peak first
at count ``w``, that is in update number ``w + 1``. With ``w = 0`` the peak is there at once.

``total_steps`` counts warm-up too. The final value is reached at ``count == total_steps``, one past
the last update of a run of that length, and held from there on.

Counts may be traced, and so may rates (``peak``, ``final``): a schedule can be built inside
``jax.vmap`` over learning rates. Numbers of steps are plain integers. Every function raises a
ValueError that names the value at fault: a negative or NaN rate, or a number of steps that is
negative, not an integer, or not longer than the warm-up.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxtrain.optim.numerics import check_choice, check_integer, check_number
from jaxtrain.optim.options import Option, keywords, resolve

Schedule = Callable[[Any], jax.Array]
Rate = float | jax.Array


def constant(peak: Rate, *, warmup_steps: int = 0) -> Schedule:
    """Stays at ``peak`` after the warm-up.

    >>> [float(constant(1.0, warmup_steps=2)(count)) for count in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return _warmed(peak, warmup_steps, lambda t: peak * jnp.ones_like(t, jnp.float32))


def linear(peak: Rate, *, total_steps: int, warmup_steps: int = 0, final: Rate = 0.0) -> Schedule:
    """Falls on a straight line from ``peak``, after the warm-up, to ``final`` at ``total_steps``.

    >>> [float(linear(1.0, total_steps=4)(count)) for count in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    steps = _steps_after_warmup(total_steps, warmup_steps)
    return _falling(peak, final, warmup_steps, lambda t: 1 - _fraction(t, steps))


def cosine(peak: Rate, *, total_steps: int, warmup_steps: int = 0, final: Rate = 0.0) -> Schedule:
    """Falls on half a cosine from ``peak``, after the warm-up, to ``final`` at ``total_steps``.

    ``final + (peak - final) * (1 + cos(pi * t / T)) / 2`` with t and T counted from the end of the
    warm-up (Loshchilov & Hutter, SGDR, https://arxiv.org/abs/1608.03983, without restarts).

    >>> [round(float(cosine(1.0, total_steps=4)(count)), 4) for count in range(6)]
    [1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    steps = _steps_after_warmup(total_steps, warmup_steps)
    return _falling(peak, final, warmup_steps, lambda t: _cosine(_fraction(t, steps)))


warmup_cosine = cosine  # the name that the field gives it where there is a warm-up


def cosine_restarts(
    peak: Rate, *, period: int, multiplier: int = 1, warmup_steps: int = 0, final: Rate = 0.0
) -> Schedule:
    """Falls on half a cosine to ``final`` and restarts at ``peak``, again and again.

    The first cycle, after the warm-up, lasts ``period`` steps and each later one ``multiplier``
    times the one before (T_0 and T_mult of SGDR, Loshchilov & Hutter 2017,
    https://arxiv.org/abs/1608.03983). The first step of a cycle has the peak.

    >>> schedule = cosine_restarts(1.0, period=2, multiplier=2)
    >>> [round(float(schedule(count)), 4) for count in range(7)]
    [1.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 1.0]
    """
    period = check_integer("period", period, low=1)
    multiplier = check_integer("multiplier", multiplier, low=1)
    if multiplier == 1:
        return _falling(peak, final, warmup_steps, lambda t: _cosine((t % period) / period))
    # Exact integer starts of every cycle that an int32 count can reach: a floor of a float
    # logarithm would misplace the restart by a step.
    starts, lengths = [0], [period]
    while starts[-1] + lengths[-1] < 2**31:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * multiplier)

    def height(t: jax.Array) -> jax.Array:
        cycle = jnp.searchsorted(jnp.asarray(starts, jnp.int32), t, side="right") - 1
        since = t - jnp.asarray(starts, jnp.int32)[cycle]
        return _cosine(since / jnp.asarray(lengths, jnp.float32)[cycle])

    return _falling(peak, final, warmup_steps, height)


def exponential(
    peak: Rate, *, decay_rate: float, decay_steps: int, warmup_steps: int = 0, final: Rate = 0.0
) -> Schedule:
    """Multiplies by ``decay_rate`` every ``decay_steps`` steps, smoothly, never below ``final``.

    ``max(final, peak * decay_rate ** (t / decay_steps))``, t counted from the end of the warm-up.

    >>> [float(exponential(1.0, decay_rate=0.25, decay_steps=2)(count)) for count in range(3)]
    [1.0, 0.5, 0.25]
    """
    decay_steps = check_integer("decay_steps", decay_steps, low=1)
    check_number("decay_rate", decay_rate, low=0.0, high=1.0, open_low=True)
    check_number("final", final, low=0.0)
    return _warmed(
        peak, warmup_steps, lambda t: jnp.maximum(final, peak * decay_rate ** (t / decay_steps))
    )


def step(
    peak: Rate, *, boundaries: Sequence[int], factor: float = 0.1, warmup_steps: int = 0
) -> Schedule:
    """Multiplies by ``factor`` at each of ``boundaries``, which are counts from the run's start.

    The first step at the lower rate is the one with ``count == boundary``.

    >>> [round(float(step(1.0, boundaries=(1, 3))(count)), 4) for count in range(4)]
    [1.0, 0.1, 0.1, 0.01]
    """
    warmup_steps = check_integer("warmup_steps", warmup_steps, low=0)
    check_number("factor", factor, low=0.0, open_low=True)
    edges = [check_integer("boundaries", b, low=warmup_steps) for b in boundaries]
    if not edges or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"`boundaries` is {tuple(boundaries)}; give one or more, increasing")

    def after(t: jax.Array) -> jax.Array:
        passed = jnp.searchsorted(jnp.asarray(edges) - warmup_steps, t, side="right")
        return peak * jnp.asarray(factor, jnp.float32) ** passed

    return _warmed(peak, warmup_steps, after)


def inverse_sqrt(peak: Rate, *, warmup_steps: int = 0, timescale: int | None = None) -> Schedule:
    """Falls as the inverse square root of the step, without end.

    ``peak * sqrt(s / (s + t))``, t counted from the end of the warm-up and s the ``timescale``, by
    default ``warmup_steps`` (at least 1); then it is ``peak * sqrt(warmup_steps / count)``, the
    schedule of Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762).

    >>> [float(inverse_sqrt(1.0, warmup_steps=4)(count)) for count in (2, 4, 16)]
    [0.5, 1.0, 0.5]
    """
    warmup_steps = check_integer("warmup_steps", warmup_steps, low=0)
    scale = max(warmup_steps, 1) if timescale is None else timescale
    scale = check_integer("timescale", scale, low=1)
    return _warmed(
        peak, warmup_steps, lambda t: peak * jax.lax.rsqrt((scale + t.astype(jnp.float32)) / scale)
    )


def warmup_stable_decay(
    peak: Rate,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final: Rate = 0.0,
    decay_shape: str = "linear",
) -> Schedule:
    """Warms up, stays at ``peak``, and falls to ``final`` over the last ``decay_steps`` steps.

    Hu et al. 2024 (https://arxiv.org/abs/2404.06395); the shapes ``"linear"``, ``1 - x``, and
    ``"sqrt"``, ``1 - sqrt(x)``, and the default fifth of the run, are those of Hägele et al. 2024
    (https://arxiv.org/abs/2405.18392).

    >>> schedule = warmup_stable_decay(1.0, total_steps=6, warmup_steps=2, decay_steps=2)
    >>> [float(schedule(count)) for count in range(7)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    steps = _steps_after_warmup(total_steps, warmup_steps)
    if decay_steps is None:
        decay_steps = min(steps, max(1, total_steps // 5))
    decay_steps = check_integer("decay_steps", decay_steps, low=1)
    if decay_steps > steps:
        raise ValueError(
            f"`decay_steps` is {decay_steps}; only {steps} of the {total_steps} steps follow the "
            f"warm-up of {warmup_steps}"
        )
    check_choice("decay_shape", decay_shape, choices=("linear", "sqrt"))

    def height(t: jax.Array) -> jax.Array:
        x = _fraction(jnp.maximum(t - (steps - decay_steps), 0), decay_steps)
        return 1 - (x if decay_shape == "linear" else jnp.sqrt(x))

    return _falling(peak, final, warmup_steps, height)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    function.__name__: function
    for function in (
        *(constant, cosine, cosine_restarts, exponential),
        *(inverse_sqrt, linear, step, warmup_stable_decay),
    )
}

# What every option of a shape is, but for what a run says of itself.
OPTIONS = {
    "final": Option(float, "Learning rate that the schedule falls to; left out, 0."),
    "decay_rate": Option(
        float, "Factor by which the exponential schedule falls in decay_steps updates."
    ),
    "decay_steps": Option(
        int, "Updates of the final fall of warmup_stable_decay, or of one fall of exponential."
    ),
    "boundaries": Option(
        tuple[int, ...], "Updates after which the step schedule multiplies the rate by factor."
    ),
    "factor": Option(
        float, "Factor of the step schedule at each of its boundaries; left out, 0.1."
    ),
    "period": Option(
        int, "Updates of the first cycle of cosine_restarts; left out, three cycles fit."
    ),
    "multiplier": Option(
        int, "Ratio of the length of a cycle of cosine_restarts to the one before."
    ),
    "timescale": Option(int, "Timescale of inverse_sqrt in updates; left out, the warm-up's."),
    "decay_shape": Option(Literal["linear", "sqrt"], "Shape of the fall of warmup_stable_decay."),
}


def make_schedule(
    name: str, peak: Rate, *, total_steps: int, warmup_steps: int = 0, **options: Any
) -> Schedule:
    """Builds a schedule by name, as a command line does.

    Args:
      name: one of ``SCHEDULES``.
      peak: the highest learning rate, reached at the end of the warm-up.
      total_steps: updates in the run. Shapes with an end take it as their end; ``exponential`` as
        that of one ``decay_steps`` and ``cosine_restarts`` as that of three cycles, where these are
        not given; the rest, which have no end, have no use for it.
      warmup_steps: updates of linear warm-up.
      **options: the shape's own arguments, such as ``final=``; None stands for not given.

    Returns:
      A function ``count -> learning rate``.

    Raises:
      ValueError: for an unknown name, and for an option that the shape does not have.

    >>> float(make_schedule("linear", 1.0, total_steps=4, final=None)(2))
    0.5
    >>> make_schedule("cosin", 1.0, total_steps=4)
    Traceback (most recent call last):
    ...
    ValueError: schedule 'cosin' is not one of constant, cosine, cosine_restarts, exponential, \
inverse_sqrt, linear, step, warmup_stable_decay
    """
    given = resolve("schedule", name, options, SCHEDULES, common=("total_steps", "warmup_steps"))
    steps = _steps_after_warmup(total_steps, warmup_steps)
    takes = keywords(SCHEDULES[name])
    if "total_steps" in takes:
        given["total_steps"] = total_steps
    if name == "exponential":
        given.setdefault("decay_steps", steps)
    if name == "cosine_restarts":
        m = check_integer("multiplier", given.get("multiplier", 1), low=1)
        given.setdefault("period", -(-steps // (1 + m + m**2)))
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in given:
            raise ValueError(f"schedule {name!r} has no default of `{key}`: give one")
    return SCHEDULES[name](peak, warmup_steps=warmup_steps, **given)


def _warmed(peak: Rate, warmup_steps: int, after: Callable[[jax.Array], jax.Array]) -> Schedule:
    """Puts the warm-up before ``after``, a function of the int32 steps since its end."""
    check_number("peak", peak, low=0.0)
    warmup_steps = check_integer("warmup_steps", warmup_steps, low=0)

    def schedule(count: Any) -> jax.Array:
        # Subtract as integers: a float32 count is no longer exact beyond 2**24.
        count = jnp.asarray(count)
        rate = after(jnp.maximum(count - warmup_steps, 0))
        if warmup_steps:
            rate = jnp.where(count < warmup_steps, peak * (count / warmup_steps), rate)
        return rate

    return schedule


def _steps_after_warmup(total_steps: int, warmup_steps: int) -> int:
    total_steps = check_integer("total_steps", total_steps, low=1)
    warmup_steps = check_integer("warmup_steps", warmup_steps, low=0)
    if total_steps <= warmup_steps:
        raise ValueError(
            f"total_steps is {total_steps}; it must be more than `warmup_steps`, {warmup_steps}"
        )
    return total_steps - warmup_steps


def _fraction(t: jax.Array, steps: int) -> jax.Array:
    return jnp.minimum(t / steps, 1.0)


def _cosine(x: jax.Array) -> jax.Array:
    return (1 + jnp.cos(jnp.pi * x)) / 2


def _falling(
    peak: Rate, final: Rate, warmup_steps: int, height: Callable[[jax.Array], jax.Array]
) -> Schedule:
    """Goes from ``peak`` to ``final`` as the height, by steps since the warm-up, from 1 to 0."""
    check_number("final", final, low=0.0)
    return _warmed(peak, warmup_steps, lambda t: final + (peak - final) * height(t))
