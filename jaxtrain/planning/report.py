"""Reports of plans, as data and as text: the answer first, then where it comes from."""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxtrain.flops import Flops
from jaxtrain.host.memory import human_bytes, human_count, human_seconds
from jaxtrain.planning.by_layer import Part
from jaxtrain.planning.hlo import Collective
from jaxtrain.planning.meetings import Meetings
from jaxtrain.planning.roofline import Prediction, hides

UNKNOWN = "not known"
# How many times the mean of tokens the hottest expert has, where the report prices it.
HOTTEST = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
      parameters, optimizer_state, other_state, batch: what the step is given; the state is donated,
        so its new value takes no more.
      activations: what loops over layers stack in the forward pass for the backward pass to read,
        by the traced step. Of layers that are not in a loop, what is kept counts as temporaries.
      temporaries: the rest of the peak: gradients, and what comes and goes.
      peak: all of the above except the program, at the fullest moment.
      limit: what the device has; None where it is not known.
      host: bytes in the memory of the host that belong to this device's part of the state.
      host_parameters: of these, the parameters'.
      host_temporaries: more bytes there at the fullest moment, such as offloaded activations.
    """

    parameters: int
    optimizer_state: int
    other_state: int
    batch: int
    activations: int
    temporaries: int
    program: int
    peak: int
    limit: int | None
    host: int = 0
    host_parameters: int = 0
    host_temporaries: int = 0

    @property
    def needed(self) -> int:
        """The peak and the program."""
        return self.peak + self.program

    @property
    def fits(self) -> bool:
        """Whether that is within the limit."""
        return self.limit is None or self.needed <= self.limit


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same mesh axes.

    Args:
      kind, axes: see :class:`jaxtrain.planning.hlo.Collective`.
      executions: per step and device, over all of them; a fraction where a branch has them that is
        not taken in every step.
      smallest, largest: bytes of one execution's whole array.
      payload: bytes of all executions' arrays.
      sent: bytes that one device sends per step.
      seconds: at the links' peak; None where it is not known.
      conditional: whether any is in a branch of unknown share, counted as if always taken.
      crossing: of ``sent``, what crosses the slow network between slices, or hosts.
    """

    kind: str
    axes: tuple[str, ...]
    executions: float
    smallest: int
    largest: int
    payload: int
    sent: float
    seconds: float | None
    conditional: bool
    crossing: float = 0.0


class Report:
    """Base of reports that ``self.draw(console)`` draws."""

    def report(self, width: int = 100) -> str:
        """Draws it as text of at most ``width`` columns."""
        console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
        self.draw(console)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"

    def __str__(self) -> str:
        return self.report()


@dataclasses.dataclass(frozen=True)
class Plan(Report):
    """Memory, communication and time of a step on a target.

    Args:
      name: of what was planned.
      target: what for, as it is written.
      device_kind: what JAX calls a device of it.
      devices, hosts: how many.
      mesh: sizes of mesh axes above 1.
      layout: what else of the layout is not a default, as :class:`jaxtrain.Layout` writes it.
      fits: whether it fits in a device's memory.
      shortage: bytes that are missing where it does not.
      memory: what it takes; None where the compiler refused and said no more.
      parts: what of it belongs to which part of the model.
      traffic: collectives by kind and axes; None where the program could not be read.
      collectives: every one.
      flops: of one step over all devices, counted from the jaxpr.
      flops_formula: by the model's formula, and the formula's name; None where there is none.
      meetings: what replicas send that meet every so many steps; None without such.
      hbm_bytes: moved by one device per step, an estimate (:class:`.partition.Cost`).
      roofline: the predicted time; None where the chip's peaks are not known.
      peak_flops: of one device for the dtype that most is multiplied in.
      assumed: bandwidths and efficiencies of the predicted time, in words.
      compile_seconds: wall time of tracing and compiling; None where the compiler refused.
      warnings: what should not be there.
      notes: what is left out or assumed.
      mend: the nearest change that fits, where it does not.
      hlo: the compiled program's text.
    """

    name: str
    target: str
    device_kind: str
    devices: int
    hosts: int
    mesh: Mapping[str, int]
    flops: Flops
    flops_formula: tuple[float, str] | None
    peak_flops: float | None
    assumed: str
    fits: bool
    shortage: int
    layout: str = ""
    memory: Memory | None = None
    parts: tuple[Part, ...] = ()
    traffic: tuple[Traffic, ...] | None = None
    collectives: tuple[Collective, ...] = ()
    meetings: Meetings | None = None
    hbm_bytes: float | None = None
    roofline: Prediction | None = None
    compile_seconds: float | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    mend: str | None = None
    hlo: str = dataclasses.field(default="", repr=False)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs (by the formula, else counted) over peak, at the predicted step time."""
        return None if self.roofline is None else self._mfu(self.roofline.step_seconds)

    @property
    def mfu_ceiling(self) -> float | None:
        """MFU if the step took no longer than its products at the published peak."""
        return None if self.roofline is None else self._mfu(self.roofline.least)

    def _mfu(self, seconds: float) -> float | None:
        if not self.peak_flops or not seconds:
            return None
        flops = self.flops_formula[0] if self.flops_formula else self.flops.total
        return flops / (self.devices * self.peak_flops * seconds)

    def draw(self, console: Console) -> None:
        """Prints it."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items()) or "1 device"
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        line(console, f"{self.name} on {self.target}", style="bold")
        line(console, f"{self.devices} x {self.device_kind}, {hosts}; mesh {mesh}", indent=2)
        if self.layout:
            line(console, f"layout {self.layout}", indent=2)
        if crossing := [row for row in self.traffic or () if row.crossing]:
            line(console, _across(crossing, self.device_kind), indent=2)
        line(console, "")
        line(console, verdict(self), style="bold green" if self.fits else "bold red")
        if self.mend:
            line(console, f"nearest change that fits: {self.mend}", indent=2)
        for warning in self.warnings:
            line(console, f"WARNING: {warning}", style="bold yellow")
        if self.memory is not None:
            section(console, "memory per device", _memory(self))
            traffic = Text(UNKNOWN) if self.traffic is None else _traffic(self.traffic)
            section(console, "communication per step, one device", traffic)
        section(console, "FLOPs per step, all devices", _flops(self))
        if self.roofline is not None:
            section(console, "predicted time per step", _roofline(self))
            line(console, _prediction(self), indent=2)
            line(console, f"at {self.assumed}", indent=2)
        if self.meetings is not None:
            section(console, "meetings of replicas", Text(str(self.meetings)))
        if self.compile_seconds is not None:
            line(console, "")
            line(console, f"compiled in {self.compile_seconds:.1f} s")
        for note in self.notes:
            line(console, f"note: {note}", style="dim")

    def __repr__(self) -> str:
        needed = "" if self.memory is None else f", {human_bytes(self.memory.needed)} per device"
        return f"<Plan of {self.name} on {self.target}: fits={self.fits}{needed}>"

    def to_json(self) -> dict[str, Any]:
        """Returns it as data that ``json.dumps`` takes, without the program's text."""
        plain = dataclasses.asdict(dataclasses.replace(self, hlo=""))
        del plain["hlo"]
        plain |= {"mfu": self.mfu, "mfu_ceiling": self.mfu_ceiling}
        plain["roofline"] = self.roofline and self.roofline.to_json()
        return plain


@dataclasses.dataclass(frozen=True)
class Explanation(Report):
    """Communication and memory of a compiled function.

    Args:
      traffic, collectives: as in :class:`Plan`.
      memory: by name, in bytes per device: arguments, outputs, temporaries, program, peak.
      loops: trip counts; None where it is not known, and counted as 1.
      warnings: what should not be there, where parameters were given.
    """

    traffic: tuple[Traffic, ...]
    collectives: tuple[Collective, ...]
    memory: Mapping[str, int]
    loops: tuple[int | None, ...]
    warnings: tuple[str, ...] = ()

    def draw(self, console: Console) -> None:
        """Prints it."""
        for warning in self.warnings:
            line(console, f"WARNING: {warning}", style="bold yellow")
        table = new_table("", "bytes", "")
        for name, size in self.memory.items():
            table.add_row(name, f"{size:,}", human_bytes(size))
        section(console, "memory per device", table)
        section(console, "communication per call, one device", _traffic(self.traffic))
        if None in self.loops:
            line(console, "note: loops of unknown length are counted as one trip", style="dim")

    def to_json(self) -> dict[str, Any]:
        """Returns it as data that ``json.dumps`` takes."""
        return dataclasses.asdict(self)


def verdict(plan: Plan) -> str:
    """Whether it fits, in one sentence."""
    memory = plan.memory
    if memory is None:
        missing = f"{plan.shortage:,} bytes ({human_bytes(plan.shortage)}) of memory are missing"
        return f"does not fit: {missing if plan.shortage else 'the compiler ran out of memory'}"
    needed = human_bytes(memory.needed)
    if memory.limit is None:
        return f"needs {needed} per device; how much there is, is not known"
    share = f"{needed} of {human_bytes(memory.limit)} per device"
    if plan.fits:
        return f"fits: {share} ({memory.needed / memory.limit:.0%})"
    return f"does not fit: {share}; {plan.shortage:,} bytes ({human_bytes(plan.shortage)}) missing"


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    rows = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer_state,
        "other state": memory.other_state,
        "batch": memory.batch,
        "activations kept for backward": memory.activations,
        "gradients and temporaries": memory.temporaries,
    }
    table = new_table("", "bytes", "")
    for name, size in rows.items():
        table.add_row(name, f"{size:,}", human_bytes(size))
    table.add_row("peak", f"{memory.peak:,}", human_bytes(memory.peak), style="bold")
    table.add_row("program", f"{memory.program:,}", human_bytes(memory.program))
    held = {"parameters": memory.host_parameters}
    held |= {"optimizer state": memory.host - memory.host_parameters}
    on_host = held | {"temporaries": memory.host_temporaries}
    for name, size in on_host.items():
        if size:
            table.add_row(f"{name} on the host", f"{size:,}", human_bytes(size))
    if memory.limit is not None:
        table.add_row("the device has", f"{memory.limit:,}", human_bytes(memory.limit))
    return table


def _traffic(traffic: tuple[Traffic, ...]) -> Table | Text:
    if not traffic:
        return Text("none")
    known = any(row.seconds is not None for row in traffic)
    across = any(row.crossing for row in traffic)
    table = new_table(
        *("collective", "axes", "times", "bytes each", "sent"),
        *(["crossing"] if across else []),
        *(["time"] if known else []),
    )
    table.columns[1].justify = "left"
    for row in traffic:
        sizes = human_bytes(row.largest)
        if row.smallest != row.largest:
            sizes = f"{human_bytes(row.smallest)} to {sizes}"
        cells = [
            row.kind,
            " + ".join(row.axes),
            f"{'≤ ' if row.conditional else ''}{_count(row.executions)}",
            sizes,
            human_bytes(row.sent),
            *([human_bytes(row.crossing)] if across else []),
        ]
        table.add_row(*cells, *([seconds_text(row.seconds)] if known else []))
    return table


def _count(executions: float) -> str:
    whole = float(executions).is_integer()
    return f"{int(executions):,}" if whole else f"{executions:,.2f}"


def _across(rows: list[Traffic], device_kind: str) -> str:
    """Describes the traffic that crosses the slow network, in one sentence."""
    parts = [f"{r.kind} {' + '.join(r.axes)} {human_bytes(r.crossing)}" for r in rows]
    between = "slices" if device_kind.startswith("TPU") else "hosts"
    return f"crossing the network between {between}, per device and step: {', '.join(parts)}"


def _flops(plan: Plan) -> Table:
    table = new_table("", "FLOPs", "")
    table.columns[2].justify = "left"
    if plan.flops_formula is not None:
        table.add_row("model", f"{human_count(plan.flops_formula[0])}", plan.flops_formula[1])
    dtypes = ", ".join(
        f"{count / plan.flops.total:.0%} {dtype}" for dtype, count in plan.flops.by_dtype.items()
    )
    table.add_row("executed", human_count(plan.flops.total), f"counted in the jaxpr: {dtypes}")
    return table


def _roofline(plan: Plan) -> Table:
    roofline = plan.roofline
    table = new_table("", "time", "")
    table.columns[2].justify = "left"
    peak = "" if plan.peak_flops is None else f"{human_count(plan.peak_flops)}FLOP/s per device"
    table.add_row("compute", seconds_text(roofline.compute), peak)
    table.add_row("HBM", seconds_text(roofline.hbm), f"{human_bytes(plan.hbm_bytes)}, an estimate")
    if roofline.heat:
        more = f"+ {seconds_text((HOTTEST - 1) * roofline.heat)}"
        table.add_row(
            f"hottest expert {HOTTEST} x", more, "the mean of tokens, which others wait for"
        )
    if roofline.host:
        table.add_row("host", seconds_text(roofline.host), "does not overlap")
    for link, traffic in (("interconnect", roofline.interconnect), ("network", roofline.network)):
        for axes, seconds in traffic.items():
            rule = "overlaps" if hides(axes) else "does not overlap"
            table.add_row(
                f"{link} {axes}", seconds_text(seconds), rule if roofline.waits is None else ""
            )
    for axes, seconds in (roofline.waits or {}).items():
        table.add_row(f"exposed {axes}", seconds_text(seconds), "as the program is scheduled")
    return table


def _prediction(plan: Plan) -> str:
    roofline, mfu, most = plan.roofline, plan.mfu, plan.mfu_ceiling
    how = "" if roofline.waits is None else " as it is scheduled"
    text = (
        f"bound by {roofline.bound}; predicted step time{how} {seconds_text(roofline.step_seconds)}"
        + ("" if mfu is None else f" (MFU {mfu:.1%})")
        + f", {seconds_text(roofline.step_seconds_apart)} if no communication overlaps; its "
        f"products alone take at least {seconds_text(roofline.least)}"
    )
    # A formula that counts masked scores too may exceed what is executed.
    return text if most is None or most >= 1 else f"{text}: MFU at most {most:.1%}"


def seconds_text(seconds: float | None) -> str:
    """A time in words."""
    return UNKNOWN if seconds is None else human_seconds(seconds)


def new_table(*columns: str) -> Table:
    """A table with names of columns, of which the first is to the left."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def section(console: Console, title: str, body: Table | Text) -> None:
    """Prints a part of a report under a title."""
    line(console, "")
    line(console, title, style="bold")
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def line(console: Console, text: str, *, style: str = "", indent: int = 0) -> None:
    """Prints a line of a report."""
    console.print(
        Padding(Text(text, style=style), (0, 0, 0, indent), expand=False)
        if indent
        else Text(text, style)
    )
