"""The shape of a block, which all models share, and of a decoder, with presets."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxtrain.ops.activations import ACTIVATIONS, GATED
from jaxtrain.ops.attention import IMPLEMENTATIONS
from jaxtrain.ops.remat import REMAT
from jaxtrain.ops.rotary import LinearScaling, Llama3Scaling, scaling_of

INIT_STD = 0.02
NORM_POSITIONS = ("pre", "post", "sandwich")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFields:
    """Fields that a model config shares with the config of its layers.

    Args:
      width, heads: D of the residual stream, H query heads.
      kv_heads: G key and value heads (grouped-query attention); None means ``heads``.
      head_dim: K features per head; None means ``width / heads``.
      mlp_width: hidden width; None means 4 x width, or 8/3 x width, rounded up to a multiple of 64,
        where ``mlp`` has a gate.
      norm: LayerNorm, or RMSNorm (scale only).
      norm_eps: added to variances.
      norm_offset: norms multiply by 1 + their scale, which starts at 0, as Gemma's do.
      mlp: GELU in the tanh approximation, GELU itself, ReLU, SwiGLU, or GeGLU (by tanh, or exact).
      bias: biases in dense layers and LayerNorm.
      qkv_bias: biases of queries, keys and values; None means as ``bias``.
      qk_norm: queries and keys are normed, head by head, before they are rotated.
      window: a position sees itself and at most ``window - 1`` before it, and as many after it
        where attention is not causal; None means all.
      window_pattern: which layers have the window, by number; the pattern repeats. Gemma 3 has
        ``(True,) * 5 + (False,)``.
      rope_scaling: how the frequencies of rotary positions are stretched; None means not.
      local_rope_theta: base of the frequencies, which are not stretched, in layers with the window;
        None means that these are as in the others.
      query_pre_attn_scalar: scores are divided by its square root; None means ``head_dim``.
      attention_softcap: scores are ``cap * tanh(scores / cap)``; None means not.
      dropout: rate on both residual branches; in a model on the embeddings too.
      attention_dropout: rate on attention weights, which no fused kernel offers: attention then
        takes the xla form.
      attention: see :func:`jaxtrain.ops.attention.attention`.

    Raises:
      ValueError: for sizes that do not fit each other or names that are not known.
    """

    width: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    mlp: Literal[tuple(ACTIVATIONS)] = "gelu"  # type: ignore[valid-type]
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool = False
    window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)
    rope_scaling: Llama3Scaling | LinearScaling | None = None
    local_rope_theta: float | None = None
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    attention: Literal[IMPLEMENTATIONS] = "auto"  # type: ignore[valid-type]

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:  # a list in a checkpoint's JSON
            object.__setattr__(self, "rope_scaling", scaling_of(self.rope_scaling))
        if isinstance(self.window_pattern, list):
            object.__setattr__(self, "window_pattern", tuple(self.window_pattern))
        _check_fields(self)
        _check_positive(self, "local_rope_theta", "query_pre_attn_scalar", "attention_softcap")
        pattern = self.window_pattern
        kinds = {*map(type, pattern)} if isinstance(pattern, tuple) else set()
        if kinds != {bool} or not any(pattern) or (self.window is None and pattern != (True,)):
            raise ValueError(
                f"window_pattern={pattern!r} must say by true and false, and true at least once, "
                f"which layers have the window, and window={self.window!r} must be a number then"
            )
        gated = _round_up(-(-8 * self.width // 3), 64)
        _fill(
            self,
            kv_heads=self.heads,
            mlp_width=gated if self.mlp in GATED else 4 * self.width,
        )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; "
                f"use a divisor of {self.heads} for kv_heads"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.attention_dropout and self.attention not in ("auto", "xla"):
            raise ValueError(
                f"attention_dropout={self.attention_dropout} is not offered by "
                f"attention={self.attention!r}; use 'xla' or 'auto'"
            )

    def layer(self, **own: Any) -> "BlockConfig":
        """One layer of a model with these fields, and with the layer's own."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(LayerFields)}
        return BlockConfig(**shared, **own)


class TokenFields(LayerFields):
    """Values and checks that a model of tokens derives from its fields."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: ``vocab_size`` rounded up to ``vocab_multiple``."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    def check_loss(self, length: str) -> None:
        """Raises where ``z_loss`` is negative, or ``loss_chunk`` no divisor of the field."""
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss={self.z_loss} must be at least 0")
        if self.loss_chunk is not None and getattr(self, length) % self.loss_chunk:
            raise ValueError(
                f"loss_chunk={self.loss_chunk} must be a divisor of {length}="
                f"{getattr(self, length)}, or None"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerFields):
    """One transformer layer: what its parameters and arithmetic depend on, and nothing around it.

    Decoders, encoders and vision transformers are made of the same blocks. The defaults are
    GPT-2's; BERT's are ``causal=False, norm_position="post", mlp="gelu_exact", norm_eps=1e-12``,
    those of a ViT ``causal=False, mlp="gelu_exact"``.

    Args:
      causal: a position sees no later ones.
      rope_theta: base of the frequencies of rotary positions; None means none.
      norm_position: ``pre`` norms what a branch reads, ``post`` the sum behind it, ``sandwich``
        what a branch reads and what it adds.
      first_norm: False leaves out the norm before attention in layer 0, whose scale is not read.
      residual_std: of the initial kernels that end in the residual stream.

    >>> BlockConfig(width=24, heads=3).mlp_width
    96

    Raises:
      ValueError: for sizes that do not fit each other or names that are not known.
    """

    causal: bool = True
    rope_theta: float | None = None
    norm_position: Literal[NORM_POSITIONS] = "pre"  # type: ignore[valid-type]
    first_norm: bool = True
    residual_std: float = INIT_STD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}; "
                f"use a width that is a multiple of {self.heads}"
            )
        _fill(self, head_dim=self.width // self.heads, qkv_bias=self.bias)
        _fill(self, query_pre_attn_scalar=self.head_dim)
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, and head_dim={self.head_dim} is odd; "
                "use an even head width"
            )
        if self.local_rope_theta is not None and None in (self.rope_theta, self.window):
            raise ValueError(
                f"local_rope_theta={self.local_rope_theta} needs a window and rotary positions: "
                "set both, or leave local_rope_theta out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TokenFields):
    """A decoder.

    Args:
      vocab_size: number of tokens. The tables hold ``padded_vocab`` rows; the padding takes no part
        in the softmax, starts at zero and gets no gradient.
      seq_len: tokens per row in training; with learned positions also the most there can be.
      layers: L, the depth.
      positions: learned table, or rotary (of base ``rope_theta``).
      norm_position: ``pre``, or ``sandwich`` as in Gemma 2 and 3; see :class:`BlockConfig`.
      embed_scale: embeddings of tokens are multiplied by sqrt(width), rounded to their dtype.
      tied: the output projection is the transposed token table.
      logit_softcap: logits are ``cap * tanh(logits / cap)``; None means not.
      remat: what a block keeps for its backward pass; see :mod:`jaxtrain.ops.remat`.
      scan_unroll: layers per iteration of the scan over layers; ``layers`` unrolls it whole. None
        unrolls the few layers of a small model on a lone CPU device
        (:data:`jaxtrain.stages.UNROLLED`) and nothing elsewhere.
      loss_chunk: positions of a row per tile of logits; None chooses.
      z_loss: coefficient of the squared log of the softmax's normaliser, added to the loss (1e-4 in
        PaLM, https://arxiv.org/abs/2204.02311, section 5).
      vocab_multiple: the tables' rows are a multiple of this, so that a tensor axis divides them.

    The other arguments are those of each layer, :class:`LayerFields`.

    >>> config = DecoderConfig(vocab_size=257, seq_len=8, layers=1, width=24, heads=3)
    >>> config.block.head_dim, config.mlp_width, config.padded_vocab
    (8, 96, 320)

    Raises:
      ValueError: for sizes that do not fit each other or names that are not known.
    """

    vocab_size: int
    seq_len: int
    layers: int
    positions: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    norm_position: Literal["pre", "sandwich"] = "pre"
    embed_scale: bool = False
    tied: bool = True
    logit_softcap: float | None = None
    remat: Literal[REMAT] = "none"  # type: ignore[valid-type]
    scan_unroll: int | None = None
    loss_chunk: int | None = None
    z_loss: float = 0.0
    vocab_multiple: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "logit_softcap")
        self.check_loss("seq_len")
        _ = self.block  # It has checks of its own.

    @functools.cached_property
    def block(self) -> BlockConfig:
        """One of its layers."""
        rope_theta = self.rope_theta if self.positions == "rope" else None
        # 2 L branches are added to the residual stream, whose variance is not to grow with L.
        residual_std = INIT_STD / (2 * self.layers) ** 0.5
        return self.layer(
            norm_position=self.norm_position,
            rope_theta=rope_theta,
            residual_std=residual_std,
        )


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


def gpt2_124m() -> DecoderConfig:
    """GPT-2 small (Radford et al. 2019): 124,439,808 parameters."""
    return DecoderConfig(vocab_size=50257, seq_len=1024, layers=12, width=768, heads=12)


def llama_1b() -> DecoderConfig:
    """The shape of TinyLlama 1.1B (Zhang et al. 2024): 1,100,048,384 parameters."""
    return _llama(layers=22, width=2048, heads=32, kv_heads=4, mlp_width=5632, seq_len=2048)


def llama_7b() -> DecoderConfig:
    """The shape of Llama 2 7B (Touvron et al. 2023): 6,738,415,616 parameters."""
    return _llama(layers=32, width=4096, heads=32, mlp_width=11008, seq_len=4096)


# Rows of the length that most of their training has had.
_LLAMA3 = {"kv_heads": 8, "vocab_size": 128256, "seq_len": 8192, "rope_theta": 5e5}
_MISTRAL = {"kv_heads": 8, "seq_len": 8192, "window": 4096}
_QWEN = {"seq_len": 4096, "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN25 = _QWEN | {"kv_heads": 4, "vocab_size": 152064, "qkv_bias": True}
_QWEN3 = _QWEN | {"kv_heads": 8, "vocab_size": 151936, "qk_norm": True}
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
        vocab_size=vocab_size,
        **shape,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        bias=False,
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
    "gpt2-124m": gpt2_124m,
    "llama-1b": llama_1b,
    "llama-7b": llama_7b,
    # Llama 3 and 3.1 (Dubey et al. 2024): 70,553,706,496 and 405,853,388,800.
    "llama-70b": lambda: _llama(layers=80, width=8192, heads=64, mlp_width=28672, **_LLAMA3),
    "llama-405b": lambda: _llama(layers=126, width=16384, heads=128, mlp_width=53248, **_LLAMA3),
    # Mistral v0.1 (Jiang et al. 2023): 7,241,732,096.
    "mistral-7b": lambda: _llama(layers=32, width=4096, heads=32, mlp_width=14336, **_MISTRAL),
    # Qwen2.5 (Qwen team 2024): 7,615,616,512. Qwen3 (Qwen team 2025): 8,190,735,360.
    "qwen2.5-7b": lambda: _llama(layers=28, width=3584, heads=28, mlp_width=18944, **_QWEN25),
    "qwen3-8b": lambda: _llama(layers=36, width=4096, heads=32, mlp_width=12288, **_QWEN3),
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


def windows_of(config: Any) -> list[bool]:
    """Whether each layer of a model has a window."""
    pattern = config.window_pattern
    return [config.window is not None and pattern[l % len(pattern)] for l in range(config.layers)]


def keys_seen(config: Any, length: int) -> int:
    """Keys that a token's queries meet, summed over a model's layers: the row, or the window where
    that is shorter; not halved for causality.

    >>> keys_seen(PRESETS["gemma2-2b"](), 8192) == 13 * 8192 + 13 * 4096
    True
    """
    window = config.window or length
    reach = window if config.block.causal else 2 * window - 1
    return sum(min(length, reach) if near else length for near in windows_of(config))


def _fill(config: Any, **defaults: Any) -> None:
    """Sets the fields that are None."""
    for name, value in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def _check_positive(config: Any, *names: str) -> None:
    """Raises where a field is neither None nor a number above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value!r} must be a number above 0, or None")


def _check_fields(config: Any) -> None:
    """Raises where a field is not of its type: from a file, anything may stand for a number."""
    for name, kind in get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), get_args(kind)
        if NoneType in kinds:
            if value is None:
                continue
            kind = kinds[0]
        if kind is int and (type(value) is not int or not 1 <= value < 2**31):
            raise ValueError(f"{name}={value!r} must be a whole number from 1 to 2^31 - 1")
        if kind is float and type(value) not in (int, float):
            raise ValueError(f"{name}={value!r} must be a number")
        if kind is bool and type(value) is not bool:
            raise ValueError(f"{name}={value!r} must be true or false")
        if get_origin(kind) is Literal and value not in kinds:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(kinds)}")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
