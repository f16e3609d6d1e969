"""``jaxtrain check-hosts``: whether processes can train together, and how fast their links are."""

import contextlib
import dataclasses
import datetime
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes as Flat

from jaxtrain.host import distributed, roll_call
from jaxtrain.host.chips import Chip, chip_of
from jaxtrain.host.least import check_least
from jaxtrain.host.links import BETWEEN, KINDS, WITHIN, Links, fit
from jaxtrain.host.memory import human_bytes, human_seconds
from jaxtrain.host.paths import check_on_disk
from jaxtrain.planning.roofline import ring_share, wire_seconds
from jaxtrain.run.launch import own_address
from jaxtrain.run.options import ProcessOptions
from jaxtrain.sharding.mesh import AXES, make_mesh, slice_of

# Bytes that one device sends and median seconds of one collective, for each size, by class of links
# and kind of collective.
Times = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
# Of the mesh that is measured on, the axis of each class of links.
_AXIS = {WITHIN: "fsdp", BETWEEN: "data"}
_ROUNDS = 5
# Products are timed for so long, so that a process that is stopped now and then shows it. Those of
# processes that are further apart than this are told as shares.
_SECONDS, _APART = 2.0, 1.1
# Collectives in one program, so that its start counts little; fewer of large arrays.
_TIMES, _FEW, _LARGE = 20, 4, 2**21


@dataclasses.dataclass(frozen=True)
class CheckHostsOptions:
    """Checks that the processes of a cluster can train together, and measures their links.

    Run it in each process, as a training run would be: jaxtrain launch --processes 8 -- jaxtrain
    check-hosts. Process 0 names processes that do not come, versions that differ, clocks that are
    apart and hosts that do not reach each other, and then times collectives within a host and
    between hosts, and products on each: where some are slower, it says the --row-shares by which
    a training waits for them less. The exit status is 1 where something is wrong.
    """

    out: Path | None = None
    """File for the measured links, as JSON: `jaxtrain plan --links` reads it."""
    seconds: float = 60.0
    """Time limit for all processes to come, and for each measurement."""
    sizes: tuple[int, ...] = (2**10, 2**14, 2**18, 2**22, 2**26)
    """Bytes of the arrays that are gathered, reduced or sent: at least two sizes."""
    distributed: Flat[ProcessOptions] = dataclasses.field(default_factory=ProcessOptions)


def run_check_hosts(options: CheckHostsOptions, rest: list[str]) -> int:
    """Prints what is wrong and what was measured, in process 0; returns 1 where anything is wrong.
    Raises ValueError for options that do not fit."""
    del rest
    check_least(options, seconds=1)
    if len(set(options.sizes)) < 2 or min(options.sizes) < 1:
        raise ValueError(f"`sizes` is {options.sizes}: give at least two, of 1 byte or more")
    if options.out is not None:
        check_on_disk(options.out, "--out")
    given = dataclasses.asdict(options.distributed)
    cluster = distributed.find_cluster(os.environ, **given)
    wrong, hosts = 0, 1
    # JAX itself aborts where a process does not come, so the roll is called before, where it can.
    known = cluster is not None and None not in (cluster.coordinator, cluster.process_id)
    try:
        if known:
            where = cluster.coordinator, cluster.process_id, cluster.processes
            wrong, hosts = _meet(*where, options.seconds)
        with _limit(options.seconds, "JAX has not connected the processes"):
            distributed.initialize(**given)
            first = jax.process_index() == 0
            if cluster is not None and not known:
                address = distributed.broadcast_text(own_address() if first else "")
        if cluster is not None and not known:
            where = address, jax.process_index(), jax.process_count()
            wrong, hosts = _meet(*where, options.seconds)
    except (_Fatal, ConnectionError) as error:
        print(error, end="\n" * bool(str(error)), file=sys.stderr)
        return 1
    if uneven := _uneven(jax.devices()):
        if first:
            _say(uneven)
        return 1
    times = measure(make_links_mesh(hosts), options.sizes, seconds=options.seconds)
    with _limit(options.seconds, "the products of all processes have not ended"):
        rates = np.ravel(multihost_utils.process_allgather(np.float32(product_rate())))
    kind, now = jax.devices()[0].device_kind, datetime.datetime.now(datetime.UTC)
    on = f"{now:%Y-%m-%d %H:%M} UTC, devices: {jax.device_count()}, hosts: {hosts}"
    links = {where: {k: fit(p) for k, p in of.items()} for where, of in times.items()}
    if first:
        _draw(times, links, options.sizes, chip_of(kind))
        print(f"products, each device: {told_rates(rates)}")
        if options.out is not None:
            Links(kind, on, links).save(options.out)
    return 1 if wrong else 0


class _Fatal(Exception):
    """The processes cannot compute together, which process 0 has said."""


def _meet(address: str, process: int, processes: int, seconds: float) -> tuple[int, int]:
    """Calls the roll; returns how many things are wrong that do not matter to a collective, and how
    many hosts there are. Raises _Fatal where others do."""
    own = roll_call.facts()
    if process:
        found = roll_call.answer(address, process, own, seconds=seconds)
    else:
        found = roll_call.call(address, processes, own, seconds=seconds)
        print(" ".join(f"{name} {value}" for name, value in own.items() if value))
        for number, host in enumerate(found.hosts):
            clock = f"{found.offsets[number]:+.6f} s (+- {found.errors[number]:.6f} s)"
            print(f"process {number} on {host}, clock {clock}" if host else f"process {number}: -")
        for sentence in (*found.fatal, *found.wrong):
            _say(sentence)
        if found.fatal:
            _say("nothing was measured: a collective of such processes could hang")
    if found.fatal:
        raise _Fatal
    return len(found.wrong), len(set(found.hosts))


def _say(sentence: str) -> None:
    print(f"WRONG: {sentence}", flush=True)


@contextlib.contextmanager
def _limit(seconds: float, what: str) -> Iterator[None]:
    """Ends this process with a sentence where its body takes longer: no collective gives up."""

    def end() -> None:
        _say(f"{what} within {seconds:.0f} s: let the hosts reach each other on that network")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _uneven(devices: Sequence[jax.Device]) -> str | None:
    """Says which processes have other devices than most; None where all have the same."""
    each = Counter((d.process_index, d.device_kind) for d in devices)
    (most, _), *others = Counter((n, kind) for (_, kind), n in each.items()).most_common()
    few = [f"process {p} has {n} {kind}" for (p, kind), n in each.items() if (n, kind) != most]
    told = f"{', '.join(few)} and the others have {most[0]} {most[1]}"
    return f"{told}: give all hosts the same devices" if others else None


def make_links_mesh(hosts: int) -> Mesh:
    """Returns a mesh of all devices with hosts (slices of a TPU) along ``data`` and the devices of
    each along ``fsdp``. Raises ValueError where hosts have different numbers of processes."""
    devices = jax.devices()
    tpu = devices[0].platform == "tpu"
    islands = len({slice_of(device) for device in devices}) if tpu else hosts
    return make_mesh(data=islands, dcn_data=islands, fsdp=-1)


def measure(mesh: Mesh, sizes: Sequence[int], *, seconds: float) -> Times:
    """Times collectives along the axes of :func:`make_links_mesh` that have several devices.

    Args:
      sizes: bytes of the whole array that is gathered, reduced, scattered or sent.
      seconds: time limit of each.
    """
    return {
        where: {k: [_time(mesh, axis, k, size, seconds) for size in sorted(sizes)] for k in KINDS}
        for where, axis in _AXIS.items()
        if mesh.shape[axis] > 1
    }


def _time(mesh: Mesh, axis: str, kind: str, size: int, limit: float) -> tuple[float, float]:
    program, x, sent = make_program(mesh, axis, kind, size)
    times = _TIMES if size < _LARGE else _FEW
    with _limit(limit, f"the {kind} of {human_bytes(size)} along {axis} has not ended"):
        jax.block_until_ready(program(x, np.int32(1)))
        each = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(program(x, np.int32(times)))
            each.append((time.perf_counter() - start) / times)
    return sent, statistics.median(each)


def make_program(
    mesh: Mesh, axis: str, kind: str, size: int
) -> tuple[Callable[[jax.Array, np.int32], jax.Array], jax.Array, float]:
    """Returns a program of so many collectives one after another, its array, and the bytes that one
    device sends in each."""
    group = mesh.shape[axis]
    numbers = -(-size // (4 * group)) * group

    def collective(_: jax.Array, x: jax.Array) -> jax.Array:
        if kind == "all-reduce":
            return jax.lax.pmean(x, axis)
        if kind == "all-gather":
            whole = jax.lax.all_gather(x, axis, tiled=True)
            # Without the barrier XLA sends no more than what is used of it.
            return jax.lax.optimization_barrier(whole)[: x.size]
        if kind == "reduce-scatter":
            part = jax.lax.psum_scatter(x, axis, tiled=True) / group
            return x.at[: part.size].set(part)
        return jax.lax.ppermute(x, axis, [(i, (i + 1) % group) for i in range(group)])

    loop = lambda x, times: jax.lax.fori_loop(0, times, collective, x)  # noqa: E731
    specs = {"in_specs": (P(AXES), P()), "out_specs": P(AXES), "check_vma": False}
    own = numbers // group if kind == "all-gather" else numbers
    sharding = NamedSharding(mesh, P(AXES))
    x = jax.jit(lambda: jnp.ones(own * mesh.size, jnp.float32), out_shardings=sharding)()
    program = jax.jit(jax.shard_map(loop, mesh=mesh, **specs))
    return program, x, ring_share(kind, group) * 4 * numbers


def product_rate() -> float:
    """Operations per second of one of this process's devices, in products of square matrices."""
    devices = jax.local_devices()
    cpu = devices[0].platform == "cpu"
    size, dtype = (256, jnp.float32) if cpu else (4096, jnp.bfloat16)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
    parts = [jax.device_put(jnp.full((size, size), 1 / size, dtype), d) for d in devices]
    jax.block_until_ready([product(x) for x in parts])
    done, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _SECONDS:
        jax.block_until_ready([product(x) for x in parts])
        done += 8
    return done * 2 * size**3 / spent


def told_rates(rates: Sequence[float]) -> str:
    """Returns the rates of processes in words, and where they are apart shares of rows by them.

    >>> told_rates([4e12, 4.1e12])
    '4.0 to 4.1 TFLOP/s'
    >>> told_rates([4e12, 1.6e12])
    '1.6 to 4.0 TFLOP/s; process 1 is slowest: --row-shares 2.5 1 has each take rows by its speed'
    """
    least, most = float(min(rates)), float(max(rates))
    scale, unit = (1e12, "TFLOP/s") if most >= 1e12 else (1e9, "GFLOP/s")
    told = f"{least / scale:.1f} to {most / scale:.1f} {unit}"
    if most < _APART * least:
        return told
    shares = " ".join(f"{rate / least:.2g}" for rate in rates)
    slowest = list(rates).index(min(rates))
    told += f"; process {slowest} is slowest: --row-shares {shares}"
    return f"{told} has each take rows by its speed"


def _draw(times: Times, links: Mapping, sizes: Sequence[int], chip: Chip | None) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("links", "collective"):
        table.add_column(name)
    for name in (*map(human_bytes, sorted(sizes)), "latency", "GB/s", "plan takes"):
        table.add_column(name, justify="right")
    known = chip is not None and chip.link_bytes_per_s is not None
    for where, of in times.items():
        for kind, points in of.items():
            crossing = 1e9 if where == BETWEEN else 0.0
            link = links[where][kind]
            rates = [link.bytes_per_s / 1e9]
            rates += [1 / sum(wire_seconds(kind, 1e9, crossing, chip))] if known else []
            each = [*(seconds for _, seconds in points), link.seconds]
            told = [*map(human_seconds, each), *(f"{rate:,.4g}" for rate in rates)]
            table.add_row(f"{where} hosts", kind, *told)
    # Wide enough for the table where the output is no terminal.
    Console(highlight=False, width=None if Console().is_terminal else 140).print(table)
    if not times:
        print("one device: it has no links to measure")
