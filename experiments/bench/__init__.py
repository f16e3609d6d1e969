"""Benchmarks that print ratios: ``python -m experiments.bench ROW``.

The variants of a row run in turn, round after round, in one process, so that whatever else the
machine does falls on all of them alike. A row is one line of JSON; those that matter are kept in
``experiments/bench/results`` with the command that made them.
"""

import dataclasses
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Variant:
    """One competitor.

    Args:
      run: does one step and waits for it.
      facts: what is worth knowing of it (memory, compile seconds).
    """

    run: Callable[[], None]
    facts: Mapping[str, Any]


def interleave(variants: Mapping[str, Variant], *, rounds: int) -> dict[str, dict[str, Any]]:
    """Times every variant once per round, after one round that does not count.

    Returns:
      Per variant: median and quartiles of wall time in milliseconds, the median of its ratio to
      the first variant within a round (in wall time and in the process's CPU time), and its facts.
    """
    wall: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            variant.run()
            if number > 0:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    first = next(iter(variants))
    return {
        name: {
            "ms": round(1e3 * statistics.median(wall[name]), 2),
            "ms_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(wall[name], n=4)[::2]],
            "ratio": _ratio(wall[name], wall[first]),
            "cpu_ratio": _ratio(cpu[name], cpu[first]),
            **variant.facts,
        }
        for name, variant in variants.items()
    }


def print_row(name: str, about: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Prints a row: what ran, on what, by which versions, and how the variants did."""
    row = {
        "row": name,
        "command": "python -m experiments.bench " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "versions": {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "optax")},
        "python": sys.version.split()[0],
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **about,
        "variants": results,
    }
    print(json.dumps(row))


def _ratio(times: list[float], base: list[float]) -> float:
    return round(statistics.median(t / b for t, b in zip(times, base, strict=True)), 3)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
