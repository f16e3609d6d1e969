"""The shape of a decoder: one frozen dataclass for the GPT-2 and the Llama form, and presets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from jaxtrain.models.remat import REMAT
from jaxtrain.ops.attention import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """A pre-norm decoder.

    Args:
      vocab_size: number of tokens. The tables hold ``padded_vocab`` rows; the padding takes no part
        in the softmax, starts at zero and gets no gradient.
      seq_len: tokens per row in training; with learned positions also the most there can be.
      layers, width, heads: depth, residual width, query heads (each ``width / heads`` wide).
      kv_heads: key and value heads (grouped-query attention); None means ``heads``.
      mlp_width: hidden width; None means 4 x width for gelu and 8/3 x width, rounded up to a
        multiple of 64, for swiglu.
      positions: learned table, or rotary.
      norm: LayerNorm, or RMSNorm (scale only).
      mlp: GELU (the tanh approximation of GPT-2), or SwiGLU.
      bias: biases in dense layers and LayerNorm.
      tied: the output projection is the transposed token table.
      dropout: rate on the embeddings and on both residual branches.
      attention_dropout: rate on attention weights, which no fused kernel offers: attention then
        takes the xla form.
      rope_theta, norm_eps: base of the rotary frequencies; added to variances.
      remat: what a block keeps for its backward pass; see :mod:`jaxtrain.models.remat`.
      scan_unroll: layers per iteration of the scan over layers; ``layers`` unrolls it whole. None
        unrolls the few layers of a small model on a lone CPU device
        (:data:`jaxtrain.parallel.pipeline.stages.UNROLLED`) and nothing elsewhere.
      attention: see :func:`jaxtrain.ops.attention.attention`.
      loss_chunk: positions of a row per tile of logits; None chooses.
      z_loss: coefficient of the squared log of the softmax's normaliser, added to the loss (1e-4 in
        PaLM, https://arxiv.org/abs/2204.02311, section 5).
      vocab_multiple: the tables' rows are a multiple of this, so that a tensor axis divides them.

    >>> config = GPTConfig(vocab_size=257, seq_len=8, layers=1, width=24, heads=3)
    >>> config.head_dim, config.mlp_width, config.padded_vocab
    (8, 96, 320)

    Raises:
      ValueError: for sizes that do not fit each other or names that are not known.
    """

    vocab_size: int
    seq_len: int
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    mlp_width: int | None = None
    positions: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    remat: Literal[REMAT] = "none"  # type: ignore[valid-type]
    scan_unroll: int | None = None
    attention: str = "auto"
    loss_chunk: int | None = None
    z_loss: float = 0.0
    vocab_multiple: int = 64

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.mlp_width is None and type(self.width) is int:
            width = 4 * self.width if self.mlp == "gelu" else _round_up(-(-8 * self.width // 3), 64)
            object.__setattr__(self, "mlp_width", width)
        sizes = ("vocab_size", "seq_len", "layers", "width", "heads", "kv_heads", "mlp_width")
        unroll = () if self.scan_unroll is None else ("scan_unroll",)
        for name in (*sizes, *unroll, "vocab_multiple"):
            value = getattr(self, name)
            # A config may come from a file, where anything may stand for a number.
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"{name}={value!r} must be a whole number from 1 to 2^31 - 1")
        choices = {
            "positions": ("learned", "rope"),
            "norm": ("layernorm", "rmsnorm"),
            "mlp": ("gelu", "swiglu"),
            "remat": REMAT,
            "attention": IMPLEMENTATIONS,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        self._check_fit()

    def _check_fit(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}; "
                f"use a width that is a multiple of {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; "
                f"use a divisor of {self.heads} for kv_heads"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, and width / heads = {self.head_dim} is "
                "odd; use an even head width"
            )
        for name in ("dropout", "attention_dropout", "z_loss", "rope_theta", "norm_eps"):
            if type(getattr(self, name)) not in (int, float):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
        for name in ("bias", "tied"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss={self.z_loss} must be at least 0")
        fused = self.attention not in ("auto", "xla")
        if self.attention_dropout and fused:
            raise ValueError(
                f"attention_dropout={self.attention_dropout} is not offered by "
                f"attention={self.attention!r}; use 'xla' or 'auto'"
            )
        chunk = self.loss_chunk
        if chunk is not None and (type(chunk) is not int or chunk < 1 or self.seq_len % chunk):
            raise ValueError(
                f"loss_chunk={self.loss_chunk} must be a divisor of seq_len={self.seq_len}, or None"
            )

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.width // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table: ``vocab_size`` rounded up to ``vocab_multiple``."""
        return _round_up(self.vocab_size, self.vocab_multiple)


def tiny() -> GPTConfig:
    """Byte-level, 1.8 M parameters: trains on a laptop's CPU."""
    return GPTConfig(
        vocab_size=257,
        seq_len=256,
        layers=4,
        width=192,
        # On a CPU the softmax costs more than attention's products: few, wide heads.
        heads=3,
        positions="rope",
        norm="rmsnorm",
        bias=False,
    )


def gpt2_124m() -> GPTConfig:
    """GPT-2 small (Radford et al. 2019): 124,439,808 parameters."""
    return GPTConfig(vocab_size=50257, seq_len=1024, layers=12, width=768, heads=12)


def llama_1b() -> GPTConfig:
    """The shape of TinyLlama 1.1B (Zhang et al. 2024): 1,100,048,384 parameters."""
    return _llama(layers=22, width=2048, kv_heads=4, mlp_width=5632, seq_len=2048)


def llama_7b() -> GPTConfig:
    """The shape of Llama 2 7B (Touvron et al. 2023): 6,738,415,616 parameters."""
    return _llama(layers=32, width=4096, kv_heads=32, mlp_width=11008, seq_len=4096)


def _llama(*, layers: int, width: int, kv_heads: int, mlp_width: int, seq_len: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=32000,
        seq_len=seq_len,
        layers=layers,
        width=width,
        heads=32,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        bias=False,
        tied=False,
        remat="dots",
    )


# Names on the command line.
PRESETS: Mapping[str, Callable[[], GPTConfig]] = {
    "tiny": tiny,
    "gpt2-124m": gpt2_124m,
    "llama-1b": llama_1b,
    "llama-7b": llama_7b,
}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
