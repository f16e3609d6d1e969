"""Models by their name on the Hugging Face hub, against a server that speaks its few endpoints."""

import functools
import hashlib
import http.server
import json
import os
import sys
import threading

import jax
import numpy as np
import pytest

from experiments.gpt import Config, outline
from jaxtrain import hf
from jaxtrain.hf import hub
from jaxtrain.models import decoder
from tests.commands import run
from tests.run.survive.processes import together

CONFIG = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=1, width=8, heads=2)
OLD, NEW = "a" * 40, "b" * 40  # commits; main is the new one


class Hub(http.server.BaseHTTPRequestHandler):
    """One model at two commits, one that is gated, and no other."""

    protocol_version = "HTTP/1.1"

    def __init__(self, files, asked, *args):
        self.files, self.asked = files, asked
        super().__init__(*args)

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        headers |= {"Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/api/models").split("/")[1:]
        owner, model, kind, revision, *rest = [*path, "", ""]
        if model == "gated" and kind == "resolve":
            return self.answer(403, X_Error_Code="GatedRepo")
        if f"{owner}/{model}" not in ("acme/tiny", "acme/gated"):
            return self.answer(401, X_Error_Code="RepoNotFound")
        commit = {"main": NEW, "v1": OLD}.get(revision, revision)
        if commit not in (OLD, NEW):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if kind == "revision":
            about = {"id": f"{owner}/{model}", "sha": commit, "siblings": []}
            return self.answer(200, json.dumps(about).encode())
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": self.tag(body)}
                for name, body in self.files[commit].items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        body = self.files[commit]["/".join(rest).strip("/")]
        self.asked.append((self.command, commit, rest[0]))
        return self.answer(200, body, ETag=f'"{self.tag(body)}"', X_Repo_Commit=commit)

    do_HEAD = do_GET

    def tag(self, body):
        return hashlib.sha1(body).hexdigest()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of each commit: the weights differ; beside them lies what is not to be taken."""
    found = {}
    for seed, commit in enumerate((OLD, NEW)):
        path = tmp_path_factory.mktemp("model")
        hf.save(path, CONFIG, decoder.init(CONFIG, jax.random.key(seed)))
        found[commit] = {each.name: each.read_bytes() for each in path.iterdir()}
        found[commit] |= {"pytorch_model.bin": b"pickled", "onnx/model.safetensors": b"other"}
    return found


@pytest.fixture(name="server")
def _server(files, monkeypatch, tmp_path):
    """The hub as the library finds it; yields what is downloaded from it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    asked = []
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Hub, files, asked)
    ) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.chdir(tmp_path)
        yield asked
        server.shutdown()


def test_a_run_begins_with_a_model_of_the_hub(server, tmp_path, monkeypatch, capsys):
    def kernel(name):
        experiment = outline(Config(init_from=name, tokenizer="bytes"))
        return np.asarray(hf.load(experiment.task.params())["blocks"]["attn"]["q"]["kernel"])

    new, old = (
        decoder.init(CONFIG, jax.random.key(seed))["blocks"]["attn"]["q"]["kernel"]
        for seed in (1, 0)
    )
    np.testing.assert_array_equal(kernel("acme/tiny"), new)
    np.testing.assert_array_equal(kernel("acme/tiny@v1"), old)
    taken = [each for each in server if each[0] == "GET"]
    # Once where two commits have the same, and no other formats.
    names = sorted(name for _, _, name in taken)
    assert names == ["config.json", "model.safetensors", "model.safetensors"]
    status, out, _ = run(capsys, "hf", "check", "acme/tiny")
    assert (status, "come back bit for bit" in out) == (0, True)
    # From the cache alone, and what lies here goes first.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    np.testing.assert_array_equal(kernel("acme/tiny@v1"), old)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert hub.local_folder("acme/tiny") == "acme/tiny"
    assert [each for each in server if each[0] == "GET"] == taken


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme/other", "no folder 'acme/other' here, and the .* hub has no model 'acme/other'"),
        ("acme/gated", "'acme/gated' is gated: accept its terms on the .* hub and log in"),
        ("acme/tiny@v9", "'acme/tiny' on the Hugging Face hub has no revision 'v9'"),
        ("offline", "and no whole copy of that model in the cache of .* is offline or cannot"),
        ("missing", "there is no folder 'acme/tiny' here: .* pip install -e '.\\[hub\\]'"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_give_is_one_sentence(server, name, message, monkeypatch):
    if name == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if name == "missing":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises((ValueError, ConnectionError, ImportError), match=message):
        hub.local_folder(name if "/" in name else "acme/tiny")


@pytest.mark.slow
def test_processes_of_a_host_download_once(server, tmp_path):
    code = "from jaxtrain.hf import hub; print(hub.local_folder('acme/tiny'))"
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    found = {out.strip() for out in together(3 * [[sys.executable, "-c", code]], env=env)}
    assert len(found) == 1
    assert hf.read_config(found.pop()).width == 8
    taken = [each for each in server if each[0] == "GET"]
    assert sorted(name for _, _, name in taken) == ["config.json", "model.safetensors"]
