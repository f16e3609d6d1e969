"""Several processes as one program: who they are is found from the flags or the environment.

JAX finds the processes of Slurm, Open MPI, TPU VMs and Kubernetes by itself
(``jax.distributed.initialize()`` without arguments). What is added here is whether there is more
than one process at all, which GPUs are whose, settings of our own, and a name for what was found.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.host import quiet
from jaxtrain.host.storage import StorageError

T = TypeVar("T")

# What `jaxtrain launch` and the Kubernetes manifests set.
COORDINATOR = "JAXTRAIN_COORDINATOR"
PROCESSES = "JAXTRAIN_PROCESSES"
PROCESS_ID = "JAXTRAIN_PROCESS_ID"
# Of a launcher, and the same in all attempts that it starts.
START = "JAXTRAIN_START"
LOCAL_DEVICE_IDS = "JAXTRAIN_LOCAL_DEVICE_IDS"
# Addresses of keepers (`jaxtrain.host.keeper`), that of this host first.
MEMORY = "JAXTRAIN_MEMORY"
# Where hosts come and go, how many there are and how many there may be: 2/4.
HOSTS = "JAXTRAIN_HOSTS"

# The more particular first.
_ERRORS = {
    e.__name__: e for e in (FileExistsError, FileNotFoundError, StorageError, OSError, ValueError)
}

# JAX's names of what it is to do, for ``cluster_detection_method``.
_NOTHING_TO_DETECT = "deactivate"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes that this one belongs to.

    Args:
      source: where that was found, in words.
      processes: how many; None where only JAX can ask (a TPU VM's metadata server).
      coordinator: HOST:PORT of process 0; None where JAX derives it.
      process_id: which one this is; None where JAX derives it.
      local_device_ids: the GPUs of this process, counted among those it sees; empty for all of
        them.
      method: how JAX is to find what is None: its ``cluster_detection_method``.
    """

    source: str
    processes: int | None = None
    coordinator: str | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] = ()
    method: str | None = None


_found: Cluster | None = None


def initialize(
    *, coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> Cluster | None:
    """Connects this process to the others, where there are others.

    Call it once, before anything asks JAX for devices; more calls do nothing. The settings are the
    arguments; where left out, JAXTRAIN_COORDINATOR, JAXTRAIN_PROCESSES and JAXTRAIN_PROCESS_ID in
    the environment; and where there are none either, those of Open MPI, Slurm, a TPU VM or an
    Indexed Job of Kubernetes. It starts no backend, and for one process it does nothing.

    Args:
      coordinator: HOST:PORT of process 0, reachable by all.
      processes: how many there are.
      process_id: which one this is, from 0.

    Returns:
      What was found; None for a single process.

    Raises:
      ValueError: where settings are missing or contradict each other.
    """
    global _found
    if jax.distributed.is_initialized():
        return _found
    cluster = find_cluster(
        os.environ, coordinator=coordinator, processes=processes, process_id=process_id
    )
    if cluster is None:
        return None
    # Read when the CPU backend starts, and by no other.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It takes SIGTERM from whoever handles it, and leaves a note that only those who ask for a
    # "preemption sync point" would read.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=cluster.coordinator,
        num_processes=cluster.processes,
        process_id=cluster.process_id,
        # Left None, JAX would give a process of Slurm or Open MPI one GPU, by its rank on the host.
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method=cluster.method,
        coordinator_bind_address=_bind_address(cluster.coordinator),
    )
    _found = cluster
    return cluster


def coordinator_host() -> str | None:
    """The host under which the processes have met process 0; None where JAX found it."""
    if _found is None or _found.coordinator is None:
        return None
    return _found.coordinator.rsplit(":", 1)[0]


def elastic_hosts() -> tuple[int, int] | None:
    """Returns how many hosts there are and how many there may be; None where their number stays."""
    there, _, most = os.environ.get(HOSTS, "").partition("/")
    return (int(there), int(most)) if most else None


def addresses() -> list[str]:
    """Returns IPv4 addresses of this host: those of its name, of its way out, and localhost."""
    found = []
    with contextlib.suppress(OSError):
        found += [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        # Of TEST-NET-1 (RFC 5737); a datagram socket sends nothing.
        way_out.connect(("192.0.2.1", 9))
        found.append(way_out.getsockname()[0])
    found.append("127.0.0.1")
    return [address for address in dict.fromkeys(found) if ":" not in address]


def facts() -> dict[str, str]:
    """The header's line about processes; none for a single one. Starts the backend."""
    if _found is None and jax.process_count() == 1:
        return {}
    source = "what the caller initialized" if _found is None else _found.source
    return {"processes": f"{jax.process_count()}, found from {source}"}


def from_first_process(make: Callable[[], T]) -> T:
    """Calls ``make`` in the first process alone and returns in all of them what JSON makes of it.

    Every process must call this. Raises ValueError or OSError: what ``make`` raised, in all
    processes.

    >>> from_first_process(lambda: "runs/gpt-1")
    'runs/gpt-1'
    """
    if jax.process_count() == 1:
        return make()
    first = jax.process_index() == 0
    error, result = json.loads(broadcast_text(json.dumps(_result_or_error(make)) if first else ""))
    if error is not None:
        raise _ERRORS[error](result)
    return result


def broadcast_text(text: str) -> str:
    """Returns the text of process 0 in every process; all call it alike."""
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    # Of few sizes: each is a program of its own.
    padded = np.zeros(1 << max(6, size.bit_length()), np.uint8)
    padded[: min(size, data.size)] = data[:size]
    return bytes(multihost_utils.broadcast_one_to_all(padded))[:size].decode()


def _result_or_error(make: Callable[[], Any]) -> tuple[str | None, Any]:
    try:
        return None, make()
    except tuple(_ERRORS.values()) as error:
        # A subclass, such as json.JSONDecodeError, travels as what it is a kind of.
        kind = next(name for name, each in _ERRORS.items() if isinstance(error, each))
        return kind, str(error)


def find_cluster(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    on_tpu: Callable[[], bool] | None = None,
    gpus: int | None = None,
) -> Cluster | None:
    """Finds the settings for :func:`initialize` without acting on them; None for a single process.
    Raises ValueError as :func:`initialize`.

    Args:
      on_tpu: says whether this host has TPU chips that JAX will use; by default, looks.
      gpus: how many GPUs this process sees; by default, counts them.

    >>> find_cluster({}, on_tpu=lambda: False) is None
    True
    >>> find_cluster({"JAXTRAIN_PROCESSES": "2", "JAXTRAIN_PROCESS_ID": "1"}, coordinator="a:1")
    Cluster(source='the flags', processes=2, coordinator='a:1', process_id=1, local_device_ids=(), \
method='deactivate')
    """
    by_flag = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    ours = {
        "coordinator": environ.get(COORDINATOR),
        "processes": _number(environ, PROCESSES),
        "process_id": _number(environ, PROCESS_ID),
    }
    given = {name: ours[name] if flag is None else flag for name, flag in by_flag.items()}
    if given["processes"] == 1:
        return None
    cluster = None
    if None in given.values():
        gpus = len(visible_gpus(environ)) if gpus is None else gpus
        finders = (
            # Before Slurm, as in JAX: under mpirun its variables describe mpirun's daemons.
            lambda: _open_mpi(environ, gpus),
            lambda: _slurm(environ, gpus),
            lambda: _tpu(environ, on_tpu or _uses_tpu),
            lambda: _kubernetes(environ),
        )
        cluster = next((found for find in finders if (found := find()) is not None), None)
    if set(given.values()) == {None}:
        return _checked(cluster, environ)
    # A coordinator alone is welcome where the rest is found: Open MPI 5 does not name a host.
    merged = {n: getattr(cluster, n, None) if v is None else v for n, v in given.items()}
    if merged["processes"] == 1:
        return None
    _check_complete(merged)
    by_environ, ids = set(by_flag.values()) == {None}, environ.get(LOCAL_DEVICE_IDS)
    shared = getattr(cluster, "local_device_ids", ())
    return Cluster(
        f"{PROCESSES} in the environment" if by_environ else "the flags",
        **merged,
        local_device_ids=tuple(map(int, ids.split(","))) if ids else shared,
        method=_NOTHING_TO_DETECT,
    )


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the NVIDIA GPUs that a process in this environment sees, by the names that
    CUDA_VISIBLE_DEVICES has for them; starts no backend."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each for each in visible.split(",") if each.strip() not in ("", "-1")]
    found = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    return [str(number) for number in range(len(found))]


def share_devices(devices: int, *, processes: int, index: int) -> tuple[int, ...]:
    """Deals the devices of a host evenly to its processes, and returns those of process ``index``.

    Empty, which means all that it sees, where there is nothing to deal: no more than one device, or
    no more than one process. Raises ValueError where they cannot be dealt evenly.

    >>> share_devices(8, processes=4, index=1)
    (2, 3)
    """
    if devices <= 1 or processes <= 1:
        return ()
    if devices % processes:
        raise ValueError(
            f"{devices} GPUs cannot be dealt evenly to {processes} processes on this host: start a "
            f"number of processes that divides {devices}"
        )
    each = devices // processes
    return tuple(range(index * each, (index + 1) * each))


def _open_mpi(environ: Mapping[str, str], gpus: int) -> Cluster | None:
    processes = _number(environ, "OMPI_COMM_WORLD_SIZE")
    if processes is None:
        return None
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    local = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") or 0
    # Releases before 5 say where mpirun is, and JAX takes that; from 5 on, mpi4py must ask.
    names_host = "OMPI_MCA_orte_hnp_uri" in environ
    return Cluster(
        "Open MPI",
        processes,
        process_id=_number(environ, "OMPI_COMM_WORLD_RANK"),
        local_device_ids=share_devices(gpus, processes=here, index=local),
        method="ompi" if names_host else "mpi4py",
    )


def _slurm(environ: Mapping[str, str], gpus: int) -> Cluster | None:
    # What srun sets for a task; a batch script itself, outside of srun, is no task.
    if not {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= set(environ):
        return None
    # The tasks of this step: in an interactive shell SLURM_NTASKS is the allocation's, and nobody
    # else would ever connect.
    processes = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
    bound = {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"} & set(environ)
    here = 1 if bound else _tasks_here(environ)
    return Cluster(
        f"Slurm job {environ['SLURM_JOB_ID']}",
        processes,
        process_id=_number(environ, "SLURM_PROCID"),
        local_device_ids=share_devices(gpus, processes=here, index=int(environ["SLURM_LOCALID"])),
        method="slurm",
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """The tasks on this node, from Slurm's ``4(x2),1``: 4 on each of two nodes, 1 on the next."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    for part in text.split(","):
        tasks, nodes = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()).groups()
        counts += [int(tasks)] * int(nodes or 1)
    node = _number(environ, "SLURM_NODEID") or 0
    return counts[min(node, len(counts) - 1)]


def _tpu(environ: Mapping[str, str], on_tpu: Callable[[], bool]) -> Cluster | None:
    if not on_tpu():
        return None
    if any(f"TPU_PROCESS_ADDRESSES{end}" in environ for end in ("", "_PATH")):
        return Cluster("the TPU host's environment")
    hosts = environ.get("TPU_WORKER_HOSTNAMES")
    if hosts is not None:
        slices = _number(environ, "MEGASCALE_NUM_SLICES") or 1
        return Cluster("the TPU host's environment", len(hosts.split(",")) * slices)
    if "TPU_SKIP_MDS_QUERY" in environ:  # Nobody may be asked: this host alone.
        return None
    return Cluster("the TPU VM's metadata")


def _uses_tpu() -> bool:
    platforms = jax.config.jax_platforms
    if platforms and "tpu" not in platforms.split(","):
        return False
    return quiet.has_tpu() and importlib.util.find_spec("libtpu") is not None


def _kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    # Of all pods, those of an Indexed Job (such as a JobSet's) alone have an index.
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environ):
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"this is pod {environ['JOB_COMPLETION_INDEX']} of a Kubernetes job, and how many "
            f"there are is not known: set {PROCESSES}, {PROCESS_ID} and {COORDINATOR} in its "
            "manifest, as those of tpu_setup/kubernetes do, or pip install 'jax[k8s]' and let the "
            "pod read its job"
        )
    return Cluster("the Kubernetes job")


def _checked(cluster: Cluster | None, environ: Mapping[str, str]) -> Cluster | None:
    """The cluster, if it has more than one process and JAX can find what is not known."""
    if cluster is None or cluster.processes == 1:
        return None
    named = bool(environ.get("JAX_COORDINATOR_ADDRESS"))
    if cluster.method == "mpi4py" and importlib.util.find_spec("mpi4py") is None and not named:
        raise ValueError(
            "this Open MPI does not say where process 0 runs: pip install mpi4py, or give "
            f"`coordinator` HOST:PORT (or {COORDINATOR}, passed on by mpirun -x)"
        )
    return cluster


def _check_complete(settings: Mapping[str, str | int | None]) -> None:
    names = {"coordinator": COORDINATOR, "processes": PROCESSES, "process_id": PROCESS_ID}
    missing = [name for name, value in settings.items() if value is None]
    if missing:
        flags = " and ".join(f"`{name}` ({names[name]})" for name in missing)
        raise ValueError(f"several processes are asked for, and {flags} missing: give all three")
    processes, process_id = settings["processes"], settings["process_id"]
    if processes < 1 or not 0 <= process_id < processes:
        raise ValueError(
            f"process {process_id} of {processes} cannot be: processes are numbered from 0 to one "
            "less than their number"
        )
    check_address(settings["coordinator"])


def check_address(address: str) -> None:
    """Raises ValueError unless an address has the form HOST:PORT."""
    if not re.fullmatch(r".+:\d+", address) or int(address.rpartition(":")[2]) >= 2**16:
        raise ValueError(f"coordinator {address!r} is not of the form HOST:PORT")


def _bind_address(coordinator: str | None) -> str | None:
    """On one machine nobody from outside need connect; otherwise JAX listens everywhere."""
    if coordinator is None or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return None
    return coordinator if coordinator.rsplit(":", 1)[0] in ("127.0.0.1", "localhost") else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    if not text.isdecimal():
        raise ValueError(f"the environment's {name} is {text!r}: it must be a number")
    return int(text)
