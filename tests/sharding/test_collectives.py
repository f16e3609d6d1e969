"""Collectives in two steps, inside and across a slow network, against those of ``jax.lax``."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.sharding import collectives as hierarchy

AXES = ("data", "fsdp")


SLOW = [pytest.param(slow, marks=pytest.mark.slow) for slow in ({"data": 2}, {"fsdp": 2})]


@pytest.mark.parametrize("slow", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, *SLOW], ids=str)
def test_two_steps_over_a_slow_network_are_one(slow):
    mesh = jt.make_mesh(data=2, fsdp=4)
    x = np.random.default_rng(0).integers(0, 99, (8, 16, 24)).astype(np.float32)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    def both(x):
        (x,) = x
        two = [hierarchy.psum(x, AXES, slow)]
        one = [jax.lax.psum(x, AXES)]
        for d in (0, 1):
            two += [
                hierarchy.psum_scatter(x, AXES, d, slow),
                hierarchy.all_gather(x, AXES, d, slow),
            ]
            one += [
                jax.lax.psum_scatter(x, AXES, scatter_dimension=d, tiled=True),
                jax.lax.all_gather(x, AXES, axis=d, tiled=True),
            ]
        return jax.tree.map(lambda x: x[None], (two, one))

    for two, one in zip(*both(x), strict=True):
        np.testing.assert_array_equal(two, one)
