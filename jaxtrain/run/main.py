"""The flags of an experiment, and the main that turns them into a run.

An experiment is a module with a frozen dataclass ``Config``, a kind of :class:`Config`, and
``build(config) -> Experiment``; its last lines are ``if __name__ == "__main__": jt.main(Config,
build)``.
"""

import contextlib
import dataclasses
import difflib
import fractions
import functools
import importlib
import io
import math
import pathlib
import sys
import time
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, Self

import jax
import tyro

from jaxtrain import data
from jaxtrain.compile import use_compilation_cache
from jaxtrain.engines.compressed import Compress, compressed
from jaxtrain.engines.plain import plain
from jaxtrain.engines.private import DRAWN, private
from jaxtrain.engines.rounded import rounded
from jaxtrain.engines.uneven import uneven
from jaxtrain.experiment import EvalBatches, Experiment, Repeated, no_batches
from jaxtrain.host import distributed, exit_codes, output, quiet, storage
from jaxtrain.host.paths import as_path
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.layout import Effect, Layout
from jaxtrain.methods.asynchrony import Workers, asynchronous
from jaxtrain.methods.local_updates import Local, local_updates
from jaxtrain.methods.privacy import Private, check_private, private_fields
from jaxtrain.ops.scaled import RECIPES
from jaxtrain.precision import POLICIES, Policy
from jaxtrain.run import options, provenance
from jaxtrain.run.folder import is_half_deleted, runs
from jaxtrain.run.hook import Hook
from jaxtrain.run.loop import fit
from jaxtrain.run.observe.alert_rules import RULES
from jaxtrain.run.observe.goodput import process_began
from jaxtrain.run.observe.writers import Writer
from jaxtrain.run.refusal import all_flags, refuse_aliases, refuse_misspelt, refusing, with_flags
from jaxtrain.run.survive.diagnosis import Diverged
from jaxtrain.run.survive.preemption import ending_at_sigterm
from jaxtrain.sharding.mesh import BATCH_AXES
from jaxtrain.sharding.stack import Stack

# Flags of such a field stand at the top level: --run-dir and not --run.run-dir.
Flat = tyro.conf.OmitArgPrefixes


@dataclasses.dataclass(frozen=True)
class Config:
    """The flags that every experiment has; a subclass adds those of its model and its data."""

    run: Flat[options.RunOptions] = dataclasses.field(default_factory=options.RunOptions)
    layout: options.LayoutFlags = dataclasses.field(default_factory=Layout)
    optimizer: options.OptimizerOptions = dataclasses.field(
        default_factory=options.OptimizerOptions
    )

    steps: int = 1000
    """Train steps."""
    epochs: float | None = None
    """Passes over the training rows, fractions too, in place of --steps."""
    global_batch: int = 32
    """Rows per step, over all devices."""
    precision: Literal[POLICIES] = "f32"  # type: ignore[valid-type]
    """Dtypes; bf16 keeps float32 parameters and optimizer state, and so do fp8 to nvfp4, which
    round the operands of products."""
    recipe_in: str | None = None
    """Regex of the kernels whose products --precision fp8 to nvfp4 rounds, such as /mlp/; left out,
    all of attention and MLP, and the others stay in bf16."""
    count_rounding: bool = False
    """Log which share of the values of products' operands --precision fp8 to nvfp4 saturates and
    flushes to 0, by layer: flushed/gradients/blocks and so on."""
    local: Local = dataclasses.field(default_factory=Local)
    workers: Workers = dataclasses.field(default_factory=Workers)
    compress: Compress = dataclasses.field(default_factory=Compress)
    private: Private = dataclasses.field(default_factory=Private)
    gradients: Literal["float32", "int8"] = "float32"
    """What every device rounds the gradients of a microbatch to, at random, before they are
    summed."""
    row_shares: tuple[float, ...] = ()
    """Shares of a step's microbatches (--accumulate) that the parts of the mesh axis data take, a
    number for each or for each host, such as 3 1 where the first is three times as fast; left out,
    all take the same."""
    cast_batch: str | None = None
    """Regex of names of batch arrays, such as '^x$': floating-point ones that match are cast to the
    dtype of the compute; a model that casts its inputs itself needs none."""
    seed: int = 0
    """Seed of the parameters, of dropout, and of the order of the data."""
    simulate_devices: int = 0
    """Run on this many simulated CPU devices; 0 on the real ones."""
    devices: tuple[int, ...] = ()
    """Numbers of the GPUs of this host to use, such as 0 1; others stay untouched. Default: all."""
    distributed: Flat[options.ProcessOptions] = dataclasses.field(
        default_factory=options.ProcessOptions
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        flat = {
            f.name
            for kind in (options.RunOptions, options.ProcessOptions, Layout)
            for f in dataclasses.fields(kind)
        }
        taken = flat | {"experiment", "batches_of", "of_rows", "filled"}
        for name in vars(cls).get("__annotations__", {}):
            if name in taken:
                raise ValueError(
                    f"{cls.__name__} has a field {name!r}, which every config has already: a flag "
                    "of its run or its layout, or a method; give it another name"
                )

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:  # for JAX as well as for NumPy
            raise ValueError(f"`seed` is {self.seed}: give a number from 0 to 2^32 - 1")
        if len({n for n in self.devices if n >= 0}) < len(self.devices):
            raise ValueError(f"`devices` is {self.devices}: give different numbers from 0")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"`epochs` is {self.epochs}: give a number above 0")

    def experiment(
        self,
        name: str,
        *,
        rates: Mapping[str, float] = {},
        multipliers: Mapping[str, Callable[[str], float]] = {},
        **given: Any,
    ) -> Experiment:
        """Makes an experiment of what these flags say, and of what is given.

        Args:
          name: names the run's folder.
          rates: peak learning rates by optimizer, where they are not the optimizers' own.
          multipliers: ``rate_multipliers`` and ``decay_multipliers`` of the model, from path to
            factor, which those of the flags multiply.
          **given: the other arguments of :meth:`jaxtrain.Experiment.of`. ``config`` and
            ``may_change`` are added to what these flags say; any other comes in its place.

        ===================  ===========================================================
        argument             value
        ===================  ===========================================================
        ``init_fn``          ``rng -> params``, or ``-> (params, model_state)``
        ``loss_fn``          ``(params, batch, rng) -> loss``, as for ``build_train_step``
        ``has_model_state``  True where ``init_fn`` returns model state too
        ``eval_loss_fn``     the loss of held-out rows, where it is another
        ``stages``           a :class:`jaxtrain.Stages` in place of ``loss_fn``
        ``rules``            sharding rules of the parameters, by path
        ``freeze``           paths of parameters that do not train
        ``optimizer``        an optax transformation, or ``stack -> transformation``
        ``batch``            shapes of a batch; :meth:`batches_of` returns this and the next two
        ``train_batches``    ``(first_step, sharding) -> stream of batches``
        ``eval_batches``     ``sharding -> batches``, or several of these by name
        ``best_metric``      metric of an evaluation that chooses the best checkpoint
        ``best_mode``        ``"min"`` or ``"max"``
        ``derived``          ``means -> more numbers`` to log
        ``conclude``         ``(state, means) -> lines`` printed at the end
        ``pictures``         ``(state, means) -> pictures`` of the end
        ``facts``            more lines of the header, by name
        ``files``            texts to keep in the run's folder, by name
        ===================  ===========================================================
        """
        typed_flags = self.optimizer
        # Only the module's own reads count as use, so read a copy here.
        self = dataclasses.replace(self, optimizer=options.unmarked(typed_flags))
        if given.get("train_batches") is not no_batches:
            counted = self._counted(given.get("steps_per_epoch"))
            own = {"optimizer", "steps"} & given.keys()
            if counted.steps != self.steps and own:
                raise ValueError(
                    f"`epochs` is {self.epochs} and experiment {name!r} brings {min(own)} of its "
                    "own: make them of config.of_rows(rows), or give `steps`"
                )
            self = counted
        constant = self.optimizer.schedule == "constant" and self.optimizer.warmup_steps is not None
        may_change = self.layout.may_change() | options.MAY_CHANGE | given.pop("may_change", {})
        # More or fewer steps are the same ones where the learning rate does not go by their number.
        may_change |= {"steps": Effect.SAME} if constant and not self.private.is_on else {}
        compress = self.compress.on_mesh(self.layout.mesh.data)
        self = dataclasses.replace(self, compress=compress)
        record = {"experiment": name, "module": module_name(type(self))}
        record |= {"flags": provenance.flags_of(self)} | given.pop("config", {})
        if not (brings_optimizer := "optimizer" in given):
            sure = given.get("stages") is not None

            def optimizer_of(stack: Stack, **numbers: Any) -> Any:
                found = lambda params: stack.axes if sure or stack.fits(params) else ()  # noqa: E731
                rows = {"global_batch": self.global_batch, "default_rates": rates}
                rows["multipliers"] = multipliers
                chosen = dataclasses.replace(self.optimizer, **numbers)
                return options.make_optimizer(chosen, steps=self.steps, stacked=found, **rows)

            given["optimizer"] = optimizer_of
        if self.private.is_on:  # of an outline, whose rows and so whose noise are not known yet
            engine = private(self.private.clip, 0.0, self.global_batch, bands=self.private.bands)
            given = {"engine": dataclasses.replace(engine, check=_check_outline)} | given
        engines = {"gradients": rounded()} if self.gradients == "int8" else {}
        if self.row_shares:
            engines["row_shares"] = uneven(self.row_shares)
        if compress.name is not None:
            engines["compress.name"] = compressed(compress)
        for flag, engine in engines.items():
            if given.get("engine", plain) is not plain:
                raise ValueError(
                    f"`{flag}` is given and experiment {name!r} has another engine: give one of "
                    "them"
                )
            given["engine"] = engine
        policy = dataclasses.replace(Policy.named(self.precision), cast_batch=self.cast_batch)
        if self.recipe_in is not None:
            if policy.recipe is None:
                raise ValueError(
                    f"`recipe_in` is {self.recipe_in!r}: --precision {self.precision} rounds no "
                    f"operands of products; give one of {', '.join(RECIPES)}, or leave it out"
                )
            policy = dataclasses.replace(policy, recipe_in=self.recipe_in)
        policy = dataclasses.replace(policy, count_rounding=self.count_rounding)
        ours = {"steps": self.steps, "layout": self.layout, "policy": policy, "seed": self.seed}
        ours |= {"items_per_step": self.global_batch, "item": "rows"}
        every = self.run.eval_every
        if self.run.early_stop_patience and self.local.replicas and every % self.local.every:
            raise ValueError(
                f"`eval_every` is {every} and replicas meet after every {self.local.every} steps, "
                "between which what is evaluated stays as it is, so that `early_stop_patience` "
                f"would stop the run: give a multiple of {self.local.every}"
            )
        made = Experiment.of(name=name, config=record, may_change=may_change, **ours | given)
        if brings_optimizer:  # A function of the stack has been called by now.
            field = type(self).__dataclass_fields__["optimizer"]
            has_factory = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if has_factory else field.default
            options.refuse_unused(typed_flags, default, name)
        else:
            sizes = {"steps": self.steps, "global_batch": self.global_batch}
            optimizer_of.description = options.describe_optimizer(
                self.optimizer, **sizes, default_rates=rates
            )
        return asynchronous(local_updates(made, self.local), self.workers)

    def filled(self, typed: Collection[str]) -> Self:
        """Returns the config with the flags that follow from others. ``typed`` are the names of
        those on the command line, such as ``optimizer.name``, which keep their values; JAX has no
        devices yet. A config whose flags are all its own is left as it is."""
        del typed
        return self

    def of_rows(self, rows: data.RowSource) -> Self:
        """Returns the config with ``steps`` counted from its ``epochs``, where it has any. Call it
        where ``build`` needs the steps itself, such as for an optimizer of its own.

        Raises:
          ValueError: the rows are a mixture, of sources that are passed over at different speeds,
            or ``steps`` is given, too.
        """
        return self._counted(_steps_per_epoch(rows, self.global_batch))

    def _counted(self, steps_per_epoch: float | None) -> Self:
        if self.epochs is None:
            return self
        if steps_per_epoch is None:
            raise ValueError(
                f"`epochs` is {self.epochs}, and how many rows one has is not known: give `steps`"
            )
        steps = math.ceil(fractions.Fraction(str(self.epochs)) * steps_per_epoch)
        if self.steps not in (type(self).steps, steps):
            raise ValueError(
                f"`epochs` is {self.epochs} and `steps` {self.steps}: give one of them"
            )
        return dataclasses.replace(self, steps=steps)

    def batches_of(
        self,
        train: data.RowSource,
        held_out: data.RowSource | Mapping[str, data.RowSource] | None = None,
    ) -> dict[str, Any]:
        """Returns the arguments of an experiment that are its data.

        Args:
          train: rows to train on, in an order by ``seed`` (:class:`jaxtrain.data.Batches`): a list
            of dicts, a dataset, arrays by name, a path of such in an .npz, or a
            :class:`jaxtrain.data.RowStream`.
          held_out: rows to evaluate on, or several sets of them by name. The loss weights them; if
            it is a scalar, all weigh the same.

        Raises:
          ValueError: it is something else, such as an iterator.
        """
        train = data.as_rows(train)

        def passes(rows: data.RowSource) -> EvalBatches:
            size = self.global_batch
            return lambda sharding: (
                batch if count == size else Repeated(batch, count / size)
                for batch, count in data.whole_batches(rows, size, sharding=sharding)
            )

        batches, more = data.Batches(train, global_batch=self.global_batch, seed=self.seed), {}
        if self.private.is_on:
            batches, more = self._drawn(train)
        ahead = max(2, min(self.layout.steps_per_call, self.steps))
        found = more | {
            "batch": batches.shapes,
            "steps_per_epoch": _steps_per_epoch(train, self.global_batch),
            "train_batches": lambda start, sharding: batches.stream(
                start, sharding=sharding, prefetch=ahead
            ),
        }
        if held_out is not None:
            # Arrays by name are one set, and rows by name are several.
            is_one = not isinstance(held_out, Mapping) or hasattr(
                next(iter(held_out.values()), None), "dtype"
            )
            sets = {"": held_out} if is_one else held_out
            sets = {name: data.as_rows(rows) for name, rows in sets.items()}
            found["eval_batches"] = {name: passes(rows) for name, rows in sets.items()}
        return found

    def _drawn(self, rows: data.RowSource) -> tuple[data.Batches, dict[str, Any]]:
        """The batches of a private run, and its other fields; raises ValueError for flags that
        would break its guarantee."""
        decides = "no noise hides a loss that decides on {}; leave it out"
        acting = [
            name
            for name, each in self.run.alert_rules.items()
            if {"stop", "save"} & {*each.actions}
            and (RULES[name].metric or "").startswith("train/")
        ]
        changed = sorted({*self.run.accept_changes} - {"stopped"})
        twice = "steps that are made twice differently tell more than is accounted for"
        for name, value, why in (
            ("skip_spikes", self.optimizer.skip_spikes, decides.format("updates")),
            ("plateau_factor", self.optimizer.plateau_factor, decides.format("updates")),
            ("alerts", acting, decides.format("when a run stops or saves")),
            ("seed", self.seed == 0 and "0", "it is a seed that anyone guesses; give another"),
            ("accept_changes", changed, f"{twice}; leave it out, or begin a new run"),
        ):
            if value:
                raise ValueError(f"`{name}` is {value} and training is private: {why}")
        if isinstance(rows, data.RowStream):
            raise ValueError("training is private and its rows are a stream: give rows by number")
        if isinstance(rows, data.PoissonClients):  # whose rounds have the noise, not their steps
            size = {"global_batch": self.global_batch, "seed": self.seed}
            return data.Batches(rows, **size), {"engine": plain}
        # Rows of a batch divide over what those of a global batch may divide over.
        parts = math.prod(max(1, self.layout.mesh.axes[axis]) for axis in BATCH_AXES)
        divisor = math.gcd(self.global_batch, self.layout.accumulate * math.lcm(96, parts))
        how = {"leaf": DRAWN, "bands": self.private.bands, "divisor": divisor, "seed": self.seed}
        steps = self._counted(_steps_per_epoch(rows, self.global_batch)).steps
        sizes = {"rows": len(rows), "examples": self.global_batch, "steps": steps}
        batches = data.PoissonBatches(rows, examples=self.global_batch, **how)
        return batches, private_fields(self.private, **sizes)


def _check_outline(experiment: Experiment) -> None:
    if experiment.data.train_batches is not no_batches:
        raise ValueError(
            f"training is private and the rows of experiment {experiment.name!r} are not drawn by "
            "Poisson sampling: make its batches by config.batches_of"
        )
    check_private(experiment)


def _steps_per_epoch(rows: data.RowSource, global_batch: int) -> fractions.Fraction | None:
    if isinstance(rows, data.Mixture | data.GrowingRows | data.RowStream):
        return None
    if global_batch < 1:  # which Batches refuses
        return None
    return fractions.Fraction(len(rows), global_batch)


def main(
    config_type: type,
    build: Callable[[Any], Experiment],
    arguments: Sequence[str] | None = None,
    *,
    default: Any = None,
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
) -> None:
    """Parses the flags, joins the other processes, builds the experiment and trains it.

    Args:
      config_type: a dataclass of flags, a kind of :class:`Config`.
      build: makes the experiment of one.
      arguments: the flags; by default, those of the process.
      default: a config that has what the flags of a new run leave out.
      hooks, writers: as for :func:`jaxtrain.fit`.

    Exits with the codes of :mod:`jaxtrain.host.exit_codes`; an invalid configuration prints one
    sentence and exits with ``REFUSED``.
    """
    called = time.time()
    with output.lasting(), refusing(config_type), contextlib.ExitStack() as stack:
        resumed = run_to_resume(config_type, arguments)
        config = parse(config_type, arguments, default=default if resumed is None else resumed)
        use_compilation_cache()
        processes = getattr(config, "distributed", options.ProcessOptions())
        handle = config.run.handle_signals
        stack.enter_context(ending_at_sigterm(handle_signals=handle, sigint=True))
        distributed.initialize(**dataclasses.asdict(processes))
        if getattr(config, "devices", ()) and jax.default_backend() != "gpu":
            raise ValueError("`devices` chooses among GPUs, and JAX has found none: leave it out")
        quiet.start()
        experiment = build(config)
        may_change = (
            experiment.metadata.may_change or experiment.layout.may_change() | options.MAY_CHANGE
        )
        experiment = experiment.with_(may_change=may_change)
        try:
            # A program's time counts from its start. A notebook has no file: it began long before.
            is_program = hasattr(sys.modules["__main__"], "__file__")
            began = process_began() if is_program else called
            result = fit(experiment, config.run, hooks=hooks, writers=writers, began=began)
        except Diverged as error:
            print(f"error: {with_flags(str(error), config_type)}", file=sys.stderr)
            raise SystemExit(exit_codes.DIVERGED) from None
        if result.code:
            raise SystemExit(result.code)


def parse(config_type: type, arguments: Sequence[str] | None = None, *, default: Any = None) -> Any:
    """Reads a config from the flags, by default those of the process, and simulates devices where
    it asks for them; ``default`` is a config that has what the flags leave out."""
    config = _read_flags(config_type, arguments, default, program_name())
    if count := getattr(config, "simulate_devices", 0):
        simulate_devices(count)
    if numbers := getattr(config, "devices", ()):
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, numbers)))
    return config


def _read_flags(
    config_type: type, arguments: Sequence[str] | None, default: Any, program: str
) -> Any:
    arguments = sys.argv[1:] if arguments is None else arguments
    typed = {word.partition("=")[0] for word in arguments}
    if {"--epochs", "--steps"} <= typed:
        raise ValueError("`epochs` and `steps` both say how long to train: give one of them")
    # What is typed comes in place of what a run had of the other.
    if default is not None and "--steps" in typed:
        default = dataclasses.replace(default, epochs=None)
    if default is not None and "--epochs" in typed:
        default = dataclasses.replace(default, steps=config_type.steps)
    # The default of the one that is typed only stands in until tyro sets it.
    counts = {"eval_every": 1, "eval_epochs": 1.0}
    for name, stand_in in counts.items():
        if default is not None and {f"--{name}", f"--{name.replace('_', '-')}"} & typed:
            counting = dict.fromkeys(counts, 0) | {name: stand_in}
            run = dataclasses.replace(default.run, **counting)
            default = dataclasses.replace(default, run=run)
    defaults = {} if default is None else {"default": default}
    refuse_aliases(config_type, arguments)
    config = _parsed(config_type, args=arguments, prog=program, **defaults)
    typed = {word.removeprefix("--").replace("-", "_") for word in typed}
    config = config.filled(typed) if hasattr(config, "filled") else config
    if isinstance(default, Config):
        options.mark_recorded(config.optimizer, default.optimizer)
    return config


def _parsed(config_type: type, **parsing: Any) -> Any:
    """Parses flags as ``tyro.cli`` does, but raises what the config's own ``__post_init__`` raises:
    tyro would print it in a box, with names of fields."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(config_type, **parsing)
    except SystemExit as exited:
        error = exited.__context__
        while error is not None and not _is_own(error):
            error = error.__context__
        if error is not None:
            printed.truncate(0)
            raise error from None
        raise
    finally:
        sys.stderr.write(printed.getvalue())


def _is_own(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    names = {frame.f_code.co_name for frame, _ in frames}
    return isinstance(error, ValueError) and "__post_init__" in names


def run_to_resume(config_type: type, arguments: Sequence[str] | None = None) -> Any:
    """Returns the config of the run that the flags resume, as last started; None for a new run.

    What is of a start and not of the run (how it is resumed, which process this is) is as if left
    out. Flags that this version lacks are left out too, and shown as changes later. Raises
    ValueError where the run's folder holds flags that cannot be.
    """
    start, _ = tyro.cli(
        options.StartOptions,
        args=arguments,
        prog=program_name(),
        return_unknown_args=True,
        add_help=False,
    )
    if not (start.resume or start.auto_resume):
        return None
    module = module_name(config_type)
    numbered = functools.partial(storage.retrying, lambda: list(runs()), "the folder of runs")
    for path in numbered() if start.run_dir is None else [as_path(start.run_dir)]:
        half = storage.retrying(functools.partial(is_half_deleted, path), f"the run {path}")
        read = functools.partial(provenance.read_record, path)
        record = (None if half else storage.retrying(read, f"the run {path}")) or {}
        if start.run_dir is not None or record.get("module") == module:
            break
    else:
        return None
    flags = record.get("flags")
    if not isinstance(flags, dict) or not isinstance(flags.get("run"), dict):
        return None
    # What follows from its epochs is found again.
    not_its_own = {"distributed"} | ({"steps"} if flags.get("epochs") else set())
    flags = {name: value for name, value in flags.items() if name not in not_its_own}
    run = {name: value for name, value in flags["run"].items() if name not in provenance.OF_START}
    flags["run"] = run | {"run_dir": str(path)}
    fields = provenance.nested(config_type, flags)
    return provenance.from_plain(config_type, provenance.known_fields(config_type, fields))


def experiment_module(name: str) -> types.ModuleType:
    """Imports the module of an experiment; raises ValueError where there is none of that name, or
    it has no ``Config`` and ``build(config)``."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {name!r} here: name it as `python -m` would, such as "
            "experiments.gpt, from the folder that holds it"
        ) from None
    for attribute in ("Config", "build"):
        if not hasattr(module, attribute):
            raise ValueError(
                f"module {name!r} has no {attribute}: an experiment has a dataclass Config and "
                "build(config) -> jaxtrain.Experiment"
            )
    return module


def load_experiment(module_name: str, flags: Sequence[str], *, command: str) -> Experiment:
    """Imports an experiment's module and builds the experiment that the flags describe.

    The help names the ``command`` that asks. Raises ValueError where there is no such module, where
    it is no experiment, and what ``build`` raises.
    """
    return build_experiment(*load_config(module_name, flags, command=command))


def build_experiment(module: Any, config: Any, *, outline: bool = False) -> Experiment:
    """Builds the experiment of a module and a config, as :func:`load_experiment` does; ``outline``
    takes ``outline(config)`` where the module has it: the same without its data."""
    build = getattr(module, "outline", module.build) if outline else module.build
    experiment = build(config)
    if not isinstance(experiment, Experiment):
        raise ValueError(
            f"build of module {module.__name__!r} returns {type(experiment).__name__}: it must "
            "return a jaxtrain.Experiment"
        )
    return experiment


def load_config(
    module_name: str, flags: Sequence[str], *, command: str, own: type | None = None
) -> tuple[Any, Any]:
    """Imports an experiment's module and reads its config from the flags, as
    :func:`load_experiment`. A module may have ``choose(flags)`` that returns another one, and the
    config that has what the flags leave out. ``own`` are the options of the command itself."""
    module, default = experiment_module(module_name), None
    if hasattr(module, "choose"):
        module, default = module.choose(flags)
    program = f"jaxtrain {command} {module_name}"
    if own is not None:
        refuse_misspelt(own, module.Config, flags)
    return module, _read_flags(module.Config, flags, default, program)


def typed_fields(config: Any, flags: Sequence[str], others: Mapping[str, Any]) -> set[str]:
    """Returns the fields of a config's layout that its flags have set: those that keep their values
    where the defaults are ``others``, values by dotted name that are not the config's."""
    default = dataclasses.replace(config, layout=config.layout.with_(others))
    found = _read_flags(type(config), flags, default, program_name())
    return {name for name in others if attrgetter(name)(found.layout) != others[name]}


def flag_word(module_name: str, config: Any, flag: str, value: str) -> str:
    """Returns the word of a command line that sets a flag of a module's config to a value. Raises
    ValueError where there is no such flag, or where it does not take the value."""
    kinds = {name: kind for *_, kind, name in all_flags(type(config))}
    if flag not in kinds:
        near = difflib.get_close_matches(flag, sorted(kinds), n=1)
        meant = f": did you mean --{near[0]}?" if near else f"; see python -m {module_name} --help"
        raise ValueError(f"{module_name} has no flag --{flag}{meant}")
    word = f"--{flag}={value}"
    if kinds[flag] is bool and value.lower() in ("true", "false"):
        group, dot, last = flag.rpartition(".")
        word = f"--{group}{dot}{'' if value.lower() == 'true' else 'no-'}{last}"
    try:
        with contextlib.redirect_stderr(None):  # tyro's own words for it
            tyro.cli(type(config), args=[word], default=config, console_outputs=False)
    except SystemExit:
        raise ValueError(
            f"{module_name} does not take {word}; see python -m {module_name} --help"
        ) from None
    return word


def module_name(config_type: type) -> str:
    """The module of an experiment, as ``python -m`` takes it."""
    name = config_type.__module__
    if name != "__main__":
        return name
    word = program_name().split()[-1]
    return pathlib.PurePath(word).stem if word.endswith(".py") else word


def program_name() -> str:
    """Returns the command that started this program, such as ``python -m experiments.gpt``."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"
