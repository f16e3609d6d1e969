"""Actors in processes of their own, of which one is killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

import jaxtrain as jt
from experiments import actors
from jaxtrain.methods.population import Population
from tests.run.test_parameter_server import processes, wait_for


@pytest.mark.slow
def test_a_killed_actor_is_survived_and_the_run_learns_and_resumes(tmp_path):
    pytest.importorskip("ray")
    run, output = tmp_path / "run", tmp_path / "output"
    log = run / "log.jsonl"
    command = [sys.executable, "-m", "experiments.actors", "--run-dir", str(run), "--steps", "150"]
    command += ["--save-every", "50", "--log-every", "1"]
    others = set(processes())
    with open(output, "w") as file:
        learner = subprocess.Popen(command, stdout=file, stderr=file)
        steps = lambda: log.exists() and len(log.read_text().splitlines())  # noqa: E731
        wait_for(lambda: steps() > 5 or learner.poll() is not None)
        ours = {n: text for n, text in processes().items() if n not in others and "ray" in text}
        players = [n for n, text in ours.items() if text.startswith("ray::Player")]
        os.kill(players[0], signal.SIGKILL)
        assert learner.wait(240) == 0
        subprocess.run([*command, "--resume", "--steps", "155"], stdout=file, stderr=file)
        # Nothing of the cluster stays behind.
        wait_for(lambda: not set(ours) & set(processes()))
    assert "is lost, and another takes its place" in output.read_text()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    delays = [row["train/delay"] for row in rows if "train/delay" in row]
    assert len(delays) == 150
    assert 0 < max(delays) <= 16
    assert max(row.get("eval/return", 0) for row in rows) >= 495


def test_a_population_is_refused():
    config = actors.Config(population=Population(size=2))
    with pytest.raises(ValueError, match="`population` is given, and other processes play"):
        actors.build(config)
    assert isinstance(actors.build(actors.Config()), jt.Experiment)
