"""Workers of a study, whose runs are programs of a few lines that write what a run writes."""

import json
import os
import pathlib
import sys

import pytest

optuna = pytest.importorskip("optuna")
from jaxtrain.study import report  # noqa: E402
from jaxtrain.study.space import Dimension  # noqa: E402
from jaxtrain.study.trials import LEASES, Trials  # noqa: E402
from jaxtrain.study.workers import Runs, check_devices, work  # noqa: E402

# Logs a loss that falls to --rate, from the step after the last that its folder has.
RUN = """
import json, os, pathlib, sys, time
given = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
(folder / "owner.json").write_text("{}")
rate, log = float(given["rate"]), folder / "log.jsonl"
with open(folder / "starts", "a") as file:
    file.write(f"{os.getpid()} {','.join(map(str, sorted(os.sched_getaffinity(0))))}\\n")
first = len(log.read_text().splitlines()) if log.exists() else 0
if given.get("kind") == "refused":
    sys.exit("error: nothing will do")
for step in range(first + 1, 6):
    if given.get("kind") == "killed" and step == 3 and first == 0:
        os.kill(os.getpid(), 9)
    if given.get("kind") == "waits" and step == 3 and first == 0:
        time.sleep(600)
    with open(log, "a") as file:
        file.write(json.dumps({"step": step, "eval/loss": rate + 1 / step}) + "\\n")
    time.sleep(0.02)
sys.exit(78 if given.get("kind") == "diverged" else 0)
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.study.workers.POLL_SECONDS", 0.02)
    monkeypatch.setattr("jaxtrain.host.exit_codes.random.uniform", lambda low, high: 0.0)
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / LEASES).mkdir()
    said = []

    def do(values, workers=1, kinds=("well",), seeds=(0,), stop=lambda: False, **given):
        space = [Dimension("rate", tuple(values)), Dimension("kind", tuple(kinds))]
        given = {"name": "s", "mode": "min", "count": None, "token": "here"} | given
        trials = Trials(tmp_path, space, sampler="grid", **given)
        runs = Runs(
            tmp_path,
            [sys.executable, str(tmp_path / "run.py")],
            lambda values: [f"--{name}={value}" for name, value in values.items()],
            "eval/loss",
            "min",
            False,
            seeds,
        )
        environ = {"JAX_PLATFORMS": "cpu"} | os.environ
        done = work(trials, runs, workers=workers, environ=environ, stop=stop, say=said.append)
        return done, trials, runs, said

    return do


def starts(runs, trial, seed=0):
    return (runs.run_dir(trial, seed) / "starts").read_text().splitlines()


def test_trials_are_run_folders_with_cores_of_their_own(study):
    done, trials, runs, said = study([0.1, 0.2, 0.3], workers=2)
    assert done
    values = {trial.params["rate"]: trial.value for trial in trials.all()}
    assert values == pytest.approx({0.1: 0.3, 0.2: 0.4, 0.3: 0.5})
    used = [set(starts(runs, number)[0].split()[1].split(",")) for number in range(3)]
    there = set(map(str, os.sched_getaffinity(0)))
    assert (
        all(len(each) in (len(there) // 2, (len(there) + 1) // 2) for each in used)
        or len(there) == 1
    )
    best = report.best_of(trials.all(), "min")
    assert report.command_of(runs, best)[2:] == ["--rate=0.1", "--kind=well"]
    assert len(said) == 3
    page = report.make_page("s", trials.all(), runs)
    assert "--rate=0.1 --kind=well</pre>" in page
    assert page.count('class="line') >= 3 + 3 + 1  # curves, flags of each trial, the best so far
    assert "nan" not in page


def test_a_killed_run_goes_on_and_a_refused_one_fails(study):
    _, trials, runs, said = study([0.1], kinds=["killed", "refused", "diverged"])
    found = {trial.params["kind"]: trial for trial in trials.all()}
    assert found["killed"].value == pytest.approx(0.3)
    assert len(starts(runs, found["killed"].number)) == 2
    assert found["refused"].state.name == "FAIL"
    assert found["refused"].user_attrs["why"] == "status 1: error: nothing will do"
    assert found["diverged"].value == float("inf")
    assert sum("started again" in line for line in said) == 1


def test_the_first_trials_that_all_fail_end_a_study(study):
    with pytest.raises(ValueError, match=r"first 3 trials have all failed.*nothing will do"):
        study([0.1, 0.2, 0.3, 0.4], kinds=["refused"])


def test_a_pruned_trial_frees_its_worker_at_once(study):
    rates = [9.0, 8.0, 7.0, 0.1, 0.2, 0.3]
    done, trials, runs, _ = study(rates, pruner="halving", resources=(1, 5))
    pruned = [trial for trial in trials.all() if trial.state.name == "PRUNED"]
    assert done
    assert pruned
    for trial in pruned:
        folder = runs.run_dir(trial.number, 0)
        told = json.loads((folder / "stopped.json").read_text())
        assert told["step"] == max(trial.intermediate_values)
        pid = int(starts(runs, trial.number)[0].split()[0])
        assert not pathlib.Path(f"/proc/{pid}").exists()


def test_an_interrupted_study_goes_on_where_it_was(study, tmp_path):
    there = tmp_path / "trial-0" / "log.jsonl"
    done, trials, runs, _ = study([0.1, 0.2], kinds=["waits"], stop=there.exists)
    assert not done
    pid = int(starts(runs, 0)[0].split()[0])
    assert not pathlib.Path(f"/proc/{pid}").exists()
    (tmp_path / LEASES / "here.json").write_text('{"ended": true}')
    (tmp_path / "trial-1").mkdir()  # which waits no more
    (tmp_path / "trial-1" / "log.jsonl").write_text('{"step": 1, "eval/loss": 9}\n')
    done, trials, runs, _ = study([0.1, 0.2], kinds=["waits"], token="there")
    assert done
    assert [trial.state.name for trial in trials.all()] == ["COMPLETE", "COMPLETE"]
    assert len(starts(runs, 0)) == 2


def test_a_gpu_is_not_shared_unseen_by_workers_or_their_processes():
    four, one = ({"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1,2,3", "0"))
    check_devices(2, 2, four)
    with pytest.raises(ValueError, match="4 GPUs cannot be dealt evenly to 6 processes"):
        check_devices(3, 2, four)
    with pytest.raises(ValueError, match="`processes` is 2 and there is one GPU"):
        check_devices(1, 2, one)
    with pytest.raises(ValueError, match="`workers` is 2 and there is one GPU"):
        check_devices(2, 1, one)
    check_devices(2, 2, one | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.22"})


def test_repeats_are_runs_of_their_own_and_their_mean_counts(study):
    _, trials, runs, _ = study([0.1, 0.2], seeds=(3, 4))
    (first, _) = trials.all()
    assert first.user_attrs["values"] == pytest.approx([first.params["rate"] + 0.2] * 2)
    assert [path.name for path in sorted(runs.folder.glob("trial-0*"))] == [
        "trial-0-seed-3",
        "trial-0-seed-4",
    ]
