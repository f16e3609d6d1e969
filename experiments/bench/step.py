"""Rows on a train step on one device: against a hand-written one, and with nothing to compute."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from experiments.bench import Rounds, Variant, gpt_row, interleave, print_row, step_facts, stepping
from experiments.bench import floor as hand_written
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
class Precisions(Rounds):
    """A preset's step in several precisions, on one device."""

    model: str = "llama-1b"
    """A preset of the decoder; its layers are written out and nothing is computed again."""
    rows: int = 8
    """Rows of the batch."""
    seq_len: int = 2048
    """Tokens per row."""
    precisions: tuple[str, str, *tuple[str, ...]] = ("bf16", "fp8_tensor")
    """Values of an experiment's --precision; the first is what the others are compared with."""
    rounds: int = 8
    calls: int = 4
    """Steps per round."""


def precisions(config: Precisions) -> None:
    """Compares jaxtrain's step with itself, by precision: a vocabulary of 32,000, AdamW."""
    if config.model not in decoder.PRESETS:
        presets = ", ".join(decoder.PRESETS)
        raise SystemExit(f"--model is {config.model!r}, which is no preset: give one of {presets}")
    if len({*config.precisions}) < len(config.precisions):
        raise SystemExit(f"--precisions is {' '.join(config.precisions)}: give each once")
    model = decoder.PRESETS[config.model]()
    sizes = {"vocab_size": 32000, "seq_len": config.seq_len, "scan_unroll": model.layers}
    model = dataclasses.replace(model, **sizes, remat="none")
    policies = {name: jt.Policy.named(name) for name in config.precisions}
    batch, variants = make_batch(model, config.rows), {}
    for name, policy in policies.items():
        init = functools.partial(decoder.init, model)
        variants[name] = jaxtrain_variant(model, init, batch, config.calls, policy=policy)
    first = policies[config.precisions[0]]
    gpt_row("precisions", config, variants, model, config.rows, steps=config.calls, policy=first)


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
) -> Variant:
    """The library's own step, built as the README builds one, from ``init_fn(rng)``; float32 by
    default."""
    chain = jt.make_optimizer(
        optimizer,
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        clip_norm=CLIP_NORM,
        stacked=jt.Stack().axes,
    )
    state = jt.init_state(init_fn, chain, jax.random.key(0), policy=policy)
    step = jt.build_train_step(decoder.loss_fn(model), chain, policy=policy)
    train = jt.compile_step(step, state, batch)
    placed = itertools.repeat(train.place(batch))
    return stepping(train, state, placed, calls=calls, facts=step_facts(train))
