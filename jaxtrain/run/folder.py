"""The folder of a run: found, then claimed; never shared by two runs, its files whole or not there.

A run's folder belongs to the start that claimed it last. Whoever claimed it before, and still runs
(a host that was taken for dead, a job that was started twice), sees a foreign token there and
writes nothing more. Looking is no lock: a save that had begun before the folder changed hands may
still end.
"""

import contextlib
import datetime
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Iterator

import jax
from etils import epath

from jaxtrain.host import distributed, storage
from jaxtrain.host.exit_codes import SUPERSEDED, Ended
from jaxtrain.host.paths import as_path, check_writable, is_remote, write_whole

RUNS = "runs"
OWNER = "owner.json"
# After which step, and why, the run was stopped on purpose.
STOPPED = "stopped.json"
# What has been found of the loss around its checkpoints (`jaxtrain landscape`).
LANDSCAPE = "landscape.json"
# All that a run writes into its folder, besides the files of its experiment.
_WRITTEN = re.compile(
    r"((owner|config|stopped|heartbeat|landscape)\.json|report\.(html|png)|log\.jsonl)(\.partial)?"
    r"|(changes|events)\.jsonl|metrics\.(csv|prom)(\.partial)?|hang-process-\d+\.txt"
    r"|checkpoints/(\d+|damaged-\d+(\.\d+)?|\d+\.orbax-checkpoint-tmp.*)"
    r"|tensorboard/(events\.out\.tfevents\..*|plugins)"
)


class Superseded(Ended):
    """Ends the process with ``SUPERSEDED`` where nobody catches it: its folder is another's now."""


class Ownership:
    """The claim of this start to a run's folder; see :func:`claim_run_dir`.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: epath.Path, token: str):
        self.path, self._token = path, token

    def taken_by(self) -> str | None:
        """Who has claimed the folder since, in words; None where that is nobody, or not known."""
        try:
            owner = json.loads((self.path / OWNER).read_text())
            taken = owner["token"] != self._token
            return f"process {owner['pid']} on {owner['host']}" if taken else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # Storage that fails is told by what is written, and no reason to end.

    def check(self) -> None:
        """Called by all processes alike before something is written.

        Raises:
          Superseded: another start has claimed the folder.
        """
        if taken := distributed.from_first_process(self.taken_by):
            error = Superseded(
                SUPERSEDED,
                f"{self.path} belongs to another start of the run now ({taken}): this one has "
                f"stopped and writes nothing more (exit code {SUPERSEDED})",
            )
            if jax.process_index() == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            raise error


def find_run_dir(
    name: str,
    run_dir: str | None,
    *,
    resume: bool = False,
    auto_resume: bool = False,
    overwrite: bool = False,
) -> tuple[epath.Path, bool]:
    """Finds the folder of a run, the same one in all processes, and changes nothing.

    Args:
      name: the experiment's; it names folders under runs/.
      run_dir: the folder; None for the next free number, or with ``resume`` the newest.
      resume: it must hold a run.
      auto_resume: where it holds a run, that is resumed.
      overwrite: the run that it holds will be deleted.

    Returns:
      The folder, and whether it holds a run to resume.

    Raises:
      FileExistsError: where it holds a run, and none of the three is set, or something else.
      FileNotFoundError: where there is nothing to resume.
      OSError: where nothing can be written there.
      ValueError: where they contradict each other.
    """
    if resume and overwrite:
        raise ValueError("`resume` continues a run and `overwrite` deletes it: give one of them")
    if resume and auto_resume:
        raise ValueError(
            "`resume` needs a run to continue and auto_resume begins one where there is none: "
            "give one of them"
        )
    if auto_resume and (run_dir is None or overwrite):
        raise ValueError("auto_resume needs a run_dir, and does not go with `overwrite`")

    def find() -> tuple[str, bool]:
        if run_dir is not None:
            found = as_path(run_dir)
        else:
            found = newest_run(name) if resume else next_free(name)
        taken = found.exists() and any(found.iterdir())
        holds_run = taken and is_run(found)
        resumable = holds_run or (taken and _holds_step(found / "checkpoints"))
        if resume and not resumable:
            raise FileNotFoundError(f"there is no run to resume in {found}")
        if taken and not resumable:
            raise FileExistsError(
                f"{found} holds files and no run: choose another run_dir, or empty it yourself"
            )
        if overwrite and taken and not holds_run:
            raise FileExistsError(
                f"{found} holds checkpoints and no more of a run: `overwrite` leaves it alone, so "
                "choose another run_dir, or empty it yourself"
            )
        if taken and not (resume or overwrite or auto_resume):
            raise FileExistsError(
                f"{found} holds a run already: continue it with `resume`, delete it with "
                "`overwrite`, or choose another run_dir"
            )
        check_writable(found)
        return str(found), resumable and not overwrite

    # The first process decides for all: one that comes later might find what it has made by then.
    folder, resumes = distributed.from_first_process(find)
    return epath.Path(folder), resumes


def claim_run_dir(
    run_dir: epath.Path,
    *,
    name: str | None = None,
    resumes: bool = False,
    overwrite: bool = False,
    files: Iterable[str] = (),
) -> Ownership:
    """Makes the folder that :func:`find_run_dir` has found this start's own.

    Of two that begin a run in one folder, one gets it. A start that resumes or overwrites takes
    the folder from whoever had it. A bucket has no such thing as a file that only one can make:
    there the one that comes last has it, and the other stops before it saves anything.

    Args:
      run_dir: the folder.
      name: the experiment's, where the folder was numbered: if another start has taken that number
        since, the next free one is made.
      resumes: it holds a run to resume.
      overwrite: what a run has written there is deleted, and nothing else.
      files: names of the experiment's own files.

    Raises:
      FileExistsError: another start was faster.
    """

    def claim() -> tuple[str, str]:
        path, token = run_dir, secrets.token_hex(8)
        while name is not None and not resumes:
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                path = next_free(name)
        path.mkdir(parents=True, exist_ok=True)
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        owner = {"token": token, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
        if resumes or overwrite or is_remote(path):
            write_text(path / OWNER, json.dumps(owner) + "\n")
        else:
            try:
                with open(path / OWNER, "x") as file:
                    file.write(json.dumps(owner) + "\n")
            except FileExistsError:
                raise FileExistsError(
                    f"another run has just begun in {path}: choose another run_dir"
                ) from None
        if overwrite:
            _delete_written(path, files)
        return str(path), token

    path, token = distributed.from_first_process(claim)
    return Ownership(epath.Path(path), token)


def has_checkpoint(directory: epath.Path) -> bool:
    """Whether the first process sees a step's folder, good or bad; all processes call it alike.

    A run that was killed before its first checkpoint has none.
    """

    what = f"the listing of {directory}"
    return distributed.from_first_process(
        lambda: storage.retrying(lambda: _holds_step(directory), what)
    )


def _holds_step(directory: epath.Path) -> bool:
    return directory.exists() and any(path.name.isdigit() for path in directory.iterdir())


def write_text(path: epath.Path, text: str) -> None:
    """Writes a file of the run, whole or not at all, and once: the first process does."""
    if jax.process_index() == 0:
        write_whole(path, text)


def runs() -> Iterator[epath.Path]:
    """The folders under runs/ that hold a run, the highest number first."""
    there = epath.Path(RUNS)
    numbered = [p for p in there.iterdir() if _number(p) is not None] if there.exists() else []
    return (path for path in sorted(numbered, key=_number, reverse=True) if is_run(path))


def newest_run(name: str) -> epath.Path:
    """The run of an experiment with the highest number.

    Raises:
      FileNotFoundError: there is none.
    """
    for path in runs():
        if path.name.rpartition("-")[0] == name:
            return path
    raise FileNotFoundError(
        f"there is no run to resume under {RUNS}/: name its folder with run_dir"
    )


def next_free(name: str) -> epath.Path:
    """The folder after the last one of an experiment."""
    there = epath.Path(RUNS)
    paths = there.glob(f"{name}-*") if there.exists() else ()
    numbers = [_number(p) or 0 for p in paths if p.name.rpartition("-")[0] == name]
    return there / f"{name}-{max(numbers, default=0) + 1}"


def _number(path: epath.Path) -> int | None:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and number.isascii() else None


def is_run(folder: epath.Path) -> bool:
    """Whether a run has begun here; a config.json alone may be anybody's."""
    there = {p.name for p in folder.iterdir()}
    return OWNER in there or {"config.json", "log.jsonl"} <= there


def _delete_written(folder: epath.Path, files: Iterable[str]) -> None:
    """Deletes what a run has written, but for the token of its new owner."""
    for inner in (folder / "checkpoints", folder / "tensorboard", folder):
        if not inner.is_dir():
            continue
        for path in inner.iterdir():
            entry = path.relative_to(folder).as_posix()
            if entry != OWNER and (_WRITTEN.fullmatch(entry) or entry in files):
                path.rmtree() if path.is_dir() else path.unlink()
        if inner != folder:
            with contextlib.suppress(OSError, ValueError):  # It is not empty, or a link.
                inner.rmdir()
