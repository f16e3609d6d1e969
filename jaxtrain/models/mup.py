"""Maximal update parametrization: a decoder, or an encoder of masked tokens, whose best learning
rate is that of a narrower one.

Yang et al. 2022 (https://arxiv.org/abs/2203.03466), for rules whose updates do not depend on the
size of gradients. Every factor that the paper has in the forward pass stands in a parameter here,
as such rules allow: a parameter that is c times smaller, with c times the rate, computes the same.
So the model is an ordinary one, in every checkpoint and program.

With the ratio m of a size to the base model's, of I inputs, O outputs, K features per head and D:

====================================  ===================  =====================================
parameter                             begins, times        rate, times
====================================  ===================  =====================================
tables, norms and biases of layers    1                    1
kernels of attention and MLP, and     m_I ** -0.5          1 / m_I; of Muon, as its norm asks
of the transform before the logits
those of queries (or their norm's     and m_K ** -0.5      and m_K ** -0.5: scores are q k / K,
scale and bias, where they have one)                       and not q k / sqrt(K)
norm before the logits                1 / m_D              1 / m_D: so are logits
====================================  ===================  =====================================

Weight decay is multiplied by the inverse of the rate's factor, and so shrinks a parameter by the
same share at every width. At the base model's sizes every factor is 1.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.models import decoder, encoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.tree import map_named, named_leaves

RULES = ("adam", "adamw", "adan", "lion", "muon")
# Begins the path of a layer's parameter, or of the transform of a head.
LAYER = r"^(blocks|dense/\d+|head/transform)/"


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors of a model by path; 1 where a path is not named.

    Args:
      init: what a parameter begins with is multiplied by.
      rate: what its learning rate is multiplied by.
      offset: whether norms multiply by 1 + their scale, to which ``init`` applies then.
    """

    init: Mapping[str, float]
    rate: Mapping[str, float]
    offset: bool = False

    def rate_of(self, path: str) -> float:
        """The factor of the learning rate."""
        return self.rate.get(path, 1.0)

    def decay_of(self, path: str) -> float:
        """The factor of the weight decay, which the rate is multiplied by too."""
        return 1.0 / self.rate_of(path)

    def begun(self, params: Any) -> Any:
        """Returns parameters, as they are drawn, with their factors."""

        def begin(path: str, p: jax.Array) -> jax.Array:
            if (factor := self.init.get(path, 1.0)) == 1.0:
                return p
            shift = 1.0 if self.offset and path.endswith("/scale") else 0.0
            return (p + shift) * factor - shift

        return map_named(begin, params)


def factors(
    config: DecoderConfig | EncoderConfig,
    base: DecoderConfig | EncoderConfig,
    *,
    rule: str,
    muon_scale: str = "rms",
) -> Factors:
    """Returns the factors of a model, relative to one for which the learning rate is right.

    Args:
      config, base: models that differ in their sizes alone.
      rule: the name of an update rule; ``muon_scale`` is its option.

    Raises:
      ValueError: the rule's updates depend on the size of gradients or of parameters; or the model
        multiplies its embeddings by a power of the width.

    >>> base = decoder.tiny()
    >>> wide = dataclasses.replace(base, width=768, mlp_width=None, heads=8, kv_heads=None)
    >>> found = factors(wide, base, rule="adamw")
    >>> found.rate_of("blocks/mlp/up/kernel"), found.rate_of("embed/tokens")
    (0.25, 1.0)
    """
    if rule not in RULES:
        raise ValueError(
            f"the optimizer is {rule!r}: muP is here for rules whose updates do not depend on the "
            f"size of gradients or parameters; use one of {', '.join(RULES)}, or no muP"
        )
    encodes = isinstance(config, EncoderConfig)
    other = not encodes and (
        config.kv_rank is not None or any(config.delta_pattern) or config.out_gate
    )
    if config.embed_scale or config.head != "tokens" or other:
        has = "multiplies its embeddings by sqrt(width)" if config.embed_scale else "gives a score"
        has = "has latent, gated or linear attention" if other else has
        has = f"has a head for {config.head}" if encodes else has
        raise ValueError(f"the model {has}: muP has no rates for that; train it without")
    shapes, others = (
        named_leaves(jax.eval_shape(functools.partial(_draw, each), jax.random.key(0)))
        for each in (config, base)
    )
    update = functools.partial(_muon, muon_scale) if rule == "muon" else _elementwise
    last = "head/norm/" if encodes else "final_norm/"
    init, rate = {}, {}
    for path, leaf in shapes.items():
        if re.match(LAYER, path) and path.endswith("/kernel"):
            sizes = [(shape[-2], shape[-1]) for shape in (leaf.shape, others[path].shape)]
            init[path] = (sizes[0][0] / sizes[1][0]) ** -0.5
            rate[path] = update(*sizes[0]) / update(*sizes[1])
        elif path.startswith(last):
            init[path] = rate[path] = base.width / config.width
    query = "attn/norm_q/" if config.qk_norm else "attn/q/"
    scores = (base.block.head_dim / config.block.head_dim) ** 0.5
    for path in (path for path in shapes if re.match(LAYER + query, path)):
        init[path], rate[path] = (each.get(path, 1.0) * scores for each in (init, rate))
    return Factors(init, rate, config.norm_offset)


def _elementwise(inputs: int, outputs: int) -> float:
    """The rate, but for a constant, of entries that all move as much: what they add to an output
    is a sum over the inputs."""
    del outputs
    return 1 / inputs


def _muon(scale: str, inputs: int, outputs: int) -> float:
    """The rate, but for a constant, of an orthogonal update that Muon has scaled: its spectral norm
    is to be sqrt(outputs / inputs) (Yang et al. 2023, https://arxiv.org/abs/2310.17813)."""
    has = max(inputs, outputs) if scale == "rms" else max(1, outputs / inputs)
    return math.sqrt(outputs / inputs / has)


def init(config: DecoderConfig | EncoderConfig, factors: Factors) -> Callable[[jax.Array], Any]:
    """Returns the function that draws the parameters of a model with its factors."""
    return lambda rng: factors.begun(_draw(config, rng))


def _draw(config: DecoderConfig | EncoderConfig, rng: jax.Array) -> Any:
    return (encoder if isinstance(config, EncoderConfig) else decoder).init(config, rng)
