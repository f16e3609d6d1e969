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
from collections.abc import Mapping
from typing import Any

import jax

from experiments.bench import Variant, against_torch, gpt_work, rates
from experiments.bench import step as ours
from jaxtrain.host import memory
from jaxtrain.host.memory import keep_freed_memory
from jaxtrain.models import decoder
from jaxtrain.precision import Policy

# Lines of a failed process that are shown.
LAST_LINES = 15


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measurement of one framework's (jaxtrain's or torch's) train step at one batch: ``calls``
    steps per timing, and so many timings after one that does not count. PyTorch has adamw alone;
    its step goes through torch.compile where it is ``compiled``."""

    framework: str
    model: decoder.DecoderConfig
    precision: str
    optimizer: str
    backend: str  # JAX's name of the device
    products_rate: float  # FLOP/s of its matrix products
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
    """Returns what :func:`measure` does in a process with variables added to its environment."""
    return last_json_line([sys.executable, "-m", __name__, trial.to_json()], environment)


def last_json_line(command: list[str], environment: Mapping[str, str]) -> Any:
    """Runs a command and returns what the last line of its standard output says."""
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    written = done.stdout.splitlines()
    if done.returncode or not written:
        last = "\n".join((done.stderr.splitlines() or written)[-LAST_LINES:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{last}")
    return json.loads(written[-1])


def measure(trial: Trial) -> dict[str, Any]:
    """Measures rates, memory and compile seconds in this process, unless it runs out of memory. The
    peak of device memory is None where none is counted; that of the host is the process's."""
    keep_freed_memory()
    try:
        return {"jaxtrain": _jaxtrain, "torch": _torch}[trial.framework](trial)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return {"out_of_memory": True}


def _jaxtrain(trial: Trial) -> dict[str, Any]:
    variant = ours.jaxtrain_variant(
        trial.model,
        jax.jit(functools.partial(decoder.init, trial.model)),
        ours.make_batch(trial.model, trial.rows),
        trial.calls,
        policy=Policy.named(trial.precision),
        optimizer=trial.optimizer,
    )
    return timed(trial, variant) | {"measured_peak_bytes": memory.device_memory().get("peak")}


def _torch(trial: Trial) -> dict[str, Any]:
    import torch

    device = "cuda" if trial.backend == "gpu" else "cpu"
    # JAX makes no more than the parameters here, on the CPU.
    params = jax.device_get(jax.jit(lambda: decoder.init(trial.model, jax.random.key(0)))())
    variant = against_torch.torch_variant(
        trial.model,
        params,
        ours.make_batch(trial.model, trial.rows),
        trial.calls,
        compiled=trial.compiled,
        bf16=trial.precision == "bf16",
        device=device,
    )
    found = timed(trial, variant)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return found | {"measured_peak_bytes": peak}


def timed(trial: Trial, variant: Variant) -> dict[str, Any]:
    """Returns the rates and facts of a trial's step, and the peak of host memory."""
    seconds = []
    for _ in range(1 + trial.timings):
        start = time.perf_counter()
        variant.run()
        seconds.append(time.perf_counter() - start)
    first, *times = seconds
    facts = dict(variant.facts)
    if trial.compiled:  # torch.compile compiles in the first step.
        facts.setdefault("compile_seconds", round(max(0.0, first - min(times)), 2))
    facts["host_peak_bytes"] = memory.host_memory()
    work = gpt_work(trial.model, trial.rows, steps=trial.calls)
    return rates(times, work, trial.products_rate) | facts


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
