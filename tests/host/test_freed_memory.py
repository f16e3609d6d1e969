"""Memory that is freed stays with the process: told by its page faults, which can be counted."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.host import memory

FAULTS = """
import resource
import statistics
import sys

import jax
import jax.numpy as jnp

import jaxtrain as jt

if sys.argv[1] == "compiled":  # a step of a user's own, and nothing else
    jt.compile_step(lambda state, batch: (state, {}), jnp.ones(()), jnp.ones(1))

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


@pytest.mark.slow
@pytest.mark.skipif(not memory._is_glibc(), reason="only glibc has these settings")
def test_steps_stop_faulting_pages_in():
    def faults(which):
        command = [sys.executable, "-c", FAULTS, which]
        return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    temporaries = 5120 * 2048 * 4 / 4096  # pages of one matrix, which glibc gives back as it is
    assert faults("as it is") >= temporaries
    assert faults("compiled") < 0.2 * temporaries


def test_nothing_is_set_elsewhere_or_where_the_environment_sets_it(monkeypatch):
    keep_freed_memory = memory.keep_freed_memory.__wrapped__  # as in a process that has not called

    def refuse(name):
        raise AssertionError("malloc was touched")

    monkeypatch.setattr(memory.ctypes, "CDLL", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert not keep_freed_memory()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_is_glibc", lambda: False)
        assert not keep_freed_memory()
    monkeypatch.setattr(memory, "_is_glibc", lambda: True)
    for name, value in (
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_MAX_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1048576"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not keep_freed_memory()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # how many heaps there are is another matter
    with pytest.raises(AssertionError, match="malloc was touched"):
        keep_freed_memory()


@pytest.mark.parametrize("mesh", [None, "data=2"])
def test_a_compiled_step_keeps_what_is_freed(mesh, monkeypatch):
    called = []
    monkeypatch.setattr("jaxtrain.compile.keep_freed_memory", lambda: called.append(mesh))
    mesh = mesh and jt.make_mesh(data=2, devices=jax.devices()[:2])
    state = jax.device_put(0.0, mesh and NamedSharding(mesh, P()))
    jt.compile_step(lambda state, batch: (state, {}), state, np.ones(2), mesh=mesh)
    assert len(called) == 1
