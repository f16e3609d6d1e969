"""The command ``jaxtrain runs``: SQL over the folders of runs."""

import dataclasses
import difflib
import json
import re
import sqlite3
from collections.abc import Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain.host.paths import as_path, listed
from jaxtrain.run.folder import RUNS, is_run
from jaxtrain.run.observe.report.records import Record, read


@dataclasses.dataclass(frozen=True)
class RunsOptions:
    """Asks the folders of runs in SQL, and prints the rows: jaxtrain runs "select run, eval_loss
    from runs order by eval_loss limit 5" STUDY/trial-*.

    The table runs has a row for each run, with columns run, path, step, stopped, every flag
    (optimizer_learning_rate) and the last value of every metric (eval_loss). The table log has
    columns run, step, metric (eval/loss) and value.
    """

    query: tyro.conf.Positional[str]
    """A select statement of SQLite."""
    folders: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of runs; left out, all in runs/."""


def run_runs(options: RunsOptions, rest: list[str]) -> int:
    """Prints what the query finds."""
    del rest
    folders = options.folders or sorted(str(p) for p in listed(as_path(RUNS)) if is_run(p))
    if not folders:
        raise ValueError(f"{RUNS}/ holds no run: name folders of runs behind the query")
    names, rows = ask(options.query, read(folders))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*map(_text, row))
    Console(width=None if Console().is_terminal else 10_000).print(table, highlight=False)
    return 0


def ask(query: str, records: Sequence[Record]) -> tuple[list[str], list[tuple]]:
    """Returns the names of the columns and the rows that a query finds.

    Raises:
      ValueError: the query is no SQL, or names what there is not.
    """
    rows = [_row(record) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with sqlite3.connect(":memory:") as base:
        quoted = ", ".join(f'"{name}"' for name in columns)  # one may be a word of SQL
        base.execute(f"create table runs ({quoted})")
        base.execute("create table log (run, step, metric, value)")
        marks = ", ".join("?" * len(columns))
        told = ([row.get(name) for name in columns] for row in rows)
        base.executemany(f"insert into runs values ({marks})", told)
        for record in records:
            for metric, series in record.series.items():
                points = zip(series.steps.tolist(), series.values.tolist(), strict=True)
                of = ((record.name, step, metric, value) for step, value in points)
                base.executemany("insert into log values (?, ?, ?, ?)", of)
        try:
            found = base.execute(query)
            if found.description is None:
                raise sqlite3.Error("it is no select statement; give one")
            return [each[0] for each in found.description], found.fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            missing = re.match(r"no such column: (\w+)", str(error))
            near = missing and difflib.get_close_matches(missing[1], columns, n=1)
            meant = f": did you mean {near[0]}?" if near else ""
            raise ValueError(f"the query cannot be answered: {error}{meant}") from None


def _row(record: Record) -> dict[str, Any]:
    """The columns of a run by name: its flags, its last metrics, and before them its own."""
    metrics = {name: each.values[-1].item() for name, each in record.series.items()}
    row = {_column(name): _value(value) for name, value in (record.config | metrics).items()}
    own = {"run": record.name, "path": record.path, "step": record.step}
    return own | {"stopped": record.stopped} | {n: v for n, v in row.items() if n not in own}


def _column(name: str) -> str:
    """A name that SQL takes in a query.

    >>> _column("optimizer.learning_rate"), _column("eval/loss")
    ('optimizer_learning_rate', 'eval_loss')
    """
    return re.sub(r"\W", "_", name.removeprefix("run."))


def _value(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else json.dumps(value)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
