"""Benchmarks that print ratios: ``python -m experiments.bench ROW``.

The variants of a row run in turn, round after round, in one process, so that whatever else the
machine does falls on all of them alike. Memory that is freed stays with the process, as in the
experiments (:mod:`jaxtrain.host.memory`). A row is one line of JSON; those that matter are kept in
``experiments/bench/results`` with the command that made them.
"""

import dataclasses
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from experiments.bench import machine
from jaxtrain.compile import CompiledStep
from jaxtrain.host import memory
from jaxtrain.host.memory import keep_freed_memory
from jaxtrain.models import decoder
from jaxtrain.precision import Policy

MATRIX_PRODUCTS = "matrix products"
FLOAT32 = Policy()


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Flags of every row."""

    rounds: int = 15
    """Timed rounds."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One competitor: what runs it and waits for it, and facts about it (:func:`step_facts`)."""

    run: Callable[[], None]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work that every variant of a row does in one run, from which rates are computed: train
    steps, and of each the tokens and the model's FLOPs, without whatever else a variant computes,
    by the named formula. ``dtype`` is of the operands of most products."""

    steps: int
    tokens: int
    flops: float
    formula: str
    dtype: str = "float32"
    devices: int = 1


def stepping(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    calls: int = 1,
    facts: Mapping[str, Any] = {},
) -> Variant:
    """Takes ``calls`` steps in each run, ``step(state, batch) -> (state, metrics)``, on from where
    the run before has stopped."""
    batches = iter(batches)

    def run() -> None:
        nonlocal state
        for batch in itertools.islice(batches, calls):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return Variant(run, facts)


def row(
    name: str,
    config: Rounds,
    variants: Mapping[str, Variant],
    about: Mapping[str, Any],
    *,
    work: Work | None = None,
    children: bool = False,
) -> None:
    """Times the variants as :func:`interleave` does, and prints them as :func:`print_row` does."""
    results = interleave(variants, rounds=config.rounds, work=work, children=children)
    print_row(name, config, about, results, work=work)


def gpt_row(
    name: str,
    config: Rounds,
    variants: Mapping[str, Variant],
    model: decoder.DecoderConfig,
    rows: int,
    *,
    steps: int,
    policy: Policy = FLOAT32,
    **about: Any,
) -> None:
    """Does as :func:`row` for variants that each take ``steps`` train steps of a GPT in a run."""
    shape = {"model": dataclasses.asdict(model), "batch": (rows, model.seq_len)}
    work = gpt_work(model, rows, steps=steps, dtype=policy.compute_dtype.name)
    row(name, config, variants, shape | {"dtypes": str(policy)} | about, work=work)


def interleave(
    variants: Mapping[str, Variant],
    *,
    rounds: int,
    work: Work | None = None,
    children: bool = False,
) -> dict[str, dict[str, Any]]:
    """Times every variant once per round, after one round that does not count.

    With ``work``, a chain of matrix products takes part as one more variant, and every other one
    has its rates as well. With ``children`` the variants are processes of their own, which may need
    the device to themselves: this one leaves it alone.

    Returns:
      Per variant: median and quartiles of wall time in milliseconds, the median of its ratio to
      the first variant within a round (in wall time, and in CPU time of this process or of the
      children that ended), the median of minor page faults of the same, and its facts;
      with ``work`` also those times per step, tokens per second, and the share of the best rate of
      matrix products that the model's FLOPs reach (``mfu``).
    """
    if not children:
        keep_freed_memory()
    products = machine.MatrixProducts(work.dtype) if work else None
    variants = dict(variants) | ({MATRIX_PRODUCTS: Variant(products)} if products else {})
    found: dict[str, list[tuple]] = {name: [] for name in variants}
    whose = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    for number in range(rounds + 1):
        for name, variant in variants.items():
            before, start = resource.getrusage(whose), time.perf_counter()
            variant.run()
            seconds, after = time.perf_counter() - start, resource.getrusage(whose)
            if number > 0:
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                found[name].append((seconds, cpu, after.ru_minflt - before.ru_minflt))
    rate = products.flops / min(found.pop(MATRIX_PRODUCTS))[0] if products else None
    first_wall, first_cpu, _ = zip(*next(iter(found.values())), strict=True)
    results = {}
    for name, rounds_of in found.items():
        times, cpu, faults = zip(*rounds_of, strict=True)
        results[name] = {
            "ms": milliseconds(statistics.median(times)),
            "ms_quartiles": quartiles(times),
            "ratio": _ratio(times, first_wall),
            "cpu_ratio": _ratio(cpu, first_cpu),
            "page_faults": round(statistics.median(faults)),
        }
        if work:
            results[name] |= rates(times, work, rate)
        results[name] |= variants[name].facts
    if work:
        results[MATRIX_PRODUCTS] = {
            "flops_per_second": float(f"{rate:.4g}"),
            "size": products.size,
            "dtype": work.dtype,
        }
    return results


def rates(times: Sequence[float], work: Work, products_rate: float) -> dict[str, Any]:
    """Returns the rates of runs of ``work`` that took ``times`` seconds: step time, tokens, and MFU
    against the FLOP/s of matrix products on one device."""
    seconds = statistics.median(times) / work.steps
    return {
        "step_ms": milliseconds(seconds),
        "step_ms_quartiles": quartiles([t / work.steps for t in times]),
        "tokens_per_second": round(work.tokens / seconds),
        "mfu": round(work.flops / seconds / (products_rate * work.devices), 4),
    }


def gpt_work(
    model: decoder.DecoderConfig, rows: int, *, steps: int, dtype: str = "float32"
) -> Work:
    """The work of ``steps`` train steps of a GPT on batches of ``rows``."""
    tokens = rows * model.seq_len
    flops = float(decoder.flops_per_token(model) * tokens)
    return Work(steps, tokens, flops, decoder.FLOPS_FORMULA, dtype)


def step_facts(train: CompiledStep) -> dict[str, Any]:
    """Returns the memory of a compiled step on one device, and its compile time in seconds."""
    return {
        "compiled_bytes": train.memory_bytes,
        "temp_bytes": train.compiled.memory_analysis().temp_size_in_bytes,
        "compile_seconds": round(train.compile_seconds, 2),
    }


def print_row(
    name: str,
    config: Rounds,
    about: Mapping[str, Any],
    results: Mapping[str, Any],
    *,
    work: Work | None = None,
) -> None:
    """Prints a row: what ran (``about``: model, shapes, mesh), on what, by which versions, and how
    the variants did. Rows of other processes give their ``measured_peak_bytes`` in ``about``."""
    row = {
        "row": name,
        "command": "python -m experiments.bench " + " ".join(sys.argv[1:]),
        **machine.facts(),
        "config": dataclasses.asdict(config),
        "mesh": "one device",
        **about,
    }
    if work:
        row |= {
            "tokens_per_step": work.tokens,
            "flops_per_step": work.flops,
            "flops_formula": work.formula,
            "mfu_formula": "flops_per_step / step seconds / (flops_per_second of the fastest "
            "matrix products of the same rounds x devices)",
        }
    # Since the process began, so of whichever variant needs most; None where it is not counted.
    row.setdefault("measured_peak_bytes", memory.device_memory().get("peak"))
    print(json.dumps(row | {"variants": results}))


def milliseconds(seconds: float) -> float:
    """Seconds as milliseconds of four digits or more."""
    return round(1e3 * seconds, 2 if seconds >= 0.01 else 4)


def quartiles(seconds: Sequence[float]) -> list[float]:
    """The first and the third quartile, in milliseconds."""
    return [milliseconds(q) for q in statistics.quantiles(seconds, n=4)[::2]]


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    return round(statistics.median(t / b for t, b in zip(times, base, strict=True)), 3)
