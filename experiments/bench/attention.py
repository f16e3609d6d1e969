"""Attention, forward and backward: every implementation that runs here, against PyTorch's.

Causal, on one device, the gradient of all three operands for a given gradient of the result. The
first variant is PyTorch's ``scaled_dot_product_attention``, where PyTorch is installed and sees the
device, else ``jax.nn.dot_product_attention``.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import Rounds, Variant, Work, machine, row
from jaxtrain.ops import attention as ops
from jaxtrain.ops.tiled import tile_rows

# Bytes of float32 scores beyond which what holds all of them is left out.
MOST_SCORES = 2**33
# Rows, tokens, heads, features and dtype where no flag says otherwise.
SHAPES = {"cpu": (4, 512, 6, 64, "float32"), "gpu": (4, 4096, 16, 128, "bfloat16")}
SHAPES["tpu"] = SHAPES["gpu"]


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Attention's implementations against each other; sizes left out suit the device."""

    batch: int | None = None
    """Rows."""
    seq_len: int | None = None
    """Tokens per row."""
    heads: int | None = None
    """Heads of queries, keys and values."""
    head_dim: int | None = None
    """Features per head."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the operands and gradients."""
    rounds: int = 20
    calls: int = 5
    """Forward and backward passes per round."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    machine.share_memory()
    names = ("batch", "seq_len", "heads", "head_dim", "dtype")
    given = [getattr(config, name) for name in names]
    usual = SHAPES[jax.default_backend()]
    B, T, H, K, dtype = (b if a is None else a for a, b in zip(given, usual, strict=True))
    operands = np.random.default_rng(0).standard_normal((4, B, T, H, K), np.float32)
    placed = [jnp.asarray(x, dtype) for x in operands]
    variants = {
        name: jax_variant(function, placed, config.calls)
        for name, function in implementations(T, K, dtype, scores=B * H * T * T).items()
    }
    theirs = torch_variant(operands, dtype, config.calls)
    if theirs is not None:
        variants = {"torch, scaled_dot_product_attention": theirs} | variants
    work = Work(
        steps=config.calls,
        tokens=B * T,
        flops=6.0 * B * T * T * H * K,
        formula="6 B T^2 H K: two products forward and four backward, half of each masked",
        dtype=dtype,
    )
    about = {
        "shape": {"batch": B, "seq_len": T, "heads": H, "head_dim": K},
        "dtypes": dtype,
        "auto": ops.choose("auto", dtype=dtype, head_dim=K, length=T),
    }
    row("attention", config, variants, about, work=work)


def implementations(
    T: int, K: int, dtype: str, *, scores: int = 0
) -> dict[str, Callable[..., jax.Array]]:
    """Causal attention of [B, T, H, K] by name: JAX's, which holds all ``scores``, unless they are
    too many, and all of ours that run here."""
    found = {}
    if 4 * scores <= MOST_SCORES:
        found["jax.nn"] = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    for name in ops.IMPLEMENTATIONS[1:]:
        try:
            ops.choose(name, dtype=dtype, head_dim=K, length=T)
        except ValueError:
            continue  # needs another device, dtype or shape
        found[f"jaxtrain, {name}"] = lambda q, k, v, name=name: ops.attention(
            q, k, v, implementation=name
        )

    def in_one_tile(q, k, v):
        with tile_rows(T):
            return ops.attention(q, k, v, implementation="xla")

    # Scores of all heads in float32 would be more than a GPU's memory.
    if jax.default_backend() != "gpu":
        found["jaxtrain, xla in one tile"] = in_one_tile
    return found


def jax_variant(function: Callable[..., jax.Array], operands: list[Any], calls: int) -> Variant:
    """Result and gradients of a function of all operands but the last, its result's gradient."""

    def both(*operands):
        out, backward = jax.vjp(function, *operands[:-1])
        return out, backward(operands[-1])

    start = time.perf_counter()
    compiled = jax.jit(both).lower(*operands).compile()
    seconds = time.perf_counter() - start

    def run() -> None:
        for _ in range(calls):
            results = compiled(*operands)
        jax.block_until_ready(results)

    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Variant(run, {"temp_bytes": temporary, "compile_seconds": round(seconds, 2)})


def torch_variant(operands: np.ndarray, dtype: str, calls: int) -> Variant | None:
    """PyTorch's, on the same device; None where it is not installed or does not see it."""
    try:
        import torch
    except ImportError:
        return None
    device = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
    if device is None or (device == "cuda" and not torch.cuda.is_available()):
        return None
    # As a model has them: heads are an axis of the projections' result, moved forward as a view.
    q, k, v, d_out = (
        torch.from_numpy(x).to(device, getattr(torch, dtype)).transpose(1, 2) for x in operands
    )
    for x in (q, k, v):
        x.requires_grad_()
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        for _ in range(calls):
            out = attend(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), d_out)
        if device == "cuda":
            torch.cuda.synchronize()

    return Variant(run, {"torch": torch.__version__, "threads": torch.get_num_threads()})
