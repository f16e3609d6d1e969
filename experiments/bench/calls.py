"""Several steps in one compiled call (``--steps-per-call``) against one step per call.

The first variant calls the step once per step, as the loop does by default; the others scan it. All
take the same number of steps per round, from batches that lie on the device.
"""

import dataclasses
from typing import Any, Literal

import jax

import jaxtrain as jt
from experiments.bench import Variant, gpt_work, interleave, print_row, step_facts
from experiments.bench import step as ours
from jaxtrain.models import gpt

# Layers, width, heads, tokens per row and rows of a step that is hardly more than its dispatch; the
# other shapes are those of the row `step`.
TINY = (1, 16, 2, 8, 4)


@dataclasses.dataclass(frozen=True)
class Config:
    """Several steps in one compiled call against one, on one device."""

    shape: Literal[("tiny", *ours.SHAPES)] = "tiny"  # type: ignore[valid-type]
    """Which model."""
    steps_per_call: tuple[int, ...] = (8, 32)
    """Steps in a call, besides 1."""
    rounds: int = 20
    """Timed rounds."""
    steps: int = 64
    """Steps per round: a multiple of each."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    if bad := [k for k in config.steps_per_call if k < 2 or config.steps % k]:
        raise SystemExit(f"--steps {config.steps} is no multiple of {bad[0]} steps per call")
    model, rows = ours.model_and_rows("small" if config.shape == "tiny" else config.shape)
    if config.shape == "tiny":
        layers, width, heads, seq_len, rows = TINY
        sizes = {"layers": layers, "width": width, "heads": heads, "seq_len": seq_len}
        model = dataclasses.replace(model, **sizes, kv_heads=None, mlp_width=None)
    batch = ours.make_batch(model, rows)
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=gpt.STACKED)
    step = jt.build_train_step(gpt.loss_fn(model), optimizer)

    def calling(function: Any, given: Any, calls: int) -> Variant:
        state = jt.init_state(lambda rng: gpt.init(model, rng), optimizer, jax.random.key(0))
        train = jt.compile_step(function, state, given)
        placed = train.place(given)

        def run() -> None:
            nonlocal state
            for _ in range(calls):
                state, metrics = train(state, placed)
            jax.block_until_ready((state, metrics))

        return Variant(run, step_facts(train))

    variants = {"1 step per call": calling(step, batch, config.steps)}
    for k in config.steps_per_call:
        variants[f"{k} steps per call"] = calling(
            jt.scan_steps(step), [batch] * k, config.steps // k
        )
    work = gpt_work(model, rows, steps=config.steps)
    about = {
        "shape": config.shape,
        "model": dataclasses.asdict(model),
        "batch": (rows, model.seq_len),
        "dtypes": "float32",
        "steps_per_round": config.steps,
    }
    results = interleave(variants, rounds=config.rounds, work=work)
    print_row("calls", about, results, work=work)
