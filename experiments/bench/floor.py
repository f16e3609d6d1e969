"""The floor: a GPT-2 train step as one would write it by hand, for one model and one device.

It imports nothing of jaxtrain, has no options, no mesh and no masks, and unrolls its layers. What
jaxtrain's step takes beyond it is the price of the framework; see :mod:`experiments.bench.step`.

Shapes: B batch, T positions, N = B T tokens, D width, H heads, K = D / H, F = 4 D, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import optax


def norm(scale, bias, x):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def attention(p, x_ND, B, T, H):
    D = x_ND.shape[-1]
    q, k, v = (
        (x_ND @ p[name]["kernel"] + p[name]["bias"]).reshape(B, T, H, D // H).transpose(0, 2, 1, 3)
        for name in ("q", "k", "v")
    )
    scores_BHTT = q @ k.transpose(0, 1, 3, 2) * (D // H) ** -0.5
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    weights_BHTT = jax.nn.softmax(jnp.where(causal_TT, scores_BHTT, -1e30), axis=-1)
    out_ND = (weights_BHTT @ v).transpose(0, 2, 1, 3).reshape(B * T, D)
    return out_ND @ p["out"]["kernel"] + p["out"]["bias"]


def mlp(p, x_ND):
    hidden_NF = jax.nn.gelu(x_ND @ p["up"]["kernel"] + p["up"]["bias"], approximate=True)
    return hidden_NF @ p["down"]["kernel"] + p["down"]["bias"]


def loss_fn(params, tokens_BT, targets_BT, heads):
    """Mean cross-entropy in nats."""
    B, T = tokens_BT.shape
    x_ND = (params["embed"]["tokens"][tokens_BT] + params["embed"]["positions"]).reshape(B * T, -1)
    for p in params["layers"]:
        x_ND += attention(p["attn"], norm(**p["norm_attn"], x=x_ND), B, T, heads)
        x_ND += mlp(p["mlp"], norm(**p["norm_mlp"], x=x_ND))
    logits_NV = norm(**params["final_norm"], x=x_ND) @ params["embed"]["tokens"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_NV, targets_BT.reshape(-1))
    return losses.mean()


def make_step(heads, learning_rate, weight_decay, clip_norm):
    """Returns (optimizer, jitted step): ``(params, opt_state, tokens, targets) -> (.., .., loss)``.

    AdamW after clipping by global norm; matrices and tables decay, norms and biases do not. The
    parameters and the optimizer's state are donated.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            learning_rate,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, tokens_BT, targets_BT):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BT, targets_BT, heads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return optimizer, step
