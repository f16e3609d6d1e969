"""Step time, items per second, and model FLOPs utilisation."""

import collections
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.host.chips import peak_flops


def mfu(
    flops_per_step: float | None,
    step_seconds: float,
    devices: Iterable[jax.Device],
    *,
    dtype: Any = jnp.bfloat16,
) -> float | None:
    """Model FLOPs utilisation: FLOPs the model needs, over what the devices could have done.
    Returns a fraction, or None where that or a device's peak is not known: never a guess.

    Args:
      flops_per_step: of the model, recomputation not counted (Chowdhery et al. 2022, appendix B);
        None where unknown.
    """
    peaks = [peak_flops(device.device_kind, dtype) for device in devices]
    if not peaks or None in (*peaks, flops_per_step) or step_seconds <= 0:
        return None
    return flops_per_step / (step_seconds * sum(peaks))


# Of the parts of an octave in which step times are counted.
PARTS = 16


def octave(seconds: float) -> int:
    """The number of the interval, a sixteenth of an octave, that a step time lies in.

    >>> octave(1.0), octave(1.04), octave(1.05), octave(0.5)
    (0, 0, 1, -16)
    """
    return math.floor(PARTS * math.log2(max(seconds, 1e-9)))


class Throughput:
    """Times calls of one or more steps over a sliding window of calls.

    The first call is not counted (it waits for more than itself), nor is the time between
    :meth:`pause` and the call after it.

    Attributes:
      times: how many of all steps took how long, by :func:`octave`.

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
        self.times: collections.Counter[int] = collections.Counter()

    def step(self, steps: int = 1) -> None:
        """Notes that a call of so many steps has ended."""
        now = self._clock()
        if self._last is not None:
            self._durations.append((now - self._last, steps))
            self.times[octave((now - self._last) / steps)] += steps
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
