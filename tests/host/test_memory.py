"""Memory figures and sizes in words."""

import subprocess
import sys
import types

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxtrain.host.memory import device_memory, human_bytes, human_count


def test_device_memory_is_that_of_the_fullest_device(monkeypatch):
    def device(in_use, peak):
        stats = {"bytes_in_use": in_use, "peak_bytes_in_use": peak, "bytes_limit": 100}
        return types.SimpleNamespace(memory_stats=lambda: stats)

    monkeypatch.setattr(jax, "local_devices", lambda: [device(10, 70), device(30, 50)])
    assert device_memory() == {"in_use": 30.0, "peak": 70.0, "peak_fraction": 0.7}


@pytest.mark.parametrize("stats", [None, {}])
def test_backends_that_keep_no_count_report_nothing(monkeypatch, stats):
    silent = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [silent])
    assert device_memory() == {}


def test_host_memory_is_the_peak_in_bytes():
    script = (
        "from jaxtrain.host.memory import host_memory\n"
        "before = host_memory()\n"
        "block = bytearray(b'x') * 2**27\n"
        "during = host_memory()\n"
        "del block\n"
        "print(during - before, host_memory() - during)"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, given_back = map(int, output.split())
    assert grown == pytest.approx(2**27, rel=0.1)
    assert abs(given_back) < 2**22  # a peak does not fall (the kernel counts by pages in batches)


SIZES = st.floats(0, 9e17)


def parse(text: str, units: dict[str, float]) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * units[unit]


@given(SIZES.filter(lambda size: size < 2**49))
@example(1023.99 * 1024)
def test_bytes_keep_their_size_and_have_short_numbers(size):
    units = {unit: 1024.0**n for n, unit in enumerate(["B", "KiB", "MiB", "GiB", "TiB"])}
    text = human_bytes(size)
    assert parse(text, units) == pytest.approx(size, rel=0.051, abs=0.5)
    assert float(text.split()[0]) < 1024


@given(SIZES)
@example(999.4)
@example(999.6)
@example(999_600.0)
def test_counts_keep_three_digits(count):
    units = {unit: 1000.0**n for n, unit in enumerate(["", "k", "M", "G", "T", "P"])}
    text = human_count(count)
    assert parse(text, units) == pytest.approx(count, rel=0.0051)
    assert "e+" not in text
