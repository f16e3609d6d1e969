"""One framework's train step at one batch, measured in a process of its own.

``python -m experiments.bench.trial TRIAL`` prints what it measured as one line of JSON; :func:`run`
starts that process. No other framework's or batch's memory is there, and running out of memory is a
result.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from experiments.bench import Variant, against_torch, gpt_work, machine, rates
from experiments.bench import step as ours
from jaxtrain.host import memory
from jaxtrain.host.memory import keep_freed_memory
from jaxtrain.models import decoder
from jaxtrain.precision import Policy

# Of the matrix products; the fastest is the yardstick.
PRODUCTS_RUNS = 5

# Lines of a failed process that are shown.
LAST_LINES = 15


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measurement of one framework's train step at one batch.

    Args:
      framework: jaxtrain or torch.
      model: the GPT.
      precision: name of a policy.
      optimizer: name of an update rule; PyTorch has adamw alone.
      backend: JAX's name of the device to run on.
      calls: steps per timing.
      timings: number of timings, after one that does not count.
      rows: rows of the batch.
      compiled: whether PyTorch's step goes through torch.compile.
    """

    framework: str
    model: decoder.DecoderConfig
    precision: str
    optimizer: str
    backend: str
    calls: int
    timings: int
    rows: int = 1
    compiled: bool = False

    @property
    def name(self) -> str:
        """The name of the trial in the row."""
        if self.framework == "torch":
            return f"torch, {'compiled' if self.compiled else 'eager'}"
        return f"jaxtrain, remat {self.model.remat}"

    @classmethod
    def from_json(cls, text: str) -> "Trial":
        """Reads what :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"model": decoder.DecoderConfig(**fields["model"])})

    def to_json(self) -> str:
        """Writes the trial for the process's command line."""
        return json.dumps(dataclasses.asdict(self))


def run(trial: Trial, environment: Mapping[str, str]) -> dict[str, Any]:
    """Measures in a process of its own, with variables added to its environment.

    Returns:
      What :func:`measure` does.

    Raises:
      SystemExit: where the process fails other than by running out of memory.
    """
    return last_json_line([sys.executable, "-m", __name__, trial.to_json()], environment)


def last_json_line(command: list[str], environment: Mapping[str, str]) -> Any:
    """Runs a command and returns what the last line of its standard output says.

    Raises:
      SystemExit: where it fails, with its last lines.
    """
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    written = done.stdout.splitlines()
    if done.returncode or not written:
        last = "\n".join((done.stderr.splitlines() or written)[-LAST_LINES:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{last}")
    return json.loads(written[-1])


def measure(trial: Trial) -> dict[str, Any]:
    """Measures in this process.

    Returns:
      ``{"out_of_memory": True}``, or rates, memory and compile seconds. The peak of device memory
      is None where none is counted; that of host memory is the whole process's.
    """
    measure_with = {"jaxtrain": _jaxtrain, "torch": _torch}[trial.framework]
    try:
        return measure_with(trial)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return {"out_of_memory": True}


def _jaxtrain(trial: Trial) -> dict[str, Any]:
    policy = Policy.named(trial.precision)
    return _measured(
        trial,
        lambda: ours.jaxtrain_variant(
            trial.model,
            jax.jit(functools.partial(decoder.init, trial.model)),
            ours.make_batch(trial.model, trial.rows),
            trial.calls,
            policy=policy,
            optimizer=trial.optimizer,
        ),
        peak=lambda: memory.device_memory().get("peak"),
        make_products=lambda: machine.MatrixProducts(policy.compute_dtype),
    )


def _torch(trial: Trial) -> dict[str, Any]:
    import torch

    from experiments.bench import torch_gpt

    device = "cuda" if trial.backend == "gpu" else "cpu"
    if device == "cuda":
        # TF32, as XLA multiplies float32 on a GPU.
        torch.set_float32_matmul_precision("high")
    dtype = getattr(torch, Policy.named(trial.precision).compute_dtype.name)
    # JAX makes no more than the parameters here, on the CPU.
    params = jax.device_get(jax.jit(lambda: decoder.init(trial.model, jax.random.key(0)))())
    return _measured(
        trial,
        lambda: against_torch.torch_variant(
            trial.model,
            params,
            ours.make_batch(trial.model, trial.rows),
            trial.calls,
            compiled=trial.compiled,
            bf16=trial.precision == "bf16",
            device=device,
        ),
        peak=lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None,
        make_products=lambda: torch_gpt.MatrixProducts(
            *machine.products_shape(trial.backend), dtype, device
        ),
    )


def _measured(
    trial: Trial,
    make_variant: Callable[[], Variant],
    *,
    peak: Callable[[], float | None],
    make_products: Callable[[], Any],
) -> dict[str, Any]:
    keep_freed_memory()
    variant = make_variant()
    first = _times(variant.run, 1)[0]
    times = _times(variant.run, trial.timings)
    facts = dict(variant.facts)
    if trial.compiled and "compile_seconds" not in facts:
        # torch.compile compiles in the first step.
        facts["compile_seconds"] = round(max(0.0, first - min(times)), 2)
    facts["measured_peak_bytes"] = peak()
    facts["host_peak_bytes"] = memory.host_memory()
    # Only now, and with the step's memory free again: the products are in no peak, and the largest
    # batch that fits does not depend on them.
    del variant
    products = make_products()
    products()
    rate = products.flops / min(_times(products, PRODUCTS_RUNS))
    dtype = Policy.named(trial.precision).compute_dtype.name
    work = gpt_work(trial.model, trial.rows, steps=trial.calls, dtype=dtype)
    return rates(times, work, rate) | facts | {"products_flops_per_second": float(f"{rate:.4g}")}


def _times(function: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def _is_out_of_memory(error: BaseException | None) -> bool:
    torch = sys.modules.get("torch")
    while error is not None:
        if memory.is_out_of_memory(error):
            return True
        if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        # torch.compile wraps what happens while it tries kernels.
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    print(json.dumps(measure(Trial.from_json(sys.argv[1]))))
