"""Trials of a study, with objectives that are formulas in place of runs."""

import json
import math
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain.study.lease import Lease, Leases
from jaxtrain.study.space import Dimension, grid

optuna = pytest.importorskip("optuna")
from jaxtrain.study.trials import LEASES, SAMPLERS, Trials, _sampler  # noqa: E402

SPACE = [
    Dimension("optimizer.learning-rate", low=1e-4, high=1.0, log=True),
    Dimension("layers", low=1, high=4),
    Dimension("optimizer.name", ("adamw", "sgd")),
]
POINTS = [
    Dimension("optimizer.learning-rate", (1e-3, 1e-2, 1e-1)),
    Dimension("layers", low=1, high=4, step=1),
    Dimension("optimizer.name", ("adamw", "sgd")),
]


def loss(values):
    far = math.log10(values["optimizer.learning-rate"]) + 2
    return (
        far**2 + 0.1 * (values["layers"] - 3) ** 2 + 0.2 * (values.get("optimizer.name") == "sgd")
    )


def open_trials(folder, space=SPACE, **given):
    (folder / LEASES).mkdir(exist_ok=True)
    given = {"name": "s", "mode": "min", "count": 24, "token": "here"} | given
    return Trials(folder, space, **given)


def do(trials):
    """Does trials until there are none, and returns their values in order."""
    found = []
    while (claim := trials.claim()) is not None:
        diverges = claim.values["optimizer.learning-rate"] > 0.3
        found.append(trials.tell(claim.number, [math.nan if diverges else loss(claim.values)]))
    return found


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if "gp" not in name])
def test_samplers_come_near_the_best(sampler, tmp_path):
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    trials = open_trials(tmp_path, POINTS if sampler == "grid" else SPACE, sampler=sampler)
    losses = do(trials)
    assert len(losses) == 24
    assert trials.is_over()
    assert min(losses) < (1e-9 if sampler == "grid" else 0.6)
    if sampler == "grid":  # every point once
        told = [tuple(trial.params.items()) for trial in trials.all()]
        assert sorted(told) == sorted(tuple(point.items()) for point in grid(POINTS))
    else:  # what has been drawn is not drawn again by whoever goes on
        more = open_trials(tmp_path, sampler=sampler, count=30)
        do(more)
        assert len({str(trial.params) for trial in more.all()}) == 30


def test_tpe_draws_the_same_trials_with_any_release_of_its_library():
    """Trial 30 of three workers, as Optuna 4.9.0 and 5.0.0 both draw it without `multivariate`."""
    study, running = optuna.create_study(sampler=_sampler("tpe", 3)), []
    for _ in range(30):
        trial = study.ask()
        rate, layers = trial.suggest_float("a", 1e-4, 1e-1, log=True), trial.suggest_int("b", 1, 9)
        name = trial.suggest_categorical("c", ["x", "y"])
        running.append((trial, (rate - 0.01) ** 2 * 1e4 + (layers - 4) ** 2 + (name == "x")))
        if len(running) > 2:
            study.tell(*running.pop(0))
    assert (rate, layers, name) == (pytest.approx(0.008425864275612467), 6, "y")


HANG = """
import sys, time
from jaxtrain.study.lease import Lease
from tests.study.test_trials import LEASES, open_trials
import pathlib
folder = pathlib.Path(sys.argv[1])
with Lease(folder / LEASES) as lease:
    claim = open_trials(folder, token=lease.token).claim()
    print(claim.number, dict(claim.values), flush=True)
    time.sleep(600)
"""


def test_a_killed_process_loses_no_trial_and_doubles_none(tmp_path):
    """Killed with a trial of its own, and the journal cut off as by a kill within a write."""
    (tmp_path / LEASES).mkdir()
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", HANG, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        number, _, told = process.stdout.readline().partition(" ")
        first = open_trials(tmp_path, count=8, seed=1).claim()
        assert (int(number), first.number) == (0, 1)  # what the other has is not taken
        process.send_signal(signal.SIGKILL)
    journal = tmp_path / "journal.log"
    os.truncate(journal, journal.stat().st_size - 20)
    trials = open_trials(tmp_path, count=8, seed=1)
    again = trials.claim()
    assert again.number == 0
    assert str(dict(again.values)) == told.strip()
    trials.tell(0, [loss(again.values)])
    trials.tell(1, [loss(first.values)])
    do(trials)
    done = open_trials(tmp_path, count=8).all()
    assert [(trial.number, trial.state.name) for trial in done] == [
        (i, "COMPLETE") for i in range(8)
    ]
    assert all(isinstance(json.loads(line), dict) for line in journal.read_bytes().splitlines())


WORK = """
import pathlib, sys, time
from jaxtrain.study.lease import Lease
from tests.study.test_trials import LEASES, do, open_trials
folder = pathlib.Path(sys.argv[1])
with Lease(folder / LEASES) as lease:
    trials = open_trials(folder, token=lease.token, storage=sys.argv[2], seed=int(sys.argv[3]))
    print("ready", flush=True)
    if sys.argv[3] == "2":
        print(trials.claim().number, flush=True)
        time.sleep(600)
    do(trials)
"""


@pytest.fixture
def postgresql(tmp_path):
    """The URL of a PostgreSQL server on loopback that lives as long as the test."""
    pytest.importorskip("psycopg")
    if shutil.which("initdb") is None:
        pytest.skip("PostgreSQL's initdb and postgres are not installed")
    # The server refuses to run as root.
    own = {"user": "postgres"} if os.geteuid() == 0 else {}
    home, port = tmp_path / "postgresql", free_port()
    home.mkdir()
    if own:
        shutil.chown(home, "postgres")
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
    made = ["initdb", "-D", home / "data", "-U", "jaxtrain", "--auth", "trust", "--no-sync"]
    subprocess.run(made, check=True, capture_output=True, **own)
    command = ["postgres", "-D", home / "data", "-p", str(port), "-k", home, "-F"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **own) as server:
        assert any("ready to accept" in line for line in server.stderr)
        yield f"postgresql+psycopg://jaxtrain@127.0.0.1:{port}/postgres"
        server.send_signal(signal.SIGINT)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql+psycopg://127.0.0.1:1/none", "connection failed"),
        ("postgresql+pg8000://127.0.0.1/none", "Failed to import DB access module"),
        ("none", "Could not parse SQLAlchemy URL"),
        ("sqlite:///nowhere/x.db", "unable to open database file"),
    ],
)
def test_a_database_that_cannot_be_opened_is_said(url, why, tmp_path):
    pytest.importorskip("psycopg")
    with pytest.raises(ValueError, match=f"the study's storage cannot be opened: .*{why}"):
        open_trials(tmp_path, storage=url)


@pytest.mark.slow
def test_processes_share_a_postgresql(tmp_path, postgresql):
    """Three processes draw trials from one database, of which one is killed with a trial."""
    (tmp_path / LEASES).mkdir()
    open_trials(tmp_path, storage=postgresql, token="first")  # makes the tables
    root = pathlib.Path(__file__).parents[2]
    commands = [[sys.executable, "-c", WORK, str(tmp_path), postgresql, str(i)] for i in range(3)]
    workers = [
        subprocess.Popen(each, cwd=root, stdout=subprocess.PIPE, text=True) for each in commands
    ]
    *others, killed = workers
    assert killed.stdout.readline() == "ready\n"
    number = int(killed.stdout.readline())
    killed.kill()
    killed.communicate()
    assert [other.communicate(timeout=120)[1] for other in others] == [None, None]
    assert [other.returncode for other in others] == [0, 0]
    trials = open_trials(tmp_path, storage=postgresql)
    do(trials)  # where both others had ended before the third was killed
    assert trials.is_over()
    assert [trial.number for trial in trials.all()] == list(range(24))
    for trial in trials.all():
        diverges = trial.params["optimizer.learning-rate"] > 0.3
        assert trial.value == (math.inf if diverges else loss(trial.params))
    owner = trials.all()[number].user_attrs["owner"]
    told = json.loads((tmp_path / LEASES / f"{owner}.json").read_text()) if owner != "here" else {}
    assert told.get("pid") != killed.pid
    assert not (tmp_path / "journal.log").exists()


def test_a_trial_is_told_by_its_owner_alone(tmp_path):
    here = open_trials(tmp_path)
    claim = here.claim()
    (tmp_path / LEASES / "here.json").write_text('{"ended": true}')
    there = open_trials(tmp_path, token="there")
    assert there.claim().values == claim.values
    assert here.tell(claim.number, [0.0]) is None  # taken for dead, it comes too late
    assert there.tell(claim.number, [math.nan, 1.0]) == math.inf
    assert there.all()[0].user_attrs["values"] == [math.inf, 1.0]


def test_a_lease_that_no_longer_changes_is_of_a_dead_process(tmp_path):
    now = [0.0]
    leases = Leases(tmp_path, clock=lambda: now[0])
    with Lease(tmp_path) as lease:
        assert not leases.is_dead(lease.token)
    assert leases.is_dead(lease.token)
    other = tmp_path / "other.json"
    for beat in (1, 2):  # on a host whose clock nobody knows
        other.write_text(json.dumps({"host": "elsewhere", "pid": 1, "beat": beat}))
        assert not leases.is_dead("other")
        now[0] += 59
        assert not leases.is_dead("other")
    now[0] += 2
    assert leases.is_dead("other")


def test_numbers_of_processes_are_compared_within_a_container(tmp_path, monkeypatch):
    leases = Leases(tmp_path)
    with Lease(tmp_path) as lease:
        path = tmp_path / f"{lease.token}.json"
        gone = json.loads(path.read_text()) | {"pid": 2**22 + 1}  # above the largest
        path.write_text(json.dumps(gone))
        assert leases.is_dead(lease.token)
        # Another container may have the same host name, and counts its processes by itself.
        monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
        assert not leases.is_dead(lease.token)


def test_pruners_end_what_is_worse_than_the_rest(tmp_path):
    for pruner in ("halving", "hyperband"):
        folder = tmp_path / pruner
        folder.mkdir()
        trials = open_trials(folder, count=18, pruner=pruner, resources=(1, 9))
        steps = 0
        while (claim := trials.claim()) is not None:
            for step in range(1, 10):
                steps += 1
                if trials.report(claim.number, step, loss(claim.values) + 1 / step):
                    trials.prune(claim.number)
                    break
            else:
                trials.tell(claim.number, [loss(claim.values)])
        states = [trial.state.name for trial in trials.all()]
        assert states.count("PRUNED") >= 5, pruner
        assert steps < 0.75 * 18 * 9
        best = min(trials.all(), key=lambda trial: loss(trial.params))
        assert best.state.name == "COMPLETE"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["gp", "gp-ucb"])
def test_gaussian_processes_come_nearest(sampler, tmp_path):
    trials = open_trials(tmp_path, SPACE, sampler=sampler, count=20)
    losses = do(trials)
    assert min(losses) < 0.05
    assert np.isinf(losses).sum() < 6  # where runs diverge is learned
