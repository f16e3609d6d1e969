"""The peer_group's port: whoever else connects, says anything or says nothing."""

import contextlib
import json
import socket
import threading
import time

import pytest

from jaxtrain.host import exit_codes
from jaxtrain.run.survive import peer_group
from jaxtrain.run.survive.peer_group import PeerGroup
from tests.run.survive.test_preemption import eventually

TOKEN = "of the run"


@pytest.fixture
def joining(monkeypatch):
    """Process 0 of three waits for the others: what it told them, and what it returns."""
    told, result = [], []
    monkeypatch.setattr(peer_group, "broadcast_text", told.append)
    monkeypatch.setattr(peer_group.secrets, "token_hex", lambda size: TOKEN)
    monkeypatch.setattr(peer_group, "JOIN_SECONDS", 15.0)
    thread = threading.Thread(target=lambda: result.append(peer_group._accept(3)))
    thread.start()
    eventually(lambda: told)
    yield json.loads(told[0]), result, thread
    thread.join(60)
    for peer in result[0][0].values() if result else ():
        peer.close()


def connect(call):
    return socket.create_connection(("127.0.0.1", call["port"]), timeout=5)


def test_strangers_neither_end_nor_hold_up_those_who_join(joining):
    call, result, thread = joining
    hello = {"token": TOKEN, "host": "h"}
    greetings = [
        b"[]\n",
        b"null\n3\n",
        b'{"token": 5}\n',
        b'{"token": "\\ud800"}\n',
        b"[" * 990 + b"\n",
        b"9" * 5000,
        bytes(range(256)) * 20,
        b"\xff\xfe\n",
        *(json.dumps(hello | {"process": p}).encode() + b"\n" for p in (0, 3, -1, True, "1", None)),
        json.dumps({"token": "of another run", "process": 1, "host": "h"}).encode() + b"\n",
        b"",
    ]
    with contextlib.ExitStack() as stack:
        start = time.monotonic()
        # Some who say nothing, one who says a byte at a time, many who are gone at once.
        silent = [stack.enter_context(connect(call)) for _ in range(20)]
        for greeting in greetings:
            stranger = stack.enter_context(connect(call))
            with contextlib.suppress(OSError):
                stranger.sendall(greeting)
        for _ in range(50):
            connect(call).close()
        silent[0].sendall(b"{")
        joined = [peer_group._call(p, call | {"token": TOKEN}) for p in (1, 2)]
        thread.join(30)
        assert not thread.is_alive()
        assert time.monotonic() - start < 20
    peers, hosts, failure = result[0]
    assert sorted(peers) == sorted(hosts) == [1, 2]
    assert failure is None
    for theirs, _, missing in joined:
        assert missing is None
        theirs[0].close()


def test_a_flood_of_strangers_keeps_no_peer_out(joining, monkeypatch):
    """A peer on a busy host speaks late, when a crowd has come behind it: twice it is the one who
    has to leave, and then there is no crowd any more."""
    monkeypatch.setattr(peer_group, "MOST_STRANGERS", 5)
    monkeypatch.setattr(peer_group.random, "choice", lambda strangers: strangers[0])
    call, result, thread = joining
    open_connection, crowd, floods = socket.create_connection, [], [12, 12]

    def slowly(*address, **timeout):
        peer = open_connection(*address, **timeout)
        for _ in range(floods.pop() if floods else 0):
            crowd.append(open_connection(*address, **timeout))
        time.sleep(0.2)
        return peer

    monkeypatch.setattr(peer_group.socket, "create_connection", slowly)
    for process in (1, 2):
        theirs, _, missing = peer_group._call(process, call | {"token": TOKEN})
        assert missing is None
        theirs[0].close()
    thread.join(30)
    for each in crowd:
        each.close()
    assert sorted(result[0][0]) == [1, 2]


def test_half_open_connections_are_ended_after_a_while(joining, monkeypatch):
    monkeypatch.setattr(peer_group, "GREETING_SECONDS", 0.3)
    call, _, thread = joining
    half = connect(call)
    half.sendall(b'{"tok')
    assert half.recv(1) == b""
    half.close()
    for process in (1, 2):
        peer_group._call(process, call | {"token": TOKEN})[0][0].close()
    thread.join(30)


@pytest.mark.parametrize(
    "sent", [b"[]\n", b'{"at": \n', b'{"lost": "x"}\n', b"\xff\n", b"x" * (1 << 20) + b"y"]
)
def test_a_peer_that_sends_no_message_is_lost_and_said_to_be(sent, capfd):
    exits = []
    ours, theirs = socket.socketpair()
    line = PeerGroup(0, 2, {1: ours}, {1: "far"}, exit=exits.append)
    theirs.sendall(sent)
    eventually(lambda: exits)
    assert exits[0] == exit_codes.PEER_LOST
    assert "process 1 of 2 (host far) has died: what it sends is no message" in (
        capfd.readouterr().err
    )
    line.close()
    theirs.close()


def test_on_one_machine_nobody_from_outside_can_connect(monkeypatch):
    for host, wanted in [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), (None, "0.0.0.0")]:
        monkeypatch.setattr(peer_group, "coordinator_host", lambda host=host: host)
        server, addresses = peer_group._listen(2)
        with server:
            assert server.getsockname()[0] == wanted
            assert "127.0.0.1" in addresses
    # An address of another machine, and one that is only for this one by its own name.
    for host in ("192.0.2.7", "127.0.1.1"):
        monkeypatch.setattr(peer_group, "coordinator_host", lambda host=host: host)
        server, addresses = peer_group._listen(2)
        with server:
            assert server.getsockname()[0] == "0.0.0.0"
