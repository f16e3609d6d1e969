"""A decoder-only transformer in the GPT-2 and the Llama form, as pure functions of plain dicts.

``init`` makes the parameters, ``loss_fn`` the loss that the step builders take, put together from
the :func:`stages` that a pipeline places on its devices.

A batch is a dict of [B, T] arrays: ``tokens`` and ``targets`` int32, ``mask`` float32, and
optionally ``segments`` (int32 document numbers from 1, 0 for padding: attention stays within a
document) and ``positions`` (int32, starting again at each document; without it 0 .. T - 1).

Parameters are float32 from ``init``; the model computes in whatever floating dtype it is given
them, with norms, softmax, rotary angles and losses in float32.

Shapes: B batch, T positions, N = B * T tokens, D width, L layers, H query heads, G key and value
heads, K features per head, V rows of the token table.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import distilling, experts, layers, parts
from jaxtrain.models.config import (
    INIT_STD,
    AttentionFields,
    BlockConfig,
    DeltaFields,
    ExpertFields,
    TokenFields,
    check_positive,
    deltas_of,
    fields_of,
    fill,
    keys_seen,
)
from jaxtrain.ops import losses
from jaxtrain.ops.linear import matmul_float32
from jaxtrain.ops.numerics import drop, soft_cap
from jaxtrain.ops.rotary import LinearScaling, YarnScaling
from jaxtrain.sharding.placement import pin_residual
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.stages import Stages, loss_from_stages, run_layers

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

# Metrics that are parts of the loss beside the cross-entropy.
ADDED = ("z_loss", "balance_loss", "router_z_loss")
# Paths of the kernels of experts.
EXPERTS = r"^blocks/(\d+/)?experts/(up|gate|down)/"

# Path of a layer's parameter to logical axes.
_OF_LAYER = (
    (r"attn/(q|kv)/kernel$", ("embed", "heads")),
    (r"attn/(q|kv)_down/kernel$", ("embed", None)),
    (r"attn/(sinks|log_rate|shift)$", ("heads",)),
    (r"attn/(qkvz|ba)/kernel$", ("embed", "heads")),
    (r"attn/conv$", (None, None, None)),  # features of all queries, keys and values, not by head
    (r"attn/q/bias$", ("heads",)),
    (r"attn/(k|v)/kernel$", ("embed", "kv_heads")),
    (r"attn/(k|v)/bias$", ("kv_heads",)),
    (r"attn/out/kernel$", ("heads", "embed")),
    (r"mlp/(up|gate)/kernel$", ("embed", "mlp")),
    (r"mlp/(up|gate)/bias$", ("mlp",)),
    (r"mlp/down/kernel$", ("mlp", "embed")),
    (r"(experts/router|shared_gate)/kernel$", ("embed", None)),
    (r"experts/(router/(bias|shift)|shares)$", (None,)),
    (r"experts/(up|gate)/bias$", ("experts", "mlp")),
    (r"experts/down/bias$", ("experts", None)),
    (r"experts/(up|gate)/kernel$", ("experts", "embed", "mlp")),
    (r"experts/down/kernel$", ("experts", "mlp", "embed")),
    (r"attn/norm_(q|k|kv|out)/(scale|bias)$", (None,)),
    (r"(attn/out|mlp/down)/bias$", (None,)),
    (r"norm_(attn|mlp)(_out)?/(scale|bias)$", (None,)),
)

# Parameter path to logical axes; the first match decides. Not every configuration has all of them.
RULES = OptionalRules(
    (
        (r"^embed/tokens$", ("vocab", "embed")),
        (r"^embed/positions$", (None, "embed")),
        *((rf"^blocks/(\d+/)?{path}", ("layers", *axes)) for path, axes in _OF_LAYER),
        *((rf"^dense/\d+/{path}", axes) for path, axes in _OF_LAYER),
        (r"^final_norm/(scale|bias)$", (None,)),
        (r"^head/kernel$", ("embed", "vocab")),
        (r"^head/score/kernel$", (None, None)),  # whole on purpose: it is one output
    )
)

# Batch leaves [B, T], and [B, 2, T] of pairs, lie like the tokens of the residual stream.
BATCH = OptionalRules(
    (r"^(tokens|targets|mask|segments|positions)$", ("batch", *pair, "sequence"))
    for pair in ((), (None,))
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ExpertFields, AttentionFields, DeltaFields, TokenFields):
    """A decoder.

    Args:
      seq_len: tokens per row in training; with learned positions also the most there can be.
      positions: learned table, rotary (of base ``rope_theta``), or sinusoidal: sines and cosines of
        the same base, added to the embeddings, which ``embed_scale`` is to make as large.
      norm_position: ``pre``, or ``sandwich`` as in Gemma 2 and 3; see :class:`BlockConfig`.
      embed_scale: embeddings of tokens are multiplied by sqrt(width), rounded to their dtype.
      tied: the output projection is the transposed token table.
      head: what the model predicts: ``tokens``, or a ``score``, the number that a reward model
        gives a text at its last token, and then no tokens.
      logit_softcap: logits are ``cap * tanh(logits / cap)``; None means not.
      dense_layers: how many layers, the first ones, have one MLP of ``dense_width`` in the place of
        experts; None means none. They are no part of the stack: the first stage runs them.
      dense_width: hidden width of those; None means ``mlp_width``.

    The other arguments are those of :mod:`jaxtrain.models.config`: :class:`TokenFields`,
    :class:`ModelFields` and, of each layer, :class:`LayerFields`, :class:`ExpertFields`,
    :class:`AttentionFields` and :class:`DeltaFields`.

    >>> config = DecoderConfig(vocab_size=257, seq_len=8, layers=1, width=24, heads=3)
    >>> config.block.head_dim, config.mlp_width, config.padded_vocab
    (8, 96, 320)
    """

    seq_len: int
    positions: Literal["learned", "rope", "sinusoidal"] = "learned"
    rope_theta: float = 10000.0
    norm_position: Literal["pre", "sandwich"] = "pre"
    embed_scale: bool = False
    tied: bool = True
    head: Literal["tokens", "score"] = "tokens"
    logit_softcap: float | None = None
    dense_layers: int | None = None
    dense_width: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.delta_pattern, list):  # in a checkpoint's JSON; before its block is made
            object.__setattr__(self, "delta_pattern", tuple(self.delta_pattern))
        super().__post_init__()
        check_positive(self, "logit_softcap")
        if self.positions == "sinusoidal" and self.width % 2:
            raise ValueError(
                f"positions='sinusoidal' are pairs of sine and cosine, and width={self.width} is "
                "odd; use an even width"
            )
        if self.dense_layers is None and self.dense_width is not None:
            raise ValueError(
                f"dense_width={self.dense_width} is of layers without experts, and dense_layers="
                "None: set both"
            )
        if self.dense_layers is not None:
            if self.experts is None or self.dense_layers >= self.layers:
                raise ValueError(
                    f"dense_layers={self.dense_layers} stand before layers with experts, of which "
                    f"layers={self.layers} and experts={self.experts} leave none: use fewer"
                )
            fill(self, dense_width=self.mlp_width)
        pattern = self.delta_pattern
        kinds = {*map(type, pattern)} if isinstance(pattern, tuple) else {None}
        if not kinds <= {bool} or (pattern and self.layers % len(pattern)):
            raise ValueError(
                f"delta_pattern={pattern!r} must say by true and false which layers have the gated "
                f"delta rule, and its length must divide layers={self.layers}"
            )
        if any(pattern) and self.dense_layers is not None:
            raise ValueError(
                f"delta_pattern={pattern!r} counts layers from the first one, and dense_layers="
                f"{self.dense_layers} of these stand before the stack: leave one out"
            )
        self.check_chunk("seq_len")

    @functools.cached_property
    def block(self) -> BlockConfig:
        """One of its layers."""
        return self.layer(
            norm_position=self.norm_position,
            rope_theta=self.rope_theta if self.positions == "rope" else None,
            # 2 L branches are added to the residual stream, whose variance is not to grow with L.
            residual_std=INIT_STD / (2 * self.layers) ** 0.5,
            **fields_of(self, ExpertFields, AttentionFields, DeltaFields),
        )

    @functools.cached_property
    def group(self) -> tuple[BlockConfig, ...]:
        """Its layers as far as their pattern goes, which then repeats."""
        pattern = self.delta_pattern or (False,)
        return tuple(dataclasses.replace(self.block, delta=delta) for delta in pattern)

    @functools.cached_property
    def dense_block(self) -> BlockConfig:
        """One of the layers before the stack."""
        own = {"experts": None, "shared_experts": None, "mlp_width": self.dense_width}
        return dataclasses.replace(self.block, **own)


def tiny() -> DecoderConfig:
    """Byte-level, 1.8 M parameters: trains on a laptop's CPU."""
    return DecoderConfig(
        vocab_size=257,
        seq_len=256,
        layers=4,
        width=192,
        # On a CPU the softmax costs more than attention's products: few, wide heads.
        heads=2,
        positions="rope",
        norm="rmsnorm",
        bias=False,
    )


def tiny_moe() -> DecoderConfig:
    """``tiny`` with 8 experts in each layer, of which a token goes through 2 of half the width."""
    return dataclasses.replace(tiny(), experts=8, mlp_width=384)


def tiny_deepseek() -> DecoderConfig:
    """``tiny`` in the form of DeepSeek-V3: latent attention, a dense layer, then groups of experts
    chosen by biased sigmoids, and a shared one."""
    return dataclasses.replace(
        tiny(),
        **{"kv_rank": 64, "q_rank": 96, "rope_pairs": "adjacent"},
        **{"dense_layers": 1, "dense_width": 768, "experts": 8, "mlp_width": 192},
        **{"shared_experts": 2, "groups": 4, "groups_per_token": 2, "routing": "sigmoid"},
        balance=1e-4,
    )


def tiny_delta() -> DecoderConfig:
    """``tiny`` in the form of Qwen3-Next without experts, linear attention in every other layer:
    gated attention, of whose heads a quarter is rotated, and norms of 1 + their scale."""
    return dataclasses.replace(
        tiny(),
        **{"delta_pattern": (True, False), "delta_heads": 4, "delta_key_heads": 2},
        **{"delta_key_dim": 48, "delta_value_dim": 48, "out_gate": True, "rope_dim": 24},
        **{"qk_norm": True, "norm_offset": True},
    )


# Rows of the length that most of their training has had.
_LLAMA1B = {"kv_heads": 4, "seq_len": 2048}
_LLAMA3 = {"kv_heads": 8, "vocab_size": 128256, "seq_len": 8192, "rope_theta": 5e5}
_MISTRAL = {"kv_heads": 8, "seq_len": 8192, "window": 4096}
_QWEN = {"seq_len": 4096, "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN25 = _QWEN | {"kv_heads": 4, "vocab_size": 152064, "qkv_bias": True}
_QWEN3 = _QWEN | {"kv_heads": 8, "vocab_size": 151936, "qk_norm": True}
_MIXTRAL = {"kv_heads": 8, "seq_len": 8192, "rope_theta": 1e6}
_QWEN3_MOE = _QWEN3 | {"kv_heads": 4, "head_dim": 128, "experts_per_token": 8}
_QWEN3_NEXT = _QWEN3_MOE | {
    "kv_heads": 2,
    "head_dim": 256,
    "rope_theta": 1e7,
    "rope_dim": 64,
    "norm_offset": True,
    "out_gate": True,
    "experts_per_token": 10,
    "shared_experts": 1,
    "shared_gate": True,
    "delta_pattern": (True, True, True, False),
    "delta_heads": 32,
    "delta_key_heads": 16,
    "delta_key_dim": 128,
    "delta_value_dim": 128,
}
_OLMOE = {
    "seq_len": 4096,
    "vocab_size": 50304,
    "qk_norm": "whole",
    "experts": 64,
    "experts_per_token": 8,
    "routing": "softmax",
}
_GPT_OSS = {
    "seq_len": 4096,
    "vocab_size": 201088,
    "kv_heads": 8,
    "head_dim": 64,
    "experts_per_token": 4,
    "mlp": "swiglu_clamped",
    "bias": True,
    "sinks": True,
    "window": 128,
    "window_pattern": (True, False),
    "rope_theta": 150000.0,
    "rope_scaling": YarnScaling(32.0, 4096, 0.1 * math.log(32.0) + 1, whole=0),
}
_DEEPSEEK_V3 = {
    "seq_len": 4096,
    "vocab_size": 129280,
    "norm_eps": 1e-6,
    "rope_scaling": YarnScaling(40.0, 4096, 1.0, all_dim=1.0),
    "rope_pairs": "adjacent",
    "head_dim": 192,
    "kv_rank": 512,
    "q_rank": 1536,
    "rope_dim": 64,
    "v_dim": 128,
    "dense_layers": 3,
    "dense_width": 18432,
    "experts": 256,
    "experts_per_token": 8,
    "shared_experts": 1,
    "groups": 8,
    "groups_per_token": 4,
    "routing": "sigmoid",
    "routed_scale": 2.5,
    "balance": 1e-4,
    "router_z": 0.0,
}
_GEMMA2 = {
    "vocab_size": 256000,
    "seq_len": 8192,
    "head_dim": 256,
    "window": 4096,
    "window_pattern": (True, False),
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
_GEMMA2_27B = _GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144}
_GEMMA3 = {
    "vocab_size": 262208,
    "seq_len": 32768,
    "head_dim": 256,
    "window": 1024,
    "window_pattern": (*[True] * 5, False),
    "rope_theta": 1e6,
    "rope_scaling": LinearScaling(8.0),
    "local_rope_theta": 1e4,
    "qk_norm": True,
}
_GEMMA3_1B = _GEMMA3 | {"vocab_size": 262144, "window": 512, "rope_scaling": None, "kv_heads": 1}
_GEMMA3_27B = _GEMMA3 | {"head_dim": 128, "query_pre_attn_scalar": 168}


def _llama(*, vocab_size: int = 32000, **shape: Any) -> DecoderConfig:
    return DecoderConfig(
        **{"mlp": "swiglu", "bias": False} | shape,
        vocab_size=vocab_size,
        positions="rope",
        norm="rmsnorm",
        tied=False,
        remat="dots",
    )


def _gemma(family: Mapping[str, Any], *, heads: int, **shape: int) -> DecoderConfig:
    return DecoderConfig(
        **{"heads": heads, "kv_heads": heads // 2} | family | shape,
        positions="rope",
        norm="rmsnorm",
        norm_eps=1e-6,
        norm_offset=True,
        norm_position="sandwich",
        embed_scale=True,
        mlp="geglu",
        bias=False,
        remat="dots",
    )


# Names on the command line, each a model's shape, with its number of parameters.
PRESETS: Mapping[str, Callable[[], DecoderConfig]] = {
    "tiny": tiny,
    "tiny-moe": tiny_moe,
    "tiny-deepseek": tiny_deepseek,
    "tiny-delta": tiny_delta,
    # GPT-2 small (Radford et al. 2019): 124,439,808.
    "gpt2-124m": lambda: DecoderConfig(
        vocab_size=50257, seq_len=1024, layers=12, width=768, heads=12
    ),
    # TinyLlama 1.1B (Zhang et al. 2024): 1,100,048,384. Llama 2 (Touvron et al. 2023):
    # 6,738,415,616.
    "llama-1b": lambda: _llama(layers=22, width=2048, heads=32, mlp_width=5632, **_LLAMA1B),
    "llama-7b": lambda: _llama(layers=32, width=4096, heads=32, mlp_width=11008, seq_len=4096),
    # Llama 3 and 3.1 (Dubey et al. 2024): 70,553,706,496 and 405,853,388,800.
    "llama-70b": lambda: _llama(layers=80, width=8192, heads=64, mlp_width=28672, **_LLAMA3),
    "llama-405b": lambda: _llama(layers=126, width=16384, heads=128, mlp_width=53248, **_LLAMA3),
    # Mistral v0.1 (Jiang et al. 2023): 7,241,732,096.
    "mistral-7b": lambda: _llama(layers=32, width=4096, heads=32, mlp_width=14336, **_MISTRAL),
    # Qwen2.5 (Qwen team 2024): 7,615,616,512. Qwen3 (Qwen team 2025): 8,190,735,360.
    "qwen2.5-7b": lambda: _llama(layers=28, width=3584, heads=28, mlp_width=18944, **_QWEN25),
    "qwen3-8b": lambda: _llama(layers=36, width=4096, heads=32, mlp_width=12288, **_QWEN3),
    # Mixtral (Jiang et al. 2024), OLMoE (Muennighoff et al. 2024) and Qwen3: 46,702,792,704,
    # 6,919,161,856 and 30,532,122,624, of which a token goes through 12.9, 1.3 and 3.3 billion.
    "mixtral-8x7b": lambda: _llama(
        layers=32, width=4096, heads=32, mlp_width=14336, experts=8, **_MIXTRAL
    ),
    "olmoe-1b-7b": lambda: _llama(layers=16, width=2048, heads=16, mlp_width=1024, **_OLMOE),
    "qwen3-30b-a3b": lambda: _llama(
        layers=48, width=2048, heads=32, mlp_width=768, experts=128, **_QWEN3_MOE
    ),
    # Qwen3-Next (Qwen team 2025) without its second head: 79,674,391,296, of which a
    # token goes through 3.6 billion.
    "qwen3-next-80b-a3b": lambda: _llama(
        layers=48, width=2048, heads=16, mlp_width=512, experts=512, **_QWEN3_NEXT
    ),
    # GPT-OSS (OpenAI 2025, https://arxiv.org/abs/2508.10925): 20,914,757,184 and 116,829,156,672,
    # of which a token goes through 3.6 and 5.1 billion.
    "gpt-oss-20b": lambda: _llama(
        layers=24, width=2880, heads=64, mlp_width=2880, experts=32, **_GPT_OSS
    ),
    "gpt-oss-120b": lambda: _llama(
        layers=36, width=2880, heads=64, mlp_width=2880, experts=128, **_GPT_OSS
    ),
    # DeepSeek-V3 (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437) without its second head:
    # 671,026,419,200, of which a token goes through 37.5 billion.
    "deepseek-v3": lambda: _llama(layers=61, width=7168, heads=128, mlp_width=2048, **_DEEPSEEK_V3),
    # Gemma 2 (Gemma team 2024, https://arxiv.org/abs/2408.00118): 2,614,341,888, 9,241,705,984 and
    # 27,227,128,320.
    "gemma2-2b": lambda: _gemma(_GEMMA2, layers=26, width=2304, heads=8, mlp_width=9216),
    "gemma2-9b": lambda: _gemma(_GEMMA2, layers=42, width=3584, heads=16, mlp_width=14336),
    "gemma2-27b": lambda: _gemma(_GEMMA2_27B, layers=46, width=4608, heads=32, mlp_width=36864),
    # The text models of Gemma 3 (Gemma team 2025, https://arxiv.org/abs/2503.19786): 999,885,952,
    # 3,880,263,168, 11,766,034,176 and 27,009,346,304.
    "gemma3-1b": lambda: _gemma(_GEMMA3_1B, layers=26, width=1152, heads=4, mlp_width=6912),
    "gemma3-4b": lambda: _gemma(_GEMMA3, layers=34, width=2560, heads=8, mlp_width=10240),
    "gemma3-12b": lambda: _gemma(_GEMMA3, layers=48, width=3840, heads=16, mlp_width=15360),
    "gemma3-27b": lambda: _gemma(_GEMMA3_27B, layers=62, width=5376, heads=32, mlp_width=21504),
}


def init(config: DecoderConfig, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters: N(0, 0.02), residual projections divided by sqrt(2 L).

    The values depend on ``rng`` alone, not on the ``out_shardings`` under which it is jitted.

    Returns:
      A nested dict: ``embed``, ``blocks`` (leading axis L), ``final_norm`` and, untied, ``head``;
      ``dense`` has by their numbers the layers before those of ``blocks``. With a
      ``delta_pattern`` of several layers ``blocks`` has them by their numbers in it, each with a
      leading axis of the patterns.

    >>> config = DecoderConfig(vocab_size=5, seq_len=4, layers=3, width=8, heads=2)
    >>> init(config, jax.random.key(0))["blocks"]["attn"]["q"]["kernel"].shape
    (3, 8, 8)
    """
    head = None if config.tied else layers.Head
    head = layers.ScoreHead if config.head == "score" else head
    return layers.draw(config, rng, embed=layers.Embed, head=head)


def loss_fn(config: DecoderConfig) -> Callable[[Params, Batch, jax.Array | None], WeightedLoss]:
    """Returns ``loss(params, batch, rng)``: masked cross-entropy, summed over tokens.

    ``rng`` None means no dropout. The loss has ``total`` (nats, float32), ``weight`` (the sum of
    the mask) and the metric ``accuracy``.

    >>> config = DecoderConfig(vocab_size=5, seq_len=4, layers=1, width=8, heads=2)
    >>> from jax import numpy as jnp
    >>> batch = {"tokens": jnp.ones((2, 4), int), "targets": jnp.ones((2, 4), int)}
    >>> batch["mask"] = jnp.ones((2, 4))
    >>> loss = loss_fn(config)(init(config, jax.random.key(0)), batch, None)
    >>> float(loss.weight), bool(abs(loss.means()["loss"] - jnp.log(5)) < 0.2)
    (8.0, True)
    """
    return loss_from_stages(stages(config))


def stages(config: DecoderConfig) -> Stages:
    """Returns the model as a pipeline takes it."""
    return layers.stages(config, embed=embed, head_loss=head_loss)


def logits(
    config: DecoderConfig,
    params: Params,
    tokens_BT: jax.Array,
    *,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Returns float32 logits [B, T, vocab_size] of the next token; arrays are [B, T] int32, as in a
    batch."""
    batch = {"tokens": tokens_BT, "segments": segments, "positions": positions}
    batch = {name: value for name, value in batch.items() if value is not None}
    return head_logits(config, params, run(config, params, batch))


def hidden(config: DecoderConfig, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Returns the hidden states [B, T, D] that the output projection multiplies."""
    return _final_norm(config, params, run(config, params, {"tokens": tokens_BT}))


def run(config: DecoderConfig, params: Params, batch: Batch) -> Any:
    """Returns the residual stream behind the last layer, which the last stages take; nothing is
    dropped."""
    model = stages(config)
    return run_layers(model, params, model.embed(params, batch, None), batch, None)


def routes(config: DecoderConfig, params: Params, batch: Batch) -> jax.Array:
    """Returns the experts that are chosen for a batch in the L layers that have some, int32
    [B, L, T, J]: as ``routes`` of a batch they are those of the same tokens under other weights."""
    model = stages(config)
    x = experts.hidden_states(model.embed(params, batch, None))
    x = experts.opened(config, x, record=True)
    return run_layers(model, params, x, batch, None)["routes"].astype("int32")


def embed(
    config: DecoderConfig,
    params: Params,
    batch: Batch,
    rng: jax.Array | None = None,
    put: Callable[[jax.Array], jax.Array] = lambda x_BTD: x_BTD,
) -> jax.Array:
    """First stage: tokens (and learned positions) to the residual stream [B, T, D].

    ``params`` is the whole model's, or any dict with ``embed``; ``rng`` is the step's key, and None
    means no dropout. ``put`` exchanges some embeddings of tokens, such as those of an image, before
    positions are added.

    Raises:
      ValueError: for rows longer than a table of learned positions.
    """
    module = layers.apply(layers.Embed, config, params["embed"])
    x_BTD = module(batch["tokens"], layers.positions(config, batch), put)
    # Layers fold in 0 .. L - 1.
    return pin_residual(drop(x_BTD, config.dropout, parts.fold(rng, config.layers)))


def head_loss(config: DecoderConfig, params: Params, x: Any, batch: Batch) -> WeightedLoss:
    """Last stage: final norm, output projection and masked cross-entropy.

    With ``config.z_loss`` its part of the loss is a metric of its own, and so are those of the
    routers of experts. ``params`` is the whole model's, or any dict with ``final_norm`` and
    ``head`` (tied: ``embed``); ``x`` the residual stream, [B, T, D] or :func:`experts.opened`.
    """
    x_BTD, kernel_DV = _final_norm(config, params, x), layers.head_kernel(config, params)
    loss = layers.token_loss(config, x_BTD, kernel_DV, batch, softcap=config.logit_softcap)
    return experts.add_routers(config, loss, x, batch)


def log_probs(config: DecoderConfig, params: Params, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Last stage of losses that are no sum over tokens: the log-probability of each of the batch's
    ``targets``, [B, T]; other arguments are those of :func:`head_loss`."""
    return token_scores(config, params, x_BTD, batch)[0]


def token_scores(
    config: DecoderConfig, params: Params, x_BTD: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """As :func:`log_probs`, and whether each target is the most probable token."""
    return losses.scores(
        _final_norm(config, params, x_BTD),
        layers.head_kernel(config, params),
        batch["targets"],
        vocab_size=config.vocab_size,
        softcap=config.logit_softcap,
        chunk=config.loss_chunk,
    )


def scores(config: DecoderConfig, params: Params, x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """Last stage of a reward model: the float32 score of each token, [B, T]; that of a text is its
    last token's. Arguments are those of :func:`head_loss`."""
    x_BTD = _final_norm(config, params, x_BTD)
    kernel_D1 = params["head"]["score"]["kernel"]
    return matmul_float32(parts.rows(x_BTD), kernel_D1).reshape(x_BTD.shape[:2])


def distillation_loss(
    config: DecoderConfig, teacher: DecoderConfig, *, hidden: float = 0.0, **share: float
) -> Callable[[Params, jax.Array, Params, jax.Array, Batch], WeightedLoss]:
    """Returns ``loss(params, x, teacher_params, teacher_x, batch)``, the last stage of two models,
    of which the first learns from the second: :func:`jaxtrain.models.distilling.token_loss` of
    ``hidden``, and ``temperature`` and ``mix`` as ``share``. Raises ValueError for models of
    different tokens."""
    distilling.check_tokens(config, teacher)

    def output(config, params, x):
        x_BTD, kernel_DV = _final_norm(config, params, x), layers.head_kernel(config, params)
        return distilling.Output(x_BTD, x_BTD, kernel_DV, softcap=config.logit_softcap)

    def loss(params, x, teacher_params, teacher_x, batch):
        both = output(config, params, x), output(teacher, teacher_params, teacher_x)
        found = distilling.token_loss(config, *both, batch, hidden=hidden, **share)
        return experts.add_routers(config, found, x, batch)

    return loss


def stored_distillation_loss(
    config: DecoderConfig, **share: float
) -> Callable[[Params, jax.Array, Batch], WeightedLoss]:
    """Returns a last stage as :func:`distillation_loss`, for batches with ``teacher_ids`` and
    ``teacher_log_probs`` (:func:`jaxtrain.ops.losses.stored_divergence`); others have the loss of
    their text alone."""

    def loss(params, x, batch):
        if "teacher_ids" not in batch:
            return head_loss(config, params, x, batch)
        nll, correct, kl = losses.stored_divergence(
            _final_norm(config, params, x),
            layers.head_kernel(config, params),
            batch["teacher_ids"],
            batch["teacher_log_probs"],
            batch["targets"],
            batch["mask"],
            vocab_size=config.vocab_size,
            temperature=share["temperature"],
            softcap=config.logit_softcap,
            chunk=config.loss_chunk,
        )
        weight = batch["mask"].astype(nll.dtype).sum()
        plain = WeightedLoss(nll, weight, {"accuracy": correct})
        return experts.add_routers(config, distilling.joined(plain, kl, **share), x, batch)

    return loss


def head_logits(config: DecoderConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """Final norm and output projection: float32 [B, T, vocab_size]."""
    x_BTD, kernel_DV = _final_norm(config, params, x_BTD), layers.head_kernel(config, params)
    return soft_cap(layers.token_logits(config, x_BTD, kernel_DV), config.logit_softcap)


parameter_count = functools.partial(layers.parameter_count, init)


# Of :func:`flops_per_token`.
FLOPS_FORMULA = "6 N + 12 L H K T (PaLM, appendix B; a layer of the delta rule 18 H K V)"


def flops_per_token(config: DecoderConfig) -> int:
    """Floating-point operations per token of a forward and backward pass: ``6 N + 12 L H K T``.

    The model FLOPs of PaLM, appendix B (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311),
    to be divided by a device's peak for its utilisation. N counts the parameters that a token is
    multiplied by: a table that is only looked up (learned positions, untied token embedding) is
    not in it, and of experts those that a token goes through. The attention term is that of full
    rows of ``seq_len`` tokens, not halved for causality, where T is the window if that is shorter,
    in the layers that have it; recomputation is not counted. Where values are narrower than keys, K
    is the mean of both. A layer of the gated delta rule reads, corrects and reads a state of K V
    numbers for each of its heads in the place of attention: 18 H K V, whatever its chunks cost.

    >>> flops_per_token(PRESETS["gpt2-124m"]())
    855166464
    """
    lookups = config.seq_len * config.width if config.positions == "learned" else 0
    tied = config.tied and config.head == "tokens"
    lookups += 0 if tied else config.vocab_size * config.width
    idle = config.experts - config.experts_per_token if config.experts else 0
    sizes = layers.parameter_sizes(init, config).items() if idle else ()
    mlps = sum(n for name, n in sizes if re.search(EXPERTS, name))
    lookups += idle * mlps // (config.experts or 1)
    features = config.block.head_dim + (config.block.v_dim or config.block.head_dim)
    attend = 6 * config.heads * features * keys_seen(config, config.seq_len)
    state = config.block.delta_heads * config.block.delta_key_dim * config.block.delta_value_dim
    recur = 18 * state * sum(deltas_of(config))
    return 6 * (parameter_count(config) - lookups) + attend + recur


def _final_norm(config: DecoderConfig, params: Params, x: Any) -> jax.Array:
    norm = layers.apply(parts.Norm, config.block, params["final_norm"])
    return pin_residual(norm(experts.hidden_states(x)))
