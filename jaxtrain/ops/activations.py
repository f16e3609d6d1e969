"""Activations of the feed-forward layers, with derivatives that keep one array instead of five.

Computed in float32, returned in the dtype of their input.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxtrain.ops.linear import add_bias
from jaxtrain.ops.numerics import wide
from jaxtrain.sharding.mesh import platform

# Of :func:`gelu_quick` and :func:`swiglu_clamped`, and of the latter alone.
STEEP, LIMIT = 1.702, 7.0


def _activation(values: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., jax.Array]:
    """Makes an activation of a function that returns its value and its slope by each argument."""

    def narrow(*args):
        return [value.astype(args[0].dtype) for value in values(*args)]

    @jax.custom_jvp
    @functools.wraps(values)
    def activation(*args):
        return narrow(*args)[0]

    def change(slopes, tangents):
        return functools.reduce(operator.add, map(operator.mul, slopes, tangents))

    @activation.defjvp
    def jvp(primals, tangents):
        y, *slopes = narrow(*primals)
        return y, change(slopes, tangents)

    return activation


def activate(
    form: str, products: Sequence[jax.Array], biases: Sequence[jax.Array | None]
) -> jax.Array:
    """Returns an activation, by its name, of products [..., F] with their biases [F] added.

    On a GPU the backward pass adds and activates again: XLA would keep the sums with the biases,
    and a float32 array, which are written and read besides the products.

    >>> activate("relu", [jnp.array([[-1.0, 2.0]])], [jnp.array([3.0, 0.5])])
    Array([[2. , 2.5]], dtype=float32)
    """

    def of(products, biases):
        return ACTIVATIONS[form](*map(add_bias, products, biases))

    return (jax.checkpoint(of) if platform() == "gpu" else of)(products, biases)


@_activation
def gelu(x: jax.Array):
    """GELU in the tanh approximation of GPT-2 (Hendrycks and Gimpel 2016).

    ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``, https://arxiv.org/abs/1606.08415.

    >>> [round(float(y), 4) for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.1588, 0.0, 0.8412]
    """
    return _gelu_and_slope(x.astype(wide(x.dtype)))


@_activation
def gelu_exact(x: jax.Array):
    """GELU itself, ``x / 2 (1 + erf(x / sqrt(2)))``, as BERT and ViT have it.

    >>> [round(float(y), 4) for y in gelu_exact(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.1587, 0.0, 0.8413]
    """
    return _gelu_exact_and_slope(x.astype(wide(x.dtype)))


@_activation
def gelu_quick(x: jax.Array):
    """GELU in the sigmoid approximation of CLIP, ``x sigmoid(1.702 x)``.

    >>> [round(float(y), 4) for y in gelu_quick(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.1542, 0.0, 0.8458]
    """
    large = x.astype(wide(x.dtype))
    sigmoid = jax.nn.sigmoid(STEEP * large)
    return large * sigmoid, sigmoid * (1 + STEEP * large * (1 - sigmoid))


@_activation
def swiglu(gate: jax.Array, up: jax.Array):
    """Returns ``gate * sigmoid(gate) * up`` (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0]))
    Array([  0., 200.], dtype=float32)
    """
    large = gate.astype(wide(gate.dtype))
    sigmoid = jax.nn.sigmoid(large)
    silu = large * sigmoid
    by_gate = (sigmoid + silu * (1 - sigmoid)) * up
    return silu * up, by_gate, silu


@_activation
def swiglu_clamped(gate: jax.Array, up: jax.Array):
    """Returns ``gate * sigmoid(1.702 gate) * (up + 1)`` of a gate of at most 7, and of an up
    within 7, as GPT-OSS has it.

    >>> print(f"{swiglu_clamped(jnp.float32(9), jnp.float32(-9)):.2f}")
    -42.00
    """
    large, lifted = (x.astype(wide(x.dtype)) for x in (gate, up))
    capped, lifted = jnp.minimum(large, LIMIT), jnp.clip(lifted, -LIMIT, LIMIT) + 1
    sigmoid = jax.nn.sigmoid(STEEP * capped)
    glu = capped * sigmoid
    by_gate = (sigmoid + STEEP * glu * (1 - sigmoid)) * lifted
    within = jnp.abs(up) <= LIMIT
    return glu * lifted, jnp.where(large <= LIMIT, by_gate, 0), jnp.where(within, glu, 0)


@_activation
def geglu(gate: jax.Array, up: jax.Array):
    """Returns ``gelu(gate) * up`` (Shazeer 2020), GELU in the tanh approximation.

    >>> [round(float(y), 4) for y in geglu(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0]))]
    [0.0, 1.6824]
    """
    y, slope = _gelu_and_slope(gate.astype(wide(gate.dtype)))
    return y * up, slope * up, y


@_activation
def geglu_exact(gate: jax.Array, up: jax.Array):
    """Returns ``gelu_exact(gate) * up``, as ModernBERT has it.

    >>> [round(float(y), 4) for y in geglu_exact(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0]))]
    [0.0, 1.6827]
    """
    y, slope = _gelu_exact_and_slope(gate.astype(wide(gate.dtype)))
    return y * up, slope * up, y


@_activation
def relu(x: jax.Array):
    """Returns ``max(x, 0)``; the slope at 0 is 0.

    >>> relu(jnp.array([-1.0, 2.0]))
    Array([0., 2.], dtype=float32)
    """
    return jnp.maximum(x, 0), (x > 0).astype(x.dtype)


def _gelu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    root, square = math.sqrt(2 / math.pi), x * x
    if platform() == "gpu":
        # (1 + tanh u) / 2, in three quarters of the instructions.
        half = jax.nn.sigmoid(x * (2 * root + 2 * root * 0.044715 * square))
    else:
        half = 0.5 * (1 + jnp.tanh(root * x * (1 + 0.044715 * square)))
    slope = half + x * half * (1 - half) * (2 * root + 6 * root * 0.044715 * square)
    return x * half, slope


def _gelu_exact_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    below = 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    slope = below + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * below, slope


# By the name that a model's configuration has for them; a gated one takes the gate first.
ACTIVATIONS = {
    "gelu": gelu,
    "gelu_exact": gelu_exact,
    "gelu_quick": gelu_quick,
    "relu": relu,
    "swiglu": swiglu,
    "swiglu_clamped": swiglu_clamped,
    "geglu": geglu,
    "geglu_exact": geglu_exact,
}
GATED = ("swiglu", "swiglu_clamped", "geglu", "geglu_exact")
