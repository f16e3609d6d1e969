"""Sends the log of a run to trackers, after it has ended."""

import collections
from collections.abc import Sequence
from typing import Any

from jaxtrain.host.paths import as_path
from jaxtrain.run.observe import journal, trackers
from jaxtrain.run.observe.report.records import Record
from jaxtrain.run.provenance import read_record


def push(record: Record, names: Sequence[str]) -> None:
    """Sends all lines of a run, as the run that a tracker has or would have of it; prints how many.

    Args:
      record: the run.
      names: of trackers, as ``--trackers`` takes them.

    Raises:
      ImportError: the package of a tracker is missing.
      ValueError: a tracker has not taken the log, or the folder lacks what names the run.
    """
    openings, path = trackers.parse(names), as_path(record.path)
    trackers.check_installed(openings)
    if openings and not (starts := record.happened(journal.START)):
        raise ValueError(f"{path} has no {journal.EVENTS}, which names the run to a tracker")
    lines: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for name, series in (record.series | record.vectors).items():
        for step, value in zip(series.steps.tolist(), series.values, strict=True):
            lines[step][name] = value

    def send(opening: trackers.Opening) -> None:
        # Earlier releases named the experiment in the record alone, if at all.
        sources = {"experiment": path.name}, read_record(path), *record.happened(journal.READY)
        experiments = [x["experiment"] for x in sources if x and "experiment" in x]
        about = trackers.About(
            experiment=experiments[-1],
            name=path.name,
            identity=journal.identity_of(starts[0]),
            config=record.config,
            run_dir=path,
        )
        writer = opening(about)
        for step in sorted(lines):
            writer.write(step, lines[step])
        writer.close()

    for name, opening in openings.items():
        if (why := trackers.failure(lambda opening=opening: send(opening))) is not None:
            raise ValueError(f"tracker {name!r} has not taken the log of {path}: {why}")
        print(f"pushed       {len(lines):,} steps of {path} to {name}")
