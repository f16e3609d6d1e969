"""The step against a hand-written one: what the framework costs.

Same model, same mathematics, same batch, AdamW with clipping, float32, on one device. The
hand-written step is :mod:`experiments.bench.floor`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

import jaxtrain as jt
from experiments.bench import Rounds, Variant, gpt_work, row, step_facts
from experiments.bench import floor as hand_written
from jaxtrain.models import decoder

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 1.0

# Name: layers, width, heads, tokens per row, rows, vocabulary.
SHAPES = {
    "small": (4, 128, 4, 64, 12, 65),
    "big": (6, 384, 6, 256, 8, 65),
    "gpt2-124m": (12, 768, 12, 1024, 8, 50304),
}


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """jaxtrain's step against a hand-written one, on one device."""

    shape: Literal[tuple(SHAPES)] = "small"  # type: ignore[valid-type]
    """Which model."""
    rounds: int = 30
    calls: int = 5
    """Steps per round."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    model, rows = model_and_rows(config.shape)
    batch = make_batch(model, rows)
    params = jax.jit(lambda: decoder.init(model, jax.random.key(0)))()
    variants = {
        "hand-written": hand_written_variant(model, params, batch, config.calls),
        "jaxtrain": jaxtrain_variant(model, params, batch, config.calls),
        "jaxtrain, layers scanned": jaxtrain_variant(
            dataclasses.replace(model, scan_unroll=1), params, batch, config.calls
        ),
    }
    about = {
        "model": dataclasses.asdict(model),
        "batch": (rows, model.seq_len),
        "dtypes": "float32",
    }
    work = gpt_work(model, rows, steps=config.calls)
    row("step", config, variants, about, work=work)


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
    opt_state = optimizer.init(params)
    tokens, targets = jax.device_put((batch["tokens"], batch["targets"]))
    compiled = step.lower(params, opt_state, tokens, targets).compile()

    def run() -> None:
        nonlocal params, opt_state
        for _ in range(calls):
            params, opt_state, loss = compiled(params, opt_state, tokens, targets)
        jax.block_until_ready((params, loss))

    return Variant(run, {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes})


def jaxtrain_variant(
    model: decoder.DecoderConfig,
    params: Any,
    batch: Any,
    calls: int,
    policy: jt.Policy | None = None,
) -> Variant:
    """The library's own step from given parameters; float32 by default."""
    params = jax.device_get(params)
    return initialised_variant(model, lambda rng: params, batch, calls, policy=policy)


def initialised_variant(
    model: decoder.DecoderConfig,
    init_fn: Callable[[jax.Array], Any],
    batch: Any,
    calls: int,
    *,
    policy: jt.Policy | None = None,
    optimizer: str = "adamw",
    watch_every: int = 0,
) -> Variant:
    """The library's own step, built as the README builds one, from ``init_fn(rng)``."""
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
    placed = train.place(batch)

    def run() -> None:
        nonlocal state
        for _ in range(calls):
            state, metrics = train(state, placed)
        jax.block_until_ready((state, metrics))

    return Variant(run, step_facts(train))
