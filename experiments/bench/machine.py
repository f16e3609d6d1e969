"""Facts about where a row was measured: machine, versions, flags, and matrix-product rate."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import Any

import jax
import jax.extend.backend

from jaxtrain.data.writing import cpus
from jaxtrain.host.memory import keep_freed_memory
from jaxtrain.host.paths import read_if_there
from jaxtrain.run.provenance import commit

PACKAGES = ("jax", "jaxlib", "flax", "optax")
# Of these, what belongs to the backend in use.
BACKEND_PACKAGES = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
}
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX")


def facts() -> dict[str, Any]:
    """Returns what every row says of where it was measured."""
    backend = jax.default_backend()
    versions = {}
    for name in (*PACKAGES, *BACKEND_PACKAGES.get(backend, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "commit": commit(__file__) or "unknown",
        "versions": versions,
        # Of XLA, of its plugin and of what that was built with, as far as the backend tells.
        "backend": f"{backend}: {jax.extend.backend.get_backend().platform_version}".strip(),
        "driver": driver() if backend == "gpu" else None,
        "python": sys.version.split()[0],
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processor": f"{cpus()} cores of {processor()}",
        "freed_memory_kept": keep_freed_memory(),
        "flags": {name: os.environ.get(name) for name in VARIABLES},
    }


def driver() -> str | None:
    """The NVIDIA driver's version; None where there is none."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        found = subprocess.run(query, capture_output=True, text=True).stdout
    except OSError:
        return None
    return found.splitlines()[0].strip() if found else None


def processor() -> str:
    """The processor's name."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = read_if_there(path).decode().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def share_memory() -> None:
    """Keeps JAX, which has not started, from taking three quarters of a GPU's memory before PyTorch
    is asked."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def products_shape(backend: str) -> tuple[int, int]:
    """Sides and number of the matrices of a chain of products that keeps a device busy."""
    return (2048, 2) if backend == "cpu" else (8192, 8)


class MatrixProducts:
    """A chain of square matrix products on one device, the yardstick of utilisation; they
    accumulate as the backend's default has it, as in a step."""

    def __init__(self, dtype: Any):
        self.size, self.count = products_shape(jax.default_backend())
        self.flops = 2 * self.size**3 * self.count
        # Random numbers, as in training: a chip that multiplies equal ones needs less power, and
        # runs faster. Of this variance the chain neither grows nor vanishes.
        matrix = jax.random.normal(jax.random.key(0), (self.size, self.size))
        self._matrix = (matrix / self.size**0.5).astype(dtype)

        def chain(x):
            for _ in range(self.count):
                x = x @ self._matrix
            return x

        self._chain = jax.jit(chain).lower(self._matrix).compile()

    def __call__(self) -> None:
        """Computes the chain and waits for it."""
        jax.block_until_ready(self._chain(self._matrix))


def products_rate(dtype: Any) -> float:
    """FLOP/s of the fastest of a few chains of matrix products."""
    products, times = MatrixProducts(dtype), []
    for _ in range(6):
        start = time.perf_counter()
        products()
        times.append(time.perf_counter() - start)
    return products.flops / min(times)
