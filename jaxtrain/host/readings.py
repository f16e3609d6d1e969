"""Reads sensors of this process's devices and its host: utilisation, temperature, power, memory.

Each source is a function without arguments that returns readings by name; readings that a
sensor lacks are left out. Sources may take milliseconds, so they are for a thread.
"""

import contextlib
import importlib
import logging
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.host.paths import exists, listed

logger = logging.getLogger(__name__)

Source = Callable[[], dict[str, float]]

PROC, CGROUP = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")
POWERCAP = pathlib.Path("/sys/class/powercap")


def sources(
    devices: Sequence[jax.Device], *, disk_before: Mapping[str, float] = {}
) -> list[Source]:
    """Returns what can be read of some local devices and of the host, whose bytes from and to disk
    count from :func:`disk` then."""
    platform = devices[0].platform
    found = {"gpu": nvidia, "tpu": tpu}.get(platform, lambda devices: None)(devices)
    readers = (found, host(disk_before=disk_before))
    return [source for source in readers if source is not None]


def nvidia(
    devices: Sequence[jax.Device], clock: Callable[[], float] = time.monotonic
) -> Source | None:
    """NVIDIA's Management Library (NVML), of the GPUs that are given.

    Returns a source of ``device/utilisation`` (the part of the time in which some kernel ran, the
    least of the GPUs), ``device/temperature`` (degrees Celsius, the highest), ``device/power``
    (watts, the sum) and, from its second reading on, ``device/energy`` (the integral of that, in
    kWh); None where the library or its package is missing, which is said.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ModuleNotFoundError:
        logger.warning(
            "no readings of GPUs: the package nvidia-ml-py is missing; pip install -e '.[nvml]'"
        )
        return None
    except nvml.NVMLError as error:
        logger.warning("no readings of GPUs: %s", error)
        return None
    handles = [_nvml_handle(nvml, device) for device in devices]
    before, energy = None, 0.0

    def of_each(ask: Callable[[Any], float]) -> list[float]:
        found = []
        for handle in handles:
            with contextlib.suppress(nvml.NVMLError):  # not every GPU has every sensor
                found.append(ask(handle))
        return found

    def read() -> dict[str, float]:
        nonlocal before, energy
        each = {
            "device/utilisation": (min, lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100),
            "device/temperature": (
                max,
                lambda h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
            ),
            "device/power": (sum, lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000),
        }
        found = {name: (join, of_each(ask)) for name, (join, ask) in each.items()}
        told = {name: join(values) for name, (join, values) in found.items() if values}
        if "device/power" in told:
            now = clock(), told["device/power"]
            if before is not None:
                energy += (now[0] - before[0]) * (now[1] + before[1]) / 2 / 3.6e6
                told["device/energy"] = energy
            before = now
        return told

    return read


def _nvml_handle(nvml: Any, device: jax.Device) -> Any:
    """NVML's handle of a device of JAX, which counts those that CUDA_VISIBLE_DEVICES leaves."""
    number = device.local_hardware_id
    names = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    name = names[number] if number < len(names) else str(number)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


def tpu(devices: Sequence[jax.Device]) -> Source | None:
    """The monitoring library of libtpu, of all chips of this host. Returns a source of
    ``device/utilisation`` (duty cycle, the least of the chips) and ``device/tensorcore``
    (utilisation of the matrix units, the least); None where this libtpu has no such library."""
    del devices
    try:
        monitoring = importlib.import_module("libtpu.sdk").tpumonitoring
        names = {"device/utilisation": "duty_cycle_pct", "device/tensorcore": "tensorcore_util"}
        there = set(monitoring.list_supported_metrics())
    except (ImportError, AttributeError, RuntimeError):
        return None

    def read() -> dict[str, float]:
        found = {}
        for name, metric in names.items():
            # Percentages as texts, none before a program has run.
            with contextlib.suppress(ValueError, RuntimeError):
                values = monitoring.get_metric(metric).data() if metric in there else ()
                if values:
                    found[name] = min(float(value) for value in values) / 100
        return found

    return read


def host(
    clock: Callable[[], float] = time.monotonic, *, disk_before: Mapping[str, float] = {}
) -> Source | None:
    """The host, from /proc; None where there is none.

    Returns a source of ``host/cpu`` (the part of all cores that is busy, since the reading before),
    ``host/memory_fraction`` (in use, of the machine or of what its control group may have,
    whichever is fuller), ``host/process_memory`` (bytes), ``host/process_cores`` (cores that this
    process keeps busy), ``host/disk_read`` and ``host/disk_written`` (bytes of this process, from
    its beginning or from ``disk_before``), ``host/network_received`` and ``host/network_sent``
    (bytes of the host through interfaces that have a route, from the first reading on) and, where
    RAPL can be read, ``host/energy`` (kWh of CPU packages and memory, from the first reading on).
    """
    if not exists(PROC / "stat"):
        return None
    before: dict[str, tuple[float, float]] = {}
    network, energy = _since(_network), _energy()

    def rate(name: str, part: float, whole: float) -> dict[str, float]:
        last = before.get(name)
        before[name] = (part, whole)
        if last is None or whole <= last[1]:
            return {}
        return {name: (part - last[0]) / (whole - last[1])}

    def read() -> dict[str, float]:
        # user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5)); guests are in user.
        with (PROC / "stat").open() as stat:
            ticks = [int(x) for x in stat.readline().split()[1:9]]
        resident = int((PROC / "self/statm").read_text().split()[1])
        times = os.times()
        return {
            **rate("host/cpu", sum(ticks) - ticks[3] - ticks[4], sum(ticks)),
            **rate("host/process_cores", times.user + times.system, clock()),
            "host/memory_fraction": max(_machine_memory(), _group_memory()),
            "host/process_memory": float(resident * os.sysconf("SC_PAGE_SIZE")),
            **{name: count - disk_before.get(name, 0.0) for name, count in disk().items()},
            **network(),
            **energy(),
        }

    return read


def _since(count: Source) -> Source:
    """Takes what a count was at its first reading from all of its readings."""
    first: dict[str, float] = {}
    return lambda: {k: v - first.setdefault(k, v) for k, v in count().items()}


def disk() -> dict[str, float]:
    """What this process has read from and written to storage (proc_pid_io(5)); not what the page
    cache had, and no network file system."""
    try:
        text = (PROC / "self/io").read_text()
    except OSError:  # a kernel without accounting, or a container that hides it
        return {}
    found = {line.partition(":")[0]: float(line.split()[1]) for line in text.splitlines()}
    return {"host/disk_read": found["read_bytes"], "host/disk_written": found["write_bytes"]}


def _network() -> dict[str, float]:
    """Bytes through the interfaces that packets are routed through: neither the loopback nor the
    parts of a bond, whose bytes would count twice."""
    try:
        routes = (PROC / "net/route").read_text().splitlines()[1:]
        lines = (PROC / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return {}
    routed = {line.split()[0] for line in routes if line.split()}
    of = {name.strip(): numbers.split() for name, _, numbers in (x.partition(":") for x in lines)}
    kept = [of[name] for name in routed & of.keys()]
    if not kept:
        return {}
    received, sent = (sum(float(numbers[i]) for numbers in kept) for i in (0, 8))
    return {"host/network_received": received, "host/network_sent": sent}


def _energy() -> Source:
    """RAPL's counters of CPU packages and of their memory, which begin again at 0 from time to
    time; nothing where there are none, or root alone may read them."""
    most, last, joules = {}, {}, 0.0
    for path in listed(POWERCAP, "*-rapl:*"):
        with contextlib.suppress(OSError, ValueError):
            if re.match("package|dram", (path / "name").read_text()):
                most[path] = int((path / "max_energy_range_uj").read_text())
                last[path] = int((path / "energy_uj").read_text())

    def read() -> dict[str, float]:
        nonlocal joules
        for path, before in last.items():
            now = last[path] = int((path / "energy_uj").read_text())
            joules += 1e-6 * (now - before + (most[path] if now < before else 0))
        return {"host/energy": joules / 3.6e6} if last else {}

    return read


def _machine_memory() -> float:
    lines = (line.split() for line in (PROC / "meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    return 1 - kib["MemAvailable"] / kib["MemTotal"]


def _group_memory() -> float:
    """Returns the used share of a container's memory (cgroup v2), without droppable file pages."""
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" where there is none
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return (used - int(stat.get("inactive_file", 0))) / limit
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def of_all(
    each: Mapping[int, Mapping[str, float]], hosts: Mapping[int, str] | None = None
) -> dict[str, float]:
    """Takes the readings of several processes together, by process. Returns of a reading the worst,
    and where there are several processes which one has it, as ``NAME_process``: the least
    utilisation, the most of all else. Power, memory of processes and what disks have moved are
    summed over the processes; energy of CPUs and what the network has moved over the hosts.

    Args:
      hosts: the name of each process's host; None where each has one of its own.

    >>> of_all({0: {"device/temperature": 60.0}, 1: {"device/temperature": 84.0}})
    {'device/temperature': 84.0, 'device/temperature_process': 1}
    >>> both = {0: {"host/network_sent": 3.0}, 1: {"host/network_sent": 4.0}}
    >>> of_all(both), of_all(both, {0: "a", 1: "a"})
    ({'host/network_sent': 7.0}, {'host/network_sent': 4.0})
    """
    found: dict[str, float] = {}
    for name in sorted({name for of in each.values() for name in of}):
        values = {process: of[name] for process, of in each.items() if name in of}
        if name in OF_HOST and hosts:
            of_host: dict[str, float] = {}
            for process, value in values.items():
                host = hosts.get(process, str(process))
                of_host[host] = max(value, of_host.get(host, value))
            values = of_host
        if name in SUMS | OF_HOST:
            found[name] = sum(values.values())
            continue
        worst = (min if name in LEAST else max)(values, key=values.__getitem__)
        found[name] = values[worst]
        if len(each) > 1:
            found[f"{name}_process"] = worst
    return found


SUMS = frozenset({"device/power", "device/energy", "host/process_memory"})
SUMS |= {"host/disk_read", "host/disk_written"}
# A host has one of these, whichever of its processes reads it.
OF_HOST = frozenset({"host/energy", "host/network_received", "host/network_sent"})
LEAST = frozenset({"device/utilisation", "device/tensorcore"})
