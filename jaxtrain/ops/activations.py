"""Activations of the feed-forward layers, with derivatives that keep one array instead of five.

Computed in float32, returned in the dtype of their input.
"""

import math

import jax
import jax.numpy as jnp


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """GELU in the tanh approximation of GPT-2 (Hendrycks and Gimpel 2016).

    ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``, https://arxiv.org/abs/1606.08415.

    >>> [round(float(y), 4) for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.1588, 0.0, 0.8412]
    """
    return _gelu(x)[0]


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    y, slope = _gelu(*primals)
    return y, slope * tangents[0]


def _gelu(x):
    wide, root = x.astype(jnp.promote_types(x.dtype, jnp.float32)), math.sqrt(2 / math.pi)
    square = wide * wide
    tanh = jnp.tanh(root * wide * (1 + 0.044715 * square))
    half = 0.5 * (1 + tanh)
    slope = half + 0.5 * wide * (1 - tanh * tanh) * root * (1 + 3 * 0.044715 * square)
    return (wide * half).astype(x.dtype), slope.astype(x.dtype)


@jax.custom_jvp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns ``gate * sigmoid(gate) * up`` (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0]))
    Array([  0., 200.], dtype=float32)
    """
    return _swiglu(gate, up)[0]


@swiglu.defjvp
def _swiglu_jvp(primals, tangents):
    y, by_gate, by_up = _swiglu(*primals)
    return y, by_gate * tangents[0] + by_up * tangents[1]


def _swiglu(gate, up):
    wide = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
    sigmoid = jax.nn.sigmoid(wide)
    silu = wide * sigmoid
    by_gate = (sigmoid + silu * (1 - sigmoid)) * up
    return (silu * up).astype(gate.dtype), by_gate.astype(gate.dtype), silu.astype(gate.dtype)
