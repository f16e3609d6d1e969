"""Terminal output of a run: its header, one line of progress, and lines of text."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from jaxtrain.host.memory import human_count

# Seconds between lines where output is not a terminal.
LINE_SECONDS = 15.0
# There, seconds after which the silence of a long step or evaluation is a line of its own.
SILENT_SECONDS = 60.0


def print_header(title: str, facts: Mapping[str, str], *, console: Console | None = None) -> None:
    """Prints a table of facts, texts as they are; in the first process only."""
    if jax.process_index() != 0:
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts.items():
        table.add_row(Text(name), Text(text))  # not as markup, in which [brackets] are styles
    console = console or _console()
    console.print(Text(title, style="bold"))
    console.print(table, highlight=False)
    console.print()


def print_lines(lines: Iterable[str], *, console: Console | None = None) -> None:
    """Prints text as it is; in the first process only."""
    if jax.process_index() == 0:
        console = console or _console()
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _console() -> Console:
    """A console that writes plain lines in a notebook, where rich would write terminal codes."""
    return Console(force_jupyter=False)


@contextlib.contextmanager
def waiting(
    text: str,
    *,
    expected: float | None = None,
    console: Console | None = None,
    every: float = SILENT_SECONDS,
) -> Iterator[None]:
    """Says how long a ``with`` takes, once a second on a terminal and in sparse lines elsewhere; in
    the first process only.

    Args:
      text: names what takes long.
      expected: seconds that it took before, from which the time left follows; None where unknown.
      console: where to print.
      every: seconds between lines where there is no terminal.
    """
    console, began, ended = console or _console(), time.monotonic(), threading.Event()

    def line() -> str:
        seconds = time.monotonic() - began
        if not expected:
            return f"{text} for {_minutes(seconds)}"
        remaining = _minutes(max(0.0, expected - seconds))
        return f"{text} for {_minutes(seconds)}, about {remaining} left"

    def tell() -> None:
        while not ended.wait(1.0 if live else every):
            live.update(line()) if live else print_lines([line()], console=console)

    shown = jax.process_index() == 0
    live = console.status(text) if shown and console.is_terminal else None
    with live or contextlib.nullcontext():
        if shown:
            threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            ended.set()


class Progress:
    """A bar with step, loss, throughput and time left; plain lines where there is no terminal.

    Lines begin with the date and the time of day. Throughput counts ``item``, and
    ``steps_per_epoch`` is None where unknown.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        item: str = "tokens",
        steps_per_epoch: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._item, self._clock = total, item, clock
        self._steps_per_epoch = steps_per_epoch
        self._console = console or _console()
        self._quiet = jax.process_index() != 0
        self._start, self._line_at = start, clock()
        self._first: tuple[int, float] | None = None
        self._step, self._step_at = start, clock()
        self._said_at = self._step_at
        self._closed = threading.Event()
        self._bar: RichProgress | None = None
        if self._console.is_terminal and not self._quiet:
            self._bar = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=total, completed=start, text="")

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        elif not self._quiet:
            threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._bar is not None:
            self._bar.stop()

    def update(
        self, step: int, metrics: Mapping[str, float], items_per_second: float | None
    ) -> None:
        """Shows that a step has ended, with its loss and perhaps other metrics, by name."""
        rate = f"{human_count(items_per_second)} {self._item}/s" if items_per_second else ""
        self._step, self._step_at = step, self._clock()
        epoch = f"epoch {float(step / per):.3g}" if (per := self._steps_per_epoch) else ""
        told = [f"loss {metrics['loss']:.4f}"]
        more = [name for name in metrics if name != "loss"]
        told += [f"{name.replace('_', ' ')} {metrics[name]:.3g}" for name in more]
        text = "  ".join(part for part in (epoch, *told, rate) if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif not self._quiet:
            now = self._clock()
            # The first step waits for more than itself, and would lengthen the time left for long.
            self._first = self._first or (step, now)
            if step in (self._start + 1, self._total) or now - self._line_at >= LINE_SECONDS:
                self._line_at = now
                self._print(f"step {step}/{self._total}  {text}  {self._left(step, now)}".rstrip())

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if not self._quiet:
            self._print(text)

    def _left(self, step: int, now: float) -> str:
        first, at = self._first
        if step == first or step == self._total:
            return ""
        return f"{_minutes((now - at) / (step - first) * (self._total - step))} left"

    def _break_silence(self) -> None:
        while not self._closed.wait(SILENT_SECONDS / 10):
            silent = self._clock() - self._said_at
            if silent >= SILENT_SECONDS:
                estimate = self._left(self._step, self._step_at) if self._first else ""
                news = f"no news for {_minutes(silent)}  {estimate}".rstrip()
                self._print(f"step {self._step}/{self._total}  {news}")

    def _print(self, text: str) -> None:
        self._said_at = self._clock()
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
