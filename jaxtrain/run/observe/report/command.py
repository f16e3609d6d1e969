"""The command ``jaxtrain report``, and the report that a run leaves in its folder."""

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

import tyro
from etils import epath

from jaxtrain.host import storage
from jaxtrain.host.least import check_least
from jaxtrain.host.memory import human_bytes
from jaxtrain.host.paths import as_path, write_whole
from jaxtrain.run import receipts
from jaxtrain.run.folder import PICTURE, REPORT
from jaxtrain.run.observe import journal
from jaxtrain.run.observe.goodput import moved, spent
from jaxtrain.run.observe.report import lineage, rates
from jaxtrain.run.observe.report.convergence import diagnose
from jaxtrain.run.observe.report.figures import side_by_side
from jaxtrain.run.observe.report.page import make_page
from jaxtrain.run.observe.report.picture import save_png
from jaxtrain.run.observe.report.push import push
from jaxtrain.run.observe.report.records import Record, read, significant

# A run with fewer log lines has no curves to draw.
CURVE = 20

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Writes one HTML file that says whether runs are well: curves, throughput, updates left out,
    configuration. It needs no network and no server, and may be made while a run goes on. Prints
    what in the log says that training is slower than it could be, and what to try."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs; several are overlaid, with tables of their time, memory, utilisation, loss
    and cost, as before and after, and of what their configurations differ in."""
    out: str | None = None
    """File to write; left out, report.html in the run's folder, of several in the current one."""
    push: tuple[str, ...] = ()
    """Trackers to send the log of a run to when it has ended, named as for --trackers."""
    png: str | None = None
    """Also save the curves of losses, rate, gradient norm and throughput in this PNG file."""
    price: float | None = None
    """Price of one chip, on CPUs of one machine, for an hour, in any currency; left out, what each
    start of a run was given."""


def run_report(options: ReportOptions, rest: list[str]) -> int:
    """Writes the report and names it."""
    del rest
    if not options.runs:
        raise ValueError("name the folder of a run, such as runs/gpt-1")
    check_least(options, price=0)
    records = [record.at_price(options.price) for record in read(options.runs)]
    for record in records:
        push(record, options.push)
    folder = as_path(options.runs[0]) if len(records) == 1 else as_path(".")
    out = folder / REPORT if options.out is None else as_path(options.out)
    if options.png is not None:  # Where that cannot be, nothing is written.
        save_png(records, options.png)
        print(options.png)
    page = make_page(records)
    try:
        write_whole(out, page)
    except OSError as error:
        why = storage.why(error)
        raise OSError(f"'{out}' cannot be written ({why}): name another file with --out") from error
    print(out)
    if len(records) == 1:
        lines = [*_causes(records[0]), *_spent(records[0])]
    else:
        causes = [line for record in records for line in (record.name, *_causes(record))]
        lines = [*side_by_side(records), "", *causes]
    print("\n".join(lines))
    return 0


def _causes(record: Record) -> list[str]:
    """The sentences on why the loss of a run falls slowly, one a line."""
    if not (found := diagnose(record)):
        return ["Nothing in the log says why training would be slower than it could be."]
    return list(map(str, found))


def _spent(record: Record) -> list[str]:
    """The lines on what a run took, what it moved, and what its step was forecast to take."""
    took, moved_ = spent(record.attempts), moved(record.attempts)
    told = ", ".join(f"{name} {significant(value, 3):,}" for name, value in took.items())
    bytes_ = ", ".join(f"{name} {human_bytes(value)}" for name, value in moved_.items())
    lines = [f"spent        {told}"] * bool(told) + [f"moved        {bytes_}"] * bool(bytes_)
    forecast = record.happened(journal.FORECAST)[-1:]
    return lines + [f"forecast     {text}" for line in forecast for text in line.get("lines", ())]


def leave_report(run_dir: epath.PathLike) -> Sequence[str]:
    """Writes the report of a run into its folder; what keeps it from that is said and no more.

    Beside it goes a PNG of the curves, where matplotlib is installed and there are any. Returns the
    lines that name them; none where there are none.
    """
    lines = []
    try:
        path, records = as_path(run_dir) / REPORT, read([run_dir])
        page = make_page(records)
        storage.retrying(lambda: write_whole(path, page), f"the report {path}", seconds=10.0)
        lines.append(f"report       {path}")
        tests = rates.found(records[0])
        lines += [f"rates        {test.text}" for test in tests]
        lines += [f"lineage      {text}" for text in lineage.found(records[0])]
        if (chain := records[0].receipts) and not receipts.check(chain):
            lines.append(f"receipts     {receipts.describe(chain)}")
        lines += [f"diagnosis    {each}" for each in diagnose(records[0])]
        lines += _spent(records[0])
        if tests or records[0].values("train/loss").size >= CURVE:
            with contextlib.suppress(ImportError):
                save_png(records, path.parent / PICTURE)
                lines.append(f"curves       {path.parent / PICTURE}")
    except Exception as error:  # The run is done and saved: nothing told about it may end it.
        logger.warning("no report of %s: %s: %s", run_dir, type(error).__name__, error)
    return lines
