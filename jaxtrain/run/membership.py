"""Agreement of hosts that come and go on which of them train together, by files that they share.

Each launcher keeps a lease, a small file that it writes again every few seconds. A host whose lease
no longer changes is lost; each reader measures that by its own clock, and only while it could read,
so that neither clocks that differ nor a storage that fails looks like a loss. There is no server
and no lock, so that any host may be the one that is lost.

The hosts train in rounds. All of a round start together, and it is over for all of them where one
leaves. The first of those that have had the newest round says who is in the next, once nobody alive
is still in the old one. Hosts that come later wait, and the first host of the round ends it after
its next checkpoint to take them in.
"""

import contextlib
import dataclasses
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Self

from etils import epath

from jaxtrain.host import paths, storage

logger = logging.getLogger(__name__)

WAITING, TRAINING, DONE = "waiting", "training", "done"
# Orders to a round's processes: save and end, or end at once.
STOP, KILL = "stop", "kill"
# Between two writings of a lease, on a disk and in a bucket.
BEAT_SECONDS, REMOTE_BEAT_SECONDS = 2.0, 5.0
# In beats: the silence that is a loss, and how long the first hosts wait for others at the start.
SILENCE, SETTLING = 10, 5


@dataclasses.dataclass(frozen=True)
class Round:
    """Hosts that train together from one start of their processes to its end.

    Args:
      number: rises from round to round.
      members: name and number of processes of each host, in the order of their processes.
      coordinator: HOST:PORT where the processes meet, on the first host.
      start: token of the launch, the same in all of its rounds.
      resumes: whether there was a round before.
    """

    number: int
    members: tuple[tuple[str, int], ...]
    coordinator: str
    start: str
    resumes: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the members, in order."""
        return tuple(name for name, _ in self.members)

    def first_process(self, name: str) -> int:
        """The number of the first process of a member."""
        return sum(count for _, count in self.members[: self.names.index(name)])


@dataclasses.dataclass(frozen=True)
class Lease:
    """The file of one host: its state, the newest round that it has been in, if any, and the
    address of its keeper (:mod:`jaxtrain.host.keeper`), if it has one."""

    name: str
    processes: int
    state: str = WAITING
    round: Round | None = None
    beat: int = 0
    memory: str = ""

    @property
    def number(self) -> int:
        """The number of its round; 0 before any."""
        return self.round.number if self.round else 0

    @property
    def rank(self) -> tuple[Any, ...]:
        """The order in which hosts lead, the first in front: those of the newest round, of them
        those that still train, and then as in that round."""
        place = self.round.names.index(self.name) if self.round else 0
        return -self.number, self.state != TRAINING, place, self.name

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """Reads a lease from its file; None where it is damaged."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            found = paths.json_object(text)
            if (round := found["round"]) is not None:
                members = tuple((str(name), int(count)) for name, count in round["members"])
                found["round"] = Round(**round | {"members": members})
            lease = cls(**found)
            return lease if lease.rank else None
        return None


class Membership:
    """One host's part in the agreement, while it is open.

    Args:
      folder: holds the leases; all hosts share it.
      counts: numbers of hosts that may train.
      name: of this host, and of no other.
      processes: of this host.
      meet: names an address HOST:PORT of this host where processes can meet.
      newest: returns the newest step that is saved, if any.
      grace: seconds that processes have to end a round by themselves, and again after ``STOP``.
      memory: the address of this host's keeper, if it has one.
      beat: seconds between two writings of the lease; None for what suits the folder.

    Attributes:
      order: what the processes of the round are to be told: ``STOP``, ``KILL`` or None.
      complete: whether another host has told that the run is done.
      memories: addresses of the keepers of the hosts that are there, this one's first.
    """

    def __init__(
        self,
        folder: epath.Path,
        counts: Collection[int],
        *,
        name: str,
        processes: int,
        meet: Callable[[], str],
        newest: Callable[[], int | None],
        grace: float,
        memory: str = "",
        beat: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._folder, self._counts, self._meet = folder, counts, meet
        self._newest, self._grace, self._clock = newest, grace, clock
        self._beat = beat or (REMOTE_BEAT_SECONDS if paths.is_remote(folder) else BEAT_SECONDS)
        self.own = Lease(name, processes, memory=memory)
        self.memories = (memory,)
        self.order: str | None = None
        self.complete = False
        # Seconds in which the others could be seen; of each the first time, its last beat and when
        # that came.
        self._time, self._looked = 0.0, clock()
        self._seen: dict[str, float] = {name: 0.0}
        self._heard: dict[str, tuple[int, float]] = {}
        self._not_before = 0.0
        self._broken_since: float | None = None
        self._wished_at: int | None = None
        self._lock = threading.Lock()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxtrain-lease", daemon=True)

    def __enter__(self) -> Self:
        # A folder in which no lease can be written is refused here: the thread would try for ever.
        paths.check_writable(self._folder)
        paths.make_folder(self._folder)
        storage.retrying(self._write, f"the lease of this host in '{self._folder}'")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the others; they see at once that this host is gone, or that the run is done."""
        self._closed.set()
        self._wake.set()
        self._thread.join(self._beat)
        with contextlib.suppress(Exception):  # Where storage fails they notice by the silence.
            if self.own.state == DONE:
                self._write()
            else:
                self._path(self.own.name).unlink(missing_ok=True)

    @property
    def broken(self) -> bool:
        """Whether a host has left the round that this one is in."""
        return self._broken_since is not None

    def agreed(self) -> Round | None:
        """The round that this host is in; None while it waits for one."""
        own = self.own
        return own.round if own.state == TRAINING else None

    def end(self, pause: float = 0.0) -> None:
        """Notes that the processes of this host have ended; the next round of the very same hosts
        begins after so many seconds."""
        self._not_before = self._time + pause
        self._change(state=WAITING)
        self._wake.set()

    def done(self) -> None:
        """Notes that the run is complete."""
        self._change(state=DONE)

    def tick(self) -> None:
        """Writes the lease, reads those of the others, and decides; raises OSError where storage
        fails."""
        self._write()
        now = self._clock()
        passed, self._looked = now - self._looked, now
        files = paths.listed(self._folder, "*.json")
        read = {path.name: Lease.read(paths.read_if_there(path)) for path in files}
        # A lease under the name of another file is nobody's, and that file is not to be deleted.
        leases = {x.name: x for file, x in read.items() if x and file == f"{x.name}.json"}
        self._time += min(passed, 2 * self._beat)
        for name, lease in leases.items():
            self._seen.setdefault(name, self._time)
            # A lease that has never been seen to change may be of a launch long ago.
            beat, at = self._heard.get(name, (lease.beat, -math.inf))
            self._heard[name] = (lease.beat, at if lease.beat == beat else self._time)
        leases[self.own.name] = self.own
        self._heard[self.own.name] = (self.own.beat, self._time)
        oldest = self._time - SILENCE * self._beat
        alive = {name: each for name, each in leases.items() if self._heard[name][1] >= oldest}
        others = [each.memory for name, each in alive.items() if name != self.own.name]
        self.memories = (self.own.memory, *filter(None, others))
        if self.own.state == TRAINING:
            self._examine(leases, alive)
        elif self.own.state == WAITING:
            self._agree(leases, alive)

    def _agree(self, leases: dict[str, Lease], alive: dict[str, Lease]) -> None:
        """Follows the first host into its round or, where this is the first, begins one."""
        self.complete = any(each.state == DONE for each in alive.values())
        waiting = sorted(alive.values(), key=lambda each: each.rank)
        leader, last = waiting[0], self.own.round
        if self.complete:
            return
        if leader.state == TRAINING:
            if leader.number > self.own.number and self.own.name in leader.round.names:
                self._enter(leader.round)
            return
        waiting = [each for each in waiting if each.state == WAITING]
        count = self._most(len(waiting))
        members = tuple((each.name, each.processes) for each in waiting[:count])
        if leader.name != self.own.name or not members:
            return
        # Whether one that was seen just now is alive is not known yet.
        young = {name for name, at in self._seen.items() if self._time - at < SETTLING * self._beat}
        early = bool(young & leases.keys() - alive.keys())
        if last is None:
            early |= count < max(self._counts) and bool(young)
        elif members == last.members:
            early |= self._time < self._not_before
        if early:
            return
        number = 1 + max(each.number for each in leases.values())
        for name in leases.keys() - alive.keys():
            self._path(name).unlink(missing_ok=True)
        start = secrets.token_hex(8) if last is None else last.start
        self._enter(Round(number, members, self._meet(), start, resumes=last is not None))

    def _examine(self, leases: dict[str, Lease], alive: dict[str, Lease]) -> None:
        """Finds out whether the round is over, or is to be ended for hosts that wait."""
        own, members = self.own.round, self.own.round.names

        def takes_part(name: str) -> bool:
            each = leases.get(name)
            if each is None or (each.round == own and each.state == DONE):
                return each is not None  # One that is done need not go on writing.
            entered = each.round == own and each.state == TRAINING
            return name in alive and (entered or each.number < own.number)

        # The others took this host for lost: what it still computes is of no use.
        newer = any(each.number > own.number for each in alive.values())
        if not newer and all(map(takes_part, members)):
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = self._time
        if self._broken_since is not None:
            waited = self._time - self._broken_since
            if newer or waited >= 2 * self._grace:
                self.order = KILL
            elif waited >= self._grace:
                self.order = STOP
        others = [each for name, each in alive.items() if name not in members]
        there = len(members) + sum(each.state == WAITING for each in others)
        if members[0] != self.own.name or self._most(there) <= len(members):
            self._wished_at = None
            return
        saved = -1 if (step := self._newest()) is None else step
        self._wished_at = saved if self._wished_at is None else self._wished_at
        if saved > self._wished_at:
            self.order = self.order or STOP

    def _most(self, there: int) -> int:
        """The largest number of hosts that may train, of so many; 0 where they are too few."""
        return max((count for count in self._counts if count <= there), default=0)

    def _enter(self, round: Round) -> None:
        self.order = self._broken_since = self._wished_at = None
        self._change(state=TRAINING, round=round)
        self._write()

    def _change(self, **fields: Any) -> None:
        with self._lock:
            self.own = dataclasses.replace(self.own, **fields)

    def _write(self) -> None:
        self._change(beat=self.own.beat + 1)
        text = json.dumps(dataclasses.asdict(self.own)) + "\n"
        paths.write_whole(self._path(self.own.name), text)

    def _path(self, name: str) -> epath.Path:
        return self._folder / f"{name}.json"

    def _run(self) -> None:
        failing = False
        while not self._closed.is_set():
            try:
                self.tick()
                failing = False
            except Exception as error:  # Storage fails, and may work again.
                if not failing:
                    logger.warning("hosts in '%s': %s", self._folder, storage.why(error))
                failing = True
            self._wake.wait(self._beat)
            self._wake.clear()
