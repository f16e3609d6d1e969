"""Several steps in one compiled call (``--steps-per-call``) against one step per call.

The first variant calls the step once per step, as the loop does by default; the others scan it. All
take the same number of steps per round, from batches that lie on the device. XLA's CPU compiler
takes another, slower convolution inside of a loop, which the shape ``convnet`` shows.
"""

import dataclasses
from typing import Literal

import jax
import numpy as np

import jaxtrain as jt
from experiments import vision
from experiments.bench import Rounds, Variant, Work, gpt_work, row, step_facts
from experiments.bench import step as ours
from jaxtrain.experiment import compile_loop, make_experiment_mesh, make_state, no_batches
from jaxtrain.models import decoder

# Layers, width, heads, tokens per row and rows of a step that is hardly more than its dispatch; the
# other shapes are those of the row `step`.
TINY = (1, 16, 2, 8, 4)


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Several steps in one compiled call against one, on one device."""

    shape: Literal[("tiny", *ours.SHAPES, "convnet")] = "tiny"  # type: ignore[valid-type]
    """Which model; convnet is that of experiments.vision."""
    steps_per_call: tuple[int, ...] = (8, 32)
    """Steps in a call, besides 1."""
    rounds: int = 20
    steps: int = 64
    """Steps per round: a multiple of each."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    if bad := [k for k in config.steps_per_call if k < 2 or config.steps % k]:
        raise SystemExit(f"--steps {config.steps} is no multiple of {bad[0]} steps per call")
    experiment, work = convnet() if config.shape == "convnet" else decoder_work(config)
    mesh = make_experiment_mesh(experiment, jax.devices()[:1])

    def calling(k: int) -> Variant:
        state = make_state(experiment, mesh)
        many = dataclasses.replace(experiment, steps_per_call=k)
        train, programs = compile_loop(many, state, mesh, 0, config.steps)
        batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), experiment.batch)
        given = programs[k].place(batch if k == 1 else [batch] * k)

        def run() -> None:
            nonlocal state
            for _ in range(config.steps // k):
                state, metrics = train(state, given)
            jax.block_until_ready((state, metrics))

        return Variant(run, step_facts(programs[k]))

    variants = {"1 step per call": calling(1)}
    variants |= {f"{k} steps per call": calling(k) for k in config.steps_per_call}
    about = {
        "model": experiment.config.get("model", experiment.name),
        "batch": {name: leaf.shape for name, leaf in experiment.batch.items()},
        "dtypes": str(experiment.policy),
    }
    row("calls", config, variants, about, work=work)


def decoder_work(config: Config) -> tuple[jt.Experiment, Work]:
    """A GPT of the shape, with AdamW."""
    model, rows = ours.model_and_rows("small" if config.shape == "tiny" else config.shape)
    if config.shape == "tiny":
        layers, width, heads, seq_len, rows = TINY
        sizes = {"layers": layers, "width": width, "heads": heads, "seq_len": seq_len}
        model = dataclasses.replace(model, **sizes, kv_heads=None, mlp_width=None)
    experiment = jt.Experiment(
        name="gpt",
        init_fn=lambda rng: decoder.init(model, rng),
        loss_fn=decoder.loss_fn(model),
        optimizer=jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=jt.Stack().axes),
        batch=ours.make_batch(model, rows),
        train_batches=no_batches,
        steps=config.steps,
        config={"model": dataclasses.asdict(model)},
    )
    return experiment, gpt_work(model, rows, steps=config.steps)


def convnet() -> tuple[jt.Experiment, None]:
    """The default run of ``experiments.vision``, whose FLOPs nobody has counted."""
    return vision.build(vision.Config()), None
