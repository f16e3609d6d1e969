"""Compiler options that hide communication behind compute, by what a program is compiled for.

They were chosen by what the compiled programs of llama-70b on 128 hosts of H100, and on 1,024 chips
of v5p, leave exposed (planning's README); no GPU and no TPU has timed them. Within one host NVLink
is fast enough for XLA's defaults. The loop of a pipeline is left as it is, for its branches must
not be copied.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

# Weights of one layer in bfloat16 are to be one collective: with XLA's threshold of 30 MiB, each
# kernel is gathered alone, and one small gather is waited for after the other.
_ONE_LAYER = 2 * 2**30

GPU_HOSTS = {
    # Moves starts ahead of the compute that hides them.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A collective over the slow network lasts as long as many matrix products, with collectives of
    # the tensor axis between them. Alone in flight it could only hide between two of those.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    # The weights of the next layer are gathered, and the gradients of the last one scattered, while
    # this one computes: within one trip of the loop there is nothing to hide them behind.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_all_gather_combine_threshold_bytes": _ONE_LAYER,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": _ONE_LAYER,
    # Two layers per trip, so that what is gathered for the next one needs no copy.
    "xla_gpu_enable_while_loop_double_buffering": True,
}

V5P = {
    # SparseCores gather and reduce while the TensorCore multiplies, which by default does one after
    # the other. Its own way to do both is refused on v5p, for wrong results.
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_enable_reduce_scatter_offload_tracing": True,
    "xla_tpu_enable_all_reduce_offload_tracing": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    "xla_sc_enable_instruction_fusion": False,
    # A long axis of the mesh lies along two or three of the torus.
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    # A gradient whose part of a device is no whole tile is scattered, not summed whole.
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
}


def overlap_options(mesh: Mesh | None) -> dict[str, Any]:
    """Returns XLA options, by their flag's name, for a program on a mesh.

    >>> overlap_options(None)
    {}
    """
    if mesh is None or mesh.shape.get("pipe", 1) > 1:
        return {}
    devices = mesh.devices.flat
    if devices[0].device_kind == "TPU v5" and len(devices) > 1:
        return dict(V5P)
    hosts = {device.process_index for device in devices}
    return dict(GPU_HOSTS) if devices[0].platform in ("gpu", "cuda") and len(hosts) > 1 else {}


def compile_hiding(
    lowered: jax.stages.Lowered,
    mesh: Mesh | None,
    own: Mapping[str, Any] | None,
    *,
    hide: bool = True,
) -> tuple[jax.stages.Compiled, list[str]]:
    """Compiles a program with :func:`overlap_options`, but those that this version of XLA lacks.

    Args:
      lowered: the program.
      mesh: that it is for.
      own: options that take precedence.
      hide: False compiles with those alone.

    Returns:
      The compiled program, and the names of the options that hide communication in it.
    """
    options, own = overlap_options(mesh) if hide else {}, own or {}
    while True:
        try:
            compiled = lowered.compile({**options, **own} or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or unknown[1] in own or unknown[1] not in options:
                raise
            del options[unknown[1]]
        else:
            return compiled, [name for name in options if name not in own]
