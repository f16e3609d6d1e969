"""Experts, forward and backward, against a dense MLP of equal active FLOPs.

On one device, without the router: the gradient of tokens, kernels and gates. The dense MLP is as
wide as the experts of one token together.
"""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.bench import Rounds, Work, row
from experiments.bench.attention import jax_variant
from jaxtrain.ops.activations import gelu
from jaxtrain.ops.grouped import expert_mlp


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Experts against a dense MLP; the default is that of `--model tiny-moe`."""

    tokens: int = 4096
    """Tokens of a step."""
    width: int = 192
    """Width of the tokens."""
    mlp_width: int = 384
    """Hidden width of each expert."""
    experts: int = 8
    """Number of experts."""
    per_token: int = 2
    """Experts that a token goes through."""
    calls: int = 3
    """Forward and backward passes per round."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    N, D, F, E = config.tokens, config.width, config.mlp_width, config.experts
    J = config.per_token
    keys = jax.random.split(jax.random.key(0), 6)
    x, dy = jax.random.normal(keys[0], (2, 1, N, D))
    up = jax.random.normal(keys[1], (E, D, F)) / D**0.5
    down = jax.random.normal(keys[2], (E, F, D)) / F**0.5
    gates = jax.nn.softmax(jax.random.normal(keys[3], (1, N, J)))
    routes = {"spread": jnp.argsort(jax.random.normal(keys[4], (1, N, E)))[..., :J]}
    routes["few take every token"] = jnp.tile(jnp.arange(J), (1, N, 1))

    def dense(x, up, down):
        return (gelu(x[0] @ up) @ down)[None]

    wide = up[:J].swapaxes(0, 1).reshape(D, -1), down[:J].reshape(-1, D)
    variants = {"dense": jax_variant(dense, [x, *wide, dy], config.calls)}
    for name, chosen in routes.items():

        def experts(x, up, down, gates, chosen=chosen):
            return expert_mlp("gelu", x, {"up": up, "down": down}, gates, chosen)

        operands = [x, up, down, gates, dy]
        variants[f"experts, {name}"] = jax_variant(experts, operands, config.calls)
    flops, formula = 12.0 * N * D * F * J, "12 N D F J: two products forward and four backward"
    work = Work(steps=config.calls, tokens=N, flops=flops, formula=formula)
    row("experts", config, variants, {"shape": dataclasses.asdict(config)}, work=work)
