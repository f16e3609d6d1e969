"""A parameter server survives its workers and itself, and its log replays."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from jaxtrain.run import parameter_server
from jaxtrain.run.parameter_server import AsynchronousOptions, Server, run_asynchronous
from tests.methods.test_local_updates import experiment

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "16", "--seed", "3"]
SMALL += ["--global-batch", "4", "--steps", "150", "--save-every", "20", "--eval-every", "50"]
SMALL += ["--sample-tokens", "0"]


def processes():
    """The commands of all processes by number."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def wait_for(what, seconds=240):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)
    return found


def test_a_cluster_that_the_environment_names_is_joined(monkeypatch):
    """Ray takes no number of cores then, and a token of this process would open nothing."""
    joined = []

    def init(address, **options):
        joined.append((address, "num_cpus" in options, os.environ.get("RAY_AUTH_MODE")))

    ray = types.SimpleNamespace(init=init, shutdown=lambda: None)
    monkeypatch.setattr(parameter_server, "load", lambda *_: ray)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "a:1")  # so that it is restored
    monkeypatch.delenv("RAY_AUTH_MODE")
    with parameter_server.cluster("", None, 2):
        pass
    monkeypatch.delenv("RAY_ADDRESS")
    with parameter_server.cluster("", None, 2):
        pass
    assert joined == [("a:1", False, None), (None, True, "token")]


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_server_are_survived_and_the_log_replays(tmp_path):
    pytest.importorskip("ray")
    run, replayed = tmp_path / "run", tmp_path / "replayed"
    log = run / "updates.jsonl"
    command = [sys.executable, "-m", "jaxtrain", "asynchronous", "experiments.gpt"]
    command += ["--workers", "2", *SMALL, "--run-dir", str(run)]
    lines = lambda: log.read_text().splitlines() if log.exists() else []  # noqa: E731
    others = set(processes())
    with open(tmp_path / "output", "w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
        wait_for(lambda: len(lines()) >= 25 or server.poll() is not None)
        ours = {n: text for n, text in processes().items() if n not in others and "ray" in text}
        workers = [n for n, text in ours.items() if text.startswith("ray::Worker")]
        os.kill(workers[0], signal.SIGKILL)
        wait_for(lambda: len(lines()) >= 60 or server.poll() is not None)
        server.kill()
        assert server.wait() == -signal.SIGKILL
        # Nothing of the cluster stays behind.
        wait_for(lambda: not set(ours) & set(processes()))
        subprocess.run([*command, "--resume"], stdout=output, stderr=output, check=True)
    assert "is lost, and another takes its place" in (tmp_path / "output").read_text()
    rows = [json.loads(line) for line in lines()]
    assert len(rows) == len({row["batch"] for row in rows}) == 150
    assert {row["worker"] for row in rows} == {0, 1}
    assert sorted(row["batch"] for row in rows)[:140] == list(range(140))
    assert max(row["delay"] for row in rows) > 0
    again = [sys.executable, "-m", "experiments.gpt", "--workers.events", str(log), *SMALL]
    subprocess.run([*again, "--run-dir", str(replayed)], check=True)
    losses = [
        {
            row["step"]: row["eval/loss"]
            for row in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
            if "eval/loss" in row
        }
        for folder in (run, replayed)
    ]
    assert losses[0].keys() == losses[1].keys() == {50, 100, 150}
    np.testing.assert_allclose(*(list(found.values()) for found in losses), rtol=1e-5)


def test_what_gradients_from_elsewhere_do_not_go_with_is_refused(tmp_path):
    server = Server(None, AsynchronousOptions("experiments.gpt"), [], tmp_path)
    for made, message in (
        (experiment().with_(policy="fp16"), "a loss scale"),
        (experiment(steps_per_call=2), "several steps per call"),
        (experiment(), "a mesh of 8 devices"),
    ):
        with pytest.raises(ValueError, match=message):
            server.served(made)
    (tmp_path / "updates.jsonl").write_text('{"batch": 0, "seconds": 0.1}\n{"batch": 1, "sec\n')
    with pytest.raises(ValueError, match=r"line 2 of .*updates\.jsonl is damaged"):
        server.batches(2, None).__enter__()
    with pytest.raises(ValueError, match="`run_dir` is left out"):
        run_asynchronous(AsynchronousOptions("experiments.gpt"), ["--steps", "1"])
