"""Memory in use, sizes in words, and keeping on a CPU what XLA frees."""

import contextlib
import ctypes
import functools
import os
import pathlib
import re
import resource
import sys

import jax

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4

# How the environment sets such options (glibc's manual); it takes precedence.
OWN_SETTINGS = r"MALLOC_(TRIM_THRESHOLD|TOP_PAD|MMAP_\w+)_=|glibc\.malloc\.(trim|top_pad|mmap)"

# Address space asked for at a time; a page of it costs nothing until it is written.
TOP_PAD = 256 * 2**20


def device_memory() -> dict[str, float]:
    """Returns bytes of device memory, the largest over this process's devices.

    Returns:
      ``in_use`` and ``peak`` (since the process began), from ``memory_stats()``, and
      ``peak_fraction`` of what there is for JAX; empty where the backend keeps no such count (CPU).
    """
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    names = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use"}
    found = {
        name: float(max(each[key] for each in stats))
        for name, key in names.items()
        if stats and all(key in each for each in stats)
    }
    if "peak" in found and all(each.get("bytes_limit") for each in stats):
        found["peak_fraction"] = max(x["peak_bytes_in_use"] / x["bytes_limit"] for x in stats)
    return found


def device_limit() -> float | None:
    """Returns the bytes that JAX may use of each device, the least over this process's devices;
    None where the backend keeps no such count (CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [each.get("bytes_limit") for each in stats]
    return float(min(limits)) if all(limits) else None


def host_memory() -> int:
    """Returns the most bytes of memory that this process has had resident."""
    with contextlib.suppress(FileNotFoundError):
        # Linux counts in ru_maxrss what the parent had when it started this process.
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_fits(size: int, name: str) -> None:
    """Raises ValueError if ``name``, of ``size`` bytes unpacked, exceeds this machine's memory."""
    if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        sizes = f"{human_bytes(size)}, of {human_bytes(memory)} here"
        raise ValueError(f"unpacked {name} is {sizes}: give less")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that XLA found too little memory, compiling or running a program."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def human_bytes(size: float) -> str:
    """Writes a size in binary units.

    >>> human_bytes(0), human_bytes(1536), human_bytes(80 * 2**30)
    ('0 B', '1.5 KiB', '80.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.95:  # what is shown as 1024.0 belongs to the next unit
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_count(count: float) -> str:
    """Writes a count in decimal units.

    >>> human_count(950), human_count(14_200), human_count(999_900), human_count(6.74e9)
    ('950', '14.2 k', '1 M', '6.74 G')
    """
    for unit in ("", " k", " M", " G", " T", " P"):
        if abs(count) < 999.5:  # from here on three digits would be written 1e+03
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} E"


def human_seconds(seconds: float) -> str:
    """Writes a time that a step may take.

    >>> human_seconds(0.0000412), human_seconds(0.0412), human_seconds(4.12)
    ('41 µs', '41.2 ms', '4.12 s')
    """
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


@functools.cache
def keep_freed_memory() -> bool:
    """Has glibc's malloc keep what is freed, where JAX computes on the CPU, once per process.

    XLA takes a step's temporaries from malloc and frees them after the step. glibc gives large
    blocks back to the kernel, which hands them out page by page again, zeroed, in the next step.

    Starts JAX's backend where it is not running yet. Does nothing on an accelerator, nothing under
    another C library (musl, macOS), and nothing where the environment sets one of these options
    itself: ``MALLOC_TRIM_THRESHOLD_=131072`` has freed memory given back to the kernel.

    Blocks above 64 MiB are given back all the same, for glibc does not grow the heaps of threads
    further. With ``MALLOC_ARENA_MAX=1`` in the environment all threads share the one heap that has
    no such limit: steps with large temporaries are faster, small ones a little slower, and the
    process holds the most that it ever used. Returns whether anything was set.
    """
    environment = "\n".join(f"{name}={value}" for name, value in os.environ.items())
    if jax.default_backend() != "cpu" or not _is_glibc() or re.search(OWN_SETTINGS, environment):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # -1: no heap is ever trimmed. mmap off: large blocks come from the heap.
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1), mallopt(M_TOP_PAD, TOP_PAD)])


def _is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        return False
