"""Rules that have no test of their own elsewhere, against their papers in NumPy float64."""

import jax
import numpy as np
import optax
from jax import jit

from jaxtrain.optim import make_optimizer, schedules


def test_adan_is_the_papers():
    """Xie et al. 2022, algorithm 1, with decoupled decay in place of the proximal step."""
    steps, rate, decay, b1, b2, b3, eps = 8, 0.1, 0.1, 0.9, 0.8, 0.95, 1e-6
    rng = np.random.default_rng(0)
    x, grads = rng.normal(size=(3, 4)), rng.normal(size=(steps, 3, 4))
    tx = make_optimizer(
        "adan",
        schedules.linear(rate, total_steps=steps),
        weight_decay=decay,
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
    )

    @jit
    def ours(params, grads):
        def step(carry, grad):
            params, state = carry
            updates, state = tx.update({"w": grad}, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][0]["w"]

    result = ours({"w": np.float32(x)}, np.float32(grads))
    m, v, n, last = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), grads[0]
    for t, g in enumerate(grads):
        difference, last = g - last, g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * difference
        n = b3 * n + (1 - b3) * (g + b2 * difference) ** 2
        m_hat, v_hat, n_hat = (a / (1 - b ** (t + 1)) for a, b in ((m, b1), (v, b2), (n, b3)))
        update = (m_hat + b2 * v_hat) / (np.sqrt(n_hat) + eps)
        x = x - rate * (1 - t / steps) * (update + decay * x)
    np.testing.assert_allclose(result, x, rtol=1e-4, atol=1e-5)
