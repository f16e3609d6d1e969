"""The command ``jaxtrain profile``: where the time of traced steps goes, as tables."""

import dataclasses
from collections.abc import Iterable

import tyro
from etils import epath
from rich.console import Console
from rich.table import Table

from jaxtrain.host.memory import human_seconds
from jaxtrain.host.paths import as_path, write_whole
from jaxtrain.run.observe.profile import hosts, trace
from jaxtrain.run.observe.profile.programs import IDLE, OTHER, Operation

# Rows of a table at most; branches, operations that are listed one by one, and devices; and the
# width of a whole step.
ROWS, BRANCHES, LONGEST, DEVICES = 24, 20, 10, 8
BAR = 24


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Says where the time of traced steps goes: by kind of operation and part of the model, what
    communication is not hidden by computation, and when devices are idle. A run takes a trace with
    --profile-steps 20:25, or when its process is sent SIGUSR1."""

    run_dir: tyro.conf.Positional[str]
    """The run's folder, or one that holds a trace of jax.profiler."""
    other: tyro.conf.Positional[str | None] = None
    """A second folder: what differs between the two is told, by kind and part, the largest
    difference first."""
    trace: str | None = None
    """Which trace, such as steps-20-25; left out, the newest."""
    timeline: str | None = None
    """Also write all operations of all processes, on one clock, into this JSON file, which
    https://ui.perfetto.dev and chrome://tracing open."""


def run_profile(options: ProfileOptions, rest: list[str]) -> int:
    """Prints the tables."""
    del rest
    folder = _found(options.run_dir, options.trace)
    profile = trace.read_trace(folder)
    if options.timeline is not None:
        lines, clocks = hosts.aligned(trace.read_timelines(folder))
        if clocks is None and len(lines) > 1:
            raise ValueError(
                f"{folder} has {len(lines)} processes, and no collective that all run twice: "
                "nothing tells how their clocks differ; trace several steps that all of them take"
            )
        write_whole(as_path(options.timeline), hosts.to_json(lines))
        print(options.timeline)
    if options.other is None:
        draw(profile, Console())
    else:
        other = trace.read_trace(_found(options.other, options.trace))
        draw_difference(profile, other, Console())
    return 0


def _found(run_dir: str, name: str | None) -> epath.Path:
    folder = trace.find_trace(as_path(run_dir), name)
    if folder is None:
        raise ValueError(
            f"{run_dir} has no trace: start the run with --profile-steps 20:25, or send "
            "SIGUSR1 to its process (the pid in its heartbeat.json) while it goes on"
        )
    return folder


def draw(profile: trace.Profile, console: Console) -> None:
    """Prints a profile."""
    devices, steps = len(profile.devices), profile.steps
    per = "" if steps is None else f" per step, mean of {steps}" if steps > 1 else " of one step"
    on = f"{devices} devices" if devices > 1 else profile.devices[0].name
    console.print(f"{profile.name}: {human_seconds(profile.seconds)}{per}, on {on}", style="bold")
    tables = [_kinds, _parts, _widest, _longest, _devices, *([_late] * bool(profile.late))]
    for make in tables:
        console.print()
        console.print(make(profile))
    if profile.clocks is not None:
        apart = human_seconds(1e-9 * profile.clocks.apart)
        console.print(f"\nclocks are compared by a collective's ends, which then agree to {apart}")


def draw_difference(before: trace.Profile, after: trace.Profile, console: Console) -> None:
    """Prints how the times of two profiles differ. Raises ValueError where one alone says how many
    steps it has."""
    if (before.steps is None) != (after.steps is None):
        unknown = before if before.steps is None else after
        raise ValueError(
            f"trace {unknown.name!r} does not say how many steps it has, and the other does: "
            "compare two whose folders are called steps-FIRST-LAST"
        )
    steps = "" if before.steps is None else f" per step, means of {before.steps} and {after.steps}"
    console.print(f"{before.name} and {after.name}{steps}", style="bold")
    for title, key in (("by kind of operation", _kind), ("by part of the model", trace.part_of)):
        table = _table(title, "before", "after", "change", "")
        old, new = (dict(trace.add_up(profile, key)) for profile in (before, after))
        rows = [(name, old.get(name, 0.0), new.get(name, 0.0)) for name in old | new]
        rows = sorted((row for row in rows if any(row[1:])), key=lambda row: -abs(row[2] - row[1]))
        for name, a, b in [*rows[:ROWS], ("all", before.seconds, after.seconds)]:
            change = f"{'-' if b < a else '+'}{human_seconds(abs(b - a))}"
            relative = f"{b / a - 1:+.1%}" if a else "new"
            style = "bold" if name == "all" else None
            table.add_row(name, human_seconds(a), human_seconds(b), change, relative, style=style)
        console.print()
        console.print(table)


def _kind(operation: Operation) -> str:
    return operation.kind


def _kinds(profile: trace.Profile) -> Table:
    table = _table(
        "by kind of operation", "time", "share", *(["in flight"] * any(profile.in_flight))
    )
    for kind, seconds in _shown(trace.add_up(profile, _kind)):
        going = profile.in_flight.get(kind)
        _row(table, profile, kind, seconds, *([human_seconds(going)] if going else []))
    return _closed(table, profile)


def _parts(profile: trace.Profile) -> Table:
    sums, used = trace.in_directions(profile)
    table = _table("by part of the model", "time", "share", *used)
    for part, seconds in _shown(trace.add_up(profile, trace.part_of)):
        found = [sums[part, direction] for direction in used]
        _row(table, profile, part, seconds, *(human_seconds(x) if x else "" for x in found))
    return _closed(table, profile)


def _widest(profile: trace.Profile) -> Table:
    """The flame graph of the report, in lines: its widest branches, each within its own."""
    table = _table("widest branches", "time", "share", "")
    table.columns[0].no_wrap, table.columns[3].justify = True, "left"
    rows: list[tuple[int, trace.Branch]] = []

    def walk(branch: trace.Branch, depth: int) -> None:
        rows.append((depth, branch))
        for each in branch.inner:
            walk(each, depth + 1)

    walk(trace.branches(profile), 0)
    # What is within another is no wider and comes later, so none is shown without it.
    shown = sorted(range(len(rows)), key=lambda i: -rows[i][1].seconds)[:BRANCHES]
    for depth, branch in (rows[i] for i in sorted(shown)):
        bar = "█" * round(BAR * branch.seconds / profile.seconds)
        _row(table, profile, "  " * depth + branch.name, branch.seconds, bar)
    return table


def _longest(profile: trace.Profile) -> Table:
    table = _table("longest operations", "time", "share", "kind", "part")
    table.columns[0].no_wrap = True
    for column in table.columns[3:]:
        column.justify = "left"
    known = [(each, s) for each, s in profile.shares.items() if each.name]
    for each, seconds in sorted(known, key=lambda row: -row[1])[:LONGEST]:
        part = " ".join(filter(None, (trace.part_of(each), each.direction)))
        _row(table, profile, each.name, seconds, each.kind, part)
    return table


def _devices(profile: trace.Profile) -> Table:
    table = _table("device", "computes", "waits for others", "idle", "longest gap")

    def waits(device: trace.Device) -> float:
        return device.exposed + device.idle

    shown = profile.devices
    if len(shown) > DEVICES:  # The slowest keeps the others waiting.
        shown = sorted(shown, key=waits)
        shown = (*shown[: DEVICES // 2], *shown[-DEVICES // 2 :])
    for device in shown:
        times = (device.busy, device.exposed, device.idle, device.longest)
        table.add_row(device.name, *map(human_seconds, times))
    if left := len(profile.devices) - len(shown):
        table.add_row(f"({left} more, that wait neither longest nor shortest)")
    return table


def _late(profile: trace.Profile) -> Table:
    table = _table("step", "the slowest", "keeps another waiting")
    for step, process, seconds in sorted(profile.late, key=lambda each: -each.seconds)[:ROWS]:
        table.add_row(f"{step:,}", process, human_seconds(seconds))
    return table


def _shown(rows: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Rows, of which the shortest are taken together where there are too many."""
    rows = list(rows)
    named = [row for row in rows if row[0] not in (OTHER, IDLE)]
    if len(named) <= ROWS:
        return rows
    rest = named[ROWS - 1 :]
    together = (f"({len(rest)} more)", sum(seconds for _, seconds in rest))
    return [*named[: ROWS - 1], together, *rows[len(named) :]]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


def _row(table: Table, profile: trace.Profile, name: str, seconds: float, *cells: str) -> None:
    table.add_row(name, human_seconds(seconds), f"{seconds / profile.seconds:.1%}", *cells)


def _closed(table: Table, profile: trace.Profile) -> Table:
    table.add_row("all", human_seconds(profile.seconds), "100.0%", style="bold")
    return table
