"""Hosts that come and go agree on who trains: leases in a folder, a clock in the test's hand."""

import json
import random

import pytest
from etils import epath

from jaxtrain.run import membership
from jaxtrain.run.membership import SETTLING, SILENCE, STOP, Lease, Membership, Round

GRACE = 4.0


class Host:
    """A launcher whose processes are a variable: the round that they run."""

    def __init__(self, world, name):
        self.world, self.name, self.running, self.hangs = world, name, None, False
        self.stopped = self.gone = False
        self.knows_at = 0.0
        self.member = Membership(
            world.folder,
            world.counts,
            name=name,
            processes=2,
            meet=lambda: f"{name}:1",
            newest=lambda: world.saved,
            grace=GRACE,
            memory=f"{name}:2/token",
            beat=1.0,
            clock=lambda: world.now,
        )

    def beat(self):
        if self.stopped or self.gone:
            return
        self.member.tick()
        order = self.member.order
        if self.running and not self.hangs and (order or not self.world.whole(self.running)):
            if order == STOP:  # Processes that save and end do so on all hosts.
                for other in self.world.hosts.values():
                    if other.running == self.running and not other.stopped:
                        other.ends()
            self.ends()
        elif self.running and order == membership.KILL:
            self.ends()
        elif self.running is None:
            self.running = self.member.agreed()

    def ends(self, pause=0.0):
        if self.running:
            self.running, self.hangs = None, False
            self.member.end(pause)


class World:
    def __init__(self, folder, counts):
        self.folder, self.counts = epath.Path(folder), counts
        self.now, self.saved, self.hosts = 100.0, None, {}

    def add(self, *names):
        for name in names:
            self.hosts[name] = Host(self, name)

    def whole(self, round):
        """Whether all processes of a round are there, or may still come."""
        there = [self.hosts[name] for name in round.names]
        entered = [host for host in there if host.running == round]
        late = [host for host in there if host.member.own.number < round.number]
        return not any(host.gone for host in there) and len(entered) + len(late) == len(there)

    def training(self):
        """The rounds all of whose hosts compute. One that stood still needs three beats to see that
        others have gone on; it saves nothing meanwhile, for the run's folder is theirs."""
        able = {
            host.name: host.running
            for host in self.hosts.values()
            if not (host.stopped or host.gone) and host.knows_at <= self.now
        }
        rounds = {round for round in able.values() if round}
        return [r for r in rounds if all(able.get(name) == r for name in r.names)]

    def beats(self, number=1):
        for _ in range(number):
            self.now += 1.0
            for host in list(self.hosts.values()):
                host.beat()

    def names(self):
        (round,) = self.training()
        return round.names


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, (1, 2, 4))


def test_memory_is_that_of_all_hosts_that_are_there_and_the_own_first(world):
    """Also of one that stands by, which may hold the only copy that is left."""
    world.add("a", "b", "c")
    world.beats(SETTLING + 4)
    assert world.names() == ("a", "b")
    assert world.hosts["b"].member.memories[0] == "b:2/token"
    assert set(world.hosts["b"].member.memories) == {f"{name}:2/token" for name in "abc"}
    world.hosts["a"].gone = True
    world.beats(SILENCE + 3)
    assert world.hosts["b"].member.memories == ("b:2/token", "c:2/token")


def test_hosts_that_start_together_meet_in_one_round(world):
    world.add("b", "a", "d", "c")
    world.beats(4)  # None waits for more than there may be.
    (round,) = world.training()
    assert round == Round(1, (("a", 2), ("b", 2), ("c", 2), ("d", 2)), "a:1", round.start)
    assert [round.first_process(name) for name in round.names] == [0, 2, 4, 6]


def test_fewer_are_waited_for_and_one_that_may_not_train_stands_by(world):
    world.add("a", "b", "c")
    world.beats(SETTLING - 1)
    assert world.training() == []
    world.beats(4)
    assert world.names() == ("a", "b")
    world.saved = 3
    world.beats(SILENCE)
    assert world.names() == ("a", "b")  # Three may not train, so no save ends the round.
    world.hosts["b"].gone = True  # Where one is lost the third takes its place.
    world.beats(SILENCE + 3)
    (round,) = world.training()
    assert (round.names, round.number, round.resumes) == (("a", "c"), 2, True)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_where_one_is_lost_the_others_go_on_and_it_is_taken_in_after_the_next_save(world, lost):
    world.add("a", "b")
    world.beats(SETTLING + 2)
    (first,) = world.training()
    world.hosts[lost].gone = True
    world.beats(SILENCE - 2)
    assert world.training() == []  # It may be alive.
    world.beats(4)
    stays = "b" if lost == "a" else "a"
    assert world.names() == (stays,)
    world.saved = 7
    world.beats(4)
    world.add(f"new-{lost}")
    world.beats(2 * SILENCE)
    assert world.names() == (stays,)
    world.saved = 8
    world.beats(5)
    (round,) = world.training()
    assert round.members == ((stays, 2), (f"new-{lost}", 2))
    assert round.start == first.start  # The token by which --overwrite knows its own run.
    assert round.coordinator == f"{stays}:1"


def test_a_host_that_leaves_or_is_done_is_known_at_once(world):
    world.add("a", "b")
    world.beats(SETTLING + 2)
    world.hosts["b"].ends()
    world.hosts["b"].gone = True
    world.hosts["b"].member._thread = membership.threading.Timer(0, lambda: None)
    world.hosts["b"].member._thread.start()
    world.hosts["b"].member.__exit__()  # The launcher was sent SIGTERM.
    world.beats(3)
    assert world.names() == ("a",)
    world.add("c")
    world.beats(3)
    world.hosts["a"].member.done()
    world.beats(2)
    assert world.hosts["c"].member.complete


def test_where_one_is_done_the_others_may_take_as_long_as_they_need(world):
    """The first process writes a report while the launchers of others have ended."""
    world.add("a", "b")
    world.beats(SETTLING + 3)
    world.hosts["b"].member.done()
    world.beats()
    world.hosts["b"].stopped = True
    world.beats(SILENCE + 3 * int(GRACE))
    assert (world.hosts["a"].member.order, world.hosts["a"].member.own.number) == (None, 1)


def test_processes_that_hang_are_asked_and_then_killed(world):
    world.add("a", "b")
    world.beats(SETTLING + 2)
    orders = []
    world.hosts["b"].hangs = True
    world.hosts["a"].ends()
    for _ in range(int(2 * GRACE) + 4):
        world.beats()
        orders.append(world.hosts["b"].member.order)
    assert [each for each in dict.fromkeys(orders) if each] == [STOP, membership.KILL]
    assert world.names() == ("a", "b")


def test_the_same_hosts_pause_before_a_restart_and_others_do_not(world):
    world.add("a", "b")
    world.beats(SETTLING + 2)
    for host in world.hosts.values():
        host.ends(pause=30.0)
    world.beats(25)
    assert world.training() == []
    world.beats(10)
    assert world.names() == ("a", "b")
    for host in world.hosts.values():
        host.ends(pause=1000.0)
    world.hosts["b"].gone = True
    world.beats(SILENCE + 3)
    assert world.names() == ("a",)


def test_a_host_that_stood_still_ends_at_once_and_comes_back_like_a_new_one(world):
    world.add("a", "b")
    world.beats(SETTLING + 3)
    world.hosts["b"].stopped = True
    world.beats(SILENCE + int(GRACE) + 4)
    assert world.names() == ("a",)
    world.hosts["b"].stopped = False
    world.hosts["b"].hangs = True  # Its collectives wait for a host that has gone on.
    world.beats(2)
    assert world.hosts["b"].member.order == membership.KILL
    world.beats()
    world.saved = 5
    world.beats(4)
    assert world.names() == ("a", "b")


def test_a_host_that_knows_nothing_of_those_that_train_begins_no_round_beside_theirs(world):
    world.add("a")
    world.beats(SETTLING + 2)
    world.hosts["a"].ends(pause=2.0)
    world.hosts["a"].stopped = True  # Once first of all, and it had seen nobody else.
    world.add("b")
    world.beats(2 * SETTLING)
    assert world.names() == ("b",)
    world.hosts["a"].stopped = False
    for _ in range(SILENCE):
        world.beats()
        assert world.names() == ("b",)


def test_leases_of_an_earlier_launch_and_damaged_ones_count_for_nothing(world):
    old = Lease("0-old", 2, "training", Round(41, (("0-old", 2),), "x:1", "old"), beat=9)
    text = json.dumps(membership.dataclasses.asdict(old))
    assert Lease.read(text.encode()) == old
    (world.folder / "0-old.json").write_text(text)
    torn = (text[:30], "[3]", "{}", text.replace('"members": [[', '"members": [[3, 4, '), "")
    for i, damaged in enumerate(torn):
        assert Lease.read(damaged.encode()) is None
        (world.folder / f"torn-{i}.json").write_text(damaged)
    world.add("a")
    world.beats(SETTLING + 2)
    (round,) = world.training()
    assert (round.names, round.number, round.resumes) == (("a",), 42, False)
    assert not (world.folder / "0-old.json").exists()


def test_a_lease_under_another_name_deletes_nothing(world):
    config = world.folder.parent / "config.json"
    config.write_text("{}")
    lease = json.dumps({"name": "../config", "processes": 1, "round": None})
    (world.folder / "x.json").write_text(lease)
    world.add("a")
    world.beats(SETTLING + 4)
    assert world.names() == ("a",)
    assert config.exists()


def test_a_folder_that_takes_no_lease_is_refused_and_not_tried_for_ever(world, monkeypatch):
    def failing(path, content):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(membership.paths, "write_whole", failing)
    world.add("a")
    with pytest.raises(PermissionError, match="Permission denied"):
        world.hosts["a"].member.__enter__()


def test_storage_that_fails_looks_like_no_loss(world, monkeypatch):
    world.add("a", "b")
    world.beats(SETTLING + 2)
    world.now += 10 * SILENCE  # Nobody could read or write.
    world.beats(5)
    (round,) = world.training()
    assert round.number == 1
    for host in world.hosts.values():  # Nor does it where they wait.
        host.ends(pause=4.0)
    world.beats(2)
    world.hosts = dict(reversed(world.hosts.items()))  # First the one that has seen all.
    world.now += 10 * SILENCE
    world.beats(8)
    assert world.names() == ("a", "b")
    assert world.hosts["a"].member.own.number == 2


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 100)]


@pytest.mark.parametrize("seed", [0, 1, *SLOW])
def test_whatever_happens_one_round_trains_and_in_the_end_with_all_that_may(tmp_path, seed):
    """Hosts are lost, stopped, continued and started at random, in any order of their beats."""
    draw = random.Random(seed)
    world = World(tmp_path, draw.choice([(1, 2, 4), (1, 2, 3, 4, 5), (2, 3)]))
    number = 0
    for _ in range(60):
        alive = [host for host in world.hosts.values() if not host.gone]
        what = draw.random()
        if what < 0.3 and len(alive) < 6:
            number += 1
            world.add(f"{draw.choice('abc')}{number}")
        elif what < 0.45 and alive:
            draw.choice(alive).gone = True
        elif what < 0.6 and alive:
            victim = draw.choice(alive)
            victim.stopped, victim.knows_at = not victim.stopped, world.now + 3
        elif what < 0.75:
            world.saved = (world.saved or 0) + 1
        elif alive:
            draw.choice(alive).hangs = True
        for _ in range(draw.randrange(8)):
            world.beats()
            shuffled = draw.sample(list(world.hosts.items()), len(world.hosts))
            world.hosts = dict(shuffled)
            assert len(world.training()) <= 1
    for host in world.hosts.values():
        host.stopped = host.hangs = False
    world.add("last")
    for _ in range(12):
        world.beats(SILENCE)
        world.saved = (world.saved or 0) + 1
    alive = [host for host in world.hosts.values() if not host.gone]
    able = max(n for n in (0, *world.counts) if n <= len(alive))
    assert [len(round.names) for round in world.training()] == [able] * bool(able)
