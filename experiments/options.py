"""Flags that experiments share, and the main that turns them into a run.

An experiment module holds a frozen ``Config`` and ``build(config) -> Experiment``; its last lines
are ``if __name__ == "__main__": main(Config, build)``.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxtrain import data, exit_codes, optim, quiet
from jaxtrain.compile import use_compilation_cache
from jaxtrain.experiment import Experiment
from jaxtrain.fit import RunOptions, fit
from jaxtrain.host_memory import keep_freed_memory
from jaxtrain.parallel import distributed
from jaxtrain.paths import as_path
from jaxtrain.provenance import OF_START, ROUNDED, SAME, from_plain, known_fields, read_record
from jaxtrain.refusal import refusing
from jaxtrain.run_dir import runs
from jaxtrain.survive.accidents import Diverged
from jaxtrain.survive.preemption import ending_at_sigterm

# Flags of such a field stand at the top level: --run-dir and not --run.run-dir.
Flat = tyro.conf.OmitArgPrefixes


# What a resumed run may have otherwise, and what that means for its steps. All that is not here
# changes what is computed: the seed, the rate, the batch, the model, the precision, and the number
# of steps, by which schedules go.
MAY_CHANGE = {
    "distributed.*": "",  # who this process is: of the start, and not of the run
    "mesh.*": ROUNDED,
    "simulate_devices": ROUNDED,
    "zero": ROUNDED,
    "accumulate": ROUNDED,
    "pipeline.*": ROUNDED,
    "steps_per_call": ROUNDED,
    "remat": ROUNDED,
    "scan_unroll": ROUNDED,
    "attention": ROUNDED,
    # Where they lie; what they hold has a fingerprint.
    "data": SAME,
    "field": SAME,
    "tokenizer": SAME,
    "sample_tokens": SAME,
    "held_out_bytes": "same bits, evaluated on other text",
    "held_out_text": "same bits, evaluated on other text",
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
class _ChainOptions:
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
    accumulate: int = 1
    """Calls per update (optax.MultiSteps), weighted by tokens."""
    skip_spikes: float | None = None
    """Leave out an update whose loss or gradient norm is so many standard deviations above the mean
    of the last 128 steps (6 is usual); None leaves out none."""


OptimizerOptions = dataclasses.make_dataclass(
    "OptimizerOptions",
    [
        (name, Annotated[option.kind | None, tyro.conf.arg(help=option.help)], None)
        for name, option in optim.rules.OPTIONS.items()
    ],
    bases=(_ChainOptions,),
    namespace={
        "__doc__": "The optimizer chain. An option left out takes the optimizer's own default.",
        "__module__": __name__,
    },
    frozen=True,
)


def make_optimizer(
    options: OptimizerOptions, *, steps: int, default_rates: Mapping[str, float] = {}, **more
):
    """Makes the optax chain that the flags describe.

    Args:
      options: the flags.
      steps: calls of the train step in all.
      default_rates: peak learning rate by optimizer name, where it is not the rule's own.
      **more: passed on to :func:`jaxtrain.make_optimizer`.
    """
    for name, value in (("steps", steps), ("optimizer.accumulate", options.accumulate)):
        if not 1 <= value < 2**31:
            raise ValueError(f"--{name} is {value}: give a number from 1 to 2^31 - 1")
    updates = max(1, steps // options.accumulate)
    warmup = options.warmup_steps
    peak = {**optim.rules.LEARNING_RATES, **default_rates}[options.name]
    rate = optim.make_schedule(
        options.schedule,
        peak if options.learning_rate is None else options.learning_rate,
        total_steps=updates,
        warmup_steps=min(max(10, updates // 50), updates // 2) if warmup is None else warmup,
    )
    return optim.make_optimizer(
        options.name,
        rate,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        accumulate=options.accumulate,
        skip_spikes=options.skip_spikes,
        **{name: getattr(options, name) for name in optim.rules.OPTIONS},
        **more,
    )


def may_change(config: Any) -> dict[str, str]:
    """Returns what a resumed run may have otherwise: MAY_CHANGE, and more or fewer steps where the
    learning rate does not go by their number."""
    flat = config.optimizer.schedule == "constant" and config.optimizer.warmup_steps is not None
    return MAY_CHANGE | ({"steps": SAME} if flat else {})


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
        config = parse(config_type, arguments, default=run_to_resume(config_type, arguments))
        use_compilation_cache()
        processes = getattr(config, "distributed", ProcessOptions())
        stack.enter_context(ending_at_sigterm(handle_signals=config.run.handle_signals))
        distributed.initialize(**dataclasses.asdict(processes))
        quiet.start()
        keep_freed_memory()
        experiment = build(config)
        if not experiment.may_change:
            experiment = dataclasses.replace(experiment, may_change=MAY_CHANGE)
        try:
            fit(experiment, config.run)
        except Diverged as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(exit_codes.DIVERGED) from None


def parse(config_type: type, arguments: Sequence[str] | None = None, *, default: Any = None) -> Any:
    """Reads a config from the command line and simulates devices where it asks for them.

    Args:
      config_type: the config's.
      arguments: the flags; by default, those of the process.
      default: a config that has what the flags leave out.
    """
    defaults = {} if default is None else {"default": default}
    config = tyro.cli(config_type, args=arguments, prog=program_name(), **defaults)
    if config.simulate_devices:
        simulate_devices(config.simulate_devices)
    return config


@dataclasses.dataclass(frozen=True)
class _Start:
    """The flags that say which run is resumed; see RunOptions."""

    run_dir: str | None = None
    resume: bool = False
    auto_resume: bool = False


def run_to_resume(config_type: type, arguments: Sequence[str] | None = None) -> Any:
    """Returns the config of the run that the flags resume, as last started; None for a new run.

    What is of a start and not of the run (how it is resumed, which process this is) is as if left
    out. Flags that this version lacks are left out too, and shown as changes later.

    Raises:
      ValueError: the run's folder holds flags that cannot be.
    """
    start, _ = tyro.cli(
        _Start, args=arguments, prog=program_name(), return_unknown_args=True, add_help=False
    )
    if not (start.resume or start.auto_resume):
        return None
    module = module_name(config_type)
    for path in runs() if start.run_dir is None else [as_path(start.run_dir)]:
        record = read_record(path) or {}
        if start.run_dir is not None or record.get("module") == module:
            break
    else:
        return None
    flags = record.get("flags")
    if not isinstance(flags, dict) or not isinstance(flags.get("run"), dict):
        return None
    flags = {name: value for name, value in flags.items() if name != "distributed"}
    run = {name: value for name, value in flags["run"].items() if name not in OF_START}
    flags["run"] = run | {"run_dir": str(path)}
    return from_plain(config_type, known_fields(config_type, flags))


def module_name(config_type: type) -> str:
    """The module of an experiment, as ``python -m`` takes it."""
    name = config_type.__module__
    return program_name().removeprefix("python -m ") if name == "__main__" else name


def kept_file(run: RunOptions, name: str) -> os.PathLike | None:
    """The file that a run to resume has kept in its folder; None where there is none."""
    if not (run.resume or run.auto_resume) or run.run_dir is None:
        return None
    path = as_path(run.run_dir) / name
    return path if path.exists() else None


def tokenize(documents: Iterable[data.Document], tokenizer: data.Tokenizer) -> data.Corpus:
    """Encodes documents once and for all starts: tokens are kept in ``~/.cache/jaxtrain/tokens``
    (``$XDG_CACHE_HOME`` is heeded), or in memory where that folder cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    try:
        folder = pathlib.Path(home) / "jaxtrain" / "tokens"
        return data.tokenize(documents, tokenizer, cache_dir=folder)
    except OSError:
        return data.tokenize(documents, tokenizer)


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
