"""Step times, rates and utilisation, against sums done by hand."""

import types

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.host.chips import peak_flops
from jaxtrain.run.observe.throughput import Throughput, mfu


def device(kind: str):
    return types.SimpleNamespace(device_kind=kind)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def steps(throughput: Throughput, clock: Clock, *durations: float) -> None:
    for duration in durations:
        clock.now += duration
        throughput.step()


def test_compilation_is_left_out_and_the_window_slides():
    clock = Clock()
    throughput = Throughput(8, window=3, clock=clock)
    steps(throughput, clock, 60.0)  # compiles
    assert (throughput.seconds_per_step, throughput.items_per_second) == (None, None)
    steps(throughput, clock, 2.0)
    assert (throughput.seconds_per_step, throughput.items_per_second) == (2.0, 4.0)
    steps(throughput, clock, 1.0, 1.0, 4.0)
    assert throughput.seconds_per_step == 2.0  # of the last three: 1, 1, 4
    steps(throughput, clock, 4.0, 4.0)
    assert throughput.items_per_second == 2.0


def test_a_pause_is_left_out():
    clock = Clock()
    throughput = Throughput(8, clock=clock)
    steps(throughput, clock, 1.0, 1.0)
    throughput.pause()
    steps(throughput, clock, 50.0, 1.0)
    assert throughput.seconds_per_step == 1.0


def test_mfu_is_model_flops_over_what_the_devices_could_do():
    # 8 chips of 197 TFLOP/s for 2 s could do 3152 TFLOP.
    chips = [device("TPU v5 lite")] * 8
    assert mfu(788e12, 2.0, chips) == pytest.approx(0.25)
    mixed = [device("NVIDIA H100 80GB HBM3"), device("NVIDIA H100 PCIe")]
    assert mfu(1745.4e12, 1.0, mixed) == pytest.approx(1.0)
    half = mfu(788e12, 2.0, [device("NVIDIA H200")], dtype=jnp.float8_e4m3fn)
    assert half == pytest.approx(mfu(788e12, 2.0, [device("NVIDIA H200")]) / 2, rel=1e-3)


def test_what_is_not_known_is_not_guessed():
    known = device("TPU v4")
    assert mfu(1e12, 1.0, jax.devices()) is None  # CPU
    assert mfu(1e12, 1.0, [known, device("NVIDIA A100-SXM4-40GB MIG 1g.5gb")]) is None
    assert mfu(1e12, 1.0, [known], dtype=jnp.float32) is None
    assert mfu(1e12, 1.0, [known], dtype=jnp.float16) is None
    assert mfu(1e12, 0.0, [known]) is None
    assert mfu(1e12, 1.0, []) is None


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 2307 / 2),
        ("NVIDIA A100-SXM4-80GB", 624 / 2),
        ("NVIDIA H100 80GB HBM3", 1979 / 2),
        ("NVIDIA H100 PCIe", 1513 / 2),
        ("NVIDIA H100 NVL", 1671 / 2),
        ("NVIDIA H200", 1979 / 2),
        ("NVIDIA B200", 4500 / 2),
        ("NVIDIA L4", 242 / 2),
    ],
)
def test_peaks_are_those_of_the_data_sheets(kind, tflops):
    """GPU sheets give the figure with sparsity; half of it is dense."""
    assert peak_flops(kind) == pytest.approx(tflops * 1e12, rel=1e-3)


def test_a_call_of_many_steps_counts_for_each():
    ticks = iter([0.0, 8.0, 10.0])
    clock = Throughput(10, clock=lambda: next(ticks))
    for count in (8, 8, 4):
        clock.step(count)
    assert clock.seconds_per_step == pytest.approx(10 / 12)
    assert clock.items_per_second == pytest.approx(12)
