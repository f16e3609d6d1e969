"""A plan as text: the answer first, then where it comes from."""

import io
from collections.abc import Callable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxtrain.observe.memory import human_bytes, human_count
from jaxtrain.plan.planning import Explanation, Plan, Traffic

UNKNOWN = "not known"


def render(plan: Plan, *, width: int = 100) -> str:
    """Draws a plan as plain text of at most ``width`` columns."""
    return _draw(lambda console: print_plan(plan, console), width)


def render_explanation(explanation: Explanation, *, width: int = 100) -> str:
    """Draws an explanation as plain text of at most ``width`` columns."""
    return _draw(lambda console: _explain(explanation, console), width)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan."""
    console = console or Console(highlight=False)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "1 device"
    hosts = f"{plan.hosts} host{'s' if plan.hosts > 1 else ''}"
    _line(console, f"{plan.name} on {plan.target}", style="bold")
    _line(console, f"{plan.devices} x {plan.device_kind}, {hosts}; mesh {mesh}", indent=2)
    _line(console, "")
    _line(console, verdict(plan), style="bold green" if plan.fits else "bold red")
    if plan.mend:
        _line(console, f"nearest change that fits: {plan.mend}", indent=2)
    for warning in plan.warnings:
        _line(console, f"WARNING: {warning}", style="bold yellow")
    if plan.memory is not None:
        _section(console, "memory per device", _memory(plan))
        traffic = Text("not known") if plan.hbm_bytes is None else _traffic(plan.traffic)
        _section(console, "communication per step, one device", traffic)
    _section(console, "FLOPs per step, all devices", _flops(plan))
    if plan.roofline is not None:
        _section(console, "time per step at the chip's published peaks", _roofline(plan))
        for sentence in _prediction(plan):
            _line(console, sentence, indent=2)
    if plan.compile_seconds is not None:
        _line(console, "")
        _line(console, f"compiled in {plan.compile_seconds:.1f} s")
    for note in plan.notes:
        _line(console, f"note: {note}", style="dim")


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
    table = _table("", "bytes", "")
    for name, size in rows.items():
        table.add_row(name, f"{size:,}", human_bytes(size))
    table.add_row("peak", f"{memory.peak:,}", human_bytes(memory.peak), style="bold")
    table.add_row("program", f"{memory.program:,}", human_bytes(memory.program))
    if memory.limit is not None:
        table.add_row("the device has", f"{memory.limit:,}", human_bytes(memory.limit))
    return table


def _traffic(traffic: tuple[Traffic, ...]) -> Table | Text:
    if not traffic:
        return Text("none")
    known = any(row.seconds is not None for row in traffic)
    table = _table(
        "collective", "axes", "times", "bytes each", "sent", *(["time"] if known else [])
    )
    table.columns[1].justify = "left"
    for row in traffic:
        sizes = human_bytes(row.largest)
        if row.smallest != row.largest:
            sizes = f"{human_bytes(row.smallest)} to {sizes}"
        cells = [
            row.kind,
            " + ".join(row.axes),
            f"{'≤ ' if row.conditional else ''}{row.executions:,}",
            sizes,
            human_bytes(row.sent),
        ]
        table.add_row(*cells, *([_seconds(row.seconds)] if known else []))
    return table


def _flops(plan: Plan) -> Table:
    table = _table("", "FLOPs", "")
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
    table = _table("", "time", "")
    table.columns[2].justify = "left"
    peak = "" if plan.peak_flops is None else f"{human_count(plan.peak_flops)}FLOP/s per device"
    table.add_row("compute", _seconds(roofline.compute), peak)
    moved = f"{human_bytes(plan.hbm_bytes)} moved, an estimate" if plan.hbm_bytes else ""
    table.add_row("HBM", _seconds(roofline.hbm), moved)
    for axes, seconds in roofline.interconnect.items():
        sent = sum(row.sent for row in plan.traffic if " + ".join(row.axes) == axes)
        table.add_row(f"interconnect {axes}", _seconds(seconds), f"{human_bytes(sent)} sent")
    return table


def _prediction(plan: Plan) -> list[str]:
    roofline = plan.roofline
    if not roofline.known:
        return ["predicted step time: not known, for want of the device's peaks"]
    lines = [
        f"bound by {roofline.bound}; predicted step time {_seconds(roofline.step_seconds)} if all "
        f"of it overlaps, {_seconds(roofline.step_seconds_apart)} if no communication does"
    ]
    if plan.mfu_ceiling is not None:
        lines.append(f"MFU at most {plan.mfu_ceiling:.1%}")
    return lines


def _explain(explanation: Explanation, console: Console) -> None:
    for warning in explanation.warnings:
        _line(console, f"WARNING: {warning}", style="bold yellow")
    table = _table("", "bytes", "")
    for name, size in explanation.memory.items():
        table.add_row(name, f"{size:,}", human_bytes(size))
    _section(console, "memory per device", table)
    _section(console, "communication per call, one device", _traffic(explanation.traffic))
    if None in explanation.loops:
        _line(console, "note: loops of unknown length are counted as one trip", style="dim")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _section(console: Console, title: str, body: Table | Text) -> None:
    _line(console, "")
    _line(console, title, style="bold")
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def _line(console: Console, text: str, *, style: str = "", indent: int = 0) -> None:
    console.print(
        Padding(Text(text, style=style), (0, 0, 0, indent), expand=False)
        if indent
        else Text(text, style)
    )


def _draw(draw: Callable[[Console], None], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    draw(console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
