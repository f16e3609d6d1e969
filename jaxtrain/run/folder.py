"""The folder of a run: found, then claimed; never shared by two runs, its files whole or not there.

A run's folder belongs to the start that claimed it last. Whoever claimed it before, and still runs
(a host that was taken for dead, a job that was started twice), sees a foreign token there and
writes nothing more. Looking is no lock: a save that had begun before the folder changed hands may
still end.
"""

import datetime
import functools
import json
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator

import jax
from etils import epath

from jaxtrain.host import distributed, paths, storage
from jaxtrain.host.exit_codes import SUPERSEDED, Ended

logger = logging.getLogger(__name__)

RUNS = "runs"
# All that a run writes into its folder, besides the files of its experiment: --overwrite deletes
# what is named here and nothing else.
OWNER, CONFIG, CHANGES, LOG = "owner.json", "config.json", "changes.jsonl", "log.jsonl"
EVENTS, HEARTBEAT, HANG = "events.jsonl", "heartbeat.json", "hang-process-{}.txt"
STOPPED, LANDSCAPE, REPORT, PICTURE = "stopped.json", "landscape.json", "report.html", "report.png"
CSV, PROMETHEUS, UPDATES = "metrics.csv", "metrics.prom", "updates.jsonl"
RECEIPTS, WATERMARKS = "receipts.jsonl", "watermarks.jsonl"
# Of `jaxtrain retrain`: which run is the best now, and every decision.
PROMOTED, RETRAININGS = "promoted.json", "retrainings.jsonl"
CHECKPOINTS, TENSORBOARD, PICTURES = "checkpoints", "tensorboard", "pictures"
# Of launchers, who meet there before there is a run.
HOSTS = "hosts"
FILES = (OWNER, CONFIG, CHANGES, LOG, EVENTS, HEARTBEAT, STOPPED, LANDSCAPE, REPORT, PICTURE)
FILES += (CSV, PROMETHEUS, UPDATES, RECEIPTS, WATERMARKS, PROMOTED, RETRAININGS)
# In owner.json, while an earlier run is being deleted.
OVERWRITING = "overwriting"
# After so long without owner.json the folder has gone, and its place is not to be taken.
GONE_SECONDS = 2.0
_WRITTEN = re.compile(
    rf"({'|'.join(map(re.escape, FILES))})(\.partial(-[0-9a-f]+)?)?|{HANG.format('[0-9]+')}"
    rf"|{CHECKPOINTS}/(\d+|damaged-\d+(\.\d+)?|\d+\.orbax-checkpoint-tmp.*)"
    rf"|{TENSORBOARD}/(events\.out\.tfevents\..*|plugins)|{PICTURES}/[\w-]+\.png"
)


class Superseded(Ended):
    """Ends the process with ``SUPERSEDED`` where nobody catches it: its folder is another's now."""


class RunLock:
    """The claim of this start to a run's folder, ``path``; see :func:`lock_run_dir`."""

    def __init__(self, path: epath.Path, token: str):
        self.path, self._token = path, token
        self._missing_since: float | None = None
        self._is_gone = False

    def taken_by(self) -> str | None:
        """Who has claimed the folder since, in words; None where that is nobody, or not known."""
        try:
            owner = json.loads((self.path / OWNER).read_text())
            self._missing_since, self._is_gone = None, False
            taken = owner["token"] != self._token
            return f"process {owner['pid']} on {owner['host']}" if taken else None
        except FileNotFoundError:
            if self._missing_since is None:
                self._missing_since = storage.now()
            if not self._is_gone and storage.now() - self._missing_since >= GONE_SECONDS:
                self._is_gone = True
                logger.error("%s: nothing more is saved until it is back", self._gone())
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # Storage that fails is told by what is written, and no reason to end.

    def is_there(self) -> bool:
        """Whether the folder is where it was claimed; what is not seen is looked for once more."""
        self.taken_by()
        if self._missing_since is not None and not self._is_gone:
            storage.pause(GONE_SECONDS)
            self.taken_by()
        return not self._is_gone

    def _gone(self) -> str:
        return f"the run's folder {self.path} has been moved or deleted while the run goes on"

    def check(self) -> None:
        """Called by all processes alike before something is written. Raises Superseded where
        another start has claimed the folder, and StorageError where the folder has gone, and is not
        to be made anew."""
        taken, there = distributed.from_first_process(lambda: (self.taken_by(), self.is_there()))
        if taken:
            error = Superseded(
                SUPERSEDED,
                f"{self.path} belongs to another start of the run now ({taken}): this one has "
                f"stopped and writes nothing more (exit code {SUPERSEDED})",
            )
            if jax.process_index() == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            raise error
        if not there:
            raise storage.StorageError(self._gone())


def find_run_dir(
    name: str,
    run_dir: str | None,
    *,
    resume: bool = False,
    auto_resume: bool = False,
    overwrite: bool = False,
) -> tuple[epath.Path, bool]:
    """Finds the folder of a run, the same one in all processes, and changes nothing.

    Where ``run_dir`` is None, that is the experiment's next free number under runs/, or with
    ``resume`` the newest. With ``resume`` it must hold a run; with ``auto_resume`` a run that it
    holds is resumed, and with ``overwrite`` it will be deleted. Returns the folder, and whether it
    holds a run to resume.

    Raises:
      FileExistsError: where it holds a run, and none of the three is set, or something else.
      FileNotFoundError: where there is nothing to resume.
      OSError: where nothing can be written there.
      ValueError: where they contradict each other, or no checkpoint can be written there.
    """
    if run_dir is not None:
        paths.check_for_checkpoints(run_dir)
    if resume and overwrite:
        raise ValueError("`resume` continues a run and `overwrite` deletes it: give one of them")
    if resume and auto_resume:
        raise ValueError(
            "`resume` needs a run to continue and `auto_resume` begins one where there is none: "
            "give one of them"
        )
    if auto_resume and (run_dir is None or overwrite):
        raise ValueError("`auto_resume` needs a `run_dir`, and does not go with `overwrite`")

    def find() -> tuple[str, bool]:
        if run_dir is not None:
            found = paths.as_path(run_dir)
        else:
            found = newest_run(name) if resume else next_free(name)
        taken = any(path.name != HOSTS for path in paths.listed(found))
        holds_run = taken and is_run(found)
        owner = paths.json_object(paths.read_if_there(found / OWNER))
        if OVERWRITING in owner and not (overwrite or auto_resume):
            raise FileExistsError(
                f"{found} holds the rest of a run whose deletion was interrupted: finish that with "
                "`overwrite`, or choose another `run_dir`"
            )
        resumable = holds_run or (taken and _holds_step(found / CHECKPOINTS))
        if resume and not resumable:
            raise FileNotFoundError(f"there is no run to resume in {found}")
        if taken and not resumable:
            raise FileExistsError(
                f"{found} holds files and no run: choose another `run_dir`, or empty it yourself"
            )
        if overwrite and taken and not holds_run:
            raise FileExistsError(
                f"{found} holds checkpoints and no more of a run: `overwrite` leaves it alone, so "
                "choose another `run_dir`, or empty it yourself"
            )
        if taken and not (resume or overwrite or auto_resume):
            go_on = "continue it with `resume`, delete it with `overwrite`"
            if not _holds_step(found / CHECKPOINTS):  # A start that still compiles has none either.
                go_on = "it has no checkpoint, so unless it is running, begin anew with `overwrite`"
            raise FileExistsError(
                f"{found} holds a run already: {go_on}, or choose another `run_dir`"
            )
        paths.check_writable(found)
        # What an earlier attempt of this very launch has overwritten is that attempt's run.
        start = os.environ.get(distributed.START)
        anew = overwrite and (start is None or owner.get("start") != start)
        return str(found), resumable and not anew and OVERWRITING not in owner

    # The first process decides for all: one that comes later might find what it has made by then.
    what = f"the folder {run_dir or RUNS}"
    folder, resumes = distributed.from_first_process(lambda: storage.retrying(find, what))
    return epath.Path(folder), resumes


def lock_run_dir(
    run_dir: epath.Path,
    *,
    name: str | None = None,
    resumes: bool = False,
    overwrite: bool = False,
    files: Iterable[str] = (),
) -> RunLock:
    """Makes the folder that :func:`find_run_dir` has found this start's own.

    Of two that begin a run in one folder, one gets it. A start that resumes or overwrites takes the
    folder from whoever had it. A bucket has no such thing as a file that only one can make: there
    the one that comes last has it, and the other stops before it saves anything. Raises
    FileExistsError where another start was faster.

    Args:
      name: the experiment's, where the folder was numbered: if another start has taken that number
        since, the next free one is made.
      overwrite: what a run has written there is deleted, and nothing else, unless it resumes.
    """
    path, token = run_dir, secrets.token_hex(8)
    made = created = False  # by a try before, which storage failed

    def claim() -> tuple[str, str]:
        nonlocal path, made, created
        while name is not None and not resumes and not made:
            try:
                path.mkdir(parents=True)
                made = True
            except FileExistsError:
                path = next_free(name)
        paths.make_folder(path)
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        owner = {"token": token, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
        owner["start"] = os.environ.get(distributed.START)
        begun = not resumes and (overwrite or is_half_deleted(path))
        if not (begun or resumes or created or paths.is_remote(path)):
            try:
                with open(path / OWNER, "x"):
                    created = True
            except FileExistsError:
                raise FileExistsError(
                    f"another run has just begun in {path}: choose another `run_dir`"
                ) from None
        if begun:  # A deletion that is interrupted is known, and nobody resumes what is left.
            write_text(path / OWNER, json.dumps(owner | {OVERWRITING: True}) + "\n")
            _delete_written(path, files)
        write_text(path / OWNER, json.dumps(owner) + "\n")
        return str(path), token

    what = f"the claim of {run_dir}"
    folder, token = distributed.from_first_process(lambda: storage.retrying(claim, what))
    return RunLock(epath.Path(folder), token)


def has_checkpoint(directory: epath.Path) -> bool:
    """Whether the first process sees a step's folder, good or bad; all processes call it alike."""
    look = functools.partial(_holds_step, directory)
    what = f"the listing of {directory}"
    return distributed.from_first_process(lambda: storage.retrying(look, what))


def _holds_step(directory: epath.Path) -> bool:
    return any(path.name.isdigit() for path in paths.listed(directory))


def is_half_deleted(folder: epath.Path) -> bool:
    """Whether a run is here whose deletion was interrupted."""
    return OVERWRITING in paths.json_object(paths.read_if_there(folder / OWNER))


def write_text(path: epath.Path, text: str) -> None:
    """Writes a file of the run, whole or not at all, and once: the first process does."""
    if jax.process_index() == 0:
        paths.write_whole(path, text)


def runs() -> Iterator[epath.Path]:
    """The folders under runs/ that hold a run, the highest number first."""
    there = epath.Path(RUNS)
    numbered = [path for path in paths.listed(there) if _number(path) is not None]
    return (path for path in sorted(numbered, key=_number, reverse=True) if is_run(path))


def newest_run(name: str) -> epath.Path:
    """The run of an experiment with the highest number; raises FileNotFoundError without any."""
    for path in runs():
        if path.name.rpartition("-")[0] == name:
            return path
    raise FileNotFoundError(f"there is no run to resume under {RUNS}/: name one by `run_dir`")


def next_free(name: str) -> epath.Path:
    """The folder after the last one of an experiment."""
    there = epath.Path(RUNS)
    numbers = [_number(p) or 0 for p in paths.listed(there) if p.name.rpartition("-")[0] == name]
    return there / f"{name}-{max(numbers, default=0) + 1}"


def _number(path: epath.Path) -> int | None:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and number.isascii() else None


def is_run(folder: epath.Path) -> bool:
    """Whether a run has begun here; a config.json alone may be anybody's."""
    there = {path.name for path in paths.listed(folder)}
    return OWNER in there or {CONFIG, LOG} <= there


def _delete_written(folder: epath.Path, files: Iterable[str]) -> None:
    """Deletes what a run has written, but for the token of its new owner; of links, the links."""
    for inner in (folder / CHECKPOINTS, folder / TENSORBOARD, folder / PICTURES, folder):
        if inner != folder and paths.is_link(inner):
            inner.unlink()
        for path in paths.listed(inner) if paths.is_folder(inner) else ():
            entry = path.relative_to(folder).as_posix()
            if entry != OWNER and (_WRITTEN.fullmatch(entry) or entry in files):
                is_whole_folder = paths.is_folder(path) and not paths.is_link(path)
                path.rmtree(missing_ok=True) if is_whole_folder else path.unlink(missing_ok=True)
        if inner != folder and paths.is_folder(inner) and not paths.listed(inner):
            inner.rmdir() if paths.is_remote(inner) else os.rmdir(inner)
