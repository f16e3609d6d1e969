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
      Per variant: median and quartiles in milliseconds, the median of its ratio to the first
      variant within a round, and its facts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant.run()
            if number > 0:
                seconds[name].append(time.perf_counter() - start)
    first = seconds[next(iter(variants))]
    return {
        name: {
            "ms": round(1e3 * statistics.median(times), 2),
            "ms_quartiles": [round(1e3 * q, 2) for q in statistics.quantiles(times, n=4)[::2]],
            "ratio": round(
                statistics.median(t / base for t, base in zip(times, first, strict=True)), 3
            ),
            **variants[name].facts,
        }
        for (name, times) in seconds.items()
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


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
