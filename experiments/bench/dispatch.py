"""The host's time per call of a compiled step, with next to nothing for the device to do.

The step hardly computes: it adds the batch to every leaf of a state of many small leaves. What
remains is the host's work per call, for `jax.jit` and for the function that `compile_step` returns.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from experiments.bench import Rounds, Variant, interleave, print_row


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """A call of a compiled step against one of jax.jit, with nothing to compute."""

    leaves: int = 200
    """Leaves of the state."""
    calls: int = 200
    """Calls per round."""


def main(config: Config) -> None:
    """Runs the row and prints it; microseconds are per call."""
    batch = {"x": jax.device_put(np.ones(8, np.float32))}

    def step(state, batch):
        return jax.tree.map(lambda x: x + batch["x"], state), {"loss": batch["x"].sum()}

    def make_state():
        return {f"leaf_{i:03}": jnp.zeros(8) for i in range(config.leaves)}

    jitted = jax.jit(step, donate_argnums=0)
    compiled = jt.compile_step(step, make_state(), batch)

    def calls(function) -> Variant:
        state = make_state()

        def run() -> None:
            nonlocal state
            for _ in range(config.calls):
                state, metrics = function(state, batch)
            jax.block_until_ready((state, metrics))

        return Variant(run, {})

    variants = {"jax.jit": calls(jitted), "compile_step": calls(compiled)}
    results = interleave(variants, rounds=config.rounds)
    for result in results.values():
        result["microseconds_per_call"] = round(1e3 * result["ms"] / config.calls, 1)
    added = results["compile_step"]["microseconds_per_call"]
    added -= results["jax.jit"]["microseconds_per_call"]
    about = {"added_microseconds_per_call": round(added, 1)}
    print_row("dispatch", config, about, results)
