"""Compile time against depth: a GPT's train step of 48 layers against the same of 12.

Layers are scanned, so the program has one layer whatever their number. Tracing with lowering and
compiling are timed apart, each time from nothing.
"""

import dataclasses
import statistics
import time

import jax

import jaxtrain as jt
from experiments.bench import Rounds, Variant, interleave, print_row
from experiments.bench import step as ours
from jaxtrain.models import decoder


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Compiling a train step of many layers against one of few."""

    layers: tuple[int, ...] = (12, 24, 48)
    """Depths; ratios are to the first."""
    unrolled: bool = False
    """Unroll the layers, to see what the scan saves."""
    optimizer: str = "adamw"
    """Which update rule."""
    rounds: int = 7


class Compilation:
    """Traces, lowers and compiles the train step of a model.

    Attributes:
      seconds: of each call, (tracing and lowering, compiling).
    """

    def __init__(self, model: decoder.DecoderConfig, rows: int, optimizer: str):
        self.model, self.batch = model, ours.make_batch(model, rows)
        self.optimizer = jt.make_optimizer(optimizer, 1e-3, stacked=jt.Stack().axes)
        self.state = jt.abstract_state(lambda rng: decoder.init(model, rng), self.optimizer)
        self.seconds: list[tuple[float, float]] = []

    def __call__(self) -> None:
        # A new function each time: JAX traces one that it knows no more.
        step = jt.build_train_step(decoder.loss_fn(self.model), self.optimizer)
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(self.state, self.batch)
        traced = time.perf_counter()
        lowered.compile()
        self.seconds.append((traced - start, time.perf_counter() - traced))


def main(config: Config) -> None:
    """Runs the row and prints it."""
    jax.config.update("jax_enable_compilation_cache", False)
    model, rows = ours.model_and_rows("small")
    runs = {}
    for layers in config.layers:
        deep = dataclasses.replace(
            model, layers=layers, scan_unroll=layers if config.unrolled else 1
        )
        runs[f"{layers} layers"] = Compilation(deep, rows, config.optimizer)
    results = interleave({name: Variant(run) for name, run in runs.items()}, rounds=config.rounds)
    first = next(iter(runs.values()))
    for name, run in runs.items():
        for i, part in enumerate(("trace_and_lower", "compile")):
            times = [seconds[i] for seconds in run.seconds[1:]]
            base = [seconds[i] for seconds in first.seconds[1:]]
            ratios = [a / b for a, b in zip(times, base, strict=True)]
            results[name][f"{part}_seconds"] = round(statistics.median(times), 3)
            results[name][f"{part}_ratio"] = round(statistics.median(ratios), 3)
    about = {
        "model": dataclasses.asdict(model) | {"layers": config.layers, "scan_unroll": None},
        "batch": (rows, model.seq_len),
    }
    print_row("compile", config, about, results)
