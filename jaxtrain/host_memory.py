"""Memory that XLA frees on a CPU stays with the process: the next step has no pages to fault in.

XLA:CPU takes a step's temporaries from malloc and frees them after the step. glibc gives large
blocks back to the kernel, which hands them out page by page again, zeroed, in the next step.
"""

import ctypes
import os

import jax

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4

# Address space asked for at a time; a page of it costs nothing until it is written.
TOP_PAD = 256 * 2**20


def keep_freed_memory() -> bool:
    """Has glibc's malloc keep what is freed, where JAX computes on the CPU.

    Starts JAX's backend where it is not running yet. Does nothing on an accelerator, and nothing
    under another C library (musl, macOS).

    Blocks above 64 MiB are given back all the same, for glibc does not grow the heaps of threads
    further. With ``MALLOC_ARENA_MAX=1`` in the environment all threads share the one heap that has
    no such limit: steps with large temporaries are faster, small ones a little slower, and the
    process holds the most that it ever used.

    Returns:
      Whether anything was set.
    """
    if jax.default_backend() != "cpu" or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # -1: no heap is ever trimmed. mmap off: large blocks come from the heap.
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_TOP_PAD, TOP_PAD)])


def _is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        return False
