"""Mesh sizes: what fits, what fills, what is refused."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils, topologies

import jaxtrain as jt
from jaxtrain.sharding.mesh import AXES, describe_mesh, slow_parts, split_by_network


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


def test_the_outer_part_of_the_data_axis_crosses_the_slow_network():
    """On simulated devices, hosts are equal runs of devices."""
    first, second = jax.devices()[:4], jax.devices()[4:]
    mesh = jt.make_mesh(data=4, tensor=2, dcn_data=2)
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 4, "tensor": 2}
    assert list(mesh.devices[0, :2].flat) == first
    assert list(mesh.devices[0, 2:].flat) == second
    pipelined = jt.make_mesh(pipe=2, data=-1, fsdp=2, dcn_data=2)
    assert pipelined.shape["data"] == 2
    assert set(pipelined.devices[:, 0].flat) == set(first)
    assert set(pipelined.devices[:, 1].flat) == set(second)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh reads of a device."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "fake"


def fake(attribute, number, each, **more):
    """Devices in a shuffled order, ``each`` to a slice or process."""
    order = np.random.default_rng(0).permutation(number * each).tolist()
    devices = [Device(i, process_index=0, **more) for i in order]
    return [dataclasses.replace(d, **{attribute: d.id // each}) for d in devices]


@pytest.mark.parametrize("attribute", ["slice_index", "process_index"])
@pytest.mark.parametrize(
    "dcn", [{"data": 2}, {"fsdp": 2}, {"pipe": 2}, {"pipe": 2, "data": 2}, {"data": 2, "fsdp": 3}]
)
def test_the_order_is_that_of_jax_for_slices_or_processes_alone(attribute, dcn):
    inner = {"pipe": 2, "data": 1, "fsdp": 2, "tensor": 2}
    parts = [dcn.get(axis, 1) for axis in AXES]
    devices = fake(attribute, int(np.prod(parts)), 8)
    wanted = mesh_utils.create_hybrid_device_mesh(
        [inner.get(axis, 1) for axis in AXES],
        parts,
        devices,
        process_is_granule=attribute == "process_index",
    )
    sizes = {axis: size * dcn.get(axis, 1) for axis, size in inner.items()}
    mesh = jt.make_mesh(**sizes, **{f"dcn_{axis}": n for axis, n in dcn.items()}, devices=devices)
    assert mesh.devices.tolist() == wanted.tolist()
    assert slow_parts(mesh) == dict(zip(AXES, parts, strict=True))


def test_an_axis_that_changes_host_at_no_regular_places_counts_as_slow():
    devices = [Device(i, process_index=i // 4) for i in range(12)]
    assert slow_parts(jt.make_mesh(data=3, fsdp=4, devices=devices))["data"] == 3
    # The second six are hosts 1, 1, 2, 2, 2, 2: pairs are whole in both.
    assert slow_parts(jt.make_mesh(data=2, fsdp=6, devices=devices))["fsdp"] == 3
    assert slow_parts(jt.make_mesh(data=4, devices=devices[3:7]))["data"] == 4


def test_a_part_may_be_several_hosts_but_no_host_is_cut():
    devices = [Device(i, process_index=i // 2) for i in range(8)]
    halves = split_by_network(devices, {"data": 2})
    assert [[d.process_index for d in half] for half in halves] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    with pytest.raises(ValueError, match="dcn_data x dcn_fsdp is 8 and there are 4 hosts"):
        split_by_network(devices, {"data": 2, "fsdp": 4})
    with pytest.raises(ValueError, match="of equal sizes"):
        split_by_network(devices[1:], {"data": 2})


def test_slices_of_a_tpu_must_be_named():
    devices = [
        Device(i, process_index=i // 4, slice_index=i // 8, platform="tpu") for i in range(16)
    ]
    assert [len(part) for part in split_by_network(devices, {"pipe": 2})] == [8, 8]
    for parts in (1, 4):
        with pytest.raises(ValueError, match=f"dcn_data is {parts} and the devices lie in 2 TPU"):
            split_by_network(devices, {"data": parts})


def test_a_dcn_part_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="'data' has size 1, which dcn_data=2 does not divide"):
        jt.make_mesh(fsdp=8, dcn_data=2)
    with pytest.raises(ValueError, match="'pipe' has size 2, which dcn_pipe=4 does not divide"):
        jt.make_mesh(data=4, pipe=2, dcn_pipe=4)
    devices = [Device(i, process_index=i // 4) for i in range(24)]
    with pytest.raises(ValueError, match="dcn_fsdp is 4 and there are 6 hosts"):
        jt.make_mesh(fsdp=4, data=6, dcn_fsdp=4, devices=devices)
    with pytest.raises(ValueError, match="dcn_data is 0"):
        jt.make_mesh(data=8, dcn_data=0)


def test_only_the_data_axis_crosses_the_slices_of_a_tpu_topology():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install 'jaxtrain[aot]'")
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", num_slices=2
    ).devices
    mesh = jt.make_mesh(data=2, fsdp=4, dcn_data=2, devices=devices)
    by_data = [{d.slice_index for d in part.flat} for part in mesh.devices[0]]
    assert [len(slices) for slices in by_data] == [1, 1]
    assert by_data[0] != by_data[1]
    with pytest.raises(ValueError, match="set it to 2"):
        jt.make_mesh(data=2, fsdp=4, devices=devices)
