"""A GPT-2 train step in PyTorch, as its users write it, for comparison only.

Fused scaled-dot-product attention, AdamW (fused where the device has it), clipping by global norm,
no biases left out, the output projection tied to the token table. The parameters come from
:func:`jaxtrain.models.decoder.init`, so that both sides start from the same numbers.

Shapes: B batch, T positions, D width, H heads.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain.models.decoder import DecoderConfig


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.norm_attn(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(out.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, model: DecoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_size, model.width)
        self.positions = nn.Embedding(model.seq_len, model.width)
        self.blocks = nn.ModuleList(Block(model.width, model.heads) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.width)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.norm(x_BTD) @ self.tokens.weight.T
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def load(model: GPT, params: Mapping[str, Any]) -> None:
    """Copies jaxtrain's parameters (host arrays, layers stacked) into the model."""

    def fill(to: torch.Tensor, x: Any) -> None:
        to.data.copy_(torch.from_numpy(np.array(x)))

    def dense(layer: nn.Linear, p: Mapping[str, Any], i: int) -> None:
        fill(layer.weight, p["kernel"][i].T)
        fill(layer.bias, p["bias"][i])

    def norm(layer: nn.LayerNorm, scale: Any, bias: Any) -> None:
        fill(layer.weight, scale)
        fill(layer.bias, bias)

    fill(model.tokens.weight, params["embed"]["tokens"])
    fill(model.positions.weight, params["embed"]["positions"])
    norm(model.norm, **params["final_norm"])
    for i, block in enumerate(model.blocks):
        p = params["blocks"]
        attention = p["attn"]
        qkv = {
            part: np.concatenate([attention[name][part] for name in "qkv"], axis=-1)
            for part in ("kernel", "bias")
        }
        dense(block.qkv, qkv, i)
        dense(block.out, attention["out"], i)
        dense(block.up, p["mlp"]["up"], i)
        dense(block.down, p["mlp"]["down"], i)
        norm(block.norm_attn, p["norm_attn"]["scale"][i], p["norm_attn"]["bias"][i])
        norm(block.norm_mlp, p["norm_mlp"]["scale"][i], p["norm_mlp"]["bias"][i])


def make_step(
    model: GPT,
    *,
    learning_rate: float,
    weight_decay: float,
    clip_norm: float,
    compiled: bool,
    bf16: bool,
):
    """Returns ``step(tokens, targets) -> loss``, which updates the model in place on its device; of
    ``bf16`` are its products, not its parameters and the optimizer's state."""
    parameters = list(model.parameters())
    device = parameters[0].device
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        fused=True,
    )
    forward = torch.compile(model) if compiled else model

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
