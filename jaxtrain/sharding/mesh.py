"""The device mesh: six named axes, most of them of size 1.

========  =====================================================================================
axis      what it splits
========  =====================================================================================
data      the batch; parameters are copied
fsdp      the batch, and every parameter, gradient and moment (each copy holds a part)
tensor    heads, the hidden width of the MLP, the vocabulary
pipe      the layers
context   the sequence
expert    the experts of a mixture, and the batch elsewhere
========  =====================================================================================

Where devices lie on several slices or hosts, with a slow network (DCN) between them, ``dcn_pipe``,
``dcn_data`` and ``dcn_fsdp`` say which outer parts of these axes cross it; nothing else does.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# Outermost first: neighbours on the last axes talk most, so those get the closest devices.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
# Of these, the axes along which weights are made whole: experts are used where they lie.
GATHERED_AXES = ("data", "fsdp")
# Axes that may span the slow network: they move little, or can be overlapped.
SLOW_AXES = ("pipe", "data", "fsdp")

_DEVICES_PER_HOST: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "devices_per_host", default=None
)


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    context: int = 1,
    expert: int = 1,
    dcn_data: int = 1,
    dcn_fsdp: int = 1,
    dcn_pipe: int = 1,
    devices: Sequence[jax.Device] | None = None,
    **unknown: int,
) -> Mesh:
    """Arranges devices in a mesh whose axes are all of :data:`AXES`.

    Args:
      data, fsdp, tensor, pipe, context, expert: sizes; one of them may be -1 and takes what is
        left over.
      dcn_data, dcn_fsdp, dcn_pipe: divisors of ``data``, ``fsdp`` and ``pipe``: over how many parts
        of the devices, with a slow network between them, that axis extends. Their product is the
        number of parts. On TPU the parts are the slices, all of them; elsewhere whole hosts (or
        processes), and on one host equal runs of devices, which simulates them.
      devices: the devices to use, all of them; by default all that JAX sees.

    Returns:
      A mesh with automatic (compiler-partitioned) axes.

    Raises:
      TypeError: for an axis that is not among them.
      ValueError: where a size is neither positive nor -1, the sizes do not multiply to the number
        of devices, or the parts do not fit their axes or the slices or hosts.

    >>> make_mesh(tensor=-1, devices=jax.devices()[:1]).shape["tensor"]
    1
    """
    if unknown:
        raise TypeError(f"a mesh has no axis {next(iter(unknown))!r}, only {', '.join(AXES)}")
    sizes = dict(zip(AXES, (pipe, data, fsdp, expert, context, tensor), strict=True))
    devices = list(jax.devices() if devices is None else devices)
    sizes = fill_sizes(sizes, len(devices))
    slow = {"pipe": dcn_pipe, "data": dcn_data, "fsdp": dcn_fsdp}
    check_slow(sizes, slow)
    parts = split_by_network(devices, slow)
    outer = tuple(slow.get(axis, 1) for axis in AXES)
    inner = tuple(size // parts for size, parts in zip(sizes.values(), outer, strict=True))
    grids = [
        mesh_utils.create_device_mesh(inner, part, allow_split_physical_axes=True) for part in parts
    ]
    # [outer of every axis, inner of every axis] -> outer and inner side by side.
    side_by_side = [d for axis in range(len(AXES)) for d in (axis, axis + len(AXES))]
    grid = np.stack(grids).reshape(*outer, *inner).transpose(side_by_side)
    grid = grid.reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def automatic(mesh: Mesh) -> Mesh:
    """Returns a mesh with every axis left to the compiler; ``jax.make_mesh`` makes explicit ones.

    >>> mesh = automatic(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    >>> mesh.axis_types == (AxisType.Auto,)
    True
    """
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)


def platform() -> str:
    """The platform of the devices that are being traced for.

    That of the ambient mesh (``jax.set_mesh``, which ``compile_step`` enters), so that a step
    compiled for a chip that is not here takes the form that it would take there; without a mesh,
    JAX's default backend.

    >>> platform() == jax.default_backend()
    True
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


def check_slow(sizes: Mapping[str, int], slow: Mapping[str, int]) -> None:
    """Raises ValueError unless each axis has a size that its part across the network divides.

    Args:
      sizes: of mesh axes.
      slow: parts across the slow network, by axis.

    >>> check_slow({"data": 6}, {"data": 2})
    """
    for axis, parts in slow.items():
        if parts < 1:
            raise ValueError(f"dcn_{axis} is {parts}: give at least 1")
        if sizes[axis] % parts:
            raise ValueError(
                f"mesh axis {axis!r} has size {sizes[axis]}, which dcn_{axis}={parts} does not "
                f"divide: it is the part of the {axis} axis that crosses the slow network"
            )


def split_by_network(
    devices: Sequence[jax.Device], slow: Mapping[str, int]
) -> list[list[jax.Device]]:
    """Splits devices into equal parts with no slice or host in two of them, in their order.

    This is what ``mesh_utils.create_hybrid_device_mesh`` does with slices alone or processes alone;
    here a part may also be several hosts, or simulated.

    Args:
      devices: of one platform.
      slow: parts across the slow network, by axis; there are as many as their product.

    Raises:
      ValueError: where that is not the number of slices of a TPU, or does not divide the hosts or
        devices.
    """
    devices, parts = list(devices), math.prod(slow.values())
    named = " x ".join(f"dcn_{axis}" for axis, n in slow.items() if n > 1) or "dcn_data"
    slices = sorted({slice_of(device) for device in devices})
    if devices[0].platform == "tpu" and parts != len(slices):
        raise ValueError(
            f"{named} is {parts} and the devices lie in {len(slices)} TPU slices: set it to "
            f"{len(slices)}, so that nothing else crosses the slow network between them"
        )
    if parts == 1:
        return [devices]
    units: dict[int, list[jax.Device]] = {}
    attribute = slice_of if len(slices) > 1 else host_of
    for device in devices:
        units.setdefault(attribute(device), []).append(device)
    whole = [units[key] for key in sorted(units)] if len(units) > 1 else [[d] for d in devices]
    if len(whole) % parts or len({len(unit) for unit in whole}) > 1:
        name = "slices" if len(slices) > 1 else "hosts" if len(units) > 1 else "devices"
        raise ValueError(
            f"{named} is {parts} and there are {len(whole)} {name}: use a number that divides "
            "them, of equal sizes"
        )
    each = len(whole) // parts
    groups = [whole[i * each : (i + 1) * each] for i in range(parts)]
    return [[device for unit in group for device in unit] for group in groups]


def slow_parts(mesh: Mesh) -> dict[str, int]:
    """Over how many slices (or hosts, of other chips) each axis of a mesh extends, by its devices.

    An axis whose neighbours do not change slice at regular places counts as slow from end to end.

    >>> slow_parts(make_mesh(data=-1))["data"]
    1
    """
    slices = len({slice_of(device) for device in mesh.devices.flat}) > 1
    joined_by_slice = slices or mesh.devices.flat[0].platform == "tpu"
    numbers = np.vectorize(slice_of if joined_by_slice else host_of)(mesh.devices)
    parts = {}
    for d, (axis, size) in enumerate(mesh.shape.items()):
        lines = np.moveaxis(numbers, d, -1).reshape(-1, size)
        changes = (np.diff(lines, axis=1) != 0).any(axis=0)
        count = int(changes.sum()) + 1
        regular = (
            size % count == 0 and changes[size // count - 1 :: size // count].sum() + 1 == count
        )
        parts[axis] = count if regular else size
    return parts


def slice_of(device: jax.Device) -> int:
    """The number of a device's slice, 0 where there is only one."""
    # Only some backends say; on GPU a slice is a domain of fast links.
    index = getattr(device, "slice_index", None)
    return 0 if index is None else index


def host_of(device: jax.Device) -> int:
    """The number of a device's host, which is that of the process it belongs to."""
    simulated = _DEVICES_PER_HOST.get()
    return device.process_index if simulated is None else device.id // simulated


@contextlib.contextmanager
def simulated_hosts(devices: int) -> Iterator[None]:
    """Takes equal runs of so many devices for hosts, in this thread.

    A mesh of simulated devices then has a slow network, and what is compiled for it the form that
    it has there.

    >>> with simulated_hosts(1):
    ...     host_of(jax.devices()[0])
    0
    """
    token = _DEVICES_PER_HOST.set(devices)
    try:
        yield
    finally:
        _DEVICES_PER_HOST.reset(token)


def fill_sizes(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """Replaces a size of -1 by what is left of ``devices`` and checks the product."""
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise ValueError(
                f"mesh axis {axis!r} has size {size}: use a positive number, or -1 for the rest"
            )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh axes {open_axes} are both -1: only one axis can take the rest")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and devices % fixed == 0:
        return sizes | {open_axes[0]: devices // fixed}
    if open_axes or fixed != devices:
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "1"
        mend = (
            "set one axis to -1 to use the rest"
            if not open_axes
            else f"use sizes that divide {devices}"
        )
        raise ValueError(f"mesh {named} needs {fixed} devices and there are {devices}: {mend}")
    return sizes


def describe_mesh(mesh: Mesh | None) -> str:
    """Names the axes that split something.

    >>> describe_mesh(None)
    '1 device'
    """
    if mesh is None:
        return "1 device"
    named = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return named or "1 device"
