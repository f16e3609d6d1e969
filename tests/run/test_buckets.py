"""Runs and token stores in S3 and Google's storage, by servers of both on this machine.

A proxy before the server of S3 refuses requests and cuts answers off, as a busy bucket does.
"""

import contextlib
import http.client
import http.server
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading

import fsspec
import pytest
from etils.epath import backend

from jaxtrain import data
from jaxtrain.run.checkpoints.reader import Reader
from tests.run.checkpoints.test_checkpointer import TWO_PROCESSES
from tests.run.survive.processes import Process, free_port, together
from tests.waiting import eventually

# Of the extra servers; looked for without importing them, as everyday runs collect this file too.
SERVERS = ("moto", "s3fs", "gcsfs", "gcp_storage_emulator")
MISSING = [name for name in SERVERS if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"could not import {', '.join(MISSING)}"),
]

FLAGS = ["--layers", "2", "--width", "32", "--heads", "2", "--seq-len", "64", "--global-batch", "4"]
FLAGS += ["--steps", "30", "--save-every", "5", "--keep", "2"]
FLAGS += ["--eval-every", "30", "--sample-tokens", "0", "--held-out-bytes", "4000"]


@contextlib.contextmanager
def served(command, port):
    """A server's process, from the moment on that it answers."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers():
        assert child.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True

    try:
        eventually(answers)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def s3(monkeypatch):
    """A bucket of S3; yields where its server is."""
    import s3fs

    fsspec.register_implementation("s3", s3fs.S3FileSystem, clobber=True)
    s3fs.S3FileSystem.clear_instance_cache()
    backend.fsspec_backend._get_filesystem.cache_clear()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with served(command, port) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        fsspec.filesystem("s3").mkdir("bucket")
        yield address


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server: one of twenty is refused, and as many answers are cut off."""

    def __init__(self, address):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.drawn = address.removeprefix("http://"), random.Random(0)
        self.refused = self.torn = 0

    def handle_error(self, request, client_address):
        pass  # a client that has gone


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fate = self.server.drawn.random()
        if fate < 0.05:
            self.server.refused += 1
            text = (
                b"<Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"
            )
            self._answer(503, {"Content-Type": "application/xml"}, text, len(text))
            return
        server = http.client.HTTPConnection(self.server.target, timeout=60)
        server.request(self.command, self.path, body, dict(self.headers))
        answer = server.getresponse()
        found, headers = answer.read(), dict(answer.getheaders())
        length = int(headers.get("Content-Length", len(found)))
        if self.command == "GET" and fate > 0.95 and len(found) > 100:
            self.server.torn += 1
            found = found[: len(found) // 2]
            self.close_connection = True
        self._answer(answer.status, headers, found, length)

    def _answer(self, status, headers, body, length):
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def log_message(self, *_):
        pass


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(10):
        drawn = random.Random(n).choices(["the", "quick", "brown", "fox", "jumps"], k=2000)
        (folder / f"{n}.txt").write_text(" ".join(drawn))
    return str(folder)


def train(tmp_path, name, *flags):
    return Process(["-m", "experiments.gpt", *FLAGS, *flags], tmp_path, name)


def saved(folder):
    """What the last checkpoint holds: the checksum of every leaf."""
    reader = Reader(f"{folder}/checkpoints")
    assert max(reader.steps()) == 30
    with (reader.directory / "30/manifest/metadata").open() as file:
        leaves = json.load(file)["leaves"]
    return {path: leaf.get("checksum", leaf.get("value")) for path, leaf in leaves.items()}


@pytest.fixture
def expected(tmp_path, texts):
    run = train(tmp_path, "local", "--data", texts, "--run-dir", f"{tmp_path}/local")
    assert run.code() == 0, run.errors
    return saved(f"{tmp_path}/local")


def test_a_run_in_s3_that_is_killed_ends_as_one_on_a_disk(s3, tmp_path, texts, expected):
    flags = ("--data", texts, "--run-dir", "s3://bucket/run")
    killed = train(tmp_path, "killed", *flags)
    killed.until(lambda: "checkpoint 10 saved" in killed.output)
    killed.send(signal.SIGKILL)
    killed.code()
    resumed = train(tmp_path, "resumed", *flags, "--resume")
    assert resumed.code() == 0, resumed.errors
    assert re.search(r"step (6|11|16|21|26)/30", resumed.output)
    assert saved("s3://bucket/run") == expected
    assert Reader("s3://bucket/run/checkpoints").steps() == [25, 30]
    lines = fsspec.filesystem("s3").cat("bucket/run/log.jsonl").splitlines()
    assert json.loads(lines[-1])["step"] == 30


def test_nobodys_credentials_are_a_sentence_before_anything_is_compiled(
    s3, tmp_path, texts, monkeypatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    run = train(tmp_path, "nobody", "--data", texts, "--run-dir", "s3://bucket/run")
    assert run.code() == 2, run.errors
    assert "compiled" not in run.output
    assert "Traceback" not in run.errors
    assert "credentials" in run.errors.lower()


def test_throttling_and_torn_reads_change_no_bit(s3, tmp_path, texts, expected, monkeypatch):
    proxy = Proxy(s3)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    store = ("--data", texts, "--out", "s3://bucket/store", "--workers", "1")
    made = Process(["-m", "jaxtrain", "tokenize", *store], tmp_path, "made")
    assert made.code() == 0, made.errors
    flags = ("--data", "s3://bucket/store", "--run-dir", "s3://bucket/run", "--save-every", "15")
    killed = train(tmp_path, "killed", *flags)
    killed.until(lambda: "checkpoint 15 saved" in killed.output)
    killed.send(signal.SIGKILL)
    killed.code()
    resumed = train(tmp_path, "resumed", *flags, "--resume", "--accept-changes", "data")
    assert resumed.code() == 0, resumed.errors
    assert proxy.refused > 10
    assert proxy.torn > 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    proxy.shutdown()
    assert saved("s3://bucket/run") == expected
    assert data.open_store("s3://bucket/store").verify() > 10**5


def test_two_processes_write_their_parts_and_read_each_others(s3):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest

    state = {
        "w": jnp.arange(24.0).reshape(4, 6),
        "none": jnp.zeros((0, 2)),
        "keys": jax.random.split(jax.random.key(3), 2),
        "host": np.arange(3),
        "n": 9,
    }
    with Checkpointer("s3://bucket/two", keep_best=0) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    command, port = [sys.executable, "-c", TWO_PROCESSES], str(free_port())
    for output in together([[*command, number, port, "s3://bucket/two"] for number in "01"]):
        assert f"digest {digest(state)}" in output
    reader = Reader("s3://bucket/two")
    assert reader.steps() == [2, 4]
    assert digest(reader.restore(state)) == digest(state)
    chunks = fsspec.filesystem("s3").ls("bucket/two/4/state/w")
    assert len(chunks) == 4 + 1


# Images and weights, which a process writes to a bucket and a disk, and reads from both.
BOTH_PLACES = """
import pathlib, sys
import fsspec, jax, numpy as np
from PIL import Image
from jaxtrain import data, hf
from jaxtrain.models import decoder
from jaxtrain.tree import named_leaves

near, far = pathlib.Path(sys.argv[1]), "gs://bucket/both"
rng = np.random.default_rng(0)
for n in range(12):
    path = near / "images" / "ab"[n % 2] / f"{n}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
fsspec.filesystem("gcs").put(f"{near}/images", "bucket/both/images", recursive=True)
one, other = (data.open_images(f"{place}/images") for place in (near, far))
assert one.fingerprint == other.fingerprint
for a, b in zip(one.train, other.train, strict=True):
    np.testing.assert_array_equal(a["image"], b["image"])
config = decoder.DecoderConfig(vocab_size=64, seq_len=8, layers=2, width=16, heads=4)
params = decoder.init(config, jax.random.key(0))
hf.save(f"{far}/model", config, params, max_shard_bytes=4000)
found = named_leaves(hf.open_weights(f"{far}/model"))
for name, x in named_leaves(params).items():
    np.testing.assert_array_equal(np.asarray(found[name]), x)
print("the same")
"""


def test_a_run_and_a_store_in_googles_storage(tmp_path, texts, expected, monkeypatch):
    import gcsfs

    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, gcsfs.GCSFileSystem, clobber=True)
    gcsfs.GCSFileSystem.clear_instance_cache()
    backend.fsspec_backend._get_filesystem.cache_clear()
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1"]
    command += [f"--port={port}", "--in-memory", "--default-bucket=bucket"]
    with served(command, port) as address:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "x")
        monkeypatch.setenv("FSSPEC_GCS", json.dumps({"token": "anon"}))
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        store = ("--data", texts, "--out", "gs://bucket/store", "--workers", "1")
        made = Process(["-m", "jaxtrain", "tokenize", *store], tmp_path, "made")
        assert made.code() == 0, made.errors
        both = Process(["-c", BOTH_PLACES, str(tmp_path / "both")], tmp_path, "both")
        assert both.code() == 0, both.errors
        assert "the same" in both.output
        flags = ("--data", "gs://bucket/store", "--run-dir", "gs://bucket/run", "--auto-resume")
        for attempt in range(5):  # the emulator has no generations, which TensorStore may refuse
            run = train(tmp_path, f"run{attempt}", *flags)
            if run.code() == 0 or "Malformed StorageGeneration" not in run.output + run.errors:
                break
        assert run.code() == 0, run.errors
        code = "import sys; from tests.run.test_buckets import saved; import json; "
        code += "print(json.dumps(saved('gs://bucket/run')))"
        (printed,) = together([[sys.executable, "-c", code]], cwd=os.getcwd())
        assert json.loads(printed.splitlines()[-1]) == json.loads(json.dumps(expected))


def test_images_rows_and_weights_are_read_through_throttling_and_weights_written(
    s3, tmp_path, texts, monkeypatch
):
    """Each run in S3 has the bits of the one whose folders lie on a disk."""
    pytest.importorskip("PIL", reason="needs Pillow: pip install 'jaxtrain[vision]'")
    import numpy as np
    from PIL import Image

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for n in range(40):
        folder = tmp_path / "images" / "abc"[n % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")
    rows = [json.dumps({"prompt": f"{n}", "completion": f"{n + 1}"}) for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    whole = ("--model", "gpt2-124m", "--data", texts, "--run-dir", f"{tmp_path}/begun")
    begun = train(tmp_path, "begun", *whole)
    assert begun.code() == 0, begun.errors
    proxy = Proxy(s3)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    places = {"near": f"{tmp_path}", "far": "s3://bucket"}
    for place in places.values():
        made = ["-m", "jaxtrain", "export", "--run", f"{tmp_path}/begun", "--out", f"{place}/model"]
        exported = Process([*made, "--max-shard-gb", "1e-5"], tmp_path, "exported")
        assert exported.code() == 0, exported.errors
    bucket = fsspec.filesystem("s3")
    for name in ("images", "rows.jsonl"):
        bucket.put(f"{tmp_path}/{name}", f"bucket/{name}", recursive=True)
    found = {}
    for name, place in places.items():
        images = ["--data", f"{place}/images", "--decoders", "2", "--steps", "30"]
        images = ["-m", "experiments.vision", *images, "--save-every", "30", "--global-batch", "4"]
        seen = Process([*images, "--run-dir", f"{tmp_path}/images-{name}"], tmp_path, name)
        assert seen.code() == 0, seen.errors
        tune = ["--init-from", f"{place}/model", "--data", f"{place}/rows.jsonl"]
        tune += ["--chat-template", "plain", "--tokenizer", "bytes", *FLAGS[6:]]
        tune = ["-m", "experiments.gpt", *tune, "--run-dir", f"{tmp_path}/tuned-{name}"]
        tuned = Process(tune, tmp_path, f"tuned-{name}")
        assert tuned.code() == 0, tuned.errors
        found[name] = [saved(f"{tmp_path}/{each}-{name}") for each in ("images", "tuned")]
    proxy.shutdown()
    assert found["far"] == found["near"]
    assert proxy.refused > 5
