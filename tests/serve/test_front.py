"""The front before replicas that die, fail and stall: stand-ins over sockets, without a model."""

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from jaxtrain.layout import MeshShape
from jaxtrain.serve import front
from jaxtrain.serve.answer import Limits
from jaxtrain.serve.command import ServeOptions, replica_command, replica_environments
from jaxtrain.serve.front import SLACK, Choice, make_front
from jaxtrain.serve.worker import FAILED
from tests.serve.test_command import run  # noqa: F401
from tests.waiting import eventually

TEXT = "to be or not to be"


class StandIn:
    """A replica that answers with TEXT, letter by letter, and may die after so many events."""

    def __init__(self, *, dies=None, fails=False, stalls=False, status=200, well=False):
        self.status = 503 if fails else status
        self.live = self.given = 0
        self.dies, self.fails, self.stalls = dies, fails, stalls
        self.bodies, self.failed, self.well = [], False, well
        self.left = threading.Event()
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait(10)

    async def _serve(self):
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    def fail(self):
        self.failed, self.port = True, None

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(re.search(r"content-length: (\d+)", head)[1])
        body = json.loads(await reader.readexactly(size) or b"null")
        self.bodies.append((head, body))
        chunked = "\r\ntransfer-encoding: chunked\r\n\r\n"
        send = lambda status, kind: writer.write(  # noqa: E731
            f"HTTP/1.1 {status} X\r\ncontent-type: {kind}{chunked}".encode()
        )
        part = lambda data: writer.write(b"%x\r\n%s\r\n" % (len(data), data))  # noqa: E731
        if "GET /metrics" in head:
            send(200, "text/plain")
            part(b'# HELP a b\n# TYPE a counter\na 2\nb{c="d"} 1.5\n')
        elif "GET /health" in head and self.well:
            send(200, "application/json")
            part(b"{}")
        elif self.stalls:
            await reader.read()
            self.left.set()
            return writer.close()
        elif not body.get("stream"):
            send(self.status, "application/json")
            part(json.dumps({"text": TEXT, "seed": body["seed"]}).encode())
            if self.dies is not None:
                return writer.close()
        else:
            send(200, "text/event-stream; charset=utf-8")
            for n, letter in enumerate(TEXT):
                if n == self.dies:
                    if self.fails:
                        part(b"data: %s\n\n" % json.dumps({"error": {"message": FAILED}}).encode())
                        part(b"")
                    return writer.close()
                choice = {"index": n % 2, "text": letter}
                event = {"id": str(self.port), "created": self.port, "choices": [choice]}
                part(b"data: %s\n\n" % json.dumps(event).encode())
                await writer.drain()
            part(b"data: [DONE]\n\n")
        part(b"")
        await writer.drain()
        writer.close()


@contextlib.contextmanager
def fronting(*replicas, key=None, **limits):
    uvicorn = pytest.importorskip("uvicorn")
    app = make_front(replicas, ("m", "poet"), limits=Limits(**limits), key=key)
    config = uvicorn.Config(app, log_level="error", lifespan="off")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        eventually(lambda: server.started)
        port = listening.getsockname()[1]

        def ask(path="/v1/completions", body=None, raw=None):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            with contextlib.closing(connection):
                raw = raw if body is None else json.dumps(body)
                headers = {"authorization": "Bearer k"}
                connection.request("GET" if raw is None else "POST", path, raw, headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

        ask.port = port
        try:
            yield ask
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.mark.parametrize("death", [{}, {"fails": True}])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_stream_continues_on_another_replica_behind_what_was_told(after, death):
    dying, well = StandIn(dies=after, **death), StandIn()
    with fronting(dying, well) as ask:
        status, text = ask(body={"prompt": "a", "stream": True})
    events = [x.removeprefix("data: ") for x in text.split("\n\n") if x]
    assert status == 200
    assert events.pop() == "[DONE]"
    events = [json.loads(x) for x in events]
    assert "".join(x["choices"][0]["text"] for x in events) == TEXT
    assert len({(x["id"], x["created"]) for x in events}) == 1
    ((_, first),), ((head, second),) = dying.bodies, well.bodies
    assert first == second
    assert isinstance(first["seed"], int)  # by which both draw alike
    assert "authorization: Bearer k" in head
    assert dying.live == well.live == 0


@pytest.mark.parametrize("death", [{"dies": 0}, {"fails": True}])
def test_an_answer_that_breaks_off_is_asked_for_again(death):
    dying, well = StandIn(**death), StandIn()
    with fronting(dying, well) as ask:
        status, text = ask(body={"prompt": "a", "seed": 5})
        assert (status, json.loads(text)) == (200, {"text": TEXT, "seed": 5})
        assert dying.failed == ("fails" in death)  # whose engine has failed is started again
        dying.port = well.port = None
        assert ask(body={"prompt": "a"})[0] == ask("/health")[0] == 503


def test_what_no_replica_survives_ends_with_a_sentence():
    replicas = [StandIn(dies=3) for _ in range(4)]
    with fronting(*replicas) as ask:
        _, text = ask(body={"prompt": "a", "stream": True})
        last = text.split("\n\n")[3].removeprefix("data: ")
        assert json.loads(last)["error"]["message"] == FAILED
    assert sum(len(x.bodies) for x in replicas) == 3  # the fourth is spared
    assert all(x.live == 0 for x in replicas)


def test_a_client_that_goes_away_leaves_its_replica():
    replica = StandIn(stalls=True)
    with fronting(replica) as ask:
        connection = http.client.HTTPConnection("127.0.0.1", ask.port)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "a"}))
            eventually(lambda: replica.bodies)
        eventually(replica.left.is_set)
        eventually(lambda: replica.live == 0)


def test_a_front_sums_metrics_and_limits_requests():
    with fronting(StandIn(), StandIn(), body=99) as ask:
        values = [x for x in ask("/metrics")[1].splitlines() if not x.startswith("#")]
        assert values == ["a 4", 'b{c="d"} 3', "jaxtrain_replicas_well 2"]
        assert json.loads(ask("/health")[1]) == {"status": "ok", "replicas": 2, "well": 2}
        assert ask(raw="x" * 100)[0] == 413
    with fronting(StandIn(), requests=0) as ask:
        assert ask(body={"prompt": "a"})[0] == 429


@pytest.mark.parametrize(("stream", "slow"), [(False, False), (True, False), (True, True)])
def test_a_replica_that_hangs_is_started_again_and_another_answers(stream, slow, monkeypatch):
    """One that is slow, and tells its health, is not started again."""
    monkeypatch.setattr(front, "GRACE", 0.2)
    monkeypatch.setattr(front, "PROBE", 10 if slow else 0.2)
    hangs, other = StandIn(stalls=True, well=slow), StandIn()
    with fronting(hangs, other, seconds=0.2) as ask:
        assert ask(body={"prompt": "a", "stream": stream})[0] == 200
    assert (hangs.failed, other.failed, hangs.live) == (not slow, False, 0)


def test_a_request_goes_to_a_replica_that_has_room():
    full, well = StandIn(status=429), StandIn()
    with fronting(full, well) as ask:
        assert ask(body={"prompt": "a"})[0] == 200
        assert len(full.bodies) == 1
        well.status = 429
        assert ask(body={"prompt": "a"})[0] == 429
    assert not full.failed


def test_another_model_is_refused_by_the_front_itself():
    replica = StandIn()
    for key, status, said in (("k", 404, "model is 'n': ask for m or poet"), ("l", 401, "API key")):
        with fronting(replica, key=key) as ask:
            found, text = ask(body={"prompt": "a", "model": "n"})
            assert (found, said in json.loads(text)["error"]["message"]) == (status, True)
    assert not replica.bodies
    with fronting(replica) as ask:
        assert [ask(body={"prompt": "a", "model": name})[0] for name in ("m", "poet", None)] == [
            200
        ] * 3


def test_a_front_asks_for_the_key_and_counts_a_request_before_it_reads_its_body():
    with fronting(StandIn(), key="k", requests=1) as ask:

        def begin(key):
            """Sends all of a request but its body."""
            client = socket.create_connection(("127.0.0.1", ask.port), timeout=30)
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
            client.sendall(f"{head}authorization: Bearer {key}\r\n\r\n".encode())
            return client

        with begin("wrong") as refused:
            assert refused.recv(100).startswith(b"HTTP/1.1 401 ")
        with begin("k"):
            eventually(lambda: ask(body={"prompt": "a"})[0] == 429)
        eventually(lambda: ask(body={"prompt": "a"})[0] == 200)


def test_an_address_is_passed_on_as_it_is_encoded():
    replica = StandIn()
    with fronting(replica) as ask:
        for path in ("/v1/%20x", "/v1/%C3%A9?a=%C3%A9%20b"):
            assert ask(path, body={"prompt": "a"})[0] == 200
            assert replica.bodies[-1][0].startswith(f"POST {path} HTTP/1.1")
        with socket.create_connection(("127.0.0.1", ask.port), timeout=30) as client:
            client.sendall(b"GET /v1/x?\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")


class Counted:
    def __init__(self, port=1):
        self.port, self.live, self.given = port, 0, 0


def test_a_request_goes_to_who_has_read_its_beginning_or_has_the_least_to_do():
    a, b, c = replicas = [Counted(), Counted(), Counted()]
    choice = Choice(replicas)
    assert choice.of([b"1"], []) is a
    a.live = 1
    assert choice.of([b"2"], []) is b
    assert choice.of([b"1", b"12"], []) is a  # the longest that is known
    a.live = SLACK + 1
    assert choice.of([b"1", b"12", b"123"], []) is b  # a has much more to do
    assert choice.of([b"1"], []) is b  # which has read it since
    a.live = 0
    assert choice.of([b"x"], [b, c]) is a
    assert choice.of([b"1", b"x", b"y"], []) is a  # the longest that is known
    assert choice.of([b"1"], [a]) is b
    b.port = None
    assert choice.of([b"1"], []) is a
    c.port = a.port = None
    assert choice.of([], []) is None


def test_replicas_have_the_flags_of_the_server_and_gpus_of_their_own():
    options = ServeOptions(
        model="m",
        adapter=("a=b",),
        replicas=2,
        mesh=MeshShape(tensor=2),
        host="0.0.0.0",
        exact=True,
    )
    command = replica_command(options)
    assert command[4:] == ["--mesh.tensor=2", "--model=m", "--adapter=a=b", "--port=0", "--exact"]
    environ = {"CUDA_VISIBLE_DEVICES": "3,4,5,6", "X": "y"}
    found = replica_environments(options, environ)
    assert found == [environ | {"CUDA_VISIBLE_DEVICES": each} for each in ("3,4", "5,6")]
    assert replica_environments(options, environ | {"JAX_PLATFORMS": "cpu"})[0]["X"] == "y"
    with pytest.raises(ValueError, match=r"with --mesh\.tensor 2 they need 4 GPUs, and 3 are"):
        replica_environments(options, {"CUDA_VISIBLE_DEVICES": "3,4,5"})


def children(pid):
    """The processes that another has started, the oldest first."""
    found = []
    for each in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = each.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(each.parent.name))
    return sorted(found)


@pytest.mark.slow
def test_a_replica_that_is_killed_is_missed_by_no_client_and_comes_again(run, tmp_path):  # noqa: F811
    pytest.importorskip("uvicorn")
    line = [
        sys.executable,
        "-m",
        "jaxtrain",
        "serve",
        "--run",
        run,
        "--port",
        "0",
        "--replicas",
        "2",
    ]
    line += ["--replicas", "2", "--simulate-devices", "1", "--longest", "4096"]
    log = tmp_path / "log"
    with (
        log.open("w") as error,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=error, text=True) as process,
    ):
        try:
            port = int(re.search(r":(\d+)/v1", process.stdout.readline())[1])

            def ask(path, body=None):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
                body = body and json.dumps(body)
                connection.request("POST" if body else "GET", path, body)
                return connection.getresponse()

            def well():
                return json.loads(ask("/health").read())["well"]

            body = {"prompt": "to be", "seed": 3, "max_tokens": 1500, "min_tokens": 1500}
            body |= {"frequency_penalty": 0.1, "repetition_penalty": 1.2, "min_p": 0.01}
            whole = json.loads(ask("/v1/completions", body).read())["choices"][0]["text"]
            # Of three at most one is not the replica that writes: they are asked by turns.
            for which in (-1, 0, -1):
                answer = ask("/v1/completions", body | {"stream": True})
                text = answer.read(2000).decode()
                os.kill(children(process.pid)[which], signal.SIGKILL)
                text += answer.read().decode()
                parts = [x.removeprefix("data: ") for x in text.split("\n\n") if x]
                assert parts.pop() == "[DONE]"
                told = "".join(json.loads(x)["choices"][0]["text"] for x in parts)
                assert told == whole
                eventually(lambda: well() == 2, seconds=600)  # It compiles.
                if lost := "was lost in a request" in log.read_text():
                    break
            assert lost
            replicas = children(process.pid)
            assert len(replicas) == 2
            process.kill()
            # However the front ends, its replicas do.
            eventually(lambda: not any(pathlib.Path(f"/proc/{x}").exists() for x in replicas))
        finally:
            process.kill()
