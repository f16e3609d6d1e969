"""The roll call of processes: threads stand for them, and talk over real connections."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxtrain.host import roll_call
from tests.run.survive.processes import free_port

SAME = {"jax": "0.10.2", "XLA_FLAGS": ""}


def roll(*others, processes=None, seconds=10.0):
    """Process 0 and others, each with its own facts and clock; returns the roll call and what each
    of the others was told."""
    address = f"127.0.0.1:{free_port()}"
    processes = processes or len(others) + 1
    with ThreadPoolExecutor() as pool:
        told = [
            pool.submit(roll_call.answer, address, i, own, seconds=seconds, clock=clock)
            for i, (own, clock) in enumerate(others, 1)
        ]
        found = roll_call.call(address, processes, SAME, seconds=seconds)
        return found, [each.result() for each in told]


def test_all_that_come_are_compared_and_all_hear_what_is_wrong():
    late = lambda: time.time() - 7.5  # noqa: E731
    other = {"jax": "0.10.1", "XLA_FLAGS": "--x"}
    found, told = roll((SAME, time.time), (other, time.time), (SAME, late))
    host = socket.gethostname()
    assert found.fatal == [
        f"XLA_FLAGS is --x in process 2 on {host} and (nothing) in the others: make it the same "
        "everywhere",
        f"jax is 0.10.1 in process 2 on {host} and 0.10.2 in the others: make it the same "
        "everywhere",
    ]
    (clock,) = found.wrong
    assert clock.startswith(f"the clock of process 3 on {host} is -7.500 s from that of process 0")
    assert [each.fatal for each in told] == [list(found.fatal)] * 3
    assert [each.wrong for each in told] == [[clock]] * 3
    for process, offset in ((1, 0.0), (2, 0.0), (3, -7.5)):
        # Half of a round trip bounds the error, however slow the machine is.
        assert abs(found.offsets[process] - offset) <= found.errors[process] + 1e-4
        assert 0 < found.errors[process] < 1


def test_nothing_is_wrong_where_all_are_the_same():
    found, (told,) = roll((SAME, time.time))
    assert (found.fatal, found.wrong, told.fatal, told.wrong) == ([], [], [], [])
    assert list(found.hosts) == told.hosts == [socket.gethostname()] * 2


def test_a_process_that_does_not_come_is_named_in_time():
    start = time.monotonic()
    found, (told,) = roll((SAME, time.time), processes=4, seconds=1.0)
    assert time.monotonic() - start < 5
    assert [text.partition(" to ")[0] for text in found.fatal] == [
        "process 2 did not come",
        "process 3 did not come",
    ]
    assert told.fatal == found.fatal
    assert told.hosts[2:] == ["", ""]


def test_whoever_cannot_reach_process_0_says_so_in_time():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"process 3 on .* cannot talk .* at {address}"):
        roll_call.answer(address, 3, SAME, seconds=0.5)


def test_a_host_that_cannot_be_reached_is_named_and_strangers_are_nobody():
    port = free_port()
    closed = free_port()

    def stranger(text):
        with socket.create_connection(("127.0.0.1", port)) as peer, peer.makefile("rw") as file:
            file.write(text + "\n")
            file.flush()
            return file.readline()

    def behind_a_firewall():
        hello = {"process": 1, "host": "far", "port": closed, "facts": SAME}
        with socket.create_connection(("127.0.0.1", port)) as peer, peer.makefile("rw") as file:
            for message in (hello, {"failed": []}):
                file.write(json.dumps(message) + "\n")
                file.flush()
                file.readline()
            for _ in range(roll_call.PINGS):
                file.write(json.dumps({"time": time.time()}) + "\n")
                file.flush()
                told = json.loads(file.readline())
        return told

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(roll_call.call, f"127.0.0.1:{port}", 2, SAME, seconds=10.0)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                assert stranger("GET / HTTP/1.1") == stranger('{"process": 9}') == ""
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        assert behind_a_firewall()["result"]["hosts"][1] == "far"
        (sentence,) = waiting.result().fatal
    here = socket.gethostname()
    assert sentence.startswith(
        f"process 0 on {here} cannot reach process 1 on far at 127.0.0.1:{closed}"
    )


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        ('{"process": 1, "host": "x", "port": Infinity, "facts": {}}', "process 1 did not come"),
        ("[" * 200_000, "process 1 did not come"),
        ('{"process": 1, "host": "x", "port": 1, "facts": {"jax": {}}}', "process 1 on x was lost"),
        ('{"process": 1, "host": "x", "port": 99999999, "facts": {}}', "process 1 on x was lost"),
    ],
)
def test_whatever_is_said_and_whoever_is_lost_the_roll_call_has_an_end(hello, sentence):
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(roll_call.call, address, 2, SAME, seconds=1.0)
        # Closed with the roll unread, it refuses whatever is sent to it then.
        with roll_call._connect(address, 2.0) as peer:
            peer.sendall(hello.encode() + b"\n")
            time.sleep(0.2)
        assert any(text.startswith(sentence) for text in waiting.result().fatal)


def test_a_stranger_who_speaks_byte_by_byte_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(roll_call, "_GREETING_SECONDS", 0.3)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(roll_call.call, f"127.0.0.1:{port}", 2, SAME, seconds=3.0)
        slow = roll_call._connect(f"127.0.0.1:{port}", 3.0)

        def drip():
            while not first.done():
                with contextlib.suppress(OSError):
                    slow.sendall(b" ")
                time.sleep(0.05)

        pool.submit(drip)
        time.sleep(0.1)
        answered = roll_call.answer(f"127.0.0.1:{port}", 1, SAME, seconds=3.0)
        assert answered.hosts == first.result().hosts == [socket.gethostname()] * 2
        assert answered.fatal == []
    slow.close()


def test_facts_are_of_this_installation(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--of-this-test")
    facts = roll_call.facts()
    assert facts["XLA_FLAGS"] == "--of-this-test"
    assert {"python", "jax", "jaxlib", "code"} <= facts.keys()
    assert len(facts["code"]) == 12
