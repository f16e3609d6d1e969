"""Reads the trace of a run into what its devices did in each step."""

import bisect
import collections
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxtrain.host.paths import is_folder, listed, look
from jaxtrain.planning.hlo import COLLECTIVES
from jaxtrain.planning.scopes import BACKWARD, FORWARD, RECOMPUTED
from jaxtrain.run.observe.profile import hosts
from jaxtrain.run.observe.profile.programs import (
    IDLE,
    OTHER,
    Operation,
    operation_of,
    rank,
    read_programs,
)
from jaxtrain.run.observe.profile.timeline import Event, covered, divide, innermost

# Where a run writes its traces, and TensorBoard looks for them.
TRACES = "tensorboard/plugins/profile"
FILES = "*.xplane.pb"
# Lines of a TPU's plane: what its core does, and what goes on meanwhile.
CORE, MEANWHILE, MODULES = "XLA Ops", "Async XLA Ops", "XLA Modules"
# Of a part of the model, so many names from the outermost on.
DEPTH = 3
DIRECTIONS = (FORWARD, RECOMPUTED, BACKWARD)
# Branches that take less than this part of a step are told together.
SMALL = 0.002

Programs = Mapping[str, Mapping[str, Operation]]


@dataclasses.dataclass(frozen=True)
class Device:
    """One device in a trace, in seconds per step (of the whole trace where its steps are unknown).

    Args:
      busy: it computes.
      exposed: it waits for others, or for a transfer, and computes nothing meanwhile.
      idle: nothing happens.
      longest: the longest time without a break in which nothing happens; not per step.
    """

    name: str
    busy: float
    exposed: float
    idle: float
    longest: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of traced steps, by operation.

    Args:
      steps: number of steps in it; None where its name does not say.
      seconds: from the first operation to the last, per step (of the whole trace where ``steps`` is
        None), which what follows adds up to.
      shares: seconds of each operation, mean of the devices; ``Operation(IDLE)`` is for nothing.
      in_flight: seconds in which at least one collective of a kind goes on, hidden behind
        computation or not, mean of the devices.
      clocks: of several processes, how their clocks differed; None where nothing tells.
      late: of several processes, which one each step has waited for.
    """

    name: str
    steps: int | None
    seconds: float
    shares: Mapping[Operation, float]
    in_flight: Mapping[str, float]
    devices: tuple[Device, ...]
    clocks: hosts.Clocks | None = None
    late: Sequence[hosts.Wait] = ()


class Branch(NamedTuple):
    """A part of a step, in seconds, and what it is made of, the longest first; the branches within
    one take its time together."""

    name: str
    seconds: float
    inner: tuple["Branch", ...]


def find_trace(run_dir: epath.Path, name: str | None = None) -> epath.Path | None:
    """Returns the folder of a run's newest trace, or of the one of that name, such as
    ``steps-20-25``.

    None stands for no trace at all. ``run_dir`` may be the folder of a trace itself. Raises
    ValueError where there are traces, and none of that name.
    """
    if listed(run_dir, FILES):
        return run_dir
    folder = run_dir / TRACES
    traces = {
        path.name: max(entry.changed for entry in map(look, files) if entry)
        for path in listed(folder)
        if is_folder(path) and (files := listed(path, FILES))
    }
    if name is not None and traces and name not in traces:
        raise ValueError(f"{run_dir} has no trace {name!r}: it has {', '.join(sorted(traces))}")
    name = name or max(traces, key=lambda each: (traces[each], each), default=None)
    return folder / name if name in traces else None


def read_trace(folder: epath.Path) -> Profile:
    """Reads a trace that ``jax.profiler`` has written. Raises ValueError where no device has done
    anything in it, or it cannot be read."""
    timelines, clocks = hosts.aligned(read_timelines(folder))
    steps = re.fullmatch(r"steps-(\d+)-(\d+)(-process-\d+)?", folder.name)
    span = (int(steps[1]), int(steps[2]) - int(steps[1]) + 1) if steps else None
    late = tuple(hosts.waits(timelines, *span)) if clocks and span else ()
    devices = {
        f"{process} {name}" if len(timelines) > 1 else name: lines
        for process, each in timelines.items()
        for name, lines in each.items()
    }
    profile = make_profile(folder.name, span and span[1], devices)
    return dataclasses.replace(profile, clocks=clocks, late=late)


def read_timelines(folder: epath.Path) -> dict[str, dict[str, list[list[Event]]]]:
    """Reads the lines of each device, by the process or host that its file is called after; raises
    as :func:`read_trace`."""
    timelines = {}
    for path in sorted(listed(folder, FILES), key=str):
        data = path.read_bytes()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of how jax makes its types; as an error that ends the process.
                warnings.simplefilter("ignore", DeprecationWarning)
                found = _devices(jax.profiler.ProfileData.from_serialized_xspace(data), data)
        except Exception as error:
            raise ValueError(f"{path} cannot be read as a trace: {error}") from None
        if found:
            timelines[path.name.removesuffix(FILES[1:])] = found
    if not timelines:
        raise ValueError(f"no device has done anything in {folder}: trace steps of training")
    return timelines


def make_profile(
    name: str, steps: int | None, timelines: Mapping[str, Sequence[Sequence[Event]]]
) -> Profile:
    """Divides the time of devices among their operations: ``timelines`` has by the device's name
    its lines, whose events, in nanoseconds, are of
    :class:`~jaxtrain.run.observe.profile.programs.Operation`."""
    events = [event for lines in timelines.values() for line in lines for event in line]
    begin, end = min(e.start for e in events), max(e.end for e in events)
    scale = 1e-9 / (steps or 1)
    mean = scale / len(timelines)
    shares, in_flight, devices = collections.Counter(), collections.Counter(), []
    for device, lines in timelines.items():
        parts, gaps = divide(lines, begin, end, rank)
        idle = parts.pop(None, 0.0)
        shares.update({each: seconds * mean for each, seconds in parts.items()})
        shares[Operation(IDLE)] += idle * mean
        moves = collections.defaultdict(list)
        for event in (event for line in lines for event in line):
            if event.what.kind in COLLECTIVES:
                moves[event.what.kind].append(event)
                shares[event.what] += 0.0  # It is told of, though it be hidden throughout.
        in_flight.update({kind: mean * covered(found) for kind, found in moves.items()})
        exposed = sum(seconds for each, seconds in parts.items() if rank(each) in (1, 2))
        busy = end - begin - exposed - idle
        longest = max((gap.end - gap.start for gap in gaps), default=0.0)
        devices.append(Device(device, busy * scale, exposed * scale, idle * scale, longest * 1e-9))
    return Profile(name, steps, (end - begin) * scale, shares, in_flight, tuple(devices))


def add_up(profile: Profile, key: Callable[[Operation], str]) -> list[tuple[str, float]]:
    """Adds up what has the same key, the largest first; what is unknown and idle at the end."""
    sums = collections.Counter()
    for operation, seconds in profile.shares.items():
        sums[key(operation)] += seconds
    last = {OTHER: 1, IDLE: 2}
    return sorted(sums.items(), key=lambda row: (last.get(row[0], 0), -row[1]))


def part_of(operation: Operation) -> str:
    """The part of the model, or of the step, that an operation works for."""
    if operation.kind == IDLE:
        return IDLE
    return "/".join(operation.scopes[:DEPTH]) or OTHER


def in_directions(profile: Profile) -> tuple[Mapping[tuple[str, str], float], list[str]]:
    """Seconds by part and direction, and the directions that there are."""
    sums = collections.Counter()
    for operation, seconds in profile.shares.items():
        sums[part_of(operation), operation.direction] += seconds
    return sums, [each for each in DIRECTIONS if any(each == there for _, there in sums)]


def branches(profile: Profile) -> Branch:
    """A step as a tree: parts of the model, in each the direction, in that kinds of work."""
    return _branch("step", profile.shares.items(), 0, SMALL * profile.seconds)


def _branch(
    name: str, shares: Iterable[tuple[Operation, float]], depth: int, least: float
) -> Branch:
    shares = list(shares)
    groups: dict[str | None, list] = {}
    for operation, seconds in shares:
        path = _path(operation)
        groups.setdefault(path[depth] if depth < len(path) else None, []).append(
            (operation, seconds)
        )
    total = sum(seconds for _, seconds in shares)
    if None in groups:
        return Branch(name, total, ())
    sizes = {each: sum(seconds for _, seconds in inner) for each, inner in groups.items()}
    large = sorted((each for each in groups if sizes[each] >= least), key=lambda x: -sizes[x])
    inner = [_branch(each, groups[each], depth + 1, least) for each in large]
    if len(small := groups.keys() - {*large}) and (rest := sum(sizes[each] for each in small)):
        inner.append(Branch(f"{len(small)} shorter", rest, ()))
    return Branch(name, total, tuple(inner))


def _path(operation: Operation) -> tuple[str, ...]:
    if operation.kind == IDLE:
        return (IDLE,)
    within = (operation.direction,) if operation.direction else ()
    return (*(operation.scopes or (OTHER,)), *within, operation.kind)


def _devices(data: Any, xspace: bytes) -> dict[str, list[list[Event]]]:
    """The lines of each device by its name."""
    programs, devices = read_programs(xspace), {}
    for plane in data.planes:
        if found := re.fullmatch(r"/device:(\w+:\d+)", plane.name):
            devices[found[1]] = _of_device(plane, programs)
        elif plane.name == "/host:CPU":
            for name, lines in _of_host(plane, programs).items():
                devices.setdefault(name, []).extend(lines)
    return {name: lines for name, lines in devices.items() if any(lines)}


def _of_device(plane: Any, programs: Programs) -> list[list[Event]]:
    """Returns the events of a GPU's streams, or of a TPU's core and its transfers."""
    lines = {line.name: list(line.events) for line in plane.lines}
    streams = [events for name, events in lines.items() if name.startswith("Stream")]
    if streams:  # The other lines of a GPU are made of them.
        return [[_noted(event, programs) for event in events] for events in streams]
    modules = sorted((e.start_ns, e.name) for e in lines.get(MODULES, ()))
    starts = [start for start, _ in modules]

    def timed(event: Any) -> Event:
        place = bisect.bisect_right(starts, event.start_ns) - 1
        program = modules[place][1] if place >= 0 else ""
        what = operation_of(event.name, program, programs)
        return Event(event.start_ns, event.end_ns, what)

    core = innermost(map(timed, lines.get(CORE, ())))
    # What goes on at the same time is on one line there.
    return [core, *([timed(event)] for event in lines.get(MEANWHILE, ()))]


def _of_host(plane: Any, programs: Programs) -> dict[str, list[list[Event]]]:
    """Returns the events of the CPU's devices, thread by thread, by the device's name."""
    devices = collections.defaultdict(list)
    for line in plane.lines:
        threads = collections.defaultdict(list)
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats and not event.name.startswith("end: "):
                name = f"CPU:{stats.get('device_ordinal', 0)}"
                threads[name].append(_noted(event, programs, stats))
        for name, events in threads.items():
            devices[name].append(innermost(events))
    return dict(sorted(devices.items()))


def _noted(event: Any, programs: Programs, stats: Mapping[str, Any] | None = None) -> Event:
    """An event that names its operation and its program itself."""
    stats = dict(event.stats) if stats is None else stats
    program = str(stats.get("hlo_module", ""))
    if program and "program_id" in stats:
        program = f"{program}({stats['program_id']})"
    # What a kernel was called in stands before it.
    name = str(stats.get("hlo_op", event.name)).rpartition("::")[2]
    return Event(event.start_ns, event.end_ns, operation_of(name, program, programs))
