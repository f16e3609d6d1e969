"""Results of a search: rows of layouts that fit, families of rejections, and their tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from jaxtrain.layout import Layout
from jaxtrain.planning.candidates import name_of
from jaxtrain.planning.report import Plan
from jaxtrain.planning.roofline import Prediction

WIDTH = 100
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout that fits, by its estimate; the best ones with what the compiler says.

    Args:
      layout: the layout, and ``flags`` that make it of the search's own.
      estimated_bytes: of one device at its peak, by :mod:`jaxtrain.planning.estimate`.
      prediction: seconds, and what bounds them, by the estimate.
      mfu: model FLOPs over peak FLOPs in the time of a step; None where either is unknown.
      tokens_per_s: what a step holds (``Data.item``) per second, over all devices.
      plan: by the compiler; None where it was not asked, or failed.
      compile_s: how long it took; None where it was not asked.
      problem: why it failed, in one sentence.
      note: how what was estimated or compiled differs from what would run.
    """

    layout: Layout
    flags: list[str]
    estimated_bytes: int
    prediction: Prediction
    bubble: float
    mfu: float | None
    tokens_per_s: float = 0.0
    plan: Plan | None = None
    compile_s: float | None = None
    problem: str | None = None
    note: str | None = None

    @property
    def scheduled(self) -> Prediction | None:
        """Prediction by the schedule of the compiled program; None where that is not known."""
        found = self.plan.roofline if self.plan else None
        return found if found is not None and found.waits is not None else None

    @property
    def time(self) -> Prediction:
        """The best prediction known: by the schedule, or the estimate."""
        return self.scheduled or self.prediction

    @property
    def compiled_bytes(self) -> int | None:
        """Peak by the compiler; None where it was not asked or did not say."""
        return self.plan.memory.peak if self.plan and self.plan.memory else None

    @property
    def error(self) -> float | None:
        """Estimate over compiler, less 1; None where it was not compiled."""
        size = self.compiled_bytes
        return None if size is None else self.estimated_bytes / size - 1

    @property
    def fits(self) -> bool:
        """Whether nothing that the compiler has said is against it."""
        return self.problem is None and (self.plan is None or self.plan.fits)

    def to_json(self) -> dict[str, Any]:
        """The row as plain data: bytes and seconds."""
        predicted = self.time
        names = ("estimated_bytes", "compiled_bytes", "error", "bubble", "mfu", "tokens_per_s")
        names += ("compile_s", "problem", "note", "flags")
        return (
            dataclasses.asdict(self.layout)
            | {name: getattr(self, name) for name in names}
            | {
                "step_s": predicted.step_seconds,
                "estimated_s": self.prediction.step_seconds,
                "scheduled": self.scheduled is not None,
                "compute_s": predicted.compute,
                "hbm_s": predicted.hbm,
                "wire_s": dict(predicted.interconnect),
                "network_s": dict(predicted.network),
                "bound": predicted.bound,
            }
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """Layouts that lost for one reason, in words: how many, and one of them."""

    reason: str
    count: int
    example: str


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Args:
      assumed: bandwidths and efficiencies, in words.
      memory_bytes: of one device; None where nothing limits it.
      considered: layouts in all; of those that fit, every way to cross the slow network.
      rows: those that fit, fastest first; compiled ones that fit before the others, by their
        schedule where that is known.
      families: why the others lost, largest first.
      seconds: how long the search took, compiling included.
      complete: False where it was stopped before its end.
    """

    target: str
    devices: int
    assumed: str
    memory_bytes: int | None
    considered: int
    rows: tuple[Row, ...]
    families: tuple[Family, ...]
    seconds: float
    complete: bool = True

    def to_json(self) -> dict[str, Any]:
        """The result as plain data: bytes and seconds."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del plain["families"]
        plain["rows"] = [row.to_json() for row in self.rows]
        plain["rejected"] = [dataclasses.asdict(family) for family in self.families]
        return plain


def rank(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: compiled ones that fit, compiled ones that do not, others, each fastest first."""

    def group(row: Row) -> int:
        return 2 if row.compile_s is None else int(not row.fits)

    return sorted(rows, key=lambda row: (group(row), row.time.step_seconds))


def cost(
    result: SearchResult, *, tokens: float | None = None, price: float | None = None
) -> dict[str, float]:
    """Returns the cost of training with the first row, as :func:`cost_at` does."""
    rate = result.rows[0].tokens_per_s if result.rows else 0
    return cost_at(rate, result.devices, tokens=tokens, price=price)


def cost_at(
    rate: float, devices: int, *, tokens: float | None = None, price: float | None = None
) -> dict[str, float]:
    """Returns the cost of training on some devices that take ``rate`` tokens per second together.

    Args:
      rate: tokens per second; 0 where it is not known, for which nothing is returned.
      devices: the number of chips.
      tokens: all tokens to train on.
      price: price of a chip for an hour.

    Returns:
      ``tokens_per_s``, ``chip_hours_per_billion`` tokens, and where asked for ``days`` for all
      tokens, ``price_per_billion`` and ``price`` of all.
    """
    if not rate:
        return {}
    hours = devices * 1e9 / rate / 3600
    found = {"tokens_per_s": rate, "chip_hours_per_billion": hours}
    if price is not None:
        found["price_per_billion"] = price * hours
    if tokens is not None:
        found["days"] = tokens / rate / 86400
        if price is not None:
            found["price"] = price * hours * tokens / 1e9
    return found


def cost_line(costs: Mapping[str, float], tokens: float | None) -> str:
    """Says what :func:`cost_at` returns in one line."""
    line = (
        f"{costs['tokens_per_s']:,.0f} tokens/s, "
        f"{costs['chip_hours_per_billion']:,.1f} chip-hours per billion tokens"
    )
    if "price_per_billion" in costs:
        line += f" (costs {costs['price_per_billion']:,.2f})"
    if "days" in costs:
        line += f"; {tokens / 1e9:,.1f} billion take {costs['days']:,.1f} days"
        line += f" and cost {costs['price']:,.0f}" if "price" in costs else ""
    return line


def print_search(
    result: SearchResult,
    console: Console | None = None,
    *,
    tokens: float | None = None,
    price: float | None = None,
) -> None:
    """Prints the ranked table, what the first costs, and the families that lost, 100 wide."""
    console = console or Console(width=WIDTH, highlight=False)
    memory = "" if result.memory_bytes is None else f", {result.memory_bytes / GIB:.2f} GiB each"
    console.print(
        f"{result.considered} layouts on {result.target}{memory}, searched in "
        f"{result.seconds:.0f} s" + ("" if result.complete else ", stopped before the end")
    )
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("mesh")
    # One unit for all rows, by the smallest: a small model is nothing in GiB.
    small = min((row.estimated_bytes for row in result.rows), default=GIB) < GIB / 10
    unit, name = (2**20, "MiB") if small else (GIB, "GiB")
    sizes = (f"estimated\n{name}", f"compiled\n{name}")
    for name in ("micro-\nbatches", "remat", "gather", *sizes, "error", "step ms"):
        words = name in ("remat", "gather")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    table.add_column("MFU", justify="right", no_wrap=True)
    table.add_column("bound by")
    rank = 0
    for row in result.rows:
        bad = not row.fits
        rank += not bad
        bound = row.time.bound + (f", bubble {row.bubble:.0%}" if row.bubble else "")
        table.add_row(
            "-" if bad else str(rank),
            *_words(row.layout),
            f"{row.estimated_bytes / unit:.2f}",
            "-" if row.compiled_bytes is None else f"{row.compiled_bytes / unit:.2f}",
            "-" if row.error is None else f"{100 * row.error:+.1f} %",
            _milliseconds(row.time) + ("*" if row.scheduled else ""),
            "-" if row.mfu is None else f"{row.mfu:.0%}",
            row.problem or bound,
        )
    if not result.rows:
        console.print("no layout fits")
    else:
        console.print(table)
        console.print(f"train the first with: {' '.join(result.rows[0].flags) or 'these flags'}")
        if costs := cost(result, tokens=tokens, price=price):
            console.print(f"the first: {cost_line(costs, tokens)}")
        console.print(f"times are predicted, at {result.assumed}; the error is estimate / compiler")
        if scheduled := [row for row in result.rows if row.scheduled]:
            estimates = ", ".join(_milliseconds(row.prediction) for row in scheduled)
            console.print(f"* as its program is scheduled; by the estimate {estimates} ms")
        for note in dict.fromkeys(row.note for row in result.rows if row.note):
            console.print(note)
    console.print("\nrejected:")
    rejections = RichTable(box=None, pad_edge=False, show_header=False)
    rejections.add_column("", justify="right")
    rejections.add_column("")
    rejections.add_column("", no_wrap=True)
    for family in result.families:
        rejections.add_row(str(family.count), family.reason, f"e.g. {family.example}")
    console.print(rejections)


def _words(layout: Layout) -> tuple[str, str, str, str]:
    """The mesh, the microbatches, what is kept for the backward pass, and when weights gather."""
    mesh, pipeline = layout.mesh, layout.pipeline
    count, kept = f"{layout.microbatches(mesh.pipe)}", layout.remat or "-"
    if mesh.pipe > 1:
        count += f" x {pipeline.virtual}" if pipeline.virtual > 1 else ""
        kept = "stage" if pipeline.remat == "full" else kept
    if mesh.tensor > 1 and not layout.sequence_parallel:
        kept += ", whole"
    return name_of(mesh), count, kept, layout.gather or "-"


def _milliseconds(time: Prediction) -> str:
    milliseconds = 1000 * time.step_seconds
    return f"{milliseconds:,.{1 if milliseconds < 1000 else 0}f}"
