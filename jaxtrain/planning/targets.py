"""Targets that a step is compiled for: devices of a chip that need not be here.

A target is written ``v5e:4x4`` (TPU generation and topology in chips), ``h100:4x8`` (hosts x GPUs
per host) or ``cpu:8`` (simulated devices). TPU and GPU targets need the compilers alone, which the
extra ``aot`` installs; no chip is looked for.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re

import jax
from jax.experimental import topologies

from jaxtrain.host.chips import CHIPS, Chip
from jaxtrain.host.links import read_links
from jaxtrain.host.quiet import has_tpu, quiet

GPU_TARGETS = pathlib.Path(__file__).parent / "gpu_targets"
INSTALL = "pip install -e '.[aot]'"

# Without these libtpu looks for a TPU to talk to, is loud about it, and lets one process at a time
# load it. Read when it is loaded.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "v5lite": "v5e", "v5litepod": "v5e"}

# TPUs whose chips lie in a plane; those of the others lie in a cube.
_FLAT = ("v5e", "v6e")


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Args:
      topology: TPU: chips along each axis of one slice. GPU: (hosts, GPUs per host). CPU:
        (devices,).
      slices: TPU slices, joined by the network between hosts.
    """

    name: str
    chip: Chip
    topology: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(self.topology) * self.slices * self.chip.cores_per_chip

    @property
    def devices_per_host(self) -> int:
        """Devices that share a host."""
        if self.chip.kind == "gpu":
            return self.topology[1]
        return self.size if self.chip.kind == "cpu" else min(self.size, self.chip.devices_per_host)

    @property
    def hosts(self) -> int:
        """Hosts in all."""
        return self.size // self.devices_per_host

    @property
    def devices_per_island(self) -> int:
        """Devices that reach each other by links (ICI, NVLink) and not by the hosts' network."""
        return self.size // self.slices if self.chip.kind == "tpu" else self.devices_per_host

    @property
    def islands(self) -> int:
        """Slices of a TPU, or hosts: parts with that network between them."""
        return self.size // self.devices_per_island

    def ring(self, group: int) -> int:
        """Devices of the longest ring that a group of so many goes around: on a torus no longer
        than its longest axis, as an axis of a mesh may lie along several."""
        return min(group, max(self.topology))

    def devices(self) -> list[jax.Device]:
        """Returns the devices: real ones for CPU, descriptions that compile for the others. Raises
        ValueError where the compiler is not installed, or does not know the topology."""
        return list(_devices(self))

    def __str__(self) -> str:
        slices = f" x {self.slices} slices" if self.slices > 1 else ""
        return f"{self.name}{slices}"


def parse_target(text: str, *, slices: int = 1, dcn_gbps: float | None = None) -> Target:
    """Reads a target. Raises ValueError for a name that is not known or a topology that cannot be,
    naming what can, and for a network without speed.

    Args:
      text: ``"v5e:4x4"``, ``"h100:4x8"``, ``"cpu:8"``.
      slices: TPU slices of that topology.
      dcn_gbps: a device's share of its host's network in Gb/s, where that is not the chip's usual.

    >>> parse_target("v5e:4x4").size, parse_target("h100:4x8").hosts, parse_target("7x:2x2x1").size
    (16, 4, 8)
    """
    name, mark, layout = re.fullmatch(r"([^:-]*)([:-]?)(.*)", text.strip().lower()).groups()
    name = _ALIASES.get(name, name)
    if name not in CHIPS:
        known = ", ".join(map(_example, CHIPS.values()))
        raise ValueError(f"target {text!r} names no chip that is known: use {known}")
    chip = CHIPS[name]
    if dcn_gbps is not None:
        if dcn_gbps <= 0:
            raise ValueError(f"`dcn_gbps` is {dcn_gbps}: a network's speed is more than 0 Gb/s")
        chip = dataclasses.replace(chip, dcn_bytes_per_s=dcn_gbps * 1e9 / 8)
    if mark == "-":
        layout = _accelerator_layout(text, chip, layout)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", layout):
        raise ValueError(f"target {text!r} has no size: write it like {_example(chip)}")
    sizes = tuple(int(size) for size in layout.split("x"))
    wanted = {"cpu": (1,), "gpu": (2,)}.get(chip.kind, (2,) if chip.name in _FLAT else (3,))
    if chip.kind == "gpu" and len(sizes) == 1:
        sizes = (1, *sizes)
    if len(sizes) not in wanted:
        raise ValueError(
            f"target {text!r} has {len(sizes)} sizes and {name} takes {wanted[0]}: write it like "
            f"{_example(chip)}"
        )
    if chip.kind == "tpu" and not _is_slice(chip, sizes):
        raise ValueError(f"target {text!r} is no slice that Google has: {_SLICES[name in _FLAT]}")
    if slices < 1 or (slices > 1 and chip.kind != "tpu"):
        raise ValueError(f"{slices} slices of {text!r}: only TPU targets have slices, at least 1")
    return Target(f"{name}:{layout}", chip, sizes, slices)


def with_links(target: Target, path: os.PathLike) -> Target:
    """Returns a target whose links take as long as ``jaxtrain check-hosts`` has measured. Raises
    ValueError where they were measured on another chip."""
    found = read_links(path)
    if found.device_kind != target.chip.device_kind or target.chip.kind == "cpu":
        raise ValueError(
            f"`links` was measured on {found.device_kind!r} and the target is {target}: measure "
            f"on a TPU or GPU of the target's kind, {target.chip.device_kind!r}"
        )
    chip = dataclasses.replace(target.chip, measured=found.links)
    return dataclasses.replace(target, chip=chip)


def target_of(chip: str, devices: int) -> Target:
    """Returns so many devices of a chip of known speed: GPUs on whole hosts, or a TPU slice. Raises
    ValueError where there is none."""
    row = CHIPS.get(name := _ALIASES.get(chip, chip), CHIPS["cpu"])
    if row.kind == "cpu":
        raise ValueError(
            f"`target` is {chip!r}: name one chip, such as h100 or v5e, without a size"
        )
    if row.kind == "gpu":
        fewest = -(-devices // row.devices_per_host)
        hosts = next(n for n in range(fewest, devices + 1) if devices % n == 0)
        return parse_target(f"{name}:{hosts}x{devices // hosts}")
    try:
        return parse_target(f"{name}-{devices * (1 if name in _FLAT else 2) // row.cores_per_chip}")
    except ValueError:
        why = f"no slice of {chip} has so many; {_SLICES[name in _FLAT]}"
        raise ValueError(f"`devices` has {devices}: {why}") from None


# By cloud.google.com/tpu/docs/v5e, v6e, v4 and v5p; the compiler itself takes any.
_SMALL = {(1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)}
_SLICES = {
    True: "1x1, or both sides are 2, 4, 8 or 16, one at most twice the other",
    False: "all sides are multiples of 4, or it is one of "
    + ", ".join("x".join(map(str, sizes)) for sizes in sorted(_SMALL)),
}


def _is_slice(chip: Chip, sizes: tuple[int, ...]) -> bool:
    if chip.name in _FLAT:
        return {*sizes} == {1} or ({*sizes} <= {2, 4, 8, 16} and max(sizes) <= 2 * min(sizes))
    return all(n % 4 == 0 for n in sizes) or tuple(sorted(sizes)) in _SMALL


def grown(topology: tuple[int, ...]) -> tuple[int, ...]:
    """The topology of twice as many TPU chips: its shortest side doubles.

    >>> grown((2, 2, 4)), grown((4, 8))
    ((2, 4, 4), (8, 8))
    """
    shortest, *others = sorted(topology)
    return tuple(sorted((2 * shortest, *others)))


def _accelerator_layout(text: str, chip: Chip, number: str) -> str:
    """The topology of an accelerator type: v5litepod-16 has 16 chips, v5p-16 has 16 cores."""
    cores = 1 if chip.name in _FLAT else 2
    if chip.kind == "tpu" and re.fullmatch(r"[1-9]\d*", number) and int(number) % cores == 0:
        chips = int(number) // cores
        sizes = (2, 2) if chip.name in _FLAT else (1, 2, 2)
        while math.prod(sizes) < chips:
            sizes = grown(sizes)
        if chips == 1:
            sizes = (1,) * len(sizes)
        if math.prod(sizes) == chips and _is_slice(chip, sizes):
            return "x".join(map(str, sizes if chips > 4 else sizes[::-1]))
    raise ValueError(f"target {text!r} has no known topology: write it like {_example(chip)}")


@functools.cache
def _devices(target: Target) -> tuple[jax.Device, ...]:
    return {"tpu": _tpu_devices, "gpu": _gpu_devices, "cpu": _cpu_devices}[target.chip.kind](target)


def _tpu_devices(target: Target) -> tuple[jax.Device, ...]:
    _need("TPU", "libtpu")
    options = {"num_slices": target.slices} if target.slices > 1 else {}
    if target.chip.name == "v4":
        # A device is a chip, as on the machines themselves, and not one of its cores.
        options["chip_config_name"] = "megacore"
    if math.prod(target.topology) == 1:
        # The compiler's hosts are 2 x 2 chips unless told otherwise.
        options["chips_per_host_bounds"] = (1, 1, 1)
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        devices = _describe(target, platform="tpu", topology_name=target.name, **options)
        if flags is not None:
            # libtpu reads XLA_FLAGS when it first compiles, and ends the process for one that it
            # does not know, such as all those of other chips. Its own are in LIBTPU_INIT_ARGS.
            alone = jax.sharding.SingleDeviceSharding(devices[0])
            jax.jit(lambda x: x).lower(
                jax.ShapeDtypeStruct((), "float32", sharding=alone)
            ).compile()
        return devices
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


def _gpu_devices(target: Target) -> tuple[jax.Device, ...]:
    _need("GPU", "jax_cuda12_plugin", "jax_cuda13_plugin")
    config = (GPU_TARGETS / f"{target.chip.name}.txtpb").read_text()
    hosts, gpus = target.topology
    return _describe(target, platform="cuda", target_config=config, topology=f"1x{hosts}x{gpus}")


def _describe(target: Target, **options) -> tuple[jax.Device, ...]:
    try:
        with quiet():
            _start()
            return tuple(topologies.get_topology_desc(**options).devices)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"target {target} cannot be: {reason}; write it like {_example(target.chip)}"
        ) from None


def _cpu_devices(target: Target) -> tuple[jax.Device, ...]:
    # Too late where JAX has its devices already: then what is there has to do.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", target.size)
    with quiet():
        _start()
        devices = jax.devices("cpu")
    if len(devices) < target.size:
        raise ValueError(
            f"target {target} needs {target.size} simulated devices and JAX has started with "
            f"{len(devices)}: plan before anything else asks JAX for devices"
        )
    return tuple(devices[: target.size])


def stay_on_cpu() -> None:
    """Keeps JAX itself on the CPU: a program that only plans must not take hold of a chip.

    Without effect where JAX has its devices already.
    """
    jax.config.update("jax_platforms", "cpu")


def _start() -> None:
    """Lets JAX find its own devices, those that this process may train on after it has planned.

    With them, the plugins of all accelerators are loaded. What libtpu is told would keep it from a
    TPU that is here.
    """
    platforms = jax.config.jax_platforms
    if not has_tpu() or (platforms and "tpu" not in platforms):
        for variable, value in LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    jax.devices()


def _need(compiler: str, *modules: str) -> None:
    if not any(map(importlib.util.find_spec, modules)):
        raise ValueError(f"the {compiler} compiler is not installed: {INSTALL}")


def _example(chip: Chip) -> str:
    layout = {"v5e": "4x4", "v6e": "4x4", "tpu7x": "2x2x1", "cpu": "8"}
    default = "4x8 (hosts x GPUs)" if chip.kind == "gpu" else "4x4x4"
    return f"{chip.name}:{layout.get(chip.name, default)}"
