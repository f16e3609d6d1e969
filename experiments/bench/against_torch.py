"""The other camp: the same train step in PyTorch (:mod:`experiments.bench.torch_gpt`).

Needs the extra ``bench``. Both run on the same device in one process, turn by turn; the first
variant is PyTorch as it is most often run there: eager on a CPU, compiled on a GPU, whose memory
eager's logits would fill.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from experiments.bench import Rounds, Variant, gpt_row, machine
from experiments.bench import step as ours
from jaxtrain.models import decoder
from jaxtrain.precision import Policy


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """jaxtrain's step against PyTorch's, eager and compiled, on one device."""

    shape: Literal[tuple(ours.SHAPES)] = "small"  # type: ignore[valid-type]
    """Which model."""
    rows: int | None = None
    """Rows of the batch; left out, the shape's."""
    precision: Literal["f32", "bf16"] = "f32"
    """bf16 keeps float32 parameters and moments on both sides."""
    rounds: int = 20
    calls: int = 5
    """Steps per round."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    try:
        import torch
    except ImportError:
        raise SystemExit("this row needs PyTorch: pip install -e '.[bench]'") from None
    machine.share_memory()
    model, rows = ours.model_and_rows(config.shape)
    batch = ours.make_batch(model, config.rows or rows)
    params = jax.device_get(jax.jit(lambda: decoder.init(model, jax.random.key(0)))())
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("JAX sees a GPU and PyTorch does not: install its CUDA build")

    policy = Policy.named(config.precision)
    theirs = functools.partial(
        torch_variant, model, params, batch, config.calls, bf16=config.precision == "bf16"
    )

    def own(layers_per_iteration: int) -> Variant:
        its_model = dataclasses.replace(model, scan_unroll=layers_per_iteration)
        return ours.jaxtrain_variant(
            its_model, lambda rng: params, batch, config.calls, policy=policy
        )

    eager = {} if device == "cuda" else {"torch, eager": theirs(compiled=False, device=device)}
    # Scanned layers are no one's choice on a GPU.
    scanned = {} if device == "cuda" else {"jaxtrain, layers scanned": own(1)}
    variants = eager | {"torch, compiled": theirs(compiled=True, device=device)} | scanned
    variants["jaxtrain, layers unrolled"] = own(model.layers)
    rows, steps = len(batch["tokens"]), config.calls
    told = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    gpt_row("torch", config, variants, model, rows, steps=steps, policy=policy, **told)


def torch_variant(
    model: decoder.DecoderConfig,
    params: Any,
    batch: Mapping[str, np.ndarray],
    calls: int,
    *,
    compiled: bool,
    bf16: bool,
    device: str,
) -> Variant:
    """PyTorch's step from jaxtrain's parameters (host arrays), for a model of the GPT-2 form."""
    import torch

    from experiments.bench import torch_gpt

    if device == "cuda":
        # TF32, as XLA multiplies float32 on a GPU.
        torch.set_float32_matmul_precision("high")
    module = torch_gpt.GPT(model)
    torch_gpt.load(module, params)
    step = torch_gpt.make_step(
        module.to(device),
        learning_rate=ours.LEARNING_RATE,
        weight_decay=ours.WEIGHT_DECAY,
        clip_norm=ours.CLIP_NORM,
        compiled=compiled,
        bf16=bf16,
    )
    tokens, targets = (
        torch.from_numpy(batch[name].astype(np.int64)).to(device) for name in ("tokens", "targets")
    )

    def run() -> None:
        for _ in range(calls):
            loss = step(tokens, targets)
        # Waits for the device, the update of the last step with it.
        loss.item()

    return Variant(run, {})
