"""Pictures of tick tables: in the terminal, tick by tick, and as a PNG, true to time.

Blue is forward and green is backward; the later a chunk of its device, the darker. The number in a
cell is the microbatch.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from jaxtrain.engines.pipeline.tables import (
    NONE,
    Table,
    Times,
    bubble,
    makespan,
    peak_stash,
    unit_times,
)
from jaxtrain.host.paths import is_folder
from jaxtrain.host.pictures import new_figure, save_figure

# From the first chunk of a device to its last, as red, green and blue.
FORWARD_SHADES = ((164, 198, 240), (66, 118, 186))
BACKWARD_SHADES = ((170, 216, 176), (64, 142, 92))
GAP = "···"


def title(table: Table) -> str:
    """A table's name and sizes in one line.

    >>> from jaxtrain.engines.pipeline.tables import make_table
    >>> title(make_table("interleaved", stages=4, microbatches=8, virtual=2))
    'interleaved: 4 stages x 2 chunks, 8 microbatches'
    """
    chunks = f" x {table.virtual} chunks" if table.virtual > 1 else ""
    return f"{table.schedule}: {table.stages} stages{chunks}, {table.microbatches} microbatches"


def print_tables(tables: Sequence[Table], *, console: Console | None = None) -> None:
    """Prints tables one under another: devices down, ticks across.

    A tick in which any device runs both a forward and a backward unit is two cells wide. Where the
    picture is wider than the console, the middle is left out and marked.
    """
    console = console or Console()
    for table in tables:
        console.print(picture(table, console.width), no_wrap=True, overflow="crop")
        console.print()
    console.print(legend(max(table.virtual for table in tables)))


def print_summary(tables: Sequence[Table], *, forward: float = 1.0, backward: float = 2.0) -> None:
    """Prints makespan, bubble, ticks and stash of each table.

    Args:
      tables: what to compare.
      forward: time of a whole stage forward, as for :func:`makespan`.
      backward: time of a whole stage backward.
    """
    columns = RichTable(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    columns.add_column("schedule")
    for name in ("chunks", "ticks", "makespan", "bubble"):
        columns.add_column(name, justify="right")
    columns.add_column("peak stash of devices 0, 1, ... (stage inputs)", overflow="fold")
    for table in tables:
        columns.add_row(
            table.schedule,
            str(table.virtual),
            str(table.ticks),
            f"{makespan(table, forward=forward, backward=backward):g}",
            f"{bubble(table, forward=forward, backward=backward):.1%}",
            " ".join(map(str, peak_stash(table))),
        )
    Console().print(columns, highlight=False)


def print_balance(rows: Sequence[tuple[Table, str, Sequence[int], Times, Times]]) -> None:
    """Prints what each stage of a model computes, and what follows for the makespan.

    Args:
      rows: of each, the schedule, the name of a placement, the number of layers of each global
        stage, and the operations (in 10^9) of its forward and of its backward unit.
    """
    columns = RichTable(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("schedule", "layers of stages 0, 1, ...", "GFLOP", "% of the busiest"):
        columns.add_column(name, overflow="fold", min_width=11)
    for name in ("GFLOP of a step", "bubble"):
        columns.add_column(name, justify="right")
    for table, name, counts, forward, backward in rows:
        total_G = np.add(forward, backward)
        columns.add_row(
            table.schedule,
            f"{name}: {' '.join(map(str, counts))}",
            " ".join(f"{total:.4g}" for total in total_G),
            " ".join(f"{share:.0f}" for share in 100 * total_G / total_G.max()),
            f"{makespan(table, forward=forward, backward=backward):,.1f}",
            f"{bubble(table, forward=forward, backward=backward):.1%}",
        )
    Console().print(columns, highlight=False)


def picture(table: Table, width: int) -> Text:
    """The table as lines of at most ``width`` characters where that is possible."""
    digits = len(str(max(table.microbatches, table.ticks) - 1))
    label = f"{{:>{len(str(table.stages - 1)) + 7}}}  "
    halves = [
        [kind for kind in ("fwd", "bwd") if (cells(table, kind)[0][tick] != NONE).any()]
        for tick in range(table.ticks)
    ]
    room = width - len(label.format(""))
    # Two numbers in one tick need a space between them.
    spans = [digits if len(kinds) == 1 else 2 * digits + 1 for kinds in halves]
    head, tail = shown_ends([span + 1 for span in spans], room)
    hidden = table.ticks - head - tail
    note = f", ticks {head} to {table.ticks - tail - 1} of {table.ticks} left out" * (hidden > 0)
    shown = [*range(head), None, *range(table.ticks - tail, table.ticks)]
    shown = shown if hidden else list(range(table.ticks))

    lines = [Text(title(table), style="bold") + Text(note, style="not bold dim")]
    lines.append(Text(label.format("tick"), style="dim"))
    lines.append(Text(label.format(""), style="dim"))
    lines += [Text(label.format(f"device {device}")) for device in range(table.stages)]
    for tick in shown:
        if tick is None:
            for line in lines[1:]:
                line.append(f"{GAP} ", style="dim")
            continue
        widths = {kind: digits for kind in halves[tick]}
        if len(widths) == 2:
            widths["bwd"] += 1
        lines[1].append(f"{tick:>{spans[tick]}} ", style="dim")
        lines[2].append("".join(f"{k[0].upper():>{w}}" for k, w in widths.items()) + " ", "dim")
        for device, line in enumerate(lines[3:]):
            for kind, columns in widths.items():
                microbatch, chunk = (array[tick, device] for array in cells(table, kind))
                if microbatch == NONE:
                    line.append(" " * columns)
                else:
                    line.append(f"{microbatch:>{columns}}", style=cell_style(table, kind, chunk))
            line.append(" ")
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def shown_ends(widths: list[int], room: int) -> tuple[int, int]:
    """Counts the columns at the head and the tail that fit into ``room``, with the mark between.

    >>> shown_ends([3, 3, 3], 9)
    (3, 0)
    >>> shown_ends([3, 3, 3, 3, 3], 13)
    (2, 1)
    """
    if sum(widths) <= room:
        return len(widths), 0
    head = tail = 0
    used = len(GAP) + 1
    while head + tail < len(widths):
        take_head = head <= tail
        used += widths[head] if take_head else widths[-1 - tail]
        if used > room and head and tail:
            break
        head, tail = head + take_head, tail + (not take_head)
    return head, tail


def cells(table: Table, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Microbatches and chunks of the forward (``"fwd"``) or backward (``"bwd"``) units, [T, S]."""
    if kind == "fwd":
        return table.fwd_microbatch, table.fwd_chunk
    return table.bwd_microbatch, table.bwd_chunk


def shade(kind: str, chunk: int, virtual: int) -> tuple[int, int, int]:
    """The colour of a unit as red, green and blue, 0 to 255."""
    light, dark = FORWARD_SHADES if kind == "fwd" else BACKWARD_SHADES
    depth = 0.0 if virtual == 1 else chunk / (virtual - 1)
    red, green, blue = (round(a + (b - a) * depth) for a, b in zip(light, dark, strict=True))
    return red, green, blue


def is_dark(colour: tuple[int, int, int]) -> bool:
    """Whether white text reads better than black on it."""
    return float(np.dot(colour, (0.299, 0.587, 0.114))) < 128


def cell_style(table: Table, kind: str, chunk: int) -> Style:
    """The style of one cell in the terminal."""
    colour = shade(kind, chunk, table.virtual)
    text = "white" if is_dark(colour) else "black"
    return Style.parse(f"{text} on rgb({colour[0]},{colour[1]},{colour[2]})")


def legend(virtual: int) -> Text:
    """Says what the colours mean."""
    line = Text()
    for kind, name in (("fwd", "forward (F)"), ("bwd", "backward (B)")):
        for chunk in range(virtual):
            red, green, blue = shade(kind, chunk, virtual)
            line.append("  ", style=f"on rgb({red},{green},{blue})")
        line.append(f" {name}   ")
    if virtual > 1:
        line.append("darker: a later chunk of the device   ", style="dim")
    line.append("numbers are microbatches", style="dim")
    return line


def save_png(
    tables: Sequence[Table], path: str | Path, *, forward: float = 1.0, backward: float = 2.0
) -> None:
    """Draws tables one under another on one axis of time and saves the picture.

    Args:
      tables: what to draw.
      path: the PNG file; its folder must exist.
      forward: time of a whole stage forward, as for :func:`makespan`.
      backward: time of a whole stage backward.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the folder does not exist.
    """
    path = Path(path)
    if not is_folder(path.parent):
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to: make it first")
    end = max(makespan(table, forward=forward, backward=backward) for table in tables)
    rows = sum(table.stages for table in tables)
    size = (float(np.clip(0.17 * end / forward, 9, 22)), 0.24 * rows + 0.62 * len(tables) + 0.75)
    figure = new_figure(*size)
    axes = figure.subplots(
        len(tables), 1, squeeze=False, sharex=True, height_ratios=[t.stages for t in tables]
    )[:, 0]
    inches = 0.9 * size[0] / end
    for table, ax in zip(tables, axes, strict=True):
        draw(table, ax, forward=forward, backward=backward, end=end, inches=inches)
    axes[-1].set_xlabel("time (one stage forward = 1)" if forward == 1 else "time", fontsize=9)
    figure.legend(
        handles=legend_handles(max(table.virtual for table in tables)),
        loc="outside lower right",
        ncols=8,
        frameon=False,
        fontsize=9,
    )
    save_figure(figure, path)


def draw(table: Table, ax, *, forward: float, backward: float, end: float, inches: float) -> None:
    """Draws one table on matplotlib axes; ``inches`` is the length of one unit of time."""
    from matplotlib.patches import Rectangle

    total = makespan(table, forward=forward, backward=backward)
    share = bubble(table, forward=forward, backward=backward)
    times = dict(zip(("fwd", "bwd"), unit_times(table, forward, backward), strict=True))
    start_T = np.concatenate([[0.0], np.cumsum(sum(times.values()).max(axis=1))])
    ax.add_patch(Rectangle((0, -0.5), total, table.stages, color="#f1f1f1", linewidth=0))
    digits = len(str(table.microbatches - 1))
    for kind, cost_TS in times.items():
        cost = cost_TS.max()
        font = min(7.5, 72 * inches * cost / (0.75 * digits))
        microbatch_TS, chunk_TS = cells(table, kind)
        for tick, device in np.argwhere(microbatch_TS != NONE):
            begin = start_T[tick] + (kind == "bwd") * times["fwd"][tick, device]
            colour = shade(kind, chunk_TS[tick, device], table.virtual)
            box = Rectangle((begin, device - 0.44), cost, 0.88, linewidth=0.4)
            box.set(facecolor=np.divide(colour, 255), edgecolor="white")
            ax.add_patch(box)
            if font >= 4.5:
                ax.text(
                    begin + cost / 2,
                    device,
                    str(microbatch_TS[tick, device]),
                    fontsize=font,
                    color="white" if is_dark(colour) else "#222222",
                    ha="center",
                    va="center_baseline",
                )
    ax.set(xlim=(0, end * 1.002), ylim=(table.stages - 0.4, -0.6), yticks=range(table.stages))
    ax.set_ylabel("device", fontsize=9)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    text = f"{title(table)}   |   makespan {total:g}, bubble {share:.1%}, "
    ax.set_title(f"{text}peak stash {peak_stash(table).max()}", fontsize=10, loc="left")


def legend_handles(virtual: int) -> list:
    """The patches of the legend."""
    from matplotlib.patches import Patch

    handles = []
    for kind, name in (("fwd", "forward"), ("bwd", "backward")):
        for chunk in range(virtual):
            label = name if virtual == 1 else f"{name}, chunk {chunk}"
            handles.append(Patch(color=np.divide(shade(kind, chunk, virtual), 255), label=label))
    return [*handles, Patch(color="#f1f1f1", label="idle")]
