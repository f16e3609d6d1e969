"""Memory in use, where the backend or the operating system tells it, and sizes in words."""

import pathlib
import resource
import sys

import jax


def device_memory() -> dict[str, float]:
    """Returns bytes of device memory, the largest over this process's devices.

    Returns:
      ``in_use`` and ``peak`` (since the process began), from ``memory_stats()``; empty where the
      backend keeps no such count (CPU).
    """
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    names = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use"}
    return {
        name: float(max(each[key] for each in stats))
        for name, key in names.items()
        if stats and all(key in each for each in stats)
    }


def host_memory() -> int:
    """Returns the most bytes of memory that this process has had resident."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # Linux counts in ru_maxrss what the parent had when it started this process.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
