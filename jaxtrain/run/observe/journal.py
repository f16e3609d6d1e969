"""Journal of a run over all its attempts: ``events.jsonl`` and ``heartbeat.json``.

The log reads as if the run had never been killed: a resumed run drops the steps that it repeats.
The journal drops nothing. Every line has the time (UTC), attempt, host and process.
"""

import contextlib
import datetime
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from jaxtrain.host import output, readings, storage
from jaxtrain.host.exit_codes import Ended
from jaxtrain.host.paths import is_remote, json_object, read_if_there, write_whole
from jaxtrain.run.folder import EVENTS, HEARTBEAT, LOG, RunLock
from jaxtrain.run.observe import goodput
from jaxtrain.run.observe.goodput import TimeLedger
from jaxtrain.run.observe.writers import GrowingFile

# Every event, as a line names it.
START, READY, KILLED, END = "start", "ready", "killed", "end"
CHECKPOINT, SAVE_FAILED, TRACE = "checkpoint", "save failed", "trace"
FROM_MEMORY = "read from memory"
ALERT, ALERT_NOT_POSTED, TRACKER = "alert", "alert not posted", "tracker"
CONCLUSION, FORECAST, OUTPUT_LOST = "conclusion", "forecast", "output lost"
# Between two heartbeats, on a disk and in a bucket.
BEAT_SECONDS, REMOTE_BEAT_SECONDS, LAST_BEAT_SECONDS = 1.0, 30.0, 5.0


class Journal:
    """The journal of one attempt; until :meth:`open`, and in all processes but the first, it only
    keeps the ledger.

    Args:
      beat_seconds: between two heartbeats; None for what suits the folder.
      clock: seconds, monotonic; an age by it does not change where somebody sets the wall clock.

    Attributes:
      ledger: where the time of the attempt goes.
      identity: of the run, made of its first start: the same in all attempts.
      step_times: how many steps took how long, as ``Throughput`` counts them.
      costs: of this attempt, what is known of ``goodput.COSTS``.
      disk_before: bytes that the process has moved before this attempt.
    """

    def __init__(
        self,
        began: float | None = None,
        *,
        beat_seconds: float | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.ledger = TimeLedger(began, wall=wall)
        self.attempt, self.step = 1, 0
        self.step_times: Mapping[int, int] = {}
        self.costs: dict[str, float] = {}
        self.disk_before = readings.disk()
        self.identity = identity_of({"began": self.ledger.began, "host": socket.gethostname()})
        self._wall, self._clock, self._beat_seconds = wall, clock, beat_seconds
        self._first_step: int | None = None
        self._owner: RunLock | None = None
        self._file: GrowingFile | None = None
        self._beating: threading.Thread | None = None
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._lost_steps = self._failed_saves = self._alerts = 0
        self._checkpoint_at: float | None = None
        self._earlier: list[goodput.Attempt] = []
        self._told: set[str] = set()  # of the streams in output.lost

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any):
        if self._file is None:
            return
        self._closed.set()
        if self._beating is not None:  # A beat that comes after the last one would hide it.
            self._beating.join(LAST_BEAT_SECONDS)
        self._tell_lost_output()
        code = error.code if isinstance(error, Ended) else None
        ended = "done" if error is None else f"exit {code}" if code else kind.__name__
        self.event(END, **self._state(), ended=ended)
        self.beat(ended=ended)
        self._file.close()

    def open(self, owner: RunLock) -> None:
        """Begins to write, in a folder that this start has just claimed."""
        self._owner = owner
        if jax.process_index() != 0:
            return
        path = owner.path / EVENTS

        def read() -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
            text = read_if_there(path)
            return text, read_events(owner.path), read_heartbeat(owner.path)

        text, before, last = storage.retrying(read, f"the journal {path}")
        starts = [line for line in before if line.get("event") == START]
        self.attempt = 1 + len(starts)
        if starts:
            self.identity = identity_of(starts[0])
        self._file = GrowingFile(path, text)
        if text and not text.endswith(b"\n"):  # A line was being written when it was killed.
            self._file.append(b"\n")
        if last and _of(last) not in map(_of, states(before, {})):
            # It ended without a word; what was last heard of it would be overwritten now.
            # Its log may know of steps since the last heartbeat.
            logged = storage.retrying(lambda: _last_logged(owner.path), f"the log of {owner.path}")
            step = last.get("step")
            last["step"] = max(step if isinstance(step, int) else 0, logged)
            killed = {k: v for k, v in last.items() if k in _STATE}
            self.event(KILLED, **{f"of_{k}" if k == "attempt" else k: v for k, v in killed.items()})
        self._earlier = goodput.attempts(states(before, last))
        saved = [line.get("time") for line in before if line.get("event") == CHECKPOINT]
        with contextlib.suppress(IndexError, TypeError, ValueError, OverflowError):  # damaged
            at = datetime.datetime.fromisoformat(saved[-1]).timestamp()
            self._checkpoint_at = self._clock() - max(0.0, self._wall() - at)
        self.event(START, began=self.ledger.began, pid=os.getpid())
        self.beat()
        self._beating = threading.Thread(
            target=self._keep_beating, name="jaxtrain-heartbeat", daemon=True
        )
        self._beating.start()

    @property
    def compile_seconds(self) -> float | None:
        """Seconds that the attempt before took to compile; None where there is none."""
        return self._earlier[-1].seconds.get("compile") if self._earlier else None

    def ready(
        self,
        step: int,
        facts: Mapping[str, str],
        memory: Mapping[str, Any] | None = None,
        experiment: str = "",
    ) -> None:
        """Notes the step that the attempt goes on from, what its header says, the memory that its
        step was compiled for, and the name of the experiment."""
        self.step = self._first_step = step
        state = dict(attempt=self.attempt, began=self.ledger.began, seconds={}, step=step)
        now = goodput.attempts([state | {"first_step": step}])
        self._lost_steps = sum(goodput.lost_steps([*self._earlier, *now]))
        memory = dict(memory or {})
        self.event(READY, step=step, facts=dict(facts), memory=memory, experiment=experiment)

    def event(self, name: str, **facts: Any) -> None:
        """Writes a line; from any thread."""
        if self._file is None or self._taken():
            return
        if name == CHECKPOINT:
            self._checkpoint_at = self._clock()
        self._failed_saves += name == SAVE_FAILED
        self._alerts += name == ALERT
        now = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC)
        line = {"event": name, "time": now.isoformat(timespec="milliseconds"), **self.stamp}
        with self._lock:
            self._file.append((json.dumps(line | facts) + "\n").encode())

    @property
    def stamp(self) -> dict[str, Any]:
        """Which attempt writes, and where it runs."""
        host = socket.gethostname()
        return {"attempt": self.attempt, "host": host, "process": jax.process_index()}

    def counts(self) -> dict[str, float]:
        """Returns the journal's metrics for the log.

        Returns:
          ``run/restarts`` and ``run/lost_steps`` of all attempts, ``run/failed_saves`` and
          ``run/alerts`` of this one and, where there is a checkpoint,
          ``run/checkpoint_age_seconds``. What :func:`goodput.spent` says of all attempts until now,
          as ``run/chip_hours``, ``run/cost``, ``run/kwh``, ``run/kwh_at_most``.
        """
        counts = {
            "run/restarts": self.attempt - 1,
            "run/lost_steps": self._lost_steps,
            "run/failed_saves": self._failed_saves,
            "run/alerts": self._alerts,
        }
        if self._checkpoint_at is not None:
            counts["run/checkpoint_age_seconds"] = self._clock() - self._checkpoint_at
        if self._first_step is not None:
            now = goodput.attempts([{"attempt": self.attempt} | self._state()])
            for name, value in goodput.spent([*self._earlier, *now]).items():
                counts[f"run/{name.replace('-', '_').replace(' ', '_').lower()}"] = value
        return counts

    def _state(self) -> dict[str, Any]:
        seconds = {name: round(x, 3) for name, x in self.ledger.seconds().items()}
        return {
            "began": self.ledger.began,
            "first_step": self._first_step,
            "step": self.step,
            "doing": self.ledger.doing,
            "seconds": seconds,
            "step_times": dict(self.step_times),
            **self.costs,
        }

    def _keep_beating(self) -> None:
        remote = is_remote(self._owner.path)
        pause = self._beat_seconds or (REMOTE_BEAT_SECONDS if remote else BEAT_SECONDS)
        while not self._closed.wait(pause):
            self._tell_lost_output()
            self.beat()

    def _tell_lost_output(self) -> None:
        # Not where it is found out: what is written here may say a word to the very same stream.
        for stream, why in dict(output.lost).items():
            if stream not in self._told:
                self._told.add(stream)
                self.event(OUTPUT_LOST, stream=stream, why=why)

    def beat(self, **more: Any) -> None:
        """Writes the heartbeat now."""
        if self._file is None:
            return
        # What fails here is said by the log, which is written to the same folder.
        with contextlib.suppress(Exception):
            if not self._taken():
                state = {"time": self._wall(), **self.stamp, "pid": os.getpid(), **self._state()}
                write_whole(self._owner.path / HEARTBEAT, json.dumps(state | more) + "\n")

    def _taken(self) -> bool:
        return self._owner.taken_by() is not None


_STATE = ("attempt", "began", "first_step", "step", "doing", "seconds", "step_times")
_STATE += goodput.COSTS


def read_events(run_dir: epath.Path) -> list[dict[str, Any]]:
    """Reads the lines of a journal; those that are cut off are left out."""
    path = run_dir / EVENTS
    text = read_if_there(path).decode(errors="replace")
    return [line for line in map(json_object, text.split("\n")) if line]


def read_heartbeat(run_dir: epath.Path) -> dict[str, Any]:
    """Reads the last sign of life; empty where there is none."""
    path = run_dir / HEARTBEAT
    return json_object(read_if_there(path).decode(errors="replace"))


def _last_logged(run_dir: epath.Path) -> int:
    text = read_if_there(run_dir / LOG).decode(errors="replace")
    steps = (json_object(line).get("step") for line in reversed(text.split("\n")))
    return next((step for step in steps if isinstance(step, int)), 0)


def states(events: list[dict[str, Any]], heartbeat: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The last state of each attempt, in order, for :func:`goodput.attempts`."""
    told = [line for line in events if line.get("event") in (END, KILLED)]
    last = {_of(line): line for line in told}
    if isinstance(heartbeat.get("attempt"), int):
        last.setdefault(heartbeat["attempt"], heartbeat)
    return [dict(last[n]) | {"attempt": n} for n in sorted(last)]


def _of(line: Mapping[str, Any]) -> int:
    """The attempt that a line tells of; a killed one is told of by the next."""
    number = line.get("of_attempt", line.get("attempt"))
    return number if isinstance(number, int) else 0


def identity_of(start: Mapping[str, Any]) -> str:
    """Returns the identity of a run, by the first start in its journal: hexadecimal digits."""
    told = f"{start.get('host')} {start.get('began')}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]
