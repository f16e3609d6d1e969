"""The shape of a block, of which all models are made, and the fields that their configs share."""

import dataclasses
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxtrain.ops.activations import ACTIVATIONS, GATED
from jaxtrain.ops.attention import IMPLEMENTATIONS
from jaxtrain.ops.remat import REMAT
from jaxtrain.ops.rotary import LongScaling, Scaling, scaling_of
from jaxtrain.ops.routing import ROUTINGS

INIT_STD = 0.02
Activation = Literal[tuple(ACTIVATIONS)]
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
      qk_norm: queries and keys are normed before they are rotated, head by head, or with ``whole``
        all heads together, as OLMoE's are.
      window: a position sees itself and at most ``window - 1`` before it, and as many after it
        where attention is not causal; None means all.
      window_pattern: which layers have the window, by number; the pattern repeats. Gemma 3 has
        ``(True,) * 5 + (False,)``.
      global_tokens: so many first positions of a row are seen from beyond the window too, and see
        all where attention is not causal; None means none.
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
    mlp: Activation = "gelu"  # type: ignore[valid-type]
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: Literal[False, True, "whole"] = False
    window: int | None = None
    window_pattern: tuple[bool, ...] = (True,)
    global_tokens: int | None = None
    rope_scaling: Scaling | None = None
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
        check_positive(self, "local_rope_theta", "query_pre_attn_scalar", "attention_softcap")
        pattern = self.window_pattern
        kinds = {*map(type, pattern)} if isinstance(pattern, tuple) else set()
        if kinds != {bool} or not any(pattern) or (self.window is None and pattern != (True,)):
            raise ValueError(
                f"window_pattern={pattern!r} must say by true and false, and true at least once, "
                f"which layers have the window, and window={self.window!r} must be a number then"
            )
        if self.global_tokens is not None and self.window is None:
            raise ValueError(
                f"global_tokens={self.global_tokens} are seen from beyond a window, and there is "
                "none: set both"
            )
        gated = _round_up(-(-8 * self.width // 3), 64)
        fill(self, kv_heads=self.heads, mlp_width=gated if self.mlp in GATED else 4 * self.width)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Fields that a decoder's config shares with the config of its layers: a mixture of experts in
    the place of their MLP.

    Args:
      experts: E MLPs of ``mlp_width`` in each layer; None means one, without a router.
      experts_per_token: J of them that a token goes through.
      shared_experts: more MLPs, as one of so many times the width, that every token goes through.
      routing: how the router's logits weigh the chosen experts; see
        :data:`jaxtrain.ops.routing.ROUTINGS`.
      routed_scale: multiplies the weights of the chosen experts.
      groups, groups_per_token: experts are in groups of neighbours, of which so many are chosen
        first, by their two best experts each.
      shared_gate: what these add is multiplied by the sigmoid of a product of the token.
      balance: coefficient of the loss that is least where experts are chosen equally often, 1 in
        each layer then; the sum over layers is added to a token's loss.
      balance_over: whose choices are to be equally often of each expert: those of each ``"row"``,
        or of a whole ``"step"``, which are those of the step before, kept beside the router.
      router_z: the same of the squared log of the router's normaliser.
    """

    experts: int | None = None
    experts_per_token: int = 2
    shared_experts: int | None = None
    shared_gate: bool = False
    routing: Literal[ROUTINGS] = "softmax_normalised"  # type: ignore[valid-type]
    routed_scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    balance: float = 0.01
    balance_over: Literal["row", "step"] = "row"
    router_z: float = 0.001

    def _check_experts(self) -> None:
        if self.shared_gate and self.shared_experts is None:
            raise ValueError("shared_gate=True is of shared_experts, which are None: set both")
        if self.experts is None:
            if self.shared_experts is not None:
                raise ValueError(
                    f"shared_experts={self.shared_experts} stand beside experts that are chosen, "
                    "and experts=None: set both"
                )
            return
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than experts={self.experts}; "
                "use at most that"
            )
        size, rest = divmod(self.experts, self.groups)
        if rest or size < 2 < self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"groups={self.groups} of experts={self.experts}, and groups_per_token="
                f"{self.groups_per_token}: use a divisor that leaves 2 or more in each, and at "
                "most so many of them"
            )
        if self.experts_per_token > size * self.groups_per_token:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than the {size} experts of "
                f"groups_per_token={self.groups_per_token} groups: use at most that"
            )
        check_positive(self, "routed_scale")
        if self.bias and self.routing == "sigmoid":
            raise ValueError(
                "bias=True gives a router a bias, and routing='sigmoid' has one of its own, which "
                "balances: use bias=False (and qkv_bias=True, for those of attention)"
            )
        for name in ("balance", "router_z"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFields:
    """Fields that a decoder's config shares with the config of its layers: attention sinks, or
    multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), whose keys and
    values are made of one vector per token, which is what a cache holds.

    Args:
      sinks: each head has a score that takes part in every softmax and has no key, which trains.
      kv_rank: features of that vector; None means attention as usual, and none of the others.
      q_rank: features of the vector that queries are made of; None means the residual stream.
      rope_dim: features of a head that are rotated: its first ones, and all if None. Of latent
        attention its last ones, which keys of all heads share; None means about a third then.
      out_gate: a head's result is multiplied by the sigmoid of as many features, which stand behind
        its query's in their product; not for latent attention.
      v_dim: features of a head's values; None means ``head_dim``.
      rope_pairs: which features are rotated together: those of both halves, or neighbours.
    """

    sinks: bool = False
    kv_rank: int | None = None
    q_rank: int | None = None
    rope_dim: int | None = None
    v_dim: int | None = None
    rope_pairs: Literal["halves", "adjacent"] = "halves"
    out_gate: bool = False

    def _check_latent(self) -> None:
        if self.kv_rank is None:
            for name in ("q_rank", "v_dim"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name}={value} is of latent attention, and kv_rank=None: set both"
                    )
            if self.rope_dim is not None and not self.rope_dim < self.head_dim:
                raise ValueError(
                    f"rope_dim={self.rope_dim} is not below head_dim={self.head_dim}: leave it out "
                    "where all features of a head are rotated"
                )
            return
        fill(self, v_dim=self.head_dim, rope_dim=2 * (self.head_dim // 6))
        fits = 0 < self.rope_dim < self.head_dim >= self.v_dim and self.kv_heads == self.heads
        if self.rope_theta is None or not fits or self.qk_norm or self.sinks or self.out_gate:
            raise ValueError(
                f"kv_rank={self.kv_rank} is latent attention: it needs rotary positions, rope_dim="
                f"{self.rope_dim} below head_dim={self.head_dim}, v_dim={self.v_dim} of at most "
                "that, kv_heads as heads, and no qk_norm, sinks or out_gate"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaFields:
    """Fields that a decoder's config shares with the config of its layers: linear attention by the
    gated delta rule (:mod:`jaxtrain.models.delta_net`) in the place of attention.

    Args:
      delta_pattern: which layers have it, by number; the pattern repeats, and its length divides
        the layers. Qwen3-Next has ``(True, True, True, False)``; empty means none.
      delta_heads: H heads of values; None means ``heads``.
      delta_key_heads: heads of queries and keys, a divisor of these; None means as many.
      delta_key_dim, delta_value_dim: K and V features of a head; None means ``head_dim``.
      delta_taps: W positions that the convolution before it sees.
    """

    delta_pattern: tuple[bool, ...] = ()
    delta_heads: int | None = None
    delta_key_heads: int | None = None
    delta_key_dim: int | None = None
    delta_value_dim: int | None = None
    delta_taps: int = 4

    def _check_delta(self) -> None:
        fill(self, delta_heads=self.heads, delta_key_dim=self.head_dim)
        fill(self, delta_key_heads=self.delta_heads, delta_value_dim=self.head_dim)
        if self.delta_heads % self.delta_key_heads:
            raise ValueError(
                f"delta_heads={self.delta_heads} is not divisible by delta_key_heads="
                f"{self.delta_key_heads}; use a divisor of {self.delta_heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(ExpertFields, AttentionFields, DeltaFields, LayerFields):
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
      delta: the layer has the gated delta rule in the place of attention.

    >>> BlockConfig(width=24, heads=3).mlp_width
    96
    """

    causal: bool = True
    rope_theta: float | None = None
    norm_position: Literal[NORM_POSITIONS] = "pre"  # type: ignore[valid-type]
    first_norm: bool = True
    residual_std: float = INIT_STD
    delta: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}; "
                f"use a width that is a multiple of {self.heads}"
            )
        fill(self, head_dim=self.width // self.heads, qkv_bias=self.bias)
        fill(self, query_pre_attn_scalar=self.head_dim)
        self._check_experts()
        self._check_latent()
        self._check_delta()
        if self.rope_theta is not None and self.rotated % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, and "
                f"{'rope' if self.rope_dim else 'head'}_dim={self.rotated} is odd; use an even one"
            )
        by_pair = isinstance(self.rope_scaling, LongScaling) and len(self.rope_scaling.short)
        if by_pair and by_pair != self.rotated // 2:
            raise ValueError(
                f"rope_scaling has {by_pair} numbers for short rows and rotated pairs of features "
                f"are {self.rotated // 2}: give as many"
            )
        if self.local_rope_theta is not None and None in (self.rope_theta, self.window):
            raise ValueError(
                f"local_rope_theta={self.local_rope_theta} needs a window and rotary positions: "
                "set both, or leave local_rope_theta out"
            )

    @property
    def rotated(self) -> int:
        """How many features of a head rotary positions turn."""
        return self.rope_dim or self.head_dim

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The heads and features of the two arrays that a cache holds of a position: of keys and
        values, or of the latent vector and the rotated part of a key."""
        if self.kv_rank is None:
            return ((self.kv_heads, self.head_dim),) * 2
        return (1, self.kv_rank), (1, self.rope_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFields(LayerFields):
    """Fields that all model configs share; ``block`` is the config of one of their layers.

    Args:
      layers: L, the depth.
      remat: what a block keeps for its backward pass; see :mod:`jaxtrain.ops.remat`.
      scan_unroll: layers per iteration of the scan over layers; ``layers`` unrolls it whole. None
        unrolls the few layers of a small model on a lone CPU device or GPU
        (:data:`jaxtrain.stages.UNROLLED`) and nothing elsewhere.
    """

    layers: int
    remat: Literal[REMAT] = "none"  # type: ignore[valid-type]
    scan_unroll: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.block  # It has checks of its own.

    def layer(self, **own: Any) -> BlockConfig:
        """One layer of a model with these fields, and with the layer's own."""
        return BlockConfig(**fields_of(self, LayerFields), **own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFields(ModelFields):
    """Fields that the configs of models of tokens share.

    Args:
      vocab_size: number of tokens. The tables hold ``padded_vocab`` rows; the padding takes no part
        in the softmax, starts at zero and gets no gradient.
      loss_chunk: predicted positions of a row per tile of logits; None chooses.
      z_loss: coefficient of the squared log of the softmax's normaliser, added to the loss (1e-4 in
        PaLM, https://arxiv.org/abs/2204.02311, section 5).
      vocab_multiple: the tables' rows are a multiple of this, so that a tensor axis divides them.
    """

    vocab_size: int
    loss_chunk: int | None = None
    z_loss: float = 0.0
    vocab_multiple: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss={self.z_loss} must be at least 0")

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: ``vocab_size`` rounded up to ``vocab_multiple``."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    def check_chunk(self, length: str) -> None:
        """Raises where ``loss_chunk`` is no divisor of the field."""
        if self.loss_chunk is not None and getattr(self, length) % self.loss_chunk:
            raise ValueError(
                f"loss_chunk={self.loss_chunk} must be a divisor of {length}="
                f"{getattr(self, length)}, or None"
            )


def before_stack(config: Any) -> int:
    """How many layers of a model stand before its stack, with parameters of their own."""
    return getattr(config, "dense_layers", None) or 0


def group_of(config: Any) -> tuple[BlockConfig, ...]:
    """The layers that follow each other in what a model stacks, each with parameters of its own
    kind: one, or as many as the pattern has that repeats."""
    return getattr(config, "group", None) or (config.block,)


def stacked_layers(config: Any) -> int:
    """How many rows the stack of a model has: layers, or groups of them."""
    return (config.layers - before_stack(config)) // len(group_of(config))


def head_of(config: Any) -> tuple[Any, Any]:
    """The kind of a model's head, and its classes: models in which these differ share no head."""
    return getattr(config, "head", None), getattr(config, "classes", None)


def deltas_of(config: Any) -> list[bool]:
    """Whether each layer of a model has the gated delta rule."""
    pattern = getattr(config, "delta_pattern", ()) or (False,)
    return [pattern[l % len(pattern)] for l in range(config.layers)]


def windows_of(config: Any) -> list[bool]:
    """Whether each layer of a model has a window."""
    pattern = config.window_pattern
    return [config.window is not None and pattern[l % len(pattern)] for l in range(config.layers)]


def keys_seen(config: Any, length: int) -> int:
    """Keys that a token's queries meet, summed over a model's layers of attention: the row, or the
    window where that is shorter; not halved for causality.

    >>> from jaxtrain.models.decoder import PRESETS
    >>> keys_seen(PRESETS["gemma2-2b"](), 8192) == 13 * 8192 + 13 * 4096
    True
    """
    window = config.window or length
    causal, more = config.block.causal, config.global_tokens or 0
    reach = window + more if causal else 2 * (window + more) - 1
    seen = (min(length, reach) if near else length for near in windows_of(config))
    return sum(n for n, delta in zip(seen, deltas_of(config), strict=True) if not delta)


def fields_of(config: Any, *groups: type) -> dict[str, Any]:
    """The fields of a config that some dataclasses have too, by name."""
    names = (field.name for group in groups for field in dataclasses.fields(group))
    return {name: getattr(config, name) for name in names}


def fill(config: Any, **defaults: Any) -> None:
    """Sets the fields that are None."""
    for name, value in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def check_positive(config: Any, *names: str) -> None:
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
