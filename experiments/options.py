"""Flags that experiments share, and the main that turns them into a run.

An experiment module holds a frozen ``Config`` and ``build(config) -> Experiment``; its last lines
are ``if __name__ == "__main__": main(Config, build)``.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxtrain import optim
from jaxtrain.experiment import Experiment
from jaxtrain.fit import RunOptions, fit

# Flags of such a field stand at the top level: --run-dir and not --run.run-dir.
Flat = tyro.conf.OmitArgPrefixes


# Peak learning rates that suit small models, by optimizer.
LEARNING_RATES = {
    "sgd": 0.3,
    "momentum": 0.1,
    "adam": 3e-3,
    "adamw": 3e-3,
    "rmsprop": 1e-3,
    "adafactor": 1e-2,
    "lion": 3e-4,
    "lamb": 1e-2,
    "lars": 3.0,
    "muon": 1e-2,
}


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Devices along each axis of the mesh; -1 takes what the others leave."""

    data: int = -1
    """Splits the batch; parameters are copied."""
    fsdp: int = 1
    """Splits the batch, and parameters, gradients and optimizer state."""
    tensor: int = 1
    """Splits heads, MLP width and vocabulary."""
    pipe: int = 1
    """Splits the layers; see the pipeline options."""


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """How microbatches go through the stages of a mesh with a pipe axis."""

    schedule: Literal["1f1b", "interleaved", "gpipe"] = "1f1b"
    """1f1b keeps few microbatches in flight; interleaved has a smaller bubble; gpipe neither."""
    microbatches: int = 8
    """Microbatches per step."""
    virtual: int = 1
    """Chunks of layers per device, above 1 for interleaved only."""
    remat: Literal["full", "none"] = "full"
    """full runs a stage again for its backward pass; none keeps what that needs."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer chain. An option left out takes the optimizer's own default."""

    name: Literal[tuple(optim.OPTIMIZERS)] = "muon"  # type: ignore[valid-type]
    """Which update rule."""
    learning_rate: float | None = None
    """Peak learning rate; left out, one that suits the optimizer here."""
    schedule: Literal[tuple(sorted(optim.schedules.SCHEDULES))] = "cosine"  # type: ignore[valid-type]
    """How the learning rate falls after the warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; left out, 2 % of all steps and at least 10."""
    weight_decay: float = 0.1
    """Not applied to norms and biases."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None for no clipping."""
    b1: float | None = None
    """Decay of the first moment."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """Added to denominators."""
    momentum: float | None = None
    """Of sgd-like rules."""
    moment_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of stored first moments (float32 widens the second too); left out, the parameters'."""
    accumulate: int = 1
    """Calls per update (optax.MultiSteps), weighted by tokens."""


def make_optimizer(
    options: OptimizerOptions, *, steps: int, default_rates: dict[str, float], **more
):
    """Makes the optax chain that the flags describe.

    Args:
      options: the flags.
      steps: calls of the train step in all.
      default_rates: peak learning rate by optimizer name.
      **more: passed on to :func:`jaxtrain.make_optimizer`.
    """
    updates = max(1, steps // options.accumulate)
    warmup = options.warmup_steps
    rate = optim.make_schedule(
        options.schedule,
        default_rates[options.name] if options.learning_rate is None else options.learning_rate,
        total_steps=updates,
        warmup_steps=min(max(10, updates // 50), updates // 2) if warmup is None else warmup,
    )
    given = {
        name: getattr(options, name) for name in ("b1", "b2", "eps", "momentum", "moment_dtype")
    }
    return optim.make_optimizer(
        options.name,
        rate,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        accumulate=options.accumulate,
        **{name: value for name, value in given.items() if value is not None},
        **more,
    )


def main(
    config_type: type,
    build: Callable[[Any], Experiment],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the flags, builds the experiment and trains it; what cannot be is exit status 2."""
    config = parse(config_type, arguments)
    try:
        fit(build(config), config.run)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise refuse(error) from None


def parse(config_type: type, arguments: Sequence[str] | None = None) -> Any:
    """Reads a config from the command line and simulates devices where it asks for them."""
    config = tyro.cli(config_type, args=arguments, prog=program_name())
    if config.simulate_devices:
        simulate_devices(config.simulate_devices)
    return config


def no_batches(start_step: int, sharding: jax.sharding.NamedSharding):
    """The batches of an experiment that was built without its data.

    Raises:
      ValueError: always.
    """
    raise ValueError("this experiment was built without its data: build(config) has it")


def program_name() -> str:
    """What was typed to start this program: ``python -m experiments.gpt``."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return f"python -m {name}"


def simulate_devices(count: int) -> None:
    """Makes JAX see ``count`` CPU devices; before anything else has asked it for devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def refuse(error: Exception) -> SystemExit:
    """Prints an error as one sentence and returns the exit (status 2) to raise."""
    print(f"error: {error}", file=sys.stderr)
    return SystemExit(2)


SimulateDevices = Annotated[
    int, tyro.conf.arg(help="Run on this many simulated CPU devices; 0 on the real ones.")
]
Run = Flat[RunOptions]
