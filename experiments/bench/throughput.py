"""Throughput: tokens per second at the best batch of each side, jaxtrain against PyTorch.

Each contender is tried with more and more rows until memory runs out or two batches in a row are
more than 5 % slower than its best. Then the fastest of each side is measured again at its best
batch, turn by turn. Every measurement is a process of its own (:mod:`experiments.bench.trial`).
Compiled programs are kept for the row alone: the search compiles (a batch can reuse what XLA or
Inductor found for a smaller one), the repetitions need not.

jaxtrain rematerialises no more than it takes for one batch to fit; `jaxtrain compare --vary`
measures other settings. PyTorch takes part, eager and compiled, where it is installed and has the
same step: GPT-2's form, AdamW, f32 or bf16.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from experiments.bench import Rounds, print_row, trial
from experiments.bench import step as ours
from jaxtrain import optim
from jaxtrain.host.least import check_least
from jaxtrain.models import decoder
from jaxtrain.precision import POLICIES, Policy
from jaxtrain.run.refusal import refusing

# Those of the row `step`, whose tables have no padding, by this row's names.
OF_STEP = {"tiny": "small", "gpt2-124m": "gpt2-124m"}
MODELS = (*OF_STEP, "llama-1b")

# A batch this much slower than the best so far has fallen; so many in a row end the search.
FALL, FALLS = 0.05, 2

# In turn, until one batch fits in memory.
REMAT_TRIED = ("none", "dots", "full")

# JAX takes three quarters of a GPU's memory unless told otherwise; PyTorch takes it all.
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MOST_MEMORY = "0.95"

# Of a measurement, what repetitions make surer; the rest the search knows best.
RATES = ("tokens_per_second", "step_ms", "mfu")

# A step, and what its batches measured.
Tried = tuple[trial.Trial, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """Tokens per second at the best batch, jaxtrain's step against PyTorch's, on one device."""

    model: Literal[MODELS] = "gpt2-124m"  # type: ignore[valid-type]
    """Which model; tiny is the row step's small one."""
    seq_len: int | None = None
    """Tokens per row; left out, the model's."""
    precision: Literal[POLICIES] = "bf16"  # type: ignore[valid-type]
    """Dtypes; bf16 keeps float32 parameters and moments on both sides."""
    optimizer: Literal[tuple(optim.OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    """Which update rule."""
    rows: tuple[int, ...] = ()
    """Batches to try, in ascending order; left out, 1, 2, 4 and so on."""
    most_rows: int = 1024
    """Largest batch to try; the search ends earlier if memory runs out or the speed falls."""
    rounds: int = 3
    timings: int = 8
    """Timings per process."""
    calls: int = 4
    """Steps per timing."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    with refusing(Config):
        model = make_model(config)
        policy = Policy.named(config.precision)
        check_least(config, most_rows=1, rounds=1, timings=2, calls=1)
        if min(config.rows, default=1) < 1:
            raise ValueError(f"--rows has {min(config.rows)}: a batch has 1 row or more")
    # In a process of its own like the rest: a backend here would hold the device's memory.
    ask = (
        "import jax, json; from experiments.bench import machine; "
        f"rate = machine.products_rate({policy.compute_dtype.name!r}); "
        "print(json.dumps([jax.default_backend(), rate]))"
    )
    backend, rate = trial.last_json_line([sys.executable, "-c", ask], {})
    without_torch = why_not_torch(config, model, backend)
    shared = {
        name: getattr(config, name) for name in ("precision", "optimizer", "calls", "timings")
    }
    step = trial.Trial("jaxtrain", model, backend=backend, products_rate=rate, **shared)
    with tempfile.TemporaryDirectory() as programs:
        variables = environment(programs, backend)
        found = try_all(step, config, variables, with_torch=without_torch is None)
        best = repeat(best_of_each_side(found), config.rounds, variables)
    shape = dataclasses.asdict(model)
    del shape["remat"]
    peaks = [each.get("measured_peak_bytes") for _, measured in found for each in measured]
    about = {
        "model": shape,
        "dtypes": str(policy),
        "mem_fraction": variables.get(MEM_FRACTION),
        "flops_per_token": decoder.flops_per_token(model),
        "flops_formula": decoder.FLOPS_FORMULA,
        "products_flops_per_second": float(f"{rate:.4g}"),
        "mfu_formula": "flops_per_token x tokens_per_second / products_flops_per_second, the "
        "fastest matrix products before all",
        # None where device memory is not counted.
        "measured_peak_bytes": max(filter(None, peaks), default=None),
        "torch": importlib.metadata.version("torch") if without_torch is None else None,
        "torch_skipped": without_torch,
        "best": best,
    }
    if len(best) == 2:
        ratio = best["jaxtrain"]["tokens_per_second"] / best["torch"]["tokens_per_second"]
        about["ratio"] = round(ratio, 3)
    results = {step.name: {"batches": measured} for step, measured in found}
    print_row("throughput", config, about, results)


def try_all(
    step: trial.Trial, config: Config, variables: Mapping[str, str], *, with_torch: bool
) -> list[Tried]:
    """Searches the best batch of every contender, jaxtrain's with no more remat than it needs."""
    found: list[Tried] = []
    for remat in REMAT_TRIED:
        own = dataclasses.replace(step, model=dataclasses.replace(step.model, remat=remat))
        found.append((own, search(functools.partial(measure, own, variables), batches(config))))
        if fastest(found[-1][1]) is not None:
            break
    for compiled in (False, True) if with_torch else ():
        own = dataclasses.replace(step, framework="torch", compiled=compiled)
        found.append((own, search(functools.partial(measure, own, variables), batches(config))))
    return found


def make_model(config: Config) -> decoder.DecoderConfig:
    """The model, with rows as long as asked for."""
    if config.model in OF_STEP:
        model, _ = ours.model_and_rows(OF_STEP[config.model])
    else:
        model = decoder.PRESETS[config.model]()
    if config.seq_len is None:
        return model
    if model.positions == "learned" and config.seq_len > model.seq_len:
        raise ValueError(
            f"--seq-len {config.seq_len} is longer than the {model.seq_len} learned positions of "
            f"{config.model}; use {model.seq_len} or less, or a model with rotary positions"
        )
    return dataclasses.replace(model, seq_len=config.seq_len)


def environment(programs: str, backend: str) -> dict[str, str]:
    """Variables of every process, which keeps compiled programs in a folder."""
    variables = {
        "JAX_COMPILATION_CACHE_DIR": f"{programs}/jax",
        "TORCHINDUCTOR_CACHE_DIR": f"{programs}/torch",
    }
    if backend == "gpu":
        variables[MEM_FRACTION] = os.environ.get(MEM_FRACTION, MOST_MEMORY)
    return variables


def why_not_torch(config: Config, model: decoder.DecoderConfig, backend: str) -> str | None:
    """Why PyTorch takes no part, in a sentence; None where it does."""
    if model.positions != "learned":
        return f"PyTorch's step here has the GPT-2 form alone, and {config.model} has another"
    if config.optimizer != "adamw":
        return f"PyTorch's step here has AdamW alone, not {config.optimizer}"
    if config.precision not in ("f32", "bf16"):
        return f"PyTorch's step here has f32 and bf16 alone, not {config.precision}"
    if backend not in ("cpu", "gpu"):
        return f"PyTorch does not run on JAX's {backend} here"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install -e '.[bench]'"
    import torch

    if backend == "gpu" and not torch.cuda.is_available():
        return "JAX sees a GPU and PyTorch does not: install its CUDA build"
    return None


def batches(config: Config) -> Iterator[int]:
    """Rows to try, ascending."""
    if config.rows:
        return iter(sorted(set(config.rows)))
    doubled = (2**i for i in itertools.count())
    return itertools.takewhile(lambda rows: rows <= config.most_rows, doubled)


def measure(step: trial.Trial, variables: Mapping[str, str], rows: int) -> dict[str, Any]:
    """Measures a batch in a process of its own."""
    # Beside PyTorch JAX makes the parameters alone, and must leave the device to it.
    own = {"JAX_PLATFORMS": "cpu"} if step.framework == "torch" else {}
    result = trial.run(dataclasses.replace(step, rows=rows), {**variables, **own})
    rate = result.get("tokens_per_second")
    found = "out of memory" if rate is None else f"{rate:,} tokens/s"
    print(f"{step.name}, {rows} rows: {found}", file=sys.stderr, flush=True)
    return {"rows": rows, **result}


def search(measure: Callable[[int], dict[str, Any]], rows: Iterable[int]) -> list[dict[str, Any]]:
    """Measures ascending batches until memory runs out or two in a row are 5 % slower than the
    best."""
    results: list[dict[str, Any]] = []
    best, falls = 0.0, 0
    for count in rows:
        results.append(measure(count))
        rate = results[-1].get("tokens_per_second")
        if rate is None:
            break
        falls = falls + 1 if rate < (1 - FALL) * best else 0
        best = max(best, rate)
        if falls == FALLS:
            break
    return results


def fastest(measured: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the result of the batch with the most tokens per second; None if no batch fitted."""
    fitted = [result for result in measured if "tokens_per_second" in result]
    return max(fitted, key=lambda result: result["tokens_per_second"], default=None)


def best_of_each_side(found: Sequence[Tried]) -> dict[str, tuple[trial.Trial, Mapping[str, Any]]]:
    """The fastest step of each framework that fitted, with its best batch."""
    fitted = [(step, result) for step, measured in found if (result := fastest(measured))]
    fitted.sort(key=lambda each: each[1]["tokens_per_second"])
    best = {step.framework: (step, result) for step, result in fitted}  # the last of each
    return dict(sorted(best.items()))


def repeat(
    best: Mapping[str, tuple[trial.Trial, Mapping[str, Any]]],
    rounds: int,
    variables: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Measures each side's best batch again, turn by turn: the medians over the rounds, with the
    memory and compile seconds of the search."""
    summary = {side: {"variant": step.name, **result} for side, (step, result) in best.items()}
    for each in summary.values():
        each |= {f"{name}_rounds": [] for name in RATES}
    for _ in range(rounds):
        for side, (step, result) in best.items():
            again = measure(step, variables, result["rows"])
            if "tokens_per_second" not in again:
                raise SystemExit(
                    f"{step.name} ran out of memory with {result['rows']} rows, which fitted "
                    "before: leave that batch out of --rows"
                )
            for name in RATES:
                summary[side][f"{name}_rounds"].append(again[name])
    for each in summary.values():
        each |= {name: statistics.median(each[f"{name}_rounds"]) for name in RATES}
    return summary
