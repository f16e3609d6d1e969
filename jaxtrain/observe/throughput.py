"""Step time, items per second, and model FLOPs utilisation."""

import collections
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

# Dense peak FLOP/s of one device, by what JAX calls the device and by the operands' dtype.
# TPU: cloud.google.com/tpu/docs, "System architecture", "Peak compute per chip", one page per
# generation. A device is a chip (on v4 and v5p both of its cores as one) except on TPU7x, where
# each of a chip's two cores is a device: half of 2307 (bfloat16) and of 4614 (float8) TFLOP/s.
# NVIDIA: the data sheet of each product, "BFLOAT16/FP16/FP8 Tensor Core", without sparsity: where
# a sheet gives the figure with sparsity alone, half of it. A slice of a GPU (MIG) has another name,
# and so is not taken for the whole.
_A100 = {"bfloat16": 312e12, "float16": 312e12}
_HOPPER_SXM = {"bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1978.9e12}
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "TPU v4": {"bfloat16": 275e12},
    "TPU v5 lite": {"bfloat16": 197e12},
    "TPU v5": {"bfloat16": 459e12, "float8": 459e12},
    "TPU v5p": {"bfloat16": 459e12, "float8": 459e12},
    "TPU v6 lite": {"bfloat16": 918e12, "float8": 918e12},
    "TPU7x": {"bfloat16": 1153.5e12, "float8": 2307e12},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float8": 1513e12},
    "NVIDIA H100 NVL": {"bfloat16": 835.5e12, "float16": 835.5e12, "float8": 1670.5e12},
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA B200": {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12},
    "NVIDIA L4": {"bfloat16": 121e12, "float16": 121e12, "float8": 242.5e12},
    "NVIDIA L40S": {"bfloat16": 362.05e12, "float16": 362.05e12, "float8": 733e12},
    "Tesla V100-SXM2-16GB": {"float16": 125e12},
    "Tesla V100-SXM2-32GB": {"float16": 125e12},
    "Tesla T4": {"float16": 65e12},
}


def peak_flops(device_kind: str, dtype: Any = jnp.bfloat16) -> float | None:
    """Returns the dense peak FLOP/s of one device, or None where it is not known.

    Args:
      device_kind: ``jax.Device.device_kind``.
      dtype: of the operands. float32 is in no row: its products run on different units by a setting
        that a utilisation would have to know.

    >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA H200", jnp.float32), peak_flops("cpu")
    (989400000000000.0, None, None)
    """
    name = jnp.dtype(dtype).name
    return PEAK_FLOPS.get(device_kind, {}).get("float8" if name.startswith("float8") else name)


def mfu(
    flops_per_step: float,
    step_seconds: float,
    devices: Iterable[jax.Device],
    *,
    dtype: Any = jnp.bfloat16,
) -> float | None:
    """Model FLOPs utilisation: FLOPs the model needs, over what the devices could have done.

    Args:
      flops_per_step: of the model, recomputation not counted (Chowdhery et al. 2022, appendix B).
      step_seconds: of one step.
      devices: all that the step runs on.
      dtype: of the operands.

    Returns:
      A fraction, or None where a device's peak is not known: never a guess.
    """
    peaks = [peak_flops(device.device_kind, dtype) for device in devices]
    if not peaks or None in peaks or step_seconds <= 0:
        return None
    return flops_per_step / (step_seconds * sum(peaks))


class Throughput:
    """Times calls of one or more steps over a sliding window.

    The first call is not counted (it waits for more than itself), nor is the time between
    :meth:`pause` and the call after it.

    Args:
      items_per_step: tokens or images.
      window: calls to look back over.
      clock: seconds, monotonic.

    >>> ticks = iter([0.0, 1.0, 2.0, 4.0])
    >>> throughput = Throughput(10, clock=lambda: next(ticks))
    >>> for _ in range(4):
    ...     throughput.step()
    >>> throughput.seconds_per_step, throughput.items_per_second
    (1.3333333333333333, 7.5)
    """

    def __init__(
        self,
        items_per_step: int,
        *,
        window: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._items = items_per_step
        self._clock = clock
        self._last: float | None = None
        self._durations: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)

    def step(self, steps: int = 1) -> None:
        """Notes that a call of so many steps has ended."""
        now = self._clock()
        if self._last is not None:
            self._durations.append((now - self._last, steps))
        self._last = now

    def pause(self) -> None:
        """Leaves out the time from the last step to the next one."""
        self._last = None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the window; None before two calls have ended."""
        if not self._durations:
            return None
        seconds, steps = (sum(parts) for parts in zip(*self._durations, strict=True))
        return seconds / steps

    @property
    def items_per_second(self) -> float | None:
        """Over the window; None before two calls have ended."""
        seconds = self.seconds_per_step
        return self._items / seconds if seconds else None
