"""``jaxtrain watch``: the report of runs that go on, in a browser or in the terminal.

It reads what the runs have written and asks nothing of them.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import tyro
from etils import epath
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.host import answering
from jaxtrain.host.memory import human_count
from jaxtrain.host.paths import as_path, is_folder, listed
from jaxtrain.run.observe.report.health import LEVELS, Finding, examine, recent
from jaxtrain.run.observe.report.page import make_page
from jaxtrain.run.observe.report.records import Record, downsample, holds_run, read

# Of the page, where it is free and no other is asked for.
PORT = 8088
# Looks take at most this part of the time, however long the logs are.
SHARE = 0.1
BARS = " ▁▂▃▄▅▆▇█"
# The curve of a single run, in lines.
HEIGHT = 8
STYLES = {"good": "green", "look": "yellow", "bad": "bold red"}


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Shows runs while they go on: the page of `jaxtrain report`, renewed in a browser on this
    machine, or with --terminal a table with the curves of their losses. It only reads files."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs, or a folder of such folders, such as runs."""
    terminal: bool = False
    """Print a table here instead, renewed until Ctrl-C."""
    port: int | None = None
    """Port of the page on localhost; default 8088, or a free port if that is taken. From another
    machine: ssh -L 8088:localhost:8088."""
    every: float = 5.0
    """Seconds between two looks."""
    once: bool = False
    """Print the table once and end; needs --terminal."""


def run_watch(options: WatchOptions, rest: list[str]) -> int:
    """Watches until it is interrupted."""
    del rest
    if not options.runs:
        raise ValueError("name the folder of a run, such as runs/gpt-1, or a folder of runs")
    if not options.every > 0:
        raise ValueError(f"--every is {options.every}: give more than 0 seconds")
    if options.once and not options.terminal:
        raise ValueError("--once goes with --terminal")
    if options.port is not None and not 0 <= options.port < 2**16:
        raise ValueError(f"--port is {options.port}: give a number from 0 to 65535")

    def look() -> list[Record]:
        return read(runs_in(options.runs))

    with contextlib.suppress(KeyboardInterrupt):
        look()  # What is no run is refused before anything is shown.
        if options.terminal:
            _print_tables(look, options.every, once=options.once)
        else:
            with serve(look, options.port, options.every) as server:
                host, port = server.server_address[:2]
                print(f"http://{host}:{port}  (Ctrl-C ends it)", flush=True)
                server.serve_forever()
    return 0


def runs_in(names: Sequence[str]) -> list[epath.Path]:
    """The runs that folders are, or hold, in the order of their names. Raises ValueError where one
    neither is a run nor holds any."""
    found = []
    for path in map(as_path, names):
        if holds_run(path):
            found.append(path)
            continue
        inner = sorted(filter(holds_run, listed(path))) if is_folder(path) else []
        if not inner:
            raise ValueError(f"{path} is no run's folder and holds none: name one that a run wrote")
        found += inner
    return found


def serve(look: Callable[[], list[Record]], port: int | None, every: float) -> answering.Server:
    """Opens the page on localhost; no other file is served.

    It is made anew, of the runs that ``look`` reads, whenever it is asked for, and a page that is
    shown asks again after ``every`` so many seconds. Port 0 is a free one; None is ``PORT``, or a
    free one where that is taken. Raises OSError where the port is taken.
    """

    class Page(answering.Handler):
        def do_GET(self) -> None:
            # A page of somebody else's, whose name was made to lead here, is not to read the runs.
            host = self.headers.get("Host", "").partition(":")[0]
            if self.path != "/" or host not in ("localhost", "127.0.0.1"):
                self.send_error(404)
                return
            try:
                body, status, kind = make_page(look(), every=every), 200, "html"
            except (OSError, ValueError) as error:  # A run that is moved away meanwhile.
                body, status, kind = str(error), 503, "plain"
            headers = {"Content_Type": f"text/{kind}; charset=utf-8", "Cache_Control": "no-store"}
            self.answer(body.encode(), status=status, **headers)

    for number in (PORT, 0) if port is None else (port,):
        try:
            return answering.Server(("127.0.0.1", number), Page)
        except OSError as error:
            failed = error
    raise OSError(f"port {number} of this machine cannot be used ({failed.strerror}): give another")


def table(records: Sequence[Record]) -> Table:
    """Runs as rows: the step, losses, throughput and the curve of the loss."""
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("run", overflow="fold", min_width=8)
    for name in ("step", "loss", "held-out", "per second", "curve"):
        rows.add_column(name, no_wrap=True)
    for record in records:
        losses = record.values("train/loss")
        held = record.values(next(iter(record.held_out_losses), ""))
        rate = record.values(next(iter(record.rates), ""))
        n = recent(losses.size)
        rows.add_row(
            Text(record.name, style="bold"),
            f"{record.step:,}" + (f"/{record.total:,}" if record.total else ""),
            f"{losses[-n:].mean():#.4g}" if n else "",
            f"{held[-1]:#.4g}" if held.size else "",
            human_count(float(rate[-1])) if rate.size else "",
            "".join(curve(record)),
        )
    return rows


def verdicts(found: Sequence[tuple[Record, Finding]]) -> Text:
    """A line for each run: the worst that was found."""
    lines = Text()
    for record, worst in found:
        lines.append(f"{record.name}: ", style="bold")
        lines.append(f"{worst.text}\n", style=STYLES[worst.level])
    return lines


def curve(record: Record, *, width: int = 20, height: int = 1) -> list[str]:
    """Draws the training loss in lines of so many characters; none where it is not logged.

    >>> from jaxtrain.run.observe.report.records import Series
    >>> loss = Series(np.arange(4), np.array([4.0, 2.0, 1.0, 0.5]))
    >>> record = Record("", "", {"train/loss": loss}, loss, {}, {}, [], 0)
    >>> curve(record)
    ['█▄▂▁']
    >>> curve(record, height=2)
    ['█   ', '█▇▃▁']
    """
    if not record.values("train/loss").size:
        return []
    values = downsample(record.series["train/loss"], width)["y"]
    low, high = values.min(), values.max()
    # In eighths of a line, of which the smallest value has one.
    eighths = np.rint((values - low) / ((high - low) or 1.0) * (8 * height - 1)).astype(int) + 1
    floors = range(8 * (height - 1), -1, -8)
    return ["".join(BARS[n] for n in np.clip(eighths - floor, 0, 8)) for floor in floors]


def _drawing(record: Record, width: int) -> Text:
    """The curve of a run with the ends of its axes."""
    lines = curve(record, width=width, height=HEIGHT)
    if not lines:
        return Text()
    steps, values = record.series["train/loss"].finite().steps, record.values("train/loss")
    ends = f"steps {steps[0]:,} to {steps[-1]:,}, loss {values.min():#.4g} to {values.max():#.4g}"
    return Text("\n".join([*lines, ends, ""]))


def _print_tables(look: Callable[[], list[Record]], every: float, *, once: bool) -> None:
    console = Console()
    while True:
        began = time.monotonic()
        found = [(record, examine(record)[0]) for record in look()]
        found.sort(key=lambda each: LEVELS.index(each[1].level))
        records = [record for record, _ in found]
        if console.is_terminal and not once:
            console.clear()
        console.print(table(records))
        console.print()
        if len(records) == 1:
            console.print(_drawing(records[0], console.width))
        console.print(verdicts(found), soft_wrap=True)
        sys.stdout.flush()
        if once:
            return
        time.sleep(max(every, (time.monotonic() - began) / SHARE))
