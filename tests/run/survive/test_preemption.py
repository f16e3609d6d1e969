"""Signals, the agreement on a step to stop at, and the run that is stopped, in one process."""

import dataclasses
import errno
import os
import signal
import socket
import threading
import time

import pytest

import jaxtrain as jt
from jaxtrain.host import exit_codes
from jaxtrain.host.distributed import from_first_process
from jaxtrain.host.signals import SignalWatch
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.survive import peer_group, preemption
from jaxtrain.run.survive.peer_group import PeerGroup
from jaxtrain.run.survive.preemption import Preempted
from jaxtrain.run.survive.stragglers import Stragglers
from tests.run.streams import during
from tests.run.test_loop import make_experiment
from tests.waiting import eventually


def handlers():
    return [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]


@pytest.fixture
def default_handlers():
    """Those of a shell in the foreground: what runs in the background ignores SIGINT."""
    set_now = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in set_now.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_program_ends_at_once_while_its_step_compiles(number, code, monkeypatch):
    ended = []
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    with preemption.ending_at_sigterm(sigint=True), preemption.ending_at_sigterm():
        # Of the two, fit's and main's, the inner one leaves SIGINT to the outer.
        os.kill(os.getpid(), number)
        eventually(lambda: ended == [code])
    with preemption.ending_at_sigterm(), pytest.raises(KeyboardInterrupt):  # a notebook's
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("default_handlers")
def test_the_first_signal_asks_and_the_second_ends_at_once():
    before, first, ended, now = handlers(), [], [], [0.0]
    with SignalWatch(first.append, exit=ended.append, clock=lambda: now[0]):
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: first == [signal.SIGTERM])
        now[0] = 0.3  # a launcher that passes on what the terminal has sent already
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        assert ended == []
        now[0] = 5.0
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: ended == [128 + signal.SIGTERM])
        assert first == [signal.SIGTERM]
    assert handlers() == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_signals_are_heard_while_the_main_thread_does_nothing_else_than_wait():
    first = []
    with SignalWatch(first.append):
        lock = threading.Lock()
        lock.acquire()
        # Released by the listening thread alone: the main thread is inside C until then.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Thread(target=lambda: (eventually(lambda: first), lock.release())).start()
        assert lock.acquire(timeout=30)
    assert first == [signal.SIGTERM]


def test_another_thread_leaves_signals_alone():
    before, inside = handlers(), []

    def run():
        with SignalWatch(lambda number: None):
            inside.append(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


def signalled(at: int, **changes):
    """The toy experiment, which is sent SIGTERM as its loop asks for the batch of a step."""

    def send():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    return during(make_experiment(**changes), {at: send})


def test_a_signal_saves_and_ends_the_run_which_goes_on_as_if_nothing_had_been(tmp_path, capfd):
    before = handlers()
    options = jt.RunOptions(run_dir=str(tmp_path / "run"))
    with pytest.raises(Preempted) as stop:
        jt.fit(signalled(at=5, eval_batches=None), options)
    assert stop.value.code == exit_codes.PREEMPTED
    step = stop.value.step
    assert 5 <= step < 12
    assert isinstance(stop.value, SystemExit)
    assert handlers() == before
    printed = capfd.readouterr()
    # Where a plugin for GPUs is installed and this test the first, XLA has logged besides.
    (said,) = (
        line for line in printed.err.splitlines() if not line.startswith(("WARNING: All", "I0"))
    )
    assert said.startswith("SIGTERM: finishing the step in flight and saving it, then exiting with")
    assert f"stopped after step {step}, which is saved in {tmp_path / 'run'}" in printed.out
    assert Checkpointer(tmp_path / "run" / "checkpoints").latest_step() == step
    unseen = make_experiment(eval_batches=None)
    resumed = jt.fit(unseen, jt.RunOptions(run_dir=options.run_dir, resume=True))
    whole = jt.fit(unseen, jt.RunOptions(run_dir=str(tmp_path / "whole")))
    assert digest(resumed.state) == digest(whole.state)


def test_the_save_after_a_signal_is_tried_again(tmp_path, monkeypatch):
    """One rename that fails, and the host is about to be taken away."""
    rename, failed = os.rename, []

    def once(source, target):
        if "checkpoints" in str(target) and not failed:
            failed.append(target)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(os, "rename", once)
    with pytest.raises(Preempted) as stop:
        jt.fit(signalled(at=5, eval_batches=None), jt.RunOptions(run_dir=str(tmp_path)))
    assert failed
    assert Checkpointer(tmp_path / "checkpoints").steps() == [stop.value.step]


@pytest.mark.slow
def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path, capsys):
    """In the loop and at the end: the run stops at that step, and resuming makes up for it."""
    asked = []

    def slow(sharding):
        for number, batch in enumerate(plain(sharding)):
            if asked and number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                asked.clear()
                time.sleep(0.3)
            assert not stopping or number <= 2, "the evaluation went on"
            yield batch

    experiment = make_experiment(steps=4)
    plain, stopping = experiment.data.eval_batches[""], []
    watched = experiment.with_(eval_batches=slow)
    for name, every, expected in (("loop", 2, 2), ("end", 0, 4)):
        options = jt.RunOptions(run_dir=str(tmp_path / name), eval_every=every)
        asked[:] = stopping[:] = [True]
        with pytest.raises(Preempted) as stop:
            jt.fit(watched, options)
        assert stop.value.step == expected
        assert f"evaluation after step {expected} left out" in capsys.readouterr().out
        stopping.clear()
        resumed = jt.fit(watched, dataclasses.replace(options, resume=True))
        assert resumed.evaluation
    whole = jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path / "whole")))
    assert whole.evaluation == resumed.evaluation


def test_a_signal_in_the_last_step_saves_it_and_leaves_the_evaluation_for_later(tmp_path):
    with pytest.raises(Preempted) as stop:
        jt.fit(signalled(at=4, steps=4), jt.RunOptions(run_dir=str(tmp_path)))
    assert stop.value.step == 4
    result = jt.fit(make_experiment(steps=4), jt.RunOptions(run_dir=str(tmp_path), resume=True))
    assert int(result.state.step) == 4
    assert result.evaluation


def test_signals_can_be_left_to_the_caller(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        options = jt.RunOptions(run_dir=str(tmp_path), handle_signals=False)
        result = jt.fit(signalled(at=3, steps=4, eval_batches=None), options)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert int(result.state.step) == 4
    assert heard == [signal.SIGTERM]


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    (tmp_path / "owner.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    options = jt.RunOptions(run_dir=str(tmp_path), resume=True)
    result = jt.fit(make_experiment(steps=2, eval_batches=None), options)
    assert int(result.state.step) == 2


def peer_groups(count, exits):
    """The peer groups of ``count`` processes, in this one."""
    pairs = {i: socket.socketpair() for i in range(1, count)}
    hosts = {i: f"host{i}" for i in range(count)}

    def make(i, peers):
        return PeerGroup(i, count, peers, hosts, exit=lambda code: exits.append((i, code)))

    hub = make(0, {i: pair[0] for i, pair in pairs.items()})
    return [hub, *(make(i, {0: pair[1]}) for i, pair in pairs.items())], pairs


def test_all_stop_after_the_step_of_the_farthest_whatever_it_waits_for():
    exits = []
    lines, _ = peer_groups(3, exits)
    assert [line.stops(7) for line in lines] == [False] * 3
    assert not lines[1].stops(8)  # and is in a collective now, for which it needs the others
    lines[2].want_stop()
    eventually(lambda: all(line.stop_wanted for line in lines))
    answers = {}

    def ask(i, step):
        answers[i] = lines[i].stops(step)

    threads = [threading.Thread(target=ask, args=(i, 8), daemon=True) for i in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {0: False, 2: False}
    assert [line.stops(9) for line in lines] == [True] * 3
    for line in lines:
        line.close()
    assert exits == []


def test_who_has_died_is_said_by_all_and_an_orderly_end_by_none(capfd):
    exits = []
    lines, pairs = peer_groups(3, exits)
    pairs[2][1].shutdown(socket.SHUT_RDWR)
    eventually(lambda: {(0, exit_codes.PEER_LOST), (1, exit_codes.PEER_LOST)} <= set(exits))
    said = capfd.readouterr().err
    assert said.count("process 2 of 3 (host host2) has died: its connection closed") >= 2
    for line in lines:
        line.close()
    exits.clear()
    lines, _ = peer_groups(2, exits)
    lines[1].close()
    lines[0].close()
    assert exits == []


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no space"), 1), (OSError("no space"), exit_codes.PEER_LOST)]
)
def test_an_error_of_one_leaves_the_others_time_to_raise_their_own(error, code, monkeypatch, capfd):
    monkeypatch.setattr(peer_group, "ERROR_SECONDS", 0.5)
    exits = []
    lines, _ = peer_groups(3, exits)
    lines[2].close(error)
    lines[1].close(ValueError("no space, here too"))
    time.sleep(0.2)
    assert exits == []
    eventually(lambda: exits == [(0, code)])
    said = f"(host host2) has ended with {type(error).__name__}: no space; process 0"
    assert said in capfd.readouterr().err
    lines[0].close()


def test_silence_is_noticed(monkeypatch):
    monkeypatch.setattr(peer_group, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(peer_group, "BEAT_SECONDS", 0.2)
    exits = []
    lines, _ = peer_groups(2, exits)
    time.sleep(2.0)
    assert exits == []  # both beat
    for line in lines:
        line.close()
    ours, silent = socket.socketpair()
    line = PeerGroup(0, 2, {1: ours}, {1: "far"}, exit=lambda code: exits.append(code))
    eventually(lambda: exits)
    assert exits[0] == exit_codes.PEER_LOST
    line.close()
    silent.close()


def test_the_pace_of_processes_is_compared_in_the_first():
    lines, _ = peer_groups(2, [])
    now = [0.0]
    paces = [Stragglers(line, clock=lambda: now[0]) for line in lines]

    def batches(seconds):
        for i in range(4):
            now[0] += seconds
            yield i

    assert list(paces[1].timed(batches(3.0))) == [0, 1, 2, 3]
    assert list(paces[0].timed(batches(1.0))) == [0, 1, 2, 3]
    assert paces[1].report(5.0) == {"time/data_seconds": 3.0}
    eventually(lambda: 1 in lines[0].shared)
    assert paces[0].report(4.5) == {
        "time/data_seconds": 1.0,
        "time/step_seconds_spread": 0.5,
        "time/data_seconds_spread": 2.0,
        "time/slowest_process": 1,
    }
    for line in lines:
        line.close()
    alone = Stragglers(PeerGroup(0, 1, {}, {}))
    assert alone.report(1.0) == {"time/data_seconds": 0.0}


def test_the_table_of_exit_codes_is_that_of_the_constants():
    rows = [line.split() for line in exit_codes.__doc__.splitlines() if line[:1].isdigit()]
    table = {row[1]: row for row in rows if row[1].isupper()}
    constants = {name: value for name, value in vars(exit_codes).items() if type(value) is int}
    assert {name: int(row[0]) for name, row in table.items()} == constants
    restart = {int(row[0]) for row in table.values() if row[-1] == "yes"}
    assert restart == exit_codes.RESTARTABLE


@pytest.mark.parametrize(
    ("end", "told"),
    [(SystemExit(3), "SystemExit: 3"), (KeyError(1), "KeyError: 1"), (Preempted(1, "r"), None)],
)
def test_the_others_are_told_of_every_end_that_is_not_theirs_too(end, told, monkeypatch):
    lines, _ = peer_groups(2, [])
    monkeypatch.setattr(peer_group, "_connect", lambda: lines[1])
    with pytest.raises(type(end)), peer_group.open_peer_group():
        raise end
    eventually(lambda: not lines[0]._peers)
    with lines[0]._changed:
        said = lines[0]._leave_at
    assert (said and said[1].partition("has ended with ")[2]) == told
    lines[0].close()


def test_one_process_agrees_with_itself():
    with peer_group.open_peer_group() as line:
        assert not line.stops(3)
        line.want_stop()
        assert line.stops(4)
    assert from_first_process(lambda: "text") == "text"
