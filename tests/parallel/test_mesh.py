"""Mesh sizes: what fits, what fills, what is refused."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.parallel import mesh as layout
from jaxtrain.parallel.mesh import AXES, describe_mesh


def test_all_axes_are_there_and_unnamed_ones_have_size_one():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}
    assert describe_mesh(mesh) == "data 2 x fsdp 2 x tensor 2"


@pytest.mark.parametrize("axis", AXES)
def test_minus_one_takes_the_rest(axis):
    other = "data" if axis != "data" else "tensor"
    assert jt.make_mesh(**{axis: -1, other: 2}).shape[axis] == 4


def test_devices_may_be_given():
    devices = jax.devices()[4:6]
    assert set(jt.make_mesh(data=2, devices=devices).devices.flat) == set(devices)
    assert describe_mesh(jt.make_mesh(devices=devices[:1])) == "1 device"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 4}, "mesh data 4 needs 4 devices and there are 8: set one axis to -1"),
        ({"data": 3, "tensor": -1}, "mesh .*data 3.* needs 3 devices .* use sizes that divide 8"),
        ({"data": -1, "fsdp": -1}, r"mesh axes \['data', 'fsdp'\] are both -1"),
        ({"tensor": 0}, "mesh axis 'tensor' has size 0: use a positive number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        jt.make_mesh(**axes)


def test_slices_meet_on_the_outermost_axes(monkeypatch):
    monkeypatch.setattr(layout, "_slice_of", lambda device: device.id // 4)
    for shape, crossing in [({"data": 4, "tensor": 2}, "data"), ({"tensor": 8}, "tensor")]:
        mesh = jt.make_mesh(**shape)
        assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
        slices = np.vectorize(lambda device: device.id // 4)(mesh.devices)
        axis = AXES.index(crossing)
        halves = np.split(slices, 2, axis=axis)
        assert [set(half.flat) for half in halves] == [{0}, {1}]
    with pytest.raises(ValueError, match="7 devices do not lie on 2 slices of one size"):
        jt.make_mesh(data=7, devices=jax.devices()[:7])
