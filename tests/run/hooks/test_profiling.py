"""Profiles on demand: the steps that were asked for, and what the journal says of them."""

import collections
import os
import signal
import statistics

import jax
import pytest
from etils import epath

import jaxtrain as jt
from jaxtrain.host import memory
from jaxtrain.run.hooks import profiling
from jaxtrain.run.observe.journal import read_events
from tests.run.test_loop import make_experiment

pytestmark = pytest.mark.usefixtures("traces")


class Signal(jt.Hook):
    def __init__(self, at):
        self.at = at

    def on_step(self, step, state):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


def steps_in(folder):
    """How many steps a trace holds: how often each operation ran, over the devices."""
    (path,) = epath.Path(folder).glob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    names = [event.name for plane in planes for line in plane.lines for event in line.events]
    counts = collections.Counter(x for x in names if "fusion" in x and not x.startswith("end"))
    return statistics.mode(counts.values()) / jax.device_count()


@pytest.mark.slow
def test_steps_are_traced_that_are_named_alarming_and_signalled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profiling, "STEPS", 2)
    monkeypatch.setattr(memory, "device_memory", lambda: {"peak_fraction": 0.9})
    places = iter([False, True, False])  # the second as in a bucket
    monkeypatch.setattr(profiling, "is_remote", lambda path: next(places))
    run = tmp_path / "run"
    options = jt.RunOptions(
        str(run), profile_steps="3:4", log_every=1, alerts=("all:off", "memory=0.5:trace")
    )
    jt.fit(make_experiment(10), options, hooks=[Signal(9)])
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    events = read_events(epath.Path(run))
    traces = [x for x in events if x["event"] == "trace"]
    # The alert of step 1 waits for the trace of the steps that are named.
    assert [(x["first"], x["last"]) for x in traces] == [(3, 4), (5, 6), (10, 10)]
    assert [steps_in(x["folder"]) for x in traces] == [2, 2, 1]
    folder = run / "tensorboard/plugins/profile/steps-3-4"
    assert traces[0]["folder"] == str(folder)
    assert f"steps 3 to 4 are traced in {folder}" in capsys.readouterr().out
    (plan,) = [x["memory"] for x in events if x["event"] == "ready"]
    held = sum(x["parameters"] + x["optimizer_state"] for x in plan["parts"])
    assert 0 < held < plan["peak"]
    jt.fit(make_experiment(2), jt.RunOptions(str(run), overwrite=True))
    assert not folder.exists()


def test_no_evaluation_is_traced(tmp_path, monkeypatch):
    going_on = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: going_on.append(True))
    monkeypatch.setattr(jax.profiler, "stop_trace", going_on.clear)
    monkeypatch.setattr(profiling, "is_remote", lambda path: False)
    evaluated = []
    experiment = make_experiment(12)

    def eval_batches(sharding):
        evaluated.append(bool(going_on))
        return experiment.data.eval_batches[""](sharding)

    options = jt.RunOptions(str(tmp_path), profile_steps="4:7", eval_every=4)
    changed = experiment.with_(eval_batches=eval_batches)
    jt.fit(changed, options, hooks=[Signal(9)])
    traces = [x for x in read_events(epath.Path(tmp_path)) if x["event"] == "trace"]
    assert [(x["first"], x["last"]) for x in traces] == [(5, 7), (10, 12)]
    assert evaluated == [False] * 3


def test_a_trace_is_not_mixed_with_one_by_more_processes_of_the_same_steps(tmp_path):
    left = tmp_path / "tensorboard/plugins/profile/steps-3-4/process-1.xplane.pb"
    experiment = make_experiment(4)

    def eval_batches(sharding):
        if not list(tmp_path.glob("tensorboard/plugins/profile/*")):
            left.parent.mkdir(parents=True)
            left.write_bytes(b"of an earlier attempt")
        return experiment.data.eval_batches[""](sharding)

    options = jt.RunOptions(str(tmp_path), profile_steps="3:4", eval_every=2)
    jt.fit(experiment.with_(eval_batches=eval_batches), options)
    assert not left.exists()
    assert steps_in(left.parent) == 2


def test_steps_that_the_run_has_not_are_refused(tmp_path):
    options = jt.RunOptions(str(tmp_path), profile_steps="13:14")
    with pytest.raises(ValueError, match="`profile_steps` is '13:14', the run has 12 steps"):
        jt.fit(make_experiment(12), options)


@pytest.mark.parametrize("asked", ["20", "5:4", "0:4", "a:b"])
def test_steps_that_cannot_be_traced_are_refused(asked):
    with pytest.raises(ValueError, match=f"`profile_steps` is '{asked}': give FIRST:LAST"):
        jt.RunOptions(profile_steps=asked)
