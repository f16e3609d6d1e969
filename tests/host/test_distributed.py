"""Which processes a run has, from the environments of launchers and schedulers."""

import subprocess
import sys

import jax
import pytest

from jaxtrain.host import distributed
from jaxtrain.host.distributed import Cluster, find_cluster


def find(environ, gpus=0, tpu=False, **given):
    return find_cluster(environ, on_tpu=lambda: tpu, gpus=gpus, **given)


OURS = {
    "JAXTRAIN_COORDINATOR": "host0:1",
    "JAXTRAIN_PROCESSES": "4",
    "JAXTRAIN_PROCESS_ID": "3",
    "JAXTRAIN_LOCAL_DEVICE_IDS": "6,7",
}
# srun --nodes 2 --ntasks-per-node 4, on the second node.
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[7-8]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
MPI4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
}
MPI5 = {name: value for name, value in MPI4.items() if "orte" not in name}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


def test_a_lone_process_is_none():
    assert find({}) is None
    assert find({"JAXTRAIN_PROCESSES": "1"}) is None
    assert find({}, processes=1, tpu=True) is None


def test_arguments_come_first_then_our_own_variables_then_schedulers():
    assert find(SLURM | OURS, gpus=8) == Cluster(
        "JAXTRAIN_PROCESSES in the environment", 4, "host0:1", 3, (6, 7), "deactivate"
    )
    given = find(SLURM | OURS, coordinator="h:2", processes=5, process_id=0)
    assert (given.source, given.processes, given.coordinator) == ("the flags", 5, "h:2")
    found = find(SLURM, gpus=4)
    assert (found.source, found.processes, found.process_id) == ("Slurm job 123", 8, 6)
    assert (found.coordinator, found.method) == (None, "slurm")  # JAX reads the list of nodes
    assert find(SLURM, coordinator="h:2").coordinator == "h:2"


@pytest.mark.parametrize(
    ("changes", "gpus", "wanted"),
    [
        ({}, 4, (2,)),
        ({}, 8, (4, 5)),
        ({}, 1, ()),  # Slurm has bound each task to its own
        ({"SLURM_GPUS_PER_TASK": "2"}, 2, ()),
        ({"SLURM_STEP_TASKS_PER_NODE": "7,1", "SLURM_LOCALID": "0"}, 8, ()),  # all of the node's
        ({}, 0, ()),
    ],
)
def test_gpus_of_a_slurm_task(changes, gpus, wanted):
    assert find(SLURM | changes, gpus=gpus).local_device_ids == wanted


def test_gpus_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 GPUs cannot be dealt evenly to 4 processes"):
        find(SLURM, gpus=6)


def test_an_interactive_shell_and_a_batch_script_are_one_process():
    assert find(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    outside = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find(outside) is None


def test_mpirun_within_slurm_is_open_mpi():
    found = find(SLURM | MPI4, gpus=2)
    assert (found.source, found.processes, found.method) == ("Open MPI", 4, "ompi")
    assert found.local_device_ids == (1,)


def test_open_mpi_5_needs_mpi4py_or_a_coordinator(monkeypatch):
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="does not say where process 0 runs: pip install mpi4py"):
        find(MPI5)
    assert find(MPI5, coordinator="h:1").process_id == 1
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: object())
    assert find(MPI5).method == "mpi4py"


@pytest.mark.parametrize(
    ("environ", "processes"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, 4),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, None),
        ({}, None),  # JAX asks the metadata server
    ],
)
def test_tpu_hosts(environ, processes):
    found = find(environ, tpu=True)
    assert found.processes == processes
    assert found.method is None
    assert "TPU" in found.source


def test_one_tpu_host_is_one_process():
    assert find({"TPU_WORKER_HOSTNAMES": "localhost"}, tpu=True) is None
    assert find({"TPU_SKIP_MDS_QUERY": "1"}, tpu=True) is None


def test_a_pod_that_cannot_know_its_job_says_so(monkeypatch):
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pod 0 of a Kubernetes job, .* JAXTRAIN_PROCESSES"):
        find(POD)
    assert find(POD | OURS).process_id == 3
    assert find({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: object())
    assert find(POD) == Cluster("the Kubernetes job")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAXTRAIN_PROCESSES": "2"}, r"`coordinator` \(JAXTRAIN_COORDINATOR\) and `process_id`"),
        (OURS | {"JAXTRAIN_PROCESS_ID": "4"}, "process 4 of 4 cannot be"),
        (OURS | {"JAXTRAIN_PROCESSES": "two"}, "JAXTRAIN_PROCESSES is 'two': it must be a number"),
        (OURS | {"JAXTRAIN_COORDINATOR": "host0"}, "'host0' is not of the form HOST:PORT"),
    ],
)
def test_settings_that_do_not_fit_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        find(environ)


def test_what_jax_is_called_with(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    monkeypatch.setattr(distributed, "_found", None)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    found = distributed.initialize()
    assert found.source == "Slurm job 123"
    assert calls == [
        {
            "coordinator_address": None,
            "num_processes": 8,
            "process_id": 6,
            "local_device_ids": (2,),
            "cluster_detection_method": "slurm",
            "coordinator_bind_address": None,
        }
    ]
    assert distributed.facts() == {"processes": "1, found from Slurm job 123"}


def test_jax_finds_the_rest_of_a_slurm_job():
    """Its own detection names the first node; checked where it would go, without going there."""
    code = """
import os, jax
from jaxtrain.host import distributed
os.environ.update({environ!r})
try:
    jax.distributed.initialize(
        cluster_detection_method="slurm", num_processes=-1, process_id=0, local_device_ids=()
    )
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code.format(environ=SLURM)], capture_output=True, text=True
    )
    # It got past the coordinator's address, which only the variables of Slurm could tell.
    assert "process_id < num_processes" in done.stdout, done.stderr


def test_a_single_process_starts_no_backend():
    code = """
import jax
from jaxtrain.host import distributed
assert distributed.initialize() is None
jax.config.update("jax_num_cpu_devices", 3)  # An error once the backend is there.
assert len(jax.devices()) == 3
assert distributed.facts() == {}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_address_has_a_port_that_there_is():
    distributed.check_address("host:65535")
    for address in ("host", "host:x", "host:65536"):
        with pytest.raises(ValueError, match=f"coordinator '{address}' is not of the form"):
            distributed.check_address(address)
