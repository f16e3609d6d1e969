"""Checkpoints in the memory of hosts: keepers in this process stand for those of other hosts."""

import contextlib
import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxtrain as jt
from jaxtrain.host import distributed, hosts_memory, keeper
from jaxtrain.host.keeper import Keeper
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.checkpoints.manifest import DamagedCheckpointError

FOLDER = "hosts://run/snapshots"
WEIGHTS = np.arange(64.0, dtype=np.float32).reshape(8, 8)
PIECE = "run/snapshots/2/state/w/0.0"


def a_state(**axes):
    mesh = jt.make_mesh(**axes)
    w = jax.device_put(WEIGHTS, NamedSharding(mesh, PartitionSpec("fsdp", "data")))
    return {"w": w, "key": jax.random.key(3), "step": 2}


@contextlib.contextmanager
def open_to(monkeypatch, *keepers):
    """The storage of a process that knows these keepers, its own first."""
    monkeypatch.setenv(distributed.MEMORY, " ".join(each.address for each in keepers))
    hosts_memory.connect()
    with Checkpointer(FOLDER, keep=1, keep_best=0) as checkpoints:
        yield checkpoints


def restored(checkpoints, state):
    found = checkpoints.restore(state)
    np.testing.assert_array_equal(found["w"], WEIGHTS)
    key, wanted = (jax.random.key_data(each["key"]) for each in (found, state))
    np.testing.assert_array_equal(key, wanted)
    assert found["step"] == 2
    assert found["w"].sharding == state["w"].sharding
    return True


@pytest.fixture
def hosts(monkeypatch):
    """Three hosts, of which the first has saved steps 1 and 2."""
    with Keeper("127.0.0.1") as one, Keeper("127.0.0.1") as two, Keeper("127.0.0.1") as three:
        state = a_state(data=2, fsdp=4)
        with open_to(monkeypatch, one, two, three) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state)
            checkpoints.wait()
            assert checkpoints.steps() == [2]
        yield one, two, three


def test_either_host_may_be_lost_and_the_others_restore_on_another_mesh(hosts, monkeypatch):
    one, two, three = hosts
    assert one.objects == two.objects
    assert len([name for name in one.objects if name.startswith("run/snapshots/2/state/w/")]) == 9
    assert not three.objects
    state = a_state(data=4, fsdp=2)
    with open_to(monkeypatch, three, two, one) as checkpoints:  # of another host
        assert restored(checkpoints, state)
    for lost, left in ((one, two), (two, one)):
        objects = dict(lost.objects)
        lost.objects.clear()
        with open_to(monkeypatch, lost, left) as checkpoints:  # it has come back, and is empty
            assert restored(checkpoints, state)
        lost.objects.update(objects)
    one.__exit__()  # and is not there to answer
    with open_to(monkeypatch, three, one, two) as checkpoints:
        assert restored(checkpoints, state)
        checkpoints.drop_after(0)
    assert not two.objects
    assert not three.objects


def test_a_damaged_copy_is_passed_over_and_two_are_no_snapshot(hosts, monkeypatch):
    one, two, _ = hosts
    state = a_state(data=2, fsdp=4)
    data = one.objects[PIECE]
    one.objects[PIECE] = data[:-1] + b"?"
    with open_to(monkeypatch, one, two) as checkpoints:
        assert restored(checkpoints, state)
        two.objects[PIECE] = data[:-1]
        with pytest.raises(DamagedCheckpointError, match=rf"'{PIECE}' in a host's memory"):
            checkpoints.restore(state)
        # Of other content, and whole by itself.
        fsspec.filesystem("hosts").pipe_file(PIECE, bytes(len(data) - 4))
        with pytest.raises(DamagedCheckpointError, match="'w' is not what was saved"):
            checkpoints.restore(state)
        for each in (one, two):
            del each.objects[PIECE]
        with pytest.raises(DamagedCheckpointError, match="no host that is left holds"):
            checkpoints.restore(state)


def test_a_snapshot_that_is_not_written_to_its_end_does_not_count(hosts, monkeypatch):
    one, two, _ = hosts
    for each in (one, two):
        del each.objects["run/snapshots/2/commit_success.txt"]
    with open_to(monkeypatch, one, two) as checkpoints:
        assert checkpoints.steps() == []


def test_keepers_take_nothing_from_strangers(hosts):
    one, *_ = hosts
    host, _, token = one.address.partition("/")
    before = dict(one.objects)
    for path, body in ((f"/{token}x/a", b"1"), (f"/{token[:-1]}/a", b"1"), ("/%ff/a", b"1")):
        for method in ("GET", "PUT", "DELETE"):
            connection = http.client.HTTPConnection(host, timeout=5)
            connection.request(method, path, body)
            assert connection.getresponse().status == 403
            connection.close()
    assert one.objects == before


@pytest.mark.parametrize("head", ["Content-Length: 9", "Content-Length: -1", "Host: here"])
def test_a_keeper_takes_no_object_that_is_cut_off(hosts, head):
    one, *_ = hosts
    objects = dict(one.objects)
    host, _, token = one.address.partition("/")
    with socket.create_connection(host.split(":"), timeout=5) as peer:
        peer.sendall(f"PUT /{token}/{PIECE} HTTP/1.1\r\n{head}\r\n\r\ncut".encode())
        peer.shutdown(socket.SHUT_WR)
        assert b" 400 " in peer.recv(100)
    assert one.objects == objects


def test_whoever_sends_a_request_byte_by_byte_holds_no_place(monkeypatch):
    monkeypatch.setattr(keeper._Handler, "timeout", 0.3)
    monkeypatch.setattr(keeper, "CONNECTIONS", 1)
    with Keeper("127.0.0.1") as one:
        slow = socket.create_connection(one.address.partition("/")[0].split(":"))
        for _ in range(14):
            with contextlib.suppress(ConnectionError):
                slow.sendall(b"G")
            time.sleep(0.05)
        assert keeper.ask(one.address, "PUT", "a", b"bytes") == b""
        slow.close()


def test_two_snapshots_are_held_at_most(monkeypatch):
    with Keeper("127.0.0.1") as one:
        held, real = [], keeper._Handler.do_PUT

        def do_put(handler):
            real(handler)
            held.append({name.split("/")[2] for name in list(handler.objects)})

        monkeypatch.setattr(keeper._Handler, "do_PUT", do_put)
        with open_to(monkeypatch, one) as checkpoints:
            for step in range(1, 5):
                checkpoints.save(step, a_state(data=2, fsdp=4))
        assert max(map(len, held)) == 2
        assert {name.split("/")[2] for name in one.objects} == {"4"}


def test_a_process_without_a_launcher_has_no_memory_that_outlives_it(monkeypatch):
    monkeypatch.delenv(distributed.MEMORY, raising=False)
    with pytest.raises(ValueError, match="process 0 has no launcher that keeps memory"):
        hosts_memory.connect()


@pytest.mark.slow
def test_an_object_may_take_longer_than_a_host_may_be_silent(monkeypatch):
    monkeypatch.setattr(keeper, "SILENT_SECONDS", 2.0)
    size, got = 16 << 20, bytearray()

    def slow(server):
        with server.accept()[0] as peer:
            while len(got) < size and (part := peer.recv(1 << 20)):
                got.extend(part)
                time.sleep(0.2)
            peer.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        done = pool.submit(slow, server)
        data = bytes(range(256)) * (size // 256)
        keeper.ask(f"127.0.0.1:{server.getsockname()[1]}/token", "PUT", "a", data)
        done.result()
    assert got.endswith(data[-(1 << 20) :])
    assert b"Content-Length: 16777216" in got
