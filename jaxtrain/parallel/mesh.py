"""The device mesh: six named axes, most of them of size 1.

========  =====================================================================================
axis      what it splits
========  =====================================================================================
data      the batch; parameters are copied
fsdp      the batch, and every parameter, gradient and moment (each copy holds a part)
tensor    heads, the hidden width of the MLP, the vocabulary
pipe      the layers
context   the sequence
expert    the experts of a mixture
========  =====================================================================================
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# Outermost first: neighbours on the last axes talk most, so those get the closest devices.
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp")


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    context: int = 1,
    expert: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arranges devices in a mesh whose axes are all of :data:`AXES`.

    Args:
      data, fsdp, tensor, pipe, context, expert: sizes; one of them may be -1 and takes what is
        left over.
      devices: the devices to use, all of them; by default all that JAX sees.

    Returns:
      A mesh with automatic (compiler-partitioned) axes.

    Raises:
      ValueError: where a size is neither positive nor -1, or the sizes do not multiply to the
        number of devices.

    >>> make_mesh(tensor=-1, devices=jax.devices()[:1]).shape["tensor"]
    1
    """
    sizes = {
        "pipe": pipe,
        "data": data,
        "fsdp": fsdp,
        "expert": expert,
        "context": context,
        "tensor": tensor,
    }
    devices = list(jax.devices() if devices is None else devices)
    sizes = fill_sizes(sizes, len(devices))
    shape = tuple(sizes[axis] for axis in AXES)
    grid = _arrange(shape, devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """Neighbours in the mesh are neighbours in the network; slices meet on the outermost axes."""
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(_slice_of(device), []).append(device)
    inner, outer = list(shape), [1] * len(shape)
    left = len(slices)
    for axis, size in enumerate(shape):
        outer[axis] = math.gcd(size, left)
        inner[axis] //= outer[axis]
        left //= outer[axis]
    if left > 1 or len({len(members) for members in slices.values()}) > 1:
        raise ValueError(f"{len(devices)} devices do not lie on {len(slices)} slices of one size")
    grids = [
        mesh_utils.create_device_mesh(inner, members, allow_split_physical_axes=True)
        for _, members in sorted(slices.items())
    ]
    # [slices of axis 0, slices of axis 1, ..., inner 0, inner 1, ...] to [axis 0, axis 1, ...]
    stacked = np.stack(grids).reshape(*outer, *inner)
    order = [d for axis in range(len(shape)) for d in (axis, axis + len(shape))]
    return stacked.transpose(order).reshape(shape)


def _slice_of(device: jax.Device) -> int:
    # Hosts of GPUs have numbers of that name too; there the order of devices is enough.
    return getattr(device, "slice_index", None) or 0 if device.platform == "tpu" else 0


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
