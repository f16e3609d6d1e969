"""The decoder, and any one block, written out in NumPy float64, layer by layer and head by head.

Parameters are the nested dict of :mod:`jaxtrain.models.decoder`; nothing else of the package is
used.
"""

import math

import numpy as np


def per_token_losses(config, params, batch):
    """Losses [B, T] of every row, without the mask."""
    rows = zip(*(batch.get(k, [None] * len(batch["tokens"])) for k in KEYS), strict=True)
    return np.stack([_row(config, params, *row) for row in rows])


def logits(config, params, tokens, segments=None, positions=None):
    """Logits [T, vocab_size] of one row."""
    x = np.asarray(params["embed"]["tokens"])[tokens]
    positions = np.arange(len(tokens)) if positions is None else positions
    if config.positions == "learned":
        x = x + np.asarray(params["embed"]["positions"])[positions]
    if config.embed_scale:
        x = x * config.width**0.5
    if config.positions == "sinusoidal":
        angles = positions[:, None] * 10000.0 ** (-np.arange(0, config.width, 2) / config.width)
        x = x + np.stack([np.sin(angles), np.cos(angles)], -1).reshape(x.shape)
    for l in range(config.layers):
        x = block(config.block, _layer(params["blocks"], l), x, segments, positions)
    x = _norm(config, params["final_norm"], x)
    table = params["embed"]["tokens"].T if config.tied else params["head"]["kernel"]
    return (x @ table)[:, : config.vocab_size]


def block(config, p, x, segments, positions):
    """One layer of one row, [T, D] to [T, D]."""
    pre = config.norm_position == "pre"
    for name in ("attn", "mlp"):
        norm = p[f"norm_{name}"]
        branch = _norm(config, norm, x) if pre else x
        branch = (
            _attention(config, p[name], branch, segments, positions)
            if name == "attn"
            else _mlp(config, p[name], branch)
        )
        x = x + branch if pre else _norm(config, norm, x + branch)
    return x


KEYS = ("tokens", "targets", "segments", "positions")


def _row(config, params, tokens, targets, segments, positions):
    z = logits(config, params, tokens, segments, positions)
    return np.log(np.exp(z).sum(-1)) - z[np.arange(len(targets)), targets]


def _layer(stacked, l):
    return {k: _layer(v, l) if isinstance(v, dict) else v[l] for k, v in stacked.items()}


def _dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def _norm(config, p, x):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    return x * p["scale"] + p.get("bias", 0.0)


def _attention(config, p, x, segments, positions):
    q, k, v = (_dense(p[name], x) for name in "qkv")
    width, shared = config.head_dim, config.heads // config.kv_heads
    seen = np.ones((len(x), len(x)), bool)
    seen = np.tril(seen) if config.causal else seen
    if segments is not None:
        seen &= segments[:, None] == segments[None, :]
    outs = []
    for h in range(config.heads):
        q_h, k_h, v_h = (
            a[:, i * width : (i + 1) * width]
            for a, i in ((q, h), (k, h // shared), (v, h // shared))
        )
        if config.rope_theta is not None:
            q_h, k_h = (_turn(config, a, positions) for a in (q_h, k_h))
        weights = np.where(seen, np.exp(q_h @ k_h.T / np.sqrt(width)), 0.0)
        outs.append(weights / weights.sum(-1, keepdims=True) @ v_h)
    return _dense(p["out"], np.concatenate(outs, axis=-1))


def _turn(config, x, positions):
    half = config.head_dim // 2
    angles = positions[:, None] * config.rope_theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _mlp(config, p, x):
    up = _dense(p["up"], x)
    if config.mlp == "swiglu":
        gate = _dense(p["gate"], x)
        hidden = gate / (1 + np.exp(-gate)) * up
    elif config.mlp == "gelu_exact":
        hidden = up / 2 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
    else:
        hidden = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return _dense(p["down"], hidden)
