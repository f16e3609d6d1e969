"""Memory that is freed stays with the process: told by its page faults, which can be counted."""

import subprocess
import sys

import jax
import pytest

from jaxtrain.host import memory

FAULTS = """
import resource
import statistics
import sys

import jax
import jax.numpy as jnp

from jaxtrain.host.memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

@jax.jit
def step(x, y):
    return ((x @ y).T @ x).sum()

x, y = jnp.ones((5120, 8)), jnp.ones((8, 2048))
faults = []
for call in range(64):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x, y).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# Each of the threads of XLA has a heap of its own, which grows on its first turns.
print(statistics.median(faults[32:]))
"""


@pytest.mark.skipif(not memory._is_glibc(), reason="only glibc has these settings")
def test_steps_stop_faulting_pages_in():
    def faults(which):
        command = [sys.executable, "-c", FAULTS, which]
        return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    temporaries = 5120 * 2048 * 4 / 4096  # pages of one matrix, which glibc gives back as it is
    assert faults("as it is") >= temporaries
    assert faults("kept") < 0.2 * temporaries


def test_nothing_is_set_on_an_accelerator_or_under_another_c_library(monkeypatch):
    def refuse(name):
        raise AssertionError("malloc was touched")

    monkeypatch.setattr(memory.ctypes, "CDLL", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert not memory.keep_freed_memory()
    monkeypatch.setattr(memory, "_is_glibc", lambda: False)
    assert not memory.keep_freed_memory()
