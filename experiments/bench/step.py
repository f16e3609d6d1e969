"""Rows on a train step on one device: against a hand-written one, watched, several of them in one
compiled call, of many layers, and with nothing to compute."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from experiments import vision
from experiments.bench import (
    Rounds,
    Variant,
    gpt_row,
    gpt_work,
    interleave,
    print_row,
    row,
    step_facts,
    stepping,
)
from experiments.bench import floor as hand_written
from jaxtrain.build import compile_loop, make_experiment_mesh, make_state
from jaxtrain.experiment import no_batches
from jaxtrain.models import decoder

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 1.0

# Name: layers, width, heads, tokens per row, rows, vocabulary. A step of tiny is hardly more than
# its dispatch.
SHAPES = {
    "tiny": (1, 16, 2, 8, 4, 65),
    "small": (4, 128, 4, 64, 12, 65),
    "big": (6, 384, 6, 256, 8, 65),
    "gpt2-124m": (12, 768, 12, 1024, 8, 50304),
}


@dataclasses.dataclass(frozen=True)
class Step(Rounds):
    """jaxtrain's step against a hand-written one, on one device."""

    shape: Literal[tuple(SHAPES)] = "small"  # type: ignore[valid-type]
    """Which model."""
    rounds: int = 30
    calls: int = 5
    """Steps per round."""


def step(config: Step) -> None:
    """Compares with :mod:`experiments.bench.floor` what the framework costs: the same model,
    mathematics and batch, AdamW with clipping, float32."""
    model, rows = model_and_rows(config.shape)
    batch = make_batch(model, rows)
    params = jax.device_get(jax.jit(lambda: decoder.init(model, jax.random.key(0)))())
    scanned = dataclasses.replace(model, scan_unroll=1)
    variants = {
        "hand-written": hand_written_variant(model, params, batch, config.calls),
        "jaxtrain": jaxtrain_variant(model, lambda rng: params, batch, config.calls),
        "jaxtrain, layers scanned": jaxtrain_variant(
            scanned, lambda rng: params, batch, config.calls
        ),
    }
    gpt_row("step", config, variants, model, rows, steps=config.calls)


@dataclasses.dataclass(frozen=True)
class Watch(Rounds):
    """The step with ``make_optimizer(watch_every=)`` against the step without, on one device."""

    shape: Literal[tuple(SHAPES)] = "small"  # type: ignore[valid-type]
    """Which model."""
    optimizer: str = "adamw"
    """Which update rule."""
    every: int = 10
    """Steps between two measurements, and of a round."""
    rounds: int = 30


def watch(config: Watch) -> None:
    """Measures what the norms of every layer cost in every k-th step."""
    model, rows = model_and_rows(config.shape)
    batch, init = make_batch(model, rows), functools.partial(decoder.init, model)
    variants = {
        name: jaxtrain_variant(
            model, init, batch, config.every, optimizer=config.optimizer, watch_every=every
        )
        for name, every in (("not watched", 0), ("watched", config.every))
    }
    gpt_row("watch", config, variants, model, rows, steps=config.every)


@dataclasses.dataclass(frozen=True)
class Calls(Rounds):
    """Several steps in one compiled call against one, on one device."""

    shape: Literal[(*SHAPES, "convnet")] = "tiny"  # type: ignore[valid-type]
    """Which model; convnet is that of experiments.vision."""
    steps_per_call: tuple[int, ...] = (8, 32)
    """Steps in a call, besides 1."""
    rounds: int = 20
    steps: int = 64
    """Steps per round: a multiple of each."""


def calls(config: Calls) -> None:
    """Compares calls of K steps (``--steps-per-call``) with calls of one, which is the loop's
    default, on a batch that lies on the device. XLA's CPU compiler takes another, slower
    convolution inside of a loop, which the shape ``convnet`` shows."""
    if bad := [k for k in config.steps_per_call if k < 2 or config.steps % k]:
        raise SystemExit(f"--steps {config.steps} is no multiple of {bad[0]} steps per call")
    if config.shape == "convnet":  # whose FLOPs nobody has counted
        experiment, work = vision.build(vision.Config()), None
    else:
        model, rows = model_and_rows(config.shape)
        work = gpt_work(model, rows, steps=config.steps)
        experiment = jt.Experiment.of(
            name="gpt",
            init_fn=lambda rng: decoder.init(model, rng),
            loss_fn=decoder.loss_fn(model),
            optimizer=jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=jt.Stack().axes),
            batch=make_batch(model, rows),
            train_batches=no_batches,
            steps=config.steps,
            config={"model": dataclasses.asdict(model)},
        )
    mesh = make_experiment_mesh(experiment, jax.devices()[:1])

    def calling(k: int) -> Variant:
        state = make_state(experiment, mesh)
        many = experiment.with_(layout=jt.Layout(steps_per_call=k))
        train, programs = compile_loop(many, state, mesh, 0, config.steps)
        batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), experiment.data.batch)
        placed = itertools.repeat(programs[k].place(batch if k == 1 else [batch] * k))
        facts = step_facts(programs[k])
        return stepping(train, state, placed, calls=config.steps // k, facts=facts)

    variants = {"1 step per call": calling(1)}
    variants |= {f"{k} steps per call": calling(k) for k in config.steps_per_call}
    about = {
        "model": experiment.metadata.config.get("model", experiment.name),
        "batch": {name: leaf.shape for name, leaf in experiment.data.batch.items()},
        "dtypes": str(experiment.policy),
    }
    row("calls", config, variants, about, work=work)


@dataclasses.dataclass(frozen=True)
class Compile(Rounds):
    """Compiling a train step of many layers against one of few."""

    layers: tuple[int, ...] = (12, 24, 48)
    """Depths; ratios are to the first."""
    unrolled: bool = False
    """Unroll the layers, to see what the scan saves."""
    optimizer: str = "adamw"
    """Which update rule."""
    rounds: int = 7


def compiling(config: Compile) -> None:
    """Compares compile times of depths. Layers are scanned, so the program has one layer whatever
    their number. Tracing with lowering and compiling are timed apart, each time from nothing."""
    jax.config.update("jax_enable_compilation_cache", False)
    model, rows = model_and_rows("small")
    batch = make_batch(model, rows)
    seconds: dict[str, list[tuple[float, float]]] = {}

    def compilation(layers: int) -> Variant:
        unroll = layers if config.unrolled else 1
        deep = dataclasses.replace(model, layers=layers, scan_unroll=unroll)
        optimizer = jt.make_optimizer(config.optimizer, 1e-3, stacked=jt.Stack().axes)
        state = jt.abstract_state(lambda rng: decoder.init(deep, rng), optimizer)
        own = seconds[f"{layers} layers"] = []

        def run() -> None:
            # A new function each time: JAX traces one that it knows no more.
            step = jt.build_train_step(decoder.loss_fn(deep), optimizer)
            start = time.perf_counter()
            lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
            traced = time.perf_counter()
            lowered.compile()
            own.append((traced - start, time.perf_counter() - traced))

        return Variant(run)

    variants = {f"{layers} layers": compilation(layers) for layers in config.layers}
    results = interleave(variants, rounds=config.rounds)
    parts = {name: np.array(own[1:]).T for name, own in seconds.items()}
    first = next(iter(parts.values()))
    for name, own in parts.items():
        for part, times, base in zip(("trace_and_lower", "compile"), own, first, strict=True):
            results[name][f"{part}_seconds"] = round(statistics.median(times), 3)
            results[name][f"{part}_ratio"] = round(statistics.median(times / base), 3)
    shape = dataclasses.asdict(model) | {"layers": config.layers, "scan_unroll": None}
    print_row("compile", config, {"model": shape, "batch": (rows, model.seq_len)}, results)


@dataclasses.dataclass(frozen=True)
class Dispatch(Rounds):
    """A call of a compiled step against one of jax.jit, with nothing to compute."""

    leaves: int = 200
    """Leaves of the state."""
    calls: int = 200
    """Calls per round."""


def dispatch(config: Dispatch) -> None:
    """Measures the host's work per call, in microseconds: the step adds the batch to every leaf of
    a state of many small leaves, which is next to nothing for the device."""
    batch = {"x": jax.device_put(np.ones(8, np.float32))}

    def add(state, batch):
        return jax.tree.map(lambda x: x + batch["x"], state), {"loss": batch["x"].sum()}

    def state():
        return {f"leaf_{i:03}": jnp.zeros(8) for i in range(config.leaves)}

    functions = {
        "jax.jit": jax.jit(add, donate_argnums=0),
        "compile_step": jt.compile_step(add, state(), batch),
    }
    variants = {
        name: stepping(function, state(), itertools.repeat(batch), calls=config.calls)
        for name, function in functions.items()
    }
    results = interleave(variants, rounds=config.rounds)
    for result in results.values():
        result["microseconds_per_call"] = round(1e3 * result["ms"] / config.calls, 1)
    ours, theirs = (results[name]["microseconds_per_call"] for name in ("compile_step", "jax.jit"))
    about = {"added_microseconds_per_call": round(ours - theirs, 1)}
    print_row("dispatch", config, about, results)


def model_and_rows(shape: str) -> tuple[decoder.DecoderConfig, int]:
    """The model of a shape, whose table has no padding, and the rows of its batch."""
    layers, width, heads, seq_len, rows, vocab_size = SHAPES[shape]
    return decoder.DecoderConfig(
        vocab_size=vocab_size,
        seq_len=seq_len,
        layers=layers,
        width=width,
        heads=heads,
        vocab_multiple=1,
    ), rows


def make_batch(model: decoder.DecoderConfig, rows: int) -> dict[str, np.ndarray]:
    """Random tokens, all of which count, as frequent as words are: 1 / rank (Zipf's law).

    Where all tokens are equally frequent, the sums in the token table's gradient never meet in one
    row, and a step looks faster on a GPU than it is on text.
    """
    shape = (rows, model.seq_len)
    frequency = 1 / np.arange(1, model.vocab_size + 1)
    up_to = np.cumsum(frequency / frequency.sum())[:-1]
    tokens = np.searchsorted(up_to, np.random.default_rng(0).random((2, *shape))).astype(np.int32)
    return {"tokens": tokens[0], "targets": tokens[1], "mask": np.ones(shape, np.float32)}


def unstacked(params: Any) -> dict[str, Any]:
    """Copies jaxtrain's parameters to the hand-written model's: one dict per layer."""
    params = jax.tree.map(np.array, jax.device_get(params))
    count = jax.tree.leaves(params["blocks"])[0].shape[0]
    layers = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(count)]
    rest = {name: params[name] for name in ("embed", "final_norm")}
    return jax.device_put(rest | {"layers": layers})


def hand_written_variant(
    model: decoder.DecoderConfig, params: Any, batch: Any, calls: int
) -> Variant:
    """The floor."""
    optimizer, step = hand_written.make_step(model.heads, LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM)
    params = unstacked(params)
    state = params, optimizer.init(params)
    placed = jax.device_put((batch["tokens"], batch["targets"]))
    compiled = step.lower(*state, *placed).compile()

    def train(state, batch):
        *state, loss = compiled(*state, *batch)
        return state, loss

    facts = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes}
    return stepping(train, state, itertools.repeat(placed), calls=calls, facts=facts)


def jaxtrain_variant(
    model: decoder.DecoderConfig,
    init_fn: Callable[[jax.Array], Any],
    batch: Any,
    calls: int,
    *,
    policy: jt.Policy | None = None,
    optimizer: str = "adamw",
    watch_every: int = 0,
) -> Variant:
    """The library's own step, built as the README builds one, from ``init_fn(rng)``; float32 by
    default."""
    chain = jt.make_optimizer(
        optimizer,
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        clip_norm=CLIP_NORM,
        stacked=jt.Stack().axes,
        watch_every=watch_every,
    )
    state = jt.init_state(init_fn, chain, jax.random.key(0), policy=policy)
    step = jt.build_train_step(decoder.loss_fn(model), chain, policy=policy)
    train = jt.compile_step(step, state, batch)
    placed = itertools.repeat(train.place(batch))
    return stepping(train, state, placed, calls=calls, facts=step_facts(train))
