"""Flags that experiments share, and the main that turns them into a run.

An experiment module holds a frozen ``Config`` and ``build(config) -> Experiment``; its last lines
are ``if __name__ == "__main__": main(Config, build)``.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxtrain import exit_codes, optim
from jaxtrain.compile import use_compilation_cache
from jaxtrain.experiment import Experiment
from jaxtrain.fit import RunOptions, fit
from jaxtrain.host_memory import keep_freed_memory
from jaxtrain.parallel import distributed
from jaxtrain.refusal import refusing
from jaxtrain.survive.accidents import Diverged
from jaxtrain.survive.preemption import ending_at_sigterm

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
    dcn_data: int = 1
    """Of the data axis, the part that crosses the slow network: slices of a TPU, or hosts."""


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Several processes without a launcher; left out, they are found from the environment."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which one this is, from 0."""


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
    skip_spikes: float | None = None
    """Leave out an update whose loss or gradient norm is so many standard deviations above the mean
    of the last 128 steps (6 is usual); None leaves out none."""


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
    for name, value in (("steps", steps), ("optimizer.accumulate", options.accumulate)):
        if not 1 <= value < 2**31:
            raise ValueError(f"--{name} is {value}: give a number from 1 to 2^31 - 1")
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
        skip_spikes=options.skip_spikes,
        **{name: value for name, value in given.items() if value is not None},
        **more,
    )


def check_seed(seed: int) -> None:
    """Makes sure that a seed is one for JAX as well as for NumPy.

    Raises:
      ValueError: it is not from 0 to 2^32 - 1.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed is {seed}: give a number from 0 to 2^32 - 1")


def main(
    config_type: type,
    build: Callable[[Any], Experiment],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the flags, joins the other processes, builds the experiment and trains it.

    Ends the process with the codes of :mod:`jaxtrain.exit_codes`: what cannot be is one sentence
    and ``REFUSED``.
    """
    with refusing(), contextlib.ExitStack() as stack:
        config = parse(config_type, arguments)
        use_compilation_cache()
        processes = getattr(config, "distributed", ProcessOptions())
        stack.enter_context(ending_at_sigterm(handle_signals=config.run.handle_signals))
        distributed.initialize(**dataclasses.asdict(processes))
        keep_freed_memory()
        try:
            fit(build(config), config.run)
        except Diverged as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(exit_codes.DIVERGED) from None


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


SimulateDevices = Annotated[
    int, tyro.conf.arg(help="Run on this many simulated CPU devices; 0 on the real ones.")
]
StepsPerCall = Annotated[
    int,
    tyro.conf.arg(
        help="Train steps in one compiled call, for steps that take hardly longer than their "
        "dispatch; evaluations and checkpoints fall between calls. Slower where a CPU convolves."
    ),
]
Run = Flat[RunOptions]
Processes = Flat[ProcessOptions]
