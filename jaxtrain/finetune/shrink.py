"""Smaller models, calibrated by what their kernels multiply: quantized, pruned, and narrow ones.

Arrays are NumPy's, on the host. A gram is x^T x of a kernel's inputs, of
:func:`jaxtrain.ops.altered.grams`.

Shapes: L layers, D inputs, F outputs, H heads of K features, G groups of heads that share keys, M
channels of an MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.ops.activations import GATED
from jaxtrain.ops.packed import TINY, Kind, Packed, pack
from jaxtrain.tree import PyTree, map_named, named_leaves


def error(kernel_DF: np.ndarray, other_DF: np.ndarray, gram_DD: np.ndarray) -> float:
    """Returns |X (other - kernel)| / |X kernel|, of the inputs X that the gram is of."""
    whole = _norm(kernel_DF, gram_DD)
    return _norm(np.float64(other_DF) - kernel_DF, gram_DD) / whole if whole > 0 else 0.0


def _norm(kernel_DF: np.ndarray, gram_DD: np.ndarray) -> float:
    w_DF = np.asarray(kernel_DF, np.float64)
    return float(np.sqrt(max(np.einsum("df,de,ef->", w_DF, gram_DD, w_DF, optimize=True), 0)))


def gptq(
    kernel_DF: np.ndarray, gram_DD: np.ndarray, kind: Kind, group: int | None = None
) -> Packed:
    """Rounds a kernel input by input, and moves the error of each to the inputs that follow, as the
    inputs' correlations would have it (Frantar et al. 2022, GPTQ, https://arxiv.org/abs/2210.17323).

    Weights that are 0 stay 0.

    Args:
      kernel_DF: float32.
      gram_DD: float64; 1 % of its mean diagonal is added to the diagonal.
      kind: int4 or int8.
      group: inputs that share a scale, as for :func:`jaxtrain.ops.packed.pack`.
    """
    D, F = kernel_DF.shape
    first_scales = pack(kernel_DF, kind, group).scale
    group, half = D // len(first_scales), 2 ** (int(kind[3:]) - 1)
    scale_GF = np.empty(first_scales.shape, np.float32)
    w_DF, codes_DF = kernel_DF.astype(np.float64), np.empty((D, F))
    diagonal = np.diag(gram_DD)
    damped_DD = gram_DD + np.diag(np.where(diagonal > 0, 0.01 * diagonal.mean(), 1))
    upper_DD = np.linalg.cholesky(np.linalg.inv(damped_DD)).T
    for g, first in enumerate(range(0, D, group)):
        own = slice(first, first + group)
        block, errors = w_DF[own], np.empty((group, F))
        scale_GF[g] = pack(block.astype(np.float32), kind, group).scale.view(np.float32)
        step_F = np.maximum(scale_GF[g], TINY).astype(np.float64)
        for i in range(group):
            row = upper_DD[first + i, first + i : first + group]
            code_F = np.clip(np.rint(block[i] / step_F), -half, half - 1)
            codes_DF[first + i] = code_F * (kernel_DF[first + i] != 0)
            errors[i] = (block[i] - codes_DF[first + i] * step_F) / row[0]
            block[i + 1 :] -= np.outer(row[1:], errors[i])
        w_DF[first + group :] -= upper_DD[own, first + group :].T @ errors
    dense_DF = codes_DF * np.repeat(scale_GF, group, axis=0)
    return pack(dense_DF.astype(np.float32), kind, group, scale=scale_GF)


def awq(
    kernel_DF: np.ndarray,
    gram_DD: np.ndarray,
    kind: Kind,
    group: int | None = None,
    *,
    heads: tuple[int, int] = (1, 1),
) -> np.ndarray:
    """Returns what a kernel's rows are multiplied by, and its inputs divided by, before it is
    rounded, float32 [D]: the inputs' root mean squares, over the largest, to that power of 0, 0.05
    .. 1 with which the product errs least (Lin et al. 2023, AWQ, https://arxiv.org/abs/2306.00978).
    Power 0 is plain rounding.

    Args:
      kernel_DF: float32; the outputs of all kernels that read the same inputs.
      gram_DD, kind, group: as for :func:`gptq`.
      heads: G and R: inputs are G groups of R heads, which share their group's scales.
    """
    squares_GRK = np.diag(gram_DD).reshape(*heads, -1)
    squares_D = np.broadcast_to(squares_GRK.mean(1, keepdims=True), squares_GRK.shape).reshape(-1)
    # An input that is always 0 must not be divided by 0.
    rms_D = np.sqrt(np.maximum(squares_D, max(1e-8 * squares_D.max(), TINY)))

    def lost(scale_D: np.ndarray) -> float:
        packed = pack(kernel_DF * scale_D[:, None], kind, group)
        return error(kernel_DF, np.asarray(packed.merged()) / scale_D[:, None], gram_DD)

    # At most 1, so that a norm of 1 + its scale has digits left for (1 + scale) / s - 1.
    powers = [(rms_D / rms_D.max()) ** alpha for alpha in np.linspace(0, 1, 21)]
    return min((power_D.astype(np.float32) for power_D in powers), key=lost)


def folds(model: Any) -> dict[str, tuple[list[str], tuple[int, int]]]:
    """Returns the parts of a decoder's layer whose outputs can be divided by scales, each with the
    kernels that read them and with the ``heads`` of :func:`awq`.

    A GELU without a gate has none before it: unlike ReLU, gelu(x / s) is not gelu(x) / s.
    """
    inner, each = ["mlp/gate", "mlp/up"] if model.mlp in GATED else ["mlp/up"], (1, 1)
    found = {"norm_attn": (["attn/q", "attn/k", "attn/v"], each), "norm_mlp": (inner, each)}
    found["attn/v"] = ["attn/out"], (model.kv_heads, model.heads // model.kv_heads)
    return found | ({"mlp/up": (["mlp/down"], each)} if model.mlp in (*GATED, "relu") else {})


def input_scales(
    model: Any, params: PyTree, grams: Mapping[str, np.ndarray], kind: Kind, group: int | None
) -> dict[str, np.ndarray]:
    """Returns the scales of :func:`awq`, [L, D], of what each of the :func:`folds` makes; grams are
    those of all kernels of attention and MLP. Kernels that read the same inputs count alike."""
    named, found = named_leaves(params), {}
    for part, (readers, heads) in folds(model).items():
        paths, layers = [f"blocks/{reader}/kernel" for reader in readers], []
        for gram_DD, *own in zip(grams[paths[0]], *map(named.get, paths), strict=True):
            # A power of two leaves the codes as they are.
            own = [np.ldexp(np.float32(x), -np.frexp(_norm(x, gram_DD))[1]) for x in own]
            layers.append(awq(np.concatenate(own, axis=-1), gram_DD, kind, group, heads=heads))
        found[part] = np.stack(layers)
    return found


def fold(model: Any, params: PyTree, scales: Mapping[str, np.ndarray]) -> PyTree:
    """Returns parameters of the same function: kernels are multiplied by scales, in float32, and
    what they read is divided by them where it is made, and rounded to its dtype.

    Args:
      model, params: a decoder's config, and its parameters in natural order.
      scales: as :func:`input_scales` returns them.
    """
    table = folds(model)
    parts = {reader: part for part, (readers, _) in table.items() for reader in readers}

    def folded(name: str, x: Any) -> Any:
        module, _, leaf = name.removeprefix("blocks/").rpartition("/")
        y, read = np.asarray(x, np.float64), scales.get(parts.get(module, ""))
        if leaf == "kernel" and read is not None:
            y = y * read[..., None]
        elif module not in scales:
            return x
        if module in scales:
            scale_LF = scales[module].reshape(len(y), *table[module][1], -1)[:, :, 0]
            offset = model.norm_offset and leaf == "scale"
            y = (y + offset) / scale_LF.reshape(len(y), *[1] * (y.ndim - 2), -1) - offset
        return y.astype(np.float32 if leaf == "kernel" else x.dtype)

    return map_named(folded, params)


def kept(kernel_DF: np.ndarray, norms_D: Any, n: int, m: int) -> np.ndarray:
    """Returns a mask, bool [D, F]: of every ``m`` adjoining inputs of an output the ``n`` weights
    that are the largest times the norm of their input (Sun et al. 2023, Wanda,
    https://arxiv.org/abs/2306.11695).

    Args:
      norms_D: of the inputs; ones mean by magnitude.
      n, m: such as 2 and 4; m divides D.
    """
    D, F = kernel_DF.shape
    score = (np.abs(kernel_DF) * np.reshape(norms_D, (-1, 1))).reshape(D // m, m, F)
    rank = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1, kind="stable")
    return (rank < n).reshape(D, F)


def sizes(model: Any, *, heads: float, channels: float) -> Any:
    """Returns the config of a model with a share of the heads and of the channels of its MLPs.

    Args:
      model: a config with ``heads``, ``kv_heads``, ``head_dim`` and ``mlp_width``.
      heads, channels: the shares. Heads that share keys and values stay or go together.
    """
    G, M = (max(1, round(n)) for n in (heads * model.kv_heads, channels * model.mlp_width))
    own = {"kv_heads": G, "heads": G * model.heads // model.kv_heads, "mlp_width": M}
    K = model.head_dim or model.width // model.heads
    return dataclasses.replace(model, head_dim=K if heads < 1 else model.head_dim, **own)


def narrow(model: Any, small: Any, params: PyTree, grams: Mapping[str, np.ndarray]) -> PyTree:
    """Returns the parameters of a smaller model: of every layer those heads and channels of which
    what they add to the residual stream has the largest norm.

    Args:
      model, small: a config, and what :func:`sizes` makes of it.
      params: of the model, in natural order.
      grams: of ``blocks/attn/out/kernel`` and ``blocks/mlp/down/kernel``.
    """
    named, K = named_leaves(params), model.head_dim or model.width // model.heads
    own, shared = model.heads // model.kv_heads * K, K

    def largest(path: str, parts: int, count: int) -> np.ndarray:
        kernel = np.asarray(named[path], np.float64)
        L, D, F = kernel.shape
        w, n = kernel.reshape(L, parts, D // parts, F), D // parts
        gram = grams[path].reshape(L, parts, n, parts, n)
        energy_LP = np.einsum("lpif,lpipj,lpjf->lp", w, gram, w, optimize=True)
        return np.sort(np.argsort(-energy_LP, axis=1, kind="stable")[:, :count], axis=1)

    groups_LG = largest("blocks/attn/out/kernel", model.kv_heads, small.kv_heads)
    channels_LM = largest("blocks/mlp/down/kernel", model.mlp_width, small.mlp_width)
    places = {"q": (groups_LG, own), "k": (groups_LG, shared), "v": (groups_LG, shared)}
    places |= {"out": (groups_LG, own), "down": (channels_LM, 1)}
    places |= {"up": (channels_LM, 1), "gate": (channels_LM, 1)}

    def taken(name: str, x: Any) -> Any:
        *_, part, leaf = name.split("/")
        outer = part in ("out", "down")
        if part not in places or (outer and leaf == "bias"):
            return x
        chosen, size = places[part]
        index = (chosen[..., None] * size + np.arange(size)).reshape(len(chosen), -1)
        axis = 1 if outer else np.ndim(x) - 1
        index = np.expand_dims(index, [i for i in range(1, np.ndim(x)) if i != axis])
        return np.take_along_axis(np.asarray(x), index, axis)

    return map_named(taken, params)
