"""Merging a run's additions: into which weights, and how much what is predicted changes by it.

Shapes: N rows of T tokens, V tokens of the vocabulary.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models import decoder
from jaxtrain.ops.linear import merge
from jaxtrain.ops.packed import Packed
from jaxtrain.tree import PyTree, is_a, map_named


def onto_original(params: PyTree, originals: Mapping[str, Any]) -> PyTree:
    """Returns merged parameters, additions to packed kernels put onto the weights that these were
    packed of.

    Args:
      params: as they were trained.
      originals: weights by path, of the model that the run began from.
    """
    is_packed = is_a(Packed)

    def original(name: str, kernel: Any) -> Any:
        name = re.sub("(/low)?/base$", "", name)
        return jnp.asarray(originals[name], jnp.float32) if is_packed(kernel) else kernel

    return merge(map_named(original, params, is_leaf=is_packed))


def divergence(
    model: decoder.DecoderConfig, params: PyTree, others: PyTree, tokens: np.ndarray
) -> tuple[float, int]:
    """Returns the mean KL divergence, in nats per token, of what ``others`` predict from what
    ``params`` do, and the number of tokens that it is of.

    Args:
      model: of both.
      params, others: parameters, of which any kernel may be packed or have additions.
      tokens: int32 [.]: a text, cut into rows of the model's length; what is left over is left out.
    """
    T = min(model.seq_len, len(tokens))
    rows_NT = tokens[: len(tokens) // T * T].reshape(-1, T)

    @jax.jit
    def total(params: PyTree, others: PyTree, rows_NT: jax.Array) -> jax.Array:
        logits = functools.partial(decoder.logits, model)
        p_NTV, q_NTV = (jax.nn.log_softmax(logits(x, rows_NT)) for x in (params, others))
        return (jnp.exp(p_NTV) * (p_NTV - q_NTV)).sum()

    parts = (rows_NT[i : i + 4] for i in range(0, len(rows_NT), 4))
    return sum(float(total(params, others, part)) for part in parts) / rows_NT.size, rows_NT.size
