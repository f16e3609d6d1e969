"""Published figures of accelerators: one row per chip that can be planned for."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxtrain.host.links import Link

GIB = 2**30

# Dense peak FLOP/s of one device, by what JAX calls the device and by the operands' dtype.
# TPU: cloud.google.com/tpu/docs, "System architecture", "Peak compute per chip", one page per
# generation. A device is a chip (on v4 and v5p both of its cores as one) except on TPU7x, where
# each of a chip's two cores is a device: half of 2307 (bfloat16) and of 4614 (float8) TFLOP/s.
# NVIDIA: the data sheet of each product, "BFLOAT16/FP16/FP8 Tensor Core", without sparsity: where
# a sheet gives the figure with sparsity alone, half of it. A slice of a GPU (MIG) has another name,
# and so is not taken for the whole.
_A100 = {"bfloat16": 312e12, "float16": 312e12}
_HOPPER_SXM = {"bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1978.9e12}
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "TPU v4": {"bfloat16": 275e12},
    "TPU v5 lite": {"bfloat16": 197e12},
    "TPU v5": {"bfloat16": 459e12, "float8": 459e12},
    "TPU v5p": {"bfloat16": 459e12, "float8": 459e12},
    "TPU v6 lite": {"bfloat16": 918e12, "float8": 918e12},
    "TPU7x": {"bfloat16": 1153.5e12, "float8": 2307e12},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float8": 1513e12},
    "NVIDIA H100 NVL": {"bfloat16": 835.5e12, "float16": 835.5e12, "float8": 1670.5e12},
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA B200": {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12},
    "NVIDIA GB200": {"bfloat16": 2500e12, "float16": 2500e12, "float8": 5000e12},
    "NVIDIA L4": {"bfloat16": 121e12, "float16": 121e12, "float8": 242.5e12},
    "NVIDIA L40S": {"bfloat16": 362.05e12, "float16": 362.05e12, "float8": 733e12},
    "Tesla V100-SXM2-16GB": {"float16": 125e12},
    "Tesla V100-SXM2-32GB": {"float16": 125e12},
    "Tesla T4": {"float16": 65e12},
}


# Rows of one table: equal only to themselves.
@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """One device as JAX counts them, and what it can do at best.

    Args:
      name: in targets: ``"v5e"``.
      kind: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
      device_kind: what JAX calls it.
      memory_bytes: device memory that a program may fill; None where nothing limits it.
      flops: dense peak FLOP/s by dtype of the operands, ``"float8"`` for both 8-bit formats.
        ``"float32"`` is at JAX's default precision of products, in which TPUs multiply in bfloat16
        and NVIDIA GPUs in TF32. Empty where not known.
      hbm_bytes_per_s: device memory bandwidth, reads and writes together.
      link_bytes_per_s: what one device sends in one direction within a pod or host. TPU: over one
        link of its torus (a device has two per axis of the torus, one each way round). GPU: over
        all of its NVLinks together, to whichever of its peers.
      links: how many directions a ring of devices on one mesh axis can use at once: 2 on a torus,
        1 where ``link_bytes_per_s`` is the whole port.
      dcn_bytes_per_s: each device's share of its host's network, one direction: between slices of
        TPUs, between hosts of GPUs.
      host_bytes_per_s: between a device and the memory of its host, one direction; None where it is
        not published.
      efficiency: the share of its peak that each kind of operation is taken to reach when time is
        predicted: ``"matmul"``, ``"attention"`` (of all tiles of a kernel, also those that a mask
        lets it skip), ``"memory"`` and ``"links"``.
      cores_per_chip: JAX devices per chip as it is sold; topologies count chips.
      watts: what its board takes at most; None where it is not published.
      measured: links as ``jaxtrain check-hosts`` has measured them, which take precedence over
        ``link_bytes_per_s``, ``dcn_bytes_per_s`` and the efficiency of ``"links"``.
    """

    name: str
    kind: str
    device_kind: str
    memory_bytes: int | None
    flops: Mapping[str, float]
    hbm_bytes_per_s: float | None
    link_bytes_per_s: float | None
    links: int
    dcn_bytes_per_s: float | None
    devices_per_host: int
    host_bytes_per_s: float | None = None
    efficiency: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cores_per_chip: int = 1
    watts: float | None = None
    measured: Mapping[str, Mapping[str, Link]] = dataclasses.field(default_factory=dict)

    def peak_flops(self, dtype: Any) -> float | None:
        """Dense peak FLOP/s for operands of a dtype, or None where it is not known."""
        return _peak(self.flops, dtype)

    @property
    def assumed(self) -> str:
        """Bandwidths and efficiencies that predictions of time assume, in words."""
        gigabytes = (self.hbm_bytes_per_s / 1e9, self.link_bytes_per_s / 1e9 * self.links)
        network = self.dcn_bytes_per_s * 8 / 1e9
        efficient = ", ".join(f"{kind} {share:.0%}" for kind, share in self.efficiency.items())
        measured = ""
        for where, of in self.measured.items():
            told = (
                f"{kind} {link.bytes_per_s / 1e9:,.4g} GB/s + {1e6 * link.seconds:,.4g} us"
                for kind, link in of.items()
            )
            measured += f"; links {where} hosts, as measured (--links): {', '.join(told)}"
        return (
            f"{gigabytes[0]:,.0f} GB/s of memory, {gigabytes[1]:,.0f} GB/s along a mesh axis and "
            f"{network:,.0f} Gb/s between {'slices' if self.kind == 'tpu' else 'hosts'} per device "
            f"(--dcn-gbps), of which are reached: {efficient}{measured}"
        )


# HBM bandwidth: cloud.google.com/tpu/docs, one page per generation, and NVIDIA's data sheets.
# Links: bidirectional ICI bandwidth per chip on those pages is 400 GB/s (v5e, 4 ports), 800 (v6e, 4
# ports), 1200 (v5p and TPU7x, 6 ports): 50 or 100 GB/s per port and direction, as in chapter 2 of
# the scaling book (jax-ml.github.io/scaling-book), which has 45 for v4; of NVLink, half of the
# figure for both ways. Network: v5e hosts have 2 x 100 Gb/s for 8 chips, v5p 50 Gb/s per chip, v6e
# and TPU7x 100 Gb/s per chip, v4 by the scaling book 25 GB/s per host of 4; DGX A100 8 x 200 Gb/s,
# DGX H100, H200 and B200 8 x 400 Gb/s, GB200 400 Gb/s per GPU. Memory: the limit that the TPU
# compiler states when a program exceeds it (hosts of v5e are as that compiler lays them out,
# 2 x 2), and device_memory_size of gpu_targets/. TPU7x: one of a chip's two cores, with half of its
# memory, bandwidths and links.
#
# Host: PCIe, of TPUs by chapter 2 of the scaling book (15 GB/s per chip, v6e 32); of GPUs half of
# the data sheets' figure for both ways (A100 64 GB/s, H100, H200 and B200 128).
#
# Efficiencies of products, attention, memory and links are stated once per chip, by what published
# runs reach (planning's README); of chips without such a run, as their neighbours'.
#
# name: what JAX calls it, GiB of memory, GB/s of memory, GB/s of a link, Gb/s of network, per host
_TPUS = {
    "v4": ("TPU v4", 30.75, 1200, 45, 50, 4, (0.8, 0.6, 0.9, 0.9)),
    "v5e": ("TPU v5 lite", 15.75, 819, 50, 25, 4, (0.9, 0.6, 0.9, 0.9)),
    "v5p": ("TPU v5", 95.73, 2765, 100, 50, 4, (0.9, 0.6, 0.9, 0.9)),
    "v6e": ("TPU v6 lite", 31.24, 1638, 100, 100, 4, (0.8, 0.6, 0.9, 0.9)),
    "tpu7x": ("TPU7x", 94.74, 3690, 50, 50, 8, (0.8, 0.6, 0.9, 0.9)),
}
# Watts: "Max thermal design power" of NVIDIA's data sheets, of GB200 a GPU's part; of TPU v4 the
# highest that Jouppi et al. 2023 (https://arxiv.org/abs/2304.01433), table 4, have measured. Google
# publishes none of later ones.
_WATTS = {"v4": 192, "a100": 400, "h100": 700, "h200": 700, "b200": 1000, "gb200": 1200}
# The same, and TF32 TFLOP/s.
_GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2039, 300, 200, (0.65, 0.5, 0.9, 0.8), 156),
    "h100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, 3352, 450, 400, (0.6, 0.5, 0.9, 0.8), 494.7),
    "h200": ("NVIDIA H200", 151_397_597_184, 4800, 450, 400, (0.6, 0.5, 0.9, 0.8), 494.7),
    "b200": ("NVIDIA B200", 191_514_411_008, 7672, 900, 400, (0.6, 0.5, 0.9, 0.8), 1125),
    "gb200": ("NVIDIA GB200", 197_897_748_480, 7928, 900, 400, (0.6, 0.5, 0.9, 0.8), 1250),
}


_HOST_LINKS = {"v4": 15, "v5e": 15, "v5p": 15, "v6e": 32}
_HOST_LINKS |= {"a100": 32, "h100": 64, "h200": 64, "b200": 64}  # GB200's is not published apart


def _make(name, kind, device_kind, memory, hbm, link, network, per_host, shares, float32) -> Chip:
    return Chip(
        name=name,
        kind=kind,
        device_kind=device_kind,
        memory_bytes=int(memory),
        flops=MappingProxyType({**PEAK_FLOPS[device_kind], "float32": float32}),
        hbm_bytes_per_s=hbm * 1e9,
        link_bytes_per_s=link * 1e9,
        links=2 if kind == "tpu" else 1,
        dcn_bytes_per_s=network * 1e9 / 8,
        devices_per_host=per_host,
        host_bytes_per_s=_HOST_LINKS[name] * 1e9 if name in _HOST_LINKS else None,
        efficiency=MappingProxyType(
            dict(zip(("matmul", "attention", "memory", "links"), shares, strict=True))
        ),
        cores_per_chip=2 if name == "tpu7x" else 1,
        watts=_WATTS.get(name),
    )


_CHIPS = (
    # One pass of bfloat16 per float32 product: XLA's DEFAULT precision on TPU.
    *(
        _make(name, "tpu", kind, memory * GIB, *row, PEAK_FLOPS[kind]["bfloat16"])
        for name, (kind, memory, *row) in _TPUS.items()
    ),
    *(
        _make(name, "gpu", *row, 8, shares, tf32 * 1e12)
        for name, (*row, shares, tf32) in _GPUS.items()
    ),
    # Simulated devices: they share one machine, of which nothing is known here.
    Chip("cpu", "cpu", "cpu", None, MappingProxyType({}), None, None, 1, None, 8),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip that JAX calls by this name, or None where there is no row for it.

    >>> chip_of("TPU v5 lite").name, chip_of("TPU v5p").name, chip_of("abacus")
    ('v5e', 'v5p', None)
    """
    kind = {"TPU v5p": "TPU v5", "TPU v5e": "TPU v5 lite"}.get(device_kind, device_kind)
    return next((chip for chip in _CHIPS if chip.device_kind == kind), None)


def peak_flops(device_kind: str, dtype: Any = jnp.bfloat16) -> float | None:
    """Returns the dense peak FLOP/s of one device, or None where it is not known.

    Args:
      device_kind: ``jax.Device.device_kind``.
      dtype: of the operands. float32 is in no row: its products run on different units by a setting
        that a utilisation would have to know.

    >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA H200", jnp.float32), peak_flops("cpu")
    (989400000000000.0, None, None)
    """
    return _peak(PEAK_FLOPS.get(device_kind, {}), dtype)


def _peak(peaks: Mapping[str, float], dtype: Any) -> float | None:
    name = jnp.dtype(dtype).name
    return peaks.get("float8" if name.startswith("float8") else name)
