"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), and sinusoidal.

Shapes: B batch, T positions, H heads, K features per head, D width.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.ops.numerics import wide


class Llama3Scaling(NamedTuple):
    """Scaling of rotary positions in Llama 3.1 (``rope_type: llama3``; Dubey et al. 2024,
    https://arxiv.org/abs/2407.21783): long wavelengths by a factor, short ones not, others between.

    Args:
      factor: multiplies wavelengths above ``length / low``.
      low, high: between wavelengths ``length / low`` and ``length / high`` the frequencies are
        interpolated; shorter ones are kept.
      length: positions that the model had been trained on before.
    """

    factor: float
    low: float
    high: float
    length: int

    def scaled(self, frequencies: jax.Array, theta: float | None = None) -> jax.Array:
        """Returns the frequencies, of base ``theta``, of the stretched positions.

        >>> Llama3Scaling(8.0, 1.0, 4.0, 100).scaled(jnp.array([1.0, 0.01]))
        Array([1.     , 0.00125], dtype=float32)
        """
        del theta
        turns = self.length * frequencies / (2 * math.pi)  # within ``length`` positions
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


class LinearScaling(NamedTuple):
    """Rotary positions divided by a factor (Chen et al. 2023, https://arxiv.org/abs/2306.15595;
    ``rope_type: linear``), as in the global layers of the larger Gemma 3."""

    factor: float

    def scaled(self, frequencies: jax.Array, theta: float | None = None) -> jax.Array:
        """Returns the frequencies, of base ``theta``, of the stretched positions.

        >>> LinearScaling(8.0).scaled(jnp.array([1.0, 0.5]))
        Array([0.125 , 0.0625], dtype=float32)
        """
        del theta
        return frequencies / self.factor


class YarnScaling(NamedTuple):
    """Scaling of rotary positions by YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071;
    ``rope_type: yarn``): slow frequencies by a factor, fast ones not, others between; and queries
    and keys are longer.

    Args:
      factor: divides the frequencies that turn less than ``slow`` times.
      length: positions that the model had been trained on before.
      magnitude: multiplies cosines and sines, so that it is squared in scores.
      fast, slow: turns within ``length`` positions, from which on and up to which frequencies are
        kept and divided.
      whole: whether the pairs of features at which the ramp begins and ends are whole numbers: 1,
        or 0.
      all_dim: scores are multiplied by the square of ``0.1 all_dim log(factor) + 1``, as those of
        DeepSeek-V3 (its ``mscale_all_dim``); 0 leaves them.
    """

    factor: float
    length: int
    magnitude: float
    fast: float = 32.0
    slow: float = 1.0
    whole: int = 1
    all_dim: float = 0.0

    @property
    def of_scores(self) -> float:
        """What multiplies the scores of attention."""
        return (0.1 * self.all_dim * math.log(max(self.factor, 1.0)) + 1) ** 2

    def scaled(self, frequencies: jax.Array, theta: float) -> jax.Array:
        """Returns the frequencies, of base ``theta``, of the stretched positions.

        >>> YarnScaling(4.0, 64, 1.1).scaled(jnp.array([1.0, 0.1]), 100.0)
        Array([1.    , 0.0625], dtype=float32)
        """
        pairs = frequencies.shape[0]
        low, high = (
            pairs * math.log(self.length / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.fast, self.slow)
        )
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high += 0.001 * (low == high)
        divided = jnp.clip((jnp.arange(pairs) - low) / (high - low), 0.0, 1.0)
        return frequencies * (1 - divided + divided / self.factor)


class DynamicScaling(NamedTuple):
    """Rotary positions whose base grows with the row (dynamic NTK, ``rope_type: dynamic``): that of
    T positions, more than ``length``, is ``theta (1 + factor (T / length - 1)) ** (K / (K - 2))``.

    T counts the padding of a row and all documents that are packed into it.

    Args:
      factor: makes the base grow faster.
      length: positions that the model had been trained on before; up to it nothing is scaled.
    """

    factor: float
    length: int

    def scaled_in(self, row: Any, frequencies: jax.Array) -> jax.Array:
        """Returns the frequencies in a row of ``row`` positions.

        >>> DynamicScaling(2.0, 64).scaled_in(160, jnp.array([1.0, 0.1, 0.01]))
        Array([1.    , 0.05  , 0.0025], dtype=float32)
        """
        pairs = frequencies.shape[0]
        # An exported program has rows of any length, which Python's max could not compare.
        times = jnp.maximum(jnp.asarray(row, frequencies.dtype) / self.length, 1.0)
        slower = (1 + self.factor * (times - 1)) ** (jnp.arange(pairs) / max(pairs - 1, 1))
        return frequencies / slower


class LongScaling(NamedTuple):
    """Rotary positions of which each frequency has its own divisor (LongRoPE, Ding et al. 2024,
    https://arxiv.org/abs/2402.13753; ``rope_type: longrope``), another one in long rows.

    Args:
      short, long: K/2 divisors each, in rows of at most ``length`` positions and of more, the
        padding of a row and all documents that are packed into it counted.
      length: positions that the model had been trained on before.
      magnitude: multiplies cosines and sines in both, so that it is squared in scores.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    length: int
    magnitude: float

    def scaled_in(self, row: Any, frequencies: jax.Array) -> jax.Array:
        """Returns the frequencies in a row of ``row`` positions.

        >>> LongScaling((1.0, 2.0), (4.0, 8.0), 64, 1.2).scaled_in(65, jnp.array([1.0, 0.1]))
        Array([0.25  , 0.0125], dtype=float32)
        """
        short, long = (jnp.asarray(x, frequencies.dtype) for x in (self.short, self.long))
        return frequencies / jnp.where(jnp.asarray(row) > self.length, long, short)


# Those by which the length of a row decides: nothing but whole rows up to their length is decoded.
ByRow = DynamicScaling | LongScaling
Scaling = Llama3Scaling | LinearScaling | YarnScaling | ByRow


def scaling_of(values: Any) -> Scaling:
    """Makes a scaling of its numbers, such as those of a file: one is linear, two are dynamic, four
    are Llama 3's, two lists and two numbers LongRoPE's, and six or seven YaRN's.

    Raises:
      ValueError: they are others.

    >>> scaling_of([8.0])
    LinearScaling(factor=8.0)
    """
    if (
        isinstance(values, list | tuple)
        and len(values) == 4
        and not isinstance(values[0], int | float)
    ):
        return _long_scaling(*values)
    numbers = isinstance(values, list | tuple) and all(type(x) in (int, float) for x in values)
    if numbers and len(values) == 1 and values[0] > 0:
        return LinearScaling(*values)
    if numbers and len(values) == 2 and 0 < values[0] < math.inf and values[1] in range(1, 2**31):
        return DynamicScaling(*values)
    if numbers and len(values) in (6, 7) and min(values[:5]) > 0 and values[3] > values[4]:
        return YarnScaling(*values)
    if not numbers or len(values) != 4 or min(values) <= 0 or values[1] >= values[2]:
        raise ValueError(
            f"rope_scaling={values!r} must be one positive number (factor), two (factor, length), "
            "the length whole, four (factor, low, high, length), low below high, six or seven "
            "(factor, length, magnitude, fast, slow, whole, all_dim), slow below fast, or two "
            "lists and two numbers (short, long, length, magnitude)"
        )
    return Llama3Scaling(*values)


def _long_scaling(short: Any, long: Any, length: Any, magnitude: Any) -> LongScaling:
    numbers = [length, magnitude]
    for factors in (short, long):
        numbers += factors if isinstance(factors, list | tuple) and factors else [None]
    fits = all(type(x) in (int, float) and 0 < x < math.inf for x in numbers)
    if not fits or type(length) is not int or len(short) != len(long):
        raise ValueError(
            f"rope_scaling={(short, long, length, magnitude)!r} must be two lists of as many "
            "positive numbers (short, long), a whole number (length) and a number (magnitude)"
        )
    return LongScaling(tuple(short), tuple(long), length, magnitude)


def rotary_frequencies(
    head_dim: int, *, theta: float = 10000.0, scaling: Scaling | None = None, row: Any = 0
) -> jax.Array:
    """Returns the angles per position ``theta ** (-2 i / K)``, [K/2]: float32, or float64 where JAX
    has it (``jax_enable_x64``).

    Args:
      head_dim: K, even.
      theta: base of the frequencies.
      scaling: changes them.
      row: T, the positions of the row, by which some scalings do.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=float) / head_dim)
    if isinstance(scaling, ByRow):
        return scaling.scaled_in(row, frequencies)
    return frequencies if scaling is None else scaling.scaled(frequencies, theta)


def rotary_angles(
    positions_BT: jax.Array, frequencies: jax.Array, magnitude: float | jax.Array = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns ``magnitude`` times cosines and sines of ``position * frequency``, [B, T, K/2] in the
    dtype of the frequencies [K/2], of int32 positions, whose leading dimensions may be any."""
    angles = positions_BT.astype(frequencies.dtype)[..., None] * frequencies
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def rotate(
    x_BTHK: jax.Array, angles: tuple[jax.Array, jax.Array], *, adjacent: bool = False
) -> jax.Array:
    """Turns each pair of features (i, i + K/2) by its position's angle; or each pair (2i, 2i + 1),
    ``adjacent``, of which the result has all first ones in front, as its products do not mind.

    Halves are those of the published Llama checkpoints in Hugging Face form; Meta's own files
    pair (2i, 2i + 1), which is the same model with the columns of q and k permuted. The products
    are float32, or float64 of such an ``x_BTHK``; the result has its dtype.

    >>> x_BTHK = jnp.ones((1, 2, 1, 2))
    >>> turned_BTHK = rotate(x_BTHK, rotary_angles(jnp.array([[0, 1]]), jnp.ones(1)))
    >>> [round(float(x), 3) for x in turned_BTHK[0, 1, 0]]
    [-0.301, 1.382]
    """
    dtype = wide(x_BTHK.dtype)
    cos, sin = (a[..., None, :].astype(dtype) for a in angles)
    x_BTHK, of = x_BTHK.astype(dtype), x_BTHK.dtype
    pairs = (x_BTHK[..., ::2], x_BTHK[..., 1::2]) if adjacent else jnp.split(x_BTHK, 2, axis=-1)
    first, second = pairs
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(of)


def sinusoidal_positions(
    positions_BT: jax.Array, width: int, *, theta: float = 10000.0
) -> jax.Array:
    """Returns the position embedding of Vaswani et al. 2017, section 3.5
    (https://arxiv.org/abs/1706.03762), [B, T, D] float32: sines and cosines in turn, of angles
    ``position * theta ** (-2 i / D)``.

    >>> sinusoidal_positions(jnp.array([[0, 1]]), 2).round(3).tolist()
    [[[0.0, 1.0], [0.8410000205039978, 0.5400000214576721]]]
    """
    cos, sin = rotary_angles(positions_BT, rotary_frequencies(width, theta=theta))
    return jnp.stack((sin, cos), axis=-1).reshape(*positions_BT.shape, width)
