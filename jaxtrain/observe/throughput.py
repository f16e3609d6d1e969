"""Step time, items per second, and model FLOPs utilisation."""

import collections
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

# Dense peak FLOP/s of one device in bfloat16 (and float16), by what JAX calls the device.
# TPU: cloud.google.com/tpu/docs, "System architecture", one page per generation; a v4 device is a
# chip (two cores in one), and so are all after it but TPU7x, whose chips are two devices each.
# NVIDIA: data sheets, "BFLOAT16 Tensor Core", without sparsity.
PEAK_BF16_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA L4": 121e12,
}


def peak_flops(device_kind: str, dtype: Any = jnp.bfloat16) -> float | None:
    """Returns the dense peak FLOP/s of one device, or None where it is not known.

    Args:
      device_kind: ``jax.Device.device_kind``.
      dtype: of the operands. Only the 16-bit types are in the table: float32 products run on
        different units by a setting that a utilisation would have to know.

    >>> peak_flops("NVIDIA H200"), peak_flops("cpu")
    (989400000000000.0, None)
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return None
    return PEAK_BF16_FLOPS.get(device_kind)


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
    """Times steps over a sliding window.

    The first step is not counted (it waits for more than itself), nor is the time between
    :meth:`pause` and the step after it.

    Args:
      items_per_step: tokens or images.
      window: steps to look back over.
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
        self._durations: collections.deque[float] = collections.deque(maxlen=window)

    def step(self) -> None:
        """Notes that a step has ended."""
        now = self._clock()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """Leaves out the time from the last step to the next one."""
        self._last = None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the window; None before two steps have ended."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    @property
    def items_per_second(self) -> float | None:
        """Over the window; None before two steps have ended."""
        seconds = self.seconds_per_step
        return self._items / seconds if seconds else None
